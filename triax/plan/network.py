"""Which network is planned for? Dimensions alone, wider than what triax itself trains, and what follows from them.

Parameters and operations of each part are properties here, so that memory and time count the same parts. For networks
that a ``ModelSpec`` can say, a test holds the counts equal to the weights table.
"""

from dataclasses import dataclass
from typing import Literal

from triax.spec.model import ModelSpec

NormKind = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values through low ranks."""

    q_rank: int
    """Width of the query latent; 0: queries are projected directly."""
    kv_rank: int
    nope_dim: int
    """Part of a query and key head that knows no position."""
    rope_dim: int
    """Part that turns; one key of it is shared by all heads."""
    value_dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Feed-forward layers of which each token uses a few."""

    count: int
    per_token: int
    ffn: int
    """Inner width of one expert."""
    shared_ffn: int = 0
    """Inner width of what every token passes besides, all shared experts together; 0: none."""
    dense_layers: int = 0
    """Layers whose feed-forward is an ordinary one; the others have experts."""
    latent: int = 0
    """Width that tokens are narrowed to before they are sent to experts; 0: they stay as wide as the network."""


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Mamba-2 mixers (arXiv:2405.21060) in hybrid networks."""

    layers: int
    """Layers that have such a mixer and nothing else."""
    inner: int
    """Width inside the mixer."""
    state: int
    groups: int
    heads: int


@dataclass(frozen=True, slots=True)
class Network:
    """A decoder: ``attention_layers`` of attention and ``ffn_layers`` of feed-forward, in ``layers`` blocks.

    In an ordinary transformer every block has one of each. In a hybrid one (``state_space``) each block has one of
    three.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Inner width of an ordinary feed-forward layer."""
    vocab: int
    is_gated: bool = True
    """Three matrices in feed-forward (SwiGLU) instead of two (GELU, squared ReLU)."""
    is_tied: bool = False
    norm: NormKind = "rms"
    norms_per_layer: int = 2
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    learned_positions: int = 0
    """Rows of a learned table of positions; 0: rotary or none."""
    window: int | None = None
    windowed_layers: int = 0
    """Layers of attention that see ``window`` positions only."""
    latent_attention: LatentAttention | None = None
    experts: Experts | None = None
    state_space: StateSpace | None = None
    num_attention: int | None = None
    """Blocks with attention; absent means all."""
    num_ffn: int | None = None
    """Blocks with a feed-forward, dense or of experts; absent means all."""
    mtp_depth: int = 0
    """Extra layers that predict tokens further ahead (DeepSeek-V3, arXiv:2412.19437), each with the head once more."""
    dropout: float = 0.0
    name: str = ""

    @property
    def attention_layers(self) -> int:
        """Blocks with attention, those that predict further ahead not counted."""
        return self.layers if self.num_attention is None else self.num_attention

    @property
    def ffn_layers(self) -> int:
        """Blocks with a feed-forward, dense or of experts."""
        return self.layers if self.num_ffn is None else self.num_ffn

    @property
    def expert_layers(self) -> int:
        """Blocks with experts."""
        return 0 if self.experts is None else self.ffn_layers - self.experts.dense_layers

    @property
    def dense_layers(self) -> int:
        """Blocks with an ordinary feed-forward."""
        return self.ffn_layers - self.expert_layers

    @property
    def query_width(self) -> int:
        """Numbers of all query heads together."""
        latent = self.latent_attention
        return self.heads * (self.head_dim if latent is None else latent.nope_dim + latent.rope_dim)

    @property
    def key_width(self) -> int:
        """Numbers of all key heads together, as attention sees them."""
        return self.query_width if self.latent_attention is not None else self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Numbers of all value heads together, as attention sees them."""
        latent = self.latent_attention
        return self.kv_heads * self.head_dim if latent is None else self.heads * latent.value_dim

    @property
    def context_width(self) -> int:
        """Numbers that attention returns for a position: query heads x width of a value."""
        latent = self.latent_attention
        return self.heads * (self.head_dim if latent is None else latent.value_dim)

    @property
    def attention_matrices(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each matrix of one attention layer; queries, keys and values are one."""
        latent, hidden = self.latent_attention, self.hidden
        if latent is None:
            return (hidden, self.query_width + self.key_width + self.value_width), (self.context_width, hidden)
        keys_values = self.heads * (latent.nope_dim + latent.value_dim)
        queries = (
            ((hidden, latent.q_rank), (latent.q_rank, self.query_width))
            if latent.q_rank
            else ((hidden, self.query_width),)
        )
        return (
            *queries, (hidden, latent.kv_rank + latent.rope_dim), (latent.kv_rank, keys_values),
            (self.context_width, hidden),
        )  # fmt: skip

    def ffn_matrices(self, inner: int, width: int | None = None) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each matrix of a feed-forward of ``inner``; gate and up are one matrix.

        ``width`` is what it reads and writes where that is not the network's own.
        """
        outer = self.hidden if width is None else width
        return (outer, inner * (2 if self.is_gated else 1)), (inner, outer)

    @property
    def attention_parameters(self) -> int:
        """Numbers of one attention layer, its norms of queries and keys included."""
        numbers = _numel(self.attention_matrices)
        if self.has_qkv_bias:
            numbers += self.query_width + self.key_width + self.value_width
        numbers += self.hidden if self.has_out_bias else 0
        if self.latent_attention is not None:
            return numbers + self.latent_attention.q_rank + self.latent_attention.kv_rank
        return numbers + {"none": 0, "head": 2 * self.head_dim, "full": self.query_width + self.key_width}[self.qk_norm]

    @property
    def dense_ffn_parameters(self) -> int:
        """Numbers of one ordinary feed-forward."""
        bias = self.ffn * (2 if self.is_gated else 1) + self.hidden if self.has_mlp_bias else 0
        return _numel(self.ffn_matrices(self.ffn)) + bias

    @property
    def expert_parameters(self) -> int:
        """Numbers of one expert; 0 where there are none."""
        if self.experts is None:
            return 0
        bias = self.experts.ffn * (2 if self.is_gated else 1) + self.hidden if self.has_mlp_bias else 0
        return _numel(self.ffn_matrices(self.experts.ffn, self.experts.latent or None)) + bias

    @property
    def shared_parameters(self) -> int:
        """Numbers of an expert layer that every token uses: router, shared experts, way into and out of the latent."""
        experts = self.experts
        if experts is None:
            return 0
        shared = _numel(self.ffn_matrices(experts.shared_ffn)) if experts.shared_ffn else 0
        return self.hidden * experts.count + shared + 2 * self.hidden * experts.latent

    @property
    def expert_layer_parameters(self) -> int:
        """Numbers of the feed-forward of one layer with experts."""
        return 0 if self.experts is None else self.experts.count * self.expert_parameters + self.shared_parameters

    @property
    def state_space_parameters(self) -> int:
        """Numbers of one Mamba-2 mixer: projections in and out, a short convolution, and a few per head."""
        mixer = self.state_space
        if mixer is None:
            return 0
        wide = mixer.inner + 2 * mixer.groups * mixer.state
        return (
            self.hidden * (mixer.inner + wide + mixer.heads)
            + mixer.inner * self.hidden
            + 5 * wide
            + 3 * mixer.heads
            + mixer.inner
        )

    @property
    def norm_parameters(self) -> int:
        """Numbers of one norm over the residual stream."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def embedding_parameters(self) -> int:
        """Numbers of the embedding and of the table of positions."""
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Numbers of the head; a tied one has none of its own."""
        return 0 if self.is_tied else self.vocab * self.hidden

    @property
    def layers_parameters(self) -> int:
        """Numbers of all blocks together, norms included."""
        mixers = 0 if self.state_space is None else self.state_space.layers * self.state_space_parameters
        norms = self.norms_per_layer * self.layers if self.state_space is None else self.layers
        return (
            self.attention_layers * self.attention_parameters
            + self.dense_layers * self.dense_ffn_parameters
            + self.expert_layers * self.expert_layer_parameters
            + mixers
            + norms * self.norm_parameters
        )

    @property
    def mtp_parameters(self) -> int:
        """Numbers of the layers that predict further ahead; embedding and head are the network's own."""
        feed_forward = self.expert_layer_parameters if self.expert_layers else self.dense_ffn_parameters
        one = self.attention_parameters + feed_forward + 2 * self.hidden**2 + 5 * self.norm_parameters
        return self.mtp_depth * one

    @property
    def parameters(self) -> int:
        """All numbers that are trained; a tied embedding counts once."""
        outside = self.embedding_parameters + self.head_parameters + self.norm_parameters
        return outside + self.layers_parameters + self.mtp_parameters

    @property
    def active_parameters(self) -> int:
        """Numbers that one token uses, the embedding included."""
        if self.experts is None:
            return self.parameters
        idle = (self.experts.count - self.experts.per_token) * self.expert_parameters
        return self.parameters - (self.expert_layers + self.mtp_depth) * idle

    def attended(self, attended: float) -> float:
        """Return the mean over attention layers of positions seen, where an unwindowed layer sees ``attended``."""
        if self.window is None or self.windowed_layers == 0:
            return attended
        # Of a causal sequence of 2 x attended positions; the exact sum is triax.spec.flops.mean_attended.
        length = max(2.0 * attended - 1.0, 1.0)
        seen = min(length, float(self.window))
        windowed = (seen * (seen + 1) / 2 + (length - seen) * seen) / length
        part = self.windowed_layers / self.attention_layers
        return part * windowed + (1 - part) * attended

    def score_flops(self, attended: float) -> float:
        """Return forward FLOPs of one token in one attention layer's scores, with ``attended`` positions seen."""
        return 2.0 * (self.query_width + self.context_width) * attended

    def forward_flops(self, attended: float) -> dict[str, float]:
        """Return forward FLOPs of one token by part: a multiply-add is 2, element-wise work is not counted.

        ``attended`` is the mean of positions seen by a layer without a window.
        """
        experts, mixer = self.experts, self.state_space
        routed = shared = 0.0
        if experts is not None:
            routed = 2.0 * experts.per_token * _numel(self.ffn_matrices(experts.ffn, experts.latent or None))
            shared = 2.0 * self.shared_parameters
        mtp = self.mtp_depth
        return {
            "attention projections": 2.0 * (self.attention_layers + mtp) * _numel(self.attention_matrices),
            "attention scores": (self.attention_layers + mtp) * self.score_flops(self.attended(attended)),
            "mlp": 2.0 * self.dense_layers * _numel(self.ffn_matrices(self.ffn)),
            "experts": (self.expert_layers + mtp) * (routed + shared),
            "state space": 0.0 if mixer is None else mixer.layers * self._mixer_flops(mixer),
            "head": 2.0 * (1 + mtp) * self.vocab * self.hidden + 4.0 * mtp * self.hidden**2,
        }

    def _mixer_flops(self, mixer: StateSpace) -> float:
        """Projections, and the scan in chunks of 256 (arXiv:2405.21060, section 6)."""
        wide = mixer.inner + 2 * mixer.groups * mixer.state
        projections = 2.0 * self.hidden * (2 * mixer.inner + wide + mixer.heads)
        return projections + 2.0 * 256 * (mixer.inner + mixer.groups * mixer.state) + 6.0 * mixer.inner * mixer.state


def _numel(matrices: tuple[tuple[int, int], ...]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices)


def network_of(model: ModelSpec) -> Network:
    """Return the network that a run's model is."""
    local = sum(model.reach(layer) == "local" for layer in range(model.num_hidden_layers))
    return Network(
        layers=model.num_hidden_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_width,
        ffn=model.intermediate_size,
        vocab=model.vocab_size,
        is_tied=model.tie_word_embeddings,
        norms_per_layer=4 if model.norm_placement == "both" else 2,
        has_qkv_bias=model.attention_bias,
        has_out_bias=model.attention_out_bias,
        has_mlp_bias=model.mlp_bias,
        qk_norm=model.qk_norm,
        window=model.sliding_window,
        windowed_layers=local,
        experts=_experts_of(model),
        name=model.family,
    )


def _experts_of(model: ModelSpec) -> Experts | None:
    if model.experts is None:
        return None
    return Experts(
        count=model.experts.num_experts,
        per_token=model.experts.num_experts_per_tok,
        ffn=model.experts.moe_intermediate_size,
        shared_ffn=model.experts.shared_expert_intermediate_size,
        dense_layers=model.num_hidden_layers - len(model.sparse_layers),
    )
