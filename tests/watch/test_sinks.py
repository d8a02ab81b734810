"""Can TensorBoard read what the sink wrote, also after a resume, and does a failing sink fail alone?"""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from triax.watch.metrics import Metrics
from triax.watch.sinks import TensorBoardSink, Unfailing


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(tag)]


def write_steps(folder: Path, steps: range, loss: float) -> None:
    sink = TensorBoardSink(folder)
    for step in steps:
        sink.write({"step": step, "tokens": 100 * step, "train/loss": loss, "data/sample_hash": "00ff"})
    sink.close()


def test_tensorboard_reads_curves_against_steps_and_tokens(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4), loss=0.5)
    assert curve(tmp_path / "step", "train/loss") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert curve(tmp_path / "step", "tokens") == [(1, 100.0), (2, 200.0), (3, 300.0)]
    assert curve(tmp_path / "tokens", "by_tokens/train/loss") == [(100, 0.5), (200, 0.5), (300, 0.5)]


def test_a_resume_supersedes_what_the_killed_attempt_drew(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 7), loss=0.5)
    write_steps(tmp_path, range(4, 6), loss=0.25)
    expected = [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.25), (5, 0.25)]
    assert curve(tmp_path / "step", "train/loss") == expected
    assert curve(tmp_path / "tokens", "by_tokens/train/loss") == [(100 * step, loss) for step, loss in expected]


def test_a_rollback_inside_a_run_supersedes_too(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    for step, loss in [(1, 0.5), (2, 0.5), (3, 8.0), (2, 0.25)]:
        sink.write({"step": step, "tokens": 100 * step, "train/loss": loss})
    sink.close()
    assert curve(tmp_path / "step", "train/loss") == [(1, 0.5), (2, 0.25)]


def test_tensorboard_is_not_imported_before_the_first_write(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from triax.watch.sinks import TensorBoardSink\n"
        f"TensorBoardSink(Path({str(tmp_path / 'tb')!r})).close(); print('tensorboard' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "False\n"
    assert not (tmp_path / "tb").exists()


class Failing:
    """Fails at its second write and whenever it is closed."""

    def __init__(self) -> None:
        self.writes = 0

    def write(self, metrics: Metrics) -> None:
        self.writes += 1
        if self.writes == 2:
            raise ConnectionError("no answer")

    def close(self) -> None:
        raise ConnectionError("no answer")


def test_a_failing_sink_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "triax.watch.sinks")
    inner = Failing()
    sink = Unfailing(inner, "the dashboard")
    for step in range(1, 6):
        sink.write({"step": step, "tokens": 0})
    sink.close()
    assert inner.writes == 2
    (record,) = caplog.records
    assert record.getMessage().startswith("the dashboard failed")
    assert "ConnectionError: no answer" in record.getMessage()


def test_a_sink_that_fails_at_the_end_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    sink = Unfailing(Failing(), "the dashboard")
    sink.write({"step": 1, "tokens": 0})
    sink.close()
    assert len(caplog.records) == 1


def test_tensorboard_without_a_place_to_write_fails_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    sink = Unfailing(TensorBoardSink(tmp_path / "tensorboard"), "TensorBoard")
    sink.write({"step": 1, "tokens": 0, "train/loss": 1.0})
    sink.write({"step": 2, "tokens": 0, "train/loss": 1.0})
    sink.close()
    assert len(caplog.records) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_ends_the_curves_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: real(Path("/dev/full") if mode == "xb" else path, "wb"))
    sink = Unfailing(TensorBoardSink(tmp_path), "TensorBoard")
    for step in range(1, 4):
        sink.write({"step": step, "tokens": step, "train/loss": 1.0})
    sink.close()
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
