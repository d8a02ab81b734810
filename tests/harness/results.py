"""How does what a rank returns reach the test: plain values and tensors in one safetensors file, no pickle?

Pickling tensors between processes would pass shared memory by file descriptor, which races with the exit of the rank
that made them. Here the tensors are bytes in a file and the structure around them is JSON in the file's header.
"""

import dataclasses
import json
import operator
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor


def write_result(value: object, path: Path) -> None:
    """Write ``value`` to ``path``: None, bool, int, float, str, bytes, list, tuple, dict, set, tensors, numpy arrays
    and scalars, and dataclasses made of these. Raises TypeError naming the place of anything else."""
    tensors: dict[str, torch.Tensor] = {}
    structure = json.dumps(_pack(value, tensors, "result"))
    save_file(tensors, path, metadata={"structure": structure})


def read_result(path: Path) -> Any:
    """Return the value that ``write_result`` wrote to ``path``."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping: it has no __iter__)
        return _unpack(json.loads(file.metadata()["structure"]), tensors)


def _pack(value: object, tensors: dict[str, torch.Tensor], where: str) -> object:
    """Return ``value`` as JSON, containers as ``[kind, *items]``; tensors go into ``tensors`` under a number."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return _pack(value.item(), tensors, where)
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, DTensor):
        raise TypeError(
            f"{where} is a DTensor, which means nothing outside its ranks: return full_tensor() or to_local()"
        )
    if isinstance(value, torch.Tensor | np.ndarray):
        name = str(len(tensors))
        # A clone, since safetensors refuses tensors that share memory, as views and tied weights do.
        tensors[name] = torch.as_tensor(value).detach().clone(memory_format=torch.contiguous_format)
        return ["tensor" if isinstance(value, torch.Tensor) else "array", name]
    if isinstance(value, list | tuple | set | frozenset):
        kind = "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else "set"
        return [kind, *(_pack(item, tensors, f"{where}[{i}]") for i, item in enumerate(value))]
    if isinstance(value, dict):
        items = (
            [_pack(k, tensors, f"a key of {where}"), _pack(v, tensors, f"{where}[{k!r}]")] for k, v in value.items()
        )
        return ["dict", *items]
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and "<locals>" not in type(value).__qualname__:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return ["dataclass", type(value).__module__, type(value).__qualname__, _pack(fields, tensors, where)]
    raise TypeError(
        f"{where} is a {type(value).__qualname__}, which a rank cannot return: return numbers, strings, tensors, "
        "containers of them, or a dataclass defined at module level"
    )


def _unpack(packed: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(packed, list):
        return packed
    kind, *items = packed
    match kind:
        case "bytes":
            return bytes.fromhex(items[0])
        case "tensor":
            return tensors[items[0]]
        case "array":
            return tensors[items[0]].numpy()
        case "dict":
            return {_unpack(k, tensors): _unpack(v, tensors) for k, v in items}
        case "dataclass":
            # The rank was forked from this process, so the module it names is already imported here.
            module, qualname, fields = items
            return operator.attrgetter(qualname)(sys.modules[module])(**_unpack(fields, tensors))
        case _:
            make = {"list": list, "tuple": tuple, "set": set}[kind]
            return cast(Any, make)(_unpack(item, tensors) for item in items)
