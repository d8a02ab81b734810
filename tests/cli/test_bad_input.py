"""Is every mistake of a user told in one sentence and with exit code 2, and is nothing lost by it?"""

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from tests.cli.typed import Typed, contents, copied, losses, make_run, num_lines, refuse, tiny
from tests.spec.run_files import write
from triax.checkpoint.verify import newest_verified
from triax.cli import run
from triax.errors import BadInput
from triax.train.run_folder import RunFolder

TRAIN = ("train", "run.toml", "--ranks", 1, "--run-dir", "run")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return make_run(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps that is complete, and has checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    make_run(folder)
    assert run(["train", str(folder / "run.toml"), "--ranks", "1", "--run-dir", str(folder / "run"), "-q"]) == 0
    return folder


@pytest.fixture
def again(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run in the test's own folder; returns its run folder."""
    for name in ("run.toml", "corpus.jsonl"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    copied(trained / "cache", tmp_path / "cache")
    return copied(trained / "run", tmp_path / "run")


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def shard(run_dir: Path, step: int) -> Path:
    (path,) = checkpoint(run_dir, step).glob("*.safetensors")
    return path


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


# What is typed


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("nope.toml",), ("nope.toml does not exist",)),
        ((".",), (". is a folder",)),
        (("/dev/zero",), ("/dev/zero is no regular file",)),
        (("run.toml", "steps=3"), ("'steps=3' is no override", "section.key=value")),
        (("run.toml", "train.stepz=3"), ("unknown key 'train.stepz'", "train.steps")),
        (("run.toml", "train.steps=soon"), ("train.steps", "'soon' is not a count")),
        (("run.toml", "train.steps=-1"), ("train.steps", "1 or more")),
        (("run.toml", "layout.tensor_model_parallel_size=2"), ("tensor_model_parallel_size", "layout.tp")),
        (("run.toml", "train.train_iters=9"), ("train_iters", "train.steps")),
        (("run.toml", "data.train=['nope.txt']", "--ranks", "1"), ("nope.txt is missing",)),
        (("run.toml", "data.seq_len=100000", "--ranks", "1"), ("seq_len", "100")),
        (("run.toml", "model.vocab_size=100", "--ranks", "1"), ("ids up to 256", "model.vocab_size=100")),
        (("run.toml", "data.tokenizer=nope.json", "--ranks", "1"), ("nope.json is missing",)),
        (("run.toml", "--ranks", "0"), ("0 ranks train nothing",)),
        (("run.toml", "--ranks", "-3"), ("-3 ranks train nothing",)),
        (("run.toml", "--ranks", "100000"), ("100000 ranks are too many for this server",)),
        (("run.toml", "--ranks", "two"), ("--ranks", "triax train --help")),
        (("run.toml", "cluster.cards_per_server=9000"), ("9000 ranks are too many for this server",)),
        (("run.toml", "cluster.servers=2"), ("the cluster has 2 servers", "torchrun")),
        (("run.toml", "--ranks", "3", "--layout", "dp_shard=3"), ("does not divide over the 3 data ranks",)),
        (("run.toml", "--ranks", "8", "--layout", "dp_shard=8"), ("smaller than the 8 data ranks", "4")),
        (("run.toml", "--ranks", "4", "--layout", "cp=4", "data.seq_len=7"), ("cp=4 cuts a sequence", "cp=2 or 3")),
        (("run.toml", "--ranks", "4", "--layout", "dp_shard=2"), ("needs 2 ranks, and there are 4",)),
        (("run.toml", "--ranks", "2", "--layout", "dp_replicate=3"), ("groups of 3",)),
        (("run.toml", "--ranks", "2", "--layout", "zero=7"), ("layout.zero", "3 or less")),
        (("run.toml", "--bogus"), ("--bogus",)),
        ((), ("Missing argument", "triax train --help")),
    ],
    ids=str,
)
def test_what_cannot_be_trained(
    words: tuple[str, ...], fragments: tuple[str, ...], run_file: Path, here: Typed
) -> None:
    before = contents(run_file.parent)
    refuse(here("train", *words), *fragments)
    assert contents(run_file.parent).items() >= before.items()


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("frobnicate",), ("No such command 'frobnicate'", "triax --help")),
        (("checkpoint",), ("triax checkpoint --help",)),
        (("checkpoint", "list", "nope"), ("nope is no folder",)),
        (("checkpoint", "verify", "."), ("holds no saved state",)),
        (("generate", "nope", "--prompt", "x"), ("nope is no folder",)),
        (("generate", "."), ("--prompt",)),
        (("generate", ".", "--prompt", "x"), ("no manifest.json",)),
        (("generate", ".", "--prompt", "x", "--temperature", "nan"), ("--temperature",)),
        (("generate", ".", "--prompt", "x", "--seed", 1 << 64), ("--seed",)),
        (("schedule", "2F2B", "--pp", 2, "--microbatches", 2), ("'2F2B'", "1F1B")),
        (("schedule", "1F1B", "--pp", 1 << 40, "--microbatches", 2), ("--pp",)),
        (("schedule", "1F1B", "--pp", 256, "--microbatches", 4096), ("1,048,576 forwards", "65,536")),
        (("config", "show", "nope.toml"), ("nope.toml does not exist",)),
        (("data", "prepare", "nope.toml"), ("nope.toml does not exist",)),
    ],
    ids=str,
)
def test_what_the_other_verbs_refuse(words: tuple[object, ...], fragments: tuple[str, ...], here: Typed) -> None:
    refuse(here(*words), *fragments)


