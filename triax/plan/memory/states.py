"""How many numbers does each pipeline rank own, and how many bytes of weights, gradients and optimizer are they?

Bytes are per rank between two microbatches. Numbers that tensor parallelism cannot cut (norms, routers, latent ways
in) are whole on every rank; experts have data ranks of their own, those that hold the same expert.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from triax.plan.candidates import Candidates, Numbers
from triax.plan.engine import Engine
from triax.plan.hardware import Card
from triax.plan.memory.stages import Probes
from triax.plan.network import Network
from triax.plan.workload import Workload

MOMENT_BYTES: Final = {"adamw": 8.0, "adam8bit": 2.0 + 8.0 / 256, "sgd": 0.0, "muon": 4.0, "adafactor": 0.0}
"""Bytes a number: two moments in fp32; two in 8 bits, each block of 256 with a scale; one of matrices (Muon)."""

MULTIPLIES_ANY_WAY: Final = ("b200", "gb200", "b300", "gb300")
"""Cards that multiply matrices in 8 bits however they lie in memory (compute capability 10.x, not 12.x)."""


@dataclass(frozen=True, eq=False)
class Owned:
    """Numbers on a rank, [probes, candidates] or [candidates]."""

    dense: Numbers
    """All but experts."""
    expert: Numbers
    outside: Numbers
    """Embedding and head, part of ``dense``."""
    matmul: Numbers
    """Numbers of the layers' matrices, experts included: what has copies in 8 bits."""
    dense_unit: Numbers
    """Of one layer without experts: what is gathered and reduced at once."""
    expert_unit: Numbers
    """Of the experts of one layer."""

    @property
    def all(self) -> Numbers:
        """Dense and expert numbers."""
        return self.dense + self.expert


@dataclass(frozen=True, eq=False)
class States:
    """Bytes between two microbatches, [probes, candidates]."""

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    resting: Numbers
    """What stays between two steps: no gathered copies, and gradients only where their buffers are permanent."""
    widened: Numbers
    """Gradients in fp32 for the update, of an engine that keeps them narrower."""
    gathered: Numbers
    """Whole weights and gradients of the units at work, and what gathers and reduces them."""


