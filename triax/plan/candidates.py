"""Which layouts are being compared? Integer arrays, one entry a layout, so that a million cost one pass.

Every model of memory and time reads these arrays, with one entry for a page and with a million for a search.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import permutations
from typing import Any, Final, Self, get_args

import numpy as np
from numpy.typing import NDArray

from triax.spec.layout import AXES, Axis, ContextMethod, Layout, Recompute
from triax.spec.schedule import SCHEDULES

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]

ORDERS: Final[tuple[tuple[Axis, ...], ...]] = tuple(permutations(AXES))
"""Every order of the axes, outermost first; ``order`` is an index into it, and 0 is the layout's default."""
SCHEDULE_NAMES: Final[tuple[str, ...]] = tuple(SCHEDULES)
"""``schedule`` is an index into it."""
CP_METHODS: Final[tuple[ContextMethod, ...]] = get_args(ContextMethod)
"""``cp_method`` is an index into it, and 0 is the layout's default."""

# What is computed again in the backward, as bits of ``recompute``. The layout's own three are the first and the last.
CORE_ATTENTION: Final = 1
NORMS: Final = 2
ACTIVATION: Final = 4
"""Between the two matrices of a feed-forward, of experts too."""
LATENT_UP: Final = 8
"""Up-projections of multi-head latent attention."""
MLP: Final = 16
EXPERTS: Final = 32
SHARED_EXPERTS: Final = 64
SELECTIVE: Final = 128
"""All but the outputs of matrix products and attention (``selective`` of a layout, torchtitan's per-operator kind)."""
FULL: Final = 256
RECOMPUTE: Final[Mapping[Recompute, int]] = {"none": 0, "selective": SELECTIVE, "full": FULL}


