"""How many bytes does each candidate need in triax's own engine, moment by moment?

``memory`` prices a hundred thousand candidates by closed forms, for any framework. This walks a few of them through
their schedules, tensor by tensor, as the engine does; the engine's own dry run holds it to that.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from triax.plan.candidates import CP_METHODS, FULL, SCHEDULE_NAMES, SELECTIVE, Candidates
from triax.plan.engine import Engine
from triax.plan.memory.activations import IMBALANCE
from triax.plan.memory.instants import instants
from triax.plan.memory.own_forward import LayerSizes
from triax.plan.memory.own_layer import LayerBytes, layer_bytes
from triax.plan.memory.own_stage import Bytes, Plan, Ranks, Sizes, Stage, Unit
from triax.plan.memory.own_step import OwnStep
from triax.plan.memory.peak import ALLOCATED, MOMENTS, Memory
from triax.plan.memory.stages import stage_sizes
from triax.plan.memory.states import moment_bytes, padded_vocab
from triax.plan.network import Network
from triax.plan.workload import Workload
from triax.spec.schedule import splits_backward, stage_owner

_PARTS: Final = tuple(name for name in ALLOCATED if name != "workspaces")


@dataclass(frozen=True)
class Peak:
    """The fullest moment of one pipeline rank."""

    rank: int
    moment: str
    held: Bytes
    by_moment: Bytes
    """The most at each kind of moment."""

    @property
    def total(self) -> float:
        """The bytes of that moment."""
        return sum(self.held.values())


def is_walked(network: Network, workload: Workload, engine: Engine) -> bool:
    """Return whether this is what triax trains, so that its steps can be walked."""
    is_plain = network.latent_attention is None and network.state_space is None and not network.mtp_depth
    return engine.family == "triax" and is_plain and not workload.lora_rank and network.norms_per_layer == 2


def walked_memory(
    memory: Memory, network: Network, workload: Workload, engine: Engine, c: Candidates, *,
    pipeline_rank: int | None = None, imbalance: float = IMBALANCE,
) -> Memory:  # fmt: skip
    """Return ``memory``, which is that of ``c``, with what the allocator hands out walked moment by moment.

    Of a pipeline the first and the last rank are walked, or the one that is asked for, counted from the end where
    negative. ``imbalance``: see ``triax.plan.memory.memory``.
    """
    own = _Own(network, workload, engine, c, imbalance)
    peaks = [own.peak(index, pipeline_rank) for index in range(len(c))]
    columns: dict[str, Any] = {name: np.array([peak.held.get(name, 0.0) for peak in peaks]) for name in _PARTS}
    at_moment = np.array([[peak.by_moment.get(name, 0.0) for peak in peaks] for name in MOMENTS])
    allocated = np.array([peak.total for peak in peaks]) + memory.workspaces
    return replace(
        memory, **columns, pipeline_rank=np.array([peak.rank for peak in peaks], dtype=np.int64),
        moment=np.array([MOMENTS.index(peak.moment) for peak in peaks], dtype=np.int64),
        at_moment=at_moment.reshape(len(MOMENTS), len(c)) + memory.workspaces,
        overhead=allocated * (engine.allocator_overhead - 1),
    )  # fmt: skip


class _Own:
    """Candidates of one case."""

    def __init__(
        self, network: Network, workload: Workload, engine: Engine, c: Candidates, imbalance: float
    ) -> None:  # fmt: skip
        self.network, self.workload, self.engine, self.c = network, workload, engine, c
        self.imbalance = imbalance
        self.e = float(workload.precision.activation_bytes)
        self.rows = padded_vocab(network, engine, c)

    def peak(self, index: int, pipeline_rank: int | None) -> Peak:
        """Return the fullest moment of one candidate."""
        pp = int(self.c.pp[index])
        made = self._stage_maker(index)
        ranks = sorted({0, pp - 1}) if pipeline_rank is None else [pipeline_rank % pp]
        found = [self._peak_of(index, rank, made) for rank in ranks]
        every = {name: max(peak.by_moment.get(name, 0.0) for peak in found) for name in MOMENTS}
        return replace(max(found, key=lambda peak: peak.total), by_moment=every)

    def _peak_of(self, index: int, rank: int, made: "_StageMaker") -> Peak:
        c = self.c
        pp, per_rank, microbatches = (int(column[index]) for column in (c.pp, c.stages_per_rank, c.microbatches))
        name = SCHEDULE_NAMES[int(c.schedule[index])]
        step = made.step(rank, name, pp, per_rank, microbatches)
        states = step.states()
        best: tuple[str, Bytes] = ("update", {})
        most = 0.0
        by_moment: Bytes = {}
        for moment, held in step.moments(instants(name, pp, per_rank, microbatches, rank)):
            total = sum(held.values())
            by_moment[moment] = max(by_moment.get(moment, 0.0), total)
            if total > most:
                most, best = total, (moment, held)
        always = sum(states.values())
        held = {part: float(best[1].get(part, 0.0) + states.get(part, 0.0)) for part in _PARTS}
        return Peak(rank, best[0], held, {part: float(value + always) for part, value in by_moment.items()})

    def _stage_maker(self, index: int) -> "_StageMaker":
        c, e = self.c, self.e
        zero, cp, tp = int(c.zero[index]), int(c.cp[index]), float(c.tp[index])
        shared = float(c.dp_shard[index]) * cp
        ranks = Ranks(
            zero=zero, is_pipeline=int(c.pp[index]) > 1, is_replicated=int(c.dp_replicate[index]) > 1,
            dense=shared if zero else 1.0, expert=max(shared * tp / float(c.ep[index]), 1.0) if zero else 1.0,
            compute=e, master=max(e, 4.0), reduce=float(self.workload.grad_reduce_bytes or max(4.0, e)),
            moments=moment_bytes(self.workload, self.engine),
        )  # fmt: skip
        kinds = {kind: self._sizes(index, kind) for kind in ("dense", "expert") if self._count(kind)}
        any_kind = next(iter(kinds.values()))
        vocabulary_rows = float(self.rows[index]) / tp
        tokens = any_kind.full / self.network.hidden
        recompute = "full" if c.recompute[index] & FULL else "selective" if c.recompute[index] & SELECTIVE else "none"
        wide = any_kind.wide_bytes
        norm_kept, norm_work = (wide + e, 4 * wide + e) if any_kind.is_low else (2 * e, 3 * wide)
        sizes = Sizes(
            stream=e * any_kind.cut, gathered=e * any_kind.full, vocabulary=vocabulary_rows * self.network.hidden,
            rotation=tokens * self.network.head_dim * 2 * wide, logits=tokens * vocabulary_rows,
            norm_kept=any_kind.cut * norm_kept + any_kind.rows * wide, norm_work=any_kind.cut * norm_work,
            saves_input=recompute != "none" or not any_kind.is_low,
        )  # fmt: skip
        return _StageMaker(
            self.network, ranks, sizes, {kind: self._unit(kind, size) for kind, size in kinds.items()},
            {kind: layer_bytes(size, recompute, adds_at_once=False) for kind, size in kinds.items()},
            {kind: layer_bytes(size, recompute, adds_at_once=True) for kind, size in kinds.items()},
            None if c.cut[index] < 0 else c.cuts[int(c.cut[index])],
        )  # fmt: skip

    def _count(self, kind: str) -> int:
        return self.network.dense_layers if kind == "dense" else self.network.expert_layers

    def _unit(self, kind: str, sizes: LayerSizes) -> Unit:
        network = self.network
        of_experts = {name for name, _ in sizes.weights if name.startswith("experts_")}
        dense = sum(size for name, size in sizes.weights if name not in of_experts)
        dense += network.norm_parameters * network.norms_per_layer
        # Biases are cut like their outputs; norms of heads, the bias after a sum and the router are whole.
        beside = network.attention_parameters - sum(inputs * outputs for inputs, outputs in network.attention_matrices)
        whole = 2 * network.head_dim if network.qk_norm == "head" else 0
        whole += network.hidden if network.has_out_bias else 0
        dense += whole + (beside - whole) / sizes.tp
        if kind == "dense" and network.has_mlp_bias:
            dense += network.hidden + 2 * network.ffn / sizes.tp
        if kind == "expert" and network.experts is not None:
            dense += network.hidden * network.experts.count
        expert = sum(size for name, size in sizes.weights if name in of_experts)
        return Unit(dense, expert, max(size for _, size in sizes.weights))

    def _sizes(self, index: int, kind: str) -> LayerSizes:
        """Return the sizes of a layer's tensors."""
        network, c = self.network, self.c
        tp, cp = int(c.tp[index]), int(c.cp[index])
        tokens = float(c.sequences_per_microbatch[index]) * self.workload.seq_len / cp
        hidden = network.hidden
        weights = {
            "q": hidden * network.query_width / tp, "k": hidden * network.key_width / tp,
            "v": hidden * network.value_width / tp, "o": network.context_width * hidden / tp,
        }  # fmt: skip
        size = LayerSizes(
            number_bytes=self.e, sequences=int(c.sequences_per_microbatch[index]), tp=tp, cut=tokens * hidden / tp,
            full=tokens * hidden, rows=tokens / tp, query=tokens * network.query_width / tp,
            key=tokens * network.key_width / tp, query_heads=tokens * network.heads / tp,
            has_head_norms=network.qk_norm != "none", cp=cp, seq_len=self.workload.seq_len,
            context="whole" if cp == 1 else CP_METHODS[int(c.cp_method[index])],
        )  # fmt: skip
        if kind == "dense":
            weights |= dict.fromkeys(("gate", "up", "down"), hidden * network.ffn / tp)
            return replace(size, inner=tokens * network.ffn / tp, weights=tuple(weights.items()))
        experts = network.experts
        assert experts is not None
        ep = float(c.ep[index])
        rows = tokens / tp * experts.per_token * (1 + (self.imbalance - 1) * (1 - 1 / ep))
        scores = tokens / tp * experts.count * size.wide_bytes
        each_choice = 28.0 + self.e + (16.0 if ep > 1 else 0.0)
        of_experts = experts.count * hidden * experts.ffn / ep
        weights |= dict.fromkeys(("experts_gate", "experts_up", "experts_down"), of_experts)
        if experts.shared_ffn:
            weights |= dict.fromkeys(("s_gate", "s_up", "s_down"), hidden * experts.shared_ffn / tp)
        return replace(
            size, choices=rows * hidden, expert_inner=rows * experts.ffn, is_exchanged=ep > 1,
            shared=tokens / tp * experts.shared_ffn, scores_bytes=scores,
            router_bytes=2 * scores + tokens / tp * (8.0 + experts.per_token * each_choice),
            weights=tuple(weights.items()),
        )  # fmt: skip


