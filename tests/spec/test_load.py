"""Does a run file say what its author meant, wherever it lies, and is every other file refused in words?"""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.spec.run_files import Said, make_run, smallest, whole, write
from triax.errors import BadInput
from triax.spec.cluster import Cluster
from triax.spec.layout import AXES
from triax.spec.load import layout_words, load_cluster, load_run
from triax.spec.run import Run


def refusal_of(path: Path, *overrides: str) -> str:
    with pytest.raises(BadInput) as refusal:
        load_run(path, overrides)
    return str(refusal.value)


# What a file says


def test_a_commented_file_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        """
        # A small run.
        [model]
        hidden_size = 64           # D
        intermediate_size = 128
        num_hidden_layers = 2
        num_attention_heads = 4
        vocab_size = 50_304
        max_position_embeddings = "4k"
        [data]
        train = ["corpus.txt"]
        seq_len = 32
        [train]
        steps = 1e3
        tokens_per_step = "64k"
        [learning_rate]
        peak = 1e-4
        [cluster]
        memory_bytes = "80 GiB"
        """,
        encoding="utf-8",
    )
    run = load_run(path)
    assert (run.model.vocab_size, run.model.max_position_embeddings) == (50304, 4000)
    assert (run.train.steps, run.sequences_per_step) == (1000, 2000)
    assert run.learning_rate.peak == 0.0001
    assert run.cluster is not None
    assert run.cluster.memory_bytes == 80 * 2**30
    assert run.optimizer.weight_decay == 0.1


def test_every_key_is_read(tmp_path: Path) -> None:
    assert load_run(write(tmp_path, whole())) == Run.model_validate(whole())


@pytest.mark.parametrize("said", [smallest(), whole()])
def test_resolved_values_are_a_run_file_again(said: Said, tmp_path: Path) -> None:
    """What a run folder keeps as resolved.toml: every value, defaults included, absent ones left out."""
    run = load_run(write(tmp_path, said))
    assert load_run(write(tmp_path, run.model_dump(mode="json", exclude_none=True), "resolved.toml")) == run


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(smallest()), encoding="utf-8-sig")
    assert load_run(path).train.steps == 10


def test_a_file_says_its_version(tmp_path: Path) -> None:
    assert load_run(write(tmp_path, {"format_version": 1, **smallest()})) == load_run(write(tmp_path, smallest()))
    for version in (2, 0, "1", [1]):
        message = refusal_of(write(tmp_path, {"format_version": version, "magic": {}, **smallest()}))
        assert f"format_version={version!r}, and this version of triax reads up to 1" in message


# Paths


def test_paths_start_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    said = smallest()
    said["data"] |= {"train": ["a.txt", "../b/*.txt", "/c.txt"], "tokenizer": "tokenizer.json", "cache_dir": "cache"}
    path = write(tmp_path / "runs", said)
    monkeypatch.chdir(tmp_path)
    for seen in (path, Path("runs/run.toml")):
        data = load_run(seen).data
        assert data.train == (f"{tmp_path}/runs/a.txt", f"{tmp_path}/runs/../b/*.txt", "/c.txt")
        assert (data.tokenizer, data.cache_dir) == (f"{tmp_path}/runs/tokenizer.json", f"{tmp_path}/runs/cache")


def test_the_byte_tokenizer_is_no_path(tmp_path: Path) -> None:
    data = load_run(write(tmp_path, smallest())).data
    assert (data.tokenizer, data.cache_dir) == ("bytes", None)


def test_home_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    path = write(tmp_path, smallest())
    assert load_run(path, ['data.train=["~/corpus"]']).data.train == ("/home/someone/corpus",)
    assert "Could not determine home directory" in refusal_of(path, 'data.train=["~no-such-user/corpus"]')


def test_a_bracket_in_the_name_of_the_folder_is_no_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "[old] runs"
    folder.mkdir()
    (folder / "a[1].txt").touch()
    said = smallest()
    said["data"]["train"] = ["*.txt", "a[1].txt", "b.txt"]
    pattern, name, missing = load_run(write(folder, said)).data.train
    assert pattern == f"{tmp_path}/[[]old] runs/*.txt"
    assert (name, missing) == (f"{folder}/a[1].txt", f"{folder}/b.txt")


