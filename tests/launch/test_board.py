"""Is what agents say to each other whole, made once, and read by who comes later?"""

import os
from pathlib import Path
from threading import Barrier, Thread

import pytest

from triax.launch.board import Board, Over
from triax.launch.members import Beat, Generation, Lease, Member

BEAT = Beat("a", "a1", 3, "10.0.0.1", 7000, 8, 7001, "running", 4, 2, ("b", "c"), {"how": "was killed", "rank": 3})
GENERATION = Generation(7, 2, (Member("a", "a1", "10.0.0.1", 8),), "lost", 7001, '{"plan": 1}', {"restarts": 2})


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path / "run" / ".agents")


def test_what_is_said_is_read_as_it_was(board: Board) -> None:
    board.write_beat(BEAT)
    assert board.begin(GENERATION)
    assert board.take(Lease(2, "a", "a1"))
    assert board.end(Over(7, 1, "why"))
    assert board.beats() == [BEAT]
    assert board.newest_generation() == GENERATION
    assert board.newest_lease() == Lease(2, "a", "a1")
    assert board.newest_over() == Over(7, 1, "why")


def test_an_empty_board(board: Board) -> None:
    found = (board.beats(), board.newest_generation(), board.newest_lease(), board.newest_over())
    assert found == ([], None, None, None)


def test_the_newest_counts_and_a_number_is_taken_once(board: Board, tmp_path: Path) -> None:
    assert [board.take(Lease(n, "a", "a1")) for n in (9, 100_000_000, 10)] == [True] * 3
    assert not board.take(Lease(10, "b", "b1"))
    newest = board.newest_lease()
    assert newest is not None
    assert newest.number == 100_000_000
    assert [name for name in os.listdir(tmp_path / "run" / ".agents") if name.startswith(".")] == []


@pytest.mark.parametrize("has_links", [True, False])
def test_of_many_at_once_one_makes_it(has_links: bool, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "no links here")

    if not has_links:
        monkeypatch.setattr("triax.launch.board.os.link", refuse)
    together, made = Barrier(8), []

    def take(name: str) -> None:
        together.wait()
        if board.take(Lease(1, name, name)):
            made.append(name)

    threads = [Thread(target=take, args=(str(index),)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lease = board.newest_lease()
    assert lease is not None
    assert made == [lease.server]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"number": "x"}', b"\xff"])
def test_what_is_no_beat_is_passed_over(content: bytes, board: Board, tmp_path: Path) -> None:
    board.write_beat(BEAT)
    (tmp_path / "run" / ".agents" / "server-b.json").write_bytes(content)
    (tmp_path / "run" / ".agents" / "generation-00000001.json").write_bytes(content)
    assert board.beats() == [BEAT]
    assert board.newest_generation() is None
