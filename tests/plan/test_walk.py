"""Is a walk in part as long as the whole walk, and near the closed form where stages are alike?"""

import numpy as np
import pytest

from tests.plan.cases import case_of
from triax.plan.candidates import SCHEDULE_NAMES, Candidates
from triax.plan.walk import _makespan_s, walked
from triax.spec.schedule import build, price

SCHEDULES = [("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("ZBVZeroBubble", 2),
             ("InterleavedZeroBubble", 1), ("DualPipeV", 2)]  # fmt: skip


@pytest.mark.parametrize(("name", "per_rank"), SCHEDULES)
@pytest.mark.parametrize("microbatches", [3, 16, 23, 40])
def test_a_walk_in_part_is_the_whole(name: str, per_rank: int, microbatches: int) -> None:
    pp = 4
    random = np.random.default_rng(microbatches)
    stage_f = (1 + 0.3 * random.random(pp * per_rank)).tolist()
    stage_b = (2 + 0.3 * random.random(pp * per_rank)).tolist()
    c = Candidates.of(pp=pp, schedule=SCHEDULE_NAMES.index(name), stages_per_rank=per_rank, microbatches=microbatches)

    def cost(slot: object) -> float:
        part = {"F": 0.0, "B": 1.0, "I": 0.5, "W": 0.5}
        return sum(
            stage_f[action.stage] if action.kind == "F" else part[action.kind] * stage_b[action.stage]
            for action in slot.parts  # type: ignore[attr-defined]
        )

    whole = price(build(name, pp, per_rank, microbatches), cost).makespan_s
    assert _makespan_s(c, 0, stage_f, stage_b) == pytest.approx(whole, rel=0.012)


@pytest.mark.parametrize(("name", "per_rank"), SCHEDULES[:3])
def test_the_closed_form_is_near(name: str, per_rank: int) -> None:
    case = case_of("llama-3.1-70b", "8x8xh100", 128)
    c = Candidates.of(
        pp=8, tp=8, schedule=SCHEDULE_NAMES.index(name), stages_per_rank=per_rank, microbatches=[8, 32, 128]
    )
    assert np.allclose(walked(case, c, 10**6).step_s, case.time(c).step_s, rtol=0.06)


def test_the_terms_still_add_up_and_no_pipeline_is_no_walk() -> None:
    case = case_of("llama-3.1-70b", "8x8xh100", 128)
    c = Candidates.of(pp=[1, 8], dp_shard=[8, 1], tp=8, microbatches=[16, 128])
    closed, exact = case.time(c), walked(case, c)
    assert exact.step_s[0] == closed.step_s[0]
    assert exact.bubble[1] > 0
    assert exact.step_s[1] != closed.step_s[1]
    assert walked(case, c, 10).step_s[1] == closed.step_s[1]
