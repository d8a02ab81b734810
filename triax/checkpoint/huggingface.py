"""How does the folder of a Hugging Face model become a checkpoint, and a checkpoint such a folder again?

Both ways one tensor after the other passes through memory. Tensors that hold several weights fused are taken apart on
the way in and joined on the way out; a checkpoint knows weights by their own names alone, in any layout.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

import torch

from triax.checkpoint.carried import (
    CARRIED_FOLDER,
    MODEL_FILES,
    TOKENIZER_FILES,
    carried_folders,
    carry,
    carry_tokenizer,
    read_config,
    tokenizer_of,
)
from triax.checkpoint.commit import Ticket, commit
from triax.checkpoint.disk import new_folder, write_atomically, write_new
from triax.checkpoint.find import model_of
from triax.checkpoint.format import Checkpoint, FileEntry, TensorEntry, dtype_name, shard_name
from triax.checkpoint.hf_folder import (
    INDEX_FILE,
    WEIGHTS_FILE,
    Block,
    blocks_by_tensor,
    listing,
    open_hf_folder,
    stacked_shape,
)
from triax.checkpoint.load import read_rows
from triax.checkpoint.retain import mark
from triax.checkpoint.tensor_file import FileLayout, lay_out
from triax.errors import BadInput, TriaxError
from triax.spec.huggingface import config_of, tensor_sources
from triax.spec.model import ModelSpec
from triax.spec.weights import num_parameters, weights_table

ExportDtype = Literal["bf16", "fp16", "fp32"]

TORCH_DTYPES: Final[Mapping[ExportDtype, torch.dtype]] = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
}  # fmt: skip

_IMPORT: Final = "import"
"""Stands in an imported checkpoint where others name their run: no run ever removes it."""
_MOST_BYTES_OF_A_FILE: Final = 5_000_000_000
"""Larger files are split, as the hub asks."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written."""

    folder: Path
    num_parameters: int
    num_bytes: int
    """Bytes of all weights."""
    num_files: int
    carried: tuple[str, ...]
    """Names of the files that went along."""


def import_folder(hf_folder: Path, checkpoint_folder: Path) -> Written:
    """Make ``checkpoint_folder`` the checkpoint of step 0 of the model in ``hf_folder``.

    Bits and dtypes of the weights are kept; training reads narrower floats into its master precision exactly. The
    tokenizer, chat template, generation config and licence go along. Raises BadInput as ``open_hf_folder`` does, and
    where ``checkpoint_folder`` exists and is not empty; nothing is left behind then.
    """
    source = open_hf_folder(hf_folder)
    sizes = {name: rows.num_bytes for name, rows in source.rows.items()}
    with new_folder(checkpoint_folder, sum(sizes.values())) as folder:
        (folder / CARRIED_FOLDER).mkdir()
        carried = carry(hf_folder, folder / CARRIED_FOLDER, (*MODEL_FILES, *TOKENIZER_FILES))
        mark(folder, _IMPORT)
        groups = _grouped(sizes, _MOST_BYTES_OF_A_FILE)
        files: list[FileEntry] = []
        tensors: dict[str, TensorEntry] = {}
        for names in groups:
            layout = lay_out((name, source.rows[name].dtype, source.rows[name].shape) for name in names)
            for name in names:
                tensors[name] = _whole(source.rows[name].dtype, source.rows[name].shape, len(files))
            parts = (piece for name, _, _ in layout.places for piece in source.rows[name].chunks())
            name = shard_name(len(files), len(groups))
            num_bytes, sha256 = _write(folder / name, layout, parts)
            files.append(FileEntry(name=name, bytes=num_bytes, sha256=sha256))
        extra = {
            "step": 0,
            "model": source.model.model_dump(mode="json"),
            "tokenizer": None,
            "seq_len": source.model.max_position_embeddings,
            "imported": {"architectures": source.config.get("architectures"), "carried": carried},
        }
        commit(Ticket(0, folder, ""), _IMPORT, extra, tensors, files)
    return Written(
        checkpoint_folder, num_parameters(source.model), sum(sizes.values()), len(files), tuple(carried)
    )  # fmt: skip


def _whole(dtype: str, shape: tuple[int, ...], file: int) -> TensorEntry:
    return TensorEntry(dtype=dtype, shape=shape, cuts=tuple((0, size) for size in shape), files=(file,))


def exported_dtype(checkpoint: Checkpoint) -> ExportDtype:
    """Return in which numbers a model leaves if nobody says: those of the folder it was imported from, else bf16."""
    base = _base_config(checkpoint)
    said = None if base is None else base.get("dtype", base.get("torch_dtype"))
    names: dict[Any, ExportDtype] = {"float32": "fp32", "float16": "fp16"}
    return names.get(said, "bf16") if isinstance(said, str) else "bf16"


