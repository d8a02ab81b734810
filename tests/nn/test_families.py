"""Is every family the network that transformers makes of its config.json: logits, all gradients, packed documents?"""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness.configs import CONFIGS, EAGER, Config
from tests.harness.tolerances import GRADIENT, assert_tensors_equal
from triax.nn.decoder import Decoder
from triax.spec.huggingface import SUPPORTED, config_of, model_from_config, tensor_sources
from triax.spec.model import ModelSpec

transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 40
LOGITS = 1e-5
BOUNDS = (0, 8, 40, 56, 57, 80)
"""Documents of the flattened batch: 8 and 32 positions in its first row, 16, 1 and 23 in its second. Long rope of the
configs changes after 16 and after 32."""


def reference(said: Config) -> Any:
    """The model that transformers makes of ``said``, with weights large enough that all of it matters."""
    config = transformers.AutoConfig.for_model(**said)
    config = type(config).from_dict(json.loads(config.to_json_string()))  # as it would be read from a folder
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    with torch.no_grad():
        for weight in model.parameters():
            # Norms and biases stay around what they start with, so that nothing fades out on the way.
            drawn = torch.randn_like(weight) * 0.15
            weight.copy_(weight + drawn if weight.dim() == 1 else drawn)
    return model


def in_our_names(tensors: dict[str, Tensor], model: ModelSpec) -> dict[str, Tensor]:
    """Tensors by our names; every one of ``tensors`` has to be asked for, the head of a tied model apart."""
    tensors = as_in_a_folder(tensors, model)
    named = {}
    for name, sources in tensor_sources(model).items():
        parts = []
        for source in sources:
            rows = slice(source.first_row, None if source.num_rows is None else source.first_row + source.num_rows)
            parts.append(tensors[source.hf_name][rows])
        named[name] = torch.cat(parts)
    unasked = tensors.keys() - {source.hf_name for parts in tensor_sources(model).values() for source in parts}
    assert unasked <= ({"lm_head.weight"} if model.tie_word_embeddings else set())
    return named


def as_in_a_folder(tensors: dict[str, Tensor], model: ModelSpec) -> dict[str, Tensor]:
    """Tensors under the names of a folder: in memory, transformers stacks experts, and calls all families' alike."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, stack, kind = name.partition(".mlp.experts.")
        parts = {"": (), "gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        for part, matrices in zip(parts, tensor.chunk(max(len(parts), 1), dim=-2 if stack else 0), strict=False):
            apart |= {f"{before}{stack}{expert}.{part}.weight": matrix for expert, matrix in enumerate(matrices)}
        if not stack:
            apart[name] = tensor
    if model.family != "mixtral":
        return apart
    names = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return {".".join(names.get(word, word) for word in name.split(".")): tensor for name, tensor in apart.items()}


def ours(their: nn.Module, model: ModelSpec) -> Decoder:
    decoder = Decoder(model)
    decoder.load_state_dict(in_our_names(their.state_dict(), model))
    return decoder


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


def tokens() -> Tensor:
    return torch.randint(0, 61, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=CONFIGS)
def said(request: pytest.FixtureRequest) -> Config:
    return CONFIGS[request.param]


def test_every_family_is_here() -> None:
    assert {said["model_type"] for said in CONFIGS.values()} == set(SUPPORTED)


def test_logits_and_gradients(said: Config) -> None:
    their = reference(said)
    model = model_from_config(said, "config.json")
    decoder = ours(their, model)
    x, positions = tokens(), torch.arange(LENGTH).expand(BATCH, -1)
    labels = x.roll(-1, 1)

    their_logits = their(x, use_cache=False).logits
    with torch.no_grad():
        assert (decoder(x, positions) - their_logits).abs().max() <= LOGITS
    assert their_logits.abs().max() > 0.05  # the comparison means something

    F.cross_entropy(their_logits.flatten(0, 1), labels.flatten()).backward()
    (decoder(x, positions, None, labels) / labels.numel()).backward()
    actual, expected = gradients(decoder), in_our_names(gradients(their), model)
    for layer in model.layers_without_rope if model.attention_bias else ():
        # The same added to all keys that do not turn changes no softmax: its gradient is zero, and both are rounding.
        bias = f"layers.{layer}.self_attn.k_proj.bias"
        assert max(actual.pop(bias).abs().max(), expected.pop(bias).abs().max()) < 1e-7
    assert_tensors_equal(actual, expected, GRADIENT["fp32"])


@torch.no_grad()
def test_packed_documents_are_documents_alone(said: Config) -> None:
    their = reference(said)
    decoder = ours(their, model_from_config(said, "config.json"))
    lengths = [stop - start for start, stop in pairwise(BOUNDS)]
    positions = torch.cat([torch.arange(length) for length in lengths]).view(BATCH, LENGTH)
    packed = decoder(tokens(), positions, torch.tensor(BOUNDS, dtype=torch.int32)).flatten(0, 1)
    # Short ones first: transformers remembers how far the longest document of dynamic rope was stretched.
    for start, stop in sorted(pairwise(BOUNDS), key=lambda bounds: bounds[1] - bounds[0]):
        alone = their(tokens().flatten()[None, start:stop], use_cache=False).logits[0]
        assert (packed[start:stop] - alone).abs().max() <= LOGITS, (start, stop)


@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen2, window in listed layers", "gemma3"])
@torch.no_grad()
def test_transformers_packs_alike(name: str) -> None:
    """It finds the documents of a row where positions start again."""
    their = reference(CONFIGS[name])
    decoder = ours(their, model_from_config(CONFIGS[name], "config.json"))
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(BOUNDS)]).view(BATCH, LENGTH)
    packed = decoder(tokens(), positions, torch.tensor(BOUNDS, dtype=torch.int32))
    assert (packed - their(tokens(), position_ids=positions, use_cache=False).logits).abs().max() <= LOGITS


@torch.no_grad()
def test_transformers_opens_what_is_written(said: Config, caplog: pytest.LogCaptureFixture) -> None:
    """To the same bits, without a word of warning, and with what the imported config said beside the network."""
    before = reference(said)
    base = {**said, "eos_token_id": [3, 4], "use_cache": False, "attention_dropout": 0.1}
    model = model_from_config(base, "config.json")
    for carried in (base, None):
        written = json.loads(json.dumps(config_of(model, dtype="float32", base=carried), allow_nan=False))
        assert model_from_config(written, "config.json") == model
        transformers.utils.logging.enable_propagation()
        config = transformers.AutoConfig.for_model(**written)
        transformers.utils.logging.disable_propagation()
        after = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
        after.load_state_dict(before.state_dict())
        assert torch.equal(after(tokens()).logits, before(tokens()).logits)
        assert (config.eos_token_id, config.use_cache) == (([3, 4], False) if carried else (None, True))
        assert type(after).__name__ == written["architectures"][0]
    # transformers asks for a key that its own phi3 of version 4 refuses.
    assert [record.message for record in caplog.records if "longrope" not in str(said)] == []
