"""Do the first steps on a card come to the same losses as on the CPU?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.tolerances import assert_losses_equal

pytestmark = pytest.mark.gpu

RUN = """
[model]
hidden_size = 256
intermediate_size = 512
num_hidden_layers = 4
num_attention_heads = 8
num_key_value_heads = 4
vocab_size = 257
[data]
train = ["text.txt"]
seq_len = 128
attend_across_documents = false
cache_dir = "cache"
[train]
steps = 20
sequences_per_step = 16
[learning_rate]
peak = 1e-3
[layout]
sequences_per_microbatch = 8
"""


def losses(folder: Path, name: str, env: dict[str, str]) -> list[float]:
    words = [sys.executable, "-m", "triax", "train", "run.toml", "--ranks", "1", "--run-dir", name]
    done = subprocess.run(words, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines]


def test_twenty_bf16_steps_on_one_card_equal_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "text.txt").write_text(Path(__file__).read_text() * 40)
    on_card = losses(tmp_path, "card", {})
    on_cpu = losses(tmp_path, "cpu", {"CUDA_VISIBLE_DEVICES": ""})
    assert len(on_card) == 20
    assert_losses_equal(on_card, on_cpu, "bf16")
