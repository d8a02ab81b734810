"""Which run do the tests of ``triax verify`` start from?"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.commands import Said, fork_workers, triax

RUN = """
[model]
hidden_size = 64
intermediate_size = 96
num_hidden_layers = 9
num_attention_heads = 8
num_key_value_heads = 4
vocab_size = 257
tie_word_embeddings = true

[data]
train = ["corpus.txt"]
seq_len = 64
attend_across_documents = false

[train]
steps = 1000
sequences_per_step = 48
timeout_s = 30.0

[optimizer]
max_grad_norm = 0.1

[learning_rate]
peak = 1e-3
warmup_steps = 100
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    words = "the river rose in the night and by morning the lower fields were under water "
    (tmp_path / "corpus.txt").write_text(words * 200)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture
def verify(run_file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """``verify(layout, *words)``: the command on the run above, with ranks that know what the test has planted."""
    fork_workers(monkeypatch)
    return lambda layout, *words: triax(["verify", str(run_file), "--layout", layout, *words], capfd)
