"""Does a Hugging Face folder hold the weights that its config.json says, and where does each of them lie?

Everything is checked from headers alone, before a single weight is read.
"""

import os
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from triax.checkpoint.carried import read_config, read_text_of, real_file
from triax.checkpoint.tensor_file import Rows, Stacked, Stored, read_header
from triax.errors import BadInput
from triax.spec.huggingface import Source, model_from_config, tensor_sources
from triax.spec.legal_values import both
from triax.spec.model import ModelSpec
from triax.spec.text_file import parse_json
from triax.spec.weights import Weight, weights_table

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_LARGEST_INDEX_BYTES: Final = 64 << 20
_HARMLESS: Final = re.compile(r".*\.rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)")
"""Buffers that older versions of transformers saved, and that follow from config.json."""
_HEAD: Final = "lm_head.weight"
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_LONGEST_LIST: Final = 1500


@dataclass(frozen=True)
class HfFolder:
    """A folder whose headers were found to fit its config.json."""

    folder: Path
    config: Mapping[str, Any]
    model: ModelSpec
    rows: Mapping[str, Stacked]
    """Where each weight of the weights table lies, by its name there; several may be rows of one stored tensor, and one
    may be several stored tensors."""


def open_hf_folder(folder: Path) -> HfFolder:
    """Return the folder of a model in safetensors files, as ``save_pretrained`` of transformers writes it.

    Raises BadInput with one sentence for a folder without config.json, of an unknown architecture or with weights that
    only unpickling could read; for an index or header that is hostile; and with all names for tensors that are missing,
    too many, or of another shape than config.json makes them. Tolerated are buffers of rotary positions, and a head
    that is stored although it is the embedding, provided that the two are equal.
    """
    if not os.path.isdir(folder):  # unlike Path.is_dir, no error for a name that is too long
        raise BadInput(f"{folder} is no folder: give one that holds config.json and {WEIGHTS_FILE}.")
    if not (folder / "config.json").exists():
        raise BadInput(f"{folder} holds no config.json: give the folder of a model, as save_pretrained writes it.")
    config = read_config(folder)
    model = model_from_config(config, str(folder / "config.json"))
    stored = _stored(folder)
    rows = _fit(folder, model, stored)
    return HfFolder(folder, config, model, rows)


def _stored(folder: Path) -> dict[str, Stored]:
    """Return every tensor of the folder by its name."""
    has_file, has_index = ((folder / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE))
    if has_index:
        named = _read_index(folder)
        if has_file and WEIGHTS_FILE not in named.values():
            raise BadInput(
                f"{folder} holds two sets of weights, {WEIGHTS_FILE} and what {INDEX_FILE} lists: remove one of them."
            )
    elif has_file:
        named = dict.fromkeys(read_header(real_file(folder, WEIGHTS_FILE)), WEIGHTS_FILE)
    else:
        raise BadInput(_no_weights(folder))
    stored: dict[str, Stored] = {}
    for file in sorted(set(named.values())):
        header = read_header(_shard(folder, file))
        listed = {name for name, of_file in named.items() if of_file == file}
        if absent := listed - header.keys():
            raise BadInput(f"{folder / INDEX_FILE} puts {listing(absent)} into {file}, which does not hold it.")
        if unlisted := header.keys() - listed:
            raise BadInput(f"{folder / file} holds {listing(unlisted)}, which {INDEX_FILE} does not put there.")
        stored |= header
    return stored


def _read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    origin = str(folder / INDEX_FILE)
    named = parse_json(read_text_of(folder, INDEX_FILE, _LARGEST_INDEX_BYTES), origin).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise BadInput(f"{origin} holds no weight_map from names of tensors to names of files.")
    return named


def _shard(folder: Path, file: str) -> Path:
    real = real_file(folder, file)
    if not file.endswith(".safetensors"):
        raise BadInput(f"{folder / INDEX_FILE} names {file!r:.80}: only safetensors files are opened.")
    if not real.exists():
        raise BadInput(f"{folder / file}, which {INDEX_FILE} names, is missing: download it again.")
    return real


def _no_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        return (
            f"{folder} holds its weights as {pickles[0]}, a pickle, which can run any code when it is opened, and is "
            f"never opened here: convert it once where that is safe, with transformers' "
            f"from_pretrained(FOLDER).save_pretrained(NEW_FOLDER), and give NEW_FOLDER."
        )
    tensors = [name for name in names if name.endswith((".safetensors", ".gguf"))][:3]
    beside = f"; {', '.join(tensors)} is of another kind" if tensors else ""
    return f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}{beside}."


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a weight that are rows of a tensor in a folder."""

    weight: Weight
    rows: range
    """Of the weight."""
    first: int
    """Row of the tensor where they begin."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Their shape."""
        return (len(self.rows), *self.weight.shape[1:])


