"""Is every injected fault found within a step, undone, and told for what it was?

Where nothing but hardware failed, the run must end with the bits of a clean one; where samples were bad it goes on
without them, and must end as good.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.harness.experts import DEEPSEEK, with_experts
from tests.harness.faults import (
    Fault,
    corrupt_batch,
    flip_bits,
    killed_after_rollback,
    learning_rate_glitch,
    nan_at,
    reads_late,
)
from tests.harness.runs import Told, saved_weights, series, start
from tests.harness.toy import lay
from tests.train.test_resume import assert_bits_equal, make_run
from triax.spec.run import Run
from triax.watch.record import read_events

STEPS, BAD = 32, 20
GATE = "layers.0.mlp.gate_proj.weight"
NORM = "layers.0.input_layernorm.weight"
EXPECTED_HASH_EVERY = 4

ONE: dict[str, Any] = {}
REPLICAS: dict[str, Any] = {"dp_replicate": 2, "zero": 0}
ZERO_3: dict[str, Any] = {"dp_shard": 2, "zero": 3}
CUT: dict[str, Any] = {"pp": 2, "tp": 2}
PIPELINE: dict[str, Any] = {"pp": 2, "dp_shard": 2, "zero": 2}
HYBRID: dict[str, Any] = {"dp_replicate": 2, "dp_shard": 2, "zero": 1}
EXPERTS: dict[str, Any] = {"pp": 2, "dp_shard": 2, "ep": 2, "zero": 1}


def guarded_run(folder: Path, **guard: Any) -> Run:
    """A run whose losses have settled enough to be judged from step 12 on."""
    said = make_run(folder).model_dump()
    said["train"]["steps"] = STEPS
    said["checkpoint"] = {"every_steps": 6, "keep": 3}
    said["eval"] = {"every_steps": STEPS, "sequences": 32}
    said["guard"] = {"window": 16, "hash_every_steps": EXPECTED_HASH_EVERY, **guard}
    return Run.model_validate(said)


def with_deepseek(run: Run) -> Run:
    experts = with_experts(run.model.model_copy(update={"num_hidden_layers": 3}), **DEEPSEEK)
    return run.model_copy(update={"model": experts})


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run without faults comes to in a layout, trained once for each."""
    folder = tmp_path_factory.mktemp("clean")

    @cache
    def trained(key: tuple[tuple[str, Any], ...], has_experts: bool) -> Path:
        here = folder / f"{len(list(folder.iterdir()))}"
        here.mkdir()
        run = guarded_run(here)
        run = with_deepseek(run) if has_experts else run
        layout = lay(run, 1, **dict(key))
        assert start(run, layout, here / "run") == [Told()] * layout.world_size
        assert not happened(here / "run")
        return here / "run"

    return lambda degrees: trained(tuple(degrees.items()), degrees is EXPERTS)


def happened(folder: Path) -> list[str]:
    usual = ("start", "resume", "save", "epoch", "done")
    return [event["kind"] for event in read_events(folder) if event["kind"] not in usual]


def details(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event["detail"] for event in read_events(folder) if event["kind"] == kind]


def train_with(folder: Path, degrees: dict[str, Any], faults: Sequence[Fault], **guard: Any) -> Run:
    run = guarded_run(folder, **guard)
    run = with_deepseek(run) if degrees is EXPERTS else run
    layout = lay(run, 1, **degrees)
    assert start(run, layout, folder / "run", faults=faults) == [Told()] * layout.world_size
    return run


def assert_as_clean(folder: Path, clean: Path, run: Run) -> None:
    for key in ("step", "train/loss", "train/grad_norm", "train/lr", "data/sample_hash", "eval/loss"):
        assert series(folder, key) == series(clean, key), key
    assert_bits_equal(saved_weights(folder, run), saved_weights(clean, run))


