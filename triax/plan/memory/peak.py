"""How many bytes does a run need on its fullest card, of what, when, and does the card have them?

All candidates at once. For each one a few pipeline ranks are looked at, at four moments: after the last forward that
fits before a backward, at the loss, in the backward, and in the update. The largest sum is the peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triax.plan.candidates import Candidates, Integers, Numbers
from triax.plan.context import buffer_bytes
from triax.plan.engine import Engine
from triax.plan.hardware import Card
from triax.plan.memory.activations import (
    IMBALANCE,
    Activations,
    activations,
    held_bytes,
    split_bytes,
    working_bytes,
)
from triax.plan.memory.stages import Probes, probes
from triax.plan.memory.states import owned, padded_vocab, states
from triax.plan.network import Network
from triax.plan.workload import Workload

MIB: Final = 2**20
GIB: Final = 2**30
MOMENTS: Final = ("forward", "loss", "backward", "update")
ALLOCATED: Final = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "workspaces")
"""Categories that a framework's allocator hands out."""
CATEGORIES: Final = (*ALLOCATED, "overhead", "context", "nccl")

LOSS_KEPT_BYTES: Final = 4.0
"""Bytes a logit that wait for the backward: probabilities in fp32."""
LOSS_BYTES: Final = {"eager": 14.0, "fused": 10.0, "vocab_parallel": 6.0}
"""Bytes a logit at the peak of the loss, with logits of two bytes. vocab_parallel: the logits, and fp32 that becomes
probabilities and their gradient in place. fused: one fp32 copy more. eager: three more, of logarithm and gradient."""
CHUNK_BYTES: Final = 512 * MIB
"""Logits of one chunk, in fp32, of a loss in chunks."""
CONTEXT_BYTES: Final = 0.5 * GIB
"""CUDA context and loaded kernels, outside the allocator (*assumed*)."""
NCCL_BYTES: Final = 0.2 * GIB
"""Of one communicator, outside the allocator (*assumed*; up to 0.39 GiB inside a server)."""
BLOCK: Final = 1 << 14
"""Candidates computed at once: their arrays stay in a core's cache."""
LEAST_OVERHEAD: Final = 0.03
"""Part of what is allocated that stays lost between blocks, however short memory is (*assumed*)."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes on the rank with the peak, one entry a candidate."""

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    logits: Numbers
    buffers: Numbers
    """Gathered weights, gradients on their way, parts of other ranks' sequences and tokens."""
    workspaces: Numbers
    overhead: Numbers
    """What the allocator reserves beyond what it has handed out."""
    context: Numbers
    nccl: Numbers
    pipeline_rank: Integers
    moment: Integers
    """Index into ``MOMENTS``: when the peak is."""
    at_moment: NDArray[np.float64]
    """Allocated bytes, [moments, candidates]: the peak of each moment over the pipeline's ranks."""
    save_bytes: Numbers
    """Allocated while a checkpoint is written: what the fullest rank holds between two steps."""
    resume_bytes: Numbers
    """Allocated while a checkpoint is loaded: that, and one tensor on its way."""
    spread: float
    """Half of the 80 % interval, over the bytes."""
    usable_bytes: float
    margin: float
    """Part of the card that must stay free for a verdict of ``fits``."""

    @property
    def allocated_bytes(self) -> Numbers:
        """Peak of what the allocator hands out (``max_memory_allocated``)."""
        total: Numbers = sum((getattr(self, name) for name in ALLOCATED), np.zeros_like(self.weights))
        return total

    @property
    def reserved_bytes(self) -> Numbers:
        """Peak of what the allocator takes from the card (``max_memory_reserved``)."""
        reserved: Numbers = self.allocated_bytes + self.overhead
        return reserved

    @property
    def device_bytes(self) -> Numbers:
        """Peak of what the process takes from the card, as nvidia-smi shows it."""
        taken: Numbers = self.reserved_bytes + self.context + self.nccl
        return taken

    @property
    def needed_bytes(self) -> Numbers:
        """Least that the process can do with: an allocator that runs short gives back most of what it caches."""
        lost = np.minimum(self.overhead, LEAST_OVERHEAD * self.allocated_bytes)
        needed: Numbers = self.allocated_bytes + lost + self.context + self.nccl
        return needed

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Whether the card has what is needed and the margin."""
        verdict: NDArray[np.bool_] = self.needed_bytes <= self.usable_bytes * (1 - self.margin)
        return verdict

    def take(self, rows: Integers) -> "Memory":
        """Return the candidates at ``rows``."""
        arrays: dict[str, Any] = {
            field.name: getattr(self, field.name)[..., rows]
            for field in fields(Memory)
            if isinstance(getattr(self, field.name), np.ndarray)
        }
        return replace(self, **arrays)

    def interval(self, value: Numbers) -> tuple[Numbers, Numbers]:
        """Return the 80 % interval of a predicted number of bytes."""
        return value * (1 - self.spread), value * (1 + self.spread)


def memory(
    network: Network,
    workload: Workload,
    card: Card,
    engine: Engine,
    candidates: Candidates,
    *,
    pipeline_rank: int | None = None,
    imbalance: float = IMBALANCE,
) -> Memory:
    """Return the peak of every candidate, from step 2 on (moments exist from the end of step 1 in many engines).

    ``pipeline_rank`` asks for one pipeline rank (-1 the last) instead of the one with the peak. ``imbalance`` is how
    many tokens the busiest experts get over the mean.
    """
    if len(candidates) > BLOCK:
        starts = range(0, len(candidates), BLOCK)
        blocks = [candidates.take(np.arange(start, min(start + BLOCK, len(candidates)))) for start in starts]
        return _joined([_memory(network, workload, card, engine, block, pipeline_rank, imbalance) for block in blocks])
    return _memory(network, workload, card, engine, candidates, pipeline_rank, imbalance)


def _joined(parts: Sequence[Memory]) -> Memory:
    """Return the candidates of all ``parts`` in one."""
    arrays: dict[str, Any] = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts], axis=-1)
        for field in fields(Memory)
        if isinstance(getattr(parts[0], field.name), np.ndarray)
    }
    return replace(parts[0], **arrays)


def _memory(
    network: Network, workload: Workload, card: Card, engine: Engine, c: Candidates, pipeline_rank: int | None,
    imbalance: float,
) -> Memory:  # fmt: skip
    at = probes(network, engine, c, pipeline_rank)
    own = owned(network, engine, c, at)
    state = states(network, workload, card, engine, c, own, at)
    acts = activations(network, workload, engine, c, imbalance)
    held = held_bytes(acts, at.held, at.layers, c) + _outside_kept(network, workload, engine, c, acts, at)
    at_loss = held_bytes(acts, at.at_loss, at.layers, c) + _outside_kept(network, workload, engine, c, acts, at)
    forward, backward = working_bytes(acts, at, c)
    logits, logits_kept = _logits(network, workload, engine, c, acts)
    passing = buffer_bytes(network, workload, engine, c, acts.tokens) + _pipeline_buffers(workload, engine, c, acts, at)
    bucket = np.where(c.data_ranks > 1, engine.bucket_bytes, 0.0)
    is_late = c.zero <= 1
    passing = passing + np.where(is_late, 0.0, bucket)
    base = state.weights + state.gradients + state.optimizer
    zero = np.zeros_like(held)
    if engine.splits_whole:
        backward = backward + split_bytes(acts, at, c)
    moments_activations = np.stack([held + forward, at_loss, held + backward, zero])
    # A schedule that runs forwards ahead keeps what the loss of each has left.
    others = np.maximum(at.held_last - 1, 0.0)
    waiting = [others, at.at_loss_last - 1, others]
    moments_logits = np.stack([*(np.where(at.has_head, count * logits_kept, 0.0) for count in waiting), zero])
    moments_logits[1] += np.where(at.has_head, logits, 0.0)
    moments_logits += np.where(at.has_head, _outputs_left(network, engine, c, acts)[:, None], 0.0)
    moments_buffers = np.stack([state.gathered + passing] * 3 + [state.widened + np.where(is_late, bucket, 0.0)])
    total = base + moments_activations + moments_logits + moments_buffers
    moment, probe = _argmax(total)
    here = np.arange(len(c))

    def at_peak(stacked: NDArray[np.float64]) -> Numbers:
        picked: Numbers = stacked[moment, probe, here]
        return picked

    picked = {
        "weights": state.weights[probe, here], "gradients": state.gradients[probe, here],
        "optimizer": state.optimizer[probe, here], "activations": at_peak(moments_activations),
        "logits": at_peak(moments_logits), "buffers": at_peak(moments_buffers),
        "workspaces": np.full(len(c), workspace_bytes(card, engine, network)),
    }  # fmt: skip
    allocated = sum(picked.values(), np.zeros(len(c)))
    is_mixed = network.experts is not None
    resting = state.resting.max(axis=0) + picked["workspaces"]
    # Tensors are read one after the other; the largest is the embedding or the head, in fp32.
    largest = padded_vocab(network, engine, c) * network.hidden / c.tp * 4.0
    return Memory(
        **picked,
        # A buffer of the step's end is one piece, which is not made of the smaller pieces that are free by then.
        overhead=allocated * (engine.allocator_overhead - 1)
        + np.where(is_late & (moment != MOMENTS.index("update")), bucket, 0.0),
        context=np.full(len(c), float(CONTEXT_BYTES)),
        nccl=_nccl(c),
        pipeline_rank=at.rank[probe, here],
        moment=moment,
        at_moment=total.max(axis=1) + workspace_bytes(card, engine, network),
        save_bytes=resting,
        resume_bytes=resting + largest,
        spread=engine.memory_spread * (3 if is_mixed else 1),
        usable_bytes=float(card.memory_bytes),
        margin=engine.memory_margin * (3 if is_mixed else 1),
    )


def _argmax(total: NDArray[np.float64]) -> tuple[Integers, Integers]:
    """Return (moment, probe) of the largest of [moments, probes, candidates]."""
    moments, ranks, count = total.shape
    index = total.reshape(moments * ranks, count).argmax(axis=0)
    moment, probe = np.divmod(index, ranks)
    return moment, probe


def _outside_kept(
    network: Network, workload: Workload, engine: Engine, c: Candidates, acts: Activations, at: Probes
) -> Numbers:
    """What embedding, last norm and layers that predict further ahead keep of each microbatch."""
    mask = acts.cut_tokens * network.hidden if network.dropout > 0 else 0.0
    e = workload.precision.activation_bytes
    last = 2 * acts.cut_tokens * network.hidden * e
    if network.mtp_depth:
        kind = "expert" if network.expert_layers else "dense"
        one = acts.layers["attention"].kept_again + acts.layers[kind].kept_again
        last = last + network.mtp_depth * (one + 6 * acts.cut_tokens * network.hidden * e)
    kept: Numbers = at.held_first * mask + np.where(at.has_head, at.held_last * last, 0.0)
    if engine.family == "triax":
        # Sines and cosines of every position of a microbatch, once for each stage that it has passed.
        stages = at.held["block"] * c.stages_per_rank / np.maximum(at.layers["block"], 1.0)
        kept = kept + stages * acts.tokens * network.head_dim * 8.0
    return kept


def _logits(
    network: Network, workload: Workload, engine: Engine, c: Candidates, acts: Activations
) -> tuple[Numbers, Numbers]:
    """Bytes of logits and of what a loss makes of them: at their peak, and until the backward."""
    rows = padded_vocab(network, engine, c) / c.tp
    if engine.loss == "chunked":
        # A chunk and its copy in the compute type; gradients of the hidden states and, summed over chunks in fp32, of
        # the head, which are made in the forward; one chunk's product before it is added.
        numbers = np.minimum(acts.tokens * rows, CHUNK_BYTES / 4)
        compute = workload.precision.activation_bytes
        narrow = compute if compute < 4 else 0
        head = rows * network.hidden * 4.0
        kept = head + acts.tokens * network.hidden * workload.precision.activation_bytes
        return numbers * (4.0 + narrow) + head + kept, kept
    compute = workload.precision.activation_bytes
    kind = LOSS_BYTES[engine.loss] if engine.loss_bytes is None else engine.loss_bytes
    peak = kind - 2.0 + min(compute, 4) + engine.deferred_logit_gradients * compute
    # Heads that predict further ahead are done with by then, but for probabilities that their backward needs.
    numbers = acts.tokens * rows
    ahead = LOSS_KEPT_BYTES * network.mtp_depth
    return numbers * (peak + ahead), numbers * (LOSS_KEPT_BYTES + ahead)


def _outputs_left(network: Network, engine: Engine, c: Candidates, acts: Activations) -> NDArray[np.float64]:
    """[moments, candidates]: logits in fp32 in buffers of outputs; at the loss its own are counted already."""
    numbers = acts.tokens * padded_vocab(network, engine, c) / c.tp
    count = np.minimum(c.microbatches, engine.keeps_outputs)
    always = 4.0 * numbers * count
    left: NDArray[np.float64] = np.stack([always, 4.0 * numbers * np.maximum(count - 1, 0), always, always])
    return left


def _pipeline_buffers(workload: Workload, engine: Engine, c: Candidates, acts: Activations, at: Probes) -> Numbers:
    """What comes from and goes to neighbours: an input, an output and the gradient of each; and a mask of attention."""
    mask = c.sequences_per_microbatch * float(workload.seq_len) ** 2 / c.cp if engine.makes_attention_mask else 0.0
    count = np.full(at.rank.shape, 4.0)
    if engine.holds_sent:
        # The first stage receives no input and sends no gradient back, the last one the other way.
        count = (4.0 * c.stages_per_rank - 2.0 * at.has_embedding - 2.0 * at.has_head) * c.microbatches
    buffers: Numbers = np.where(c.pp > 1, count, 0.0) * acts.boundary + mask
    return buffers


def workspace_bytes(card: Card, engine: Engine, network: Network) -> float:
    """Return bytes of the libraries' scratch space for matrix products.

    PyTorch gives cuBLAS 32 MiB on Hopper and 8 MiB elsewhere, in the thread of the forward and in that of the
    backward; an engine that asks for deterministic sums (``engine.cublas_workspace_bytes``) sets it. Transformer Engine
    adds its own of 32 MiB on Hopper and later, 4 MiB before, one more for each stream of grouped products of experts.
    """
    is_new = card.peak_fp8 > 0
    cublas = engine.cublas_workspace_bytes or (32 * MIB if is_new and card.peak_fp4 == 0 else 8.125 * MIB)
    streams = 1 + (engine.grouped_gemm_streams if network.experts is not None else 0)
    return 2 * cublas + streams * (32 * MIB if is_new else 4 * MIB) * engine.has_transformer_engine


def _nccl(c: Candidates) -> Numbers:
    """Bytes of communicators: one for each axis that is cut, and one of all ranks."""
    axes = sum(((degree > 1).astype(np.float64) for degree in (c.pp, c.data_ranks, c.cp, c.tp, c.ep)), np.zeros(len(c)))
    return NCCL_BYTES * np.where(axes > 0, axes + 1, 0.0)
