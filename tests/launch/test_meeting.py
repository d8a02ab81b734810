"""Do servers that are started by hand find each other, all of them or none, and leave nothing behind?"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from triax.errors import BadInput, TriaxError
from triax.launch import meeting as module
from triax.launch.board import Board
from triax.launch.meeting import meeting
from triax.launch.members import Beat


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.02)


def server(name: str, start: str = "1") -> Beat:
    return Beat(name, f"{name}{start}", 0, f"10.0.0.{ord(name)}", 15000, 2)


def meet(folder: Path, me: Beat, count: int, after_s: float = 0.0, patience_s: float = 10.0) -> tuple[str, ...]:
    time.sleep(after_s)
    with meeting(folder, me, count, patience_s) as here:
        return tuple(beat.server for beat in here)


def test_all_see_the_same_whoever_comes_last(tmp_path: Path) -> None:
    folder = tmp_path / ".doctor"
    with ThreadPoolExecutor(5) as pool:
        met = [pool.submit(meet, folder, server(name), 5, 0.1 * index) for index, name in enumerate("dbeac")]
        assert {each.result() for each in met} == {tuple("abcde")}
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_command_left_is_nobody(tmp_path: Path) -> None:
    Board(tmp_path / "m").write_beat(server("z"))
    with pytest.raises(TriaxError, match=r"1 of 2 servers came to .* within 300 ms: a \(10\.0\.0\.97\); start"):
        meet(tmp_path / "m", server("a"), 2, patience_s=0.3)
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(meet, tmp_path / "m", server(name, "2"), 2) for name in "az"]
        assert {each.result() for each in met} == {("a", "z")}


def test_too_many_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    stopped = threading.Event()

    def beats(beat: Beat) -> None:
        board, count = Board(tmp_path / "m"), 0
        while not stopped.wait(0.01):
            count += 1
            board.write_beat(Beat(beat.server, beat.start, count, beat.address, 1, 2, sees=("a",)))

    with ThreadPoolExecutor(2) as pool:
        for name in "bc":
            pool.submit(beats, server(name))
        try:
            with pytest.raises(BadInput, match=r"--nnodes 2 servers were said, and there are a .*, b .*, c "):
                meet(tmp_path / "m", server("a"), 2)
            with pytest.raises(BadInput, match="another command takes part as server b"):
                meet(tmp_path / "m", server("b", "2"), 3)
        finally:
            stopped.set()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written: Not a directory; give a folder on a disk"):
        meet(tmp_path / "file" / ".doctor", server("a"), 1)
