"""Which layout is meant when a run file fixes some keys and leaves others open?

Until a plan says better, an absent degree is 1, except that data parallelism takes the ranks that are left.
"""

from triax.errors import BadInput
from triax.spec.layout import AXES, Layout
from triax.spec.run import Run

_TOKENS_PER_MICROBATCH = 8192
"""Tokens of one forward on one rank when the run file leaves it open: *assumed*, large enough to fill a matmul."""


def resolve_layout(run: Run, world_size: int) -> Layout:
    """Return the layout of ``run`` on ``world_size`` ranks; raise BadInput where the given keys leave none."""
    given = run.layout.model_dump(exclude_none=True)
    zero = given.get("zero", 3)
    rest = "dp_replicate" if zero == 0 else "dp_shard"
    degrees = {axis: given.get(axis, 1) for axis in AXES}
    fixed = 1
    for axis in AXES:
        if axis != rest or rest in given:
            fixed *= degrees[axis]
    if rest not in given:
        if world_size % fixed:
            said = " ".join(f"{axis}={degrees[axis]}" for axis in AXES if degrees[axis] > 1)
            raise BadInput(
                f"{said} takes ranks in groups of {fixed}, which does not divide the {world_size} ranks there are: "
                f"start {max(world_size // fixed, 1) * fixed} or {(world_size // fixed + 1) * fixed} ranks."
            )
        degrees[rest] = world_size // fixed
    data_ranks = degrees["dp_replicate"] * degrees["dp_shard"]
    sequences, microbatches = _cut_step(run, data_ranks, given)
    others = {key: value for key, value in given.items() if key not in degrees}
    others |= {"zero": zero, "sequences_per_microbatch": sequences, "microbatches": microbatches}
    return Layout(**degrees, **others)


def _cut_step(run: Run, data_ranks: int, given: dict[str, int]) -> tuple[int, int]:
    """Return (sequences per microbatch, microbatches) for one data rank.

    What does not divide is left for ``triax.spec.check`` to refuse, together with everything else that is wrong.
    """
    share = max(run.sequences_per_step // data_ranks, 1)
    sequences, microbatches = given.get("sequences_per_microbatch"), given.get("microbatches")
    if sequences is None and microbatches is not None:
        sequences = max(share // microbatches, 1)
    elif sequences is None:
        limit = max(_TOKENS_PER_MICROBATCH // run.data.seq_len, 1)
        sequences = max(divisor for divisor in range(1, min(limit, share) + 1) if share % divisor == 0)
    if microbatches is None:
        microbatches = max(share // sequences, 1)
    return sequences, microbatches
