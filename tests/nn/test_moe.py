"""Does each token go through the experts it should, with the weight it should, and nowhere else?"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.harness.experts import DEEPSEEK, ROUTERS, with_experts
from tests.harness.toy import ODD
from triax.nn.decoder import Decoder
from triax.nn.moe import MixtureOfExperts, Order, Router, can_group, grouped, one_by_one
from triax.spec.experts import ExpertSpec

WIDTH = 24


def mixture(dtype: torch.dtype = torch.float64, **settings: Any) -> MixtureOfExperts:
    """A layer's experts with weights large enough that every part matters."""
    made = MixtureOfExperts(with_experts(ODD, **settings)).to(dtype)
    random = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.4, generator=random)
    return made


def states(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def scores_of(logits: list[float], spec: ExpertSpec) -> list[float]:
    if spec.scoring_func == "sigmoid":
        return [1 / (1 + torch.tensor(-value, dtype=torch.float64).exp().item()) for value in logits]
    powers = torch.tensor(logits, dtype=torch.float64).exp()
    return list((powers / powers.sum()).tolist())


def chosen_by_hand(logits: list[float], bias: list[float], spec: ExpertSpec) -> dict[int, float]:
    """One token's experts and their weights, by plain Python."""
    scores = scores_of(logits, spec)
    wishes = {expert: score + bias[expert] for expert, score in enumerate(scores)}
    size = spec.num_experts // spec.n_group
    groups = [range(first, first + size) for first in range(0, spec.num_experts, size)]
    if spec.n_group > 1:
        groups.sort(key=lambda group: -sum(sorted(wishes[expert] for expert in group)[-2:]))
    allowed = [expert for group in groups[: spec.topk_group] for expert in group]
    best = sorted(allowed, key=lambda expert: -wishes[expert])[: spec.num_experts_per_tok]
    total = sum(scores[expert] for expert in best) if spec.norm_topk_prob else 1.0
    return {expert: scores[expert] / total * spec.routed_scaling_factor for expert in best}


@st.composite
def specs(draw: st.DrawFn) -> ExpertSpec:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    size = draw(st.integers(2, 4))
    kept = draw(st.integers(1, groups))
    return ExpertSpec(
        num_experts=groups * size, num_experts_per_tok=draw(st.integers(1, kept * size)), moe_intermediate_size=1,
        scoring_func=draw(st.sampled_from(["softmax", "sigmoid"])), norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])), n_group=groups, topk_group=kept,
        selection_bias=draw(st.booleans()),
    )  # fmt: skip