def padded_vocab(network: Network, engine: Engine, c: Candidates) -> Numbers:
    """Return rows of the embedding and of the head: rounded up so that tensor parallelism can cut them."""
    step = engine.vocab_padding * c.tp if engine.vocab_padding > 1 else np.ones_like(c.tp)
    return (-(-network.vocab // step) * step).astype(np.float64)


def owned(network: Network, engine: Engine, c: Candidates, at: Probes) -> Owned:
    """Return the numbers on each rank that is looked at."""
    tp, hidden = c.tp.astype(np.float64), network.hidden
    attention = _attention_numbers(network, tp)
    bias = network.hidden if network.has_mlp_bias else 0
    dense = (network.dense_ffn_parameters - bias) / tp + bias
    expert = np.zeros_like(tp)
    beside = np.zeros_like(tp)
    experts = network.experts
    if experts is not None:
        expert = experts.count * network.expert_parameters / (c.ep * c.etp).astype(np.float64)
        router = network.hidden * (experts.count + 2 * experts.latent)
        beside = router + (network.shared_parameters - router) / tp
    mixer = network.state_space_parameters / tp
    norms = network.norm_parameters * (network.norms_per_layer if network.state_space is None else 1)
    layers = at.layers
    in_layers = (
        layers["attention"] * attention + layers["dense"] * dense + layers["block"] * norms
        + (layers["expert"] * beside if network.experts is not None else 0.0)
        + (layers["mixer"] * mixer if network.state_space is not None else 0.0)
    )  # fmt: skip
    rows = padded_vocab(network, engine, c) * hidden / tp
    embedding = np.where(at.has_embedding, rows + network.learned_positions * hidden, 0.0)
    # A tied head on another rank than the embedding is a copy of it.
    is_copy = ~at.has_embedding if network.is_tied else True
    head = np.where(at.has_head, network.norm_parameters + np.where(is_copy, rows, 0.0), 0.0)
    ahead, experts_ahead = np.zeros_like(tp), np.zeros_like(tp)
    if network.mtp_depth:
        feed = beside if network.expert_layers else dense
        ahead = network.mtp_depth * (attention + feed + 2 * hidden**2 / tp + 5 * network.norm_parameters)
        experts_ahead = network.mtp_depth * (expert if network.expert_layers else np.zeros_like(tp))
        # What is predicted further ahead is embedded again, on the last stage.
        ahead = ahead + np.where(at.has_embedding, 0.0, rows)
    head = head + np.where(at.has_head, ahead, 0.0)
    expert_numbers = np.zeros_like(in_layers)
    if network.experts is not None:
        expert_numbers = layers["expert"] * expert + np.where(at.has_head, experts_ahead, 0.0)
    unit = attention + norms + (np.maximum(dense, beside) if network.expert_layers else dense)
    return Owned(
        dense=in_layers + embedding + head,
        expert=expert_numbers,
        outside=embedding + head,
        matmul=in_layers - layers["block"] * norms + expert_numbers,
        dense_unit=unit,
        expert_unit=expert,
    )


def _attention_numbers(network: Network, tp: Numbers) -> Numbers:
    latent, hidden = network.latent_attention, network.hidden
    whole: float = hidden if network.has_out_bias else 0
    if latent is not None:
        # The ways down into the latents are whole on every rank, and so are the latents' norms.
        whole += hidden * (latent.q_rank + latent.kv_rank + latent.rope_dim) + latent.q_rank + latent.kv_rank
    elif network.qk_norm == "head":
        whole += 2 * network.head_dim
    return whole + (network.attention_parameters - whole) / tp


def shards(c: Candidates) -> tuple[Numbers, Numbers]:
    """Return the ranks that share a copy of the dense numbers, dp_shard x cp, and of an expert's: what ep leaves."""
    dense = (c.dp_shard * c.cp).astype(np.float64)
    expert = np.maximum(dense * c.tp / (c.ep * c.etp), 1.0)
    return dense, expert


def states(
    network: Network, workload: Workload, card: Card, engine: Engine, c: Candidates, own: Owned, at: Probes
) -> States:
    """Return what the rank holds between microbatches, and what ZeRO-3 gathers for the layer at work."""
    compute = float(workload.precision.activation_bytes)
    is_low = compute < 4
    if workload.lora_rank:
        return _adapter_states(network, workload, engine, own, at, compute)
    dense_ranks, expert_ranks = shards(c)
    zero = np.where((c.zero == 3) & (c.pp > 1) & engine.gathers_once_in_pipeline, 1, c.zero)
    master_whole, master_shared, copy = _weight_bytes(engine, compute)
    weights = np.zeros_like(own.dense)
    gradients, optimizer, copies, widened, gathered = (np.zeros_like(own.dense) for _ in range(5))
    kept, reduced = _gradient_bytes(workload, engine, compute)
    moments = moment_bytes(workload, engine)
    owners = [(own.dense, dense_ranks, own.dense_unit, own.outside)]
    if network.experts is not None:
        owners.append((own.expert, expert_ranks, own.expert_unit, np.zeros_like(own.outside)))
    for numbers, ranks, unit, outside in owners:
        padded = _padded(numbers, ranks, engine)
        share = padded / ranks
        state = np.where(zero >= 1, share, numbers)
        low = np.where(zero == 3, share, numbers)
        weights += low * master_whole + np.where(zero >= 1, share, numbers) * master_shared
        copies += np.where((zero == 1) | (zero == 2), copy * numbers, 0.0)
        is_whole = (zero == 0) | ((zero == 1) & (engine.zero1_keeps_grads_whole | engine.gathers_once_in_pipeline))
        gradients += np.where(is_whole, numbers * kept, share * _shard_gradient(engine, c, kept, compute))
        master = 4.0 if engine.holds_low_precision_weights and is_low else 0.0
        optimizer += state * (moments + master)
        widened += state * (4.0 if master and kept < 4 else 0.0)
        # The unit that computes, those that come next, and the gradient of one before it is reduced.
        live = (1 + engine.prefetch) * unit * compute + outside * compute
        reducing = unit * (compute + reduced)
        whole_copy = numbers * copy if engine.family == "triax" else 0.0 * numbers
        gathered += np.where((zero == 3) & (ranks > 1), np.minimum(live, numbers * compute + unit * compute) + reducing,
                             np.where(zero == 0, whole_copy, np.where(is_whole, 0.0, reducing)))  # fmt: skip
    if workload.optimizer == "muon":
        # Embedding and head keep two moments.
        optimizer += np.where(zero >= 1, own.outside / dense_ranks, own.outside) * 4.0
    cache = _cache_bytes(workload, card, engine)
    weights += own.matmul * np.where(zero == 3, 0.0, cache)
    resting = weights + optimizer + (gradients if engine.holds_low_precision_weights else 0.0)
    return States(weights + copies, gradients, optimizer, resting, widened, gathered)


def moment_bytes(workload: Workload, engine: Engine) -> float:
    """Return bytes of the moments of a number."""
    own = engine.moment_bytes if workload.optimizer == "adamw" else None
    return MOMENT_BYTES[workload.optimizer] if own is None else own


def _cache_bytes(workload: Workload, card: Card, engine: Engine) -> float:
    """Return bytes a weight of its copies in 8 or 4 bits, less what an engine then need not keep.

    Transformer Engine makes the transposed copy of a weight with one scale only where the card asks for it.
    """
    if not workload.precision.is_quantised:
        return 0.0
    cache = workload.precision.weight_cache_bytes
    is_any_way = card.name.partition("@")[0] in MULTIPLIES_ANY_WAY
    if is_any_way and engine.has_transformer_engine and workload.precision.recipe in ("fp8_delayed", "fp8_tensorwise"):
        cache -= 1.0
    return cache - workload.precision.activation_bytes if engine.narrow_weights else cache


def _weight_bytes(engine: Engine, compute: float) -> tuple[float, float, float]:
    """Return bytes a number: of the weights that compute, of fp32 masters that ZeRO shares, of gathered copies."""
    if engine.holds_low_precision_weights:
        return compute, 0.0, 0.0
    return 0.0, max(compute, 4.0), compute


def _gradient_bytes(workload: Workload, engine: Engine, compute: float) -> tuple[float, float]:
    """Return bytes of a gradient as it is kept whole between microbatches, and as it is summed over ranks."""
    reduced = float(workload.grad_reduce_bytes or max(engine.grad_reduce_bytes, compute if compute >= 4 else 0))
    if engine.family == "triax":
        return reduced, reduced  # whole gradients are kept as they are reduced
    return max(float(engine.grad_bytes), compute if compute >= 4 else 0.0), reduced


def _shard_gradient(engine: Engine, c: Candidates, kept: float, compute: float) -> Numbers:
    """Bytes of a gradient of which a rank keeps its share: as wide as the master, once replicas were summed."""
    wide = kept if engine.holds_low_precision_weights else max(4.0, compute)
    return np.where((c.dp_replicate > 1) & (engine.family == "triax"), kept, wide)


def _padded(numbers: Numbers, ranks: Numbers, engine: Engine) -> Numbers:
    if engine.bucket_padding == 1:
        return numbers
    step = np.lcm(ranks.astype(np.int64), engine.bucket_padding)
    padded: Numbers = np.ceil(numbers / step) * step
    return padded


def _adapter_states(
    network: Network, workload: Workload, engine: Engine, own: Owned, at: Probes, compute: float
) -> States:
    """Frozen weights in the compute type; adapters beside every matrix of attention and feed-forward, trained whole."""
    width = sum(inputs + outputs for inputs, outputs in network.attention_matrices)
    width += sum(inputs + outputs for inputs, outputs in network.ffn_matrices(network.ffn))
    trained = workload.lora_rank * width * at.layers["block"]
    moments = moment_bytes(workload, engine)
    zero = np.zeros_like(own.dense)
    weights, optimizer = own.all * compute + trained * 4.0, trained * moments
    return States(weights, trained * 4.0, optimizer, weights + optimizer, zero, zero)
