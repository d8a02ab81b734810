"""Is a setting recognised under the name that another tool has for it?"""

from typing import Any, get_args

import pytest
from pydantic import BaseModel

from triax.errors import BadInput
from triax.spec.faults import validated
from triax.spec.foreign_keys import FOREIGN_KEYS
from triax.spec.run import Run


def keys_of_a_run(kind: type[BaseModel] = Run) -> set[str]:
    found = set()
    for name, field in kind.model_fields.items():
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= {f"{name}.{key}" for key in (*part.model_fields, *keys_of_a_run(part))}
    return found


def test_every_name_leads_to_a_key_there_is() -> None:
    assert set(FOREIGN_KEYS.values()) <= keys_of_a_run()


def test_no_name_hides_a_key_there_is() -> None:
    """In the section that it leads to, a foreign name is none of our own: nobody would ever read the hint."""
    assert {f"{target.split('.')[0]}.{name}" for name, target in FOREIGN_KEYS.items()} & keys_of_a_run() == set()


def test_names_are_spelled_as_they_are_looked_up() -> None:
    assert all(name == name.lower().replace("-", "_") for name in FOREIGN_KEYS)


def refusal_of(said: dict[str, Any]) -> list[str]:
    with pytest.raises(BadInput) as refusal:
        validated(Run, said, "run.toml")
    return [line for line in str(refusal.value).split("\n") if not line.endswith(" is missing: it must be given.")]


@pytest.mark.parametrize(("name", "target"), FOREIGN_KEYS.items())
def test_the_error_names_our_key(name: str, target: str) -> None:
    section = target.split(".")[0]
    assert refusal_of({section: {name: 2}}) == [
        f"run.toml: unknown key '{section}.{name}': that setting is called {target} here."
    ]


@pytest.mark.parametrize("name", ["Tensor-Model-Parallel-Size", "--tensor-model-parallel-size", "TP_SIZE"])
def test_as_it_is_typed_on_a_command_line(name: str) -> None:
    assert refusal_of({"layout": {name: 2}}) == [
        f"run.toml: unknown key 'layout.{name}': that setting is called layout.tp here."
    ]


def test_a_section_of_another_tool_is_read_key_by_key() -> None:
    assert refusal_of({"parallelism": {"tensor_parallel_degree": 2, "seq_len": 8, "enable_magic": True}}) == [
        "run.toml: unknown key 'parallelism': the file knows model, data, train, optimizer, learning_rate, precision, "
        "eval, checkpoint, guard, recover, watch, layout, cluster, init.",
        "run.toml: unknown key 'parallelism.tensor_parallel_degree': that setting is called layout.tp here.",
        "run.toml: unknown key 'parallelism.seq_len': did you mean data.seq_len?",
    ]


def test_a_section_said_as_a_setting_names_the_setting() -> None:
    assert (
        "learning_rate = 0.001 cannot be: learning_rate is a section; set learning_rate.peak instead."
        in (refusal_of({"learning_rate": 1e-3})[-1])
    )
