"""Do ranks that others have gone on without write nothing any more?"""

from pathlib import Path

import pytest
import torch

from triax.checkpoint.save import CheckpointWriter
from triax.checkpoint.verify import find_checkpoints
from triax.errors import Superseded
from triax.spec.generations import file_name
from triax.train.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run's folder as ranks of the third generation see it."""
    (tmp_path / ".agents").mkdir()
    (tmp_path / ".agents" / file_name("generation", 3)).touch()
    (tmp_path / ".agents" / file_name("lease", 9)).touch()
    return RunFolder(tmp_path, 3)


def begin(folder: RunFolder, number: int) -> None:
    (folder.agents / file_name("generation", number)).touch()


def test_only_a_newer_generation_forbids(folder: RunFolder) -> None:
    begin(folder, 2)
    folder.refuse_superseded()
    begin(folder, 4)
    with pytest.raises(Superseded, match="other servers have gone on"):
        folder.refuse_superseded()
    RunFolder(folder.path).refuse_superseded()  # one command alone has its lock


def test_a_folder_that_is_away_is_no_permission(folder: RunFolder) -> None:
    folder.agents.rename(folder.path / "away")
    with pytest.raises(Superseded, match="cannot be read"):
        folder.refuse_superseded()


def test_a_save_is_not_begun(folder: RunFolder) -> None:
    writer = CheckpointWriter(folder.checkpoints, run="r", permit=folder.refuse_superseded)
    assert saved(writer, 1)
    begin(folder, 4)
    assert not saved(writer, 2)
    assert [found.step for found in find_checkpoints(folder.checkpoints)] == [1]


def test_no_checkpoint_is_removed(folder: RunFolder) -> None:
    """Others may have written it since."""
    writer = CheckpointWriter(folder.checkpoints, run="r", permit=folder.refuse_superseded)
    assert saved(writer, 1)
    assert saved(writer, 2)
    begin(folder, 4)
    assert "other servers have gone on" in writer.discard_after(1)
    assert [found.step for found in find_checkpoints(folder.checkpoints)] == [2, 1]


def test_a_save_under_way_does_not_become_a_checkpoint(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer generation begins while the last part is collected."""
    from triax.checkpoint import save

    collect = save.collect

    def collect_late(*words: object) -> object:
        begin(folder, 4)
        return collect(*words)  # type: ignore[arg-type]

    writer = CheckpointWriter(folder.checkpoints, run="r", permit=folder.refuse_superseded)
    assert saved(writer, 1)
    monkeypatch.setattr(save, "collect", collect_late)
    assert not saved(writer, 2)
    assert [found.step for found in find_checkpoints(folder.checkpoints) if found.is_complete] == [1]


def saved(writer: CheckpointWriter, step: int) -> bool:
    outcome = writer.save(step, {"weight": torch.ones(4)}, {}, wait=True).outcome
    assert outcome is not None
    assert outcome.ok or "other servers have gone on" in outcome.reason
    return outcome.ok
