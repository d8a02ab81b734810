"""Does every layout of a model with experts train exactly like one device: router, each expert, penalties and biases?

All legal layouts on 4 and 8 ranks, in fp64: degrees x ep x ZeRO stage x schedule, with three kinds of routers and the
ways to cut a sequence in turn. A fixed, varied sample of them always runs. The plain loop they are compared with adds
penalties to the loss where it has all documents of a sequence together, and counts choices itself.
"""

from functools import cache
from itertools import cycle
from typing import Any, get_args

import pytest
import torch

from tests.harness.experts import ROUTERS, with_experts
from tests.harness.layouts import legal_layouts
from tests.harness.ranks import run_ranks
from tests.harness.tolerances import assert_losses_equal
from tests.harness.toy import toy_run
from tests.harness.training import CPU, Engine, train_on_all_ranks, train_on_one_device, whole
from tests.parallel.equality import assert_equals_one_device
from tests.parallel.test_composition import name_of
from triax.checkpoint.state import local_slices
from triax.nn.decoder import Decoder
from triax.parallel.expert import ExpertLoad
from triax.spec.check import check
from triax.spec.layout import ContextMethod, Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run
from triax.spec.weights import weights_table
from triax.train.guard import StepReport

MICROBATCHES = 3
MOST_STAGES = 16
SEQ_LEN = 16
METHODS: tuple[ContextMethod, ...] = get_args(ContextMethod)

ALWAYS = {
    "4 ranks dp_shard=4 zero=3 ep=2": "deepseek",
    "4 ranks dp_shard=2 tp=2 zero=2 ep=4": "mixtral",
    "4 ranks dp_replicate=2 dp_shard=2 zero=1 ep=2": "qwen",
    "4 ranks tp=4 zero=0 ep=2": "mixtral",
    "4 ranks dp_shard=2 tp=2 zero=3 ep=1": "deepseek",
    "4 ranks pp=2 dp_shard=2 zero=3 1F1B ep=2": "deepseek",
    "4 ranks pp=2 tp=2 zero=2 ZBVZeroBubble ep=2": "mixtral",
    "4 ranks pp=2 dp_shard=2 zero=1 DualPipeV ep=2": "qwen",
    "4 ranks pp=4 zero=2 InterleavedZeroBubble ep=1": "mixtral",
    "8 ranks pp=2 dp_shard=2 tp=2 zero=3 1F1B ep=4": "deepseek",
    "4 ranks cp=4 zero=0 ep=2": "deepseek",
    "4 ranks cp=2 tp=2 zero=2 ep=4": "mixtral",
    "4 ranks dp_shard=2 cp=2 zero=3 ep=1": "qwen",
    "4 ranks pp=2 cp=2 zero=3 1F1B ep=2": "mixtral",
    "8 ranks dp_shard=2 cp=2 tp=2 zero=3 ep=4": "deepseek",
}
"""Each axis with each other one, each stage, each kind of router; ``ep`` inside tp, inside dp_shard, inside cp and
across."""


@cache
def toy_of(num_stages: int, heads: int, router: str) -> Run:
    """Return a run with experts, of sizes that divide by little and with a layer more than stages."""
    model = ModelSpec(
        hidden_size=12, intermediate_size=23, num_hidden_layers=max(num_stages, 2) + 1, num_attention_heads=8,
        num_key_value_heads=max(4, heads), head_dim=2, vocab_size=61, tie_word_embeddings=num_stages in (1, 4, 16),
    )  # fmt: skip
    shared = {"shared_expert_intermediate_size": 23} if router == "deepseek" else {}
    model = with_experts(model, **ROUTERS[router] | {"num_experts": 8} | shared)
    return toy_run(model, train={"sequences_per_step": 8 * MICROBATCHES}, data={"seq_len": SEQ_LEN})


def full_name_of(layout: Layout) -> str:
    return f"{name_of(layout)} ep={layout.ep}"


def every_layout(ranks: int) -> list[Any]:
    run = toy_of(MOST_STAGES, 8, "mixtral")
    layouts = (layout for cp in (1, 2, 4, 8) for layout in legal_layouts(run, ranks, MICROBATCHES, cp))
    found = []
    for layout, router, method in zip(layouts, cycle(ROUTERS), cycle((*METHODS, *reversed(METHODS)))):
        layout = layout.model_copy(update={"cp_method": method})
        name = full_name_of(layout)
        marks = () if name in ALWAYS else pytest.mark.exhaustive
        found.append(pytest.param(layout, ALWAYS.get(name, router), id=name, marks=marks))
    return found


