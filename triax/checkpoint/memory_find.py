"""Which state do the servers still have in memory, and how does each get the parts of it that it lacks?

Servers may have come and gone, and the layout may be another: the union of what they have decides.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from triax.checkpoint import operations
from triax.checkpoint.agree import Ranks
from triax.checkpoint.disk import open_regular, read_small, sentence, what_is_wrong, write_atomically, write_new
from triax.checkpoint.format import MANIFEST, MAX_MANIFEST_BYTES, Checkpoint, FileEntry, Manifest
from triax.checkpoint.history import read_history
from triax.checkpoint.memory_folder import Servers, is_ours, open_folder
from triax.checkpoint.memory_save import HISTORY, mark_once
from triax.checkpoint.retain import owner
from triax.checkpoint.state import local_slices
from triax.checkpoint.verify import find_checkpoints, read_checkpoint
from triax.errors import BadInput

_CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class Memory:
    """What the ranks need to know to look into the memory of their servers. All call ``newest`` together."""

    folder: Path
    """This server's."""
    checkpoints: Path
    """Where the run's disk checkpoints are: the history stands there."""
    ranks: Ranks
    servers: Servers
    run: str

    def newest(self, least_step: int, tensors: Mapping[str, torch.Tensor]) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest state of ``least_step`` or more that is whole, and why newer ones were passed over.

        Every server then has in its folder what its ranks need to fill ``tensors``, each byte checked. None where there
        is no such state.
        """
        said = self.ranks.gather(self._mine() if self._is_first else [])
        plans = self.ranks.broadcast(None if said is None else self._whole(said, least_step))
        passed_over: list[str] = []
        for plan in plans:
            checkpoint, problems = self._fetched(plan, tensors)
            if checkpoint is not None:
                return checkpoint, passed_over
            passed_over.append(f"the state of step {plan['step']} in memory cannot be used: {'; '.join(problems[:3])}.")
        return None, passed_over

    @property
    def _server(self) -> int:
        return self.servers.of(self.ranks.rank)

    @property
    def _is_first(self) -> bool:
        return self.ranks.rank == self.servers.first_rank(self._server)

    def _mine(self) -> list[dict[str, Any]]:
        """Return what this server has: each state of this run with a manifest, and which of its files are there."""
        mine: list[dict[str, Any]] = []
        if not is_ours(self.folder):
            return mine
        for found in find_checkpoints(self.folder):
            try:
                checkpoint = read_checkpoint(found.folder)
            except BadInput:
                continue
            manifest = checkpoint.manifest
            if owner(found.folder) != self.run or manifest.run != self.run:
                continue
            there = [file.name for file in manifest.files if _has(found.folder, file)]
            needed = len(manifest.files)
            mine.append(
                {"name": found.folder.name, "step": manifest.step, "digest": checkpoint.digest, "needed": needed,
                 "files": there, "history": manifest.extra.get(HISTORY)}
            )  # fmt: skip
        return mine

    def _whole(self, said: Sequence[list[dict[str, Any]]], least_step: int) -> list[dict[str, Any]]:
        """Return, newest first, the states of the run's own way that the servers have all files of together."""
        history = read_history(self.checkpoints)
        by_digest: dict[str, dict[str, Any]] = {}
        for rank, of_rank in enumerate(said):
            for one in of_rank:
                name = one["history"]
                if history is None or not isinstance(name, str) or not history.has(name, one["step"]):
                    continue
                if one["step"] < least_step:
                    continue
                plan = by_digest.setdefault(one["digest"], {**one, "holders": {}})
                plan["holders"][str(self.servers.of(rank))] = one["files"]
        whole = [
            plan
            for plan in by_digest.values()
            if len({file for files in plan["holders"].values() for file in files}) == plan["needed"]
        ]
        return sorted(whole, key=lambda plan: (-plan["step"], plan["digest"]))

    def _fetched(
        self, plan: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Checkpoint | None, list[str]]:
        """Bring to this server what its ranks need of a state; return it, or why it cannot be used."""
        folder = self.folder / plan["name"]
        holders: dict[int, set[str]] = {int(server): set(files) for server, files in plan["holders"].items()}
        manifest = self._shared_manifest(folder, holders)
        if manifest is None:
            return None, ["its manifest could not be read"]
        needed = self.ranks.gather(sorted(_files_for(manifest, tensors)))
        moves = self.ranks.broadcast(None if needed is None else self._moves(manifest, holders, needed))
        # Nobody looks at a file before it has arrived.
        problems = self.ranks.union([said for move in moves if (said := self._move(folder, manifest, *move))])
        arrived = {manifest.files[file].name for file, _, target in moves if target == self._server}
        problems += self._wrong(folder, manifest, holders.get(self._server, set()) | arrived)
        if problems := self.ranks.union(problems):
            return None, problems
        return Checkpoint(folder, manifest, plan["digest"]), []

    def _shared_manifest(self, folder: Path, holders: Mapping[int, set[str]]) -> Manifest | None:
        """Return the manifest, on every rank, after the servers that lack it have written it."""
        first = min(holders)
        text = ""
        if self.ranks.rank == self.servers.first_rank(first):
            try:
                text = read_small(folder / MANIFEST, MAX_MANIFEST_BYTES).decode()
            except (OSError, BadInput, UnicodeDecodeError):
                text = ""
        said = self.ranks.gather(text)
        text = self.ranks.broadcast(None if said is None else said[self.servers.first_rank(first)])
        failed = []
        if self._is_first and self._server not in holders and text:
            try:
                open_folder(self.folder)
                folder.mkdir(mode=0o700, exist_ok=True)
                mark_once(folder, self.run)
                write_atomically(folder / MANIFEST, text.encode())
            except (OSError, BadInput) as error:
                failed.append(str(error))
        if self.ranks.union(failed) or not text:
            return None
        try:
            return read_checkpoint(folder).manifest
        except BadInput:
            return None

    def _moves(
        self, manifest: Manifest, holders: Mapping[int, set[str]], needed: Sequence[Sequence[int]]
    ) -> list[tuple[int, int, int]]:
        """Return which file goes from which server to which, for all that ranks need and their server lacks."""
        moves: list[tuple[int, int, int]] = []
        for server in range(self.servers.number):
            first = self.servers.first_rank(server)
            wanted = {file for of_rank in needed[first : first + self.servers.local_world_size] for file in of_rank}
            for file in sorted(wanted):
                name = manifest.files[file].name
                if name not in holders.get(server, set()):
                    sources = sorted(holder for holder, files in holders.items() if name in files)
                    moves.append((file, sources[len(moves) % len(sources)], server))
        return moves

    def _move(self, folder: Path, manifest: Manifest, file: int, source: int, target: int) -> str:
        """Send a file from the first rank of a server to that of another; return what went wrong on this rank.

        Both always send and take as many bytes as the manifest says, so that nobody waits; the checksum tells.
        """
        entry = manifest.files[file]
        sender, taker = self.servers.first_rank(source), self.servers.first_rank(target)
        if self.ranks.rank == sender:
            return _send(folder / entry.name, entry, taker, self.ranks.group)
        if self.ranks.rank == taker:
            return _take(folder / entry.name, entry, sender, self.ranks.group)
        return ""

    def _wrong(self, folder: Path, manifest: Manifest, present: set[str]) -> list[str]:
        """Check every byte of what this server has; its ranks share the files between them."""
        inside = self.servers.local_world_size
        entries = sorted((entry for entry in manifest.files if entry.name in present), key=lambda entry: -entry.bytes)
        wrong = []
        for entry in entries[self.ranks.rank % inside :: inside]:
            if problem := what_is_wrong(folder / entry.name, entry.bytes, entry.sha256):
                wrong.append(f"{entry.name} on server {self._server} {problem}")
        return wrong


