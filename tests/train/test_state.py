"""Does the state of a run come back from a manifest as it was, and is nonsense refused?"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.checkpoint.format import Checkpoint, Manifest
from triax.errors import BadInput
from triax.train.guard import Case, GuardState
from triax.train.state import TrainState, _state_from

NUMBERS = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5).map(tuple)
COUNTS = st.integers(0, 1 << 60)
CASES = st.builds(Case, COUNTS, COUNTS, st.sampled_from(["repeat", "skip", "replay"]), COUNTS)
GUARDS = st.builds(GuardState, NUMBERS, NUMBERS, COUNTS, COUNTS, COUNTS, st.none() | CASES)
STATES = st.builds(
    TrainState, COUNTS, COUNTS, COUNTS, st.lists(st.tuples(COUNTS, COUNTS), max_size=3).map(tuple),
    st.floats(1e-6, 1.0), GUARDS,
)  # fmt: skip


def saved(state: Any) -> Checkpoint:
    manifest = Manifest(step=1, run="r", extra={"state": state}, versions={}, files=(), tensors={})
    return Checkpoint(Path("step-00000001"), manifest, "")


@given(STATES)
def test_a_state_comes_back_to_the_bit(state: TrainState) -> None:
    assert _state_from(saved(json.loads(json.dumps(asdict(state))))) == state


def test_checkpoints_from_before_the_guard_go_on() -> None:
    assert _state_from(saved({"step": 3, "tokens": 9, "next_sample": 6})) == TrainState(3, 9, 6)


@pytest.mark.parametrize(
    "said",
    [
        None, [], "state", {}, {"step": 3}, {"step": 3, "tokens": 9}, {"step": 3, "tokens": 9, "next_sample": 6.5},
        {"step": True, "tokens": 9, "next_sample": 6}, {"step": "3", "tokens": 9, "next_sample": 6},
        {"step": 3, "tokens": 9, "next_sample": 6, "more": 1},
        {"step": 3, "tokens": 9, "next_sample": 6, "skipped": [[1]]},
        {"step": 3, "tokens": 9, "next_sample": 6, "guard": {"losses": ["a"]}},
        {"step": 3, "tokens": 9, "next_sample": 6, "guard": {"case": {"step": 1, "first_sample": 1, "trial": "no"}}},
    ],
)  # fmt: skip
def test_nonsense_is_refused(said: Any) -> None:
    with pytest.raises(BadInput, match="does not say where the run stood"):
        _state_from(saved(said))


def test_a_fresh_run_has_seen_nothing() -> None:
    assert TrainState().guard == GuardState()
    assert not math.isinf(TrainState().rate_factor)
