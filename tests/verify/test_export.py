"""Is an exported folder the network that was trained, for transformers too, and is nothing there where it is not?"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoTokenizer

from tests.harness.configs import CONFIGS
from tests.harness.hf_models import continued, logits_of, make, opened, save, tokens_of
from tests.harness.ranks import run_ranks
from triax.checkpoint import huggingface
from triax.checkpoint.find import find_verified, model_of
from triax.checkpoint.huggingface import import_folder
from triax.checkpoint.load import load
from triax.checkpoint.save import CheckpointWriter
from triax.errors import BadInput, TriaxError
from triax.nn.decoder import Decoder
from triax.spec.huggingface import config_of, tensor_sources
from triax.spec.model import ModelSpec
from triax.verify.export import export_checkpoint

ONE_OF_EACH = (
    "llama, yarn", "mistral, window", "qwen2, tied, one key/value head", "qwen3, biases, tied, head of 10", "smollm3",
    "granite", "phi3, longrope of a part", "gemma3", "olmo2", "mixtral",
    "qwen3_moe, biases, some layers dense, raw scores",
)  # fmt: skip


def there_and_back(name: str, folder: Path) -> tuple[Any, Any]:
    """Return a model of transformers, and what it makes of the folder that came back."""
    model = make(name)
    import_folder(save(model, folder / "in"), folder / "checkpoint")
    made = export_checkpoint(folder / "checkpoint", folder / "out")
    assert (made.dtype, made.difference, made.rounding) == ("fp32", 0.0, 0.0)
    return model, opened(folder / "out")


def check_round_trip(name: str, folder: Path) -> None:
    model, back = there_and_back(name, folder)
    before, after = load_file(folder / "in" / "model.safetensors"), load_file(folder / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    tokens = tokens_of(model)
    expected = logits_of(model, tokens)
    assert (logits_of(back, tokens) - expected).abs().max().item() <= 1e-5 * max(1.0, expected.abs().max().item())
    assert continued(back, tokens) == continued(model, tokens)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_model_comes_back_as_it_went_in(name: str, tmp_path: Path) -> None:
    check_round_trip(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ONE_OF_EACH])
def test_every_model_comes_back_as_it_went_in(name: str, tmp_path: Path) -> None:
    check_round_trip(name, tmp_path)


def test_shards_have_an_index_that_transformers_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "_MOST_BYTES_OF_A_FILE", 20_000)
    model, back = there_and_back("llama", tmp_path)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(one.numel() * 4 for one in model.state_dict().values())
    for file in files:
        assert set(load_file(tmp_path / "out" / file)) == {
            name for name, of_file in index["weight_map"].items() if of_file == file
        }
    tokens = tokens_of(model)
    assert torch.equal(logits_of(back, tokens), logits_of(model, tokens))


def save_sharded(rank: int, world: int, start: str, folder: str) -> None:
    """Load a checkpoint into weights sharded over all ranks, and save them again with a state of an optimizer."""
    checkpoint = find_verified(Path(start))
    with torch.device("meta"):
        decoder = Decoder(model_of(checkpoint))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    for layer in decoder.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    decoder.to_empty(device="cpu")
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    load(checkpoint, weights)
    state = {f"optimizer.exp_avg.{name}": torch.full_like(weight, 3.0) for name, weight in weights.items()}
    writer = CheckpointWriter(Path(folder), run="toy")
    outcome = writer.save(5, weights | state, checkpoint.manifest.extra, wait=True).outcome
    assert outcome is not None
    assert outcome.ok, outcome.reason


def assert_three_ranks_export_what_came_in(model: Any, folder: Path) -> None:
    """Every tensor of ``model``, imported, saved by three ranks that share it, and exported, has its bits."""
    import_folder(save(model, folder / "in"), folder / "start")
    run_ranks(save_sharded, 3, str(folder / "start"), str(folder / "run" / "checkpoints"))
    export_checkpoint(folder / "run", folder / "out", "fp32")
    before, after = load_file(folder / "in" / "model.safetensors"), load_file(folder / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_fused_weights_of_several_ranks_are_joined(tmp_path: Path) -> None:
    """phi3: queries, keys and values are one tensor outside, and three that are each cut over three ranks inside."""
    assert_three_ranks_export_what_came_in(make("phi3"), tmp_path)


def test_experts_of_several_ranks_become_tensors_of_their_own(tmp_path: Path) -> None:
    """Rows of all experts together are cut over three ranks, in the middle of experts too."""
    assert_three_ranks_export_what_came_in(make("mixtral", num_local_experts=4), tmp_path)


def test_what_rounding_changes_is_measured(tmp_path: Path) -> None:
    model = make("llama")
    import_folder(save(model, tmp_path / "in"), tmp_path / "checkpoint")
    made = export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", "bf16")
    assert made.difference == 0
    assert 1e-5 < made.rounding < 0.1 * made.largest_logit
    assert made.loss != made.exported_loss
    assert abs(made.loss - made.exported_loss) < made.rounding
    assert {one.dtype for one in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_model_leaves_in_the_dtype_it_came_in(tmp_path: Path) -> None:
    model = make("llama").half()
    import_folder(save(model, tmp_path / "in"), tmp_path / "checkpoint")
    assert export_checkpoint(tmp_path / "checkpoint", tmp_path / "out").dtype == "fp16"
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(back[name], one) for name, one in model.state_dict().items())


# --- what goes along


def checkpoint_of(model: ModelSpec, folder: Path, tokenizer: str | None, **spoilt: torch.Tensor) -> Path:
    """Save random weights as a run does."""
    torch.manual_seed(0)
    weights = {name: torch.randn_like(parameter) * 0.2 for name, parameter in Decoder(model).named_parameters()}
    weights |= {name.replace("__", "."): tensor for name, tensor in spoilt.items()}
    extra = {"model": model.model_dump(mode="json"), "tokenizer": tokenizer, "seq_len": 32}
    outcome = CheckpointWriter(folder / "checkpoints", run="toy").save(7, weights, extra, wait=True).outcome
    assert outcome is not None
    assert outcome.ok, outcome.reason
    return folder


BYTES = ModelSpec(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=257)


def test_a_model_of_bytes_gets_a_tokenizer_that_transformers_opens(tmp_path: Path) -> None:
    made = export_checkpoint(checkpoint_of(BYTES, tmp_path / "run", "bytes"), tmp_path / "out", "fp32")
    assert made.text == "of text, by bytes"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Grüße, 12 <b>\n\n\tdef f(x):"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.eos_token_id == 256
    assert opened(tmp_path / "out").generation_config.eos_token_id == 256


def test_tokenizer_template_and_token_ids_of_the_import_come_out_again(tmp_path: Path) -> None:
    model = make("llama")
    model.config.eos_token_id, model.generation_config.eos_token_id = 7, [7, 9]
    folder = save(model, tmp_path / "in")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    import_folder(folder, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [7, 9]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 7


# --- what must not come out


def test_a_wrong_order_of_fused_rows_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_folder(save(make("phi3"), tmp_path / "in"), tmp_path / "checkpoint")

    def swapped(model: ModelSpec) -> dict[str, Any]:
        sources = tensor_sources(model)
        key, value = (f"layers.2.self_attn.{one}_proj.weight" for one in "kv")
        sources[key], sources[value] = sources[value], sources[key]
        return sources

    monkeypatch.setattr(huggingface, "tensor_sources", swapped)  # on the way out alone
    check_refused(tmp_path, "what layer 2 gives differs by")


def test_a_config_of_another_network_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_folder(save(make("llama, yarn"), tmp_path / "in"), tmp_path / "checkpoint")

    def without_rope(*args: Any, **kwargs: Any) -> dict[str, Any]:
        said = config_of(*args, **kwargs)
        return {key: value for key, value in said.items() if not key.startswith("rope")}

    monkeypatch.setattr(huggingface, "config_of", without_rope)
    check_refused(tmp_path, "what layer 0 gives differs by")


def check_refused(folder: Path, sentence: str) -> None:
    with pytest.raises(TriaxError, match=sentence) as told:
        export_checkpoint(folder / "checkpoint", folder / "out")
    assert told.value.exit_code == 1
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", "in"]


@pytest.mark.parametrize(
    ("value", "dtype", "sentence"),
    [
        (float("nan"), "fp32", "layers.1.mlp.up_proj.weight of .* holds values that are not finite"),
        (1e5, "fp16", r"layers.1.mlp.up_proj.weight holds 1e\+05, too large for torch.float16: export as bf16"),
    ],
)
def test_numbers_that_cannot_be_written_are_told(tmp_path: Path, value: float, dtype: Any, sentence: str) -> None:
    weight = torch.zeros(24, 16)
    weight[3, 5] = value
    run = checkpoint_of(BYTES, tmp_path / "run", "bytes", layers__1__mlp__up_proj__weight=weight)
    with pytest.raises(TriaxError, match=sentence):
        export_checkpoint(run, tmp_path / "out", dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_exported_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    run = checkpoint_of(BYTES, tmp_path / "run", "bytes")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    nobodys = BYTES.model_copy(update={"norm_placement": "both"})
    foreign = checkpoint_of(nobodys, tmp_path / "foreign", "bytes")
    for source, target, sentence in (
        (run, tmp_path / "taken", "is there already, and nothing is overwritten"),
        (tmp_path / "nowhere", tmp_path / "out", "is no folder"),
        (tmp_path / "taken", tmp_path / "out", "holds no finished checkpoint"),
        (foreign, tmp_path / "out", "a llama of Hugging Face's cannot have"),
    ):
        with pytest.raises(BadInput, match=sentence):
            export_checkpoint(source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "run", "taken"]
