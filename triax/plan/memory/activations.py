"""How many bytes does a microbatch leave in each layer until its backward, and how many more while it computes?

Lists of the tensors that each kind of layer saves, by tensor: Korthikanti et al. 2022 (arXiv:2205.05198, section 4)
extended to fused attention, grouped and latent heads, gated feed-forward and experts, as Transformer Engine and
PyTorch save them. Bytes of one tensor-parallel rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from triax.plan.candidates import (
    ACTIVATION,
    CORE_ATTENTION,
    EXPERTS,
    FULL,
    LATENT_UP,
    MLP,
    NORMS,
    SELECTIVE,
    SHARED_EXPERTS,
    Candidates,
    Integers,
    Numbers,
)  # fmt: skip
from triax.plan.context import attends_whole_heads, made_again_by_selection
from triax.plan.engine import Engine
from triax.plan.memory.stages import Probes
from triax.plan.network import Experts, Network, StateSpace
from triax.plan.workload import Workload

RUNS_LEFT: Final = 5.4
"""Activations of a whole layer that are there when the second part of a split backward is over, where layers are run
again: torch makes gradients of weights in several passes, each of which runs the layer and reads a part of what that
saves (*measured* by a dry run of a Llama of 8B, to 10 %)."""
IMBALANCE: Final = 1.3
"""Tokens of the busiest rank's experts over the mean, in training from scratch: of the functional tests of Megatron-LM
with experts any value from 1.2 to 1.5 leaves 2 % of median error. 1 where a router is forced to balance."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Bytes of one layer of a kind."""

    kept: Numbers
    """Until the backward, nothing computed again."""
    kept_again: Numbers
    """Until the backward, with what the candidate computes again left out."""
    forward: Numbers
    """More while its forward runs."""
    backward: Numbers
    """More while its backward runs: gradients, and what is computed again."""


@dataclass(frozen=True, eq=False)
class Activations:
    """Bytes by kind of layer; ``block`` stands for the input of a block that is computed again as a whole."""

    layers: dict[str, Layer]
    boundary: Numbers
    """The input of a block."""
    tokens: Numbers
    """Tokens of a microbatch on a tensor-parallel group."""
    cut_tokens: Numbers
    """Tokens of norms and residuals on one rank."""


def activations(
    network: Network, workload: Workload, engine: Engine, c: Candidates, imbalance: float = IMBALANCE
) -> Activations:
    """Return what one microbatch keeps in a layer of each kind."""
    tokens = c.sequences_per_microbatch * workload.seq_len / c.cp.astype(np.float64)
    cut = tokens / np.where(c.sequence_parallel == 1, c.tp, 1)
    tensors = _Tensors(network, workload, engine, c, tokens, cut, imbalance)
    layers = {"attention": tensors.attention(), "dense": tensors.dense()}
    if network.experts is not None:
        layers["expert"] = tensors.experts(network.experts)
    if network.state_space is not None:
        layers["mixer"] = tensors.mixer(network.state_space)
    return Activations(layers, cut * network.hidden * workload.precision.activation_bytes, tokens, cut)


