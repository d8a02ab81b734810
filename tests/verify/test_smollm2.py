"""Does a real model come in, read and write as transformers lets it, train on, and leave as itself?

Needs the folder that `make smollm2` fetches once; without it, every test here is skipped.
"""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.harness.hf_models import opened
from tests.harness.runs import Told, series, start
from tests.harness.toy import lay
from triax.checkpoint.huggingface import import_folder
from triax.data.tokenizer import load_tokenizer
from triax.generate.checkpoint import open_writer
from triax.generate.sample import Sampling
from triax.spec.load import load_run
from triax.verify.export import export_checkpoint

ROOT = Path(__file__).parent.parent.parent
SMOLLM2 = ROOT / ".cache" / "smollm2"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (SMOLLM2 / "config.json").exists(), reason="needs .cache/smollm2: make smollm2"),
]

TEXT = (ROOT / "LICENSE").read_text(encoding="utf-8").partition("Definitions.")[2]
STORY = """\
The ferry was late again. Marta stood at the end of the pier with her collar up and counted the lights on the other side
of the fjord: nine, then eight, then nine. Somewhere behind her a door banged in the wind. When the boat came round the
point at last, its horn sounded twice, which meant that it would not stop.
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the model."""
    folder = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    written = import_folder(SMOLLM2, folder)
    assert written.num_parameters == 134_515_008
    assert {"tokenizer.json", "tokenizer_config.json", "config.json", "LICENSE"} <= set(written.carried)
    return folder


def text_tokens(count: int = 256) -> Tensor:
    (ids,) = load_tokenizer(str(SMOLLM2)).encode_batch([TEXT])
    return torch.tensor(ids[:count].astype("int64")).unsqueeze(0)


def loss_of(logits_BSV: Tensor, tokens_BS: Tensor) -> float:
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten()).item()


@torch.no_grad()
def test_it_reads_as_transformers_lets_it(imported: Path) -> None:
    tokens = text_tokens()
    assert AutoTokenizer.from_pretrained(SMOLLM2)(TEXT).input_ids[:256] == tokens[0].tolist()
    reference = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32, attn_implementation="eager").eval()
    expected = reference(tokens).logits
    found = open_writer(imported).network(tokens, torch.arange(tokens.shape[1]).unsqueeze(0))
    assert abs(loss_of(found, tokens) - loss_of(expected, tokens)) <= 1e-4
    assert (found - expected).abs().max().item() <= 1e-5 * expected.abs().max().item()
    assert 1 < loss_of(found, tokens) < 4  # it has learned English; guessing would give 10.8


def test_it_writes_sense(imported: Path) -> None:
    written = "".join(open_writer(imported).write("The capital of France is", 3, Sampling(temperature=0)))
    assert written.startswith("The capital of France is Paris.")


def test_it_trains_on_and_leaves_as_itself(imported: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(STORY * 20)
    (tmp_path / "run.toml").write_text(
        f'[model]\ninit = "{imported}"\n[data]\ntrain = ["corpus.txt"]\nseq_len = 64\ncache_dir = "cache"\n'
        "[train]\nsteps = 3\nsequences_per_step = 2\n[learning_rate]\nschedule = 'constant'\npeak = 1e-4\n"
        "[precision]\ncompute = 'fp32'\n[watch]\ntensorboard = false\n"
    )
    run = load_run(tmp_path / "run.toml")
    assert start(run, lay(run, 1, dp_shard=2, zero=3), tmp_path / "run", timeout_s=600) == [Told()] * 2
    losses = series(tmp_path / "run", "train/loss")
    assert losses[0] < 6, "training began with other weights than those imported"
    assert losses[-1] < losses[0]
    made = export_checkpoint(tmp_path / "run", tmp_path / "out", "fp32")
    assert made.difference == made.rounding == 0
    tokens = text_tokens(128)
    with torch.no_grad():
        back = opened(tmp_path / "out")(tokens).logits
        here = open_writer(tmp_path / "run").network(tokens, torch.arange(128).unsqueeze(0))
    assert math.isfinite(loss_of(back, tokens))
    assert (here - back).abs().max().item() <= 1e-5 * back.abs().max().item()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT).input_ids[:128] == tokens[0].tolist()
    as_bf16 = export_checkpoint(tmp_path / "run", tmp_path / "bf16")
    assert (as_bf16.dtype, as_bf16.difference) == ("bf16", 0)
    assert 0 < as_bf16.rounding < 0.1 * as_bf16.largest_logit
    assert abs(as_bf16.exported_loss - as_bf16.loss) < 0.05