def blocks_by_tensor(model: ModelSpec, sources: Mapping[str, Sequence[Source]]) -> dict[str, list[Block]]:
    """Return what makes up each tensor of a folder, in the order of its rows; tensors in the order of the network.

    ``sources`` are those of ``tensor_sources``.
    """
    found: dict[str, list[Block]] = {}
    for weight in weights_table(model):
        parts = sources[weight.name]
        each = weight.shape[0] // len(parts)
        for number, part in enumerate(parts):
            block = Block(weight, range(number * each, (number + 1) * each), part.first_row)
            found.setdefault(part.hf_name, []).append(block)
    return {name: sorted(blocks, key=lambda block: block.first) for name, blocks in found.items()}


def stacked_shape(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Return the shape of blocks one below the other."""
    return (sum(len(block.rows) for block in blocks), *blocks[0].shape[1:])


def _fit(folder: Path, model: ModelSpec, stored: Mapping[str, Stored]) -> dict[str, Stacked]:
    """Return where each weight of ``model`` lies; raise BadInput with every name that does not fit."""
    blocks = blocks_by_tensor(model, tensor_sources(model))
    surplus = {name for name in stored.keys() - blocks.keys() if not _HARMLESS.fullmatch(name)}
    is_head_twice = model.tie_word_embeddings and _HEAD in surplus
    surplus -= {_HEAD} if is_head_twice else set()
    faults = []
    if missing := blocks.keys() - stored.keys():
        advice = " (is its head the embedding? Then config.json says tie_word_embeddings)" if missing == {_HEAD} else ""
        faults.append(f"it lacks {listing(missing)}{advice}")
    if surplus:
        faults.append(f"it has {listing(surplus)} besides")
    there = [name for name in blocks if name in stored]
    faults += _shape_faults({name: stacked_shape(blocks[name]) for name in there}, stored)
    if foreign := sorted({stored[name].dtype for name in there} - set(_FLOATS)):
        names = {name for name in there if stored[name].dtype == foreign[0]}
        faults.append(f"it stores {listing(names)} as {foreign[0]}, and weights are one of {', '.join(_FLOATS)}")
    if faults:
        raise BadInput(f"{folder} does not hold the weights that its config.json says: {'; '.join(faults)}.")
    parts: dict[str, list[Rows]] = defaultdict(list)
    for name, of_tensor in blocks.items():
        for block in of_tensor:
            parts[block.weight.name].append(Rows(stored[name], block.first, block.shape))
    rows = {name: Stacked(tuple(of_weight)) for name, of_weight in parts.items()}
    _check_dtypes(folder, rows)
    if is_head_twice:
        _check_head(folder, stored[_HEAD], rows["embed_tokens.weight"].parts[0].stored)
    return rows


def _check_dtypes(folder: Path, rows: Mapping[str, Stacked]) -> None:
    """Raise BadInput where the experts of one kind, which are one weight here, are stored in several dtypes."""
    for name, stacked in rows.items():
        dtypes = sorted({part.stored.dtype for part in stacked.parts})
        if len(dtypes) > 1:
            raise BadInput(
                f"{folder} stores the experts of {name} as {both(dtypes)}: convert them to one dtype, with "
                f"transformers' from_pretrained(FOLDER, dtype=...).save_pretrained(NEW_FOLDER), and give NEW_FOLDER."
            )


def _shape_faults(shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored]) -> list[str]:
    """Return a clause for each two shapes that should be one, with all names that it concerns."""
    pairs = sorted((stored[name].shape, shape, name) for name, shape in shapes.items() if stored[name].shape != shape)
    return [
        f"{listing([name for _, _, name in same])} has shape {found} instead of {expected}"
        for (found, expected), same in groupby(pairs, key=lambda pair: pair[:2])
    ]


def _check_head(folder: Path, head: Stored, embedding: Stored) -> None:
    """Raise BadInput unless a head that is stored beside the embedding it is tied to has the same bytes."""
    is_alike = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if is_alike:
        both = (Rows(one, 0, one.shape).chunks() for one in (head, embedding))
        is_alike = all(one == other for one, other in zip(*both, strict=True))
    if not is_alike:
        raise BadInput(
            f"{folder} says that its head is the embedding (tie_word_embeddings) and holds another {_HEAD}: say false "
            f"in config.json if the head is a matrix of its own, or remove the tensor."
        )


def listing(names: Collection[str]) -> str:
    """Return all names in a short form: ``model.layers.{0-31}.mlp.up_proj.bias`` stands for those of 32 layers."""
    numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
    whole = []
    for name in sorted(names):
        match = re.fullmatch(r"(.*?\.)([0-9]{1,6})(\..*)", name)
        if match and str(int(match.group(2))) == match.group(2):
            numbers[match.group(1), match.group(3)].append(int(match.group(2)))
        else:
            whole.append(name)
    shown = whole + [f"{before}{_spans(found)}{after}" for (before, after), found in numbers.items()]
    text = ""
    for index, one in enumerate(shown):
        if len(text) > _LONGEST_LIST:
            return f"{text} and {len(shown) - index} more"
        text += f"{', ' if text else ''}{one}"
    return text


def _spans(numbers: list[int]) -> str:
    """Return numbers as ``7``, ``{0-31}`` or ``{0-3,9}``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return text if text.isdecimal() else f"{{{text}}}"