class _Tensors:
    """The lists, tensor by tensor."""

    def __init__(
        self, network: Network, workload: Workload, engine: Engine, c: Candidates, tokens: Numbers, cut: Numbers,
        imbalance: float,
    ) -> None:  # fmt: skip
        self.network, self.workload, self.engine, self.c = network, workload, engine, c
        self.tokens, self.cut, self.imbalance = tokens, cut, imbalance
        self.e = float(workload.precision.activation_bytes)
        self.mi = float(workload.precision.matmul_input_bytes)
        self.tp = c.tp.astype(np.float64)
        self.stream = cut * network.hidden
        self.has_dropout = network.dropout > 0
        self.wide = max(4.0, self.e) if engine.widens_norms else 0.0

    def again(self, bits: int) -> Integers:
        """1 where the candidate computes one of ``bits`` again."""
        chosen: Integers = (self.c.recompute & bits) != 0
        return chosen

    def normed(self, *, is_gathered: bool) -> tuple[Numbers, Numbers]:
        """What the norms of half a block and its residual keep: (whole, with recomputation).

        The input, the output that a product reads, a statistic in fp32, the mask of the dropout before the sum. A norm
        after the products keeps its input alone. ``is_gathered``: the product reads what was gathered over tp, and that
        is kept.
        """
        norms = self.network.norms_per_layer / 2
        more = self.stream * self.wide * norms + self.cut * 4.0 * norms + self.stream * self.e * (norms - 1)
        read = self.tokens * self.network.hidden if is_gathered else self.stream
        whole = self.stream * (self.e + (1 if self.has_dropout else 0)) + read * self.mi + more
        less = whole - np.where(self.again(NORMS | SELECTIVE), read * self.mi + more, 0.0)
        return whole, less

    def products(self, outputs: Numbers) -> Numbers:
        """What selective recomputation keeps of the outputs of matrix products."""
        return outputs * (1 - self.engine.selective_matmul_again)

    def attention(self) -> Layer:
        network, e = self.network, self.e
        part = self.tokens / self.tp
        width = network.query_width + network.key_width + network.value_width
        norm, norm_again = self.normed(is_gathered=self.engine.keeps_gathered)
        projected = part * width * e
        is_normed = network.qk_norm != "none" and network.latent_attention is None
        heads = part * (network.query_width + network.key_width) * (e + self.wide) * is_normed
        latent, latent_again = self._latent()
        context = part * network.context_width * e
        if self.workload.precision.is_quantised:
            context = context + part * network.context_width * self.mi
        # With one sequence both orders of dims are the same bytes; with a cut one the order is kept all along.
        is_copied = self.engine.keeps_context_copy & (self.c.sequences_per_microbatch > 1) & (self.c.cp == 1)
        is_dealt = attends_whole_heads(self.engine, self.c) * ~self.again(SELECTIVE)
        copied = part * network.context_width * e * (is_copied + is_dealt)
        scores, score_work = self._scores()
        inner = projected + heads + copied
        kept = norm + inner + latent + context + scores
        products = self.products(projected + latent + self.tokens * network.hidden * e)
        attended = np.where(made_again_by_selection(self.engine, self.c), 0.0, context + scores)
        again = np.where(self.again(SELECTIVE), self.stream * e + products + attended,
                         norm_again + inner + latent_again + context
                         + np.where(self.again(CORE_ATTENTION), 0.0, scores))  # fmt: skip
        again = again - np.where(self.again(LATENT_UP), inner if network.latent_attention is not None else 0.0, 0.0)
        forward = score_work + context
        backward = 2 * score_work + projected + 2 * self.stream * e
        return Layer(kept, again, forward, backward)

    def _latent(self) -> tuple[Numbers, Numbers]:
        """Latents of queries, keys and values, before and after their norms; whole over tp unless cut along T."""
        latent = self.network.latent_attention
        if latent is None:
            return 0 * self.tokens, 0 * self.tokens
        widths = latent.q_rank + latent.kv_rank
        before = self.cut * (widths + latent.rope_dim) * self.e
        after = self.cut * widths * self.mi
        # Keys and values leave one product; the keys' two parts are then joined into a tensor of their own.
        keys = self.tokens / self.tp * self.network.heads * latent.nope_dim * self.e
        kept = before + after + keys
        return kept, np.where(self.again(LATENT_UP), before + after, kept)

    def _scores(self) -> tuple[Numbers, Numbers]:
        """What attention keeps beside its inputs and its output, and one matrix of scores at work."""
        heads = self.network.heads / self.tp
        if self.engine.attention == "flash":
            return self.tokens * heads * 4.0, 0 * self.tokens
        pairs = self.tokens * self.workload.seq_len * heads
        kept = pairs * (self.e + (1 + self.e if self.has_dropout else 0))
        return kept, pairs * self.e

    def dense(self) -> Layer:
        return self._feed_forward(self.network.ffn)

    def _feed_forward(self, inner: int) -> Layer:
        part = self.tokens / self.tp * inner
        norm, norm_again = self.normed(is_gathered=self.engine.keeps_gathered)
        wide = part * (2 if self.network.is_gated else 1) * self.e
        active = part * self.mi + self._eager_gate(part)
        kept = norm + wide + active
        products = self.products(wide + self.tokens * self.network.hidden * self.e)
        again = np.where(self.again(SELECTIVE), products,
                         norm_again + np.where(self.again(MLP), 0.0, wide)
                         + np.where(self.again(MLP | ACTIVATION), 0.0, active))  # fmt: skip
        return Layer(kept, again, wide + active, wide + active + 2 * self.stream * self.e)

    def _eager_gate(self, part: Numbers) -> Numbers:
        """An activation that is no fused kernel keeps its own output beside the product with the gate."""
        return part * self.e if self.engine.norms == "eager" and self.network.is_gated else 0 * part

    def experts(self, experts: Experts) -> Layer:
        network, e, mi = self.network, self.e, self.mi
        norm, norm_again = self.normed(is_gathered=self.engine.keeps_gathered and experts.shared_ffn > 0)
        router = self._router(experts)
        # A rank with all experts has no more tokens than another.
        sent = self.cut * experts.per_token * (1 + (self.imbalance - 1) * (1 - 1 / self.c.ep))
        width = experts.latent or network.hidden
        received = sent * self.c.etp * width * mi
        wide = sent * experts.ffn * (2 if network.is_gated else 1) * e
        active = sent * experts.ffn * mi + self._eager_gate(sent * experts.ffn)
        if self.engine.weights_expert_activations and not network.is_gated:
            active = active + sent * experts.ffn * e
        shared_wide = self.tokens / self.tp * experts.shared_ffn * (2 if network.is_gated else 1) * e
        shared_part = self.tokens / self.tp * experts.shared_ffn
        shared_active = shared_part * mi + self._eager_gate(shared_part)
        returned = self.cut * experts.per_token * width * e * self.engine.weighs_expert_outputs
        own = received + wide + active + returned
        kept = norm + router + own + shared_wide + shared_active
        inside = np.where(self.again(EXPERTS), 0.0, own - np.where(self.again(ACTIVATION), active, 0.0))
        shared = np.where(self.again(SHARED_EXPERTS | MLP), 0.0, shared_wide + shared_active)
        selective = router + received + self.products(wide + received + shared_wide)
        if self.engine.weighs_expert_outputs:
            selective = self._products_of_experts(experts, sent, wide, shared_wide)
        again = np.where(self.again(SELECTIVE), selective, norm_again + router + inside + shared)
        work = sent * self.c.etp * width * e  # also of what comes back
        return Layer(kept, again, 2 * work + wide, 2 * work + wide + active + 2 * self.stream * e)

    def _router(self, experts: Experts) -> Numbers:
        """Logits, probabilities and their gradient's mask in fp32; where each token goes.

        Where weights multiply what comes back: logits and probabilities, sums of both, choices and their weights, as
        they are and as they multiply; the order of all choices, and on several ranks that of what came. The router
        reads its input in fp32, in place of what a norm puts out, which a shared expert alone reads as it is.
        """
        tokens, each = self.cut, experts.per_token
        if not self.engine.weighs_expert_outputs:
            return tokens * experts.count * 12.0 + tokens * each * 16.0
        widened = 0 * tokens
        if self.e < 4.0:
            widened = self.stream * 4.0 - (0.0 if experts.shared_ffn else self.stream * self.mi)
        came = 16.0 * (self.c.ep > 1)
        return widened + tokens * (experts.count * 8.0 + 8.0 + each * (28.0 + self.e + came))

    def _products_of_experts(self, experts: Experts, sent: Numbers, wide: Numbers, shared_wide: Numbers) -> Numbers:
        """What selective recomputation keeps where rows are sent again: scores, outputs of products, and the sum."""
        width = experts.latent or self.network.hidden
        whole = self.cut * experts.count * 4.0 + wide + sent * width * self.e + self.stream * self.e
        return whole + shared_wide + (self.tokens * self.network.hidden * self.e if experts.shared_ffn else 0.0)

    def mixer(self, mixer: StateSpace) -> Layer:
        norm, norm_again = self.normed(is_gathered=False)
        wide = mixer.inner + 2 * mixer.groups * mixer.state
        # Projection in, convolution out, scan out, gated norm out, and states at the borders of chunks of 256.
        part = self.tokens / self.tp
        kept = norm + part * self.e * (mixer.inner + 2 * wide + mixer.heads + 2 * mixer.inner)
        kept = kept + part / 256 * mixer.inner * mixer.state * 4.0
        again = np.where(self.again(SELECTIVE), self.stream * self.e + part * self.e * (mixer.inner + wide), kept)
        return Layer(kept, again - norm + norm_again, part * self.e * wide, part * self.e * 3 * wide)


