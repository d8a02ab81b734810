"""What of a Hugging Face folder besides weights goes along, through training and out again? Torch-free."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from triax.checkpoint.disk import read_small, sentence, write_atomically
from triax.errors import BadInput
from triax.spec.text_file import parse_json

CARRIED_FOLDER: Final = "huggingface"
"""Inside a checkpoint that was imported, and inside the folder of a run."""

TOKENIZER_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
MODEL_FILES: Final = (
    "config.json", "generation_config.json", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "USE_POLICY.md",
)  # fmt: skip

_LARGEST_BYTES: Final = 256 << 20
_LARGEST_CONFIG_BYTES: Final = 1 << 22


def real_file(folder: Path, name: str) -> Path:
    """Return where the file ``name`` of a Hugging Face folder really lies; it need not exist.

    Raises BadInput for a name that is a path, and for a link to anywhere but the folder itself and, since the hub's
    cache is made of links, the ``blobs`` beside its ``snapshots``. What is read may be published with the next export:
    it must not come from elsewhere on the machine.
    """
    if name != Path(name).name or name in ("", ".", "..") or "\\" in name or "\0" in name or len(name) > 200:
        raise BadInput(f"{folder} names the file {name!r:.80}: only files of the folder itself are read.")
    try:
        home, real = folder.resolve(), (folder / name).resolve()
    except (OSError, RuntimeError):  # a circle of links
        raise BadInput(f"{folder / name} is a link that leads nowhere.") from None
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(one) for one in homes):
        raise BadInput(f"{folder / name} is a link to {real}, outside its folder: put the file itself in its place.")
    return real


def carry(source: Path, target: Path, names: Collection[str]) -> list[str]:
    """Copy those files of ``names`` that ``source`` has to the existing folder ``target``; return their names.

    Raises BadInput for what is no file of a size that such a file can have, or cannot be copied.
    """
    carried = []
    for name in names:
        real = real_file(source, name)
        if real.exists():
            _copy(real, target / name)
            carried.append(name)
    return carried


def carry_tokenizer(said: str, target: Path) -> list[str]:
    """Copy the tokenizer that ``data.tokenizer`` says to the existing folder ``target``; return the names of its files.

    None for ``bytes``, and where nothing is there. The file is the one the user named, wherever it really lies; of
    those beside it, links to elsewhere are left out. Raises BadInput where the file cannot be copied.
    """
    path = Path(said)
    file = path / "tokenizer.json" if path.is_dir() else path
    if said == "bytes" or not file.is_file():
        return []
    _copy(file, target / "tokenizer.json")
    carried = ["tokenizer.json"]
    for name in TOKENIZER_FILES[1:]:
        with suppress(BadInput):
            carried += carry(file.parent, target, [name])
    return carried


def _copy(source: Path, target: Path) -> None:
    try:
        write_atomically(target, read_small(source, _LARGEST_BYTES))
    except OSError as error:
        raise BadInput(f"{source} cannot be copied to {target.parent}: {sentence(error)}.") from None


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Return the JSON object in a small file of ``folder``; raise BadInput where there is none."""
    return parse_json(read_text_of(folder, name, _LARGEST_CONFIG_BYTES), str(folder / name))


def read_text_of(folder: Path, name: str, most_bytes: int) -> str:
    """Return the text of a file of ``folder``; raise BadInput where it is none, or longer than ``most_bytes``."""
    try:
        return read_small(real_file(folder, name), most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{folder / name} is no UTF-8 text.") from None
    except OSError as error:
        raise BadInput(f"{folder / name} cannot be read: {sentence(error)}.") from None


def carried_folders(checkpoint_folder: Path) -> list[Path]:
    """Return where files may lie that were carried along with a checkpoint: inside it, and in the folder of its run."""
    places = [checkpoint_folder / CARRIED_FOLDER]
    if checkpoint_folder.parent.name == "checkpoints":
        places.append(checkpoint_folder.parent.parent / CARRIED_FOLDER)
    return [place for place in places if place.is_dir()]


def tokenizer_of(checkpoint_folder: Path, extra: Mapping[str, Any]) -> str | None:
    """Return what ``data.tokenizer`` is for a checkpoint, None where nobody said; ``extra`` as in its manifest.

    A tokenizer that was carried along comes before the path that it was once read from.
    """
    said = extra.get("tokenizer")
    if said != "bytes":
        for place in carried_folders(checkpoint_folder):
            if (place / "tokenizer.json").is_file():
                return str(place)
    return said if isinstance(said, str) else None