@pytest.mark.parametrize(("layout", "router"), [*every_layout(4), *every_layout(8)])
def test_every_layout_equals_one_device(layout: Layout, router: str) -> None:
    assert_equals_one_device(toy_of(layout.pp * layout.stages_per_rank, layout.cp * layout.tp, router), layout)


def test_the_sample_is_part_of_the_whole() -> None:
    names = {full_name_of(param.values[0]) for ranks in (4, 8) for param in every_layout(ranks)}
    assert ALWAYS.keys() <= names


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_layers_that_recompute_route_and_count_once(recompute: str) -> None:
    run = toy_of(1, 2, "mixtral")
    layout = Layout(
        dp_shard=2, tp=2, ep=2, zero=3, recompute=recompute, microbatches=3, sequences_per_microbatch=4
    )  # type: ignore[arg-type] # fmt: skip
    assert_equals_one_device(run, layout)
    assert_same_load(run, layout)


def test_the_order_of_axes_changes_nothing() -> None:
    run = toy_of(1, 2, "deepseek")
    layout = Layout(
        dp_replicate=2, dp_shard=2, tp=2, ep=4, order=("tp", "dp_replicate", "cp", "dp_shard", "pp"), microbatches=3,
        sequences_per_microbatch=2,
    )  # fmt: skip
    assert_equals_one_device(run, layout)


def test_grouped_matmul_on_ranks_equals_the_plain_loop_in_fp32() -> None:
    """The sizes are such that the engine's experts are grouped; those of one device go one by one in fp64."""
    model = with_experts(toy_of(1, 1, "mixtral").model, **ROUTERS["mixtral"] | {"moe_intermediate_size": 8})
    fp32 = {"compute": "fp32", "master": "fp32", "reduce": "fp32"}
    sections = {"train": {"sequences_per_step": 8}, "data": {"seq_len": 8}, "optimizer": {"name": "sgd"}}
    run = toy_run(model, **sections, precision=fp32)
    assert_equals_one_device(run, Layout(dp_shard=2, ep=2, microbatches=2, sequences_per_microbatch=2))


def one_rank(run: Run) -> Layout:
    return Layout(microbatches=run.sequences_per_step)


def first_report(rank: int, world: int, run: Run, layout: Layout) -> StepReport:
    report: StepReport = Engine(run, layout, rank).step(0)
    return report


def reported(run: Run, layout: Layout) -> StepReport:
    assert check(layout, run) == []
    reports: list[StepReport] = run_ranks(first_report, layout.world_size, run, layout)
    assert all(report == reports[0] for report in reports)
    return reports[0]


def assert_same_load(run: Run, layout: Layout) -> None:
    """Fail where ``layout`` counts other tokens, or other penalties, than one rank does."""
    alone, together = reported(run, one_rank(run)).experts, reported(run, layout).experts
    assert [load.layer for load in together] == list(run.model.sparse_layers)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        assert sum(one.tokens) == run.tokens_per_step * 2
        assert other.balance_loss == pytest.approx(one.balance_loss, rel=1e-9)
        assert other.z_loss == pytest.approx(one.z_loss, rel=1e-9)


@pytest.mark.parametrize(
    "degrees",
    [
        {"pp": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 2, "dp_shard": 2, "ep": 2, "zero": 2},
        {"dp_shard": 2, "tp": 2, "ep": 4, "zero": 3},
    ],
    ids=["pp", "tp"],
)
def test_all_layouts_report_the_same_load(degrees: dict[str, Any]) -> None:
    run = toy_of(4, 2, "mixtral")
    layout = Layout(**degrees, microbatches=3, sequences_per_microbatch=4)
    assert_same_load(run, layout)


def test_a_larger_coefficient_changes_the_gradient_of_routers() -> None:
    """And the parity above would see if it did so by another amount."""
    run = toy_of(1, 2, "mixtral")
    free = toy_run(with_experts(run.model, num_experts=8), train={"sequences_per_step": 24}, data={"seq_len": 8})
    layout = Layout(dp_shard=2, ep=2, tp=2, microbatches=3, sequences_per_microbatch=4)
    name = "layers.1.mlp.gate.weight"
    with_penalty, without = (train_on_all_ranks(each, layout, 1).first_gradients[name] for each in (run, free))
    assert (with_penalty - without).norm() > 0.1 * without.norm()


def test_biases_move_where_nothing_else_does() -> None:
    run = toy_of(1, 1, "deepseek")
    trained = train_on_one_device(run, 1)
    bias = trained.weights["layers.1.mlp.gate.e_score_correction_bias"]
    assert {-1.0, 1.0} <= set((bias / 0.01).tolist()) <= {-1.0, 0.0, 1.0}
    assert "layers.1.mlp.gate.e_score_correction_bias" not in trained.first_gradients


