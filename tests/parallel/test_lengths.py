"""Do sequences of any length and with any number of documents train like on one device, however they are cut?

Lengths divide by nothing, so that sequences are filled up; in a sequence there is one document, or there are hundreds.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.harness.toy import MadeUpBatch, MadeUpSequences, lay, toy_run
from tests.parallel.equality import assert_equals_one_device
from triax.spec.context import computed_length
from triax.spec.model import ModelSpec

MODEL = ModelSpec(
    hidden_size=12, intermediate_size=23, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8, head_dim=4,
    vocab_size=61, tie_word_embeddings=True,
)  # fmt: skip
LENGTH = 299
MANY = 200
LONG_ANGLES = {"rope_scaling": {"kind": "longrope", "factor": 4.0, "short_factor": (1.0, 1.0),
                                "long_factor": (2.0, 3.0), "original_max_position_embeddings": 150}}  # fmt: skip


def sequences_of(documents: int) -> type[MadeUpSequences]:
    """Return made-up sequences of so many documents each."""

    class OtherDocuments(MadeUpSequences):
        def batch(self, samples: range) -> MadeUpBatch:
            batch = super().batch(samples)
            rows, length = batch.tokens.shape
            if documents == 1:
                return replace(batch, positions=np.tile(np.arange(length), (rows, 1)), cu_seqlens=None)
            bounds = [0]
            for row, sample in enumerate(samples):
                cuts = np.random.default_rng(sample).choice(np.arange(1, length), documents - 1, replace=False)
                bounds += [row * length + int(cut) for cut in (*sorted(cuts), length)]
            positions = np.concatenate([np.arange(stop - start) for start, stop in pairwise(bounds)])
            return replace(
                batch, positions=positions.reshape(rows, length), cu_seqlens=np.array(bounds, dtype=np.int32)
            )

    return OtherDocuments


CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {"cp": 2, "cp_method": "ring"}, {}),
    (MANY, {"cp": 4, "cp_method": "all_to_all"}, {}),
    (MANY, {"pp": 2, "cp": 2, "tp": 2, "zero": 3}, {}),
    (1, {"cp": 8, "zero": 3}, LONG_ANGLES),
    (MANY, {"cp": 2, "cp_method": "ring"}, {}),
    (1, {"cp": 4, "cp_method": "ring"}, {}),
    (1, {"dp_shard": 2, "cp": 2, "tp": 2, "cp_method": "all_to_all", "recompute": "full"}, {}),
    (MANY, {"cp": 8, "cp_method": "ring"}, {}),
    (1, {"cp": 8, "cp_method": "all_to_all"}, {}),
    (MANY, {"cp": 3}, {"sliding_window": 40, "global_layers": (1,)}),
    (1, {"tp": 4}, {}),
]
"""Documents in each sequence, degrees, and what the model has besides."""
NUM_ALWAYS = 5


def cases() -> list[Any]:
    return [
        pytest.param(
            *case, id=f"{case[0]} documents {case[1]}", marks=() if index < NUM_ALWAYS else pytest.mark.exhaustive
        )
        for index, case in enumerate(CASES)
    ]


@pytest.mark.parametrize(("documents", "degrees", "kind"), cases())
def test_any_length_equals_one_device(
    documents: int, degrees: dict[str, Any], kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.harness.training.MadeUpSequences", sequences_of(documents))
    run = toy_run(
        ModelSpec.model_validate(MODEL.model_dump() | kind), data={"seq_len": LENGTH},
        train={"sequences_per_step": 2, "seed": documents},
    )  # fmt: skip
    layout = lay(run, 1, **degrees)
    assert computed_length(LENGTH, layout.cp, layout.tp) > LENGTH
    assert_equals_one_device(run, layout, steps=1)