# Overrides


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("train.steps=200", 200),
        ("train.steps = 200 ", 200),
        ("train.steps=64k", 64_000),
        ('train.steps="64k"', 64_000),
        ("train.steps=1e3", 1000),
        ("train.seed=0x10", 16),
        ("learning_rate.peak=3e-4", 0.0003),
        ("learning_rate.peak=1", 1.0),
        ("learning_rate.schedule=constant", "constant"),
        ("learning_rate.schedule='constant'", "constant"),
        ("watch.tensorboard=false", False),
        ("layout.order=" + str(list(reversed(AXES))), tuple(reversed(AXES))),
        ("data.text_field=a=b", "a=b"),
        ("data.text_field=a#b", "a#b"),
        ("data.text_field=a\nb", "a\nb"),
        ("data.text_field=3 words", "3 words"),
        ("checkpoint.keep=7", 7),
    ],
)
def test_a_word_sets_a_key(word: str, value: Any, tmp_path: Path) -> None:
    section, key = word.partition("=")[0].strip().split(".")
    run = load_run(write(tmp_path, smallest()), [word])
    assert getattr(getattr(run, section), key) == value
    assert type(getattr(getattr(run, section), key)) is type(value)


def test_the_last_word_wins_and_the_rest_stays(tmp_path: Path) -> None:
    run = load_run(write(tmp_path, whole()), ["train.steps=30", "train.steps=40"])
    assert run.train.steps == 40
    assert run.train.seed == whole()["train"]["seed"]


def test_words_complete_a_file(tmp_path: Path) -> None:
    said = smallest()
    del said["train"]
    run = load_run(write(tmp_path, said), ["train.steps=10", "train.sequences_per_step=16"])
    assert run.train == make_run().train


def test_sections_within_sections_are_overridden_by_their_full_name(tmp_path: Path) -> None:
    said = smallest()
    said["model"]["experts"] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    path = write(tmp_path, said)
    experts = load_run(path, ["model.experts.num_experts=6", "model.experts.router_aux_loss_coef=1e-2"]).model.experts
    assert experts is not None
    assert (experts.num_experts, experts.num_experts_per_tok, experts.router_aux_loss_coef) == (6, 2, 0.01)
    linear = load_run(path, ["model.rope_scaling.kind=linear", "model.rope_scaling.factor=2.0"]).model.rope_scaling
    assert linear is not None
    assert refusal_of(path, "model.hidden_size.x=3") == (
        "'model.hidden_size.x=3' cannot be applied: the file says model.hidden_size = 64, which is no section."
    )


@pytest.mark.parametrize("word", ["", "=", "steps=3", "train.steps", ".steps=3", "train.=3", "train", "train.steps:3"])
def test_other_words_are_no_overrides(word: str, tmp_path: Path) -> None:
    assert refusal_of(write(tmp_path, smallest()), word) == (
        f"{word!r} is no override: write section.key=value, such as train.steps=200."
    )


def test_every_word_that_is_no_override_is_told(tmp_path: Path) -> None:
    lines = refusal_of(write(tmp_path, smallest()), "steps=3", "train.steps=3", "nonsense").split("\n")
    assert [line.split(" ")[0] for line in lines] == ["'steps=3'", "'nonsense'"]


def test_words_are_checked_like_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, smallest())
    assert "unknown key 'train.lr': that setting is called learning_rate.peak here" in refusal_of(path, "train.lr=1")
    assert "unknown key 'train.a'" in refusal_of(path, "train.a.b=1")
    assert "train.steps: 'many' is not a count" in refusal_of(path, "train.steps=many")
    assert "data.text_field = '\\udcff' cannot be: use text that UTF-8 can write." in refusal_of(
        path, "data.text_field=\udcff"
    )


def test_a_word_needs_a_section(tmp_path: Path) -> None:
    path = write(tmp_path, {**smallest(), "guard": 0})
    assert "the file says guard = 0, which is no section" in refusal_of(path, "guard.check_initial_loss=false")


def test_a_layout_is_a_row_of_words() -> None:
    assert layout_words("") == []
    assert layout_words("pp=2 tp=2") == layout_words(" pp=2,  tp=2 ") == ["layout.pp=2", "layout.tp=2"]
    assert layout_words("layout.pp=2") == ["layout.pp=2"]
    assert layout_words('order=["tp", "pp"] stage_cuts=[1, 2],zero=3') == [
        'layout.order=["tp", "pp"]', "layout.stage_cuts=[1, 2]", "layout.zero=3",
    ]  # fmt: skip


