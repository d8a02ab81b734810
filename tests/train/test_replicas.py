"""Which ranks must agree to the bit, and who is odd where they do not?"""

from itertools import product
from typing import Any

import pytest
import torch

from tests.harness.experts import DEEPSEEK, MIXTRAL, with_experts
from tests.harness.faults import flip
from tests.harness.ranks import run_ranks
from tests.harness.toy import ODD, lay, toy_run
from tests.harness.training import Engine
from triax.spec.layout import HELD, Layout
from triax.spec.run import Run
from triax.train.replicas import Digests, Odd, Replicas, has_replicas, odd_ones

FP32 = {"compute": "fp32", "master": "fp32", "reduce": "fp32"}


def digests(layout: Layout, **changed: dict[int, int]) -> Digests:
    """What healthy ranks say, but for ``changed``."""
    said = [[0] * len(HELD) for _ in range(layout.world_size)]
    for index, held in enumerate(HELD):
        for number, family in enumerate(layout.families(held)):
            for rank in family:
                said[rank][index] = changed.get(held, {}).get(rank, 100 + number)
    return said


def test_healthy_ranks_agree() -> None:
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    assert odd_ones(layout, digests(layout)) == []


def test_of_three_the_odd_one_is_named_and_of_two_none() -> None:
    three = Layout(dp_replicate=3, zero=0)
    assert odd_ones(three, digests(three, cut={1: 7})) == [Odd("cut", (0, 1, 2), (1,))]
    assert odd_ones(three, digests(three, cut={0: 7, 1: 8})) == [Odd("cut", (0, 1, 2), ())]
    two = Layout(dp_replicate=2, dp_shard=2)
    assert odd_ones(two, digests(two, cut={1: 7})) == [Odd("cut", (1, 3), ())]


def test_tensor_ranks_agree_on_norms_alone() -> None:
    layout = Layout(tp=3)
    assert layout.families("cut") == ((0,), (1,), (2,))
    assert odd_ones(layout, digests(layout, whole={2: 7})) == [Odd("whole", (0, 1, 2), (2,))]


@pytest.mark.parametrize(
    ("layout", "experts", "expected"),
    [
        (Layout(), None, False),
        (Layout(dp_shard=8, zero=3), None, False),
        (Layout(pp=4, dp_shard=2), None, False),
        (Layout(dp_replicate=2, zero=0), None, True),
        (Layout(tp=2), None, True),
        (Layout(dp_shard=4, ep=2), MIXTRAL, False),
        (Layout(dp_shard=4, ep=2), DEEPSEEK, True),
    ],
)
def test_a_layout_knows_whether_it_has_replicas(layout: Layout, experts: dict[str, object], expected: bool) -> None:
    model = ODD if experts is None else with_experts(ODD, **experts)
    assert has_replicas(layout, model) == expected


@pytest.mark.parametrize(
    ("layout", "has_experts", "said"),
    [
        (Layout(dp_shard=8), False, "no two ranks hold the same weights"),
        (Layout(dp_replicate=2, dp_shard=2), False, "every weight is held alike by 2 ranks"),
        (Layout(tp=4), False, "compared: norms by 4; the others have no replica"),
        (Layout(dp_replicate=2, tp=2), False, "compared: matrices by 2, norms by 4; the others"),
        (Layout(dp_replicate=2), True, "every weight is held alike by 2 ranks"),
    ],
)
def test_the_plan_says_it_in_a_sentence(layout: Layout, has_experts: bool, said: str) -> None:
    assert said in layout.describe_replicas(has_experts=has_experts)


LAYOUTS = {
    "hybrid": {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
    "pipeline and tensor": {"pp": 2, "tp": 2},
    "experts": {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 1},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_after_steps_ranks_agree_and_a_flipped_bit_shows_in_the_family_that_holds_it(name: str) -> None:
    """Down to the lowest bit; where no other rank holds the weight, nothing can be seen."""
    run = toy_run(with_experts(ODD, **DEEPSEEK) if name == "experts" else ODD, precision=FP32)
    layout = lay(run, 1, **LAYOUTS[name])
    ranks = run_ranks(flip_each, layout.world_size, run, layout)
    for trial, (sick, place) in enumerate(product(range(layout.world_size), PLACES)):
        held = ranks[sick][trial][0]
        expected = [f for f in layout.families(held) if sick in f and len(f) > 1] if held else []
        for rank, found in enumerate(ranks):
            assert found[trial][1] == expected, f"rank {rank}, flip on {sick} in {place}"


PLACES = ("first", "norm", "middle", "last")


def flip_each(rank: int, world: int, run: Run, layout: Layout) -> list[tuple[Any, list[tuple[int, ...]]]]:
    """Flip a bit on one rank after the other; return for each how this rank held what it flipped (None where it is
    another's turn, or it holds no part of it), and which families were then seen to disagree."""
    engine = Engine(run, layout, rank)
    for step in range(2):
        engine.step(step)
    replicas = Replicas(engine.stages, engine.optimizer, layout)
    weights = dict(engine.optimizer._all)
    names = list(weights)
    norm = next(name for name in names if "norm" in name)
    chosen = dict(zip(PLACES, (names[0], norm, names[len(names) // 2], names[-1]), strict=True))
    found = []
    for sick, place in product(range(world), PLACES):
        assert odd_ones(layout, replicas.digests()) == []
        name = chosen[place]
        is_mine = sick == rank and weights[name].detach()._local_tensor.numel() > 0
        if is_mine:
            flip(engine.optimizer, name, PLACES.index(place), 0)
        held = next(way for way in HELD if name in replicas._tensors[way]) if is_mine else None
        found.append((held, [one.family for one in odd_ones(layout, replicas.digests())]))
        if is_mine:
            flip(engine.optimizer, name, PLACES.index(place), 0)
    return found


def test_a_sum_of_bits_sees_every_single_flip() -> None:
    from triax.train.replicas import _mixed

    torch.manual_seed(0)
    tensors = [torch.randn(5, 3), torch.randn(7).to(torch.bfloat16), torch.tensor(3.0, dtype=torch.float64)]
    healthy = int(_mixed(tensors))
    for tensor in tensors:
        width = tensor.element_size() * 8
        bits = tensor.view(-1).view({16: torch.int16, 32: torch.int32, 64: torch.int64}[width])
        for bit in range(width):
            mask = (1 << bit) - (1 << width if bit == width - 1 else 0)
            bits[-1] ^= mask
            assert int(_mixed(tensors)) != healthy
            bits[-1] ^= mask
    assert int(_mixed(tensors)) == healthy