REPEATED = ["spike", "spike_explained"]
ROLLED_BACK = ["spike", "skip", "skip", "skip", "rollback", "spike_explained"]
NAMED_LATER = ["corruption", "rollback", "corruption"]
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("degrees", "fault", "events"),
    [
        pytest.param(ONE, corrupt_batch(BAD, once=True), REPEATED, id="misread batch"),
        pytest.param(ZERO_3, nan_at(BAD), REPEATED, id="nan, zero 3"),
        pytest.param(ONE, learning_rate_glitch(BAD), ROLLED_BACK, id="glitch"),
        pytest.param(ZERO_3, learning_rate_glitch(BAD), ROLLED_BACK, id="glitch, zero 3", marks=slow),
        pytest.param(CUT, learning_rate_glitch(BAD), ROLLED_BACK, id="glitch, pp x tp", marks=slow),
        pytest.param(PIPELINE, learning_rate_glitch(BAD), ROLLED_BACK, id="glitch, pp x zero 2", marks=slow),
        pytest.param(HYBRID, learning_rate_glitch(BAD), ROLLED_BACK, id="glitch, hybrid", marks=slow),
        pytest.param(EXPERTS, learning_rate_glitch(BAD), ROLLED_BACK, id="glitch, experts", marks=slow),
        pytest.param(ZERO_3, flip_bits(1, BAD, GATE), ROLLED_BACK, id="flip without replica"),
        pytest.param(REPLICAS, flip_bits(1, BAD, GATE), NAMED_LATER, id="flip seen in the loss"),
        pytest.param(REPLICAS, flip_bits(0, BAD + 1, GATE, bit=20), NAMED_LATER, id="flip seen in the hash"),
        pytest.param(CUT, flip_bits(1, BAD + 1, NORM, bit=20), NAMED_LATER, id="flip of a norm, tp", marks=slow),
        pytest.param(HYBRID, flip_bits(3, BAD + 1, GATE, bit=20), NAMED_LATER, id="flip in a hybrid", marks=slow),
    ],
)  # fmt: skip
def test_a_fault_of_hardware_is_undone_to_the_bit(
    degrees: dict[str, Any], fault: Fault, events: list[str], clean: Any, tmp_path: Path
) -> None:
    run = train_with(tmp_path, degrees, [fault])
    folder = tmp_path / "run"
    assert happened(folder) == events
    assert_as_clean(folder, clean(degrees), run)
    first = next(event for event in read_events(folder) if event["kind"] == events[0])
    assert BAD <= first["step"] <= BAD + (EXPECTED_HASH_EVERY if events == NAMED_LATER else 1)
    if events != NAMED_LATER:
        assert details(folder, "spike_explained")[0]["cause"] == "hardware"


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_replicas_a_replay_names_the_one_that_was_wrong(rank: int, tmp_path: Path) -> None:
    train_with(tmp_path, REPLICAS, [flip_bits(rank, BAD + 1, GATE, bit=16)])
    seen, named = details(tmp_path / "run", "corruption")
    assert seen["ranks"] == []
    assert "two cannot say which of them is wrong" in seen["reason"]
    assert named["ranks"] == [rank]
    assert named["coordinates"][0]["dp_replicate"] == rank


@pytest.mark.slow
def test_of_three_replicas_and_more_the_odd_one_is_named_at_once(clean: Any, tmp_path: Path) -> None:
    degrees = {"dp_replicate": 4, "zero": 0}
    run = train_with(tmp_path, degrees, [flip_bits(2, BAD + 1, GATE, bit=5)])
    assert [detail["ranks"] for detail in details(tmp_path / "run", "corruption")] == [[2], [2]]
    assert_as_clean(tmp_path / "run", clean(degrees), run)


