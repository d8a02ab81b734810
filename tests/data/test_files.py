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


def kinds(*words: str, **options: object) -> list[tuple[str, str]]:
    return [(file.path.name, file.format) for file in find_files(words, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "file_format"),
    [
        ("a.csv", "csv"), ("a.TSV", "tsv"), ("a.parquet", "parquet"), ("a.arrow", "arrow"), ("a.npy", "tokens"),
        ("a.jsonl.gz", "jsonl"), ("a.ndjson.zst", "jsonl"), ("a.txt.xz", "text"), ("a.csv.bz2", "csv"),
        ("a.gz", "text"), ("a.idx", "megatron"), ("a", "text"), ("a.py", "text"),
    ],
)  # fmt: skip
def test_an_ending_says_what_a_file_is(tmp_path: Path, name: str, file_format: str) -> None:
    (tmp_path / name).touch()
    assert kinds(str(tmp_path / name)) == [(name, file_format)]
    if name not in ("a", "a.py", "a.gz"):
        assert kinds(str(tmp_path)) == [(name, file_format)]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("a.json", r'reads no \.json files; say "jsonl" if it has one object per line'),
        ("a.json.gz", r'reads no \.json files; say "jsonl"'),
        ("a.tar.gz", r'reads no \.tar files; say "text" or "jsonl"'),
        ("a.bin", r'reads no \.bin files; say "tokens", and its token_dtype, if it is a flat array; Megatron'),
        ("a.parquet.gz", r"a\.parquet\.gz: parquet files are not read compressed; decompress it"),
    ],
)
def test_what_auto_cannot_read_gets_advice(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(BadInput, match=complaint):
        kinds(str(tmp_path / name))


def test_a_folder_of_several_kinds_is_not_guessed_at(tmp_path: Path) -> None:
    """A README beside Parquet files is no part of the corpus, and silence would train on it."""
    for name in ("README.md", "train-0.parquet", "train-1.parquet"):
        (tmp_path / name).touch()
    say = r'say which is meant, as in data\.format = "parquet" or data\.extensions = \["\.parquet"\]'
    with pytest.raises(BadInput, match=rf"holds 2 parquet files and 1 text file: {say}"):
        kinds(str(tmp_path))
    expected = [("train-0.parquet", "parquet"), ("train-1.parquet", "parquet")]
    assert kinds(str(tmp_path), file_format="parquet") == expected
    assert kinds(str(tmp_path), extensions=[".parquet"]) == expected
    assert kinds(str(tmp_path / "*.parquet")) == expected


def test_a_pair_of_megatron_is_one_file(tmp_path: Path) -> None:
    for name in ("corpus.idx", "corpus.bin"):
        (tmp_path / name).touch()
    for word in ("corpus", "corpus.bin", "corpus.idx", "corpus.*", ""):
        assert kinds(str(tmp_path / word)) == [("corpus.idx", "megatron")]
    assert kinds(str(tmp_path / "corpus.bin"), file_format="tokens") == [("corpus.bin", "tokens")]
    with pytest.raises(BadInput, match=r"corpus\.bin is in data\.train twice"):
        kinds(str(tmp_path / "corpus.idx"), str(tmp_path / "corpus.bin"))


def test_links_are_followed_but_not_round(folder: Path) -> None:
    (folder / "b" / "round").symlink_to(folder / "b")
    (folder / "more").mkdir()
    (folder / "more" / "m.txt").write_text("m")
    (folder / "b" / "linked").symlink_to(folder / "more")
    assert names("b") == ["b/a.jsonl", "b/c/d.MD", "b/linked/m.txt", "b/z.txt"]


def test_a_file_with_two_names_in_a_folder_is_read_once(folder: Path) -> None:
    """Debian's standard library has such a link, and it comes before the file that it leads to."""
    before = names("b")
    (folder / "b" / "0.txt").symlink_to("z.txt")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "e.txt").write_text("e")
    (folder / "b" / "one.txt").symlink_to(folder / "elsewhere" / "e.txt")
    (folder / "b" / "two.txt").symlink_to(folder / "elsewhere" / "e.txt")
    assert sorted(names("b")) == sorted([*before, "b/one.txt"])
    assert names("b/*.txt") == ["b/one.txt", "b/z.txt"]


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
