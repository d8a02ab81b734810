"""Do words stand for the same files in the same order everywhere, and is what stands for nothing refused?"""

import os
from pathlib import Path

import pytest

from triax.data.files import find_files
from triax.errors import BadInput


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree made in an order that is not its sorted one."""
    monkeypatch.chdir(tmp_path)
    for name in ("b/z.txt", "b/a.jsonl", "a.txt", "b.txt", "b/c/d.MD", "code/x.py", "code/y.py", "code/data.pdf",
                 ".git/config.txt", "b/.hidden.txt"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def names(*words: str, **options: object) -> list[str]:
    return [os.path.relpath(file.path) for file in find_files(words, **options)]  # type: ignore[arg-type]


def test_a_folder_is_searched_in_order(folder: Path) -> None:
    files = find_files([str(folder)])
    assert [(os.path.relpath(file.path), file.format) for file in files] == [
        ("a.txt", "text"), ("b/a.jsonl", "jsonl"), ("b/c/d.MD", "text"), ("b/z.txt", "text"), ("b.txt", "text"),
    ]  # fmt: skip


@pytest.mark.usefixtures("folder")
def test_words_keep_their_order() -> None:
    assert names("b.txt", "b", "a.txt") == ["b.txt", "b/a.jsonl", "b/c/d.MD", "b/z.txt", "a.txt"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "options", "found"),
    [
        (["code"], {"extensions": [".py"]}, ["code/x.py", "code/y.py"]),
        (["code"], {"extensions": ["PY"]}, ["code/x.py", "code/y.py"]),
        (["code/x.py"], {}, ["code/x.py"]),
        (["b"], {"file_format": "jsonl"}, ["b/a.jsonl"]),
        (["*.txt"], {}, ["a.txt", "b.txt"]),
        (["b/*"], {}, ["b/a.jsonl", "b/c/d.MD", "b/z.txt"]),
        (["b/**"], {}, ["b/a.jsonl", "b/c/d.MD", "b/z.txt"]),
        (["**/*.txt"], {}, ["a.txt", "b/z.txt", "b.txt"]),
        (["code/data.pdf"], {"file_format": "text"}, ["code/data.pdf"]),
    ],
)
def test_words_stand_for_files(words: list[str], options: dict[str, object], found: list[str]) -> None:
    assert names(*words, **options) == found


def test_a_name_with_a_bracket_is_a_name(folder: Path) -> None:
    (folder / "x[1].txt").write_text("x")
    assert names("x[1].txt") == ["x[1].txt"]


def test_links_are_followed_but_not_round(folder: Path) -> None:
    (folder / "b" / "round").symlink_to(folder / "b")
    (folder / "more").mkdir()
    (folder / "more" / "m.txt").write_text("m")
    (folder / "b" / "linked").symlink_to(folder / "more")
    assert names("b") == ["b/a.jsonl", "b/c/d.MD", "b/linked/m.txt", "b/z.txt"]


@pytest.mark.parametrize(
    ("words", "options", "complaint"),
    [
        (["none.txt"], {}, r"none\.txt is missing"),
        (["none*.txt"], {}, r"'none\*\.txt' in data\.train matches no file"),
        (["cod*"], {}, r"'cod\*' in data\.train matches only folders, none with a file ending in \.txt"),
        (["code"], {}, r'code holds no file ending in .*; it has 2 ending in \.py: data\.extensions = \["\.py"\]'),
        (["empty"], {}, r"empty holds no file ending in \.txt [^;]*\.$"),
        (["code/data.pdf"], {}, r'data\.pdf: data\.format = "auto" reads no \.pdf files'),
        (["a.txt", "*.txt"], {}, r"a\.txt is in data\.train twice, by 'a\.txt' and by '\*\.txt'"),
        (["dead"], {}, r"dead is a link to nothing"),
        (["pipe"], {}, r"pipe is not a regular file"),
    ],
)
def test_what_stands_for_nothing_is_refused(
    folder: Path, words: list[str], options: dict[str, object], complaint: str
) -> None:
    (folder / "empty").mkdir()
    (folder / "dead").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")
    with pytest.raises(BadInput, match=complaint):
        names(*words, **options)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may search any folder")
def test_a_folder_that_may_not_be_read_is_named(folder: Path) -> None:
    (folder / "b").chmod(0)
    with pytest.raises(BadInput, match=r"b cannot be searched: Permission denied"):
        names("b")
    (folder / "b").chmod(0o700)
