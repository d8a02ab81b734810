"""Do events that no rank can tell reach the run's folder and whoever wants alerts, and hold up nothing?"""

import json
import time
from pathlib import Path

import pytest

from tests.cli.typed import make_run
from tests.train.test_alert import keeps, program
from triax.spec.layout import Layout
from triax.spec.load import load_run
from triax.spec.run import Run
from triax.train.events import Events
from triax.train.run_folder import RunFolder
from triax.watch.record import read_events

LAYOUT = Layout(dp_replicate=2, tp=2, zero=0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return load_run(make_run(tmp_path))


def alerting(run: Run, **guard: object) -> Run:
    return run.model_copy(update={"guard": run.guard.model_copy(update=guard)})


def test_what_ends_or_threatens_a_run_is_sent_and_the_rest_is_written(
    tmp_path: Path, run: Run, server: tuple[str, list[bytes]]
) -> None:
    address, got = server
    folder = RunFolder(tmp_path / "run")
    with Events(folder, alerting(run, alert_command=keeps(tmp_path), alert_webhook=address), "node7") as events:
        events.record(LAYOUT, "failure", 7, 3, {"reason": "rank 3 was killed.", "how": "was killed by SIGKILL"})
        events.record(LAYOUT, "restart", 4, None, {"number": 1})
        events.record(None, "lost_server", 4, None, {"lost": ["node3"]})
        events.record(None, "given_up", 4, 3, {"reason": "no more."})
        events.record(LAYOUT, "hang", 9, 2, {"phase": "step 9, forward"})
    written = read_events(folder.path)
    assert [event["kind"] for event in written] == ["failure", "restart", "lost_server", "given_up", "hang"]
    sent = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
    assert [json.loads(body) for body in got] == sent
    assert [event["kind"] for event in sent] == ["failure", "lost_server", "given_up", "hang"]
    first = {"step": 7, "rank": 3, "coordinate": LAYOUT.coordinate(3)._asdict(), "server": "node7"}
    assert first.items() <= sent[0].items()
    assert first.items() <= written[0].items()
    assert sent[0]["run"] == str(folder.path)


def test_an_alert_is_sent_also_where_the_folder_cannot_be_written(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_text("")
    with Events(RunFolder(tmp_path / "file" / "run"), alerting(run, alert_command=keeps(tmp_path))) as events:
        events.record(None, "failure", 0, None, {})
    assert json.loads((tmp_path / "got").read_text())["kind"] == "failure"


def test_a_program_that_hangs_holds_up_nothing(tmp_path: Path, run: Run) -> None:
    run = alerting(run, alert_command=program(tmp_path, "import time\ntime.sleep(600)\n"))
    events = Events(RunFolder(tmp_path / "run"), run)
    begun_s = time.monotonic()
    for step in range(20):
        events.record(LAYOUT, "failure", step, 1, {})
    assert time.monotonic() - begun_s < 1.0
    events._alerts.close(0.1)
