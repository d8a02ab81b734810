"""Is the memory of a server free again, whenever ranks were killed, and is nothing removed that is another's?"""

from pathlib import Path

import pytest

from triax.checkpoint.format import MANIFEST, MARKER
from triax.checkpoint.memory_clear import clear
from triax.checkpoint.retain import mark

RUN, SHARD = "8bedeb757395f03d", "shard-00000-of-00002.safetensors"


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "triax-run"
    folder.mkdir(mode=0o700)
    return folder


def state(memory: Path, step: int, *names: str) -> Path:
    folder = memory / f"step-{step:08d}"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


def marker(memory: Path, run: str = RUN) -> bytes:
    folder = state(memory, 999)
    mark(folder, run)
    data = (folder / MARKER).read_bytes()
    (folder / MARKER).unlink()
    folder.rmdir()
    return data


def test_a_state_goes_wherever_its_ranks_were_killed(memory: Path) -> None:
    """Its marker may be missing, end anywhere, or be whole; other ranks may have written into it meanwhile."""
    whole = marker(memory)
    state(memory, 1)
    state(memory, 2, SHARD)
    for length in range(len(whole) + 1):
        (state(memory, 10 + length, SHARD, MANIFEST) / MARKER).write_bytes(whole[:length])
    clear(memory, RUN)
    assert not memory.exists()


def test_a_state_that_is_kept_stays(memory: Path) -> None:
    kept, gone = state(memory, 1, SHARD), state(memory, 2, SHARD)
    mark(kept, RUN)
    (gone / MARKER).touch()
    clear(memory, RUN, but=kept)
    assert [path.name for path in memory.iterdir()] == [kept.name]


@pytest.mark.parametrize("what", ["another run", "no marker of ours", "a file of somebody", "a link"])
def test_what_is_not_of_the_run_stays(what: str, memory: Path, tmp_path: Path) -> None:
    match what:
        case "another run":
            (state(memory, 1, SHARD) / MARKER).write_bytes(marker(memory, "another"))
        case "no marker of ours":
            (state(memory, 1, SHARD) / MARKER).write_text("{}")
        case "a file of somebody":
            (state(memory, 1, SHARD, "notes.txt") / MARKER).touch()
        case "a link":
            elsewhere = tmp_path / "elsewhere"
            elsewhere.mkdir()
            (elsewhere / SHARD).touch()
            (memory / "step-00000001").symlink_to(elsewhere)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    clear(memory, RUN)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
