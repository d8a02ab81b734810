"""Does a pipeline rank hold between its backwards what the table of ZeRO stages says for the weights of its stages?

torch's own pipelines hold all weights and all gradients until the end of a step, whatever is asked.
"""

from typing import Any
from unittest.mock import patch

import pytest

from tests.harness.ranks import run_ranks
from tests.harness.toy import EVEN, lay, toy_run
from tests.harness.training import Engine
from tests.parallel.test_bytes import TABLE, _walk
from triax.parallel.pipeline import ZeroStage
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.spec.stages import stage_layers
from triax.spec.weights import weights_table

MICROBATCHES = 3


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_between_backwards_are_those_of_the_table(zero: int) -> None:
    run = toy_run(
        EVEN.model_copy(update={"num_hidden_layers": 5}),
        train={"sequences_per_step": 2 * MICROBATCHES},
        precision={"compute": "bf16", "master": "fp32", "reduce": "fp32"},
    )
    layout = lay(run, pp=2, dp_shard=2, zero=zero)
    row = TABLE["bf16", "fp32"][zero]
    for rank, moments in enumerate(run_ranks(held_between_backwards, 4, run, layout)):
        parameters = parameters_of_stage(run, layout.coordinate(rank).pp)
        expected = {
            name: parameters * (2 * whole + shared) // 2
            for name, (whole, shared) in (
                ("master", row.master), ("compute", row.compute), ("gradients", row.gradients), ("adam", row.adam),
            )
        }  # fmt: skip
        assert moments == [expected] * 2 * (MICROBATCHES - 1)


def parameters_of_stage(run: Run, stage: int) -> int:
    layers = stage_layers(run.model, 2, None)[stage]
    outside = ("embed_tokens.weight",) if stage == 0 else ("norm.weight", "lm_head.weight")
    return sum(w.numel for w in weights_table(run.model) if w.layer in layers or w.name in outside)


def held_between_backwards(rank: int, world: int, run: Run, layout: Layout) -> list[dict[str, int]]:
    """Return the bytes that this rank holds after each backward but the last of each of two steps."""
    engine = Engine(run, layout, rank)
    (stage,) = engine.stages
    moments: list[dict[str, int]] = []
    run_backward = ZeroStage.backward_one_chunk

    def then_walk(self: ZeroStage, *args: Any, last_backward: bool = False, **kwargs: Any) -> None:
        run_backward(self, *args, last_backward=last_backward, **kwargs)
        if not last_backward:
            moments.append(_walk(stage, engine.optimizer))

    with patch.object(ZeroStage, "backward_one_chunk", then_walk):
        engine.step(0)
        engine.step(1)
    return moments
