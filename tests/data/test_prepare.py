"""Is a corpus prepared once, whole or not at all, whatever happens to the cache, the disk and the processes?"""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.corpora import text_store
from tests.data.test_tokenizer import TEXT, trained
from triax.data import content, tokenise
from triax.data import store as store_module
from triax.data.files import find_files
from triax.data.pieces import PIECE_CHARS, SourceFile
from triax.data.prepare import prepare
from triax.data.store import (
    DOCUMENTS_FILE,
    INDEX_FILE,
    TOKENS_FILE,
    TokenStore,
    TornStore,
    open_store,
    token_dtype,
    verify_store,
)
from triax.data.tokenizer import ByteTokenizer, load_tokenizer
from triax.errors import BadInput

FORK = multiprocessing.get_context("fork")


def corpus(folder: Path, texts: Sequence[str] = ("ab", "cde")) -> tuple[SourceFile, ...]:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    return find_files([str(folder)])


def documents(store: TokenStore) -> list[list[int]]:
    starts = store.document_starts
    return [store.tokens[start:stop].tolist() for start, stop in pairwise(starts)]


def store_folder(cache: Path) -> Path:
    (folder,) = (path for path in (cache / "tokens").iterdir() if not path.name.startswith("."))
    return folder


def remains(cache: Path) -> list[str]:
    """Names of everything in the cache besides whole stores and memos."""
    return [
        path.name
        for path in (*cache.glob("tokens/*"), *cache.glob("contents/*"))  # those that start with a dot, too
        if path.name.startswith(".") or not (path.suffix == ".json" or (path / INDEX_FILE).exists())
    ]


def test_each_document_is_followed_by_its_end(tmp_path: Path) -> None:
    store = text_store(tmp_path, ["ab", "", "cde"])
    assert documents(store) == [[97, 98, 256], [99, 100, 101, 256]]
    assert (store.index.num_tokens, store.index.num_documents, store.index.source_bytes) == (7, 2, 5)
    assert (store.tokens.dtype, store.index.token_bytes) == (np.dtype("<u2"), 2)


def test_jsonl_and_text_together(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n{"body": "yz"}\n')
    (tmp_path / "b.txt").write_text("w")
    store = prepare(find_files([str(tmp_path)]), ByteTokenizer(), tmp_path / "cache", text_field="body")
    assert documents(store) == [[120, 256], [121, 122, 256], [119, 256]]


def test_a_tokenizer_of_the_library(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(trained(tmp_path)))
    store = prepare(corpus(tmp_path / "text", [TEXT, TEXT * 3]), tokenizer, tmp_path / "cache")
    assert documents(store) == [
        [*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_batch([TEXT, TEXT * 3])
    ]  # fmt: skip


def test_a_document_of_many_pieces_is_one(tmp_path: Path) -> None:
    """And its tokens are those of the whole text, though it was cut."""
    tokenizer = load_tokenizer(str(trained(tmp_path)))
    text = (TEXT + "    indented  twice\n\n" + "unbroken" * 9 + " ") * (2 * PIECE_CHARS // 150)
    store = prepare(corpus(tmp_path / "text", [text, "a"]), tokenizer, tmp_path / "cache")
    assert len(text) > 2 * PIECE_CHARS
    whole, last = documents(store)
    assert whole == [*tokenizer.encode_batch([text])[0].tolist(), tokenizer.eos_id]
    assert len(last) == 2


def test_batches_of_documents_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = corpus(tmp_path / "text", ["a" * length for length in range(30)])
    whole = documents(prepare(files, ByteTokenizer(), tmp_path / "whole"))
    for chars, pieces in ((1, 1000), (10, 2), (1000, 3)):
        monkeypatch.setattr(tokenise, "BATCH_CHARS", chars)
        monkeypatch.setattr(tokenise, "BATCH_PIECES", pieces)
        assert documents(prepare(files, ByteTokenizer(), tmp_path / f"{chars}-{pieces}")) == whole


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "<u2"), (65_536, "<u2"), (65_537, "<u4")])
def test_ids_are_as_wide_as_the_vocabulary_needs(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)


