"""Does a dry run say what a real run does, to the byte?"""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.harness.dry import dry_steps, real_steps
from tests.harness.experts import DEEPSEEK, MIXTRAL, with_experts
from tests.harness.layouts import legal_layouts
from tests.harness.toy import lay, toy_run
from triax.errors import BadInput
from triax.spec.check import check
from triax.spec.cluster import Cluster
from triax.spec.flops import attended_by, flops_per_token
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run
from triax.verify.balanced import BalancedSelection
from triax.verify.confirm import peak_bytes
from triax.verify.dryrun import dry_run
from triax.verify.ghosts import Ghosts
from triax.verify.stand_in import standing_in

SEQ_LEN = 32
DENSE = ModelSpec(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256, tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = with_experts(DENSE, **MIXTRAL, num_experts=8, moe_intermediate_size=48)
SHARED = with_experts(DENSE, **(DEEPSEEK | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 32}))

SETUP_BYTES = 64
"""What the one-time agreement of stages about shapes may leave."""


def run_of(model: ModelSpec, compute: str, layout: dict[str, Any]) -> Run:
    data_ranks = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
    return toy_run(
        model,
        data={"train": ("nowhere",), "seq_len": SEQ_LEN},
        train={"sequences_per_step": 8 * data_ranks},
        precision={"compute": compute, "master": "fp32", "reduce": "fp32"},
    )


def case(model: ModelSpec, compute: str, *, always: bool = False, **degrees: Any) -> Any:
    kind = {DENSE: "dense", EXPERTS: "experts", SHARED: "shared"}[model]
    name = f"{kind} {compute}" + "".join(f" {key}={value}" for key, value in degrees.items())
    return pytest.param(model, compute, degrees, id=name, marks=() if always else pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("model", "compute", "degrees"),
    [
        case(DENSE, "bf16", dp_shard=2, tp=2, zero=3, recompute="selective", always=True),
        case(DENSE, "fp32", pp=2, cp=2, zero=2, schedule="ZBVZeroBubble", stages_per_rank=2, always=True),
        case(SHARED, "bf16", pp=2, cp=2, ep=2, zero=1, recompute="full", always=True),
        case(EXPERTS, "fp32", pp=2, dp_shard=2, tp=2, ep=4, zero=2, schedule="InterleavedZeroBubble"),
        case(DENSE, "bf16", dp_replicate=2, dp_shard=2, zero=1),
        case(DENSE, "bf16", dp_replicate=4, zero=0),
        case(DENSE, "bf16", pp=4, schedule="GPipe"),
        case(DENSE, "bf16", pp=2, dp_shard=2, tp=2, zero=3, recompute="full"),
        case(DENSE, "bf16", pp=2, tp=2, schedule="DualPipeV", stages_per_rank=2, recompute="full"),
        case(DENSE, "bf16", pp=2, dp_shard=4, zero=2, schedule="Interleaved1F1B", stages_per_rank=2),
        case(DENSE, "bf16", pp=2, dp_replicate=2, dp_shard=2, zero=2, schedule="LoopedBFS", stages_per_rank=2),
        case(DENSE, "bf16", cp=4, zero=3, cp_method="ring"),
        case(DENSE, "bf16", pp=2, dp_shard=2, cp=2, zero=3, cp_method="ring", recompute="full"),
        case(DENSE, "fp32", cp=2, tp=2, zero=1, cp_method="all_gather", recompute="selective"),
        case(DENSE, "bf16", dp_shard=2, cp=2, zero=2, cp_method="all_to_all"),
        case(EXPERTS, "bf16", dp_shard=4, zero=3),
        case(EXPERTS, "bf16", dp_shard=4, ep=4, zero=3, recompute="selective"),
        case(EXPERTS, "fp32", dp_shard=2, cp=2, tp=2, ep=4, zero=3),
        case(SHARED, "fp32", dp_replicate=2, dp_shard=2, tp=2, ep=2, zero=1),
        case(SHARED, "bf16", pp=2, dp_shard=4, ep=4, zero=2, schedule="ZBVZeroBubble", stages_per_rank=2),
    ],
)
def test_dry_run_says_what_a_real_run_does(model: ModelSpec, compute: str, degrees: dict[str, Any]) -> None:
    run = run_of(model, compute, degrees)
    compare(run, [lay(run, 2, **degrees)])


def compare(run: Run, layouts: list[Layout]) -> None:
    for layout, real in zip(layouts, real_steps(run, layouts), strict=True):
        assert not check(layout, run), layout.describe()
        for rank in (0, layout.world_size - 1):
            dry, what = dry_steps(run, layout, rank), f"{layout.describe()} rank {rank}"
            assert dry.collectives == real[rank].collectives, what
            assert dry.flops == real[rank].flops, what
            assert dry.actions == real[rank].actions, what
            assert abs(dry.peak_bytes - real[rank].peak_bytes) <= SETUP_BYTES, f"{what}: {differing(dry, real[rank])}"


