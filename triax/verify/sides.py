"""What does the side of one process come to, and how do the findings of all ranks come together?"""

import json
from pathlib import Path
from typing import Any, Final

from triax.data.batch import Batches
from triax.data.corpus import Corpus
from triax.parallel.shard import DTYPES
from triax.verify.finding import Finding, Kind, merged
from triax.verify.parity import sequences_of
from triax.verify.reference import Trained, train_plainly
from triax.verify.shrink import Case

_OUTPUT_BYTES: Final = 1 << 30
"""What outputs of modules may take in memory; where they are larger, those of the first samples are compared."""


class _Samples:
    """The samples of a run by their numbers."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def batch(self, samples: range) -> Any:
        return self._batches.microbatch(samples.start, 0, 0, 1, len(samples), 1)


def reference_of(case: Case, corpus: Corpus) -> Trained:
    """Return what ``case`` comes to in this process, on the tokens of ``corpus``."""
    run = case.run
    # Embedding and norm, and for each layer its halves and itself.
    modules = 2 + 3 * run.model.num_hidden_layers
    of_sample = modules * run.data.seq_len * run.model.hidden_size * DTYPES[run.precision.compute].itemsize
    kept = min(run.sequences_per_step, _OUTPUT_BYTES // of_sample)
    return train_plainly(run, _Samples(sequences_of(run, corpus)), run.train.steps, kept)


def collected(case: Case, trained: Trained, folder: Path) -> list[Finding]:
    """Return the findings of all ranks, which they have left in ``folder``: one for each thing, the worst.

    A weight that no rank holds, and a module that none has run, is a difference too.
    """
    by_rank = [
        [Finding.from_json(said) for said in json.loads((folder / f"rank-{rank}.json").read_text())]
        for rank in range(case.layout.world_size)
    ]
    weights = [_missing("initial", name, 0, "no rank holds it") for name in trained.initial]
    is_inside_compared = case.layout.recompute == "none"
    modules = [
        _missing("output", name, 1, "no rank runs it")
        for name in trained.outputs
        if is_inside_compared or not name.endswith((".self_attn", ".mlp"))
    ]
    return merged(by_rank, [*weights, *modules], case.run.model)


def _missing(kind: Kind, name: str, step: int, note: str) -> Finding:
    return Finding(kind, name, step, float("inf"), 0.0, are_bits_equal=False, note=note)
