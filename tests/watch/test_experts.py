"""Do the metrics of experts say who had work, and is a heavy load said aloud, once?"""

import dataclasses

import pytest

from tests.watch.test_metrics import RECORD
from triax.watch.experts import LayerLoad, LoadCheck, expert_metrics
from triax.watch.metrics import KEYS, to_metrics

LOADS = (LayerLoad(1, (4.0, 0.0, 2.0, 2.0), 1.5, 3.0), LayerLoad(3, (6.0, 1.0, 1.0, 0.0), 2.5, 5.0))


def test_every_number_under_its_key() -> None:
    assert expert_metrics(LOADS) == {
        "experts/max_load": 3.0,
        "experts/idle": 2,
        "experts/balance_loss": 2.0,
        "experts/z_loss": 4.0,
        "experts/max_load/layer_1": 2.0,
        "experts/max_load/layer_3": 3.0,
    }
    made = to_metrics(dataclasses.replace(RECORD, experts=LOADS), flops_per_token=1e9, num_devices=4, peak=None)
    assert set(made) - set(KEYS) == set(expert_metrics(LOADS))


def test_a_dense_model_has_none_and_sigmoids_have_no_z() -> None:
    assert expert_metrics(()) == {}
    without = [dataclasses.replace(load, z_loss=None) for load in LOADS]
    assert "experts/z_loss" not in expert_metrics(without)


def test_a_step_without_tokens_is_no_division_by_zero() -> None:
    assert expert_metrics([LayerLoad(0, (0.0, 0.0), 0.0, 0.0)])["experts/max_load"] == 0.0


def said(check: LoadCheck, tokens: list[tuple[float, ...]], first: int = 101) -> list[str | None]:
    return [check.warning(step, [LayerLoad(2, counts, 1.0, None)]) for step, counts in enumerate(tokens, first)]


def test_a_heavy_load_is_said_once_and_with_what_to_do() -> None:
    heavy: tuple[float, ...] = (1, 20, 1, 2)
    sentences = said(LoadCheck(4, 1), [heavy] * 50)
    (sentence,) = filter(None, sentences)
    assert sentences.index(sentence) == 19
    for part in ("expert 1 of layer 2 had 3.3 times", "steps 101 to 120", "router_aux_loss_coef", "selection_bias"):
        assert part in sentence


@pytest.mark.parametrize(
    "tokens",
    [
        [(7.0, 6.0, 5.0, 6.0)] * 50,
        [(20.0, 1.0, 1.0, 2.0), (1.0, 20.0, 2.0, 1.0), (1.0, 2.0, 20.0, 1.0), (2.0, 1.0, 1.0, 20.0)] * 10,
    ],
    ids=["even", "another one in every step"],
)
def test_an_even_load_is_no_warning(tokens: list[tuple[float, ...]]) -> None:
    assert not any(said(LoadCheck(4, 1), tokens))


def test_routers_may_settle_first() -> None:
    heavy: tuple[float, ...] = (1, 20, 1, 2)
    sentences = said(LoadCheck(4, 1), [heavy] * 130, first=1)
    assert [step for step, sentence in enumerate(sentences, 1) if sentence] == [120]


def test_where_all_experts_take_part_nothing_is_heavy() -> None:
    assert not any(said(LoadCheck(2, 2), [(9.0, 9.0)] * 30))
