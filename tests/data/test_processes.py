"""Do several processes make the tokens that one makes, and does what they finished outlive a kill?"""

import gzip
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_tokenizer import TEXT, trained
from triax.data import parts, prepare, text, tokenise
from triax.data.files import find_files
from triax.data.parts import Job, make_parts
from triax.data.pieces import SourceFile
from triax.data.processes import make_all_parts
from triax.data.store import TokenStore
from triax.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from triax.errors import BadInput, TriaxError

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few kilobytes are a large corpus. What a process is told says all that it needs."""
    monkeypatch.setattr(text, "SPAN_BYTES", 4000)
    monkeypatch.setattr(prepare, "SPAN_BYTES", 4000)
    monkeypatch.setattr(parts, "PART_CHARS", 3000)
    monkeypatch.setattr(tokenise, "BATCH_CHARS", 1000)


def corpus(folder: Path) -> tuple[SourceFile, ...]:
    """A long text, many short ones, rows, and rows that are compressed and so one span of many parts."""
    folder.mkdir()
    (folder / "a.txt").write_text((TEXT + "    indented\n\n") * 200)
    for number in range(20):
        (folder / f"b{number:02}.txt").write_text(TEXT * (number % 3))
    rows = "".join(json.dumps({"text": TEXT * (number % 4)}) + "\n" for number in range(200))
    (folder / "c.jsonl").write_text(rows)
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    return find_files([str(folder)])


def documents(store: TokenStore) -> list[list[int]]:
    return [store.tokens[start:stop].tolist() for start, stop in pairwise(store.document_starts)]


def by_one_process(files: Sequence[SourceFile], tokenizer: Tokenizer, cache: Path) -> TokenStore:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "SPAN_BYTES", 1 << 30)
        return prepare.prepare(files, tokenizer, cache)


def kept(cache: Path) -> dict[str, int]:
    """The parts that are there, with the time each was written."""
    return {path.name: path.stat().st_mtime_ns for path in cache.glob("parts/*/*") if not path.name.startswith(".")}


@pytest.mark.parametrize("num_processes", [1, 3])
def test_any_number_of_processes_makes_the_same_store(tmp_path: Path, num_processes: int) -> None:
    files, tokenizer = corpus(tmp_path / "text"), load_tokenizer(str(trained(tmp_path)))
    whole = by_one_process(files, tokenizer, tmp_path / "whole")
    seen: list[tuple[int, int]] = []
    store = prepare.prepare(
        files, tokenizer, tmp_path / "cache", num_processes=num_processes,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert store.index == whole.index, "checksums of all tokens and ends of documents"
    assert documents(store) == documents(whole)
    assert seen == sorted(seen)
    assert seen[-1] == (whole.index.source_bytes, whole.index.source_bytes)
    assert kept(tmp_path / "cache") == {}


def job_of(file: SourceFile, folder: Path) -> list[Job]:
    folder.mkdir(exist_ok=True)
    spans = prepare.spans_of(file)
    return [Job(file, span, "text", folder, number, 3000, "<u2") for number, span in enumerate(spans)]


def test_parts_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    """Of a compressed file too, which must be read again to go on."""
    corpus(tmp_path / "text")
    (job,) = job_of(SourceFile(tmp_path / "text" / "d.jsonl.gz", "jsonl"), tmp_path / "parts")
    num_bytes = sum(make_parts(job, ByteTokenizer()))
    assert num_bytes == job.span.num_bytes
    names = sorted(path.name for path in job.folder.iterdir())
    assert len(names) > 5
    before = {name: (job.folder / name).read_bytes() for name in names}
    for name in (names[1], names[-1]):
        (job.folder / name).unlink()
    times = {path.name: path.stat().st_ino for path in job.folder.iterdir()}
    assert sum(make_parts(job, ByteTokenizer())) == num_bytes
    assert {name: (job.folder / name).read_bytes() for name in names} == before
    assert times.items() <= {path.name: path.stat().st_ino for path in job.folder.iterdir()}.items()


def prepare_until_killed(files: tuple[SourceFile, ...], cache: Path) -> None:
    def die(done: int, total: int) -> None:
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    prepare.prepare(files, ByteTokenizer(), cache, num_processes=2, progress=die)


def test_a_killed_preparation_goes_on(tmp_path: Path) -> None:
    files, cache = corpus(tmp_path / "text"), tmp_path / "cache"
    process = FORK.Process(target=prepare_until_killed, args=(files, cache))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    wait_for_no_change(cache)
    left = kept(cache)
    assert len(left) > 3
    assert not list(cache.glob("tokens/[!.]*"))
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        publish = parts._PartWriter.publish
        patch.setattr(
            parts._PartWriter, "publish", lambda part, is_last: made.append(part._path.name) or publish(part, is_last)
        )
        store = prepare.prepare(files, ByteTokenizer(), cache, num_processes=1)
    assert made
    assert not set(made) & left.keys()
    assert store.index == by_one_process(files, ByteTokenizer(), tmp_path / "whole").index


def wait_for_no_change(cache: Path) -> None:
    """Until the processes that were left behind have seen that nobody listens, and left."""
    before: dict[str, int] = {}
    for _ in range(100):
        time.sleep(0.1)
        now = kept(cache)
        if now == before:
            return
        before = now


class DeadlyTokenizer(ByteTokenizer):
    """Kills its process at a word; unless it is the test's own."""

    def encode_batch(self, texts: Sequence[str]) -> Any:
        if any("Peleus" in text for text in texts) and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_batch(texts)


