"""Are the values we say strict, frozen, and named by what they mean?"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from triax.spec.value import (
    LARGEST_SMALL_COUNT,
    ByteCount,
    Count,
    Counts,
    SmallCount,
    Text,
    Texts,
    Value,
    canonical_json,
    fingerprint,
)


class Thing(Value):
    count: Count = 1
    small: SmallCount = 1
    size: ByteCount = 1
    rate: float = 1.0
    text: Text = "x"
    texts: Texts = ()
    counts: Counts = ()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("said", "count"), [(64, 64), ("64", 64), ("64k", 64_000), (1e6, 1_000_000), (-0.0, 0), (2**63 - 1, 2**63 - 1)]
)
def test_counts_are_numbers_or_text_with_a_unit(said: Any, count: int) -> None:
    thing = Thing(count=said)
    assert thing.count == count
    assert type(thing.count) is int


@pytest.mark.parametrize("said", [True, 0.5, float("inf"), float("nan"), 2**63, 1e19, "1.5", "many", None, [1], {}])
def test_what_is_no_whole_number_is_no_count(said: Any) -> None:
    with pytest.raises(ValidationError):
        Thing(count=said)


def test_sizes_in_bytes_take_units_of_bytes() -> None:
    assert Thing(size="80 GiB").size == 80 * 2**30
    with pytest.raises(ValidationError, match="number of bytes"):
        Thing(size="80k")


def test_small_counts_end_within_reason() -> None:
    assert Thing(small=LARGEST_SMALL_COUNT).small == LARGEST_SMALL_COUNT
    for said in (0, LARGEST_SMALL_COUNT + 1):
        with pytest.raises(ValidationError):
            Thing(small=said)


def test_lists_become_tuples() -> None:
    thing = Thing(texts=["a", "b"], counts=[1, 0])  # type: ignore[arg-type]
    assert (thing.texts, thing.counts) == (("a", "b"), (1, 0))
    for wrong in ({"texts": "ab"}, {"texts": ["a", ""]}, {"counts": [-1]}, {"counts": [True]}, {"counts": {1: 2}}):
        with pytest.raises(ValidationError):
            Thing.model_validate(wrong)


@pytest.mark.parametrize("text", ["", "a\0b", "\udcff", "a\ud800"])
def test_text_can_be_written_to_a_file(text: str) -> None:
    with pytest.raises(ValidationError):
        Thing(text=text)


@given(st.text(min_size=1))
def test_other_text_is_kept_as_it_is(text: str) -> None:
    if "\0" not in text:
        assert Thing(text=text).text == text


def test_values_are_frozen_and_know_their_keys() -> None:
    thing = Thing()
    with pytest.raises(ValidationError, match="frozen"):
        thing.count = 2
    with pytest.raises(ValidationError, match="Extra inputs"):
        Thing.model_validate({"cuont": 2})
    for number in (float("inf"), float("nan"), True, "1"):
        with pytest.raises(ValidationError):
            Thing.model_validate({"rate": number})


@given(PLAIN)
def test_canonical_json_says_the_same_value(value: Any) -> None:
    assert json.loads(canonical_json(value)) == value


@given(st.dictionaries(st.text(), PLAIN, min_size=2))
def test_the_order_of_keys_names_nothing(value: dict[str, Any]) -> None:
    assert fingerprint(dict(reversed(value.items()))) == fingerprint(value)


@given(PLAIN, PLAIN)
def test_equal_fingerprints_are_equal_values(one: Any, other: Any) -> None:
    assert (fingerprint(one) == fingerprint(other)) == (canonical_json(one) == canonical_json(other))


def test_a_fingerprint_stays_what_it_was() -> None:
    # SHA-256 of {"a":[1,2.5],"b":"x"}; checkpoints on disk carry such names.
    assert fingerprint({"b": "x", "a": [1, 2.5]}) == "5cefae54a95b31dc"


def test_what_is_not_a_number_has_no_canonical_form() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_types_serve_outside_a_value_too() -> None:
    assert TypeAdapter(Count).validate_python("2k", strict=True) == 2000
