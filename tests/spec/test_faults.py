"""Does each fault become a sentence that says what was given and what would be legal?"""

from typing import Any

import pytest

from tests.spec.run_files import changed, smallest
from triax.errors import BadInput
from triax.spec.cluster import Cluster
from triax.spec.faults import shown, validated
from triax.spec.run import Run


def lines_of(said: dict[str, Any]) -> list[str]:
    with pytest.raises(BadInput) as refusal:
        validated(Run, said, "run.toml")
    return [line.removeprefix("run.toml: ") for line in str(refusal.value).split("\n")]


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("train.steps", 0, "train.steps = 0 cannot be: use 1 or more."),
        ("train.steps", 1.5, "train.steps = 1.5 cannot be: use a whole number."),
        ("train.steps", True, "train.steps = True cannot be: use a whole number."),
        ("eval.every_steps", 2**63, f"eval.every_steps = {2**63} cannot be: use less than {2**63}."),
        ("train.steps", 2**62, f"train.steps = {2**62} cannot be: use {2**40} or less."),
        ("train.steps", "ten", "train.steps: 'ten' is not a count: write a number with an optional unit, such as 512, "
                               "64k or 1.5M."),
        ("train.seed", "7", "train.seed = '7' cannot be: use a whole number."),
        ("learning_rate.peak", "fast", "learning_rate.peak = 'fast' cannot be: use a number, such as 0.1."),
        ("learning_rate.peak", 0, "learning_rate.peak = 0 cannot be: use more than 0.0."),
        ("learning_rate.peak", float("inf"), "learning_rate.peak = inf cannot be: use a finite number."),
        ("optimizer.beta1", 1.0, "optimizer.beta1 = 1.0 cannot be: use less than 1.0."),
        ("learning_rate.schedule", "cosin", "learning_rate.schedule = 'cosin' cannot be: use 'cosine', 'wsd' or "
                                            "'constant'."),
        ("watch.tensorboard", "yes", "watch.tensorboard = 'yes' cannot be: use true or false."),
        ("data.train", "a.txt", "data.train = 'a.txt' cannot be: use a list in square brackets."),
        ("data.train", [], "data.train = [] cannot be: use a list of at least 1."),
        ("data.train", ["a", 1], "data.train.1 = 1 cannot be: use text in quotes."),
        ("data.tokenizer", "", "data.tokenizer = '' cannot be: use text that is not empty."),
        ("data.cache_dir", "a\0", "data.cache_dir: text cannot hold the character NUL."),
        ("cluster.device", "x" * 41, f"cluster.device = '{'x' * 41}' cannot be: use a text of at most 40 characters."),
        ("layout.order", ["pp"], "layout.order: ['pp'] must name each of pp, dp_replicate, dp_shard, cp, tp exactly "
                                 "once."),
        ("layout.stage_cuts", [1, -1], "layout.stage_cuts.1 = -1 cannot be: use 0 or more."),
        ("model.num_attention_heads", 3, "model: num_attention_heads=3 does not divide hidden_size=64: use 1, 2 or 4 "
                                         "heads, or give head_dim."),
    ],
)  # fmt: skip
def test_one_fault_is_one_sentence(name: str, value: Any, line: str) -> None:
    assert lines_of(changed(smallest(), name, value)) == [line]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("train.stepz", "unknown key 'train.stepz': did you mean train.steps?"),
        ("train.STEPS", "unknown key 'train.STEPS': did you mean train.steps?"),
        ("train.seq_len", "unknown key 'train.seq_len': did you mean data.seq_len?"),
        ("trian.steps", "unknown key 'trian': did you mean train?"),
        (
            "watch.zzz",
            "unknown key 'watch.zzz': [watch] knows console_every, tensorboard, timeline_steps, hang_soft_s, "
            "hang_hard_s, straggler_above.",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest(name: str, line: str) -> None:
    assert lines_of(changed(smallest(), name, 1))[0] == line


def test_missing_sections_and_keys() -> None:
    assert lines_of({}) == [f"{name} is missing: it must be given." for name in ("model", "data", "train")]
    assert lines_of({**smallest(), "data": {"train": ["x"]}}) == ["data.seq_len is missing: it must be given."]


def test_every_fault_is_told() -> None:
    said = changed(changed(smallest(), "train.steps", -1), "data.seq_len", "long")
    assert [line.split(" ")[0] for line in lines_of(said)] == ["data.seq_len:", "train.steps"]


def test_unknown_keys_and_bad_values_are_told_together() -> None:
    said = changed(changed(smallest(), "train.stepz", 3), "data.seq_len", "long")
    assert [line.split(":")[0] for line in lines_of(said)] == ["unknown key 'train.stepz'", "data.seq_len"]
    del said["train"]["steps"], said["model"]["vocab_size"]
    assert [line.partition(":")[0] for line in lines_of(said)] == [
        "unknown key 'train.stepz'",  # which asks for train.steps, and so that is not told as missing too
        "model.vocab_size is missing",
        "data.seq_len",
    ]


def test_a_file_of_another_kind_does_not_fill_the_screen() -> None:
    lines = lines_of({f"key{i}": i for i in range(10_000)})
    assert len(lines) == 21
    assert lines[-1] == "there are more faults."
    assert len(lines_of(changed(smallest(), "data.train", [1] * 1000))) == 21


def test_what_was_given_is_quoted_in_part() -> None:
    for name, value in (
        ("train.steps", "9" * 10_000),
        ("train.steps", 16**5000),  # Python reads this number in hexadecimal and cannot write it in decimals
        ("train.steps", {"a": "b" * 10_000}),
        ("layout.order", ["pp"] * 10_000),
        ("data.tokenizer", [["x"] * 1000] * 100),
        ("learning_rate.peak", 16**5000),
    ):
        assert all(len(line) < 600 for line in lines_of(changed(smallest(), name, value)))


def test_a_long_unknown_key_is_quoted_in_part() -> None:
    assert len(lines_of({"k" * 10_000: 1})[0]) < 300


def test_shown_never_fails() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "(a list that cannot be shown)"
    assert shown(16**5000) == "(a int that cannot be shown)"
    assert shown("x" * 100) == f"'{'x' * 75} ..."
    assert shown([1, "a"]) == "[1, 'a']"


def test_other_values_than_runs() -> None:
    with pytest.raises(BadInput, match=r"unknown key 'server': did you mean servers\?"):
        validated(Cluster, {"server": 1}, "cluster.toml")
