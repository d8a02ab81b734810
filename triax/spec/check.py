"""May this layout train this run on this cluster? All reasons why not, at once, before any process starts.

The planner's proposals and the trainer's validation pass through this one function, so that what is proposed is never
refused later.
"""

from typing import Final

from triax.errors import BadInput
from triax.spec.cluster import Cluster
from triax.spec.layout import AXES, Axis, Layout, Refusal
from triax.spec.legal_values import divisors, either, multiples, nearest
from triax.spec.run import Run
from triax.spec.schedule import legal
from triax.spec.value import LARGEST_SMALL_COUNT

_AXES_TRAINED: Final[tuple[Axis, ...]] = ("dp_replicate", "dp_shard")
"""Axes that the engine can execute; the others can be said, and are refused by name."""


def check(layout: Layout, run: Run, cluster: Cluster | None = None) -> list[Refusal]:
    """Return every reason why ``layout`` cannot train ``run`` on ``cluster``; an empty list means that it can."""
    refusals = [*_axes(layout), *_pipeline(layout), *_sharing(layout), *_step(layout, run)]
    return refusals if cluster is None else [*refusals, *_ranks(layout, run, cluster)]


def require_legal(layout: Layout, run: Run, cluster: Cluster | None = None) -> None:
    """Raise BadInput with every refusal, each on its own line, unless ``layout`` is legal."""
    refusals = check(layout, run, cluster)
    if refusals:
        raise BadInput("\n".join(refusal.message for refusal in refusals))


def _axes(layout: Layout) -> list[Refusal]:
    refusals = [
        Refusal(axis, f"{axis}={layout.degree(axis)} is not trained by this version of triax: use {axis}=1.")
        for axis in AXES
        if axis not in _AXES_TRAINED and layout.degree(axis) > 1
    ]
    if layout.ep > 1:
        refusals.append(Refusal("ep", f"ep={layout.ep} asks for experts, and this model has none: use ep=1."))
    return refusals


def _pipeline(layout: Layout) -> list[Refusal]:
    """Judge what concerns the pipeline alone, at the ``pp`` that this version trains: heeding all advice is enough."""
    pp = layout.pp if "pp" in _AXES_TRAINED else 1
    why = "needs pp=2 or more, which is not trained by this version of triax"
    refusals = legal(layout.schedule, pp, layout.stages_per_rank, layout.microbatches)
    if any(refusal.key == "schedule" for refusal in refusals):
        message = f"schedule={layout.schedule} {why}: use schedule=1F1B stages_per_rank=1."
        refusals = [Refusal("schedule", message)]
    if layout.stage_cuts is not None and pp == 1:
        cuts = f"stage_cuts={list(layout.stage_cuts)[:8]}"
        refusals.append(Refusal("stage_cuts", f"{cuts} {why}: leave it out."))
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
