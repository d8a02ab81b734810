"""Does the catalogue know its cards, say where numbers come from, and let the user's numbers win?"""

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import triax.plan.catalogue
from triax.errors import BadInput
from triax.plan.catalogue import (
    assumed_numbers,
    card,
    card_called,
    card_names,
    machine,
    network_names,
    usd_per_card_hour,
)
from triax.plan.compute import gemm_s
from triax.spec.cluster import Cluster, parse_cluster

FOLDER = Path(triax.plan.catalogue.__file__).parent


def numbers(said: dict[str, Any]) -> list[list[Any]]:
    """Every [value, source] pair of a table, however deep."""
    found = []
    for value in said.values():
        if isinstance(value, dict):
            found += numbers(value)
        elif (
            isinstance(value, list) and len(value) == 2 and isinstance(value[1], str) and not isinstance(value[0], str)
        ):
            found.append(value)
    return found


@pytest.mark.parametrize("name", ["cards", "links", "networks"])
def test_every_number_has_a_source_that_is_listed_with_its_year(name: str) -> None:
    said = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    sources = said.pop("sources")
    pairs = numbers(said)
    assert len(pairs) > 20
    assert {source for _, source in pairs} == set(sources)
    assert all(key == "assumed" or re.search(r"20[12]\d", text) for key, text in sources.items())


def test_every_card_has_links_a_network_and_a_price() -> None:
    for name in card_names():
        made = machine(parse_cluster(f"2x4x{name}"))
        assert made.card == card(name)
        assert made.cards == 8
        assert made.card.peak("bf16") > 0
        assert made.server_bytes_per_s > 0
        usd, is_assumed = usd_per_card_hour(Cluster(device=name))
        assert usd > 0
        assert is_assumed


@pytest.mark.parametrize(
    ("card_name", "peak", "memory_gib"),
    [("a100", 312e12, 79.15), ("h100", 989e12, 79.1), ("h200", 989e12, 139.7), ("b200", 2250e12, 178.35)],
)
def test_known_numbers(card_name: str, peak: float, memory_gib: float) -> None:
    assert card(card_name).peak("bf16") == peak
    assert card(card_name).memory_bytes / 2**30 == pytest.approx(memory_gib, rel=1e-3)


def test_an_old_card_computes_in_what_it_has() -> None:
    v100 = card("v100")
    assert v100.peak("bf16") == v100.peak("fp16") == v100.peak("fp8") == 125e12


def test_what_was_measured_of_a_card_wins() -> None:
    """The rate of large products is what they take; of a peak that is said as well it is another part."""
    size = np.array([4096.0])

    def rate(cluster: Cluster) -> float:
        made = machine(cluster).card
        return float(2 * 4096.0**3 / gemm_s(size, size, size, made, "fp32")[0])

    measured = Cluster(matmul_flops_per_s=2e11, memory_bytes_per_s=3e10)
    assert machine(measured).card.memory_bytes_per_s == 3e10
    assert rate(measured) == pytest.approx(2e11, rel=0.01)
    said = measured.model_copy(update={"peak_flops": 5e11})
    assert rate(said) == pytest.approx(2e11, rel=0.01)
    assert machine(said).card.peak("bf16") == pytest.approx(5e11)
    for key in ("matmul_flops_per_s", "memory_bytes_per_s"):
        with pytest.raises(BadInput, match=key):
            machine(Cluster(**{key: 1e-3}))


@pytest.mark.parametrize(
    ("said", "meant"), [("h10", "h100"), ("rtx4900", "rtx-4090"), ("mi300", "mi300x"), ("b20", "b200")]
)
def test_an_unknown_card_is_refused_with_the_nearest(said: str, meant: str) -> None:
    with pytest.raises(BadInput, match=f"did you mean .*{meant}"):
        card(said)


def test_an_unknown_network_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"no network 'infiniband'.*infiniband-ndr"):
        machine(Cluster(servers=2, cards_per_server=8, device="h100", network="infiniband"))


