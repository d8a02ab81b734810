"""Do metrics have the agreed keys and the right numbers, and is an impossible utilisation said aloud?"""

import dataclasses
import math
import subprocess
import sys

import pytest

from triax.watch import metrics
from triax.watch.metrics import PeakCheck, PeakFlops, StepRecord, to_metrics

RECORD = StepRecord(
    step=7, tokens=7 * 4096, loss=2.5, grad_norm=1.25, lr=3e-4, tokens_in_step=4096, step_s=0.5, data_s=0.01,
    checkpoint_stall_s=0.125, peak_active_bytes=3 * 2**29, peak_reserved_bytes=2**31, utilization=0.75,
    sample_hash="00ff", eval_loss=2.0,
)  # fmt: skip


def test_every_number_under_its_agreed_key() -> None:
    made = to_metrics(RECORD, flops_per_token=1e9, num_devices=4, peak=PeakFlops(5e12, "cluster.toml"))
    assert made == {
        "step": 7,
        "tokens": 28672,
        "train/loss": 2.5,
        "train/grad_norm": 1.25,
        "train/lr": 3e-4,
        "eval/loss": 2.0,
        "eval/perplexity": math.exp(2.0),
        "throughput/tokens_per_sec": 8192.0,
        "throughput/device/tokens_per_sec": 2048.0,
        "throughput/device/mfu": pytest.approx(2048 * 1e9 / 5e12),
        "throughput/device/tflops": pytest.approx(2.048),
        "time/step_s": 0.5,
        "time/data_s": 0.01,
        "time/checkpoint_stall_s": 0.125,
        "memory/peak_active_gib": 1.5,
        "memory/peak_reserved_gib": 2.0,
        "device/utilization": 0.75,
        "data/sample_hash": "00ff",
    }
    assert tuple(made) == metrics.KEYS


def test_what_is_not_known_is_absent_not_zero() -> None:
    bare = dataclasses.replace(
        RECORD, peak_active_bytes=None, peak_reserved_bytes=None, utilization=None, sample_hash=None, eval_loss=None
    )
    made = to_metrics(bare, flops_per_token=1e9, num_devices=4, peak=None)
    absent = {metrics.MFU, metrics.PEAK_ACTIVE_GIB, metrics.PEAK_RESERVED_GIB, metrics.UTILIZATION, metrics.SAMPLE_HASH}
    assert set(metrics.KEYS) - set(made) == absent | {metrics.EVAL_LOSS, metrics.EVAL_PERPLEXITY}
    timeless = to_metrics(dataclasses.replace(RECORD, step_s=0.0), flops_per_token=1e9, num_devices=4, peak=None)
    assert not {metrics.TOKENS_PER_SEC, metrics.TFLOPS} & set(timeless)


@pytest.mark.parametrize(("loss", "perplexity"), [(1e6, math.inf), (math.inf, math.inf), (0.0, 1.0)])
def test_a_perplexity_too_large_for_a_float_is_infinite(loss: float, perplexity: float) -> None:
    made = to_metrics(dataclasses.replace(RECORD, eval_loss=loss), flops_per_token=1, num_devices=1, peak=None)
    assert made[metrics.EVAL_PERPLEXITY] == perplexity


def test_more_than_the_peak_is_reported_and_said_once() -> None:
    peak = PeakFlops(1e12, "a matmul measured at the start")
    made = to_metrics(RECORD, flops_per_token=1e9, num_devices=4, peak=peak)
    check = PeakCheck(peak)
    said = check.warning(made)
    assert made[metrics.MFU] == pytest.approx(2.048), "the value stays as it was measured"
    assert said is not None
    for part in ("204.8%", "step 7", "1TFLOP/s", "a matmul measured at the start", "cluster.peak_flops"):
        assert part in said
    assert check.warning(made) is None


@pytest.mark.parametrize("peak", [None, PeakFlops(1e13, "cluster.toml")])
def test_a_possible_or_unknown_utilisation_is_no_warning(peak: PeakFlops | None) -> None:
    assert PeakCheck(peak).warning(to_metrics(RECORD, flops_per_token=1e9, num_devices=4, peak=peak)) is None


def test_predicted_twins() -> None:
    assert metrics.predicted("time/step_s") == "time/predicted_step_s"
    assert metrics.predicted("throughput/device/mfu") == "throughput/device/predicted_mfu"


def test_keys_and_log_are_known_without_torch() -> None:
    code = "import triax.watch.metrics, triax.watch.record, triax.spec.flops, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "False\n"
