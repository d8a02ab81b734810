"""What is the network: an embedding, a row of layers, a last norm and a head.

Layers stand in a dict under their global index, and any part may be absent: a pipeline stage is the same class with
parts left out, and no weight ever changes its name.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from triax.nn.attention import Attention, Rotation
from triax.nn.feed_forward import FeedForward
from triax.nn.loss import cross_entropy_sum
from triax.nn.norm import RMSNorm
from triax.spec.model import ModelSpec


class Layer(nn.Module):
    """Attention and feed-forward, each added to the residual stream after a norm of its input."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.mlp = FeedForward(model)

    def forward(self, hidden_BSD: Tensor, rotation: Rotation, cu_seqlens: Tensor | None) -> Tensor:
        """Return the residual stream (B, S, D) after this layer."""
        hidden_BSD = hidden_BSD + self.self_attn(self.input_layernorm(hidden_BSD), rotation, cu_seqlens)
        out: Tensor = hidden_BSD + self.mlp(self.post_attention_layernorm(hidden_BSD))
        return out


class Decoder(nn.Module):
    """A decoder, or the part of one that a pipeline stage owns."""

    def __init__(
        self, model: ModelSpec, layers: Iterable[int] | None = None, *, is_first: bool = True, is_last: bool = True
    ) -> None:
        """Build the layers with indices ``layers`` (None: all); the embedding if ``is_first``, norm and head if
        ``is_last``. Weights are left as torch makes them: build on ``meta`` and fill them with ``triax.nn.init``."""
        super().__init__()
        self.model = model
        self.is_first, self.is_last = is_first, is_last
        indices = range(model.num_hidden_layers) if layers is None else layers
        has_table = is_first or (is_last and model.tie_word_embeddings)
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size) if has_table else None
        self.layers = nn.ModuleDict({str(index): Layer(model) for index in indices})
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps) if is_last else None
        has_own_head = is_last and not model.tie_word_embeddings
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False) if has_own_head else None

    def forward(
        self, x: Tensor, positions_BS: Tensor, cu_seqlens: Tensor | None = None, labels_BS: Tensor | None = None
    ) -> Tensor:
        """Return what this part makes of ``x``.

        ``x`` is tokens (B, S) where the part is the first, else hidden states (B, S, D). The result is hidden states
        where it is not the last; else the loss as a sum over ``labels`` (``triax.nn.loss``), or logits (B, S, V) where
        there are no labels. ``positions`` count inside documents; ``cu_seqlens``: see ``Attention.forward``.
        """
        hidden_BSD: Tensor = self.embed_tokens(x) if self.is_first and self.embed_tokens is not None else x
        rotation = Rotation.at(positions_BS, self.model, hidden_BSD.dtype)
        for layer in self.layers.values():
            hidden_BSD = layer(hidden_BSD, rotation, cu_seqlens)
        if self.norm is None:
            return hidden_BSD
        hidden_BSD = self.norm(hidden_BSD)
        head_VD = self._head()
        if labels_BS is None:
            return hidden_BSD @ head_VD.T
        return cross_entropy_sum(hidden_BSD.flatten(0, 1), head_VD, labels_BS.flatten())

    def _head(self) -> Tensor:
        owner = self.lm_head if self.lm_head is not None else self.embed_tokens
        assert owner is not None
        return owner.weight
