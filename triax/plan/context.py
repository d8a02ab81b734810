"""What does it cost to cut sequences over ranks: on the links, in attention, and in memory while it works?

triax has three ways (``triax.parallel.context``), each with its own traffic; of other frameworks keys and values pass
each rank, as a ring or gathered, hidden by attention. All arrays have one entry a layout, all times are of one layer of
attention and one microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from triax.plan.candidates import CP_METHODS, FULL, SELECTIVE, Candidates, Numbers
from triax.plan.comms import Group, all_gather_s, all_to_all_s, group
from triax.plan.engine import Engine
from triax.plan.hardware import Card, Machine
from triax.plan.network import Network
from triax.plan.workload import Workload

Flags = NDArray[np.bool_]

_RING: Final = CP_METHODS.index("ring")
_EXCHANGES: Final = CP_METHODS.index("all_to_all")

TILE_BYTES: Final = (44.0, 84.0)
"""Bytes moved on a card for each query head, query and key, forward and backward, where attention to ranges of keys is
operator by operator in fp32 (``triax.nn.ranges``, counted): a product written (4), scaled, lowered, raised to powers (8
each), its maximum and sum read (4 each), cast and read as a factor (8); in the backward powers made again (28), two
products written (8), three passes of gradients (28), four factors cast or read (20)."""
TILE_OF_FUSED: Final = 1.25
"""Time of the same over that of torch's fused attention on a processor, whose caches hold a tile
(``benchmarks/context.py``, one core of a server, 2026)."""
TILE_NUMBERS: Final = 1 << 27
"""Scores at once on a card, and at most ``TILE_ROWS`` queries of them."""
TILE_ROWS: Final = 128


def attends_by_parts(engine: Engine, c: Candidates) -> Flags:
    """Return where attention is to ranges of keys, tile by tile, and not one fused kernel's."""
    flags: Flags = (engine.family == "triax") & (c.cp > 1) & (c.cp_method != _EXCHANGES)
    return flags


def attends_whole_heads(engine: Engine, c: Candidates) -> Flags:
    """Return where ranks exchange positions for heads: attention's output is kept in both orders."""
    flags: Flags = (engine.family == "triax") & (c.cp > 1) & (c.cp_method == _EXCHANGES)
    return flags


def made_again_by_selection(engine: Engine, c: Candidates) -> Flags:
    """Return where selective recomputation does not keep what attention puts out: in a ring, made of parts."""
    flags: Flags = (engine.family == "triax") & (c.cp > 1) & (c.cp_method == _RING)
    return flags


def payloads(network: Network, c: Candidates, tokens: Numbers, number_bytes: float) -> Mapping[str, Numbers]:
    """Return the bytes of whole tensors that a rank's collectives have, forward and backward together, by kind, as
    triax does it. ``tokens`` are the rank's own. Gradients that go around a ring are at least in fp32."""
    own = tokens * (network.key_width + network.value_width) / c.tp * number_bytes
    heads = tokens * (network.query_width + network.context_width) / c.tp * number_bytes
    wide = max(number_bytes, 4.0) / number_bytes
    is_cut, is_ring, is_exchanged = c.cp > 1, c.cp_method == _RING, c.cp_method == _EXCHANGES
    is_gathered = is_cut & ~is_ring & ~is_exchanged
    return {
        "all_gather": np.where(is_gathered, 2 * c.cp * own, 0.0),
        "reduce_scatter": np.where(is_gathered, c.cp * own, 0.0),
        "send": np.where(is_cut & is_ring, 2 * (c.cp - 1) * own, 0.0),
        "send_gradients": np.where(is_cut & is_ring, c.cp * own * wide, 0.0),
        "all_to_all": np.where(is_cut & is_exchanged, 2 * (own + heads), 0.0),
    }


@dataclass(frozen=True, eq=False)
class ContextTime:
    """Seconds of collectives, before anything hides them."""

    forward: Numbers
    backward: Numbers
    hides: Numbers
    """1: attention runs beside them."""


