"""May this layout train this run on this cluster? All reasons why not, at once, before any process starts.

The planner's proposals and the trainer's validation pass through this one function, so that what is proposed is never
refused later.
"""

import math
from typing import Final

from triax.errors import BadInput
from triax.spec.cluster import Cluster
from triax.spec.layout import AXES, Axis, Layout, Refusal
from triax.spec.legal_values import divisors, either, multiples, nearest
from triax.spec.model import ModelSpec
from triax.spec.run import Run
from triax.spec.schedule import legal, splits_backward
from triax.spec.value import LARGEST_SMALL_COUNT

_AXES_NOT_TRAINED: Final[tuple[Axis, ...]] = ("cp",)
"""Axes that can be said and are refused by name until they are built."""


def check(layout: Layout, run: Run, cluster: Cluster | None = None) -> list[Refusal]:
    """Return every reason why ``layout`` cannot train ``run`` on ``cluster``; an empty list means that it can."""
    model = run.model
    refusals = [
        *_axes(layout), *_tensor(layout, model, run.data.seq_len), *_pipeline(layout, model), *_sharing(layout),
        *_step(layout, run),
    ]  # fmt: skip
    return refusals if cluster is None else [*refusals, *_ranks(layout, run, cluster)]


def require_legal(layout: Layout, run: Run, cluster: Cluster | None = None) -> None:
    """Raise BadInput with every refusal, each on its own line, unless ``layout`` is legal."""
    refusals = check(layout, run, cluster)
    if refusals:
        raise BadInput("\n".join(refusal.message for refusal in refusals))


def _axes(layout: Layout) -> list[Refusal]:
    refusals = [
        Refusal(axis, f"{axis}={layout.degree(axis)} is not trained by this version of triax: use {axis}=1.")
        for axis in _AXES_NOT_TRAINED
        if layout.degree(axis) > 1
    ]
    if layout.ep > 1:
        refusals.append(Refusal("ep", f"ep={layout.ep} asks for experts, and this model has none: use ep=1."))
    return refusals


def _tensor(layout: Layout, model: ModelSpec, seq_len: int) -> list[Refusal]:
    """Heads and the sequence must divide over ``tp``; feed-forward and vocabulary need not, but leave no rank idle."""
    tp = layout.tp
    if tp == 1:
        return []
    heads, kv_heads = model.num_attention_heads, model.kv_heads
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "seq_len": seq_len}
    common = [degree for degree in divisors(math.gcd(*sizes.values())) if degree <= model.intermediate_size]
    refusals = [
        Refusal("tp", f"tp={tp} does not divide {name}={size}: use tp={either(nearest(common, tp))}.")
        for name, size in sizes.items()
        if size % tp
    ]
    if model.qk_norm == "full":
        message = f"tp={tp} would cut the norm that spans all heads of this model (qk_norm=full): use tp=1."
        refusals.append(Refusal("tp", message))
    return refusals


def _pipeline(layout: Layout, model: ModelSpec) -> list[Refusal]:
    refusals = legal(layout.schedule, layout.pp, layout.stages_per_rank, layout.microbatches)
    stages, layers, cuts = layout.pp * layout.stages_per_rank, model.num_hidden_layers, layout.stage_cuts
    if stages > layers:
        message = (
            f"pp={layout.pp} x stages_per_rank={layout.stages_per_rank} makes {stages} stages of {layers} layers: use "
            f"pp x stages_per_rank of at most {layers}."
        )
        refusals.append(Refusal("pp", message))
    elif cuts is not None and (len(cuts) != stages or sum(cuts) != layers or min(cuts) < 1):
        even = [layers // stages + (stage >= stages - layers % stages) for stage in range(stages)]
        message = (
            f"stage_cuts={list(cuts)[:8]} must be {stages} counts of layers that sum to {layers}: use "
            f"stage_cuts={even[:8]}{' ...' if len(even) > 8 else ''}, or leave it out."
        )
        refusals.append(Refusal("stage_cuts", message))
    if splits_backward(layout.schedule) and layout.zero == 3 and layout.dp_shard > 1:
        message = (
            f"schedule={layout.schedule} splits backwards in two, and zero=3 would gather weights once more for each "
            f"part: use zero=1 or zero=2, or schedule=1F1B or Interleaved1F1B."
        )
        refusals.append(Refusal("zero", message))
    return refusals


def _sharing(layout: Layout) -> list[Refusal]:
    if layout.zero > 0 or layout.dp_shard == 1:
        return []
    message = (
        f"zero=0 shares nothing, and dp_shard={layout.dp_shard} asks for sharing: use "
        f"dp_replicate={layout.data_ranks} dp_shard=1, or zero=1, zero=2 or zero=3."
    )
    return [Refusal("zero", message)]


def _step(layout: Layout, run: Run) -> list[Refusal]:
    """Sequences of a step must divide over data ranks, and each data rank's share over its microbatches."""
    asked, data_ranks = run.sequences_per_step, layout.data_ranks
    if asked == layout.sequences_per_step:
        return []
    if asked % data_ranks:
        what = "is smaller than" if asked < data_ranks else "does not divide over"
        message = (
            f"a step of {asked} sequences {what} the {data_ranks} data ranks (dp_replicate={layout.dp_replicate} x "
            f"dp_shard={layout.dp_shard}): {_step_sizes(run, data_ranks)}make dp_replicate x dp_shard equal "
            f"{either(nearest(divisors(asked), data_ranks))}."
        )
        return [Refusal("data_ranks", message)]
    share = asked // data_ranks
    cuts = [(share // sequences, sequences) for sequences in nearest(divisors(share), layout.sequences_per_microbatch)]
    if share % layout.microbatches == 0:
        cuts.insert(0, (layout.microbatches, share // layout.microbatches))
    fitting = (f"microbatches={count} sequences_per_microbatch={each}" for count, each in dict.fromkeys(cuts))
    message = (
        f"microbatches={layout.microbatches} x sequences_per_microbatch={layout.sequences_per_microbatch} do not make "
        f"the {share} sequences that each of {data_ranks} data ranks has in a step: use {either(fitting)}."
    )
    return [Refusal("microbatches", message)]


def _step_sizes(run: Run, data_ranks: int) -> str:
    """Return the start of advice: the nearest sizes of a step that ``data_ranks`` divide, in the unit the run uses."""
    sizes = [size for size in multiples(data_ranks, run.sequences_per_step) if size <= LARGEST_SMALL_COUNT]
    key, unit = (
        ("sequences_per_step", 1) if run.train.tokens_per_step is None else ("tokens_per_step", run.data.seq_len)
    )
    return f"use {either(f'train.{key}={size * unit}' for size in sizes)}, or " if sizes else ""


def _ranks(layout: Layout, run: Run, cluster: Cluster) -> list[Refusal]:
    needed, there = layout.world_size, cluster.num_cards
    if needed == there:
        return []
    degrees = " x ".join(f"{axis}={layout.degree(axis)}" for axis in AXES if layout.degree(axis) > 1) or "one rank"
    axis: Axis = "dp_replicate" if layout.zero == 0 else "dp_shard"
    others = needed // layout.degree(axis)
    fits = (
        there % others == 0
        and run.sequences_per_step % (there // others * layout.data_ranks // layout.degree(axis)) == 0
    )
    instead = f"use {axis}={there // others}" if fits else f"choose degrees whose product is {there}"
    message = f"{degrees} needs {needed} ranks, and there are {there}: start {needed} ranks, or {instead}."
    return [Refusal("world_size", message)]
