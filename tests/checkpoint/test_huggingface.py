"""Does the folder of a Hugging Face model become a checkpoint of the same network, and a hostile one nothing at all?"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.harness.configs import CONFIGS
from tests.harness.hf_models import edit, logits_of, make, save, tokens_of
from triax.checkpoint import huggingface
from triax.checkpoint.find import find_verified, model_of
from triax.checkpoint.hf_folder import listing, open_hf_folder
from triax.checkpoint.huggingface import import_folder
from triax.checkpoint.load import load
from triax.errors import BadInput, TriaxError
from triax.nn.decoder import Decoder
from triax.spec.huggingface import model_from_config
from triax.spec.weights import weights_table

ROOT = Path(__file__).parent.parent.parent

ONE_OF_EACH = (
    "llama, biases", "mistral, window", "qwen2, tied, one key/value head", "phi3", "gemma3", "olmo2", "mixtral",
    "qwen3_moe, biases, some layers dense, raw scores",
)  # fmt: skip


def decoder_of(checkpoint_folder: Path) -> Decoder:
    checkpoint = find_verified(checkpoint_folder)
    decoder = Decoder(model_of(checkpoint))
    load(checkpoint, {name: parameter.detach() for name, parameter in decoder.named_parameters()})
    return decoder


@torch.no_grad()
def logits_here(decoder: Decoder, tokens: Tensor) -> Tensor:
    logits: Tensor = decoder(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1))
    return logits


def check_import(name: str, folder: Path) -> None:
    model = make(name)
    import_folder(save(model, folder / "hf"), folder / "checkpoint")
    tokens = tokens_of(model)
    expected, found = logits_of(model, tokens), logits_here(decoder_of(folder / "checkpoint"), tokens)
    assert (found - expected).abs().max().item() <= 1e-5 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_an_imported_model_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    check_import(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ONE_OF_EACH])
def test_every_imported_model_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    check_import(name, tmp_path)


def test_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    model = make("phi3")
    import_folder(save(model, tmp_path / "hf"), tmp_path / "checkpoint")
    decoder, tokens = decoder_of(tmp_path / "checkpoint"), tokens_of(model)
    logits = decoder(tokens, torch.arange(tokens.shape[1]).expand(2, -1))
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    (logits * weight).sum().backward()
    (model(tokens).logits * weight).sum().backward()
    layer = model.model.layers[2]
    ours = decoder.layers["2"]
    fused = torch.cat([getattr(ours.self_attn, f"{one}_proj").weight.grad for one in "qkv"])
    torch.testing.assert_close(fused, layer.self_attn.qkv_proj.weight.grad, rtol=1e-4, atol=1e-4)
    gate_up = torch.cat([ours.mlp.gate_proj.weight.grad, ours.mlp.up_proj.weight.grad])
    torch.testing.assert_close(gate_up, layer.mlp.gate_up_proj.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        decoder.embed_tokens.weight.grad, model.model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-4
    )


def test_experts_stored_in_several_dtypes_are_refused(tmp_path: Path) -> None:
    """Those of one kind are one weight here, which has one dtype."""
    folder = save(make("mixtral"), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    save_file(tensors | {name: tensors[name].bfloat16()}, folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"stores the experts of layers.1.mlp.experts.down_proj as BF16 and F32"):
        open_hf_folder(folder)


def test_a_missing_and_a_misshapen_expert_are_named(tmp_path: Path) -> None:
    folder = save(make("qwen3_moe"), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    save_file(tensors | {name: tensors[name][:5].contiguous()}, folder / "model.safetensors")
    with pytest.raises(BadInput) as told:
        open_hf_folder(folder)
    assert "it lacks model.layers.1.mlp.experts.3.up_proj.weight" in str(told.value)
    assert f"{name} has shape (5, 24) instead of (12, 24)" in str(told.value)


def test_shards_bits_and_dtypes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama, biases").bfloat16()
    model.model.norm.float()
    folder = save(model, tmp_path / "hf", shard_bytes=6000)
    assert len(list(folder.glob("*.safetensors"))) > 4
    monkeypatch.setattr(huggingface, "_MOST_BYTES_OF_A_FILE", 10_000)
    written = import_folder(folder, tmp_path / "checkpoint")
    assert written.num_files > 2
    manifest = find_verified(tmp_path / "checkpoint").manifest
    assert len(manifest.files) == written.num_files
    assert (manifest.step, manifest.extra["step"]) == (0, 0)
    assert {name: entry.dtype for name, entry in manifest.tensors.items() if entry.dtype != "BF16"} == {
        "norm.weight": "F32"
    }
    decoder = decoder_of(tmp_path / "checkpoint")
    for name, parameter in decoder.named_parameters():
        assert torch.equal(
            parameter, model.get_parameter(f"model.{name}" if name != "lm_head.weight" else name).float()
        )


# --- what goes along


def with_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("free")
    return folder


def test_tokenizer_template_settings_and_licence_go_along(tmp_path: Path) -> None:
    folder = with_tokenizer(save(make("llama"), tmp_path / "hf"))
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    written = import_folder(folder, tmp_path / "checkpoint")
    there = tmp_path / "checkpoint" / "huggingface"
    assert sorted(path.name for path in there.iterdir()) == sorted(written.carried)
    assert set(written.carried) == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "LICENSE",
    }  # fmt: skip
    assert (there / "chat_template.jinja").read_text() == "{{ messages }}"


def test_the_cache_of_the_hub_is_made_of_links_and_is_read(tmp_path: Path) -> None:
    source = with_tokenizer(save(make("llama"), tmp_path / "hf"))
    snapshot, blobs = tmp_path / "models--x--y" / "snapshots" / "abc", tmp_path / "models--x--y" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, path in enumerate(sorted(source.iterdir())):
        shutil.copy(path, blobs / str(index))
        (snapshot / path.name).symlink_to(f"../../blobs/{index}")
    import_folder(snapshot, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint" / "huggingface" / "config.json").is_symlink()


# --- what is refused


def hf_folder(folder: Path) -> Path:
    return save(make("llama"), folder / "hf")


def tied_folder(folder: Path) -> Path:
    return save(make("llama, tied"), folder / "hf")


def sharded_folder(folder: Path) -> Path:
    return save(make("llama"), folder / "hf", shard_bytes=20_000)


def tensors(changed: dict[str, Tensor | None]) -> Callable[[Path], None]:
    """Change tensors of the folder; None removes one."""

    def apply(folder: Path) -> None:
        said = load_file(folder / "model.safetensors") | changed
        save_file({name: one for name, one in said.items() if one is not None}, folder / "model.safetensors")

    return apply


def configure(**changed: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **changed)


def index(**changed: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        said = json.loads(path.read_text())
        said["weight_map"] |= changed
        path.write_text(json.dumps(said))

    return apply


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")


def cut(name: str, count: int) -> Callable[[Path], None]:
    """Cut bytes off the end of a file."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - count)


