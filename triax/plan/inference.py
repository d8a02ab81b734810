"""How many cards does a trained network need to answer, how fast does it, and what does a million tokens cost?

Writing one token reads every weight it uses once, so that the memory's bandwidth decides, not operations; a batch
shares that reading until its keys and values fill the memory. Prompts are read many tokens at once and bound by
operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from triax.plan.hardware import Machine
from triax.plan.memory.peak import CONTEXT_BYTES, NCCL_BYTES
from triax.plan.network import Network
from triax.spec.legal_values import divisors

WEIGHT_BYTES: Final = {"bf16": 2.0, "fp8": 1.0, "int4": 0.53}
"""Of one weight; int4 with a scale for each 64 (arXiv:2305.14314)."""
CACHE_BYTES: Final = 2.0
"""Of one number of keys and values."""
REACHED_BANDWIDTH: Final = 0.75
"""Of the memory's rate while weights are read (*assumed*)."""
REACHED_FLOPS: Final = 0.55
"""Of the peak while prompts are read (*assumed*)."""
FREE_PART: Final = 0.06
"""Of the card's memory for what moves through the network (*assumed*)."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A network on ``tp`` x ``pp`` cards, answering ``batch`` sequences at once."""

    tp: int
    pp: int
    batch: int
    context: int
    weights_bytes: float
    """On one card."""
    cache_bytes: float
    """On one card, of all sequences."""
    card_bytes: float
    """What one card has."""
    token_s: float
    """Between two tokens of one sequence."""
    usd_per_million_tokens: float
    prompt_tokens_per_s: float

    @property
    def cards(self) -> int:
        """Cards of one copy."""
        return self.tp * self.pp

    @property
    def tokens_per_s(self) -> float:
        """Tokens written by all sequences together."""
        return self.batch / self.token_s


def cache_bytes_per_token(network: Network, context: int) -> float:
    """Return bytes of keys and values of one position in all layers, at ``context`` positions a sequence.

    Latent attention keeps the latent alone (arXiv:2405.04434); a layer with a window keeps no more than that.
    """
    latent = network.latent_attention
    numbers = network.key_width + network.value_width if latent is None else latent.kv_rank + latent.rope_dim
    whole = network.attention_layers - (network.windowed_layers if network.window else 0)
    windowed = network.attention_layers - whole
    kept = min(network.window or context, context) / max(context, 1)
    return numbers * CACHE_BYTES * (whole + windowed * kept)


def _read_weights(network: Network, batch: int) -> float:
    """Weights that a batch of tokens reads: of experts those that at least one of its tokens uses."""
    experts = network.experts
    if experts is None:
        return float(network.parameters - network.embedding_parameters)
    idle = (1 - experts.per_token / experts.count) ** batch
    unread = network.expert_layers * experts.count * network.expert_parameters * idle
    return float(network.parameters - network.embedding_parameters) - unread


def serve(
    network: Network, machine: Machine, *, tp: int, pp: int, batch: int, context: int, precision: str, usd: float
) -> Serving:
    """Return how ``batch`` sequences of ``context`` tokens are answered on ``tp`` x ``pp`` cards."""
    card, width = machine.card, WEIGHT_BYTES[precision]
    layers = network.layers / pp
    cache = cache_bytes_per_token(network, context) * context * batch
    read = _read_weights(network, batch) * width + cache
    flops = 2.0 * network.active_parameters * batch
    peak = card.peak("fp8" if precision == "fp8" else "bf16")
    rate = card.memory_bytes_per_s * REACHED_BANDWIDTH
    reduce_s = 2 * network.layers * machine.inside_latency_s if tp > 1 else 0.0
    # Stages work one after another on a token; batches of several can fill them, which is not counted here.
    stage_s = max(read / pp / tp / rate, flops / pp / tp / (peak * REACHED_FLOPS))
    token_s = pp * stage_s + reduce_s + (pp - 1) * machine.across_latency_s
    prompt = peak * REACHED_FLOPS * tp / (2.0 * network.active_parameters)
    # Keys and values are cut over tp as far as there are heads for it.
    heads = tp if network.latent_attention is None else 1
    cut = min(tp, network.kv_heads) if heads > 1 else 1
    per_second = batch / token_s * pp
    return Serving(
        tp=tp,
        pp=pp,
        batch=batch,
        context=context,
        weights_bytes=network.parameters * width / (tp * pp),
        cache_bytes=cache / cut * layers / network.layers,
        card_bytes=float(card.memory_bytes),
        token_s=token_s,
        usd_per_million_tokens=usd * tp * pp / 3600 / per_second * 1e6,
        prompt_tokens_per_s=prompt,
    )


def _room(serving: Serving) -> float:
    """Bytes of a card that are left for keys and values."""
    own = CONTEXT_BYTES + (2 * NCCL_BYTES if serving.cards > 1 else 0.0)
    return serving.card_bytes * (1 - FREE_PART) - own - serving.weights_bytes


def largest_batch(
    network: Network, machine: Machine, *, tp: int, pp: int, context: int, precision: str, most: int = 4096
) -> int:
    """Return how many sequences of ``context`` fit beside the weights; 0 where not even one does."""
    one = serve(network, machine, tp=tp, pp=pp, batch=1, context=context, precision=precision, usd=1.0)
    room = _room(one)
    return 0 if room < one.cache_bytes else min(int(room / max(one.cache_bytes, 1.0)), most)


def placements(network: Network, machine: Machine) -> list[tuple[int, int]]:
    """Return (tp, pp) of every way to hold one copy, fewest cards first: tp inside a domain, stages across."""
    within = [tp for tp in divisors(network.heads) if tp <= machine.domain and network.vocab >= tp]
    ways = [
        (tp, pp) for tp in within for pp in (1, 2, 4, 8, 16, 32, 64)
        if pp <= network.layers and (pp == 1 or tp == within[-1]) and tp * pp <= machine.cards
    ]  # fmt: skip
    return sorted(ways, key=lambda way: (way[0] * way[1], way[1]))


def plan_inference(
    network: Network, machine: Machine, *, context: int, precision: str, usd: float, batches: Sequence[int] = (1, 8, 64)
) -> list[Serving]:
    """Return servings on the fewest cards that hold the network: of ``batches``, as far as they fit, and the largest.

    Empty where no number of the machine's cards holds the network and one sequence.
    """
    for tp, pp in placements(network, machine):
        most = largest_batch(network, machine, tp=tp, pp=pp, context=context, precision=precision)
        if most:
            sizes = sorted({*(batch for batch in batches if batch < most), most})
            return [
                serve(network, machine, tp=tp, pp=pp, batch=batch, context=context, precision=precision, usd=usd)
                for batch in sizes
            ]
    return []
