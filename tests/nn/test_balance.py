"""Are the penalties what their formulas say, and does their gradient arrive as that of a loss would?"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.experts import ROUTERS, spec
from triax.nn.balance import Balance, Choice
from triax.nn.moe import Router
from triax.spec.experts import ExpertSpec

WIDTH = 12


def router(**settings: Any) -> Router:
    made = Router(WIDTH, spec(**settings)).double()
    made.weight.data.normal_(generator=torch.Generator().manual_seed(3))
    return made


def states(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def penalties_by_hand(made: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over sequences of balance and z, by the formulas' own words."""
    experts, per_token = made.spec.num_experts, made.spec.num_experts_per_tok
    balance = z = torch.zeros((), dtype=torch.float64)
    for sequence in x:
        _, chosen = made(sequence.unsqueeze(0))
        logits = sequence @ made.weight.T
        if made.spec.scoring_func == "softmax":
            shares = logits.softmax(dim=1)
        else:
            shares = logits.sigmoid() / logits.sigmoid().sum(dim=1, keepdim=True)
        counts = torch.tensor([(chosen == expert).sum() for expert in range(experts)], dtype=torch.float64)
        often = counts / (per_token * len(sequence))
        balance = balance + experts * (often * shares.mean(dim=0)).sum()
        z = z + logits.exp().sum(dim=1).log().square().mean()
    return balance, z


@pytest.mark.parametrize("name", ROUTERS)
def test_the_gradient_of_the_penalties_comes_beside_that_of_the_loss(name: str) -> None:
    settings = ROUTERS[name]
    made, x = router(**settings), states()
    rate = torch.randn(14, made.spec.num_experts_per_tok, dtype=torch.float64)
    loss = (made(x)[0] * rate).sum()
    balance, z = penalties_by_hand(made, x)
    total = loss + 0.25 * (made.spec.router_aux_loss_coef * balance + made.spec.router_z_loss_coef * z)
    expected = torch.autograd.grad(total, made.weight)[0]
    made.balance.take(x.device)

    made.balance.sequence_weight = 0.25
    weights, chosen = made(x)
    assert (weights * rate).sum().item() == loss.item(), "penalties are no part of the loss"
    (weights * rate).sum().backward()
    torch.testing.assert_close(made.weight.grad, expected, rtol=1e-10, atol=1e-12)
    seen = made.balance.take(x.device)
    counts = [int((chosen == expert).sum()) for expert in range(made.num_experts)]
    assert seen.tolist() == pytest.approx([*counts, balance.item(), z.item()])


def test_a_larger_weight_moves_the_router_more() -> None:
    made, x = router(router_aux_loss_coef=1.0), states()

    def gradient(weight: float) -> Tensor:
        made.balance.sequence_weight = weight
        return torch.autograd.grad(made(x)[0].sum(), made.weight)[0]

    none, once, twice = (gradient(weight) for weight in (0.0, 0.5, 1.0))
    assert (once - none).norm() > 1e-3
    torch.testing.assert_close(twice - none, 2 * (once - none))


def seen_of(scores_SE: Tensor, chosen_SK: Tensor) -> float:
    """The balance of one sequence."""
    experts, per_token = scores_SE.shape[1], chosen_SK.shape[1]
    balance = Balance(ExpertSpec(num_experts=experts, num_experts_per_tok=per_token, moe_intermediate_size=1))
    weights = torch.ones(1, requires_grad=True)
    choice = Choice(scores_SE.unsqueeze(0), scores_SE.unsqueeze(0), chosen_SK.unsqueeze(0))
    balance.attach(weights, choice).backward()
    return float(balance.take(weights.device)[-2])


def test_the_scale_of_the_balance() -> None:
    uniform = torch.full((8, 4), 0.25)
    assert seen_of(uniform, torch.arange(8).unsqueeze(1) % 4) == pytest.approx(1.0)
    sure = torch.eye(4)[[2] * 8]
    assert seen_of(sure, torch.full((8, 1), 2)) == pytest.approx(4.0)


def test_only_backwards_are_counted() -> None:
    """A forward may be run twice (recompute), or for an evaluation."""
    made, x = router(), states()
    made(x)
    with torch.no_grad():
        made(x)
    assert made.balance.take(x.device).tolist() == [0.0] * 8
    for _ in range(2):
        made(x)[0].sum().backward()
    assert made.balance.take(x.device)[:6].sum() == 2 * 14 * 2
    assert made.balance.take(x.device).sum() == 0
