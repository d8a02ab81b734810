"""Does a run begin with the weights that [model] init names, and does what came with them go along to an export?"""

import json
from pathlib import Path

import pytest
import torch

from tests.harness.hf_models import make, opened, save
from tests.harness.runs import Told, saved_weights, start, write_corpus
from tests.harness.toy import lay
from triax.checkpoint.find import find_verified
from triax.checkpoint.huggingface import import_folder
from triax.checkpoint.load import read_tensor
from triax.data.byte_level import byte_tokenizer_json
from triax.spec.load import load_run
from triax.spec.run import Run
from triax.verify.export import export_checkpoint

REST = """
[data]
train = ["corpus.jsonl"]
seq_len = 32
cache_dir = "cache"
[train]
steps = 2
sequences_per_step = 4
[precision]
compute = "fp32"
[learning_rate]
schedule = "constant"
peak = 1e-30
[checkpoint]
every_steps = 1
background = false
[watch]
tensorboard = false
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a checkpoint imported from a Hugging Face folder with a tokenizer, and a corpus."""
    model = make("llama", vocab_size=300, max_position_embeddings=64)
    hf = save(model, tmp_path / "hf")
    (hf / "tokenizer.json").write_text(byte_tokenizer_json())
    (hf / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    import_folder(hf, tmp_path / "start")
    write_corpus(tmp_path)
    return tmp_path


def read(folder: Path, model: str = 'init = "start"', rest: str = REST) -> Run:
    (folder / "run.toml").write_text(f"[model]\n{model}\n{rest}")
    return load_run(folder / "run.toml")


def test_a_run_begins_with_these_weights_and_tells_which(folder: Path) -> None:
    run = read(folder)
    layout = lay(run, 1, dp_shard=2, zero=3)
    # Weights of these sizes guess badly: the check of random guessing would have stopped them.
    assert start(run, layout, folder / "run") == [Told()] * 2
    begun = find_verified(folder / "start")
    weights = {name: one for name, one in saved_weights(folder / "run", run).items() if "optimizer" not in name}
    assert weights.keys() == begun.manifest.tensors.keys()
    # With a learning rate of nothing, two steps leave every bit as it was.
    assert [name for name, one in weights.items() if not torch.equal(one, read_tensor(begun, name))] == []
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    assert next(event for event in events if event["kind"] == "start")["detail"]["init"] == begun.digest
    assert find_verified(folder / "run").manifest.extra["init"] == begun.digest


def test_a_resumed_run_still_knows_what_it_began_with(folder: Path) -> None:
    run = read(folder)
    layout = lay(run, 1, dp_shard=2, zero=3)
    assert start(run, layout, folder / "run", killed_at=1)[0] == Told("killed")
    digest = find_verified(folder / "start").digest
    (folder / "start" / "manifest.json").unlink()
    assert start(run, layout, folder / "run") == [Told()] * 2
    assert find_verified(folder / "run").manifest.extra["init"] == digest


def test_the_newest_checkpoint_of_a_run_is_begun_with_and_its_optimizer_is_not(folder: Path) -> None:
    first = read(folder, rest=REST.replace("1e-30", "1e-3"))
    start(first, lay(first, 1, dp_shard=2, zero=2), folder / "first")
    second = read(folder, 'init = "first"')
    assert second.model == first.model
    start(second, lay(second, 1), folder / "second")
    before, after = saved_weights(folder / "first", first), saved_weights(folder / "second", second)
    assert all(torch.equal(after[name], before[name]) for name in before if "optimizer" not in name)
    assert after["optimizer.step.norm.weight"].item() == 2
    assert not torch.equal(after["optimizer.exp_avg.norm.weight"], before["optimizer.exp_avg.norm.weight"])


def test_other_dimensions_are_refused_on_every_rank(folder: Path) -> None:
    run = read(folder, 'init = "start"\nintermediate_size = 41')
    told = start(run, lay(run, 1, dp_shard=2, zero=3), folder / "run")
    assert {one.error for one in told} == {"BadInput"}
    assert "up_proj.weight has shape (40, 24) in it and (41, 24) here" in told[0].message


def test_what_came_with_the_weights_leaves_with_the_trained_ones(folder: Path) -> None:
    run = read(folder)
    assert run.data.tokenizer == str(folder / "start" / "huggingface")
    start(run, lay(run, 1, dp_shard=2, zero=3), folder / "run")
    for gone in ("start", "hf"):
        (folder / gone).rename(folder / f"no {gone}")
    made = export_checkpoint(folder / "run", folder / "out")
    assert made.dtype == "fp32"  # as the imported folder
    assert {path.name for path in (folder / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert made.text.startswith("of text, by ")
    opened(folder / "out")
