"""Do collectives take what their peers' links allow?"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.plan.candidates import ORDERS, Candidates
from triax.plan.catalogue import machine
from triax.plan.comms import Group, all_gather_s, all_reduce_s, all_to_all_s, forwarded_s, group, send_s
from triax.plan.hardware import Machine
from triax.spec.cluster import parse_cluster
from triax.spec.layout import AXES, Axis, Layout

H100 = machine(parse_cluster("16x8xh100"))
SIZES = np.array([1e6, 1e9])


def peers(inside: int, domains: int) -> Group:
    return Group(np.array([float(inside)]), np.array([float(domains)]))


@given(
    degrees=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 5).filter(lambda some: 8 <= np.prod(some) <= 512),
    order=st.sampled_from(ORDERS),
    axis=st.sampled_from(AXES),
)
def test_groups_are_those_of_the_rank_grid(degrees: tuple[int, ...], order: tuple[Axis, ...], axis: Axis) -> None:
    layout = Layout(**dict(zip(AXES, degrees, strict=True)), order=order)
    found = group(Candidates.from_layouts([layout]), (axis,), H100)
    servers = [rank // 8 for rank in layout.peers(0, axis)]
    assert (found.inside[0], found.domains[0]) == (servers.count(0), len(set(servers)))


def test_one_rank_sends_nothing() -> None:
    for collective in (all_gather_s, all_reduce_s, all_to_all_s):
        assert collective(H100, peers(1, 1), SIZES) == pytest.approx(0.0)


def test_inside_a_server_the_bus_bandwidth_is_reached() -> None:
    """nccl-tests: bus bandwidth is 2 (n-1)/n S / t of an all-reduce and (n-1)/n S / t of an all-gather."""
    seconds = all_reduce_s(H100, peers(8, 1), np.array([4e9]))[0]
    assert 2 * 7 / 8 * 4e9 / seconds == pytest.approx(H100.inside_all_reduce, rel=0.01)
    seconds = all_gather_s(H100, peers(8, 1), np.array([4e9]))[0]
    assert 7 / 8 * 4e9 / seconds == pytest.approx(H100.inside_all_gather, rel=0.01)


def test_across_servers_every_card_brings_its_network_card() -> None:
    """Four peers a server fetch a quarter each; one peer a server fetches all through its own."""
    whole = np.array([8e9])
    together, alone = all_gather_s(H100, peers(4, 16), whole)[0], all_gather_s(H100, peers(1, 16), whole)[0]
    assert alone / together == pytest.approx(4, rel=0.02)
    assert alone == pytest.approx(15 / 16 * 8e9 / H100.card_network_bytes_per_s, rel=0.01)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 8, 16]), st.floats(1e3, 1e10))
def test_more_bytes_and_more_servers_never_take_less(inside: int, domains: int, size: float) -> None:
    for collective in (all_gather_s, all_reduce_s, all_to_all_s):
        one = collective(H100, peers(inside, domains), np.array([size]))[0]
        assert collective(H100, peers(inside, domains), np.array([2 * size]))[0] >= one
        assert collective(H100, peers(inside, 2 * domains), np.array([size]))[0] >= one * (1 - 1e-12)


def test_reduction_in_the_network_halves_what_crosses() -> None:
    sharp = Machine(**{name: getattr(H100, name) for name in H100.__slots__} | {"has_network_reduction": True})
    ring, reduced = (all_reduce_s(each, peers(1, 16), np.array([8e9]))[0] for each in (H100, sharp))
    assert ring / reduced == pytest.approx(2, rel=0.01)


@given(st.sampled_from([2, 4, 8]), st.sampled_from([2, 8, 16]), st.floats(1e6, 1e10))
def test_what_is_passed_on_inside_never_takes_longer_than_sending_all(inside: int, domains: int, size: float) -> None:
    among, whole = peers(inside, domains), np.array([size])
    sent_all = all_to_all_s(H100, among, whole)[0]
    assert forwarded_s(H100, among, whole, whole)[0] <= sent_all * 1.001
    assert forwarded_s(H100, among, whole, whole / 2)[0] <= forwarded_s(H100, among, whole, whole)[0]


def test_a_send_across_servers_is_slower() -> None:
    inside, across = send_s(H100, np.array([4, 8]), np.array([1e8, 1e8]))
    assert across > 3 * inside
