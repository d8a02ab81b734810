"""Which layers stand on each pipeline rank, and how many microbatches of each are held at once?

Closed forms of what ``triax.spec.schedule`` builds, so that a search need not build a table for each layout; a test
walks the tables and holds the forms equal to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from triax.plan.candidates import SCHEDULE_NAMES, Candidates, Integers, Numbers
from triax.plan.engine import Engine
from triax.plan.network import Network
from triax.spec.schedule import SCHEDULES
from triax.spec.stages import cheapest_cuts

_V_PLACED: Final = tuple(SCHEDULES[name].placement == "v" for name in SCHEDULE_NAMES)
_INTERLEAVED: Final = tuple(SCHEDULE_NAMES.index(name) for name in ("Interleaved1F1B", "InterleavedZeroBubble"))
_ALL_AT_ONCE: Final = tuple(SCHEDULE_NAMES.index(name) for name in ("GPipe", "LoopedBFS"))
_PLAIN: Final = ("rank", "has_embedding", "has_head", "held_first", "held_last", "at_loss_last", "split")


@dataclass(frozen=True, eq=False)
class Probes:
    """Pipeline ranks where a peak can be; arrays are [probes, candidates].

    In a pipeline of even stages these are the first, the last, and the first ones that have the most layers, or the
    most with experts; with stages of more than two sizes all of them. Kinds are attention, dense, expert and mixer, and
    block for a block as a whole.
    """

    rank: Integers
    has_embedding: NDArray[np.bool_]
    has_head: NDArray[np.bool_]
    held_first: Numbers
    """Microbatches held in the first stage."""
    held_last: Numbers
    """Microbatches held in the last stage."""
    at_loss_last: Numbers
    """The same when one of them reaches the loss, itself included."""
    split: Numbers
    """Microbatches of one stage that are between the parts of split backwards, at most, the one that runs included."""
    layers: Mapping[str, Numbers]
    """By kind: how many the rank has."""
    held: Mapping[str, Numbers]
    """By kind: layers times microbatches whose activations are held when they are most."""
    at_loss: Mapping[str, Numbers]
    """The same when a microbatch reaches the loss; of the last stage's rank."""


def probes(network: Network, engine: Engine, c: Candidates, pipeline_rank: int | None = None) -> Probes:
    """Return the ranks to look at; ``pipeline_rank`` asks for one alone, counted from the end where negative."""
    kinds = tuple(kinds_of_blocks(network))
    keys, back = _unique(c)
    is_by_cost = engine.family == "triax"
    rows = [_row(network, is_by_cost, key, c.cuts[key.cut] if key.cut >= 0 else None, pipeline_rank) for key in keys]
    most = max(row.shape[1] for row in rows)
    # A kind of pipeline with fewer ranks to look at repeats its last one.
    table = np.stack([row[:, np.minimum(np.arange(most), row.shape[1] - 1)] for row in rows], axis=2)
    columns = np.take(table, back, axis=2)
    plain = dict(zip(_PLAIN, columns, strict=False))
    by_kind = columns[len(_PLAIN) :].reshape(3, len(kinds), most, len(c))
    return Probes(
        rank=plain["rank"].astype(np.int64),
        has_embedding=plain["has_embedding"] > 0,
        has_head=plain["has_head"] > 0,
        held_first=plain["held_first"],
        held_last=plain["held_last"],
        at_loss_last=plain["at_loss_last"],
        split=plain["split"],
        layers=dict(zip(kinds, by_kind[0], strict=True)),
        held=dict(zip(kinds, by_kind[1], strict=True)),
        at_loss=dict(zip(kinds, by_kind[2], strict=True)),
    )


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """What decides how many microbatches are held where."""

    pp: int
    chunks: int
    schedule: int
    microbatches: int
    cut: int


def _unique(c: Candidates) -> tuple[list[_Pipeline], NDArray[np.intp]]:
    """Return each kind of pipeline once, and which one every candidate has."""
    # More microbatches than fill a pipeline change nothing, but for the size of an interleaved schedule's rounds.
    fill = np.minimum(c.microbatches, 4 * c.pp)
    fill = np.where(np.isin(c.schedule, _INTERLEAVED), _round_size(c.microbatches, c.pp) * 4096 + fill, fill)
    fill = np.where(np.isin(c.schedule, _ALL_AT_ONCE), c.microbatches, fill)
    code = np.zeros(len(c), dtype=np.int64)
    for column in (c.pp, c.stages_per_rank, c.schedule, fill, c.cut + 1):
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, back = np.unique(code, return_index=True, return_inverse=True)
    columns = (c.pp, c.stages_per_rank, c.schedule, c.microbatches, c.cut)
    return [_Pipeline(*(int(column[index]) for column in columns)) for index in first], back.reshape(-1)


