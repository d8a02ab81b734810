"""Do several sources say what they are in the words of one, and does what cannot be mixed get a sentence?"""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.spec.run_files import Said, make_run, smallest, write
from triax.errors import BadInput
from triax.spec.data import SourceSpec
from triax.spec.faults import validated
from triax.spec.load import load_run
from triax.spec.run import Run

WEB: Said = {"train": ["web"], "weight": 0.7, "name": "web"}
CODE: Said = {"train": ["code/*.py"], "weight": 0.3, "text_field": "content", "format": "text"}


def mixed(*sources: Said, **sections: Said) -> Run:
    return make_run(data={"train": None, "source": list(sources)}, **sections)


def faults(*sources: Any, **data: Any) -> list[str]:
    said = {**smallest(), "data": {"seq_len": 32, "source": list(sources), **data}}
    with pytest.raises(BadInput) as refusal:
        validated(Run, said, "run.toml")
    return [line.removeprefix("run.toml: ") for line in str(refusal.value).split("\n")]


def test_train_is_one_source_of_weight_one() -> None:
    (source,) = make_run(data={"text_field": "body", "extensions": [".py"]}).data.sources
    assert source == SourceSpec(
        train=("corpus.txt",), weight=1.0, name="train", format="auto", extensions=(".py",), text_field="body"
    )


def test_a_source_is_as_data_says_unless_it_says_otherwise() -> None:
    run = make_run(data={"train": None, "source": [WEB, CODE], "text_field": "body", "extensions": [".md"]})
    web, code = run.data.sources
    assert (web.name, web.text_field, web.format, web.extensions) == ("web", "body", "auto", (".md",))
    assert (code.name, code.text_field, code.format, code.extensions) == ("source-2", "content", "text", (".md",))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.3], [Fraction(7, 10), Fraction(3, 10)]),
        ([1, 2], [Fraction(1, 3), Fraction(2, 3)]),
        ([1e-300, 1e300], [Fraction(1, 10**600 + 1), Fraction(10**600, 10**600 + 1)]),
    ],
)
def test_weights_are_taken_as_written(weights: list[float], shares: list[Fraction]) -> None:
    assert mixed(
        *({**WEB, "name": f"s{place}", "weight": weight} for place, weight in enumerate(weights))
    ).data.weights == (*shares,)


def test_paths_of_sources_start_at_the_run_file(tmp_path: Path) -> None:
    said = {**smallest(), "data": {"seq_len": 32, "source": [WEB, CODE]}}
    web, code = load_run(write(tmp_path, said)).data.sources
    assert (web.train, code.train) == ((str(tmp_path / "web"),), (str(tmp_path / "code/*.py"),))


@pytest.mark.parametrize(
    "change",
    [{"weight": 0.6}, {"text_field": "t"}, {"format": "jsonl"}, {"extensions": [".c"]}, {"token_dtype": "int32"}],
)
def test_what_a_source_says_is_mathematics(change: Said) -> None:
    assert mixed({**WEB, **change}, CODE).fingerprint != mixed(WEB, CODE).fingerprint


def test_the_same_mixture_said_otherwise_has_the_same_fingerprint() -> None:
    said = mixed(WEB, CODE).fingerprint
    assert mixed({**WEB, "weight": 7}, {**CODE, "weight": 3}).fingerprint == said
    assert mixed({**WEB, "train": ["/moved"], "name": "other"}, CODE).fingerprint == said
    assert mixed(CODE, WEB).fingerprint != said


def test_sources_may_hold_out_their_own() -> None:
    sources = {**WEB, "eval_sequences": 3}, {**CODE, "eval_sequences": 1}
    run = mixed(*sources, eval={"sequences": 4})
    assert run.fingerprint != mixed(*sources[::-1], eval={"sequences": 4}).fingerprint


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"weight": 0}, "data.source.0.weight = 0 cannot be: use more than 0.0."),
        ({"weight": -0.5}, "data.source.0.weight = -0.5 cannot be: use more than 0.0."),
        ({"weight": float("nan")}, "data.source.0.weight = nan cannot be: use a finite number."),
        ({"weight": "half"}, "data.source.0.weight = 'half' cannot be: use a number, such as 0.1."),
        ({"train": []}, "data.source.0.train = [] cannot be: use a list of at least 1."),
        ({"weigth": 1}, "unknown key 'data.source.0.weigth': did you mean data.source.0.weight?"),
        ({"seq_len": 1}, "unknown key 'data.source.0.seq_len': did you mean data.seq_len?"),
        ({"name": "../x"}, "data.source.0.name: '../x' is no name: use at most 60 letters, digits and _ . -"),
        ({"name": "source-2"}, "data: two sources are called 'source-2': give each another name."),
        (
            {"eval_sequences": 3},
            "data.source: 'source-2' says no eval_sequences and others do: give it to all or to none.",
        ),
        (
            {"token_dtype": "float32"},
            "data.source.0.token_dtype = 'float32' cannot be: use 'uint8', 'uint16', 'uint32', 'int32' or 'int64'.",
        ),
    ],
)
def test_a_source_that_cannot_be_is_named(change: Said, line: str) -> None:
    assert faults({**WEB, **change}, CODE) == [line]


def test_all_weights_of_nothing_are_told() -> None:
    assert len(faults({**WEB, "weight": 0}, {**CODE, "weight": 0})) == 2


def test_what_is_missing_is_named() -> None:
    assert faults({"train": ["a"]}) == ["data.source.0.weight is missing: it must be given."]
    assert faults({"weight": 1}) == ["data.source.0.train is missing: it must be given."]
    assert faults() == ["data.source = [] cannot be: use a list of at least 1."]


def test_one_way_to_say_it() -> None:
    line = "data: give either train, or a [[data.source]] with train and weight for each of several."
    assert faults(WEB, train=["a"]) == [line]
    said = {**smallest(), "data": {"seq_len": 32}}
    with pytest.raises(BadInput, match="give either train, or a"):
        validated(Run, said, "run.toml")


def test_held_out_sequences_must_add_up() -> None:
    assert faults({**WEB, "eval_sequences": 3}, {**CODE, "eval_sequences": 2}) == [
        "eval.sequences=0, and the eval_sequences of the sources sum to 5: set eval.sequences=5."
    ]