def context_s(
    network: Network, workload: Workload, machine: Machine, engine: Engine, c: Candidates, tokens: Numbers
) -> ContextTime:
    """Return the time of the traffic of one layer; what is computed again sends again."""
    peers = group(c, ("cp",), machine)
    is_cut, is_full = c.cp > 1, (c.recompute & FULL) > 0
    width = network.key_width + network.value_width
    if engine.family != "triax":
        whole = all_gather_s(machine, peers, tokens * c.cp * width / c.tp * 2.0)
        seconds = np.where(is_cut, whole, 0.0)
        return ContextTime(seconds, seconds * (2 + is_full), np.ones(len(c)))
    sent = payloads(network, c, tokens, float(workload.precision.activation_bytes))
    gathered = all_gather_s(machine, peers, sent["all_gather"] / 2)
    passed = _ring_s(machine, peers, c, sent["send"] / 2)
    returned = _ring_s(machine, peers, c, sent["send_gradients"])
    exchanged = _exchange_s(machine, peers, network, sent["all_to_all"] / 2)
    is_ring, is_exchanged = c.cp_method == _RING, c.cp_method == _EXCHANGES
    forward = np.where(is_ring, passed, np.where(is_exchanged, exchanged, gathered))
    backward = np.where(is_ring, passed + returned, np.where(is_exchanged, exchanged, 2 * gathered))
    again = is_full | (is_ring & ((c.recompute & SELECTIVE) > 0))
    return ContextTime(
        np.where(is_cut, forward, 0.0), np.where(is_cut, backward + again * forward, 0.0), is_ring.astype(np.float64)
    )


def _ring_s(machine: Machine, peers: Group, c: Candidates, passed_bytes: Numbers) -> Numbers:
    """Return seconds in which ``passed_bytes`` leave each rank for the next, in cp steps that each start anew."""
    # A ring's all-gather of w bytes passes (n - 1)/n x w on from every rank.
    whole = passed_bytes * c.cp / np.maximum(c.cp - 1, 1)
    hop = np.where(peers.domains > 1, machine.across_latency_s, machine.inside_latency_s)
    seconds: Numbers = all_gather_s(machine, peers, whole) + (c.cp - 1) * hop
    return seconds


def _exchange_s(machine: Machine, peers: Group, network: Network, own_bytes: Numbers) -> Numbers:
    """Return seconds of two all-to-alls, of queries, keys and values and of what attention puts out."""
    into = network.query_width + network.key_width + network.value_width
    part = into / (into + network.context_width)
    seconds: Numbers = all_to_all_s(machine, peers, part * own_bytes) + all_to_all_s(
        machine, peers, (1 - part) * own_bytes
    )
    return seconds


def attention_by_parts_s(
    network: Network, workload: Workload, card: Card, c: Candidates, tokens: Numbers, fused: tuple[Numbers, Numbers]
) -> tuple[Numbers, Numbers]:
    """Return the seconds of all layers' attention by parts, forward and backward; one kernel would take ``fused``."""
    if not card.peak_fp16 or card.sms == 1:
        return TILE_OF_FUSED * fused[0], TILE_OF_FUSED * fused[1]
    pairs = tokens * network.attended(workload.mean_attended) * network.heads / c.tp * network.attention_layers
    forward, backward = (pairs * moved / (0.8 * card.memory_bytes_per_s) for moved in TILE_BYTES)
    return fused[0] + forward, fused[1] + backward


def buffer_bytes(network: Network, workload: Workload, engine: Engine, c: Candidates, tokens: Numbers) -> Numbers:
    """Return bytes that are there while one layer's attention works, beside what it keeps."""
    e = float(workload.precision.activation_bytes)
    wide = max(e, 4.0)
    own = tokens * (network.key_width + network.value_width) / c.tp
    out = tokens * network.context_width / c.tp
    if engine.family != "triax":
        # Two blocks of keys and values on their way round, and a partial result in fp32 (arXiv:2310.01889).
        return np.where(c.cp > 1, 2 * own * e + out * 4.0, 0.0)
    ring, exchanged = c.cp_method == _RING, c.cp_method == _EXCHANGES
    # Keys and values as they come and in order; their gradients in at least fp32, in order, and by rank.
    gathered = c.cp * own * (3 * e + wide)
    # Keys and values here and coming; their gradients made, on their way, and coming.
    passed = own * (2 * e + 3 * wide)
    dealt = 3 * (own + out) * e
    keys = np.where(ring, workload.seq_len / c.cp, float(workload.seq_len))
    rows = c.sequences_per_microbatch * network.heads / c.tp * keys
    tile = np.minimum(TILE_NUMBERS, TILE_ROWS * rows) * (2 * wide + 2 * e)
    by_parts = np.where(ring, passed, gathered) + 2 * out * wide + tile
    return np.where(c.cp > 1, np.where(exchanged, dealt, by_parts), 0.0)
