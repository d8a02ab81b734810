"""Is the planner's goodput what a run with failures reaches, simulated event by event, and its interval the best?"""

import json
from pathlib import Path

import pytest

from benchmarks.goodput import (
    ALLOWED,
    LOST_SERVER_S,
    Costs,
    assumed_costs,
    main,
    row,
    simulate,
    state_bytes_per_card,
    with_measured,
)
from triax.spec.checkpoint_interval import best_interval_s, useful_fraction

LLAMA_3_S = 54 * 86_400 / 419
"""Between two unexpected interruptions of 16,384 cards (arXiv:2407.21783, table 5)."""


@pytest.mark.parametrize("failure_s", [1_800.0, LLAMA_3_S, 100_000.0])
@pytest.mark.parametrize("restart_s", [10.0, 465.0, 1_800.0])
@pytest.mark.parametrize("stall_s", [0.2, 5.0, 60.0])
def test_the_formula_is_what_a_simulation_reaches(stall_s: float, restart_s: float, failure_s: float) -> None:
    costs = Costs(step_s=2.0, stall_s=stall_s, write_s=0.005 * failure_s, restart_s=restart_s)
    interval_s = best_interval_s(stall_s, failure_s)
    # A state that is still being written when the next one is due holds up the run, and no formula prices that.
    costs = Costs(costs.step_s, stall_s, min(costs.write_s, 0.8 * interval_s), restart_s)
    predicted = useful_fraction(interval_s, stall_s, restart_s, failure_s)
    reached = simulate(costs, interval_s, failure_s, failures=3000, seed=1)
    assert predicted == pytest.approx(reached.goodput, rel=ALLOWED)
    assert reached.failures >= 3000
    assert reached.days * 86_400 / reached.failures == pytest.approx(failure_s, rel=0.1)


@pytest.mark.parametrize("failure_s", [3_600.0, LLAMA_3_S])
@pytest.mark.parametrize("stall_s", [1.0, 20.0])
def test_no_other_interval_reaches_noticeably_more(stall_s: float, failure_s: float) -> None:
    found = row(Costs(2.0, stall_s, 10.0, 300.0), failure_s, failures=1500, seeds=(1, 2))
    assert found["regret"] < 0.005
    assert found["simulated_at_factors"]["4.0"] < found["simulated"]
    assert found["simulated_at_factors"]["0.25"] < found["simulated"]


def test_a_seed_is_a_run_and_another_seed_another_one() -> None:
    costs = Costs(2.0, 1.0, 10.0, 300.0)
    first, again, other = (simulate(costs, 150.0, LLAMA_3_S, failures=100, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_what_a_failure_costs_is_half_an_interval_and_the_state_that_was_not_written() -> None:
    costs = Costs(step_s=1.0, stall_s=0.001, write_s=100.0, restart_s=0.001)
    reached = simulate(costs, 400.0, 50_000.0, failures=5000, seed=1)
    assert reached.lost_s == pytest.approx(400 / 2 + 100, rel=0.05)
    assert reached.goodput == pytest.approx(1 - 300 / 50_000, rel=1e-3)


def test_a_run_that_is_never_up_for_long_makes_no_progress() -> None:
    reached = simulate(Costs(10.0, 1.0, 1.0, 100.0), 1_000.0, 10.0, failures=2000, seed=1)
    assert (reached.goodput, reached.lost_s < 100) == (0.0, True)
    assert reached.cut_restarts > 1500


def test_llama_3_reaches_what_its_authors_report(capsys: pytest.CaptureFixture[str]) -> None:
    """More than 90 % effective training time (section 3.3.4)."""
    assert main(["--failures", "1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cards"], found["agrees"]) == (16_384, True)
    assert found["failure_s"] == pytest.approx(LLAMA_3_S)
    assert abs(found["error"]) < ALLOWED
    assert 0.9 < found["simulated"] < 0.97


def test_measured_costs_take_the_place_of_assumed_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"rows": [], "costs": {"stall_s": 0.5, "restart_s": 40, "note": "of a benchmark"}}))
    assert main(["--failures", "300", "--costs", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["stall_s"], found["restart_s"], found["step_s"]) == (0.5, 40, 6.2)
    assert found["simulated"] > 0.98


@pytest.mark.parametrize("said", [{}, {"stall_s": -1}, {"stall_s": "1"}, {"write_s": 1e12}, {"costs": {"other": 1}}])
def test_costs_that_are_none_are_refused(said: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="seconds above 0 for any of load_s, restart_s, stall_s, step_s, write_s"):
        with_measured(assumed_costs(16), [said], 16)


def test_seconds_of_a_small_machine_are_those_of_as_many_bytes_and_ranks() -> None:
    assumed = assumed_costs(2048)
    size = state_bytes_per_card(2048)
    assert size == pytest.approx(405.85e9 * 12 / 16_384, rel=0.01)
    saves = {"costs": {"stall_s": 0.1, "write_s": 2.0, "load_s": 3.0, "bytes_per_rank": size / 10}}
    restarts = {"costs": {"restart_s": 0.9, "restart_ranks": 2}}
    costs = with_measured(assumed, [saves, restarts], 2048)
    assert (costs.step_s, costs.stall_s, costs.write_s) == (assumed.step_s, pytest.approx(1.0), pytest.approx(20.0))
    assert costs.restart_s == pytest.approx(0.9 + 30.0 + LOST_SERVER_S + 16_382 * 0.01)
    assert with_measured(assumed, [saves], 2048).restart_s == assumed.restart_s
