"""How long does a card compute on one microbatch, operator by operator?

Every operator takes the longer of its operations at the rate its shape reaches and its bytes at the memory's rate.
All functions take arrays, one entry a layout or a distinct shape, and return seconds of the same length. Nothing here
is calibrated: ``triax.plan.step`` scales the kinds of work by what a stack was measured to reach.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from triax.plan.candidates import Integers, Numbers
from triax.plan.engine import Engine
from triax.plan.hardware import Card, GemmCurve, MatmulDtype
from triax.plan.network import Network
from triax.plan.workload import Precision, Workload

_TILES: Final = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128))
_MATMUL_BYTES: Final[dict[MatmulDtype, float]] = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}

FLASH_FORWARD: Final = 0.55
"""Part of the peak that fused attention reaches with long sequences and heads of 128 (*assumed*; calibrated)."""
FLASH_BACKWARD: Final = 0.45
FLASH_BACKWARD_FLOPS: Final = 2.5
"""Backward over forward operations of fused attention: scores again, and four products (arXiv:2205.14135)."""
FLASH_OF_AMPERE: Final = {"hopper": 0.65, "blackwell": 0.45}
"""Part of that which kernels written for Ampere reach on newer cards: 350 of 650 TFLOP/s on Hopper (arXiv:2407.08608,
figure 5); Blackwell *assumed*."""
UNALIGNED: Final = 4.0
"""Time of a product whose rows are no multiple of 16 bytes, over one whose rows are (*assumed*)."""
FLASH_TILE: Final = 128
"""Positions of a tile: a causal triangle is computed in whole tiles."""
EAGER_TRAFFIC: Final = {"eager": 2.6, "fused": 1.0, "compiled": 1.1}
"""Bytes of element-wise work over those of kernels fused by hand: fp32 copies and an operator each (*assumed*)."""
LOSS_BYTES: Final = {"eager": 30.0, "fused": 16.0, "vocab_parallel": 20.0, "chunked": 12.0}
"""Bytes moved per logit by loss and its gradient, products not counted (*assumed*)."""
OPTIMIZER_BYTES: Final = {"adamw": 30.0, "adam8bit": 14.0, "sgd": 14.0, "muon": 26.0, "adafactor": 20.0}
"""Bytes moved per weight that a rank updates: gradient, master, two moments in and out, weight out, norm."""


_CAST_BYTES: Final = {"fp8_delayed": 2.0, "fp8_tensorwise": 3.0, "fp8_rowwise": 6.0, "mxfp8": 3.0, "nvfp4": 6.0}
"""Bytes moved per number that is cast, where casts are fused with what is before them (*assumed*)."""
_CASTS_APART: Final = 3.0
"""Bytes of casts that are kernels of their own, or compiled, over those of fused ones (*assumed*)."""
NARROW_OF_TABLE: Final = 1.15
"""Rate of 8-bit products in training libraries over that of the inference kernels in the fitted tables (*assumed*: it
makes 8-bit runs of one framework as far off as its 16-bit ones)."""


@dataclass(frozen=True, eq=False)
class Work:
    """Seconds of one microbatch in all layers of a network, as one tensor-parallel rank does them; by kind.

    ``matmul`` linear layers, ``attention`` scores, ``memory`` what is bound by bytes; forward and backward, nothing
    computed again. ``head`` is the last stage's, both directions, its loss included.
    """

    matmul_f: Numbers
    matmul_b: Numbers
    attention_f: Numbers
    attention_b: Numbers
    memory_f: Numbers
    memory_b: Numbers
    ffn_f: Numbers
    """Part of ``matmul_f`` that is feed-forward, dense or of experts."""
    head_matmul: Numbers
    head_memory: Numbers
    embedding: Numbers


def gemm_s(
    m: Numbers, n: Numbers, k: Numbers, card: Card, dtype: MatmulDtype, *, groups: Numbers | float = 1.0
) -> Numbers:
    """Return seconds of ``groups`` products (m, k) x (k, n), run as one launch; arrays broadcast.

    The tile and wave model of ``GemmCurve``: a card with S units does S tiles side by side, and the last, partly
    filled wave costs almost a whole one.
    """
    curve: GemmCurve = card.gemm_fp8 if dtype in ("fp8", "fp4") else card.gemm
    efficiencies = (curve.large, curve.large, curve.large * curve.middle, curve.large * curve.middle * 0.97,
                    curve.large * curve.small)  # fmt: skip
    peak, width = card.peak(dtype), _MATMUL_BYTES[dtype]
    peak = peak * NARROW_OF_TABLE if dtype in ("fp8", "fp4") else peak
    best: Numbers = np.array(np.inf)
    for (rows, columns), efficiency in zip(_TILES, efficiencies, strict=True):
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * groups / card.sms
        waves = (1 - curve.smoothing) * np.ceil(tiles) + curve.smoothing * np.maximum(tiles, 1.0)
        seconds = waves * (2.0 * rows * columns) * (k + curve.k0) / (peak * efficiency / card.sms)
        best = np.minimum(best, seconds)
    traffic = groups * (width * (m * k + n * k) + 2.0 * m * n) / (card.memory_bytes_per_s * curve.bandwidth_part)
    result: Numbers = np.maximum(best, traffic) + curve.launch_s
    return result


def work(
    network: Network,
    workload: Workload,
    card: Card,
    engine: Engine,
    *,
    tokens: Numbers,
    tp: Integers,
    cp: Integers,
    ep: Integers,
    etp: Integers,
    is_sequence_parallel: Integers,
) -> Work:
    """Return the work of one microbatch of ``tokens`` on each rank of a tensor-parallel group.

    ``tokens`` are those of the group: sequences x length / cp. Their attention still sees the whole sequence.
    """
    sharded = tokens / np.where(is_sequence_parallel == 1, tp, 1)
    kinds = _Kinds(network, workload, card, engine, tokens, sharded, tp)
    attention_f, attention_b = kinds.attention_matmuls()
    score_f, score_b = kinds.scores()
    memory_f, memory_b = kinds.elementwise()
    ffn_f, ffn_b = kinds.dense_matmuls(network.ffn)
    layers = network.attention_layers
    matmul_f, matmul_b = layers * attention_f, layers * attention_b
    feed_f, feed_b = network.dense_layers * ffn_f, network.dense_layers * ffn_b
    more_f, more_b = np.zeros_like(tokens), np.zeros_like(tokens)
    if network.experts is not None:
        count = network.expert_layers + network.mtp_depth
        expert_f, expert_b = kinds.expert_matmuls(ep, etp)
        more_f, more_b = kinds.routing(etp)
        feed_f, feed_b = feed_f + count * expert_f, feed_b + count * expert_b
        more_f, more_b = count * more_f, count * more_b
    if network.state_space is not None:
        mixer_f, mixer_b = kinds.mixers()
        matmul_f, matmul_b = matmul_f + mixer_f, matmul_b + mixer_b
    head_matmul, head_memory = kinds.head()
    return Work(
        matmul_f=matmul_f + feed_f,
        matmul_b=matmul_b + feed_b,
        attention_f=layers * score_f,
        attention_b=layers * score_b,
        memory_f=network.layers * memory_f + more_f,
        memory_b=network.layers * memory_b + more_b,
        ffn_f=feed_f,
        head_matmul=head_matmul * (1 + network.mtp_depth),
        head_memory=head_memory * (1 + network.mtp_depth),
        embedding=6.0 * network.hidden * sharded / (0.8 * card.memory_bytes_per_s),
    )


@dataclass(frozen=True, eq=False)
class _Kinds:
    """What all kinds of work of a microbatch need to know."""

    network: Network
    workload: Workload
    card: Card
    engine: Engine
    tokens: Numbers
    sharded: Numbers
    """Tokens of a rank where work is cut along the sequence."""
    tp: Integers

    @property
    def _precision(self) -> Precision:
        return self.workload.precision

    @property
    def _half(self) -> MatmulDtype:
        """Type of attention and head: products of linear layers may be narrower."""
        return "bf16" if self._precision.is_quantised else self._precision.matmul

    def _linear(self, m: Numbers, n: Numbers, k: Numbers, groups: Numbers | float = 1.0) -> tuple[Numbers, Numbers]:
        """Forward and backward of a linear layer of k inputs and n outputs on m tokens; of an fp8 layer with casts."""
        dtype = self._precision.matmul
        forward = gemm_s(m, n, k, self.card, dtype, groups=groups)
        backward = gemm_s(m, k, n, self.card, dtype, groups=groups) + gemm_s(k, n, m, self.card, dtype, groups=groups)
        if not self._precision.is_quantised:
            return forward, backward
        # A cast reads two bytes and writes one, twice where the transposed copy is made; scales need a pass before.
        passes = _CAST_BYTES.get(self._precision.recipe, 4.0)
        passes = passes if self.engine.has_transformer_engine else passes * _CASTS_APART
        rate = 0.8 * self.card.memory_bytes_per_s
        return forward + groups * passes * m * k / rate, backward + groups * passes * m * n / rate

    def attention_matmuls(self) -> tuple[Numbers, Numbers]:
        network = self.network
        latent = network.latent_attention
        queries = network.query_width + network.key_width + network.value_width
        out = self._linear(self.tokens, _full(self.tokens, network.hidden), network.context_width / self.tp)
        if latent is None:
            return _sum(out, self._linear(self.tokens, queries / self.tp, _full(self.tokens, network.hidden)))
        narrow = float(latent.kv_rank + latent.rope_dim)
        parts = [
            self._linear(self.sharded, _full(self.tokens, narrow), _full(self.tokens, network.hidden)),
            self._linear(
                self.tokens,
                network.heads * (latent.nope_dim + latent.value_dim) / self.tp,
                _full(self.tokens, latent.kv_rank),
            ),
        ]
        if latent.q_rank:
            parts.append(
                self._linear(self.sharded, _full(self.tokens, latent.q_rank), _full(self.tokens, network.hidden))
            )
        entry = float(latent.q_rank or network.hidden)
        parts.append(self._linear(self.tokens, network.query_width / self.tp, _full(self.tokens, entry)))
        return _sum(out, *parts)

    def scores(self) -> tuple[Numbers, Numbers]:
        network, card = self.network, self.card
        attended = network.attended(self.workload.mean_attended)
        peak = card.peak(self._half)
        if self.engine.attention == "materialised":
            return self._materialised()
        # Narrow heads feed the matrix units worse, and the diagonal is computed in whole tiles.
        width = (network.query_width + network.context_width) / (2 * network.heads)
        narrow = min(1.0, width / (width + 32.0) * 1.25)
        flops = self.tokens * network.score_flops(attended + FLASH_TILE / 2) / self.tp
        if not self.engine.has_own_attention:
            generation = "blackwell" if card.peak_fp4 else "hopper" if card.peak_fp8 else "ampere"
            peak = peak * FLASH_OF_AMPERE.get(generation, 1.0)
        forward = flops / (peak * FLASH_FORWARD * narrow)
        backward = FLASH_BACKWARD_FLOPS * flops / (peak * FLASH_BACKWARD * narrow)
        return forward, backward

    def _materialised(self) -> tuple[Numbers, Numbers]:
        """Scores of all pairs in memory: batched products, and passes of scale, mask, softmax and dropout."""
        network, card, length = self.network, self.card, self.workload.seq_len
        heads = self.tokens / length * network.heads / self.tp
        side, width = _full(self.tokens, length), _full(self.tokens, network.head_dim)
        products = gemm_s(side, side, width, card, self._half, groups=heads)
        products = products + gemm_s(side, width, side, card, self._half, groups=heads)
        backward = gemm_s(side, width, side, card, self._half, groups=heads) * 3
        backward = backward + gemm_s(side, side, width, card, self._half, groups=heads)
        if network.head_dim % 8:  # matrix units want rows of 16 bytes
            products, backward = UNALIGNED * products, UNALIGNED * backward
        elements = heads * float(length) ** 2
        passes = 8.0 + (5.0 if network.dropout else 0.0)
        rate = 0.8 * card.memory_bytes_per_s
        return products + elements * passes / rate, backward + 1.2 * elements * passes / rate

    def dense_matmuls(self, inner: int, tokens: Numbers | None = None) -> tuple[Numbers, Numbers]:
        tokens = self.tokens if tokens is None else tokens
        hidden = _full(tokens, self.network.hidden)
        up = inner * (2 if self.network.is_gated else 1) / self.tp
        return _sum(self._linear(tokens, up, hidden), self._linear(tokens, hidden, inner / self.tp))

    def expert_matmuls(self, ep: Integers, etp: Integers) -> tuple[Numbers, Numbers]:
        """Grouped products over the experts of a rank, each with its even share of tokens; router, shared experts."""
        network, experts = self.network, self.network.experts
        assert experts is not None
        local = np.maximum(experts.count / ep, 1.0)
        own = self.tokens / self.tp * etp
        share = own * experts.per_token / local * (1 + (self.engine.expert_load - 1) * (1 - 1 / ep))
        width = _full(self.tokens, experts.latent or network.hidden)
        inner = experts.ffn / etp
        up = inner * (2 if network.is_gated else 1)
        parts = [self._linear(share, up, width, local), self._linear(share, width, inner, local)]
        if experts.shared_ffn:
            parts.append(self.dense_matmuls(experts.shared_ffn))
        if experts.latent:
            wide = _full(self.tokens, network.hidden)
            latent = _full(self.tokens, experts.latent)
            parts += [self._linear(self.sharded, latent, wide), self._linear(self.sharded, wide, latent)]
        return _sum(*parts)

    def routing(self, etp: Integers) -> tuple[Numbers, Numbers]:
        """Router in fp32, tokens put in the order of their experts and back, weighted sums, activations of experts."""
        network, experts = self.network, self.network.experts
        assert experts is not None
        own = self.tokens / self.tp * etp
        width = experts.latent or network.hidden
        copies = own * experts.per_token
        activation = copies * experts.ffn / etp * (3 if network.is_gated else 2) * 2.0
        traffic = copies * width * 2.0 * 4 + activation + own * experts.count * 4.0 * 6
        forward = traffic / (0.8 * self.card.memory_bytes_per_s)
        return forward, 1.5 * forward

    def mixers(self) -> tuple[Numbers, Numbers]:
        """Mamba-2 layers: projections as products, the scan at a third of the rate of attention."""
        network, mixer = self.network, self.network.state_space
        assert mixer is not None
        inputs = 2 * mixer.inner + 2 * mixer.groups * mixer.state + mixer.heads
        hidden = _full(self.tokens, network.hidden)
        forward, backward = _sum(
            self._linear(self.tokens, inputs / self.tp, hidden),
            self._linear(self.tokens, hidden, mixer.inner / self.tp),
        )
        scan = 2.0 * 256 * (mixer.inner + mixer.groups * mixer.state) + 6.0 * mixer.inner * mixer.state
        seconds = self.tokens * scan / self.tp / (self.card.peak(self._half) * FLASH_FORWARD / 3)
        traffic = self.tokens * 24.0 * inputs / self.tp / (0.8 * self.card.memory_bytes_per_s)
        return mixer.layers * (forward + seconds + traffic), mixer.layers * (backward + 2.5 * seconds + 2 * traffic)

    def elementwise(self) -> tuple[Numbers, Numbers]:
        """Norms, residual sums, rotary turning and activation of one block, forward and backward."""
        network, engine = self.network, self.engine
        stream = self.sharded * network.hidden * (2.0 * 2 * network.norms_per_layer + 2.0 * 3 * 2)
        turned = 0.0 if network.learned_positions else 2.0 * 2
        rotary = self.tokens / self.tp * (network.query_width + network.key_width) * turned
        part = network.dense_layers / network.layers
        activation = self.tokens / self.tp * network.ffn * 2.0 * (3 if network.is_gated else 2) * part
        drop = self.sharded * network.hidden * 2 * 3.0 if network.dropout else 0.0
        bytes_moved = (stream + rotary + activation + drop) * EAGER_TRAFFIC[engine.norms]
        forward = bytes_moved / (0.8 * self.card.memory_bytes_per_s)
        return forward, 1.6 * forward

    def head(self) -> tuple[Numbers, Numbers]:
        """Logits, loss and their gradients: three products and the passes over all logits."""
        network, card = self.network, self.card
        vocab, hidden = network.vocab / self.tp, _full(self.tokens, network.hidden)
        products = gemm_s(self.tokens, vocab, hidden, card, self._half)
        products = products + gemm_s(self.tokens, hidden, vocab, card, self._half)
        products = products + gemm_s(hidden, vocab, self.tokens, card, self._half)
        traffic = self.tokens * vocab * LOSS_BYTES[self.engine.loss]
        return products, traffic / (0.8 * card.memory_bytes_per_s)


def _full(like: Numbers, value: float) -> Numbers:
    return np.full_like(like, value)


def _sum(*parts: tuple[Numbers, Numbers]) -> tuple[Numbers, Numbers]:
    forward, backward = parts[0]
    for more_f, more_b in parts[1:]:
        forward, backward = forward + more_f, backward + more_b
    return forward, backward


def optimizer_s(workload: Workload, card: Card, updated: Numbers) -> Numbers:
    """Return seconds to update ``updated`` weights on a rank, which is bound by memory, gradient norm included."""
    return updated * OPTIMIZER_BYTES[workload.optimizer] / (0.8 * card.memory_bytes_per_s)