def test_progress_reaches_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "BATCH_PIECES", 2)
    seen: list[tuple[int, int]] = []
    prepare(
        corpus(tmp_path / "text", ["abc"] * 5), ByteTokenizer(), tmp_path / "cache",
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(6, 15), (12, 15), (15, 15)]


def test_a_cached_corpus_is_not_tokenised_again(tmp_path: Path) -> None:
    tokenised: list[int] = []

    def prepared(files: tuple[SourceFile, ...]) -> TokenStore:
        return prepare(files, ByteTokenizer(), tmp_path / "cache", progress=lambda done, total: tokenised.append(done))

    first = prepared(corpus(tmp_path / "text"))
    assert open_store(first.folder).index == first.index
    assert prepared(corpus(tmp_path / "text")).index == first.index
    # Neither another place nor another time makes another corpus.
    (tmp_path / "text").rename(tmp_path / "moved")
    for path in (tmp_path / "moved").iterdir():
        os.utime(path, (1, 1))
    again = prepared(find_files([str(tmp_path / "moved")]))
    assert (again.index, again.folder) == (first.index, first.folder)
    assert tokenised == [5]


@pytest.mark.parametrize("change", ["text", "same size and time", "order", "tokenizer", "format"])
def test_what_changes_the_tokens_changes_the_store(tmp_path: Path, change: str) -> None:
    files = corpus(tmp_path / "text", ['{"text": "a"}', '{"text": "b"}'])
    cache = tmp_path / "cache"
    first = prepare(files, ByteTokenizer(), cache)
    tokenizer: Any = ByteTokenizer()
    if change == "text":
        files[0].path.write_text('{"text": "other"}')
    elif change == "same size and time":
        before = files[0].path.stat()
        files[0].path.write_text('{"text": "c"}')
        os.utime(files[0].path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "order":
        files = files[::-1]
    elif change == "tokenizer":
        tokenizer = load_tokenizer(str(trained(tmp_path)))
    else:
        files = tuple(SourceFile(file.path, "jsonl") for file in files)
    second = prepare(files, tokenizer, cache)
    assert second.index.fingerprint != first.index.fingerprint
    assert documents(second) != documents(first)


def settle(*paths: Path) -> None:
    """Wait until the memo may trust the times of these files."""
    newest = max(max(path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in paths)
    time.sleep(max(0.0, (newest + content._SETTLED_AFTER_NS - time.time_ns()) / 1e9) + 0.01)


def test_settled_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_SETTLED_AFTER_NS", 20_000_000)
    hashed: list[str] = []
    sha256 = content._sha256

    def counting(path: str) -> str:
        hashed.append(Path(path).name)
        return sha256(path)

    monkeypatch.setattr(content, "_sha256", counting)
    paths = [file.path for file in corpus(tmp_path / "text")]
    memo = tmp_path / "memo.json"
    content.hash_files(paths, memo)
    settle(*paths)
    hashes = content.hash_files(paths, memo)
    hashed.clear()
    assert content.hash_files(paths, memo) == hashes
    assert hashed == []
    paths[1].write_text("xyz")
    assert content.hash_files(paths, memo)[0] == hashes[0]
    assert hashed == ["1.txt"]
    memo.write_text("[1]")
    hashed.clear()
    content.hash_files(paths, memo)
    assert hashed == ["0.txt", "1.txt"]


def test_files_that_were_just_written_are_hashed_again(tmp_path: Path) -> None:
    """A second write within one tick of the file system's clock would not show in their times."""
    content.hash_files([file.path for file in corpus(tmp_path / "text")], tmp_path / "memo.json")
    assert not (tmp_path / "memo.json").exists()


def test_another_text_field_is_another_store(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": "ab", "y": "c"}')
    files = find_files([str(tmp_path / "a.jsonl")])
    stores = [prepare(files, ByteTokenizer(), tmp_path / "cache", text_field=field) for field in ("x", "y")]
    assert [documents(store) for store in stores] == [[[97, 98, 256]], [[99, 256]]]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shift_documents(path: Path) -> None:
    starts = np.fromfile(path, dtype="<i8")
    starts[-1] += 1
    starts.tofile(path)


DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    (TOKENS_FILE, cut),
    (TOKENS_FILE, flip),
    (TOKENS_FILE, Path.unlink),
    (DOCUMENTS_FILE, cut),
    (DOCUMENTS_FILE, flip),
    (DOCUMENTS_FILE, shift_documents),
    (INDEX_FILE, cut),
    (INDEX_FILE, Path.unlink),
    (INDEX_FILE, lambda path: path.write_text("{}")),
    (INDEX_FILE, lambda path: path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_store_is_made_again(tmp_path: Path, name: str, damage: Callable[[Path], object]) -> None:
    files, cache = corpus(tmp_path / "text"), tmp_path / "cache"
    whole = prepare(files, ByteTokenizer(), cache)
    # A copy: the store itself is mapped from the file that is about to be damaged.
    expected = documents(whole)
    folder = store_folder(cache)
    damage(folder / name)
    with pytest.raises(TornStore):
        verify_store(folder)
    again = prepare(files, ByteTokenizer(), cache)
    assert documents(again) == expected
    assert again.index == whole.index
    assert remains(cache) == []
    verify_store(folder)


def test_a_store_that_is_taken_away_while_it_is_verified_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process replaces it just then; nothing of the old one may come back."""
    folder = text_store(tmp_path, ["ab"]).folder

    def taken_away(paths: Sequence[Path], memo_path: Path) -> list[str]:
        shutil.rmtree(folder)
        return content.hash_files(paths, memo_path)

    monkeypatch.setattr(store_module, "hash_files", taken_away)
    with pytest.raises(TornStore, match=r"tokens\.bin cannot be read: No such file"):
        verify_store(folder)
    assert not folder.exists()


def test_what_is_verified_is_what_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process puts a whole store in the place of a damaged one, between opening it and reading it."""
    folder, whole = text_store(tmp_path, ["ab"]).folder, tmp_path / "whole"
    shutil.copytree(folder, whole)
    flip(folder / TOKENS_FILE)

    def replaced(paths: Sequence[Path], memo_path: Path) -> list[str]:
        shutil.rmtree(folder)
        whole.rename(folder)
        return content.hash_files(paths, memo_path)

    monkeypatch.setattr(store_module, "hash_files", replaced)
    assert documents(verify_store(folder)) == [[97, 98, 256]]


def test_a_file_in_the_place_of_a_store_is_replaced(tmp_path: Path) -> None:
    files, cache = corpus(tmp_path / "text"), tmp_path / "cache"
    prepare(files, ByteTokenizer(), cache)
    folder = store_folder(cache)
    folder.rename(tmp_path / "aside")
    folder.write_text("no folder")
    assert len(documents(prepare(files, ByteTokenizer(), cache))) == 2
    assert remains(cache) == []


def test_opening_sees_what_costs_nothing_to_see(tmp_path: Path) -> None:
    store = text_store(tmp_path, ["ab"])
    shift_documents(store.folder / DOCUMENTS_FILE)
    with pytest.raises(TornStore, match=r"documents\.bin does not cover the 3 tokens beside it"):
        open_store(store.folder)


def test_a_rank_that_finds_no_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(TornStore, match=r"none holds no prepared tokens: index\.json: No such file"):
        open_store(tmp_path / "none")


def prepare_and_report(files: tuple[SourceFile, ...], cache: Path, start: Any, results: Any) -> None:
    start.wait()
    try:
        store = prepare(files, ByteTokenizer(), cache)
        results.put([store.index.num_tokens, int(store.tokens.sum())])
    except BaseException as error:
        results.put(repr(error))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_processes_preparing_at_once_all_end_well(tmp_path: Path, is_damaged: bool) -> None:
    files, cache = corpus(tmp_path / "text", ["some text " * 20_000] * 4), tmp_path / "cache"
    expected = prepare(files, ByteTokenizer(), tmp_path / "alone")
    if is_damaged:
        prepare(files, ByteTokenizer(), cache)
        flip(store_folder(cache) / TOKENS_FILE)
    start, results = FORK.Barrier(3), FORK.Queue()
    processes = [FORK.Process(target=prepare_and_report, args=(files, cache, start, results)) for _ in range(3)]
    for process in processes:
        process.start()
    reported = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert reported == [[expected.index.num_tokens, int(expected.tokens.sum())]] * 3
    assert remains(cache) == []
    verify_store(store_folder(cache))


def prepare_until_killed(files: tuple[SourceFile, ...], cache: Path) -> None:
    prepare(files, ByteTokenizer(), cache, progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))


def test_a_killed_process_leaves_no_store(tmp_path: Path) -> None:
    """What it did leave is removed when it is a day old."""
    files, cache = corpus(tmp_path / "text"), tmp_path / "cache"
    process = FORK.Process(target=prepare_until_killed, args=(files, cache))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(remains(cache)) == 1
    (left,) = (cache / "tokens").glob(".*")
    assert len(documents(prepare(files, ByteTokenizer(), cache))) == 2
    assert left.exists(), "it could belong to a process on another machine"
    for path in (*left.iterdir(), left):
        os.utime(path, (1, 1))
    flip(store_folder(cache) / TOKENS_FILE)
    prepare(files, ByteTokenizer(), cache)
    assert remains(cache) == []


def prepare_on_a_full_disk(files: tuple[SourceFile, ...], cache: Path, results: Any) -> None:
    # The kernel refuses to let a file grow, as it does on a full disk, with another number for the same event.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        prepare(files, ByteTokenizer(), cache)
        results.put("no error")
    except BadInput as error:
        results.put(str(error))
    except BaseException as error:
        results.put(repr(error))


@pytest.mark.parametrize("size", [60_000, 5_000_000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, size: int) -> None:
    files, cache = corpus(tmp_path / "text", ["x" * size]), tmp_path / "cache"
    results = FORK.SimpleQueue()
    process = FORK.Process(target=prepare_on_a_full_disk, args=(files, cache, results))
    process.start()
    process.join(60)
    message = results.get()
    assert message.startswith(f"Prepared tokens cannot be written to {cache}: File too large; up to ")
    assert message.endswith("are free: make room, or set data.cache_dir to another folder.")
    assert remains(cache) == []


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(BadInput, match=r"cannot be written to .*cache: Not a directory: set data\.cache_dir"):
        prepare(corpus(tmp_path / "text"), ByteTokenizer(), tmp_path / "cache")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write any folder")
def test_a_cache_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(BadInput, match=r"cannot be written to .*cache: Permission denied"):
        prepare(corpus(tmp_path / "text"), ByteTokenizer(), tmp_path / "cache")


@pytest.mark.parametrize("texts", [[""], ["", ""]])
def test_an_empty_corpus_is_refused(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(BadInput, match=r"The corpus holds no text: .* 0 bytes yield no document with a token"):
        prepare(corpus(tmp_path / "text", texts), ByteTokenizer(), tmp_path / "cache")
    assert remains(tmp_path / "cache") == []


def test_a_broken_file_leaves_nothing(tmp_path: Path) -> None:
    files = corpus(tmp_path / "text", ["fine", "fine"])
    files[1].path.write_bytes(b"\xff")
    with pytest.raises(BadInput, match=r"1\.txt is not UTF-8 at byte 0"):
        prepare(files, ByteTokenizer(), tmp_path / "cache")
    assert remains(tmp_path / "cache") == []


def test_a_corpus_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    files = corpus(tmp_path / "text")

    def grow(done_bytes: int, total_bytes: int) -> None:
        with files[0].path.open("a") as stream:
            stream.write("more")

    with pytest.raises(BadInput, match=r"0\.txt was changed while it was read"):
        prepare(files, ByteTokenizer(), tmp_path / "cache", progress=grow)
    assert remains(tmp_path / "cache") == []


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    files = corpus(tmp_path / "text")
    files[0].path.unlink()
    with pytest.raises(BadInput, match=r"0\.txt cannot be read: No such file"):
        prepare(files, ByteTokenizer(), tmp_path / "cache")


def test_the_index_says_what_the_files_are(tmp_path: Path) -> None:
    text_store(tmp_path, ["ab"])
    index = json.loads((store_folder(tmp_path / "cache") / INDEX_FILE).read_text())
    assert index["format_version"] == 1
    assert (index["tokenizer"], index["vocab_size"], index["eos_id"]) == ("bytes", 257, 256)
    assert (index["num_tokens"], index["num_documents"], index["token_bytes"], index["source_bytes"]) == (3, 1, 2, 2)