def write(name: str, text: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_text(text)

    return apply


def linked(name: str, to: Path) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return apply


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def two_sets(folder: Path) -> None:
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")


NORM = "model.layers.2.input_layernorm.weight"
UP = "model.layers.{}.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"

REFUSED: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None], str]] = {
    "pickle": (hf_folder, pickled, "pytorch_model.bin, a pickle, .*is never opened here: convert it once"),
    "no weights": (hf_folder, without("model.safetensors"), "holds neither model.safetensors nor"),
    "no config": (hf_folder, without("config.json"), "holds no config.json"),
    "missing": (
        hf_folder, tensors({NORM: None, **{UP.format(layer): None for layer in (0, 1, 3)}}),
        r"lacks model.layers.\{0-1,3\}.mlp.up_proj.weight, model.layers.2.input_layernorm.weight\.",
    ),
    "surplus": (
        hf_folder, tensors({f"model.layers.{layer}.mlp.up_proj.bias": torch.ones(3) for layer in range(4)}),
        r"has model.layers.\{0-3\}.mlp.up_proj.bias besides\.",
    ),
    "shape": (
        hf_folder, tensors({UP.format(0): torch.ones(40, 25), UP.format(1): torch.ones(40, 25)}),
        r"model.layers.\{0-1\}.mlp.up_proj.weight has shape \(40, 25\) instead of \(40, 24\)",
    ),
    "config of another size": (hf_folder, configure(intermediate_size=41), r"\(40, 24\) instead of \(41, 24\)"),
    "everything at once": (
        hf_folder, tensors({NORM: None, "x": torch.ones(1), UP.format(0): torch.ones(1)}),
        "lacks .*; it has x besides; model",
    ),
    "no head": (hf_folder, tensors({"lm_head.weight": None}), "lacks lm_head.weight .*tie_word_embeddings"),
    "another head": (tied_folder, tensors({"lm_head.weight": torch.ones(61, 24)}), "holds another lm_head.weight"),
    "dtype": (
        hf_folder, tensors({NORM: torch.ones(24).to(torch.float8_e4m3fn)}),
        "stores model.layers.2.input_layernorm.weight as F8_E4M3, and weights are one of",
    ),
    "architecture": (hf_folder, configure(model_type="lama", architectures=["LamaForCausalLM"]), "nearest is llama"),
    "quantised": (hf_folder, configure(quantization_config={"quant_method": "gptq"}), "weights are quantised"),
    "truncated": (hf_folder, cut("model.safetensors", 10), "was cut short"),
    "config cut short": (hf_folder, cut("config.json", 50), "config.json is not valid JSON"),
    "link of weights": (hf_folder, linked("model.safetensors", Path("/etc/hostname")), "is a link to /etc/hostname"),
    "link of a tokenizer": (hf_folder, linked("tokenizer.json", Path("/etc/passwd")), "link to /etc/passwd, outside"),
    "circle of links": (hf_folder, linked("tokenizer.json", Path("tokenizer.json")), "link that leads nowhere"),
    "path upwards": (sharded_folder, index(a="../model.safetensors"), "only files of the folder itself"),
    "absolute path": (sharded_folder, index(a="/etc/hostname"), "only files of the folder itself"),
    "backslash": (sharded_folder, index(a="..\\x.safetensors"), "only files of the folder itself"),
    "name too long": (sharded_folder, index(a="x" * 5000 + ".safetensors"), "only files of the folder itself"),
    "pickle in the index": (sharded_folder, index(a="x.bin"), "only safetensors files are opened"),
    "shard missing": (sharded_folder, index(a="model-7.safetensors"), "model-7.safetensors, which .* is missing"),
    "index promises too much": (
        sharded_folder, index(a="model-00001-of-00005.safetensors"), "puts a into .*, which does not hold it",
    ),
    "index is a list": (sharded_folder, write(INDEX, "[]"), "must hold an object"),
    "index is empty": (
        sharded_folder, write(INDEX, '{"weight_map": {}}'), "no weight_map",
    ),
    "index twice": (
        sharded_folder, write(INDEX, '{"weight_map": {"a": "b", "a": "c"}}'),
        "'a' stands twice",
    ),
    "two sets": (sharded_folder, two_sets, "holds two sets of weights"),
    "git lfs": (
        hf_folder, write("model.safetensors", "version https://git-lfs"),
        "git lfs pull",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_is_wrong_or_hostile_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    build, spoil, sentence = REFUSED[name]
    folder = build(tmp_path)
    spoil(folder)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadInput, match=sentence) as told:
        import_folder(folder, tmp_path / "checkpoint")
    assert "\n" not in str(told.value)
    assert sorted(tmp_path.iterdir()) == before, "something half-written was left behind"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a folder in shards."""
    folder = save(make("phi3"), tmp_path_factory.mktemp("whole"), shard_bytes=20_000)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@given(st.data())
def test_damage_anywhere_in_what_is_read_first_is_a_sentence(
    whole: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Replace a few bytes of config.json, the index or a header: the folder is refused, or still of the model."""
    folder = tmp_path_factory.mktemp("damaged")
    name = data.draw(st.sampled_from(sorted(name for name in whole if name != "generation_config.json")))
    at = data.draw(st.integers(0, min(len(whole[name]), 3000) - 1))
    new = data.draw(st.binary(max_size=4) | st.sampled_from([b'"', b"{", b"}", b"-", b"9" * 30, b"null", b"../"]))
    taken = data.draw(st.integers(0, 4))
    for one, content in whole.items():
        damaged = content[:at] + new + content[at + taken :] if one == name else content
        (folder / one).write_bytes(damaged)
    refusal = ""
    try:
        found = open_hf_folder(folder)
    except BadInput as error:
        refusal = str(error)
    else:
        assert found.model.num_hidden_layers == 4
        parts = [part for rows in found.rows.values() for part in rows.parts]
        assert {part.stored.path.parent for part in parts} == {folder.resolve()}
    assert len(refusal) < 3000
    shutil.rmtree(folder)


def test_the_index_may_not_leave_out_what_a_file_holds(tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path)
    said = json.loads((folder / INDEX).read_text())
    del said["weight_map"][NORM]
    (folder / INDEX).write_text(json.dumps(said))
    with pytest.raises(BadInput, match=f"holds {NORM}, which .* does not put there"):
        import_folder(folder, tmp_path / "checkpoint")


def test_buffers_of_rotary_positions_and_an_equal_head_are_tolerated(tmp_path: Path) -> None:
    folder = tied_folder(tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    tensors(
        {"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    )(folder)  # fmt: skip
    import_folder(folder, tmp_path / "checkpoint")
    assert "lm_head.weight" not in find_verified(tmp_path / "checkpoint").manifest.tensors


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    import_folder(folder, tmp_path / "empty")
    for taken in (tmp_path / "empty", folder, folder / "config.json"):
        with pytest.raises(BadInput, match="is there already, and nothing is overwritten"):
            import_folder(folder, taken)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("triax.checkpoint.disk.free_bytes", lambda _: 1000)
        with pytest.raises(BadInput, match=r"disk full: it needs .* KiB in .* and 1000 B are free"):
            import_folder(folder, tmp_path / "new" / "checkpoint")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "commit", fail)
    with pytest.raises(TriaxError, match="could not be written: no space left on device; nothing of it was left"):
        import_folder(folder, tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["b", "a"], "a, b"),
        ([f"layers.{layer}.x" for layer in range(12)], "layers.{0-11}.x"),
        (["layers.7.x"], "layers.7.x"),
        (["layers.3.x", "layers.5.x", "layers.4.x", "layers.9.x", "layers.4.y"], "layers.{3-5,9}.x, layers.4.y"),
        (["layers.01.x", "layers.1.x"], "layers.01.x, layers.1.x"),
    ],
)
def test_names_are_listed_all_and_shortly(names: list[str], text: str) -> None:
    assert listing(names) == text


def test_a_long_list_of_unlike_names_ends(tmp_path: Path) -> None:
    assert len(listing([f"n{'x' * (index % 40)}{index}" for index in range(10_000)])) < 1700


# --- memory


def test_neither_way_needs_memory_for_the_model(tmp_path: Path) -> None:
    """Through a process pass 190 MB of weights: in, by a buffer; out, by a few of the largest tensor's 4 MB."""
    config = {**CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    table = weights_table(model_from_config(config, ""))
    save_file({weight.hf_name: torch.zeros(weight.shape) for weight in table}, folder / "model.safetensors")
    assert (folder / "model.safetensors").stat().st_size > 180e6
    assert peak_growth("from triax.checkpoint.huggingface import import_folder as f", folder, tmp_path / "in") < 40e6
    export = "from triax.verify.export import export_checkpoint as f"
    assert peak_growth(export, tmp_path / "in", tmp_path / "out") < 100e6


def peak_growth(importing: str, *paths: Path) -> int:
    """Return by how many bytes a fresh process grows while it calls the function ``f`` that ``importing`` imports."""
    code = (
        f"import resource, sys, torch; from pathlib import Path; {importing}\n"
        "torch.nn.functional.linear(torch.ones(9, 9), torch.ones(9, 9))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "f(*map(Path, sys.argv[1:]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", code, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) * 1024
