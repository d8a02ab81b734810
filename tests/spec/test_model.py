"""Which dimensions are a network, and what is said of those that are not?"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from triax.spec.model import ModelSpec


def make(**changes: Any) -> ModelSpec:
    said = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 257,
    }
    return ModelSpec.model_validate(said | changes)


def fault(**changes: Any) -> str:
    with pytest.raises(ValidationError) as refusal:
        make(**changes)
    return str(refusal.value.errors()[0]["msg"])


def test_absent_sizes_follow_from_others() -> None:
    model = make()
    assert (model.kv_heads, model.head_width) == (4, 16)
    model = make(num_key_value_heads=2, head_dim=10)
    assert (model.kv_heads, model.head_width) == (2, 10)


def test_a_width_of_its_own_needs_no_division() -> None:
    assert make(num_attention_heads=5, head_dim=10).head_width == 10


def test_faults_name_the_legal_values() -> None:
    assert fault(num_attention_heads=5) == (
        "Value error, num_attention_heads=5 does not divide hidden_size=64: use 2, 4 or 8 heads, or give head_dim."
    )
    assert fault(hidden_size=7, num_attention_heads=2).endswith("does not divide hidden_size=7: give head_dim.")
    assert fault(num_attention_heads=12, head_dim=8, num_key_value_heads=5) == (
        "Value error, num_key_value_heads=5 does not divide num_attention_heads=12: use 3, 4 or 6."
    )
    assert fault(num_key_value_heads=8).endswith("does not divide num_attention_heads=4: use 2 or 4.")
    assert fault(head_dim=7).endswith(
        "head_dim=7 is odd, and rotary embedding turns pairs of numbers: use head_dim=6 or 8."
    )
    assert fault(hidden_size=4).endswith(
        "hidden_size=4 / num_attention_heads=4 = 1 is odd, and rotary embedding turns pairs of numbers: use head_dim=2."
    )


def test_both_faults_are_told() -> None:
    assert len(fault(num_attention_heads=5, num_key_value_heads=3).split("\n")) == 2


DIMS = st.integers(1, 64)


@given(hidden=DIMS, heads=DIMS, kv_heads=st.none() | DIMS, head_dim=st.none() | st.integers(2, 64))
def test_dims_that_are_taken_make_whole_heads(
    hidden: int, heads: int, kv_heads: int | None, head_dim: int | None
) -> None:
    try:
        model = make(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    except ValidationError:
        width = head_dim if head_dim is not None else hidden / heads
        assert width % 2 or heads % (kv_heads or heads)
        return
    assert model.head_width % 2 == 0
    assert model.num_attention_heads % model.kv_heads == 0
    assert head_dim is not None or model.head_width * heads == hidden


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**12},
        {"vocab_size": 1},
        {"rope_theta": 1.0},
        {"rms_norm_eps": 0},
    ],
)
def test_a_slip_of_the_pen_is_refused(changes: dict[str, Any]) -> None:
    assert fault(**changes).startswith("Input should be")
