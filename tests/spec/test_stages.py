"""Is every layer in exactly one stage, and the dearest stage as cheap as any cut could make it?"""

from itertools import chain, combinations, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from triax.spec.model import ModelSpec
from triax.spec.stages import head_cost_in_layers, stage_layers


def model_of(layers: int, vocab_size: int = 64, *, is_tied: bool = False) -> ModelSpec:
    """A model whose head costs ``vocab_size`` / 640 layers."""
    return ModelSpec(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, vocab_size=vocab_size,
        tie_word_embeddings=is_tied,
    )  # fmt: skip


def counts(model: ModelSpec, num_stages: int) -> list[int]:
    return [len(layers) for layers in stage_layers(model, num_stages, None)]


def test_16_equal_layers_over_two_cards_are_the_first_8_and_the_last_8() -> None:
    assert stage_layers(model_of(16), 2, None) == (range(8), range(8, 16))


@given(st.integers(1, 40), st.integers(1, 8), st.integers(2, 20_000))
def test_every_layer_is_in_one_stage_and_every_stage_has_one(layers: int, stages: int, vocab_size: int) -> None:
    assume(stages <= layers)
    cut = stage_layers(model_of(layers, vocab_size), stages, None)
    assert len(cut) == stages
    assert all(cut)
    assert list(chain(*cut)) == list(range(layers))


def dearest(of_stages: list[int], head_cost: float) -> float:
    *others, last = of_stages
    return max([*others, last + head_cost])


@given(st.integers(1, 11), st.integers(1, 5), st.integers(2, 6000))
def test_no_other_cut_has_a_cheaper_dearest_stage(layers: int, stages: int, vocab_size: int) -> None:
    assume(stages <= layers)
    model = model_of(layers, vocab_size)
    bounds = (combination for combination in combinations(range(1, layers), stages - 1))
    all_cuts = [[stop - start for start, stop in pairwise((0, *bound, layers))] for bound in bounds]
    costs = [dearest(cut, head_cost_in_layers(model)) for cut in all_cuts]
    assert dearest(counts(model, stages), head_cost_in_layers(model)) == min(costs)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_counts_as_the_layers_it_costs(is_tied: bool) -> None:
    """Tied or not: the matmul is the same. The embedding is a lookup and costs none."""
    assert head_cost_in_layers(model_of(9, 640, is_tied=is_tied)) == 1
    assert counts(model_of(9, 640, is_tied=is_tied), 2) == [5, 4]
    assert counts(model_of(9, 3 * 640, is_tied=is_tied), 2) == [6, 3]
    assert counts(model_of(9, 100 * 640, is_tied=is_tied), 2) == [8, 1]


def test_layers_that_are_left_over_go_to_later_stages() -> None:
    """The first stages hold the most microbatches at once."""
    assert counts(model_of(10, 2), 4) == [2, 3, 3, 2]
    assert counts(model_of(11, 640), 4) == [3, 3, 3, 2]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_cuts_that_are_given_are_kept(cuts: list[int]) -> None:
    given_cuts = stage_layers(model_of(sum(cuts)), len(cuts), tuple(cuts))
    assert [len(layers) for layers in given_cuts] == cuts
    assert list(chain(*given_cuts)) == list(range(sum(cuts)))


@pytest.mark.parametrize("cuts", [(3, 3), (0, 7), (7,), (2, 2, 3), ()])
def test_cuts_that_do_not_make_up_the_layers_are_an_error(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are not 2 counts of at least 1 that sum to 7"):
        stage_layers(model_of(7), 2, cuts)


def test_more_stages_than_layers_are_an_error() -> None:
    with pytest.raises(ValueError, match="8 stages need a layer each, and the model has 7"):
        stage_layers(model_of(7), 8, None)
