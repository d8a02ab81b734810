"""How does a trained network write on? One token after another, in one process, without a cache.

For a look at a run, not for serving: each token costs a forward over the whole context.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triax.errors import TriaxError
from triax.nn.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the logits."""

    temperature: float = 0.8
    """0 takes the likeliest token (greedy)."""
    top_k: int = 0
    """Choose among this many likeliest tokens; 0 is all."""
    seed: int = 0


def continue_tokens(
    model: Decoder, prompt: Sequence[int], num_tokens: int, sampling: Sampling, *, eos_id: int, max_context: int
) -> Iterator[int]:
    """Yield up to ``num_tokens`` tokens after ``prompt``, one at a time; stop after ``eos_id``.

    The network sees the last ``max_context`` tokens. The same seed yields the same tokens. Raises TriaxError where the
    network computes what is no number.
    """
    random = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        context = torch.tensor([tokens[-max_context:]])
        with torch.no_grad():
            logits_V = model(context, torch.arange(context.shape[1]).unsqueeze(0))[0, -1]
        if not bool(logits_V.isfinite().all()):
            raise TriaxError("the network computes numbers that are not finite: its weights cannot write.")
        token = _choose(logits_V.to(torch.float64), sampling, random)
        tokens.append(token)
        yield token
        if token == eos_id:
            return


def _choose(logits_V: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    if sampling.top_k:
        floor = logits_V.topk(min(sampling.top_k, logits_V.shape[0])).values[-1]
        logits_V = logits_V.masked_fill(logits_V < floor, float("-inf"))
    # From the largest down, so that a temperature near 0 divides no number into infinity but those that lose.
    chances_V = ((logits_V - logits_V.max()) / sampling.temperature).softmax(dim=0)
    return int(torch.multinomial(chances_V, 1, generator=random))