@dataclass(frozen=True, eq=False)
class Candidates:
    """Layouts as arrays of equal length. Fields mean what they mean in ``triax.spec.layout.Layout``."""

    pp: Integers
    dp_replicate: Integers
    dp_shard: Integers
    cp: Integers
    cp_method: Integers
    tp: Integers
    ep: Integers
    etp: Integers
    """Parts that each expert's matrices are cut into; a layout says 1, and older Megatron uses tp."""
    zero: Integers
    schedule: Integers
    stages_per_rank: Integers
    sequences_per_microbatch: Integers
    microbatches: Integers
    recompute: Integers
    """Bits; 0 is none."""
    recompute_layers: Integers
    """Layers of each stage that recompute; 0 means all."""
    layers_per_checkpoint: Integers
    """Layers between two kept inputs under FULL."""
    offload_layers: Integers
    """Layers of each stage whose activations wait in the server's memory."""
    order: Integers
    sequence_parallel: Integers
    """1: norms and residuals are cut along the sequence over tp."""
    cut: Integers
    """Index into ``cuts``; -1 means as the engine cuts: evenly, or by cost in a layout."""
    cuts: tuple[tuple[int, ...], ...] = ()
    """Layers in each stage, first stage first."""

    def __len__(self) -> int:
        return len(self.pp)

    @classmethod
    def of(cls, count: int | None = None, *, cuts: tuple[tuple[int, ...], ...] = (), **columns: Any) -> Self:
        """Return candidates from columns, broadcast to one length; a column not given has its default.

        Defaults are a layout's: degrees of 1, ZeRO-1, 1F1B, no recompute, sequence parallelism wherever tp is cut.
        """
        defaults = dict.fromkeys(_NAMES, 1) | {
            "schedule": SCHEDULE_NAMES.index("1F1B"), "recompute": 0, "recompute_layers": 0, "offload_layers": 0,
            "order": 0, "cut": -1, "cp_method": 0,
        }  # fmt: skip
        unknown = columns.keys() - defaults.keys()
        if unknown:
            raise TypeError(f"no column of candidates: {', '.join(sorted(unknown))}")
        given = {name: np.asarray(columns.get(name, value), dtype=np.int64) for name, value in defaults.items()}
        length = np.broadcast_shapes((1 if count is None else count,), *(column.shape for column in given.values()))
        return cls(**{name: np.broadcast_to(column, length) for name, column in given.items()}, cuts=cuts)

    @classmethod
    def from_layouts(cls, layouts: Sequence[Layout]) -> Self:
        """Return one candidate for each layout."""
        columns: dict[str, list[int]] = {
            name: [int(getattr(layout, name)) for layout in layouts] for name in _NAMES & Layout.model_fields.keys()
            if name not in ("schedule", "recompute", "order", "cp_method")
        }  # fmt: skip
        columns["cp_method"] = [CP_METHODS.index(layout.cp_method) for layout in layouts]
        columns["schedule"] = [SCHEDULE_NAMES.index(layout.schedule) for layout in layouts]
        columns["recompute"] = [RECOMPUTE[layout.recompute] for layout in layouts]
        columns["order"] = [ORDERS.index(layout.order) for layout in layouts]
        cuts = tuple(dict.fromkeys(layout.stage_cuts for layout in layouts if layout.stage_cuts is not None))
        columns["cut"] = [-1 if layout.stage_cuts is None else cuts.index(layout.stage_cuts) for layout in layouts]
        return cls.of(len(layouts), cuts=cuts, **columns)

    def take(self, chosen: NDArray[Any] | Sequence[int]) -> Self:
        """Return the candidates that a mask or indices choose, in their order."""
        index = np.asarray(chosen)
        index = index if index.dtype == np.bool_ else index.astype(np.int64)
        return type(self)(**{name: getattr(self, name)[index] for name in _NAMES}, cuts=self.cuts)

    def layout(self, index: int) -> Layout:
        """Return one candidate as a layout; raise ValueError where a layout cannot say it."""
        recompute = {bits: name for name, bits in RECOMPUTE.items()}.get(int(self.recompute[index]))
        beyond = [name for name, plain in _PLAIN.items() if int(getattr(self, name)[index]) != plain]
        if recompute is None or beyond:
            raise ValueError(f"a layout has no word for {', '.join(beyond) or 'this kind of recompute'}")
        cut = int(self.cut[index])
        named: dict[str, Any] = {axis: int(getattr(self, axis)[index]) for axis in (*AXES, "ep")}
        named["schedule"] = SCHEDULE_NAMES[int(self.schedule[index])]
        named["cp_method"] = CP_METHODS[int(self.cp_method[index])]
        return Layout(
            **named,
            zero=int(self.zero[index]),
            stages_per_rank=int(self.stages_per_rank[index]),
            stage_cuts=None if cut < 0 else self.cuts[cut],
            sequences_per_microbatch=int(self.sequences_per_microbatch[index]),
            microbatches=int(self.microbatches[index]),
            recompute=recompute,
            order=ORDERS[int(self.order[index])],
        )

    @property
    def data_ranks(self) -> Integers:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> Integers:
        """Ranks that a layout needs."""
        return self.pp * self.data_ranks * self.cp * self.tp

    def degree(self, axis: Axis) -> Integers:
        """Return the number of parts along ``axis``."""
        column: Integers = getattr(self, axis)
        return column

    def stride(self, axis: Axis) -> Integers:
        """Return how many ranks apart two neighbours along ``axis`` are: the product of all degrees inside it."""
        return self._inside(axis, _INSIDE[AXES.index(axis)])

    def _inside(self, axis: Axis, inside: NDArray[np.bool_]) -> Integers:
        stride = np.ones(len(self), dtype=np.int64)
        for other in AXES:
            if other != axis:
                stride = np.where(inside[self.order, AXES.index(other)], stride * self.degree(other), stride)
        return stride


_NAMES: Final = frozenset(field.name for field in fields(Candidates)) - {"cuts"}
_PLAIN: Final = {"etp": 1, "recompute_layers": 0, "layers_per_checkpoint": 1, "offload_layers": 0}
_INSIDE: Final[NDArray[np.bool_]] = np.array(
    [[[order.index(other) > order.index(axis) for other in AXES] for order in ORDERS] for axis in AXES]
)
"""[axis, order, other]: whether ``other`` counts faster than ``axis``."""
