"""How much faster is a grouped matmul than one matmul for each expert?

    python -m benchmarks.experts --json -

Both make the same mixture of the same tokens, forwards and backwards, in turns (``benchmarks.paired``); their outputs
are compared first. One rank, one thread for each core it is given.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from benchmarks.output import write_json
from benchmarks.paired import ratio, take_turns
from triax.nn.moe import Experts, MixtureOfExperts, one_by_one
from triax.parallel.launch import peers, process_from_environment
from triax.spec.experts import ExpertSpec
from triax.spec.model import ModelSpec

TOKENS: Final = 2048
WIDTH: Final = 256
CASES: Final = [
    ("fp32", 8, 512), ("fp32", 64, 128), ("bf16", 8, 512), ("bf16", 64, 128),
]  # fmt: skip
"""Precision, experts, width inside each."""
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TOLERANCE: Final = {"fp32": 1e-5, "bf16": 2e-2}


class LoopedExperts(Experts):
    """Experts that are multiplied one by one."""

    def multiplier(self, rows_CD: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return the loop."""
        return one_by_one


def mixture(precision: str, num_experts: int, inner: int) -> MixtureOfExperts:
    """Return a mixture of experts with random weights, the same at every call."""
    experts = ExpertSpec(num_experts=num_experts, num_experts_per_tok=2, moe_intermediate_size=inner)
    model = ModelSpec(
        hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=4, vocab_size=64,
        experts=experts,
    )  # fmt: skip
    made = MixtureOfExperts(model)
    numbers = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        weight.data.normal_(0, 0.05, generator=numbers)
    return made.to(DTYPES[precision])


def step_of(made: MixtureOfExperts, x: Tensor) -> Callable[[], Tensor]:
    """Return a function that goes forwards and backwards and returns what came out."""

    def step() -> Tensor:
        out: Tensor = made(x)
        out.float().square().mean().backward()
        made.zero_grad()
        return out.detach()

    return step


def row(precision: str, num_experts: int, inner: int, pairs: int) -> dict[str, object]:
    """Return what one case came to."""
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(DTYPES[precision])
    grouped, looped = mixture(precision, num_experts, inner), mixture(precision, num_experts, inner)
    looped.experts.__class__ = LoopedExperts
    programs = {"grouped": step_of(grouped, x), "looped": step_of(looped, x)}
    one, other = (step().float() for step in programs.values())
    assert (one - other).abs().max() <= _TOLERANCE[precision] * other.abs().max()
    seconds = take_turns(programs, pairs)
    return {
        "precision": precision, "experts": num_experts, "width": inner,
        "step_s": {name: statistics.median(taken) for name, taken in seconds.items()},
        "grouped_over_looped": ratio(seconds["looped"], seconds["grouped"]),
    }  # fmt: skip


def main() -> int:
    """Print one JSON object: a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", default="-")
    arguments = parser.parse_args()
    with peers(process_from_environment(), 60):
        rows = [row(*case, arguments.pairs) for case in CASES]
    write_json({"pairs": arguments.pairs, "tokens": TOKENS, "rows": rows}, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