def test_several_faults_are_a_sentence_each(run_file: Path, here: Typed) -> None:
    told = here("train", "run.toml", "train.stepz=3", "data.seqlen=9")
    assert told.code == 2
    assert [line.split("'")[1] for line in told.err.splitlines()] == ["data.seqlen", "train.stepz"]
    assert all(line.startswith("triax: run.toml: unknown key") for line in told.err.splitlines())


@pytest.mark.parametrize("name", ["we ird", "ünï 😀", "new\nline", "esc\x1b[31mape", "\udcff"])
def test_any_path_is_told_in_one_line_that_steers_no_terminal(name: str, here: Typed) -> None:
    told = here("train", f"{name}.toml")
    assert told.code == 2
    assert "does not exist" in told.err
    assert told.err.replace("\n", "").isprintable()


def test_a_path_that_is_too_long(run_file: Path, here: Typed) -> None:
    for words in (("train", "a" * 5000), ("checkpoint", "list", "a" * 5000), ("generate", "a" * 5000, "--prompt", "x")):
        assert here(*words).code == 2
    refuse(here("train", "run.toml", "--ranks", 1, "--run-dir", "a" * 300), "cannot be written", "too long")


# The files that are read


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"\xff\xfe[model]", "is not UTF-8 text: byte 0"),
        (b"[model\n", "is not valid TOML"),
        (b"a = 1\na = 2\n", "is not valid TOML"),
        (b"", "model"),
        (b"x = 1\n" * 400_000, "no file of this kind is larger"),
        (b"format_version = 99\n", "format_version=99"),
    ],
    ids=["not UTF-8", "torn", "twice", "empty", "huge", "newer"],
)
def test_a_run_file_that_is_none(content: bytes, fragment: str, tmp_path: Path, here: Typed) -> None:
    (tmp_path / "run.toml").write_bytes(content)
    told = here("train", "run.toml")
    assert told.code == 2
    assert fragment in told.err
    assert "Traceback" not in told.err


def test_a_run_file_that_is_a_pipe_is_not_waited_for(tmp_path: Path, here: Typed) -> None:
    os.mkfifo(tmp_path / "run.toml")
    refuse(here("train", "run.toml"), "is no regular file")


def test_a_corrupt_line_is_named_by_its_number(run_file: Path, here: Typed) -> None:
    with (run_file.parent / "corpus.jsonl").open("a") as corpus:
        corpus.write('{"text": "whole"}\n{"text": "torn\n{"text": "whole"}\n')
    refuse(here(*TRAIN), "corpus.jsonl, line 302: not JSON")


@pytest.mark.parametrize("content", ["", "\n \n", '{"text": ""}\n'], ids=["nothing", "blanks", "empty texts"])
def test_an_empty_corpus(content: str, run_file: Path, here: Typed) -> None:
    (run_file.parent / "corpus.jsonl").write_text(content)
    refuse(here(*TRAIN), "corpus")


def test_a_corpus_that_is_too_small(run_file: Path, here: Typed) -> None:
    (run_file.parent / "corpus.jsonl").write_text('{"text": "a"}\n')
    refuse(here(*TRAIN), "32")
    (run_file.parent / "corpus.jsonl").write_text('{"text": "a few words"}\n' * 10)
    refuse(here(*TRAIN, "eval.sequences=100"), "100")