def _round_size(microbatches: Integers, pp: Integers) -> Integers:
    """The largest round of an interleaved schedule, as ``triax.spec.schedule.orders`` cuts them."""
    count = np.maximum(1, microbatches // pp)
    size: Integers = -(-microbatches // count)
    return size


@lru_cache(maxsize=8192)
def _row(
    network: Network, is_by_cost: bool, of: _Pipeline, cuts: tuple[int, ...] | None, pipeline_rank: int | None
) -> Numbers:
    """[plain columns and three a kind, ranks to look at]: see ``Probes``."""
    num_stages = of.pp * of.chunks
    sizes = stage_sizes(network, num_stages, cuts, is_by_cost=is_by_cost)
    by_stage = kinds_of_blocks(network, sizes)
    owned = _stages_of(np.arange(of.pp), of.pp, of.chunks, is_v=_V_PLACED[of.schedule])
    ranks = _ranks_to_look_at(sizes, by_stage, owned, pipeline_rank)
    stages = owned[ranks]
    is_uneven = bool((by_stage["block"][stages] != by_stage["block"][stages][:, :1]).any())
    in_flight, at_loss = held_chunks(of.schedule, of.pp, of.chunks, of.microbatches, ranks, is_uneven=is_uneven)
    kinds = [layers[stages] for layers in by_stage.values()]
    # Of several phases of an interleaved schedule the one with the most layers held is the peak.
    most = np.einsum("prc,rc->rp", in_flight, by_stage["block"][stages]).argmax(axis=1)
    peak = in_flight[most, np.arange(len(ranks))]
    is_last = stages == num_stages - 1
    plain = [
        ranks, (stages == 0).any(axis=1), is_last.any(axis=1), (peak * (stages == 0)).sum(axis=1),
        (peak * is_last).sum(axis=1), np.maximum((at_loss * is_last).sum(axis=1), 1.0),
        _split(of.schedule, of.microbatches * of.chunks, ranks),
    ]  # fmt: skip
    held = [[(each * weight).sum(axis=1) for each in kinds] for weight in (np.ones_like(peak), peak, at_loss)]
    return np.array([*plain, *held[0], *held[1], *held[2]], dtype=np.float64)


def stage_sizes(
    network: Network, num_stages: int, cuts: tuple[int, ...] | None, *, is_by_cost: bool
) -> tuple[int, ...]:
    """Return the blocks of each stage: as cut, by cost (triax), or evenly with what is over in the middle."""
    if cuts is not None:
        return cuts
    if is_by_cost and num_stages <= network.layers:
        of_layer = sum(inputs * outputs for inputs, outputs in _matrices_of_a_block(network))
        return cheapest_cuts(network.layers, num_stages, network.vocab * network.hidden / of_layer)
    few, more = divmod(network.layers, num_stages)
    order = [*range(1, num_stages - 1), 0, num_stages - 1] if num_stages > 1 else [0]
    extra = set(order[:more])
    return tuple(few + (stage in extra) for stage in range(num_stages))


def _matrices_of_a_block(network: Network) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of what a token meets in one block, that of its experts counted."""
    experts = network.experts
    if experts is None:
        return network.attention_matrices + network.ffn_matrices(network.ffn)
    inner = experts.per_token * experts.ffn + experts.shared_ffn
    return network.attention_matrices + network.ffn_matrices(inner)


def _ranks_to_look_at(
    sizes: tuple[int, ...], by_stage: Mapping[str, Numbers], owned: Integers, pipeline_rank: int | None
) -> Integers:
    pp = len(owned)
    if pipeline_rank is not None:
        return np.array([pipeline_rank % pp])
    if len(set(sizes)) > 2:
        return np.arange(pp)
    fullest = [int(layers[owned].sum(axis=1).argmax()) for layers in by_stage.values()]
    return np.unique([0, *fullest, pp - 1])


def _stages_of(ranks: Integers, pp: int, chunks: int, *, is_v: bool) -> Integers:
    """[ranks, chunks]: which stages each rank has."""
    if is_v:
        return np.stack([ranks, 2 * pp - 1 - ranks], axis=1)
    stages: Integers = ranks[:, None] + pp * np.arange(chunks)[None, :]
    return stages


def kinds_of_blocks(network: Network, sizes: tuple[int, ...] = ()) -> dict[str, Numbers]:
    """By kind that the network has: how many each stage of ``sizes`` has.

    Blocks with experts come last; other mixtures are spread evenly.
    """
    count = np.asarray(sizes, dtype=np.float64)
    part = count / network.layers
    counts = {"attention": part * network.attention_layers}
    if network.state_space is not None or network.ffn_layers != network.layers:
        counts["dense"], counts["expert"] = part * network.dense_layers, part * network.expert_layers
    else:
        first = network.layers - network.expert_layers
        counts["dense"] = np.clip(first - (np.cumsum(count) - count), 0, count)
        counts["expert"] = count - counts["dense"]
    if network.experts is None:
        del counts["expert"]
    if network.state_space is not None:
        counts["mixer"] = part * network.state_space.layers
    return counts | {"block": count}


def held_chunks(
    schedule: int, pp: int, chunks: int, microbatches: int, ranks: Integers, *, is_uneven: bool = False
) -> tuple[Numbers, Numbers]:
    """Return microbatches held of each of a rank's stages: at the peak [phases, ranks, chunks], at a loss.

    The first loss is looked at, and the last one of schedules that run all forwards before any backward.
    What a split backward keeps until its weight gradient counts whole. Interleaved schedules hold the same number all
    the time, of other stages from one backward to the next: where these are not alike (``is_uneven``) each backward is
    a phase, of the first two rounds where all rounds are equal.
    """
    hops = pp - 1 - ranks
    name = SCHEDULE_NAMES[schedule]
    if name in ("GPipe", "LoopedBFS"):
        held = np.full((len(ranks), chunks), float(microbatches))
        return held[None], held
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return _held_in_v(name, microbatches, ranks, hops)
    count = max(1, microbatches // pp)
    rounds = [microbatches // count + (index < microbatches % count) for index in range(count)]
    size, total = rounds[0], microbatches * chunks
    warmup = (chunks - 1) * size + (2 if name == "Interleaved1F1B" else 1) * hops
    begun = np.minimum(warmup + 1, total)
    waiting = np.minimum(ranks if name == "InterleavedZeroBubble" else 0 * ranks, total - begun)
    # [actions begun, stages]: how many of them were of each stage; all walk in rounds, backwards in reverse.
    # Equal rounds repeat themselves; where they shrink, all of them are walked.
    walked = rounds if rounds[0] != rounds[-1] else rounds[: 2 * chunks + 4]
    walk = np.concatenate([np.repeat(np.arange(chunks), each) for each in walked])
    passed = np.zeros((len(walk) + 1, chunks), dtype=np.int64)
    passed[1:] = (walk[:, None] == np.arange(chunks)).cumsum(axis=0)
    last = len(walk)
    most = (total if walked is rounds else min(2 * size * chunks, total)) if is_uneven else 0
    steps = np.arange(most + 1)[:, None]
    # Weight gradients that wait hold what the backward of their input would have freed.
    ended = np.minimum(steps + waiting, total - begun)
    freed = np.maximum(ended - waiting, 0)
    held = passed[np.minimum(begun + ended, last)] - passed[np.minimum(freed, last), ::-1]
    return held.astype(np.float64), passed[np.minimum(begun, last)].astype(np.float64)


def _split(schedule: int, total: int, ranks: Integers) -> Numbers:
    """Return how many backwards of each rank are split at once: loop-placed ones run the second part ``rank`` later."""
    name = SCHEDULE_NAMES[schedule]
    if not SCHEDULES[name].splits_backward:
        return np.zeros(len(ranks))
    late = ranks if name == "InterleavedZeroBubble" else 0 * ranks
    return np.minimum(late + 1, total).astype(np.float64)


def _held_in_v(name: str, microbatches: int, ranks: Integers, hops: Integers) -> tuple[Numbers, Numbers]:
    """A rank of a V holds 2 pp microbatches: many of its early stage and few of its late one, or the other way."""
    more = 1 if name == "DualPipeV" else 0
    down, up = 2 * hops + ranks + 1 + more, ranks + 1
    phases = [(down, up)] if name == "DualPipeV" else [(down, up), (down + 1, up - 1)]
    held = np.array([np.stack([np.minimum(each, microbatches) for each in pair], axis=1) for pair in phases])
    return held.astype(np.float64), held[0].astype(np.float64)
