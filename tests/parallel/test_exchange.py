"""Do tokens reach their experts and come back whatever the routing, with the same collectives on every rank?

Each of the ranks has other tokens, and other numbers of them. What comes out, and every gradient, must be what one
device makes of all tokens: a rank that waited for another would not come to an end.
"""

import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.collectives import Collectives
from tests.harness.experts import with_experts
from tests.harness.ranks import run_ranks
from tests.harness.toy import ODD
from triax.nn.moe import MixtureOfExperts
from triax.parallel.expert import ExpertExchange

RANKS, EXPERTS, PER_TOKEN, WIDTH = 4, 8, 2, 24
MODEL = with_experts(ODD, num_experts=EXPERTS, num_experts_per_tok=PER_TOKEN, moe_intermediate_size=6)


class Given(nn.Module):
    """A router that chooses as it is told."""

    num_experts = EXPERTS

    def __init__(self, weights_TK: Tensor, chosen_TK: Tensor) -> None:
        super().__init__()
        self.weights_TK, self.chosen_TK = weights_TK, chosen_TK

    def forward(self, _x: Tensor) -> tuple[Tensor, Tensor]:
        return self.weights_TK, self.chosen_TK


@dataclass(frozen=True)
class Tokens:
    """What one rank has."""

    x_TD: Tensor
    weights_TK: Tensor
    chosen_TK: Tensor
    rate_TD: Tensor
    """How much the loss grows with each number that comes out."""


def draw(seed: int) -> list[Tokens]:
    """Tokens of each rank, routed in one of several ways, the extremes among them."""
    chance, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    kind = ["any", "one expert", "experts of one rank", "few", "no token on some ranks"][seed % 5]
    few = chance.sample(range(EXPERTS), PER_TOKEN + 1)
    one = chance.randrange(EXPERTS)
    rank = chance.randrange(RANKS)
    mine = list(range(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS))

    def choice() -> list[int]:
        match kind:
            case "one expert":
                return [one, one]
            case "experts of one rank":
                return chance.sample(mine, PER_TOKEN)
            case "few":
                return chance.sample(few, PER_TOKEN)
        return chance.sample(range(EXPERTS), PER_TOKEN)

    found = []
    for _ in range(RANKS):
        count = chance.choice([0, 0, 5]) if kind == "no token on some ranks" else chance.randint(1, 12)
        chosen = torch.tensor([choice() for _ in range(count)], dtype=torch.int64).reshape(count, PER_TOKEN)
        x, weights, rate = (
            torch.randn(count, size, generator=numbers, dtype=torch.float64) for size in (WIDTH, PER_TOKEN, WIDTH)
        )
        found.append(Tokens(x, weights, chosen, rate))
    return found


def mixture(*, part: int | None) -> MixtureOfExperts:
    """All experts, or those of rank ``part``."""
    made = MixtureOfExperts(MODEL).double()
    numbers = torch.Generator().manual_seed(1)
    for name, weight in list(made.experts.named_parameters()):
        whole = torch.randn(weight.shape, generator=numbers, dtype=torch.float64) * 0.3
        mine = whole if part is None else whole.chunk(RANKS)[part]
        made.experts.register_parameter(name, nn.Parameter(mine.clone()))
    return made


def run_once(made: MixtureOfExperts, tokens: Tokens) -> list[Tensor]:
    """What comes out, and the gradients of tokens, weights and the three kinds of matrices."""
    x, weights = tokens.x_TD.clone().requires_grad_(), tokens.weights_TK.clone().requires_grad_()
    made.gate = Given(weights, tokens.chosen_TK)  # type: ignore[assignment]
    out = made(x.unsqueeze(0)).squeeze(0)
    gradients = torch.autograd.grad((out * tokens.rate_TD).sum(), (x, weights, *made.experts.parameters()))
    return [out.detach(), *gradients]


def exchanged(rank: int, world: int, seeds: list[int]) -> list[list[Tensor]]:
    made = mixture(part=rank)
    group = dist.group.WORLD
    assert group is not None
    made.exchange = ExpertExchange(group)
    return [run_once(made, draw(seed)[rank]) for seed in seeds]


def assert_equals_one_device(seeds: list[int]) -> None:
    by_rank = run_ranks(exchanged, RANKS, seeds, timeout_s=280.0)
    whole = mixture(part=None)
    for index, seed in enumerate(seeds):
        tokens = draw(seed)
        together = Tokens(*(torch.cat(parts) for parts in zip(*map(_parts, tokens), strict=True)))
        expected = run_once(whole, together)
        for place, values in enumerate(zip(*(results[index] for results in by_rank), strict=True)):
            actual = torch.cat(values)
            torch.testing.assert_close(actual, expected[place], rtol=1e-11, atol=1e-12, msg=f"seed {seed}: {place}")


def _parts(tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tokens.x_TD, tokens.weights_TK, tokens.chosen_TK, tokens.rate_TD


def test_twenty_random_routings_equal_one_device() -> None:
    assert_equals_one_device(list(range(20)))


@pytest.mark.slow
def test_500_random_routings_equal_one_device() -> None:
    assert_equals_one_device(list(range(20, 520)))


def kinds_seen(rank: int, world: int, seeds: list[int]) -> list[list[tuple[str, str]]]:
    made = mixture(part=rank)
    group = dist.group.WORLD
    assert group is not None
    made.exchange = ExpertExchange(group)
    found = []
    for seed in seeds:
        with Collectives() as collectives:
            run_once(made, draw(seed)[rank])
        found.append([(one.kind, one.dtype) for one in collectives.seen])
    return found


def test_every_rank_calls_the_same_collectives_whatever_the_routing() -> None:
    """Counts, rows and the way back; and in the backward both ways again. Also with no token at all."""
    counts, rows = ("all_to_all", "int64"), ("all_to_all", "float64")
    for by_seed in run_ranks(kinds_seen, RANKS, list(range(10))):
        assert by_seed == [[counts, rows, rows, rows, rows]] * 10


def bytes_seen(rank: int, world: int) -> list[int]:
    """Payloads of one forward and backward in which every token of 8 goes to the next rank and the one after it."""
    made = mixture(part=rank)
    group = dist.group.WORLD
    assert group is not None
    made.exchange = ExpertExchange(group)
    per_rank = EXPERTS // RANKS
    chosen = torch.tensor([[(rank + away) % RANKS * per_rank for away in (1, 2)]] * 8)
    numbers = torch.Generator().manual_seed(rank)
    x, weights, rate = (
        torch.randn(8, size, generator=numbers, dtype=torch.float64) for size in (WIDTH, PER_TOKEN, WIDTH)
    )
    with Collectives() as collectives:
        run_once(made, Tokens(x, weights, chosen, rate))
    return [one.payload_bytes for one in collectives.seen]


def test_a_token_travels_once_for_each_of_its_experts() -> None:
    """The bytes of docs/experts.md: eight for the count of each expert, and K rows of D for each token, four times."""
    rows = 8 * PER_TOKEN * WIDTH * 8
    assert run_ranks(bytes_seen, RANKS) == [[8 * EXPERTS, rows, rows, rows, rows]] * RANKS
