"""May this layout train this run on this cluster? All reasons why not, at once, before any process starts.

The planner's proposals and the trainer's validation pass through this one function, so that what is proposed is never
refused later.
"""

from triax.errors import BadInput
from triax.spec.cluster import Cluster
from triax.spec.layout import AXES, Layout, Refusal
from triax.spec.run import Run

_AXES_TRAINED = ("dp_replicate", "dp_shard")
"""Axes that the engine can execute; the others can be said, and are refused by name."""


def check(layout: Layout, run: Run, cluster: Cluster | None = None) -> list[Refusal]:
    """Return every reason why ``layout`` cannot train ``run`` on ``cluster``; an empty list means that it can."""
    refusals = [*_axes(layout), *_step(layout, run), *_sharing(layout)]
    if cluster is not None and layout.world_size != cluster.num_cards:
        degrees = " x ".join(f"{axis}={layout.degree(axis)}" for axis in AXES if layout.degree(axis) > 1) or "one rank"
        refusals.append(
            Refusal(
                "world_size",
                f"{degrees} needs {layout.world_size} ranks, and there are {cluster.num_cards}: start "
                f"{layout.world_size} ranks, or choose degrees whose product is {cluster.num_cards}.",
            )
        )
    return refusals


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
    if layout.pp == 1 and layout.stages_per_rank > 1:
        refusals.append(
            Refusal("stages_per_rank", f"stages_per_rank={layout.stages_per_rank} needs a pipeline: use 1 where pp=1.")
        )
    if layout.pp == 1 and layout.schedule not in ("1F1B", "GPipe"):
        refusals.append(
            Refusal("schedule", f"schedule={layout.schedule} needs a pipeline: use 1F1B or GPipe where pp=1.")
        )
    if layout.stage_cuts is not None and layout.pp == 1:
        refusals.append(Refusal("stage_cuts", f"stage_cuts={list(layout.stage_cuts)} needs a pipeline: leave it out."))
    return refusals


def _step(layout: Layout, run: Run) -> list[Refusal]:
    asked, laid = run.sequences_per_step, layout.sequences_per_step
    if asked == laid:
        return []
    unit = layout.data_ranks * layout.sequences_per_microbatch
    if asked < layout.data_ranks:
        message = (
            f"a step of {asked} sequences is smaller than the {layout.data_ranks} data ranks "
            f"(dp_replicate={layout.dp_replicate} x dp_shard={layout.dp_shard}): use at most {asked} data ranks, or at "
            f"least {layout.data_ranks} sequences per step."
        )
    elif asked % layout.data_ranks:
        message = (
            f"a step of {asked} sequences does not divide over {layout.data_ranks} data ranks: use "
            f"{_multiples_text(asked, layout.data_ranks)} sequences per step, or {_divisors_text(asked)} data ranks."
        )
    elif asked % unit:
        message = (
            f"sequences_per_microbatch={layout.sequences_per_microbatch} does not divide the "
            f"{asked // layout.data_ranks} sequences that each of {layout.data_ranks} data ranks has in a step: use "
            f"{_divisors_text(asked // layout.data_ranks)}."
        )
    else:
        message = (
            f"microbatches={layout.microbatches} x sequences_per_microbatch={layout.sequences_per_microbatch} x "
            f"{layout.data_ranks} data ranks make {laid} sequences, and a step has {asked}: use "
            f"microbatches={asked // unit}."
        )
    return [Refusal("microbatches", message)]


def _multiples_text(number: int, unit: int) -> str:
    below, above = number // unit * unit, (number // unit + 1) * unit
    return f"{below} or {above}" if below else f"{above}"


def _divisors_text(number: int, limit: int = 8) -> str:
    divisors = [divisor for divisor in range(1, min(number, 1 << 16) + 1) if number % divisor == 0][:limit]
    return ", ".join(map(str, divisors[:-1])) + (" or " if len(divisors) > 1 else "") + str(divisors[-1])


def _sharing(layout: Layout) -> list[Refusal]:
    if layout.zero == 0 and layout.dp_shard > 1:
        return [
            Refusal(
                "zero",
                f"zero=0 shares nothing, and dp_shard={layout.dp_shard} asks for sharing: use "
                f"dp_replicate={layout.dp_replicate * layout.dp_shard} dp_shard=1, or zero=1, 2 or 3.",
            )
        ]
    return []
