"""What are the metrics called, and how do rates and utilisation come from what was measured of a step?

Torch-free. A metric is absent where it is not known: no zero ever stands for "not measured".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from triax.units import format_count
from triax.watch.experts import LayerLoad, expert_metrics

MetricValue = int | float | str
Metrics = Mapping[str, MetricValue]

STEP: Final = "step"
TOKENS: Final = "tokens"
LOSS: Final = "train/loss"
GRAD_NORM: Final = "train/grad_norm"
LEARNING_RATE: Final = "train/lr"
EVAL_LOSS: Final = "eval/loss"
EVAL_PERPLEXITY: Final = "eval/perplexity"
TOKENS_PER_SEC: Final = "throughput/tokens_per_sec"
DEVICE_TOKENS_PER_SEC: Final = "throughput/device/tokens_per_sec"
MFU: Final = "throughput/device/mfu"
TFLOPS: Final = "throughput/device/tflops"
STEP_S: Final = "time/step_s"
DATA_S: Final = "time/data_s"
CHECKPOINT_STALL_S: Final = "time/checkpoint_stall_s"
PEAK_ACTIVE_GIB: Final = "memory/peak_active_gib"
PEAK_RESERVED_GIB: Final = "memory/peak_reserved_gib"
UTILIZATION: Final = "device/utilization"
SAMPLE_HASH: Final = "data/sample_hash"

KEYS: Final = (
    STEP, TOKENS, LOSS, GRAD_NORM, LEARNING_RATE, EVAL_LOSS, EVAL_PERPLEXITY, TOKENS_PER_SEC, DEVICE_TOKENS_PER_SEC,
    MFU, TFLOPS, STEP_S, DATA_S, CHECKPOINT_STALL_S, PEAK_ACTIVE_GIB, PEAK_RESERVED_GIB, UTILIZATION, SAMPLE_HASH,
)  # fmt: skip
"""Every metric key, in the order of ``metrics.jsonl``; behind them those of experts (``triax.watch.experts``)."""


def predicted(key: str) -> str:
    """Return the key of what the plan promised for ``key``: ``"time/step_s"`` -> ``"time/predicted_step_s"``."""
    group, slash, name = key.rpartition("/")
    return f"{group}{slash}predicted_{name}"


@dataclass(frozen=True, slots=True)
class PeakFlops:
    """The most that one device can do, in the run's compute precision, and how that is known."""

    flops_per_s: float
    source: str
    """Completes "the peak of 989 TFLOP/s comes from ...": ``cluster.toml``, ``a matmul measured at the start``."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What was measured of one step. Sums are over all ranks; memory and utilisation are of the reporting rank."""

    step: int
    tokens: int
    """Tokens trained on from the first step to this one."""
    loss: float
    """Mean over the tokens that count, over all ranks."""
    grad_norm: float
    """Before clipping, over all weights of the model."""
    lr: float
    tokens_in_step: int
    """Tokens that went through the network in this step: padding and ignored labels cost time too, so they count."""
    step_s: float
    """From the end of the step before to the end of this one, checkpoint stall included."""
    data_s: float
    """Part of step_s in which the device waited for data."""
    checkpoint_stall_s: float = 0.0
    """Part of step_s in which training waited for a checkpoint."""
    peak_active_bytes: int | None = None
    """Most memory in live tensors since the step before; see ``triax.watch.device``."""
    peak_reserved_bytes: int | None = None
    """Most memory taken from the device since the step before."""
    utilization: float | None = None
    """0 to 1."""
    sample_hash: str | None = None
    eval_loss: float | None = None
    """Mean over the held-out tokens, in the steps that measure it."""
    experts: Sequence[LayerLoad] = ()
    """Of each layer with experts."""


def to_metrics(
    record: StepRecord, *, flops_per_token: float, num_devices: int, peak: PeakFlops | None
) -> dict[str, MetricValue]:
    """Return the metrics of ``record`` under their keys; those that are not known are absent.

    ``flops_per_token``: ``triax.spec.flops``, forward and backward, recompute not counted. ``mfu`` is a part (0.4, not
    40 %) of ``peak``, and is absent where there is no peak.
    """
    known: dict[str, MetricValue | None] = {
        STEP: record.step,
        TOKENS: record.tokens,
        LOSS: record.loss,
        GRAD_NORM: record.grad_norm,
        LEARNING_RATE: record.lr,
        EVAL_LOSS: record.eval_loss,
        EVAL_PERPLEXITY: None if record.eval_loss is None else _perplexity(record.eval_loss),
        **_rates(record, flops_per_token, num_devices, peak),
        STEP_S: record.step_s,
        DATA_S: record.data_s,
        CHECKPOINT_STALL_S: record.checkpoint_stall_s,
        PEAK_ACTIVE_GIB: _gib(record.peak_active_bytes),
        PEAK_RESERVED_GIB: _gib(record.peak_reserved_bytes),
        UTILIZATION: record.utilization,
        SAMPLE_HASH: record.sample_hash,
        **expert_metrics(record.experts),
    }
    return {key: value for key, value in known.items() if value is not None}


def _rates(
    record: StepRecord, flops_per_token: float, num_devices: int, peak: PeakFlops | None
) -> dict[str, MetricValue | None]:
    if record.step_s <= 0:  # a clock too coarse for the step: no rate is better than an infinite one
        return {}
    tokens_per_s = record.tokens_in_step / record.step_s
    device_flops_per_s = tokens_per_s / num_devices * flops_per_token
    return {
        TOKENS_PER_SEC: tokens_per_s,
        DEVICE_TOKENS_PER_SEC: tokens_per_s / num_devices,
        MFU: None if peak is None else device_flops_per_s / peak.flops_per_s,
        TFLOPS: device_flops_per_s / 1e12,
    }


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**30


class PeakCheck:
    """Says once that a utilisation above 100 % cannot be: the peak is wrong then, and so is every value below it."""

    def __init__(self, peak: PeakFlops | None) -> None:
        self._peak = peak
        self._has_warned = False

    def warning(self, metrics: Metrics) -> str | None:
        """Return one sentence the first time that ``mfu`` is above 1, else None. The value itself is never touched."""
        mfu = metrics.get(MFU)
        if self._peak is None or self._has_warned or not isinstance(mfu, float) or not mfu > 1:
            return None
        self._has_warned = True
        return (
            f"mfu is {mfu:.1%} at step {metrics[STEP]}, and nothing does more than its peak: the peak of "
            f"{format_count(self._peak.flops_per_s)}FLOP/s comes from {self._peak.source} and is too low; set "
            f"cluster.peak_flops to what the device can do in this precision."
        )
