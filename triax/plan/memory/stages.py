"""Which layers stand on each pipeline rank, and how many microbatches of each are held at once?

Closed forms of what ``triax.spec.schedule`` builds, so that a search need not build a table for each layout; a test
walks the tables and holds the forms equal to them.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from triax.plan.candidates import SCHEDULE_NAMES, Candidates, Integers, Numbers
from triax.plan.engine import Engine
from triax.plan.network import Network
from triax.spec.schedule import SCHEDULES
from triax.spec.stages import cheapest_cuts

KINDS: Final = ("attention", "dense", "expert", "mixer", "block")
"""Kinds of work a block is made of, and the block itself."""

_V_PLACED: Final = np.array([SCHEDULES[name].placement == "v" for name in SCHEDULE_NAMES])
_IS: Final = {name: SCHEDULE_NAMES.index(name) for name in SCHEDULE_NAMES}


@dataclass(frozen=True, eq=False)
class Probes:
    """Pipeline ranks where a peak can be; arrays are [probes, candidates].

    In a pipeline of even stages these are the first two, the last two and the first one that has a layer more; with
    cuts of one's own all of them.
    """

    rank: Integers
    layers: dict[str, Numbers]
    """By kind: how many the rank has."""
    held: dict[str, Numbers]
    """By kind: layers times microbatches whose activations are held when they are most."""
    at_loss: dict[str, Numbers]
    """The same when the first microbatch reaches the loss; of the last stage's rank."""
    largest: dict[str, Numbers]
    """By kind: 1 where the rank has any."""
    has_embedding: NDArray[np.bool_]
    has_head: NDArray[np.bool_]
    held_first: Numbers
    """Microbatches held in the first stage."""
    held_last: Numbers
    """Microbatches held in the last stage, the one at the loss included."""
    held_stages: Numbers
    """Microbatches times stages held."""


def probes(network: Network, engine: Engine, c: Candidates, pipeline_rank: int | None = None) -> Probes:
    """Return the ranks to look at; ``pipeline_rank`` asks for one alone, counted from the end where negative."""
    keys, back = _unique(c)
    parts = [_of_key(network, engine, c, index, pipeline_rank) for index in keys]
    most = max(len(part.rank) for part in parts)

    def gather(arrays: list[NDArray[np.generic]]) -> NDArray[np.generic]:
        # A key with fewer ranks to look at repeats its last one.
        columns = [array[np.minimum(np.arange(most), len(array) - 1)] for array in arrays]
        return np.stack(columns, axis=1)[:, back]

    fields = {
        name: gather([getattr(part, name) for part in parts])
        for name in ("rank", "has_embedding", "has_head", "held_first", "held_last", "held_stages")
    }
    kinds = {
        name: {kind: gather([getattr(part, name)[kind] for part in parts]) for kind in KINDS}
        for name in ("layers", "held", "at_loss", "largest")
    }
    return Probes(**fields, **kinds)  # type: ignore[arg-type]


def _unique(c: Candidates) -> tuple[list[int], NDArray[np.intp]]:
    """Return one candidate of each kind of pipeline, and the kind of every candidate."""
    code = np.zeros(len(c), dtype=np.int64)
    # More microbatches than fill the pipeline change nothing but whole rounds of it.
    full = np.where(
        c.schedule == _IS["GPipe"], c.microbatches, np.minimum(c.microbatches, 4 * c.pp * c.stages_per_rank)
    )
    full = np.where(c.schedule == _IS["LoopedBFS"], c.microbatches, full)
    full = np.where((c.schedule == _IS["Interleaved1F1B"]) | (c.schedule == _IS["InterleavedZeroBubble"]),
                    _round_size(c.microbatches, c.pp) * 4096 + np.minimum(c.microbatches, 4 * c.pp), full)  # fmt: skip
    for column in (c.pp, c.stages_per_rank, c.schedule, full, c.cut + 1):
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, back = np.unique(code, return_index=True, return_inverse=True)
    return [int(index) for index in first], back.reshape(-1)


