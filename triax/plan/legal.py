"""May these layouts train this case? The rules of ``triax.spec.check`` and of other frameworks, for a million at once.

For triax's own engine a test holds the mask equal to ``check``; for others these are the rules their own arguments
state. No reasons are given here: ``check`` says them, for the one layout that somebody asked about.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from triax.plan.candidates import CP_METHODS, SCHEDULE_NAMES, SELECTIVE, Candidates, Integers
from triax.plan.case import Case
from triax.plan.engine import Family
from triax.spec.schedule import SCHEDULES

Mask = NDArray[np.bool_]

_MOST: Final = 1 << 14
"""Stages a rank without a limit of the schedule's own."""
_MIN_PP: Final = np.array([SCHEDULES[name].min_pp for name in SCHEDULE_NAMES])
_MIN_STAGES: Final = np.array([SCHEDULES[name].min_stages_per_rank for name in SCHEDULE_NAMES])
_MAX_STAGES: Final = np.array([SCHEDULES[name].max_stages_per_rank or _MOST for name in SCHEDULE_NAMES])
_SPLITS: Final = np.array([SCHEDULES[name].splits_backward for name in SCHEDULE_NAMES])

_RING: Final = CP_METHODS.index("ring")
_EXCHANGES: Final = CP_METHODS.index("all_to_all")

ZERO_STAGES: Final[Mapping[Family, tuple[int, ...]]] = {
    "triax": (0, 1, 2, 3),
    "megatron": (0, 1),
    "fsdp": (0, 2, 3),
    "deepspeed": (0, 1, 2, 3),
    "jax": (0, 3),
}
"""What the data axes can share in frameworks of a family. Megatron: its distributed optimizer. FSDP: SHARD_GRAD_OP and
FULL_SHARD."""


def legal_mask(case: Case, candidates: Candidates) -> Mask:
    """Return which candidates the engine of ``case`` can train on exactly the cards of its machine."""
    c, engine = candidates, case.engine
    fits: Mask = (c.world_size == case.machine.cards) & _step(case, c) & _tensor(case, c) & _pipeline(case, c)
    fits &= _sharing(case, c) & _experts(case, c) & _context(case, c)
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        if axis not in engine.axes:
            fits &= getattr(c, axis) == 1
    return fits


def _step(case: Case, c: Candidates) -> Mask:
    mask: Mask = c.data_ranks * c.sequences_per_microbatch * c.microbatches == case.workload.sequences_per_step
    return mask


def _tensor(case: Case, c: Candidates) -> Mask:
    network, tp = case.network, c.tp
    fits: Mask = (network.heads % tp == 0) & (network.kv_heads % tp == 0) & (case.workload.seq_len % tp == 0)
    if network.dense_layers:
        fits &= _feeds_all(network.ffn, tp)
    fits &= _feeds_all(network.vocab, tp)
    if network.state_space is not None:
        fits &= (network.state_space.heads % tp == 0) & (network.state_space.groups % tp == 0)
    return fits if network.qk_norm != "full" else fits & (tp == 1)


def _context(case: Case, c: Candidates) -> Mask:
    """Causal attention is balanced by giving each rank a part from the front and one from the back."""
    length, network = case.workload.seq_len, case.network
    if case.engine.family != "triax":
        fits: Mask = (c.cp == 1) | (length % (2 * c.cp * c.tp) == 0)
        return fits
    fits = (c.cp == 1) | ((length % (2 * c.cp) == 0) & (length // c.cp % c.tp == 0))
    # What is exchanged for positions are whole heads of what tensor parallelism leaves.
    ways = c.cp * c.tp
    fits &= (c.cp_method != _EXCHANGES) | ((network.heads % ways == 0) & (network.kv_heads % ways == 0))
    if network.window is not None and network.window < length and network.windowed_layers:
        fits &= (c.cp_method != _RING) | (c.cp == 1)
    return fits


def _feeds_all(size: int, parts: Integers) -> Mask:
    """Whether each of ``parts`` gets something of ``size`` when all but the last get the same, rounded up."""
    mask: Mask = -(-size // parts) * (parts - 1) < size
    return mask


def _pipeline(case: Case, c: Candidates) -> Mask:
    stages, per_rank, kind = c.pp * c.stages_per_rank, c.stages_per_rank, c.schedule
    fits: Mask = (stages <= case.network.layers) & (c.pp >= _MIN_PP[kind])
    fits &= (per_rank >= _MIN_STAGES[kind]) & (per_rank <= _MAX_STAGES[kind])
    split = _SPLITS[kind]
    mask: Mask = fits & ~(split & (c.zero == 3)) & ~(split & ((c.recompute & SELECTIVE) > 0))
    return mask


def _sharing(case: Case, c: Candidates) -> Mask:
    mask: Mask = np.isin(c.zero, ZERO_STAGES[case.engine.family]) & ((c.zero > 0) | (c.dp_shard == 1))
    if case.engine.family == "deepspeed":
        mask &= (c.pp == 1) | (c.zero <= 1)  # its pipeline refuses to share gradients
    return mask


def _experts(case: Case, c: Candidates) -> Mask:
    experts = case.network.experts
    if experts is None:
        none: Mask = (c.ep == 1) & (c.etp == 1)
        return none
    mask: Mask = (experts.count % c.ep == 0) & ((c.dp_shard * c.cp * c.tp) % (c.ep * c.etp) == 0)
    return mask
