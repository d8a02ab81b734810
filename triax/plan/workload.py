"""What is one step made of: how many sequences, how long, in which numbers, with which optimizer?"""

from dataclasses import dataclass
from typing import Literal

from triax.plan.hardware import MatmulDtype
from triax.spec.run import Run

Recipe = Literal[
    "fp64", "fp32", "bf16", "fp16", "fp8_delayed", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"
]
Optimizer = Literal["adamw", "adam8bit", "sgd", "muon", "adafactor"]


@dataclass(frozen=True, slots=True)
class Precision:
    """In which numbers a step computes."""

    recipe: Recipe
    matmul: MatmulDtype
    """Type of the linear layers' products; attention, norms, router and head stay in the 16-bit type or fp32."""
    activation_bytes: int
    """Bytes of a number that flows between layers."""
    matmul_input_bytes: float
    """Bytes of a linear layer's input as it is kept for the backward."""
    weight_cache_bytes: float = 0.0
    """Bytes a weight for its quantised copies that are kept, whatever the engine keeps besides."""

    @property
    def is_quantised(self) -> bool:
        """Linear layers compute in 8 or 4 bits."""
        return self.matmul in ("fp8", "fp4")


_PRECISIONS: tuple[Precision, ...] = (
    Precision("fp64", "fp32", 8, 8),
    Precision("fp32", "fp32", 4, 4),
    Precision("bf16", "bf16", 2, 2),
    Precision("fp16", "fp16", 2, 2),
    # Hopper multiplies 8-bit matrices in one orientation only: a transposed copy of each weight is kept as well.
    Precision("fp8_delayed", "fp8", 2, 1, 2),
    Precision("fp8_tensorwise", "fp8", 2, 1, 2),
    Precision("fp8_rowwise", "fp8", 2, 2, 2),
    Precision("fp8_blockwise", "fp8", 2, 1, 2),
    Precision("mxfp8", "fp8", 2, 1 + 1 / 32, 2 + 2 / 32),
    Precision("nvfp4", "fp4", 2, 0.5 + 1 / 16, 1 + 2 / 16),
)


def precision(recipe: Recipe) -> Precision:
    """Return what ``recipe`` computes in."""
    return next(each for each in _PRECISIONS if each.recipe == recipe)


@dataclass(frozen=True, slots=True)
class Workload:
    """One step, whatever the layout."""

    sequences_per_step: int
    seq_len: int
    precision: Precision
    attended: float | None = None
    """Positions that a token sees on average in a layer without a window; absent means causal over the sequence."""
    optimizer: Optimizer = "adamw"
    lora_rank: int = 0
    """Width of low-rank adapters that are trained instead of the weights; 0: the weights are."""
    grad_reduce_bytes: int | None = None
    """Bytes of a gradient while it is summed over ranks; absent means as the engine does."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update over all ranks."""
        return self.sequences_per_step * self.seq_len

    @property
    def mean_attended(self) -> float:
        """Positions that a token sees on average where no window limits it."""
        return (self.seq_len + 1) / 2 if self.attended is None else self.attended


def workload_of(run: Run) -> Workload:
    """Return the step that a run's file asks for."""
    recipes: dict[str, Recipe] = {"bf16": "bf16", "fp32": "fp32", "fp64": "fp64"}
    optimizers: dict[str, Optimizer] = {"adamw": "adamw", "sgd": "sgd"}
    widths = {"bf16": 2, "fp32": 4, "fp64": 8}
    return Workload(
        sequences_per_step=run.sequences_per_step,
        seq_len=run.data.seq_len,
        precision=precision(recipes[run.precision.compute]),
        optimizer=optimizers[run.optimizer.name],
        grad_reduce_bytes=widths[run.precision.reduce],
    )
