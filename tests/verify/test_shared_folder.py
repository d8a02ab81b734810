"""Is a folder that is not shared, or cannot be written, told from one that a run can use?"""

import os
from pathlib import Path

import pytest

from triax.verify import shared_folder
from triax.verify.shared_folder import answer_token, leave_token, missing_answers, remove_token


def test_a_shared_folder_shows_everything_and_is_left_as_it_was(tmp_path: Path) -> None:
    name, wrong = leave_token(tmp_path)
    assert wrong is None
    assert [answer_token(tmp_path, name, server, patience_s=0) for server in (1, 2)] == [None, None]
    assert missing_answers(tmp_path, name, [1, 2], patience_s=0) == []
    remove_token(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_its_own_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    name, _ = leave_token(tmp_path)
    wrong = answer_token(tmp_path / "other", name, 1, patience_s=0.05)
    assert wrong == "does not show within 0.05 s what the first server wrote there"
    assert missing_answers(tmp_path, name, [1], patience_s=0.05) == [1]


def test_a_folder_that_takes_nothing(tmp_path: Path) -> None:
    name, wrong = leave_token(tmp_path / "absent")
    assert (name, wrong) == ("", "cannot be written: no such file or directory")
    remove_token(tmp_path, name)
    assert tmp_path.is_dir()


def test_a_disk_that_cannot_be_relied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    name, wrong = leave_token(tmp_path)
    assert wrong == "cannot be relied on: no space left on device"
    remove_token(tmp_path, name)
    monkeypatch.undo()
    monkeypatch.setattr(os, "O_EXCL", 0)  # such as an old NFS
    assert leave_token(tmp_path)[1] == "cannot be relied on: it lets two servers make the same new file"
    assert shared_folder.answer_token(tmp_path, "absent", 1, patience_s=0) is not None
