"""Which small runs do the tests train, on which made-up sequences?"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run

SEQ_LEN = 12

ODD = ModelSpec(
    hidden_size=24, intermediate_size=37, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
    vocab_size=61, tie_word_embeddings=True,
)  # fmt: skip
"""Grouped heads, a head width of its own, tied embeddings, sizes that divide by nothing."""

EVEN = ModelSpec(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
)  # fmt: skip
"""Every dim divides by eight: bytes can be counted without padding."""


def toy_run(model: ModelSpec = ODD, **sections: dict[str, Any]) -> Run:
    """Return a run of ``model`` on made-up data; ``sections`` override keys of sections, as in train={"steps": 2}."""
    said: dict[str, dict[str, Any]] = {
        "data": {"train": ("nowhere",), "seq_len": SEQ_LEN},
        "train": {"steps": 4, "sequences_per_step": 16},
        "learning_rate": {"schedule": "constant", "peak": 1e-2},
        "precision": {"compute": "fp64", "master": "fp64", "reduce": "fp64"},
        "optimizer": {"max_grad_norm": 0.5},
    }
    for name, keys in sections.items():
        said[name] = {**said.get(name, {}), **keys}
    return Run.model_validate({"model": model, **said})


def lay(run: Run, sequences_per_microbatch: int = 1, **degrees: Any) -> Layout:
    """Return the layout of ``degrees`` whose microbatches make up a step of ``run``."""
    data_ranks = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    microbatches = run.sequences_per_step // data_ranks // sequences_per_microbatch
    layout = Layout(microbatches=microbatches, sequences_per_microbatch=sequences_per_microbatch, **degrees)
    assert layout.sequences_per_step == run.sequences_per_step
    return layout


@dataclass(frozen=True)
class MadeUpBatch:
    """Stands for ``triax.data.batch.Batch``."""

    tokens: "np.ndarray[Any, Any]"
    labels: "np.ndarray[Any, Any]"
    positions: "np.ndarray[Any, Any]"
    cu_seqlens: "np.ndarray[Any, Any] | None"


class MadeUpSequences:
    """A corpus in which sample i is made from the number i alone; some labels do not count, unevenly many in each."""

    def __init__(self, vocab_size: int, length: int = SEQ_LEN) -> None:
        self._vocab_size, self._length = vocab_size, length

    def batch(self, samples: range) -> MadeUpBatch:
        """Return the sequences with numbers ``samples``, each cut into two documents."""
        tokens, labels, bounds = [], [], [0]
        for row, sample in enumerate(samples):
            random = np.random.default_rng(sample)
            sequence = random.integers(0, self._vocab_size, self._length + 1)
            label = sequence[1:].copy()
            label[random.random(self._length) < random.random() * 0.7] = -100
            cut = int(random.integers(1, self._length))
            tokens.append(sequence[:-1])
            labels.append(label)
            bounds += [row * self._length + cut, (row + 1) * self._length]
        positions = np.concatenate([np.arange(stop - start) for start, stop in pairwise(bounds)])
        return MadeUpBatch(
            np.stack(tokens), np.stack(labels), positions.reshape(len(samples), -1), np.array(bounds, dtype=np.int32)
        )

    def microbatches(self, run: Run, layout: Layout, data_rank: int, step: int) -> list[MadeUpBatch]:
        """Return what one data rank sees in one step, by the same rule as ``triax.data.batch``."""
        size = layout.sequences_per_microbatch
        first = step * run.sequences_per_step + data_rank * size
        stride = layout.data_ranks * size
        return [
            self.batch(range(first + index * stride, first + index * stride + size))
            for index in range(layout.microbatches)
        ]
