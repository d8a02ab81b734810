"""Does the log read back bit by bit, after kills, cut-off lines, full disks and resumes?"""

import errno
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.errors import BadInput
from triax.watch.metrics import Metrics
from triax.watch.record import RunLog, encode, mend_tail, read_events, read_metrics

LOG = "triax.watch.record"


def write_steps(folder: Path, steps: range, loss: float) -> None:
    with RunLog(folder) as log:
        for step in steps:
            log.write({"step": step, "tokens": 10 * step, "train/loss": loss})


def series(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["train/loss"]) for line in read_metrics(folder)]


def strict(line: str) -> Any:
    """JSON as the standard says it, without Python's NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


def same(a: object, b: object) -> bool:
    """Equal, with nan equal to nan and -0.0 not equal to 0.0."""
    return repr(a) == repr(b)


@given(loss=st.floats(), grad_norm=st.floats(), digest=st.text(max_size=20))
def test_every_float_reads_back_to_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, loss: float, grad_norm: float, digest: str
) -> None:
    folder = tmp_path_factory.mktemp("run")
    values: Metrics = {
        "step": 1,
        "tokens": 2,
        "train/loss": loss,
        "train/grad_norm": grad_norm,
        "data/sample_hash": digest,
    }
    with RunLog(folder) as log:
        log.write(values)
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.count("\n") == 1
    assert strict(text)["format_version"] == 1
    (line,) = read_metrics(folder)
    assert line.pop("time") > 1.7e9
    assert {key: repr(value) for key, value in line.items()} == {key: repr(value) for key, value in values.items()}


def test_numbers_that_are_not_finite_are_null_and_named() -> None:
    line = strict(
        encode({"train/loss": math.nan, "train/lr": 0.1, "detail": {"norm": -math.inf, "span": [1.0, math.inf]}})
    )
    assert line["train/loss"] is None
    assert line["nonfinite"] == {"train/loss": "nan"}
    assert line["detail"] == {"norm": None, "span": [1.0, "inf"], "nonfinite": {"norm": "-inf"}}


def test_events_say_who_and_where(tmp_path: Path) -> None:
    with RunLog(tmp_path, rank=3, coordinate={"dp_shard": 1, "tp": 1}, server="a") as log:
        log.event("rollback", step=40, detail={"to": 30, "norm": math.nan, "path": Path("x"), "skipped": (31, 40)})
    (event,) = read_events(tmp_path)
    assert event.pop("time") > 1.7e9
    assert same(
        event,
        {
            "step": 40, "kind": "rollback", "rank": 3, "coordinate": {"dp_shard": 1, "tp": 1}, "server": "a",
            "detail": {"to": 30, "norm": None, "path": "x", "skipped": [31, 40]} | {"norm": math.nan},
        },
    )  # fmt: skip
    assert not (tmp_path / "metrics.jsonl").exists(), "a rank that reports no metrics makes no file of them"
    assert read_metrics(tmp_path) == []


def test_several_ranks_append_whole_lines(tmp_path: Path) -> None:
    logs = [RunLog(tmp_path, rank=rank, server="a") for rank in range(4)]
    for step in range(50):
        for log in logs:
            log.event("skip", step=step)
    for log in logs:
        log.close()
    seen = [(event["step"], event["rank"]) for event in read_events(tmp_path)]
    assert seen == [(step, rank) for step in range(50) for rank in range(4)]


@given(cut=st.integers(1, 200), junk=st.sampled_from([b"", b"\0" * 300, b"\xff\xfe"]))
def test_a_line_cut_anywhere_costs_that_line_alone(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write_steps(folder, range(1, 4), loss=1.0)
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    kept = len(last) - 1 - cut % (len(last) - 1)  # at least one byte of the line stays, its newline never does
    path.write_bytes(whole[: len(whole) - len(last) + kept] + junk)
    before = 3 if kept == len(last) - 1 and not junk else 2
    assert series(folder) == [(step, 1.0) for step in range(1, before + 1)], "a reader passes over the cut line"

    write_steps(folder, range(before + 1, 6), loss=2.0)
    lines = path.read_text(encoding="utf-8").split("\n")
    assert [strict(line)["step"] for line in lines if line.strip()] == [1, 2, 3, 4, 5]
    assert [step for step, _ in series(folder)] == [1, 2, 3, 4, 5]


def test_mending_says_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste')
    assert "cut off after 5 bytes" in (mend_tail(path) or "")
    assert path.read_bytes() == b'{"step": 1}\n    \n'
    assert mend_tail(path) is None
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert "lacked its end" in (mend_tail(path) or "")
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(b"x" * 200_000)  # longer than one block of the search for a newline
    assert "200000 bytes" in (mend_tail(path) or "")
    path.write_bytes(b"")
    assert mend_tail(path) is None


def test_what_is_appended_while_a_cut_line_is_blanked_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process appends between the look at the file and its mending."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste')
    found = mend_tail.__globals__["_last_piece"]

    def slow(where: Path) -> tuple[int, bytes]:
        piece = found(where)
        with where.open("ab") as other:
            other.write(b'{"step": 2}\n')
        return piece  # type: ignore[no-any-return]

    monkeypatch.setitem(mend_tail.__globals__, "_last_piece", slow)
    mend_tail(path)
    assert [event["step"] for event in read_events(tmp_path)] == [1, 2]


def test_after_a_resume_the_new_attempt_counts(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 21), loss=1.0)  # killed at 20, last checkpoint at 10
    write_steps(tmp_path, range(11, 14), loss=2.0)  # so far
    assert series(tmp_path) == [(step, 1.0) for step in range(1, 11)] + [(step, 2.0) for step in range(11, 14)]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 23, "what happened stays on record"
    write_steps(tmp_path, range(14, 22), loss=2.0)
    assert [step for step, _ in series(tmp_path)] == list(range(1, 22))


@given(st.lists(st.integers(1, 12), max_size=30))
def test_the_rule_of_the_reader(tmp_path_factory: pytest.TempPathFactory, steps: list[int]) -> None:
    """Whatever the order of attempts, a line counts if no line after it has its step or a lower one."""
    folder = tmp_path_factory.mktemp("run")
    with RunLog(folder) as log:
        for number, step in enumerate(steps):
            log.write({"step": step, "tokens": 0, "train/loss": float(number)})
    expected = [
        (step, float(number)) for number, step in enumerate(steps) if all(later > step for later in steps[number + 1 :])
    ]
    assert series(folder) == expected


def test_a_full_disk_is_said_once_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, room = os.write, 1 << 30

    def write(fd: int, data: bytes) -> int:
        """Like a disk with ``room`` bytes left: writes what fits, fails when nothing does."""
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", write)
    caplog.set_level(logging.WARNING, LOG)
    log = RunLog(tmp_path)
    log.write({"step": 1, "tokens": 0, "train/loss": 1.0})
    room = 30  # the next line is cut off, the ones after it have no room at all
    for step in range(2, 8):
        log.write({"step": step, "tokens": 0, "train/loss": 1.0})
    assert [record.getMessage().count("training goes on") for record in caplog.records] == [1]
    room = 1 << 30
    log.write({"step": 8, "tokens": 0, "train/loss": 1.0})
    log.close()
    assert "6 lines were lost" in caplog.records[-1].getMessage()
    assert series(tmp_path) == [(1, 1.0), (8, 1.0)]
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [strict(line)["step"] for line in text.splitlines() if line.strip()] == [1, 8]


def test_a_disk_full_from_the_start_passes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = RunLog(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        log.write({"step": 1, "tokens": 0})
        log.event("save", step=1)
    assert len(caplog.records) == 2, "one warning for each file"
    log.write({"step": 2, "tokens": 0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [2]


@pytest.mark.parametrize("blocked", ["", "metrics.jsonl", "events.jsonl"])
def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    folder = tmp_path / "run"
    write_steps(folder, range(1, 2), loss=1.0)
    (folder / "events.jsonl").touch()
    # Not by chmod: the tests may run as root, who may write anything.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder / blocked)
    with pytest.raises(BadInput, match="cannot be written"):
        RunLog(folder)


def test_a_file_in_the_way_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(BadInput, match="cannot be made"):
        RunLog(tmp_path / "runs" / "first")


def test_a_broken_line_inside_is_passed_over_with_its_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n[2]\n{"step": 3}\n{"note": "no step"}\n')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]
    assert [record.getMessage().split(" is not JSON")[0][-6:] for record in caplog.records] == ["line 2", "line 3"]


def test_a_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"format_version": 99, "step": 1}\n')
    with pytest.raises(BadInput, match=r"line 1 has format_version 99"):
        read_events(tmp_path)
