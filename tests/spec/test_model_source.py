"""Do a config.json and a checkpoint give a run its dimensions, and a wrong path a sentence?"""

import json
from pathlib import Path
from typing import Any

import pytest

from triax.errors import BadInput
from triax.spec.load import load_run
from triax.spec.model import ModelSpec
from triax.spec.model_source import as_run_file
from triax.spec.run import Run

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
    "rope_theta": 5000.0, "tie_word_embeddings": True,
}  # fmt: skip
MODEL = ModelSpec(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=300,
    layers_without_rope=(1,),
)  # fmt: skip
REST = '[data]\ntrain = ["text"]\nseq_len = 32\n[train]\nsteps = 2\nsequences_per_step = 4\n'


def read(folder: Path, model: str, rest: str = REST, overrides: tuple[str, ...] = ()) -> Run:
    (folder / "run.toml").write_text(f"[model]\n{model}\n{rest}")
    return load_run(folder / "run.toml", overrides)


def checkpoint(folder: Path, **extra: Any) -> Path:
    folder.mkdir(parents=True)
    said = {"model": MODEL.model_dump(mode="json"), "tokenizer": "bytes", **extra}
    (folder / "manifest.json").write_text(json.dumps({"format": "triax-checkpoint", "extra": said}))
    return folder


@pytest.mark.parametrize("said", ["hf", "hf/config.json"])
def test_a_config_gives_dimensions_and_keys_beside_it_count_more(tmp_path: Path, said: str) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    run = read(tmp_path, f'config = "{said}"\nnum_hidden_layers = 1')
    sizes = (run.model.hidden_size, run.model.num_hidden_layers, run.model.rope_theta, run.model.tie_word_embeddings)
    assert sizes == (32, 1, 5000.0, True)
    assert run.init is None


def test_a_checkpoint_gives_dimensions_and_tokenizer(tmp_path: Path) -> None:
    there = checkpoint(tmp_path / "start")
    run = read(tmp_path, 'init = "start"')
    assert (run.model, run.init, run.data.tokenizer) == (MODEL, str(there), "bytes")
    (there / "huggingface").mkdir()
    (there / "huggingface" / "tokenizer.json").write_text("{}")
    (there / "manifest.json").write_text(json.dumps({"extra": {"model": MODEL.model_dump(mode="json")}}))
    assert read(tmp_path, 'init = "start"').data.tokenizer == str(there / "huggingface")
    said = REST.replace("seq_len", 'tokenizer = "bytes"\nseq_len')
    assert read(tmp_path, 'init = "start"', said).data.tokenizer == "bytes"


def test_a_run_gives_its_newest_checkpoint(tmp_path: Path) -> None:
    for name, layers in (("step-00000009", 3), ("step-00000010", 4), ("step-00000010-1", 5), ("step-00000011", None)):
        folder = checkpoint(
            tmp_path / "run" / "checkpoints" / name,
            model={**MODEL.model_dump(mode="json"), "num_hidden_layers": layers},
        )
        if layers is None:
            (folder / "manifest.json").unlink()
    assert read(tmp_path, "", overrides=(f"model.init={tmp_path}/run",)).model.num_hidden_layers == 5


def test_a_config_comes_before_the_dimensions_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path / "start")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    run = read(tmp_path, 'config = "config.json"\ninit = "start"')
    assert (run.model.hidden_size, run.init) == (32, str(tmp_path / "start"))


def test_init_is_no_part_of_the_fingerprint_and_is_written_where_it_is_read(tmp_path: Path) -> None:
    checkpoint(tmp_path / "start")
    run = read(tmp_path, 'init = "start"')
    assert run.fingerprint == run.model_copy(update={"init": None}).fingerprint
    said = as_run_file(run.model_dump(mode="json"))
    assert said["model"]["init"] == run.init
    assert "init" not in said


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ('init = "nowhere"', "nowhere holds no checkpoint"),
        ('init = "hf"', "hf is a Hugging Face folder: make a checkpoint of it once"),
        ('init = "bare"', "bare does not say which model it is of"),
        ('init = "torn"', "torn/manifest.json is not valid JSON"),
        (f'init = "{"x" * 5000}"', "holds no checkpoint"),
        (f'config = "{"x" * 5000}"', "cannot be read"),
        ("init = 3", "model.init = 3 cannot be: use a path in quotes"),
        ('config = "nowhere"', "nowhere does not exist"),
        ('config = "bare"', "bare/config.json does not exist"),
        ('config = ""', "model.config = '' cannot be"),
    ],
)
def test_a_path_without_a_model_is_told_in_a_sentence(tmp_path: Path, model: str, sentence: str) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    checkpoint(tmp_path / "bare", model=None)
    (checkpoint(tmp_path / "torn") / "manifest.json").write_text("{")
    with pytest.raises(BadInput, match=sentence):
        read(tmp_path, model)
