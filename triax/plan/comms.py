"""How long does a collective take on the links that its peers span?

A group of ranks is described by how many of them share a domain (server or rack) and how many domains it spans, which
follows from the degrees and the order of the axes. Times are of one collective alone; what runs under compute is
``triax.plan.step``'s business.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from triax.plan.candidates import Candidates, Integers, Numbers
from triax.plan.hardware import Machine
from triax.spec.layout import Axis


@dataclass(frozen=True, eq=False)
class Group:
    """Peers: ``inside`` of them in each of ``domains``."""

    inside: Numbers
    domains: Numbers

    @property
    def size(self) -> Numbers:
        """All ranks of the group."""
        return self.inside * self.domains


def group(candidates: Candidates, axes: Sequence[Axis], machine: Machine) -> Group:
    """Return the peers that differ along ``axes`` alone.

    Along each axis, peers are ``stride`` ranks apart, so that a domain of D cards holds D / stride of them.
    """
    size = np.ones(len(candidates))
    inside = np.ones(len(candidates))
    for axis in axes:
        degree = candidates.degree(axis)
        size = size * degree
        inside = inside * np.clip(machine.domain // candidates.stride(axis), 1, degree)
    inside = np.minimum(inside, size)
    return Group(inside, size / inside)


def split_group(size: Integers, stride: Integers, machine: Machine) -> Group:
    """Return the peers of a group of ``size`` whose neighbours are ``stride`` ranks apart."""
    inside = np.minimum(np.clip(machine.domain // stride, 1, None), size).astype(np.float64)
    return Group(inside, size / inside)


def all_gather_s(machine: Machine, peers: Group, whole_bytes: Numbers) -> Numbers:
    """Return seconds to gather ``whole_bytes`` in all (or to reduce-scatter them): rings inside and across at once.

    Each rank receives all but its own part. Inside a domain at the bus bandwidth; from outside, each of the peers in a
    domain fetches its share over its own network card, so a group with g peers in a domain has g of them.
    """
    inside = (peers.inside - 1) / peers.inside * whole_bytes / machine.inside_all_gather
    return np.maximum(inside, _across(machine, peers, whole_bytes)) + _ring_latency(machine, peers)


def all_reduce_s(machine: Machine, peers: Group, message_bytes: Numbers) -> Numbers:
    """Return seconds to sum ``message_bytes`` over ``peers``: 2 (n-1)/n of them pass each card.

    Across domains the sum is of the parts that a reduce-scatter inside left (hierarchical); with reduction in the
    network each byte crosses once.
    """
    inside = 2 * (peers.inside - 1) / peers.inside * message_bytes / machine.inside_all_reduce
    times = 1.0 if machine.has_network_reduction else 2.0
    across = times * _across(machine, peers, message_bytes)
    hops = machine.across_latency_s * 2 * np.log2(np.maximum(peers.domains, 1))
    start = np.where(peers.size > 1, machine.inside_latency_s, 0.0)
    return np.maximum(inside, across) + hops + start


def all_to_all_s(machine: Machine, peers: Group, own_bytes: Numbers) -> Numbers:
    """Return seconds in which each rank sends ``own_bytes`` evenly to all ``peers``, itself included."""
    size = peers.size
    inside = (peers.inside - 1) / size * own_bytes / machine.inside_all_to_all
    outside = (size - peers.inside) / size * own_bytes
    across = outside * machine.oversubscription / machine.card_network_bytes_per_s
    start = np.where(size > 1, machine.inside_latency_s, 0.0) + np.where(peers.domains > 1, machine.across_latency_s, 0)
    seconds: Numbers = inside + across + start
    return seconds


def forwarded_s(machine: Machine, peers: Group, rank_bytes: Numbers, domain_bytes: Numbers) -> Numbers:
    """Return seconds of an all-to-all that crosses once to each domain and is passed on to the ranks there meanwhile.

    A rank sends ``rank_bytes`` to all ranks of ``peers`` together, where each gets what it needs, and would send
    ``domain_bytes`` if each domain were one rank (DeepEP's and HybridEP's normal kernels; arXiv:2412.19437, 3.2.2).
    """
    inside = (peers.inside - 1) / peers.inside * rank_bytes / machine.inside_all_to_all
    outside = (peers.domains - 1) / peers.domains * domain_bytes
    across = outside * machine.oversubscription / machine.card_network_bytes_per_s
    start = np.where(peers.size > 1, machine.inside_latency_s, 0.0) + np.where(
        peers.domains > 1, machine.across_latency_s, 0
    )
    seconds: Numbers = np.maximum(inside, across) + start
    return seconds


def send_s(machine: Machine, stride: Integers, message_bytes: Numbers) -> Numbers:
    """Return seconds to send ``message_bytes`` to the rank ``stride`` on, as all ranks of a server do at once."""
    crosses = stride >= machine.domain
    rate = np.where(crosses, machine.card_network_bytes_per_s, machine.inside_send)
    return message_bytes / rate + np.where(crosses, machine.across_latency_s, machine.inside_latency_s)


def _across(machine: Machine, peers: Group, whole_bytes: Numbers) -> Numbers:
    """Seconds on the network: the peers of a domain fetch (k-1)/k of the whole between them."""
    rate = machine.card_network_bytes_per_s * peers.inside
    leaves = np.where(
        peers.domains * machine.domain > machine.servers_per_leaf * machine.cards_per_server,
        machine.oversubscription,
        1.0,
    )
    seconds: Numbers = (peers.domains - 1) / peers.domains * whole_bytes / rate * leaves
    return seconds


def _ring_latency(machine: Machine, peers: Group) -> Numbers:
    """A ring passes every domain; large groups use trees of logarithmic depth once that is shorter."""
    hops = np.minimum(peers.domains - 1, 4 * np.log2(np.maximum(peers.domains, 1)))
    seconds: Numbers = hops * machine.across_latency_s + np.where(peers.size > 1, machine.inside_latency_s, 0.0)
    return seconds
