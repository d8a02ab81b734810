"""Is an exported folder the network that was trained? Both read the same text before the export is called done.

The two are walked through layer by layer, so that a comparison needs the memory of one layer and not of two models, and
so that a difference is told by the first layer where it shows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from triax.checkpoint.carried import tokenizer_of
from triax.checkpoint.disk import new_folder
from triax.checkpoint.find import find_verified, model_of
from triax.checkpoint.format import Checkpoint
from triax.checkpoint.hf_folder import open_hf_folder
from triax.checkpoint.huggingface import TORCH_DTYPES, ExportDtype, Written, exported_dtype, write_hf_folder
from triax.checkpoint.load import read_tensor
from triax.data.tokenizer import Tokenizer, load_tokenizer
from triax.errors import BadInput, TriaxError
from triax.nn.decoder import Decoder
from triax.spec.model import ModelSpec
from triax.spec.weights import num_parameters

_TEXT: Final = """\
The river rose in the night, and by morning the lower fields were under water. Anna counted the sheep on the hill:
forty-one, and one missing. "She will have gone to the old mill," said her brother; "they always do." In 1953 the water
had stood 2.4 metres higher, and a line on the church wall still shows it.

def area(radius):
    return 3.14159 * radius ** 2
"""
_MOST_TOKENS: Final = 96
_TOLERANCE: Final = 1e-5
"""Of values in fp32, as a part of the largest. The same weights go through the same code: they are equal or wrong."""

Weights = Callable[[str], Tensor]
"""Returns a weight by its name in the weights table."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and how it compares."""

    written: Written
    dtype: ExportDtype
    tokens: int
    """How many tokens both have read."""
    text: str
    """What they were: of which tokenizer, or random."""
    largest_logit: float
    difference: float
    """Largest difference of logits between the folder and the checkpoint with its weights rounded as in the folder."""
    rounding: float
    """Largest difference between the folder and the checkpoint as it is: what rounding to ``dtype`` has changed."""


def export_checkpoint(path: Path, hf_folder: Path, dtype: ExportDtype | None = None) -> Exported:
    """Write the checkpoint at ``path`` (or the newest of a run's folder) to ``hf_folder`` for other tools to open.

    The folder appears when it was read back and found to give the logits that the checkpoint gives; until then, and
    where they differ, nothing is there. ``dtype``: see ``exported_dtype``. Raises BadInput where there is no checkpoint
    to trust, where no architecture of Hugging Face's is this network, and where ``hf_folder`` exists and is not empty;
    TriaxError where logits differ or the disk fails.
    """
    checkpoint = find_verified(path)
    model = model_of(checkpoint)
    dtype = dtype or exported_dtype(checkpoint)
    tokenizer = _tokenizer(checkpoint, model)
    with new_folder(hf_folder, num_parameters(model) * TORCH_DTYPES[dtype].itemsize) as folder:
        token_ids = {} if tokenizer is None else {"eos_token_id": tokenizer.eos_id}
        written = write_hf_folder(checkpoint, folder, dtype, token_ids)
        tokens, text = _tokens(tokenizer, model)
        largest, difference, rounding = _compared(checkpoint, folder, tokens, dtype)
    return Exported(written, dtype, tokens.numel(), text, largest, difference, rounding)


def _tokenizer(checkpoint: Checkpoint, model: ModelSpec) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint if there is one whose ids are rows of the embedding."""
    said = tokenizer_of(checkpoint.folder, checkpoint.manifest.extra)
    if said is None:
        return None
    try:
        tokenizer = load_tokenizer(said)
    except BadInput:
        return None
    return tokenizer if tokenizer.vocab_size <= model.vocab_size else None


def _tokens(tokenizer: Tokenizer | None, model: ModelSpec) -> tuple[Tensor, str]:
    """Return token ids (1, S) and what they are: of real text, or random where there is no tokenizer."""
    most = min(_MOST_TOKENS, model.max_position_embeddings)
    if tokenizer is not None:
        (ids,) = tokenizer.encode_batch([_TEXT])
        if len(ids):
            return torch.tensor(ids[:most].astype("int64")).unsqueeze(0), f"of text, by {tokenizer.name}"
    random = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab_size, (1, most), generator=random), "at random, since there is no tokenizer"


@torch.no_grad()
def _compared(checkpoint: Checkpoint, folder: Path, tokens: Tensor, dtype: ExportDtype) -> tuple[float, float, float]:
    """Return the largest logit, and the differences that Exported tells; raise TriaxError where the folder is wrong."""
    exported = open_hf_folder(folder)
    model = model_of(checkpoint)

    def as_saved(name: str) -> Tensor:
        return read_tensor(checkpoint, name).float()

    def as_rounded(name: str) -> Tensor:
        return read_tensor(checkpoint, name).to(TORCH_DTYPES[dtype]).float()

    def as_exported(name: str) -> Tensor:
        return exported.rows[name].tensor().float()

    walks = (
        _walk(exported.model, as_exported, tokens),
        _walk(model, as_rounded, tokens),
        _walk(model, as_saved, tokens),
    )
    largest = difference = rounding = 0.0
    for (part, found), (_, expected), (_, unrounded) in zip(*walks, strict=True):
        largest = expected.abs().max().item()
        difference = (found - expected).abs().max().item()
        rounding = (found - unrounded).abs().max().item()
        # Written so that NaN is a difference too.
        if not difference <= _TOLERANCE * max(largest, 1.0):
            raise TriaxError(
                f"the exported folder is not the network of {checkpoint.folder}: on the same {tokens.numel()} tokens, "
                f"what {part} gives differs by {difference:.3g} where the largest value is {largest:.3g}; nothing was "
                f"kept."
            )
    return largest, difference, rounding


def _walk(model: ModelSpec, weights: Weights, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what each part of the network makes of ``tokens``, the logits last, with one part in memory at a time."""
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    value = tokens
    parts: list[tuple[str, list[int]]] = [("the embedding", [])]
    parts += [(f"layer {layer}", [layer]) for layer in range(model.num_hidden_layers)]
    parts += [("the head", [])]
    for index, (name, layers) in enumerate(parts):
        with torch.device("meta"):
            part = Decoder(model, layers, is_first=index == 0, is_last=index == len(parts) - 1)
        part.to_empty(device="cpu")
        for of_part, parameter in part.named_parameters():
            parameter.copy_(weights(of_part))
        value = part(value, positions)
        yield name, value