@pytest.mark.parametrize(
    ("degrees", "late", "bad"),
    [
        pytest.param(ONE, False, 1, id="one rank"),
        pytest.param(ONE, False, 3, id="three batches"),
        pytest.param(REPLICAS, True, 1, id="read late"),
        pytest.param(PIPELINE, False, 1, id="pp x zero 2", marks=slow),
        pytest.param(CUT, True, 2, id="pp x tp, two batches read late", marks=slow),
    ],
)
def test_a_bad_batch_is_passed_over_and_nothing_else(
    degrees: dict[str, Any], late: bool, bad: int, clean: Any, tmp_path: Path
) -> None:
    run = train_with(tmp_path, degrees, [corrupt_batch(BAD, steps_long=bad), *([reads_late()] if late else [])])
    folder, before = tmp_path / "run", clean(degrees)
    assert happened(folder) == ["spike", *["skip"] * bad, "spike_explained"]
    (found,) = details(folder, "spike_explained")
    size = run.sequences_per_step
    assert found["cause"] == "data"
    assert f"without samples {BAD * size} to {(BAD + bad) * size - 1}: it was the data" in found["reason"]
    passed_over = [[step * size, (step + 1) * size] for step in range(BAD, BAD + bad)]
    assert [detail["samples"] for detail in details(folder, "skip")] == passed_over
    hashes, others = series(folder, "data/sample_hash"), series(before, "data/sample_hash")
    assert hashes[:-bad] == others[:BAD] + others[BAD + bad :]
    loss, expected = series(folder, "eval/loss")[-1], series(before, "eval/loss")[-1]
    assert abs(loss - expected) < 0.01 * expected


def test_a_rollback_that_reads_late_comes_to_the_same_bits(clean: Any, tmp_path: Path) -> None:
    run = train_with(tmp_path, ONE, [learning_rate_glitch(BAD), reads_late()])
    assert happened(tmp_path / "run") == ROLLED_BACK
    assert_as_clean(tmp_path / "run", clean(ONE), run)


def test_a_run_killed_right_after_it_went_back_ends_with_the_same_bits(tmp_path: Path, clean: Any) -> None:
    run = guarded_run(tmp_path)
    layout = lay(run, 1, **ZERO_3)
    faults = [learning_rate_glitch(BAD), killed_after_rollback()]
    assert start(run, layout, tmp_path / "run", killed_at=10 * STEPS, faults=faults)[0] == Told("killed")
    assert start(run, layout, tmp_path / "run") == [Told()] * 2
    assert_as_clean(tmp_path / "run", clean(ZERO_3), run)


def test_what_comes_again_at_the_same_step_ends_the_run_with_a_diagnosis(tmp_path: Path) -> None:
    run = guarded_run(tmp_path, max_rollbacks=2, learning_rate_cut=0.5)
    (told,) = start(run, lay(run, 1), tmp_path / "run", faults=[learning_rate_glitch(BAD, once=False)])
    assert told.error == "StoppedByGuard"
    assert "went back 2 times, with and without its samples, and the run stops" in told.message
    assert happened(tmp_path / "run") == ["spike", *["skip"] * 3, "rollback", "rollback", "stopped_by_guard"]
    size = run.sequences_per_step
    passed_over = [detail.get("passes_over") for detail in details(tmp_path / "run", "rollback")]
    assert passed_over == [None, [BAD * size, (BAD + 2) * size]]
    # The cut is of the second rollback: the first one repeats the steps as they were.
    rates = dict(zip(series(tmp_path / "run", "step"), series(tmp_path / "run", "train/lr"), strict=True))
    whole = dict(zip(range(1, 99), (line["train/lr"] for line in all_lines(tmp_path / "run")), strict=False))
    assert rates[BAD] == pytest.approx(0.5 * whole[BAD])


def all_lines(folder: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("policy", "events", "error"),
    [
        ("warn", ["spike"], ""),
        ("stop", ["stopped_by_guard"], "StoppedByGuard"),
        ("skip", ["spike", "skip", "spike_explained"], ""),
    ],
)
def test_the_run_file_says_what_is_done_about_a_spike(
    policy: str, events: list[str], error: str, tmp_path: Path
) -> None:
    run = guarded_run(tmp_path, on_spike=policy)
    (told,) = start(run, lay(run, 1), tmp_path / "run", faults=[corrupt_batch(BAD)])
    assert told.error == error
    assert happened(tmp_path / "run")[: len(events)] == events