def test_both_ways_of_saying_a_layout_are_one(tmp_path: Path) -> None:
    path = write(tmp_path, smallest())
    text = 'dp_shard=2, zero=1 order=["tp", "cp", "dp_shard", "dp_replicate", "pp"]'
    run = load_run(path, layout_words(text))
    assert (run.layout.dp_shard, run.layout.zero, run.layout.tp) == (2, 1, None)
    assert run.layout.order == tuple(reversed(AXES))
    assert "'layout.dp_shard' is no override" in refusal_of(path, *layout_words("dp_shard = 2"))


# Files that are none


def test_there_must_be_a_file(tmp_path: Path) -> None:
    assert refusal_of(tmp_path / "no.toml") == f"{tmp_path}/no.toml does not exist: give the path of a file."
    assert refusal_of(tmp_path) == f"{tmp_path} is a folder: give the path of a file."
    assert refusal_of(Path("/dev/null")) == "/dev/null is no regular file: give the path of a file."
    assert "does not exist" in refusal_of(Path("a\0b"))
    assert "cannot be read: File name too long" in refusal_of(Path("x" * 5000))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads what it may not")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, smallest())
    path.chmod(0)
    assert "cannot be read: Permission denied" in refusal_of(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "model is missing: it must be given."),
        (b"[model", "is not valid TOML"),
        (b"\x7fELF\x02\x01", "is not valid TOML"),
        (b"\xff\xfe[\x00m\x00", "is not UTF-8 text: byte 0 cannot be read."),
        (b"a = '" + b"x" * (1 << 20), "bytes, and no file of this kind is larger than 1,048,576"),
        (b"train = " + b"[" * 100_000, "is not valid TOML"),
        (b"train = " + b"{a=" * 100_000, "is not valid TOML"),
        (b"train = " + b"9" * 5000, "is not valid TOML"),
        (b"train = 0x" + b"f" * 5000, "train = (a int that cannot be shown) cannot be: train is a section"),
        (b"a." * 30 + b"a = 1", "unknown key 'a'"),
        (b"a." * 32 + b"a = 1", "a key of more than 32 parts"),
        (b"[" + b"'a'. " * 32 + b"a]", "a key of more than 32 parts"),
        (b"t = {" + b'"". ' * 300_000 + b"a = 1}", "bytes, and no file"),
        (b"a." * 5000 + b"a = 1", "a key of more than 32 parts"),
        (b"t = {" + b'"". ' * 200_000 + b"a = 1}", "a key of more than 32 parts"),
        (b"train.steps = 1\ntrain.steps = 2", "is not valid TOML: Cannot overwrite a value"),
        (b"d = 2024-02-31", "is not valid TOML"),
    ],
    ids=range(17),
)
def test_other_contents_are_one_sentence_and_soon(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    began_s = time.process_time()
    message = refusal_of(path)
    assert words in message
    assert message.startswith(str(path))
    assert time.process_time() - began_s < 5  # a key of many parts would take hours


def test_dots_in_text_are_no_key(tmp_path: Path) -> None:
    said = smallest()
    said["data"]["train"] = ["/".join(["a.b"] * 100), "one. " * 100]
    assert len(load_run(write(tmp_path, said)).data.train) == 2


# Clusters


def test_a_cluster_is_a_short_form_or_a_file(tmp_path: Path) -> None:
    assert load_cluster("16x8xh100") == Cluster(servers=16, cards_per_server=8, device="h100")
    path = write(tmp_path, {"format_version": 1, **whole()["cluster"]}, "cluster.toml")
    assert load_cluster(str(path)) == Cluster.model_validate(whole()["cluster"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("16x8", "is no cluster: write servers x cards x device, such as 16x8xh100"),
        ("cluster.json", "or the path of a .toml file"),
        ("no.toml", "no.toml does not exist: give the path of a file."),
        ("", "is no cluster"),
    ],
)
def test_other_clusters_are_refused(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        load_cluster(text)


def test_a_file_of_a_cluster_is_checked(tmp_path: Path) -> None:
    path = write(tmp_path, {"server": 2}, "cluster.toml")
    with pytest.raises(BadInput, match=r"unknown key 'server': did you mean servers\?"):
        load_cluster(str(path))