def test_a_card_of_ones_own_needs_memory_and_peak() -> None:
    own = Cluster(device="tpu-v9", memory_bytes=10**11, peak_flops=1e15)
    assert machine(own).card.peak("bf16") == 1e15
    assert machine(own).card.memory_bytes == 10**11
    with pytest.raises(BadInput, match="no card 'tpu-v9'"):
        machine(Cluster(device="tpu-v9", memory_bytes=10**11))


def test_what_the_user_says_wins() -> None:
    plain = Cluster(servers=4, cards_per_server=8, device="h100")
    said = plain.model_copy(
        update={
            "memory_bytes": 10**10, "peak_flops": 494.5e12, "inside_bytes_per_s": 185e9, "across_bytes_per_s": 1e9,
            "oversubscription": 3.0, "usd_per_card_hour": 1.25,
        }
    )  # fmt: skip
    before, after = machine(plain), machine(said)
    assert after.card.memory_bytes == 10**10
    assert after.card.peak("bf16") == 494.5e12
    assert after.card.peak("fp8") == pytest.approx(before.card.peak("fp8") / 2)
    assert after.inside_send == 185e9
    assert after.inside_all_reduce == pytest.approx(before.inside_all_reduce * 185e9 / before.inside_send)
    assert (after.server_bytes_per_s, after.oversubscription) == (1e9, 3.0)
    assert usd_per_card_hour(said) == (1.25, False)


@pytest.mark.parametrize("name", network_names())
def test_networks_are_chosen_by_name(name: str) -> None:
    assert machine(Cluster(servers=2, cards_per_server=8, device="h100", network=name)).server_bytes_per_s > 0


def test_a_rack_is_one_domain_and_a_job_of_odd_size_uses_segments_of_it() -> None:
    domains = [machine(parse_cluster(f"{servers}x4xgb200")).domain for servers in (2, 18, 36, 64)]
    assert domains == [8, 72, 72, 64]


def test_a_server_has_no_more_cards_than_can_be() -> None:
    with pytest.raises(BadInput, match=r"server of h100 has at most 8 cards; write 4x8xh100"):
        machine(parse_cluster("2x16xh100"))
    assert machine(Cluster(servers=2, cards_per_server=16, device="h100", domain_cards=16)).domain == 16
    with pytest.raises(BadInput, match="made of whole servers"):
        machine(Cluster(servers=2, cards_per_server=8, device="h100", domain_cards=12))


def test_what_is_assumed_is_said() -> None:
    assert "memory_bytes (card)" in assumed_numbers("cpu")
    assert not [each for each in assumed_numbers("h100") if "(card)" in each]


@given(st.text(max_size=60))
def test_any_name_is_a_card_or_is_refused_in_one_sentence(name: str) -> None:
    known = {each.lower() for each in card_names()}
    try:
        assert card(name).name in known
    except BadInput as refusal:
        told = str(refusal)
    else:
        return
    assert "\n" not in told.replace(repr(name[:60]), "")


@pytest.mark.parametrize(
    ("said", "meant"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA A100-SXM4-40GB", "a100-40"),
     ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
     ("Tesla V100-SXM2-16GB", "v100-16"), ("NVIDIA GB200", "gb200"), ("NVIDIA L40S", "l40s"),
     ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"), ("NVIDIA GeForce GTX 1080", None), ("", None)],
)  # fmt: skip
def test_cards_are_known_by_what_their_driver_calls_them(said: str, meant: str | None) -> None:
    assert card_called(said) == meant


@pytest.mark.parametrize(
    ("key", "value"),
    [("inside_bytes_per_s", 1e-300), ("across_bytes_per_s", 1e300), ("peak_flops", 1.0), ("memory_bytes", 1),
     ("usd_per_card_hour", 1e300)],
)  # fmt: skip
def test_numbers_that_are_no_machines_are_refused(key: str, value: float) -> None:
    with pytest.raises(BadInput, match=f"{key} = .* of the cluster cannot be: use"):
        machine(Cluster(device="h100").model_copy(update={key: value}))
