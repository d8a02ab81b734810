"""What is the network: an embedding, a row of layers, a last norm and a head.

Layers stand in a dict under their global index, and any part may be absent: a pipeline stage is the same class with
parts left out, and no weight ever changes its name.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from triax.nn.attention import WHOLE_SEQUENCES, Attention
from triax.nn.embedding import Embedding
from triax.nn.feed_forward import FeedForward
from triax.nn.loss import Vocabulary, cross_entropy_sum
from triax.nn.moe import MixtureOfExperts
from triax.nn.norm import RMSNorm
from triax.nn.rope import Rotation
from triax.spec.model import ModelSpec, Reach
from triax.spec.weights import LAYER_NORMS


class Layer(nn.Module):
    """Attention and feed-forward (or experts), each added to the residual stream, with norms before or after them."""

    def __init__(self, model: ModelSpec, index: int) -> None:
        super().__init__()
        self.reach: Reach = model.reach(index)
        self.has_positions = index not in model.layers_without_rope
        self.self_attn = Attention(model, index)
        self.mlp: FeedForward | MixtureOfExperts
        if index in model.sparse_layers:
            self.mlp = MixtureOfExperts(model)
        else:
            self.mlp = FeedForward(model, model.intermediate_size, has_bias=model.mlp_bias)
        self.residual_multiplier = model.residual_multiplier
        self.norm_names = LAYER_NORMS[model.norm_placement]
        for name in self.norm_names:
            if name is not None:
                self.add_module(name, RMSNorm(model.hidden_size, model))

    def forward(self, hidden_BSD: Tensor, rotations: Mapping[Reach, Rotation], cu_seqlens: Tensor | None) -> Tensor:
        """Return the residual stream (B, S, D) after this layer."""
        before_attention, after_attention, before_mlp, after_mlp = self.norm_names
        rotation = rotations[self.reach] if self.has_positions else None
        attended = self.self_attn(self._normed(before_attention, hidden_BSD), rotation, cu_seqlens)
        hidden_BSD = self._add(hidden_BSD, self._normed(after_attention, attended))
        fed = self.mlp(self._normed(before_mlp, hidden_BSD))
        return self._add(hidden_BSD, self._normed(after_mlp, fed))

    def _normed(self, name: str | None, x_BSD: Tensor) -> Tensor:
        if name is None:
            return x_BSD
        normed: Tensor = self.get_submodule(name)(x_BSD)
        return normed

    def _add(self, hidden_BSD: Tensor, written_BSD: Tensor) -> Tensor:
        if self.residual_multiplier != 1.0:
            written_BSD = written_BSD * self.residual_multiplier
        return hidden_BSD + written_BSD


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
        self.vocabulary = Vocabulary()
        self.context = WHOLE_SEQUENCES
        indices = range(model.num_hidden_layers) if layers is None else layers
        has_table = is_first or (is_last and model.tie_word_embeddings)
        self.embed_tokens = Embedding(model.vocab_size, model.hidden_size) if has_table else None
        self.layers = nn.ModuleDict({str(index): Layer(model, index) for index in indices})
        self.norm = RMSNorm(model.hidden_size, model) if is_last else None
        has_own_head = is_last and not model.tie_word_embeddings
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False) if has_own_head else None

    def forward(
        self, x: Tensor, positions_BS: Tensor, cu_seqlens: Tensor | None = None, labels_BS: Tensor | None = None
    ) -> Tensor:
        """Return what this part makes of ``x``.

        ``x`` is tokens (B, S) where the part is the first, else hidden states (B, S, D). The result is hidden states
        where it is not the last; else the loss as a sum over ``labels`` (``triax.nn.loss``), or logits (B, S, V) where
        there are no labels. ``positions`` count inside documents; ``cu_seqlens``: see ``Attention.forward``.

        Tokens, positions and labels are of whole sequences also where these are cut over ranks; hidden states, logits
        and the loss are of the positions that are here (``context``).
        """
        part = self.context.part
        hidden_BSD = self._embedded(part(x)) if self.is_first else x
        reaches = {self.model.reach(int(index)) for index in self.layers}
        rotations = {
            reach: Rotation.at(positions_BS, cu_seqlens, self.model, reach, hidden_BSD.dtype, part) for reach in reaches
        }
        for layer in self.layers.values():
            hidden_BSD = layer(hidden_BSD, rotations, cu_seqlens)
        if self.norm is None:
            return hidden_BSD
        hidden_BSD = self.norm(hidden_BSD)
        if self.model.logits_scaling != 1.0:
            hidden_BSD = hidden_BSD / self.model.logits_scaling
        head_VD = self.vocabulary.head(self._head())
        if labels_BS is None:
            return self.vocabulary.gather(hidden_BSD @ head_VD.T)
        return cross_entropy_sum(hidden_BSD.flatten(0, 1), head_VD, part(labels_BS).flatten(), self.vocabulary)

    def _embedded(self, tokens_BS: Tensor) -> Tensor:
        assert self.embed_tokens is not None
        embedded: Tensor = self.embed_tokens(tokens_BS)
        multiplier = self.model.embedding_multiplier
        return embedded if multiplier == 1.0 else embedded * multiplier

    def _head(self) -> Tensor:
        owner = self.lm_head if self.lm_head is not None else self.embed_tokens
        assert owner is not None
        return owner.weight
