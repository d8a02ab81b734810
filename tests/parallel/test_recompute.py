"""Does recomputing activations keep every bit, and what does it save?"""

from typing import Any

import pytest
import torch

from tests.harness.memory import Watch
from tests.harness.ranks import run_ranks
from tests.harness.toy import lay, toy_run
from tests.harness.training import Trained, train_in_layout
from triax.nn.decoder import Decoder
from triax.parallel.recompute import wrap_recompute
from triax.spec.layout import Layout, Recompute
from triax.spec.model import ModelSpec
from triax.spec.run import Run

POLICIES: tuple[Recompute, ...] = ("none", "selective", "full")


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(
    "degrees", [{"dp_replicate": 2, "zero": 0}, {"dp_shard": 2, "zero": 3}], ids=["zero=0", "zero=3"]
)
def test_recomputing_keeps_every_bit(degrees: dict[str, int], precision: str) -> None:
    master = "fp64" if precision == "fp64" else "fp32"
    run = toy_run(train={"sequences_per_step": 8}, precision={"compute": precision, "master": master, "reduce": master})
    layouts = [lay(run, 2, **degrees, recompute=policy) for policy in POLICIES]
    for none, *others in run_ranks(train_in_each, 2, run, layouts):
        for other in others:
            assert other.losses == none.losses
            assert other.grad_norms == none.grad_norms
            for name, weight in none.weights.items():
                assert torch.equal(other.first_gradients[name], none.first_gradients[name]), name
                assert torch.equal(other.weights[name], weight), name


def train_in_each(rank: int, world: int, run: Run, layouts: list[Layout]) -> list[Trained]:
    return [train_in_layout(rank, world, run, layout, 2) for layout in layouts]


B, S = 2, 16
TOKENS = B * S
WIDE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bytes_that_a_layer_keeps_for_its_backward(dtype: torch.dtype) -> None:
    """full: the layer's input. selective: also what matmuls and attention put out, and attention's statistic."""
    kept = {policy: bytes_of_one_layer(policy, dtype) for policy in POLICIES}
    model = ModelSpec(num_hidden_layers=1, **WIDE)
    hidden, inner, heads = model.hidden_size, model.intermediate_size, model.num_attention_heads
    query, key_value = heads * model.head_width, model.kv_heads * model.head_width
    projections = query + 2 * key_value + hidden + 2 * inner + hidden
    assert kept["full"] == TOKENS * hidden * dtype.itemsize
    assert kept["selective"] == TOKENS * ((hidden + projections + query) * dtype.itemsize + heads * 4)
    assert kept["selective"] < 0.6 * kept["none"]


def bytes_of_one_layer(policy: Recompute, dtype: torch.dtype) -> int:
    """Return what is alive after a forward through three layers and not after one through two."""
    three, two = (bytes_after_forward(ModelSpec(num_hidden_layers=layers, **WIDE), policy, dtype) for layers in (3, 2))
    return three - two


def bytes_after_forward(model: ModelSpec, policy: Recompute, dtype: torch.dtype) -> int:
    decoder = Decoder(model).to(dtype)
    wrap_recompute(decoder, policy)
    tokens = torch.arange(TOKENS).reshape(B, S) % model.vocab_size
    with Watch() as watch:
        loss = decoder(tokens, torch.arange(S).expand(B, S), None, tokens)
        live = watch.live_bytes()
    loss.backward()
    return live
