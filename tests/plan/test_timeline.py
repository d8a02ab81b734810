"""Is the closed form of a pipeline the length of the table that is trained?"""

import numpy as np
import pytest

from triax.plan.candidates import SCHEDULE_NAMES
from triax.plan.timeline import Ranks, closed_form_s, priced_s

PIPELINES = [(2, 4), (2, 9), (4, 4), (4, 8), (4, 17), (8, 8), (8, 16), (8, 40)]
STAGES = {"Interleaved1F1B": 3, "LoopedBFS": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}


def closed(name: str, pp: int, each: int, microbatches: int, forward: float, backward: float, head: float) -> float:
    """Ranks of ``forward`` and ``backward`` seconds, and a head of a third and two thirds on that of the last stage."""

    def one(value: float) -> np.ndarray:
        return np.array([value])

    is_v = name in ("ZBVZeroBubble", "DualPipeV")
    first, last = (head, 0.0) if is_v else (0.0, head)
    ranks = Ranks(
        one(forward + first / 3), one(backward + 2 * first / 3), one(forward), one(backward),
        one(forward + last / 3), one(backward + 2 * last / 3),
    )  # fmt: skip
    busy, idle = closed_form_s(
        ranks, pp=np.array([pp]), stages_per_rank=np.array([each]), microbatches=np.array([microbatches]),
        schedule=np.array([SCHEDULE_NAMES.index(name)]),
    )  # fmt: skip
    return float(busy[0] + idle[0])


def exact(name: str, pp: int, each: int, microbatches: int, forward: float, backward: float, head: float) -> float:
    stages = pp * each
    stage_f, stage_b = [forward / each] * stages, [backward / each] * stages
    stage_f[-1], stage_b[-1] = stage_f[-1] + head / 3, stage_b[-1] + 2 * head / 3
    return priced_s(name, pp, microbatches, stage_f, stage_b)


@pytest.mark.parametrize(("pp", "microbatches"), PIPELINES)
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
def test_equal_and_last_heavy_ranks_are_exact(name: str, pp: int, microbatches: int) -> None:
    for head in (0.0, 1.1):
        case = (name, pp, STAGES.get(name, 1), microbatches, 1.0, 2.0, head)
        assert closed(*case) == pytest.approx(exact(*case), rel=1e-9)


@pytest.mark.parametrize(("pp", "microbatches"), PIPELINES)
@pytest.mark.parametrize("backward", [1.6, 2.0, 3.0])
@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_schedules_in_a_v_are_close(name: str, backward: float, pp: int, microbatches: int) -> None:
    case = (name, pp, 2, microbatches, 1.0, backward, 0.0)
    assert closed(*case) == pytest.approx(exact(*case), rel=0.05)


def test_the_bubble_is_the_textbooks() -> None:
    """(p - 1) / m of the work in 1F1B, a v-th of it interleaved: arXiv:2104.04473, section 2.2."""
    assert closed("1F1B", 8, 1, 32, 1.0, 2.0, 0.0) == pytest.approx(3 * (32 + 7))
    assert closed("Interleaved1F1B", 8, 4, 32, 1.0, 2.0, 0.0) == pytest.approx(3 * (32 + 7 / 4))


def test_no_pipeline_has_no_bubble() -> None:
    assert closed("1F1B", 1, 1, 5, 1.0, 2.0, 0.6) == pytest.approx(5 * 3.6)