def differing(dry: Any, real: Any) -> str:
    pairs = zip(dry.peaks, real.peaks, strict=True)
    return "\n".join(f"dry  {mine}\nreal {other}" for mine, other in pairs if mine != other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_every_layout_on_four_ranks(model: ModelSpec, cp: int) -> None:
    run = toy_run(
        model,
        data={"train": ("nowhere",), "seq_len": SEQ_LEN},
        train={"sequences_per_step": 16},
        precision={"compute": "bf16", "master": "fp32", "reduce": "fp32"},
    )
    compare(run, list(legal_layouts(run, 4, 4, cp)))


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_operations_are_those_of_the_formula(model: ModelSpec) -> None:
    """The formula counts the mathematics; the fused backward of attention makes its scores once more, and what the
    experts of a token give is summed by a product of matrices."""
    run = run_of(model, "bf16", {})
    dry = dry_run(run, lay(run, 2), Cluster(), 0)
    tokens, attended = run.sequences_per_step * SEQ_LEN, attended_by(model, [SEQ_LEN])
    again = 2 * model.num_hidden_layers * model.num_attention_heads * model.head_width * attended
    if model.experts is not None:
        again += 3 * 2 * model.num_hidden_layers * model.experts.num_experts_per_tok * model.hidden_size
    assert dry.step.total_flops == tokens * (flops_per_token(model, attended) + again)


def test_states_are_exact() -> None:
    """Master weights and both moments in fp32, each a half; one copy that computes, in bf16."""
    run = run_of(DENSE, "bf16", {"dp_shard": 2})
    held = dry_run(run, lay(run, 2, dp_shard=2, zero=1), Cluster(cards_per_server=2), 1).step.peak.held
    assert held["optimizer"] - 2 * held["weights"] == 4 * (4 * 9 + 2)  # a counter for each weight
    assert held["compute_copies"] == held["weights"]


def test_no_rank_is_given_the_place_of_one_before() -> None:
    """What one process does as one rank must not tell the next rank where it stands."""

    def coordinate(rank: int) -> list[int] | None:
        with standing_in(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            held = DTensor.from_local(torch.zeros(2, 1), mesh, [Shard(0)], run_check=False)
            found: list[int] | None = torch.empty_like(held).device_mesh.get_coordinate()
        return found

    assert [list(coordinate(rank) or ()) for rank in (1, 0, 1)] == [[1], [0], [1]]


def test_a_collective_inside_a_server_is_told_from_one_across() -> None:
    run = run_of(DENSE, "bf16", {"dp_shard": 2})
    layout = lay(run, 2, dp_shard=2, tp=2, zero=3)
    for order, inside in ((layout.order, "tp"), (("tp", "pp", "dp_replicate", "dp_shard", "cp"), "dp_shard")):
        dry = dry_run(run, layout.model_copy(update={"order": order}), Cluster(servers=2, cards_per_server=2), 3)
        links = {each.axis: each.link for each in dry.step.collectives}
        outside = ({"tp", "dp_shard"} - {inside}).pop()
        assert (links[inside], links[outside]) == ("inside", "across")


@pytest.mark.slow
def test_the_peak_of_many_microbatches_follows_from_few() -> None:
    precision = {"compute": "bf16", "master": "fp32", "reduce": "fp32"}
    run = toy_run(DENSE, train={"sequences_per_step": 16}, precision=precision)
    layout = lay(run, pp=2)
    assert peak_bytes(run, layout, Cluster(cards_per_server=2), 1) == (
        dry_run(run, layout, Cluster(cards_per_server=2), 1).step.peak.peak_bytes
    )


def test_an_illegal_layout_is_refused_as_the_planner_does() -> None:
    run = run_of(DENSE, "bf16", {})
    layout = Layout(tp=3, sequences_per_microbatch=8)
    with pytest.raises(BadInput) as told:
        dry_run(run, layout, Cluster(cards_per_server=3), 0)
    assert str(told.value) == "\n".join(r.message for r in check(layout, run, Cluster(cards_per_server=3)))
    with pytest.raises(BadInput, match="there is no rank 4"):
        dry_run(run, lay(run, 2, tp=2), Cluster(cards_per_server=2), 4)


def test_balanced_routing_gives_each_expert_as_many_tokens() -> None:
    assert EXPERTS.experts is not None
    chosen = BalancedSelection(EXPERTS.experts).best(torch.randn(2, SEQ_LEN, 8))
    assert chosen.flatten().bincount(minlength=8).tolist() == [2 * SEQ_LEN * 2 // 8] * 8
    assert (chosen[..., 0] != chosen[..., 1]).all()


class TestContract:
    """What the dry run needs of torch."""

    def test_shadows_of_dtensor_are_announced(self) -> None:
        from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

        ghosts = Ghosts()
        told: list[bool] = []
        ghosts.come = lambda: told.append(True)  # type: ignore[method-assign]
        ghosts.go = lambda: told.append(False)  # type: ignore[method-assign]
        with standing_in(0, 2):
            mesh = init_device_mesh("cpu", (2,))
            with ghosts.watched():
                part = DTensor.from_local(torch.ones(3, 57), mesh, [Replicate()])
                assert part.cos().shape == (3, 57)
        assert told
        assert told == [True, False] * (len(told) // 2)

    def test_whole_numbers_are_real_and_others_are_not(self) -> None:
        with standing_in(1, 4):
            assert torch.arange(5).cumsum(0).tolist() == [0, 1, 3, 6, 10]
            half = torch.arange(4) / 2
            assert type(half).__name__ == "FakeTensor"
            assert torch.nn.functional.embedding(torch.tensor([1, 2]), torch.ones(3, 4)).shape == (2, 4)
            assert torch.zeros(2, device="meta").is_meta