def held_bytes(
    acts: Activations, counts: Mapping[str, Numbers], layers: Mapping[str, Numbers], c: Candidates
) -> Numbers:
    """Return bytes of ``counts`` layers times microbatches, as the candidate recomputes."""
    is_full = (c.recompute & FULL) != 0
    blocks = np.maximum(layers["block"], 1.0)
    some = np.where(c.recompute_layers > 0, np.minimum(c.recompute_layers * c.stages_per_rank / blocks, 1.0), 1.0)
    every = np.zeros_like(counts["block"])
    again = np.zeros_like(every)
    for kind, layer in acts.layers.items():
        every = every + counts[kind] * layer.kept
        again = again + counts[kind] * layer.kept_again
    inputs = counts["block"] * acts.boundary / c.layers_per_checkpoint
    resident = some * np.where(is_full, inputs, again) + (1 - some) * every
    offloaded = np.minimum(c.offload_layers * c.stages_per_rank / blocks, 1.0)
    left: Numbers = resident * (1 - offloaded)
    return left


def split_bytes(acts: Activations, at: Probes, c: Candidates) -> Numbers:
    """Return bytes more that split backwards keep between their two parts, by stages of equal size: for gradients of
    outputs half of what layers save (*assumed*), and of those that run again what their runs leave."""
    is_full = (c.recompute & FULL) != 0
    saved = np.zeros(at.rank.shape)
    for kind, layer in acts.layers.items():
        saved = saved + at.layers[kind] / c.stages_per_rank * layer.kept
    result: Numbers = at.split * saved / 2 + (at.split > 0) * is_full * RUNS_LEFT * saved
    return result


def working_bytes(acts: Activations, at: Probes, c: Candidates) -> tuple[Numbers, Numbers]:
    """Return bytes more than what is held: while the forward, and while the backward of the largest layer runs."""
    forward, backward = np.zeros(at.rank.shape), np.zeros(at.rank.shape)
    whole, kept = np.zeros(at.rank.shape), np.zeros(at.rank.shape)
    for kind, layer in acts.layers.items():
        here = at.layers[kind] > 0
        forward = np.maximum(forward, here * layer.forward)
        backward = np.maximum(backward, here * layer.backward)
        share = at.layers[kind] / np.maximum(at.layers["block"], 1.0)
        whole, kept = whole + share * layer.kept, kept + share * layer.kept_again
    is_full = (c.recompute & FULL) != 0
    again = np.where(is_full, whole * c.layers_per_checkpoint - acts.boundary, whole - kept)
    return forward, backward + np.maximum(again, 0.0)
