"""Does ``triax verify`` pass what is right, and find and name what is planted?"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.commands import Said
from triax.parallel.execute import LocalExecutor
from triax.parallel.place import cut_into_stages
from triax.parallel.tensor import LocalRouter, local


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("dp_shard=2 zero=3", ()),
        ("pp=2 tp=2 microbatches=6", ()),
        ("pp=2 dp_shard=2 tp=2 zero=2 schedule=ZBVZeroBubble recompute=full", ("--steps", "2")),
        ("tp=2", ("--precision", "fp32", "optimizer.name=sgd")),
        ("pp=2 cp=2 tp=2 cp_method=ring", ("data.seq_len=61",)),
    ],
)
def test_a_right_layout_passes(layout: str, words: tuple[str, ...], verify: Callable[..., Said]) -> None:
    said = verify(layout, *words)
    assert said.code == 0, said.err
    assert "trains as one process does" in said.out.splitlines()[-1]
    assert "tokens: of the run's text" in said.out
    assert "different" not in said.out


EXPERTS = (
    "num_experts=12", "num_experts_per_tok=2", "moe_intermediate_size=48", "shared_expert_intermediate_size=32",
    "first_k_dense_replace=1", "router_aux_loss_coef=0.01", "scoring_func=sigmoid", "selection_bias=true",
    "router_bias_update_speed=0.001",
)  # fmt: skip


@pytest.mark.parametrize("layout", ["pp=2 dp_shard=2 tp=2 ep=4 zero=3", "cp=2 tp=2 ep=4 zero=3 cp_method=ring"])
def test_experts_on_other_ranks_pass_and_are_all_compared(layout: str, verify: Callable[..., Said]) -> None:
    said = verify(layout, *(f"model.experts.{key}" for key in EXPERTS))
    assert said.code == 0, said.err
    for name in ("gate.weight", "gate.e_score_correction_bias", "experts.down_proj", "shared_experts.up_proj.weight"):
        assert f"layers.1.mlp.{name} " in said.out
    head, first = (line.split() for line in said.out.splitlines() if line.startswith(("experts of", "layers.1.mlp  1")))
    assert (head, first[3]) == (["experts", "of", "step", "choices", "fell", "otherwise"], "0")
    assert re.search(r"None of [0-9,]+ choices of experts fell otherwise\.", said.out.splitlines()[-1])


def test_json_has_every_comparison(verify: Callable[..., Said], tmp_path: Path) -> None:
    said = verify("dp_shard=2", "--json", "-")
    found = json.loads(said.out)
    assert said.code == 0
    assert found["equal"] is True
    (case,) = found["cases"]
    kinds = {(one["kind"], one["step"]) for one in case["comparisons"]}
    assert kinds == {
        ("initial", 0), ("output", 1), ("gradient", 1), ("weight", 1), ("weight", 3),
        *((kind, step) for kind in ("loss", "norm") for step in (1, 2, 3)),
    }  # fmt: skip
    assert {one["verdict"] for one in case["comparisons"]} <= {"equal", "rounding"}
    to_file = verify("dp_shard=2", "--json", str(tmp_path / "found.json"))
    assert "trains as one process does" in to_file.out
    assert json.loads((tmp_path / "found.json").read_text()) == found


def test_made_up_tokens_where_there_is_no_corpus(verify: Callable[..., Said]) -> None:
    said = verify("dp_shard=2", 'data.train=["nowhere.txt"]')
    assert said.code == 0, said.err
    assert "tokens: made up, since the run's text cannot be read" in said.out
    assert "nowhere.txt" in said.out


def no_sum_of_replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing all-reduce: what every tp rank holds whole keeps its own part of the gradient."""
    monkeypatch.setattr("triax.train.step.sum_replicated", lambda parameters, mesh: None)


def no_sum_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of experts stay at the mean over the ranks that hold them."""
    monkeypatch.setattr("triax.train.step.sum_experts", lambda parameters, layout: None)


def penalties_of_the_part_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tp rank counts the choices of its own part of a sequence alone."""
    monkeypatch.setattr("triax.parallel.expert.SplitBalance.over_parts", lambda self, counts: counts)


