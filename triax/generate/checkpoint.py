"""How does a saved state become a network that writes?"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from triax.checkpoint.format import Checkpoint
from triax.checkpoint.load import load
from triax.checkpoint.verify import newest_verified, verified
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
    """Return the network saved at ``path`` (a checkpoint, or a run's folder for its newest) in its master precision."""
    checkpoint = _find(path)
    extra = checkpoint.manifest.extra
    try:
        model = ModelSpec.model_validate(extra.get("model"))
    except ValidationError:
        raise BadInput(f"{checkpoint.folder} does not say which model it is of: it was not saved by a run.") from None
    with torch.device("meta"):
        network = Decoder(model)
    network.to_empty(device="cpu")
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    load(checkpoint, weights, unread=("optimizer.",))
    seq_len = extra.get("seq_len")
    context = seq_len if isinstance(seq_len, int) and seq_len > 0 else model.max_position_embeddings
    return Writer(network, load_tokenizer(str(extra.get("tokenizer"))), context)


def _find(path: Path) -> Checkpoint:
    if not path.is_dir():
        raise BadInput(f"{path} is no folder: give a run's folder, such as runs/NAME, or one of its checkpoints.")
    folder = path / "checkpoints"
    if not folder.is_dir():
        return verified(path)
    checkpoint, passed_over = newest_verified(folder)
    if checkpoint is None:
        raise BadInput(f"{folder} holds no saved state that can be trusted. {' '.join(passed_over)}")
    return checkpoint