def test_a_process_that_is_killed_is_told_and_not_waited_for(tmp_path: Path) -> None:
    files = corpus(tmp_path / "text")
    with pytest.raises(TriaxError, match=r"was killed, most likely because memory ran out: .*--processes 1.* was kept"):
        prepare.prepare(files, DeadlyTokenizer(), tmp_path / "cache", num_processes=2)
    assert not list(tmp_path.glob("cache/tokens/*"))


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_broken_file_is_named_and_leaves_nothing(tmp_path: Path, num_processes: int) -> None:
    files = corpus(tmp_path / "text")
    with (tmp_path / "text" / "c.jsonl").open("a") as stream:
        stream.write("{}\n")
    with pytest.raises(BadInput, match=r"c\.jsonl, line 201: has no field 'text'"):
        prepare.prepare(files, ByteTokenizer(), tmp_path / "cache", num_processes=num_processes)
    assert not list(tmp_path.glob("cache/parts/*"))
    assert not list(tmp_path.glob("cache/tokens/*"))


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "empty"])
def test_a_part_that_is_torn_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    files, cache = corpus(tmp_path / "text"), tmp_path / "cache"

    def damaging(jobs: Sequence[Job], *arguments: Any) -> None:
        make_all_parts(jobs, *arguments)
        path = jobs[3].part(0)
        content = path.read_bytes()
        if not tries:
            flipped = bytes((content[0] ^ 1,)) + content[1:]
            path.write_bytes({"cut": content[:-1], "flip": flipped, "gone": content, "empty": b""}[damage])
            if damage == "gone":
                path.unlink()
        tries.append(damage)

    tries: list[str] = []
    monkeypatch.setattr(prepare, "make_all_parts", damaging)
    store = prepare.prepare(files, ByteTokenizer(), cache, num_processes=1)
    assert len(tries) == 2
    assert store.index == by_one_process(files, ByteTokenizer(), tmp_path / "whole").index


def test_a_disk_that_keeps_nothing_is_not_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaging(jobs: Sequence[Job], *arguments: Any) -> None:
        make_all_parts(jobs, *arguments)
        jobs[0].part(0).write_bytes(b"")

    monkeypatch.setattr(prepare, "make_all_parts", damaging)
    with pytest.raises(TriaxError, match=r"does not keep what is written there: set data\.cache_dir to another disk"):
        prepare.prepare(corpus(tmp_path / "text"), ByteTokenizer(), tmp_path / "cache", num_processes=1)


def prepare_on_a_full_disk(files: tuple[SourceFile, ...], cache: Path, results: Any) -> None:
    # The kernel refuses to let a file grow, as it does on a full disk, with another number for the same event.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        prepare.prepare(files, ByteTokenizer(), cache, num_processes=1)
        results.put("no error")
    except BaseException as error:
        results.put(repr(error))


def test_a_disk_that_fills_up_keeps_what_was_finished(tmp_path: Path) -> None:
    """The parts fit, and the store does not: with room for it, nothing is tokenised again."""
    files, cache = corpus(tmp_path / "text"), tmp_path / "cache"
    results = FORK.SimpleQueue()
    process = FORK.Process(target=prepare_on_a_full_disk, args=(files, cache, results))
    process.start()
    process.join(60)
    message = results.get()
    assert "BadInput" in message
    assert "cannot be written" in message
    assert "another folder; what is finished was kept." in message
    assert not list(cache.glob("tokens/*"))
    before = kept(cache)
    assert len(before) > 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode_batch", None)
        store = prepare.prepare(files, ByteTokenizer(), cache, num_processes=1)
    assert store.index == by_one_process(files, ByteTokenizer(), tmp_path / "whole").index


def test_a_process_that_was_slower_takes_the_store_of_the_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one removes the parts when it has the store, while this one still needs them."""
    files, cache = corpus(tmp_path / "text"), tmp_path / "cache"
    expected = prepare.prepare(files, ByteTokenizer(), tmp_path / "alone", num_processes=1)

    def overtaken(jobs: Sequence[Job], *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepare, "make_all_parts", make_all_parts)
            prepare.prepare(files, ByteTokenizer(), cache, num_processes=1)
        make_all_parts(jobs, *arguments)

    monkeypatch.setattr(prepare, "make_all_parts", overtaken)
    assert prepare.prepare(files, ByteTokenizer(), cache, num_processes=1).index == expected.index


def test_parts_that_nobody_wants_are_removed_in_the_end(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    old, fresh = cache / "parts" / "old", cache / "parts" / "fresh"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
        (folder / "0000000-00000.part").write_bytes(b"")
    for path in (old / "0000000-00000.part", old):
        os.utime(path, (1, 1))
    prepare.prepare(corpus(tmp_path / "text"), ByteTokenizer(), cache, num_processes=1)
    assert not old.exists()
    assert fresh.exists()


def prepare_as_daemon(files: tuple[SourceFile, ...], cache: Path, results: Any) -> None:
    with suppress(BaseException):
        results.put(prepare.prepare(files, ByteTokenizer(), cache, num_processes=2).index.num_tokens)


def test_a_daemon_that_may_have_no_children_works_alone(tmp_path: Path) -> None:
    files = corpus(tmp_path / "text")
    results = FORK.Queue()
    process = FORK.Process(target=prepare_as_daemon, args=(files, tmp_path / "cache", results), daemon=True)
    process.start()
    expected = by_one_process(files, ByteTokenizer(), tmp_path / "whole").index.num_tokens
    assert results.get(timeout=60) == expected
    process.join(60)