def _words(vocabulary: dict[str, int]) -> str:
    return str(Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).to_str())


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b'{"version": "1.0", "model": null}',
        b'{"a":' * 3000, _words({}).encode(), _words({"<unk>": 0}).encode(),
        _words({"<unk>": 0, "</s>": 2**31}).encode(),
        b'{"model":{"type":"WordLevel","vocab":{"a":-1},"unk_token":"a"}}',
    ],
    ids=range(12),
)  # fmt: skip
def test_a_tokenizer_that_is_none(content: bytes, run_file: Path, here: Typed) -> None:
    (run_file.parent / "tokenizer.json").write_bytes(content)
    refuse(here(*TRAIN, "data.tokenizer=tokenizer.json"), "tokenizer")


# What the environment says


@pytest.mark.parametrize(
    ("variables", "fragment"),
    [
        ({"RANK": "zero"}, "RANK='zero' is no number"),
        ({"RANK": "0"}, "WORLD_SIZE is not"),
        ({"RANK": "0", "WORLD_SIZE": "2.5"}, "WORLD_SIZE='2.5' is no number"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 30}, "is no number"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "outside the world"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "outside the world"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK='x' is no number"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "outside the world"),
        ({"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "equally many on each server"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "70000"}, "MASTER_PORT='70000'"),
        ({"SLURM_PROCID": "x", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID='x'"),
    ],
    ids=str,
)
def test_nonsense_about_ranks(variables: dict[str, str], fragment: str, run_file: Path, here: Typed) -> None:
    os.environ.update(variables)
    refuse(here("train", "run.toml"), fragment)


def test_a_rank_starts_no_ranks(run_file: Path, here: Typed) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="1")
    refuse(here("train", "run.toml", "--ranks", 2), "was started as a rank")


def test_of_the_ranks_of_a_server_one_speaks(here: Typed) -> None:
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    for rank, said in (("0", "triax: nope.toml does not exist: give the path of a file.\n"), ("1", "")):
        os.environ["RANK"] = rank
        assert here("train", "nope.toml").err == said


def test_what_another_launcher_left_behind_does_not_count(run_file: Path, here: Typed) -> None:
    os.environ.update(WORLD_SIZE="4", LOCAL_RANK="3", LOCAL_WORLD_SIZE="many")
    assert here(*TRAIN, "-q").code == 0


# The run's folder


def test_a_folder_that_cannot_be_written(run_file: Path, here: Typed) -> None:
    (run_file.parent / "file").write_text("here")
    for folder in ("file", "file/below", "/proc/below"):
        refuse(here("train", "run.toml", "--ranks", 1, "--run-dir", folder), f"{folder} cannot be written")
    refuse(here(*TRAIN, "data.cache_dir=/proc/below"), "cannot be written to /proc/below: No such file", "set data.c")
    refuse(here("train", "run.toml", "--ranks", 1, "--run-dir", "a/b/" + "c" * 300), "cannot be written", "too long")
    assert not (run_file.parent / "a").exists()


@pytest.mark.parametrize("run_dir", ["run", "runs/of/mine", "there"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refusal_leaves_no_folder_behind(ranks: int, run_dir: str, run_file: Path, here: Typed) -> None:
    (run_file.parent / "there").mkdir()
    before = sorted(path for path in run_file.parent.rglob("*") if "cache" not in path.parts)
    words = ("train", "run.toml", "--ranks", ranks, "--run-dir", run_dir, "model.vocab_size=100")
    refuse(here(*words), "model.vocab_size=100")
    assert sorted(path for path in run_file.parent.rglob("*") if "cache" not in path.parts) == before


def test_a_lock_that_was_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is refused removes its lock while another one has opened it, and waits to lock it."""
    folder, flock = RunFolder(tmp_path / "run"), fcntl.flock

    def after_the_other_has_gone(lock: int, how: int) -> None:
        monkeypatch.undo()
        (folder.path / ".lock").unlink()
        flock(lock, how)

    monkeypatch.setattr("triax.train.run_folder.fcntl.flock", after_the_other_has_gone)
    with folder.locked(), pytest.raises(BadInput, match="still going"), folder.locked():
        pass
    assert not folder.path.exists()


def test_a_second_start_in_the_same_folder(again: Path, here: Typed) -> None:
    before = contents(again)
    with RunFolder(again).locked():
        refuse(here(*TRAIN), "belongs to a run that is still going")
    with RunFolder(again).held_by_rank_0():  # its start was killed, and it still saves
        refuse(here(*TRAIN, "train.timeout_s=1"), "belongs to a run that is still going")
    assert contents(again) == before


@pytest.mark.parametrize("plan", ["whole", "removed", "torn", "newer"])
def test_a_checkpoint_of_another_model(plan: str, again: Path, here: Typed) -> None:
    said: dict[str, Any] = json.loads((again / "plan.json").read_text())
    said["format_version"] = 99
    match plan:
        case "removed":
            (again / "plan.json").unlink()
        case "torn":
            cut_in_half(again / "plan.json")
        case "newer":
            (again / "plan.json").write_text(json.dumps(said))
    before = contents(again)
    words = ("model.hidden_size=32", "optimizer.beta2=0.9")
    refuse(here(*TRAIN, *words), "hidden_size was 16 and is now 32", "beta2 was 0.95 and is now 0.9", "--run-dir")
    assert contents(again) == before
    assert here(*TRAIN, "-q").code == 0


def test_a_checkpoint_of_another_model_whose_manifest_is_too_large_to_glance_at(
    again: Path, here: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triax.train.run_folder._LARGEST_GLANCE_BYTES", 10)
    before = contents(again)
    refuse(here(*TRAIN, "model.hidden_size=32"), "hidden_size was 16 and is now 32", "--run-dir")
    assert contents(again) == before


def test_a_checkpoint_of_other_data(again: Path, here: Typed) -> None:
    before = contents(again)
    (again.parent / "corpus.jsonl").write_text('{"text": "other words altogether"}\n' * 100)
    refuse(here(*TRAIN), "on other data")
    assert contents(again) == before


@pytest.mark.parametrize("damage", [flip_a_bit, cut_in_half, os.unlink], ids=["bit", "truncated", "missing"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_gone_on_from(
    damage: Any, again: Path, here: Typed, caplog: pytest.LogCaptureFixture
) -> None:
    expected = losses(again)
    damage(shard(again, 4))
    assert here("checkpoint", "verify", "run").code == 1
    told = here(*TRAIN)
    assert told.code == 0
    assert "resumed: step 2" in told.out
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "step-00000004 is damaged" in warning
    assert "Going on from step 2" in warning
    assert losses(again) == expected
    whole, _ = newest_verified(again / "checkpoints")
    assert whole is not None
    assert whole.manifest.step == 4


@pytest.mark.parametrize("damage", [flip_a_bit, cut_in_half], ids=["bit", "truncated"])
def test_where_all_checkpoints_are_damaged_nothing_is_lost(damage: Any, again: Path, here: Typed) -> None:
    damage(shard(again, 2))
    damage(shard(again, 4))
    before = contents(again)
    refuse(here(*TRAIN), "holds no checkpoint that can be trusted", "step-00000004", "step-00000002")
    assert contents(again) == before


def test_junk_among_checkpoints_is_passed_over(again: Path, here: Typed) -> None:
    folder = again / "checkpoints"
    (folder / "step-00000009").write_text("no folder")
    (folder / "step-00000010").mkdir()
    os.mkfifo(folder / "step-00000010" / "manifest.json")
    (folder / "step-00000011").symlink_to("/nowhere")
    (folder / "step-00000012").mkdir()
    (folder / "step-00000012" / "manifest.json").write_text('{"format": "other"}')
    (folder / "step-00000013").mkdir()
    (folder / "step-99999999999999999999").mkdir()
    (folder / "notes").mkdir()
    (folder / "latest").write_text("\0")
    kept = contents(folder)
    assert here("checkpoint", "list", "run").code == 0
    assert here(*TRAIN, "train.steps=6", "-q").code == 0
    for name in ("step-00000009", "step-00000012/manifest.json"):
        assert (folder / name).read_bytes() == kept[name]
    assert (folder / "notes").is_dir()


def test_a_torn_line_of_metrics_is_mended(again: Path, here: Typed, caplog: pytest.LogCaptureFixture) -> None:
    with (again / "metrics.jsonl").open("a") as file:
        file.write('{"format_version": 1, "step": 5, "train/lo')
    assert here(*TRAIN, "train.steps=6", "-q").code == 0
    assert "the last line was cut off" in caplog.text
    assert len(losses(again)) == 6


# plan.json


def _edited(plan: dict[str, Any], key: str, value: Any) -> str:
    *path, last = key.split(".")
    place = plan
    for name in path:
        place = place[name]
    place[last] = value
    return json.dumps(plan)


@pytest.mark.parametrize(
    ("key", "value", "fragment"),
    [
        ("run.model.hidden_size", 32, "it was edited; make the plan again"),
        ("fingerprint", "0" * 16, "it was edited; make the plan again"),
        ("cluster.cards_per_server", 2, "and there are 2"),
        ("layout.microbatches", 3, "do not make the 4 sequences"),
        ("format_version", 99, "format_version=99"),
        ("bogus", 1, "unknown key 'bogus'"),
        ("run.train.steps", "many", "train.steps"),
    ],
)
def test_a_plan_that_was_edited(
    key: str, value: Any, fragment: str, trained: Path, tmp_path: Path, here: Typed
) -> None:
    plan = json.loads((trained / "run" / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(_edited(plan, key, value))
    refuse(here("train", "plan.json"), fragment)
    assert not (tmp_path / "runs").exists()


def test_a_plan_takes_no_overrides(trained: Path, tmp_path: Path, here: Typed) -> None:
    copied(trained / "run", tmp_path / "run")
    refuse(here("train", "run/plan.json", "train.steps=9"), "is trained as it is", "train.steps=9")


@pytest.mark.parametrize("content", ["", "[]", "{", "nothing", "NaN", '{"a":' * 5000], ids=range(6))
def test_a_plan_that_is_none(content: str, tmp_path: Path, here: Typed) -> None:
    (tmp_path / "plan.json").write_text(content)
    told = here("train", "plan.json")
    assert told.code == 2
    assert "Traceback" not in told.err


# The disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=1m none '{disk}' 2>/dev/null"):
        pytest.skip("a small file system can only be mounted by root")
    yield disk
    os.system(f"umount '{disk}'")


def _fill(disk: Path, leave_bytes: int) -> Path:
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    ballast.write_bytes(b"\0" * (free.f_bavail * free.f_frsize - leave_bytes))
    return ballast


def test_a_full_disk_stops_no_training_and_takes_no_checkpoint(
    small_disk: Path, run_file: Path, here: Typed, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("train", "run.toml", "--ranks", 1, "--run-dir", small_disk / "run", "--quiet")
    assert here(*words, "train.steps=2").code == 0
    before = contents(checkpoint(small_disk / "run", 2))
    ballast = _fill(small_disk, leave_bytes=40_000)
    told = here(*words, "train.steps=7")
    assert (told.code, told.out) == (1, "")
    assert "step 7 was trained and could not be saved" in told.sentence
    assert "disk full" in told.sentence
    assert [word for word in ("step 4", "step 6") if f"{word} was not saved: disk full" not in caplog.text] == []
    assert "step 7" not in caplog.text  # it is told once, by the sentence
    assert contents(checkpoint(small_disk / "run", 2)) == before
    assert len(losses(small_disk / "run")) == 7
    ballast.unlink()
    assert here(*words, "train.steps=7").code == 0
    assert newest_verified(small_disk / "run" / "checkpoints")[1] == []
    assert len(losses(small_disk / "run")) == 7


def test_a_disk_that_is_full_to_the_last_byte(
    small_disk: Path, run_file: Path, here: Typed, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("train", "run.toml", "--ranks", 1, "--run-dir", small_disk / "run", "--quiet")
    assert here(*words, "train.steps=2").code == 0
    before = contents(checkpoint(small_disk / "run", 2))
    ballast = _fill(small_disk, leave_bytes=0)
    refuse(here(*words, "train.steps=4"), "cannot be written: No space left on device")
    assert contents(checkpoint(small_disk / "run", 2)) == before
    ballast.unlink()
    assert here(*words, "train.steps=4").code == 0


def test_a_disk_that_fills_up_while_tokens_are_written(small_disk: Path, run_file: Path, here: Typed) -> None:
    _fill(small_disk, leave_bytes=20_000)
    write(run_file.parent, tiny(data={"cache_dir": str(small_disk / "cache")}))
    refuse(here(*TRAIN), "Prepared tokens cannot be written", "No space left", "data.cache_dir")


def test_a_save_that_fails_in_the_middle(
    again: Path, here: Typed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    before = contents(checkpoint(again, 4))
    monkeypatch.setattr("triax.checkpoint.part.write_new", no_space)
    told = here(*TRAIN, "train.steps=7", "-q")
    assert told.code == 1
    assert "step 7 was trained and could not be saved" in told.sentence
    assert "step 6 was not saved" in caplog.text
    assert "step 7" not in caplog.text
    assert contents(checkpoint(again, 4)) == before
    assert num_lines(again / "metrics.jsonl") == 7