def _base_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    for place in carried_folders(checkpoint.folder):
        if (place / "config.json").exists():
            return read_config(place)
    return None


def write_hf_folder(
    checkpoint: Checkpoint, folder: Path, dtype: ExportDtype, config: Mapping[str, Any] | None = None
) -> Written:
    """Write the model of ``checkpoint`` into the existing, empty ``folder`` as transformers does with save_pretrained.

    ``config``: keys of config.json that neither the model nor the folder it was imported from says, such as
    ``eos_token_id``. The checkpoint's files are trusted. Raises BadInput where its tensors are not those of its model,
    or no architecture of Hugging Face's is its network; TriaxError for weights that are not finite in ``dtype``; and
    OSError.
    """
    model = model_of(checkpoint)
    parts = _parts(checkpoint, model)
    carried = _write_settings(checkpoint, folder, dtype, config or {})
    sizes = {name: prod(stacked_shape(of_name)) * TORCH_DTYPES[dtype].itemsize for name, of_name in parts.items()}
    groups = _grouped(sizes, _MOST_BYTES_OF_A_FILE)
    files = [WEIGHTS_FILE]
    if len(groups) > 1:
        files = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        places = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        said = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
        write_atomically(folder / INDEX_FILE, _json(said))
    for file, names in zip(files, groups, strict=True):
        layout = lay_out((name, dtype_name(TORCH_DTYPES[dtype]), stacked_shape(parts[name])) for name in names)
        values = (_converted(checkpoint, parts[name], TORCH_DTYPES[dtype]) for name, _, _ in layout.places)
        _write(folder / file, layout, (piece for pieces in values for piece in pieces))
    return Written(folder, num_parameters(model), sum(sizes.values()), len(groups), tuple(carried))


def _write_settings(checkpoint: Checkpoint, folder: Path, dtype: ExportDtype, config: Mapping[str, Any]) -> list[str]:
    """Write config.json and what goes along with the weights; return the names of what was carried along."""
    base = _base_config(checkpoint)
    said = config_of(model_of(checkpoint), dtype=str(TORCH_DTYPES[dtype]).removeprefix("torch."), base=base)
    said |= {key: value for key, value in config.items() if said.get(key) is None}
    tokenizer = tokenizer_of(checkpoint.folder, checkpoint.manifest.extra)
    names = MODEL_FILES if tokenizer else (*MODEL_FILES, *TOKENIZER_FILES)
    carried = [name for place in carried_folders(checkpoint.folder)[:1] for name in carry(place, folder, names)]
    carried += carry_tokenizer(tokenizer, folder) if tokenizer else []
    write_atomically(folder / "config.json", _json(said))
    return [name for name in carried if name != "config.json"]


def _parts(checkpoint: Checkpoint, model: ModelSpec) -> dict[str, list[Block]]:
    """Return what makes up each tensor of the folder."""
    tensors = checkpoint.manifest.tensors
    table = weights_table(model)
    if wrong := [w.name for w in table if w.name not in tensors or tensors[w.name].shape != w.shape]:
        raise BadInput(f"{checkpoint.folder} does not hold its model whole: {listing(wrong)} is missing or misshapen.")
    return blocks_by_tensor(model, tensor_sources(model))


def _converted(checkpoint: Checkpoint, blocks: Sequence[Block], dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the bytes of blocks one after the other, rounded to ``dtype``."""
    for block in blocks:
        weight = block.weight
        saved = read_rows(checkpoint, weight.name, block.rows)
        values = saved.to(dtype)
        if not values.isfinite().all():
            if not saved.isfinite().all():
                raise TriaxError(f"{weight.name} of {checkpoint.folder} holds values that are not finite.")
            largest = saved.abs().max().item()
            raise TriaxError(
                f"{weight.name} holds {largest:.4g}, too large for {dtype}: export as bf16, which reaches as far as "
                f"fp32."
            )
        del saved
        yield memoryview(values.reshape(-1).view(torch.uint8).numpy().data)


def _grouped(sizes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    """Return names in their order, in groups of at most ``most_bytes``; what is larger stands alone."""
    groups: list[list[str]] = []
    filled = most_bytes
    for name, size in sizes.items():
        if filled + size > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _write(path: Path, layout: FileLayout, parts: Iterator[memoryview]) -> tuple[int, str]:
    """Write one safetensors file to the disk; return its size in bytes and its SHA-256."""

    def stream() -> Iterator[memoryview]:
        yield memoryview(layout.header)
        yield from parts

    num_bytes, sha256 = write_new(path, stream(), lambda: False)
    assert num_bytes == layout.num_bytes
    return num_bytes, sha256


def _json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()
