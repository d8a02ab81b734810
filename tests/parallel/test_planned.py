"""Does every layout that the planner may propose train, and train like one device?"""

from functools import cache

import numpy as np
import pytest

from tests.harness.tolerances import GRADIENT, assert_losses_equal, assert_tensors_equal
from tests.harness.toy import toy_run
from tests.harness.training import Trained, train_on_all_ranks, train_on_one_device
from triax.plan.ask import question_of
from triax.plan.candidates import Candidates
from triax.plan.enumerate import all_layouts
from triax.spec.check import check
from triax.spec.cluster import Cluster
from triax.spec.layout import Layout

RUN = toy_run(train={"sequences_per_step": 8})
ALWAYS, SLOW = 6, 24
RANKS = 4


@cache
def candidates() -> Candidates:
    """All layouts of the toy on four local ranks."""
    return all_layouts(question_of(RUN, Cluster(cards_per_server=RANKS)).case)


@cache
def one_device() -> Trained:
    return train_on_one_device(RUN, 1)


def sample() -> list[object]:
    """The same layouts each time, spread over all of them; the first few always run."""
    found = candidates()
    chosen = np.random.default_rng(5).choice(len(found), ALWAYS + SLOW, replace=False)
    layouts = [found.layout(int(index)) for index in chosen]
    return [
        pytest.param(layout, id=layout.describe(), marks=() if number < ALWAYS else pytest.mark.slow)
        for number, layout in enumerate(layouts)
    ]


def test_there_is_a_choice() -> None:
    found = candidates()
    assert len(found) > 150
    for column in (found.pp, found.tp, found.dp_shard, found.dp_replicate, found.zero, found.recompute):
        assert len(set(column.tolist())) > 1


@pytest.mark.parametrize("layout", sample())
def test_it_trains_like_one_device(layout: Layout) -> None:
    assert check(layout, RUN, Cluster(cards_per_server=RANKS)) == []
    trained, expected = train_on_all_ranks(RUN, layout, 1), one_device()
    assert_losses_equal(trained.losses, expected.losses, "fp64")
    assert_tensors_equal(trained.first_gradients, expected.first_gradients, GRADIENT["fp64"])
