"""Does an alert reach its program and its address, and never hold up or fail the run that sends it?"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from triax.spec.run import GuardSpec
from triax.train.alert import Alerts, post, run_command

EVENT = {"step": 7, "kind": "rollback", "rank": 0, "coordinate": {"pp": 0}, "server": "a", "detail": {"reason": "x"}}


def program(folder: Path, code: str) -> tuple[str, ...]:
    path = folder / "program.py"
    path.write_text(code)
    return (sys.executable, str(path), str(folder))


def keeps(folder: Path) -> tuple[str, ...]:
    return program(folder, "import sys\nopen(sys.argv[1] + '/got', 'a').write(sys.stdin.read() + '\\n')\n")


def test_an_event_reaches_a_program_and_an_address(tmp_path: Path, server: tuple[str, list[bytes]]) -> None:
    address, got = server
    alerts = Alerts(GuardSpec(alert_command=keeps(tmp_path), alert_webhook=address), "/runs/a")
    alerts.send(EVENT)
    alerts.send({**EVENT, "step": 8})
    alerts.close()
    lines = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
    assert [line["step"] for line in lines] == [7, 8]
    assert EVENT.items() <= lines[0].items()
    assert lines[0]["run"] == "/runs/a"
    assert [json.loads(body) for body in got] == lines


def test_nothing_is_started_where_nobody_is_named() -> None:
    before = threading.active_count()
    alerts = Alerts(GuardSpec(), "/runs/a")
    alerts.send(EVENT)
    alerts.close(0)
    assert threading.active_count() == before


def test_training_does_not_wait_for_a_program_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is ended, the next alert is sent, and the log says it once."""
    code = "import sys, time\nopen(sys.argv[1] + '/n', 'a').write('1')\ntime.sleep(600)\n"
    alerts = Alerts(GuardSpec(alert_command=program(tmp_path, code)), "/runs/a", timeout_s=1.5)
    begun_s = time.monotonic()
    for _ in range(2):
        alerts.send(EVENT)
    assert time.monotonic() - begun_s < 0.3
    alerts.close()
    assert (tmp_path / "n").read_text() == "11"
    assert caplog.text.count("an alert was not sent") == 1
    assert "was ended after 1.5 s" in caplog.text


def test_what_a_killed_program_has_started_goes_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\nchild = subprocess.Popen(['sleep', '600'])\n"
        "open(sys.argv[1] + '/pid', 'w').write(str(child.pid))\ntime.sleep(600)\n"
    )
    assert "was ended" in run_command(program(tmp_path, code), b"{}", 3.0)
    child = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 5
    while _runs(child) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except (OSError, IndexError):
        return False


@pytest.mark.parametrize(
    ("command", "said"),
    [(("/no/such/program",), "cannot be started"), (("false",), "left with exit code 1"), (("true",), "")],
)
def test_how_a_program_failed_is_said(command: tuple[str, ...], said: str) -> None:
    assert said in run_command(command, b"x" * (1 << 20), 10.0)
    assert bool(run_command(command, b"{}", 10.0)) == bool(said)


def test_how_an_address_failed_is_said(server: tuple[str, list[bytes]]) -> None:
    address, _ = server
    assert post(address, b"{}", 5.0) == ""
    assert "500" in post(f"{address}/broken", b"{}", 5.0)
    assert "timed out" in post(f"{address}/slow", b"{}", 0.3)
    assert "was not reached" in post("http://127.0.0.1:9", b"{}", 5.0)


def test_a_flood_of_events_is_cut_short(tmp_path: Path) -> None:
    alerts = Alerts(GuardSpec(alert_command=("sleep", "0.01")), "/runs/a")
    for _ in range(1000):
        alerts.send(EVENT)
    alerts.close(0)


@pytest.mark.parametrize("address", ["example.org", "ftp://example.org", "https://", "file:///etc/passwd", "http://["])
def test_an_address_of_another_kind_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"alert_webhook|Invalid"):
        GuardSpec(alert_webhook=address)
