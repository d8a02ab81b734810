"""Does a run save as often as loses least time, with all ranks agreeing on when?"""

import json
import math
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.harness.ranks import run_ranks
from tests.harness.runs import Told, start
from tests.harness.toy import lay
from tests.train.test_resume import make_run
from triax.checkpoint.agree import Ranks
from triax.checkpoint.save import SaveOutcome
from triax.spec.run import CheckpointSpec
from triax.train.cadence import Cadence, hardly_felt, least_lost

AUTO = CheckpointSpec(every_steps="auto")


def saved(step: int, stall_s: float = 0.1, seconds: float = 0.2, ok: bool = True) -> SaveOutcome:
    return SaveOutcome(step, ok, seconds, stall_s, 1, "")


def alone(spec: CheckpointSpec, num_servers: int = 1, step: int = 0) -> Cadence:
    return Cadence(spec.every_steps, least_lost(spec, num_servers), Ranks(None, 0, 1), step)


def due(cadence: Cadence, *steps: int) -> list[int]:
    return [step for step in steps if cadence.is_due(step)]


def test_a_number_is_that_number() -> None:
    assert due(alone(CheckpointSpec(every_steps=3)), *range(1, 10)) == [3, 6, 9]
    assert due(alone(CheckpointSpec(every_steps=0)), *range(1, 10)) == []
    assert alone(CheckpointSpec(every_steps=3)).learn(saved(3)) is None


def test_auto_measures_soon_and_then_saves_by_young_and_daly(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    cadence = alone(AUTO, num_servers=1000, step=50)
    assert due(cadence, *range(51, 61)) == [60]
    clock[0] = 10 * 2.0 + 5.0
    cadence.leave_out(5.0)
    interval = cadence.learn(saved(60, stall_s=5.0, seconds=30.0))
    assert interval is not None
    assert interval.step_s == pytest.approx(2.0)
    failure_s = 86400 * 1000 / (3.8 * 1000)
    # Young's first order, which Daly's differs from by little here.
    assert interval.every_steps * 2.0 == pytest.approx(math.sqrt(2 * 5.0 * failure_s), rel=0.02)
    wanted = 60 + interval.every_steps
    assert due(cadence, *range(61, wanted + 1)) == [wanted]
    assert "one costs 5.0 s, and a server is expected to fail every 6 h 18 min" in interval.describe()


def test_saves_are_no_more_often_than_one_takes_and_failed_ones_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    cadence = alone(AUTO.model_copy(update={"failures_per_1000_server_days": 1e12}))
    assert due(cadence, *range(1, 11)) == [10]
    clock[0] = 10.0
    assert cadence.learn(saved(10, ok=False)) is None
    assert due(cadence, *range(11, 21)) == [20]
    clock[0] = 20.0
    interval = cadence.learn(saved(20, seconds=7.0))
    assert interval is not None
    assert interval.every_steps == 7


def test_copies_to_memory_are_hardly_felt() -> None:
    seconds, why = hardly_felt(saved(1, stall_s=0.2))
    assert seconds == pytest.approx(20.0)
    assert "1% of the time" in why


def test_ranks_that_measure_other_times_agree() -> None:
    def steps(rank: int, world: int) -> list[int]:
        cadence = Cadence("auto", least_lost(AUTO, 10**7), Ranks.of(None), 0)
        found = []
        for step in range(1, 200):
            time.sleep(0.001 * (rank + 1))
            if cadence.is_due(step):
                found.append(step)
                cadence.learn(saved(step, stall_s=1e-3, seconds=0.01))
        return found

    first, second = run_ranks(steps, 2)
    assert first == second
    assert first[0] == 10
    assert len(first) > 1


def test_a_run_saves_by_itself_and_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run = run.model_copy(update={"checkpoint": AUTO, "train": run.train.model_copy(update={"steps": 14})})
    assert start(run, lay(run, 1, dp_shard=2, zero=2), tmp_path / "run") == [Told(), Told()]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "save"] == [10, 14]
    told, *_ = [event["detail"] for event in events if event["kind"] == "checkpoint_interval"]
    assert told["every_steps"] > 100


@pytest.mark.parametrize("value", [-1, 1.5, "often", True, None, "1 KiB", 2**63])
def test_what_is_no_interval_is_refused(value: object) -> None:
    with pytest.raises(ValidationError, match=r'use a whole number of 0 or more, or "auto"|not a count'):
        CheckpointSpec.model_validate({"every_steps": value})


def test_units_are_read() -> None:
    assert CheckpointSpec.model_validate({"every_steps": "1k"}).every_steps == 1000
    assert CheckpointSpec.model_validate({"every_steps": 2e3}).every_steps == 2000
