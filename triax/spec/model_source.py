"""Where do the dimensions of a network come from when a run file names a config.json or a checkpoint instead?"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from triax.errors import BadInput
from triax.spec.faults import shown
from triax.spec.huggingface import model_from_config
from triax.spec.text_file import parse_json, read_text

_LARGEST_CONFIG_BYTES: Final = 1 << 22
_LARGEST_MANIFEST_BYTES: Final = 1 << 30
_STEP: Final = re.compile(r"step-([0-9]{8,15})(?:-([1-9][0-9]{0,3}))?")


def resolve_model(said: Mapping[str, Any], run_file: Path) -> dict[str, Any]:
    """Return what a run file says with ``[model] config`` and ``[model] init`` replaced by what they stand for.

    ``config``, a config.json or the folder that holds one, gives the dimensions. ``init``, a checkpoint or the folder
    of a run for its newest, becomes the run's ``init``; it gives the dimensions where ``config`` does not, and the
    tokenizer where ``[data]`` names none. Keys that stand beside them in ``[model]`` count more. Relative paths start
    at the folder of ``run_file``. Raises BadInput where a path holds no model.
    """
    section = said.get("model")
    if not isinstance(section, Mapping) or not section.keys() & {"config", "init"}:
        return dict(said)
    keys = {key: value for key, value in section.items() if key not in ("config", "init")}
    resolved = dict(said)
    dimensions: Mapping[str, Any] | None = None
    if "config" in section:
        dimensions = _of_config(_path(section["config"], "config", run_file))
    if "init" in section:
        path = _path(section["init"], "init", run_file)
        resolved["init"] = str(path)
        extra = _extra_of(path)
        dimensions = dimensions or _of_manifest(path, extra)
        data, tokenizer = said.get("data"), _tokenizer_of(path, extra)
        if isinstance(data, Mapping) and "tokenizer" not in data and tokenizer is not None:
            resolved["data"] = {**data, "tokenizer": tokenizer}
    resolved["model"] = {**(dimensions or {}), **keys}
    return resolved


def as_run_file(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a run as a run file says them: ``init`` stands in ``[model]``."""
    values = dict(said)
    init = values.pop("init", None)
    return values if init is None else {**values, "model": {**values["model"], "init": init}}


def _path(said: Any, key: str, run_file: Path) -> Path:
    if not isinstance(said, str) or not said or "\0" in said:
        raise BadInput(f"{run_file}: model.{key} = {shown(said)} cannot be: use a path in quotes.")
    try:
        return run_file.resolve().parent / Path(said).expanduser()
    except RuntimeError as error:
        raise BadInput(f"{run_file}: {shown(said)} is no path: {str(error).rstrip('.')}.") from None


def _of_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if os.path.isdir(path) else path
    return model_from_config(parse_json(read_text(file, _LARGEST_CONFIG_BYTES), str(file)), str(file)).model_dump()


def _of_manifest(path: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
    model = extra.get("model")
    if not isinstance(model, dict):
        raise BadInput(f"{path} does not say which model it is of: it was not saved by a run or made by triax import.")
    return model


def _extra_of(path: Path) -> Mapping[str, Any]:
    """Return what the manifest of a checkpoint says beside its tensors; who loads it asks whether all is intact."""
    if os.path.isfile(path / "config.json") and not os.path.exists(path / "manifest.json"):
        raise BadInput(
            f"{path} is a Hugging Face folder: make a checkpoint of it once, with `triax import {path} "
            f"CHECKPOINT_FOLDER`, and say model.init = CHECKPOINT_FOLDER."
        )
    manifest = path / "manifest.json"
    if not os.path.exists(manifest):  # unlike Path.exists, no error for a name that is too long
        names = os.listdir(path / "checkpoints") if os.path.isdir(path / "checkpoints") else []
        steps = [(int(match[1]), int(match[2] or 0), match[0]) for name in names if (match := _STEP.fullmatch(name))]
        saved = [path / "checkpoints" / name / "manifest.json" for _, _, name in sorted(steps)]
        whole = [file for file in saved if os.path.exists(file)]
        if not whole:
            raise BadInput(
                f"model.init = {path} holds no checkpoint: give the folder of one, or of a run that has saved its "
                f"state. A run that was started from it before goes on without it by its plan.json."
            )
        manifest = whole[-1]
    extra = parse_json(read_text(manifest, _LARGEST_MANIFEST_BYTES), str(manifest)).get("extra")
    return extra if isinstance(extra, dict) else {}


def _tokenizer_of(path: Path, extra: Mapping[str, Any]) -> str | None:
    """Return the tokenizer that a checkpoint was trained with: one carried along, or where it was read from."""
    said = extra.get("tokenizer")
    if said != "bytes":
        homes = [path, path.parent.parent] if path.parent.name == "checkpoints" else [path]
        for home in homes:
            if (home / "huggingface" / "tokenizer.json").is_file():
                return str(home / "huggingface")
    return said if isinstance(said, str) else None