def test_a_step_that_is_left_out_moves_no_bias() -> None:
    model = toy_of(1, 1, "deepseek").model
    stage = Decoder(model)
    load = ExpertLoad([stage], model, CPU)
    seen = torch.arange(20, dtype=torch.float64)  # two layers of eight experts, and their two losses
    bias = stage.get_parameter("layers.1.mlp.gate.e_score_correction_bias")
    load.move_biases(seen, torch.tensor(False))
    assert (bias == 0).all()
    load.move_biases(seen, torch.tensor(True))
    assert (bias * 100).round().tolist() == [1, 1, 1, 1, -1, -1, -1, -1]


def losses_of(rank: int, world: int, run: Run, layout: Layout, steps: int) -> list[float]:
    engine = Engine(run, layout, rank)
    return [engine.step(step).loss for step in range(steps)]


def test_grouped_experts_in_bf16_come_to_the_losses_of_fp64() -> None:
    """A choice between two nearly equal scores may fall otherwise in bf16; a loss over many tokens hardly feels it."""
    sizes = {"hidden_size": 16, "head_dim": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = with_experts(
        ModelSpec.model_validate(toy_of(1, 1, "mixtral").model.model_dump() | sizes),
        **ROUTERS["mixtral"] | {"num_experts": 8, "moe_intermediate_size": 16},
    )
    sections = {"train": {"sequences_per_step": 24}, "data": {"seq_len": 8}}
    layout = Layout(dp_shard=2, ep=2, zero=3, microbatches=3, sequences_per_microbatch=4)
    exact = train_on_one_device(toy_run(model, **sections), 3).losses
    bf16 = toy_run(model, **sections, precision={"compute": "bf16", "master": "fp32", "reduce": "fp32"})
    for losses in run_ranks(losses_of, 2, bf16, layout, 3):
        assert_losses_equal(losses, exact, "bf16")


def numbers_held(rank: int, world: int, run: Run, layout: Layout) -> int:
    """How many numbers of experts this rank keeps between steps."""
    stages = Engine(run, layout, rank).stages
    named = [pair for stage in stages for pair in stage.named_parameters()]
    return sum(sum(block.local.numel() for block in local_slices(p)) for name, p in named if ".experts." in name)


@pytest.mark.parametrize(
    ("degrees", "parts"),
    [
        ({"dp_shard": 4, "ep": 2, "zero": 3}, 4),
        ({"dp_shard": 2, "tp": 2, "ep": 4, "zero": 1}, 4),
        ({"tp": 4, "ep": 2, "zero": 1}, 4),
        ({"tp": 4, "ep": 2, "zero": 0}, 2),
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 2}, 2),
    ],
    ids=str,
)
def test_each_rank_holds_its_part_of_the_experts(degrees: dict[str, Any], parts: int) -> None:
    run = toy_of(1, 4, "mixtral")
    layout = Layout(**degrees, microbatches=24 // degrees.get("dp_shard", 1) // degrees.get("dp_replicate", 1))
    whole = sum(weight.numel for weight in weights_table(run.model) if weight.is_of_experts)
    assert run_ranks(numbers_held, layout.world_size, run, layout) == [whole // parts] * layout.world_size


def sick_then_well(rank: int, world: int, run: Run, layout: Layout) -> tuple[list[str], bool, bool]:
    """Which weights changed in a step with NaN in hidden states of one rank; whether it, and the next, was finite."""
    engine = Engine(run, layout, rank)
    named = {name: weight for stage in engine.stages for name, weight in stage.named_parameters()}
    before = {name: whole(weight) for name, weight in named.items()}
    attention = engine.stages[0].layers["0"].get_submodule("self_attn")
    spoil = attention.register_forward_hook(lambda _module, _inputs, out: out * float("nan")) if rank == 0 else None
    sick = engine.step(0)
    changed = [name for name, weight in named.items() if not torch.equal(whole(weight), before[name])]
    if spoil is not None:
        spoil.remove()
    return changed, sick.is_finite, engine.step(1).is_finite


def test_tokens_that_are_no_numbers_are_routed_and_change_nothing() -> None:
    """They choose experts like any others, so that no rank waits; the step is left out, biases too."""
    run = toy_of(1, 2, "deepseek")
    layout = Layout(dp_shard=2, tp=2, ep=4, zero=3, microbatches=3, sequences_per_microbatch=4)
    assert run_ranks(sick_then_well, 4, run, layout) == [([], False, True)] * 4