@given(specs(), st.integers(0, 1000))
def test_routing_is_what_a_hand_makes_of_it(spec: ExpertSpec, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    router = Router(WIDTH, spec).double()
    router.weight.data.normal_(generator=random)
    bias = torch.zeros(spec.num_experts, dtype=torch.float64)
    if router.e_score_correction_bias is not None:
        router.e_score_correction_bias.data.normal_(0, 0.3, generator=random)
        bias = router.e_score_correction_bias.data
    x = torch.randn(2, 3, WIDTH, generator=random, dtype=torch.float64)
    weights, chosen = router(x)
    logits = (x.flatten(0, 1) @ router.weight.T).tolist()
    for token in range(6):
        expected = chosen_by_hand(logits[token], bias.tolist(), spec)
        actual = dict(zip(chosen[token].tolist(), weights[token].tolist(), strict=True))
        assert actual == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_mixture_is_the_weighted_sum_of_each_tokens_experts(name: str) -> None:
    made = mixture(**ROUTERS[name])
    x = states(2, 7)
    weights, chosen = made.gate(x)
    experts = made.experts
    for token, row in enumerate(x.flatten(0, 1)):
        expected = torch.zeros(WIDTH, dtype=torch.float64)
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            inner = slice(expert * experts.inner, (expert + 1) * experts.inner)
            outer = slice(expert * WIDTH, (expert + 1) * WIDTH)
            inside = F.silu(experts.gate_proj[inner] @ row) * (experts.up_proj[inner] @ row)
            expected += weight * (experts.down_proj[outer] @ inside)
        if made.shared_experts is not None:
            expected += made.shared_experts(row)
        torch.testing.assert_close(made(x).flatten(0, 1)[token], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    made = mixture(**(ROUTERS[name] | {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0}))
    trained = {name: weight for name, weight in made.named_parameters() if weight.requires_grad}
    x = states(1, 3).requires_grad_()

    def output(x: Tensor, *weights: Tensor) -> Tensor:
        named = dict(zip(trained, weights, strict=True))
        mixed: Tensor = torch.func.functional_call(made, named, (x,))
        return mixed

    assert torch.autograd.gradcheck(output, (x, *trained.values()), fast_mode=True)


@pytest.mark.parametrize(
    "counts", [[3, 5, 4, 8], [0, 20, 0, 0], [0, 0, 0, 0], [7, 0, 13, 0]], ids=lambda counts: str(counts)
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_matmul_equals_the_loop(counts: list[int], dtype: torch.dtype) -> None:
    """Values and gradients, with experts that nobody chose."""
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    results = []
    for multiply in (grouped, one_by_one):
        rows = states(sum(counts), dtype=dtype).requires_grad_()
        matrices = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        out = multiply(rows, matrices, torch.tensor(counts))
        (out.float() ** 2).sum().backward()
        assert matrices.grad is not None
        results.append((out, rows.grad, matrices.grad))
    for one, other in zip(*results, strict=True):
        assert one is not None
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    for expert in [expert for expert, count in enumerate(counts) if count == 0]:
        assert (results[0][2][expert] == 0).all()


def test_grouped_matmul_is_taken_where_torch_has_it() -> None:
    fits = {
        (torch.float32, 12): True, (torch.float32, 10): False, (torch.bfloat16, 16): True, (torch.bfloat16, 12): False,
        (torch.float64, 16): False,
    }  # fmt: skip
    assert {key: can_group(states(3, dtype=key[0]), key[1]) for key in fits} == fits


def test_both_ways_make_the_same_mixture_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = mixture(torch.float32, moe_intermediate_size=16), states(2, 9, dtype=torch.float32)
    by_kernel = made(x)
    monkeypatch.setattr("triax.nn.moe.can_group", lambda rows, inner: False)
    torch.testing.assert_close(made(x), by_kernel, rtol=1e-6, atol=1e-6)


@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=1, max_size=12))
def test_the_order_of_choices(chosen: list[list[int]]) -> None:
    order = Order.by_expert(torch.tensor(chosen), 5)
    choices = [(expert, token) for token, experts in enumerate(chosen) for expert in experts]
    x = torch.arange(len(chosen), dtype=torch.float64).unsqueeze(1)
    assert order.spread(x).flatten().tolist() == [token for _, token in sorted(choices, key=lambda choice: choice[0])]
    assert order.counts_E.tolist() == [sum(expert == one for one, _ in choices) for expert in range(5)]
    assert torch.equal(order.collect(order.spread(x)), x.unsqueeze(1).expand(-1, 2, -1))


def test_gradients_of_permutations_are_torchs_own() -> None:
    chosen, x = torch.tensor([[3, 0], [1, 3], [3, 2]]), states(3).requires_grad_()
    order = Order.by_expert(chosen, 4)
    rate = states(3, 2)
    ours = torch.autograd.grad((order.collect(order.spread(x) ** 2) * rate).sum(), x)[0]
    theirs = torch.autograd.grad((x.unsqueeze(1) ** 2 * rate).sum(), x)[0]
    torch.testing.assert_close(ours, theirs)


def test_layers_have_experts_where_the_model_says() -> None:
    def kinds(**settings: Any) -> list[bool]:
        model = with_experts(ODD.model_copy(update={"num_hidden_layers": 5}), **settings)
        with torch.device("meta"):
            layers = Decoder(model).layers.values()
        return [isinstance(layer.get_submodule("mlp"), MixtureOfExperts) for layer in layers]

    assert kinds() == [True] * 5
    assert kinds(first_k_dense_replace=2) == [False, False, True, True, True]
    assert kinds(decoder_sparse_step=2) == [False, True, False, True, False]
    assert kinds(mlp_only_layers=[0, 4], first_k_dense_replace=1) == [False, True, True, True, False]


def test_scores_are_wide_even_where_states_are_narrow() -> None:
    """Two experts whose scores differ by less than bf16 can tell are still told apart."""
    router = Router(WIDTH, ExpertSpec(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=1)).bfloat16()
    router.weight.data.fill_(1.0)
    router.weight.data[1, 0] = 1.0078125
    _, chosen = router(torch.ones(1, 4, WIDTH, dtype=torch.bfloat16))
    assert chosen.flatten().tolist() == [1, 1, 1, 1]


def test_deepseek_v3_of_transformers_makes_the_same_mixture() -> None:
    """The reference for sigmoids, groups, the bias and shared experts; its attention is another matter."""
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=WIDTH, moe_intermediate_size=10, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
        routed_scaling_factor=1.7, norm_topk_prob=True, n_shared_experts=2,
    )  # fmt: skip
    made = mixture(torch.float32, **DEEPSEEK | {"shared_expert_intermediate_size": 20})
    their = modeling.DeepseekV3MoE(config)
    ours, experts = dict(made.named_parameters()), made.experts
    gate_up = torch.cat(
        [weight.unflatten(0, (8, 10)) for weight in (experts.gate_proj.data, experts.up_proj.data)], dim=1
    )
    their.load_state_dict(
        {
            "gate.weight": ours["gate.weight"].data,
            "gate.e_score_correction_bias": ours["gate.e_score_correction_bias"].data,
            "experts.gate_up_proj": gate_up,
            "experts.down_proj": experts.down_proj.data.unflatten(0, (8, WIDTH)),
            **{name: weight.data for name, weight in ours.items() if name.startswith("shared_experts")},
        }
    )
    x = states(2, 40, dtype=torch.float32)
    torch.testing.assert_close(made(x), their(x), rtol=1e-5, atol=1e-5)
