"""Are calibrations looked up as they were fitted, and honest about what was never measured?"""

from dataclasses import replace

import numpy as np
import pytest

from triax.plan.calibration import Calibration, Stack, from_value, shipped
from triax.plan.step import FACTOR_NAMES

NEMO = Stack("h100", "megatron", "megatron", "16", framework="nemo megatron core", release="2025-03")


def test_nothing_measured_changes_nothing() -> None:
    factors = Calibration().factors([NEMO])
    assert all(getattr(factors, name) == pytest.approx(1.0) for name in FACTOR_NAMES)
    assert Calibration().describe(NEMO) == "nothing measured"


def test_levels_add_up() -> None:
    levels = {"all": {"compute": 0.1}, "card h100": {"compute": 0.2}, "card a100-80": {"compute": 5.0}}
    assert Calibration(levels).factors([NEMO]).compute == pytest.approx(np.exp(0.3))


def test_a_release_rests_on_its_framework_and_that_on_its_engine() -> None:
    levels = NEMO.levels()
    assert levels[0] == "all"
    assert replace(NEMO, release="").levels() == levels[:-1]
    assert set(replace(NEMO, framework="", release="").levels()) < set(levels)


def test_what_was_never_measured_has_the_widest_interval() -> None:
    calibration = shipped()
    known, unknown = calibration.interval([NEMO, Stack("h100", "nobody", "nobody", "16")])
    assert 1 < known < unknown < 2


def test_shipped_factors_stay_within_reason() -> None:
    stacks = [NEMO, replace(NEMO, card="b200"), Stack("h100", "triax", "triax", "16"), replace(NEMO, kind="moe")]
    factors = shipped().factors(stacks)
    for name in FACTOR_NAMES:
        assert (getattr(factors, name) > 0.2).all()
        assert (getattr(factors, name) < 8).all()


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format 99"):
        from_value({"format_version": 99})
