"""Which layout is meant when a run file fixes some keys and leaves others open?

Until a plan says better, an absent degree is 1, except that data parallelism takes the ranks that are left.
"""

from math import prod
from typing import Final

from triax.errors import BadInput
from triax.spec.check import check
from triax.spec.faults import validated
from triax.spec.layout import AXES, Axis, Layout
from triax.spec.legal_values import divisors, either, multiples
from triax.spec.run import LayoutRequest, Run
from triax.spec.schedule import schedule_kind, splits_backward

_TOKENS_PER_MICROBATCH: Final = 8192
"""Tokens of one forward on one rank when the run file leaves it open: *assumed*, large enough to fill a matmul."""

_ZERO: Final = 3
"""What data parallelism shares when the run file leaves it open: everything, the least memory."""

_ZERO_OF_SPLIT_BACKWARDS: Final = 2
"""The most that a schedule with split backwards can share."""

_MICROBATCHES_PER_STAGE: Final = 4
"""Microbatches for each pipeline rank where the step is large enough (*assumed*): a bubble of a fifth under 1F1B."""


def resolve_layout(run: Run, world_size: int) -> Layout:
    """Return the layout of ``run`` on ``world_size`` ranks.

    Raises BadInput where the given keys leave none, with what else is wrong with them. Where there is one, it is for
    ``triax.spec.check`` to say what is wrong with it.
    """
    if world_size < 1:
        raise BadInput(f"{world_size} ranks train nothing: start 1 or more.")
    schedule = run.layout.schedule or "1F1B"
    zero = run.layout.zero
    if zero is None:
        zero = _ZERO_OF_SPLIT_BACKWARDS if splits_backward(schedule) else _ZERO
    degrees, misfit = _degrees(run.layout, "dp_replicate" if zero == 0 else "dp_shard", world_size)
    sequences, microbatches = _cut_step(run, degrees["dp_replicate"] * degrees["dp_shard"])
    given = run.layout.model_dump(exclude_none=True)
    given.setdefault("stages_per_rank", schedule_kind(schedule).min_stages_per_rank)
    resolved = {"zero": zero, "sequences_per_microbatch": sequences, "microbatches": microbatches}
    layout = validated(Layout, given | degrees | resolved, f"the layout on {world_size} ranks")
    if misfit:
        # Another number of ranks changes how a step is cut, and nothing else that can be wrong.
        others = [
            refusal.message for refusal in check(layout, run) if refusal.key not in ("data_ranks", "microbatches")
        ]
        raise BadInput("\n".join([misfit, *others]))
    return layout


def _degrees(request: LayoutRequest, rest: Axis, world_size: int) -> tuple[dict[str, int], str]:
    """Return a degree for each axis, and why they do not make up the ranks (empty where they do).

    ``rest`` takes the ranks that the others leave, unless it is given.
    """
    misfit = ""
    given: dict[Axis, int | None] = {axis: getattr(request, axis) for axis in AXES}
    degrees = {axis: given[axis] or 1 for axis in AXES}
    group = prod(degrees.values())
    if given[rest] is None:
        if world_size % group:
            said = " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
            misfit = (
                f"{said} takes ranks in groups of {group}, and {world_size} ranks are no multiple of that: start "
                f"{either(multiples(group, world_size))} ranks."
            )
        degrees[rest] = max(world_size // group, 1)
    return {str(axis): degree for axis, degree in degrees.items()}, misfit


def _cut_step(run: Run, data_ranks: int) -> tuple[int, int]:
    """Return (sequences per microbatch, microbatches) for one data rank."""
    share = max(run.sequences_per_step // data_ranks, 1)
    sequences, microbatches = run.layout.sequences_per_microbatch, run.layout.microbatches
    if sequences is None and microbatches is not None:
        sequences = max(share // microbatches, 1)
    elif sequences is None:
        limit = max(_TOKENS_PER_MICROBATCH * (run.layout.cp or 1) // run.data.seq_len, 1)
        pp = run.layout.pp or 1
        if pp > 1:
            limit = max(min(limit, share // (_MICROBATCHES_PER_STAGE * pp)), 1)
        sequences = max(divisor for divisor in divisors(share) if divisor <= limit)
    if microbatches is None:
        microbatches = max(share // sequences, 1)
    return sequences, microbatches