def router_of_two_minds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts change places before the router of a tp rank, and nowhere else."""

    def swapped(self: LocalRouter) -> Tensor:
        weight = local(self.weight)
        return torch.cat((weight[1:2], weight[:1], weight[2:]))

    monkeypatch.setattr(LocalRouter, "matrix", swapped)


def no_sum_in_backward_of_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank keeps its own gradient of its part, where the sum over ranks belongs."""

    def own_part(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0].chunk(ctx.group.size(), dim=1)[ctx.group.rank()], None

    monkeypatch.setattr("triax.parallel.collectives._Gather.backward", staticmethod(own_part))


def loss_scaled_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of means: backwards count each rank's tokens alone."""
    execute = LocalExecutor.execute

    def scaled(self: LocalExecutor, batches: Any, scale: Tensor) -> Tensor:
        return execute(self, batches, scale * 2)

    monkeypatch.setattr(LocalExecutor, "execute", scaled)


def layer_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of the last stage is there and does nothing."""

    def cut(*args: Any) -> Any:
        stages = cut_into_stages(*args)
        for stage in stages:
            if stage.is_last:
                next(iter(stage.layers.values())).forward = lambda hidden_BSD, *_: hidden_BSD  # type: ignore[method-assign]
        return stages

    monkeypatch.setattr("triax.parallel.place.cut_into_stages", cut)


def layer_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer belongs to no stage."""
    monkeypatch.setattr("triax.parallel.place.stage_layers", lambda *_: (range(2), range(2, 2)))


def tie_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two copies of a tied embedding never see each other's gradient."""
    monkeypatch.setattr("triax.parallel.tied.TiedEmbedding.sum_gradients", lambda self: None)


def clipped_by_own_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are right, and clipped by half of their norm."""
    monkeypatch.setattr("triax.train.step.clip", lambda gradients, norm, most: [g.mul_(0.5) for g in gradients])


def other_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start from other weights."""
    from triax.parallel.place import initialise

    monkeypatch.setattr(
        "triax.verify.parity.initialise",
        lambda stages, model, seed, layout: initialise(stages, model, seed + 1, layout),
    )


PLANTED = [
    (no_sum_of_replicated, "tp=2", "the gradient of norm.weight is the first that differs on rank"),
    (no_sum_in_backward_of_gather, "tp=2", "the gradient of norm.weight is the first that differs"),
    (
        loss_scaled_by_ranks, "dp_shard=2",
        "the gradient of norm.weight is the first that differs on rank 0 (dp_shard=0), rank 1 (dp_shard=1) (it is 2 "
        "times what it must be)",
    ),
    (
        layer_skipped, "pp=2",
        "what layers.2.self_attn gives in the forward is the first that differs on rank 1 (pp=1) (it ran 0 times for 6 "
        "microbatches)",
    ),
    (layer_lost, "pp=2", "the initial layers.2.input_layernorm.weight is the first that differs (no rank holds it)"),
    (tie_torn, "pp=2", "the gradient of embed_tokens.weight is the first that differs on rank 0 (pp=0), rank 1 (pp=1)"),
    (clipped_by_own_norm, "dp_replicate=2 zero=0", "embed_tokens.weight after step 1 is the first that differs"),
    (other_seed, "dp_shard=2", "the initial embed_tokens.weight is the first that differs"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "layout", "named"), PLANTED, ids=[plant.__name__ for plant, *_ in PLANTED])
def test_a_planted_fault_is_found_and_named(
    plant: Callable[[pytest.MonkeyPatch], None],
    layout: str,
    named: str,
    verify: Callable[..., Said],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    said = verify(layout, "--steps", "2", "optimizer.weight_decay=0.5")
    assert said.code == 1
    assert "different" in said.out
    (line,) = said.err.strip().splitlines()
    assert "does not train as one process does" in line
    assert named in line


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (no_sum_of_experts, "mlp.experts.down_proj is the first that differs"),
        (penalties_of_the_part_of_a_sequence, "the gradient of layers."),
        (router_of_two_minds, "the choice of experts of layers.1.mlp in step 1 is the first that differs"),
    ],
    ids=lambda plant: getattr(plant, "__name__", ""),
)
def test_a_fault_planted_among_experts_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    named: str,
    verify: Callable[..., Said],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    words = [f"model.experts.{key}" for key in EXPERTS if not key.startswith("router_aux")]
    said = verify("tp=2", "--steps", "2", *words, "model.experts.router_aux_loss_coef=1.0")
    assert said.code == 1
    (line,) = said.err.strip().splitlines()
    assert named in line
