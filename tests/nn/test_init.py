"""Are initial weights as random as said, the same for every way of asking, and different for every name and seed?"""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.toy import ODD
from triax.nn.decoder import Decoder
from triax.nn.init import initial_rows, initial_std
from triax.spec.model import ModelSpec
from triax.spec.weights import Weight, weights_table

MODEL = ModelSpec(
    hidden_size=64, intermediate_size=160, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=700,
)  # fmt: skip
TABLE = {weight.name: weight for weight in weights_table(MODEL)}
EMBEDDING = TABLE["embed_tokens.weight"]


def whole(weight: Weight, seed: int = 0, model: ModelSpec = MODEL) -> torch.Tensor:
    return initial_rows(weight, model, seed, 0, weight.shape[0])


@given(st.lists(st.integers(0, 700), min_size=0, max_size=6))
def test_bits_do_not_depend_on_which_rows_are_asked_together(cuts: list[int]) -> None:
    """700 rows are drawn in three blocks; parts may be empty, inside a block or across several."""
    bounds = [0, *sorted(cuts), 700]
    parts = [initial_rows(EMBEDDING, MODEL, 0, start, stop) for start, stop in pairwise(bounds)]
    assert torch.equal(torch.cat(parts), whole(EMBEDDING))


def test_norms_start_as_ones_and_matrices_as_a_normal_sample_of_the_said_width() -> None:
    for weight in TABLE.values():
        values = whole(weight).flatten()
        if weight.role == "norm":
            assert (values == 1).all()
            continue
        std, count = initial_std(weight, MODEL), values.numel()
        # Five standard errors of a sample's mean, of its deviation, and of the share inside one deviation.
        assert abs(values.mean()) < 5 * std / count**0.5, weight.name
        assert abs(values.std() / std - 1) < 5 / (2 * count) ** 0.5, weight.name
        inside = (values.abs() < std).double().mean()
        assert abs(inside - 0.6827) < 5 * (0.6827 * 0.3173 / count) ** 0.5, weight.name


def test_weights_that_write_to_the_residual_stream_start_smaller() -> None:
    """Their sum over the layers keeps its size: 1 / sqrt(2 L) of the range."""
    down, gate = TABLE["layers.0.mlp.down_proj.weight"], TABLE["layers.0.mlp.gate_proj.weight"]
    assert initial_std(down, MODEL) == pytest.approx(initial_std(gate, MODEL) / 4)


def test_each_name_each_seed_and_each_block_is_drawn_anew() -> None:
    drawn = [whole(TABLE["layers.0.self_attn.q_proj.weight"]), whole(TABLE["layers.1.self_attn.q_proj.weight"])]
    drawn.append(whole(TABLE["layers.0.self_attn.q_proj.weight"], seed=1))
    drawn += [whole(EMBEDDING)[rows : rows + 64] for rows in (0, 256, 512)]
    correlations = torch.corrcoef(torch.stack([values.flatten() for values in drawn]))
    assert (correlations - torch.eye(len(drawn))).abs().max() < 5 / 64


@pytest.mark.parametrize(
    "model",
    [
        ODD,
        MODEL,
        ModelSpec(
            hidden_size=512, intermediate_size=1376, num_hidden_layers=2, num_attention_heads=8, vocab_size=257,
            tie_word_embeddings=True,
        ),
        MODEL.model_copy(update={"initializer_range": 1.0}),
    ],
    ids=["odd", "deep", "wide and tied", "wild"],
)  # fmt: skip
def test_random_weights_guess(model: ModelSpec) -> None:
    """The first loss is that of guessing, ln(V), within the five hundredths that the guard allows."""
    decoder = Decoder(model)
    for weight in weights_table(model):
        decoder.get_parameter(weight.name).data.copy_(whole(weight, model=model))
    tokens = torch.randint(0, model.vocab_size, (4, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = decoder(tokens[:, :-1], torch.arange(64).expand(4, -1), None, tokens[:, 1:]) / (4 * 64)
    assert float(loss) == pytest.approx(math.log(model.vocab_size), rel=0.05)