def _round_size(microbatches: Integers, pp: Integers) -> Integers:
    """The largest round of an interleaved schedule, as ``triax.spec.schedule.orders`` cuts them."""
    count = np.maximum(1, microbatches // pp)
    size: Integers = -(-microbatches // count)
    return size


def _of_key(network: Network, engine: Engine, c: Candidates, index: int, pipeline_rank: int | None) -> Probes:
    pp, chunks = int(c.pp[index]), int(c.stages_per_rank[index])
    schedule, microbatches = int(c.schedule[index]), int(c.microbatches[index])
    cut = int(c.cut[index])
    given = None if cut < 0 else c.cuts[cut]
    sizes = stage_sizes(network, engine, pp * chunks, given)
    ranks = _ranks_to_look_at(sizes, pp, given is not None or len(set(sizes)) > 2, pipeline_rank)
    stages = _stages_of(ranks, pp, chunks, is_v=bool(_V_PLACED[schedule]))
    kinds = _kinds_of_stages(network, sizes)
    in_flight, at_loss = held_chunks(schedule, pp, chunks, microbatches, ranks)
    by_kind = {kind: kinds[kind][stages] for kind in KINDS}
    # Of several phases of an interleaved schedule the one with the most layers held is the peak.
    most = np.einsum("prc,rc->rp", in_flight, by_kind["block"]).argmax(axis=1)
    peak = in_flight[most, np.arange(len(ranks))]
    layers = {kind: by_kind[kind].sum(axis=1) for kind in KINDS}
    last = pp * chunks - 1
    return Probes(
        rank=ranks,
        layers=layers,
        held={kind: (by_kind[kind] * peak).sum(axis=1) for kind in KINDS},
        at_loss={kind: (by_kind[kind] * at_loss).sum(axis=1) for kind in KINDS},
        largest={kind: (layers[kind] > 0).astype(np.float64) for kind in KINDS},
        has_embedding=(stages == 0).any(axis=1),
        has_head=(stages == last).any(axis=1),
        held_first=(peak * (stages == 0)).sum(axis=1),
        held_last=np.maximum((at_loss * (stages == last)).sum(axis=1), 1.0),
        held_stages=peak.sum(axis=1),
    )


def stage_sizes(network: Network, engine: Engine, num_stages: int, cuts: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the blocks of each stage: as cut, by cost (triax), or evenly with what is over in the middle."""
    if cuts is not None:
        return cuts
    if engine.family == "triax" and num_stages <= network.layers:
        of_layer = network.active_parameters - network.embedding_parameters - network.head_parameters
        return cheapest_cuts(network.layers, num_stages, network.vocab * network.hidden * network.layers / of_layer)
    few, more = divmod(network.layers, num_stages)
    order = [*range(1, num_stages - 1), 0, num_stages - 1] if num_stages > 1 else [0]
    extra = set(order[:more])
    return tuple(few + (stage in extra) for stage in range(num_stages))


def _ranks_to_look_at(sizes: tuple[int, ...], pp: int, is_uneven: bool, pipeline_rank: int | None) -> Integers:
    if pipeline_rank is not None:
        return np.array([pipeline_rank % pp])
    if is_uneven:
        return np.arange(pp)
    by_rank = [sum(sizes[rank::pp]) for rank in range(pp)]
    fuller = by_rank.index(max(by_rank))
    return np.unique([0, min(1, pp - 1), fuller, max(pp - 2, 0), pp - 1])


def _stages_of(ranks: Integers, pp: int, chunks: int, *, is_v: bool) -> Integers:
    """[ranks, chunks]: which stages each rank has."""
    if is_v:
        return np.stack([ranks, 2 * pp - 1 - ranks], axis=1)
    stages: Integers = ranks[:, None] + pp * np.arange(chunks)[None, :]
    return stages


def _kinds_of_stages(network: Network, sizes: tuple[int, ...]) -> dict[str, Numbers]:
    """By kind: how many of them each stage has. Blocks with experts come last; other mixtures are spread evenly."""
    count = np.asarray(sizes, dtype=np.float64)
    ends = np.cumsum(count)
    dense_first = network.layers - network.expert_layers if network.experts is not None else network.layers
    if network.state_space is not None or network.ffn_layers != network.layers:
        part = count / network.layers
        mixers = 0 if network.state_space is None else network.state_space.layers
        return {
            "attention": part * network.attention_layers, "dense": part * network.dense_layers,
            "expert": part * network.expert_layers, "mixer": part * mixers, "block": count,
        }  # fmt: skip
    dense = np.clip(dense_first - (ends - count), 0, count)
    return {
        "attention": count * network.attention_layers / network.layers, "dense": dense, "expert": count - dense,
        "mixer": np.zeros_like(count), "block": count,
    }  # fmt: skip


def held_chunks(schedule: int, pp: int, chunks: int, microbatches: int, ranks: Integers) -> tuple[Numbers, Numbers]:
    """Return microbatches held of each of a rank's stages: at the peak [phases, ranks, chunks], at the first loss.

    What a split backward keeps until its weight gradient counts whole. Interleaved schedules hold the same number all
    the time, of other stages from phase to phase.
    """
    hops = (pp - 1 - ranks).astype(np.float64)
    name = SCHEDULE_NAMES[schedule]
    if name in ("GPipe", "LoopedBFS"):
        held = np.full((len(ranks), chunks), float(microbatches))
        first = held.copy()
        first[:, -1] = 1.0
        return held[None], first
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return _held_in_v(name, microbatches, ranks.astype(np.float64), hops)
    size = int(_round_size(np.asarray(microbatches), np.asarray(pp)))
    total = float(microbatches * chunks)
    warmup = (chunks - 1) * size + (2 if name == "Interleaved1F1B" else 1) * hops
    waiting = ranks if name == "InterleavedZeroBubble" else np.zeros_like(ranks)
    begun = np.minimum(warmup + 1, total)
    stage = np.arange(chunks)[None, :]

    def passed(count: Numbers, place: Integers) -> Numbers:
        rounds, rest = np.divmod(count[:, None], size * chunks)
        done: Numbers = np.minimum(rounds * size + np.clip(rest - place * size, 0, size), microbatches)
        return done

    phases = []
    for phase in range(chunks + 1):
        ended = np.minimum(float(phase * size), total - begun)
        # Weight gradients that wait hold what their backward of the input would have freed.
        held = passed(begun + ended, stage) - passed(np.maximum(ended - waiting, 0.0), chunks - 1 - stage)
        phases.append(held)
    steady = np.minimum(waiting.astype(np.float64), total - begun)
    late = passed(begun + steady, stage) - passed(np.zeros_like(steady), chunks - 1 - stage)
    phases.append(late)
    return np.stack(phases), passed(begun, stage)


def _held_in_v(name: str, microbatches: int, rank: Numbers, hops: Numbers) -> tuple[Numbers, Numbers]:
    """A rank of a V holds 2 pp microbatches: many of its early stage and few of its late one, or the other way."""
    more = 1.0 if name == "DualPipeV" else 0.0
    down = np.minimum(2 * hops + rank + 1 + more, microbatches)
    up = np.minimum(rank + 1, microbatches)
    both = np.stack([down, up], axis=1)
    return both[None], both
