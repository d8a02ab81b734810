"""How do finished checkpoints get to an object store, and back to where there are none?

The store is whatever fsspec has a driver for. It holds the same folders as the disk, and the manifest comes last there.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from triax.checkpoint.disk import make_folders, write_atomically, write_new, write_unsynced
from triax.checkpoint.format import (
    FORMAT,
    MANIFEST,
    MARKER,
    MAX_MANIFEST_BYTES,
    Manifest,
    is_own_file,
    parse_folder_name,
    read_manifest,
)
from triax.checkpoint.retain import remove
from triax.checkpoint.verify import find_checkpoints
from triax.errors import BadInput

_CHUNK_BYTES: Final = 8 << 20


class Store:
    """A place on an object store that holds the checkpoints of a run.

    Drivers raise what they like: every method may raise any Exception, and callers turn it into a sentence.
    """

    def __init__(self, url: str) -> None:
        """Raises BadInput where there is no driver for ``url``."""
        try:
            import fsspec
        except ImportError:
            raise BadInput(f"checkpoint.upload = {url!r} needs fsspec: pip install 'triax[remote]'.") from None
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise BadInput(f"checkpoint.upload = {url!r} cannot be opened: {str(error).rstrip('.')}.") from None

    def complete(self) -> list[str]:
        """Return the names of the checkpoints that have a manifest, newest first."""
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            return []
        names = {str(path).rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)}
        known = [(place, name) for name in names if (place := parse_folder_name(name)) is not None]
        return [name for _, name in sorted(known, reverse=True) if self._files.exists(self._at(name, MANIFEST))]

    def push(self, folder: Path) -> None:
        """Copy a finished checkpoint to the store. Does nothing where it is there already."""
        manifest_text = (folder / MANIFEST).read_bytes()
        target = self._at(folder.name, MANIFEST)
        if self._files.exists(target) and self._files.cat_file(target) == manifest_text:
            return
        self._files.makedirs(self._at(folder.name), exist_ok=True)
        for name in (MARKER, *(file.name for file in read_manifest(manifest_text).files)):
            self._files.put_file(str(folder / name), self._at(folder.name, name))
        self._files.pipe_file(target, manifest_text)

    def pull(self, name: str, folder: Path) -> None:
        """Copy a checkpoint from the store into ``folder``, where it counts once every byte is there and right."""
        text = self._small(self._at(name, MANIFEST), MAX_MANIFEST_BYTES)
        manifest: Manifest = read_manifest(text)
        target = folder / name
        if target.exists():  # an interrupted pull has left it: the caller has no checkpoint
            remove(target)
        make_folders(target)
        write_unsynced(target / MARKER, self._small(self._at(name, MARKER), 4096))
        for file in manifest.files:
            with self._files.open(self._at(name, file.name), "rb") as source:
                size, sha256 = write_new(target / file.name, _pieces(source), lambda: False)
            if (size, sha256) != (file.bytes, file.sha256):
                raise BadInput(f"{file.name} arrived damaged")
        write_atomically(target / MANIFEST, text)

    def prune(self, run: str, keep: int) -> None:
        """Remove all but the newest ``keep`` steps that ``run`` has put there, each manifest first."""
        mine = [name for name in self.complete() if self._owner(name) == run]
        steps = sorted({place[0] for name in mine if (place := parse_folder_name(name))}, reverse=True)[:keep]
        for name in mine:
            place = parse_folder_name(name)
            if place is None or place[0] in steps:
                continue
            self._files.rm_file(self._at(name, MANIFEST))
            for path in self._files.ls(self._at(name), detail=False):
                file = str(path).rpartition("/")[2]
                if is_own_file(file) and file != MANIFEST:
                    self._files.rm_file(self._at(name, file))
            with suppress(Exception):  # stores without folders have none to remove
                self._files.rmdir(self._at(name))

    def _owner(self, name: str) -> str | None:
        try:
            marker = json.loads(self._small(self._at(name, MARKER), 4096))
        except (OSError, ValueError, RecursionError, BadInput):
            return None
        if not isinstance(marker, dict) or marker.get("format") != FORMAT:
            return None
        run = marker.get("run")
        return run if isinstance(run, str) else None

    def _small(self, path: str, most_bytes: int) -> bytes:
        with self._files.open(path, "rb") as file:
            data: bytes = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise BadInput(f"{path} is longer than the {most_bytes} bytes that such a file can have")
        return data

    def _at(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))


def _pieces(source: Any) -> Iterator[memoryview]:
    while piece := source.read(_CHUNK_BYTES):
        yield memoryview(piece)


class Uploader:
    """Copies the newest finished checkpoint to a store, on a thread. One process of a run has one."""

    def __init__(self, store: Store, folder: Path, run: str, keep: int) -> None:
        self._store, self._folder, self._run, self._keep = store, folder, run, keep
        self._wanted: int | None = None
        self._changed = threading.Condition()
        self._told: list[str] = []
        self._is_busy = False
        threading.Thread(target=self._work, name="upload", daemon=True).start()

    def offer(self, step: int) -> None:
        """Have the checkpoint of ``step`` copied, in the place of one that still waits."""
        with self._changed:
            self._wanted = step
            self._changed.notify_all()

    def take_told(self) -> list[str]:
        """Return what went wrong since the last call."""
        with self._changed:
            told, self._told = self._told, []
        return told

    def finish(self, patience_s: float) -> bool:
        """Wait until all that was offered is copied or has failed; return False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._wanted is None and not self._is_busy, patience_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None)
                step, self._wanted, self._is_busy = self._wanted, None, True
            problem = self._copied(step)
            with self._changed:
                self._told += [problem] if problem else []
                self._is_busy = False
                self._changed.notify_all()

    def _copied(self, step: Any) -> str:
        folder: Path | None = None
        try:
            folder = next((one.folder for one in find_checkpoints(self._folder) if one.step == step), None)
            if folder is not None:
                self._store.push(folder)
                self._store.prune(self._run, self._keep)
        except Exception as error:  # of any driver; training must not hear of it but as a line
            if folder is not None and not (folder / MANIFEST).exists():
                return ""  # a newer one has taken its place
            return f"step {step} could not be copied to the store: {type(error).__name__}: {str(error)[:200]}"
        return ""
