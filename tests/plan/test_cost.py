"""Do hours, money and useful time add up?"""

import pytest

from tests.plan.cases import case_of
from triax.plan.cost import cost
from triax.plan.goodput import goodput


def test_a_run_in_numbers() -> None:
    case = case_of("llama-3.1-8b", "2x8xh100", 128)
    whole = cost(case, 2.0, 128 * 4096 * 1800, 3.0)
    assert whole.steps == 1800
    assert whole.hours == pytest.approx(1.0)
    assert whole.card_hours == pytest.approx(16)
    assert whole.usd == pytest.approx(48)
    assert whole.usd_per_million_tokens == pytest.approx(48 / (128 * 4096 * 1800) * 1e6)
    assert whole.kwh == pytest.approx(16 * 0.7 * 0.85 * 1.5)
    assert cost(case, 2.0, whole.tokens, 3.0, useful=0.5).usd == pytest.approx(96)


def test_llama_3_lost_a_tenth_at_most() -> None:
    """arXiv:2407.21783: more than 90 % effective training time on 16,384 cards, a failure every three hours."""
    good = goodput(case_of("llama-3.1-405b", "2048x8xh100", 2048))
    assert good.failure_s / 3600 == pytest.approx(3.1, abs=0.1)
    assert 0.85 < good.fraction < 0.98


def test_more_servers_fail_more_often() -> None:
    parts = [goodput(case_of("llama-3.1-8b", f"{servers}x8xh100", 2048)).fraction for servers in (1, 16, 256)]
    assert parts == sorted(parts, reverse=True)
    assert parts[0] > 0.99
