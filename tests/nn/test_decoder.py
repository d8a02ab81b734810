"""Is the network Hugging Face's Llama, weight for weight, logit for logit, gradient for gradient?"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.harness.tolerances import GRADIENT, relative_difference
from tests.harness.toy import EVEN, ODD
from triax.nn.decoder import Decoder
from triax.nn.loss import IGNORE_INDEX
from triax.spec.model import ModelSpec
from triax.spec.weights import num_parameters, weights_table

GROUPED: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 75, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 101,
}  # fmt: skip
MODELS = {
    "multi-head": ModelSpec(**GROUPED),
    "grouped and tied": ModelSpec(**GROUPED, num_key_value_heads=2, tie_word_embeddings=True),
    "one key head": ModelSpec(**GROUPED, num_key_value_heads=1, rms_norm_eps=1e-6),
    "own head width": ModelSpec(**GROUPED, num_key_value_heads=3, head_dim=10, rope_theta=500_000.0),
    "odd": ODD,
}


def llama_and_ours(model: ModelSpec) -> tuple[LlamaForCausalLM, Decoder]:
    """Both networks in fp32 with the same weights, far enough from zero for every part to matter."""
    config = LlamaConfig(
        hidden_size=model.hidden_size, intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers, num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.kv_heads, head_dim=model.head_width, vocab_size=model.vocab_size,
        rms_norm_eps=model.rms_norm_eps, tie_word_embeddings=model.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta}, attn_implementation="eager",
    )  # fmt: skip
    llama, ours = LlamaForCausalLM(config), Decoder(model)
    random = torch.Generator().manual_seed(0)
    for weight in weights_table(model):
        drawn = torch.randn(weight.shape, generator=random)
        value = 1 + 0.3 * drawn if weight.role == "norm" else drawn / weight.shape[-1] ** 0.5
        ours.get_parameter(weight.name).data.copy_(value)
        llama.get_parameter(weight.hf_name).data.copy_(value)
    return llama, ours


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_those_of_hugging_face(name: str) -> None:
    model = MODELS[name]
    llama, ours = llama_and_ours(model)
    tokens = torch.randint(0, model.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, ::5] = IGNORE_INDEX
    positions = torch.arange(40).expand(3, -1)

    reference = llama(tokens, labels=labels)
    logits = ours(tokens, positions)
    assert relative_difference(logits, reference.logits) <= 1e-5

    # Hugging Face shifts labels itself and takes the mean.
    shifted = torch.cat((labels[:, 1:], torch.full((3, 1), IGNORE_INDEX)), dim=1)
    loss = ours(tokens, positions, None, shifted) / (shifted != IGNORE_INDEX).sum()
    assert loss.item() == pytest.approx(reference.loss.item(), rel=2e-6)
    reference.loss.backward()
    loss.backward()
    for weight in weights_table(model):
        gradient, expected = ours.get_parameter(weight.name).grad, llama.get_parameter(weight.hf_name).grad
        assert gradient is not None
        assert expected is not None
        assert relative_difference(gradient, expected) <= GRADIENT["fp32"], weight.name


@pytest.mark.parametrize("model", [ODD, EVEN], ids=["odd", "even"])
def test_parameters_are_the_rows_of_the_weights_table(model: ModelSpec) -> None:
    with torch.device("meta"):
        decoder = Decoder(model)
    parameters = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    assert parameters == {weight.name: weight.shape for weight in weights_table(model)}
    assert sum(parameter.numel() for parameter in decoder.parameters()) == num_parameters(model)


@pytest.mark.parametrize("model", [ODD, EVEN], ids=["tied", "untied"])
def test_parts_make_up_the_whole_under_the_same_names(model: ModelSpec) -> None:
    torch.manual_seed(0)
    whole = Decoder(model)
    first, last = Decoder(model, [0], is_last=False), Decoder(model, range(1, model.num_hidden_layers), is_first=False)
    names: set[str] = set()
    for part in (first, last):
        part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
        names |= part.state_dict().keys()
    assert names == whole.state_dict().keys()
    tokens = torch.randint(0, model.vocab_size, (2, 9))
    positions = torch.arange(9).expand(2, -1)
    hidden: Tensor = first(tokens, positions)
    assert torch.equal(last(hidden, positions), whole(tokens, positions))
    assert torch.equal(last(hidden, positions, None, tokens), whole(tokens, positions, None, tokens))


def test_bf16_logits_stay_near_those_of_fp32() -> None:
    _, ours = llama_and_ours(MODELS["grouped and tied"])
    tokens = torch.randint(0, 101, (2, 30), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(30).expand(2, -1)
    exact = ours(tokens, positions)
    assert relative_difference(ours.bfloat16()(tokens, positions), exact) < 2e-2
