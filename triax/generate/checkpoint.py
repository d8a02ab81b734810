"""How does a saved state become a network that writes?"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from triax.checkpoint.carried import tokenizer_of
from triax.checkpoint.find import find_verified, model_of
from triax.checkpoint.format import MANIFEST
from triax.checkpoint.hf_folder import open_hf_folder
from triax.checkpoint.load import load
from triax.data.tokenizer import Tokenizer, load_tokenizer
from triax.errors import BadInput
from triax.generate.sample import Sampling, continue_tokens
from triax.nn.decoder import Decoder
from triax.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Writer:
    """A network and its tokenizer."""

    network: Decoder
    tokenizer: Tokenizer

    max_context: int
    """Tokens the network was trained to see at once."""

    def write(self, prompt: str, num_tokens: int, sampling: Sampling) -> Iterator[str]:
        """Yield ``prompt`` and then the text of each token after it."""
        (ids,) = self.tokenizer.encode_batch([prompt])
        eos_id = self.tokenizer.eos_id
        shown = self.tokenizer.decode(list(ids))
        yield shown
        tokens = list(map(int, ids)) or [eos_id]
        for token in continue_tokens(
            self.network, tokens, num_tokens, sampling, eos_id=eos_id, max_context=self.max_context
        ):
            if token == eos_id:
                return
            tokens.append(token)
            # A character may need several tokens: what is not whole yet is shown when it is.
            text = self.tokenizer.decode(tokens)
            if not text.endswith("�") and text.startswith(shown):
                yield text[len(shown) :]
                shown = text


def open_writer(path: Path) -> Writer:
    """Return the network at ``path`` in fp32: a checkpoint, the newest one of a run's folder, or a Hugging Face folder.

    Raises BadInput where there is none that can be trusted, or no tokenizer of it.
    """
    if (path / "config.json").exists() and not (path / MANIFEST).exists():
        folder = open_hf_folder(path)
        network = _without_values(folder.model)
        for name, parameter in network.named_parameters():
            parameter.detach().copy_(folder.rows[name].tensor())
        return Writer(network, load_tokenizer(str(path)), folder.model.max_position_embeddings)
    checkpoint = find_verified(path)
    extra = checkpoint.manifest.extra
    model = model_of(checkpoint)
    tokenizer = tokenizer_of(checkpoint.folder, extra)
    if tokenizer is None:
        raise BadInput(f"{checkpoint.folder} has no tokenizer: it was imported from a folder without tokenizer.json.")
    network = _without_values(model)
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    load(checkpoint, weights, unread=("optimizer.",))
    seq_len = extra.get("seq_len")
    context = seq_len if isinstance(seq_len, int) and seq_len > 0 else model.max_position_embeddings
    return Writer(network, load_tokenizer(tokenizer), context)


def _without_values(model: ModelSpec) -> Decoder:
    """Return the network with memory for its weights and nothing in it."""
    with torch.device("meta"):
        network = Decoder(model)
    return network.to_empty(device="cpu")