def _has(folder: Path, file: FileEntry) -> bool:
    try:
        return (folder / file.name).lstat().st_size == file.bytes
    except OSError:
        return False


def _files_for(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> set[int]:
    """Return the files with blocks that this rank needs. Names and shapes that differ are for ``load`` to tell."""
    files = set()
    for name, tensor in tensors.items():
        entry = manifest.tensors.get(name)
        if entry is None or entry.shape != tuple(tensor.shape):
            continue
        for piece in local_slices(tensor):
            files |= {file for _, file in entry.blocks_touching(piece.box)}
    return files


def _send(path: Path, entry: FileEntry, taker: int, group: dist.ProcessGroup | None) -> str:
    problem, left = "", entry.bytes
    try:
        with open_regular(path) as file:
            while left:
                size = min(left, _CHUNK_BYTES)
                data = bytearray(file.read(size))
                if len(data) < size:
                    raise BadInput("it became shorter")
                dist.send(torch.frombuffer(data, dtype=torch.uint8), group=group, group_dst=taker)
                left -= len(data)
    except (OSError, BadInput) as error:
        problem = f"{path} cannot be sent: {sentence(error) if isinstance(error, OSError) else error}"
    while left:
        size = min(left, _CHUNK_BYTES)
        dist.send(torch.zeros(size, dtype=torch.uint8), group=group, group_dst=taker)
        left -= size
    return problem


def _take(path: Path, entry: FileEntry, sender: int, group: dist.ProcessGroup | None) -> str:
    chunks = _arriving(entry.bytes, sender, group)
    try:
        operations.unlink(path)  # what an interrupted save has left of it
        write_new(path, chunks, lambda: False)
    except OSError as error:
        for _ in chunks:
            pass
        return f"{path} cannot be written: {sentence(error)}"
    return ""


def _arriving(num_bytes: int, sender: int, group: dist.ProcessGroup | None) -> Iterator[memoryview]:
    left = num_bytes
    while left:
        piece = torch.empty(min(left, _CHUNK_BYTES), dtype=torch.uint8)
        dist.recv(piece, group=group, group_src=sender)
        yield piece.numpy().data
        left -= piece.numel()