@dataclass(frozen=True)
class _StageMaker:
    """What the stages of one candidate have alike, by kind of layer."""

    network: Network
    ranks: Ranks
    sizes: Sizes
    units: dict[str, Unit]
    layers: dict[str, LayerBytes]
    adding: dict[str, LayerBytes]
    cuts: tuple[int, ...] | None

    def step(self, rank: int, schedule: str, pp: int, per_rank: int, microbatches: int) -> OwnStep:
        """Return the step of pipeline rank ``rank``."""
        count, network = pp * per_rank, self.network
        layers = stage_sizes(network, count, self.cuts, is_by_cost=True)
        owner = stage_owner(schedule, pp, per_rank)
        first_sparse = network.layers - network.expert_layers
        stages: list[Stage] = []
        sends: list[bool] = []
        receives = 0
        for stage in (stage for stage in range(count) if owner[stage] == rank):
            start, is_first, is_last = sum(layers[:stage]), stage == 0, stage == count - 1
            kinds = ["dense" if layer < first_sparse else "expert" for layer in range(start, start + layers[stage])]
            matrices = 1 if is_first and is_last and network.is_tied else is_first + is_last
            outside = self.sizes.vocabulary * matrices + (network.norm_parameters if is_last else 0)
            plan = Plan(
                units=[self.units[kind] for kind in kinds], layers=[self.layers[kind] for kind in kinds],
                adding=[self.adding[kind] for kind in kinds], root=Unit(outside, 0.0, self.sizes.vocabulary),
                has_embedding=is_first, has_head=is_last,
            )  # fmt: skip
            stages.append(Stage(plan, self.ranks, self.sizes))
            sends += [not is_last and owner[stage + 1] != rank, not is_first and owner[stage - 1] != rank]
            receives += (not is_first) + (not is_last)
        return OwnStep(stages, sends, receives, microbatches, splits=splits_backward(schedule))
