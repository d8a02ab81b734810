"""How does the state get into the memory of two servers while training goes on?

Each rank writes its part, as for the disk, into a folder in its server's memory, and sends it to the rank in the same
place of the next server. When all have, every server's first rank writes the same manifest: with it the state counts.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from triax.checkpoint.agree import Ranks
from triax.checkpoint.commit import manifest_of
from triax.checkpoint.copying import Copying
from triax.checkpoint.disk import sentence, write_atomically, write_new
from triax.checkpoint.division import Division
from triax.checkpoint.format import MANIFEST, FileEntry, folder_name, shard_name
from triax.checkpoint.memory_clear import clear
from triax.checkpoint.memory_folder import Servers, open_folder, room_bytes
from triax.checkpoint.retain import mark
from triax.checkpoint.save import SaveOutcome
from triax.errors import BadInput
from triax.units import format_bytes

HISTORY: Final = "memory_history"
"""Key of the manifest's extra: under which history the state was saved."""
_CHUNK_BYTES: Final = 8 << 20


@dataclass
class _Saving:
    step: int
    folder: Path
    extra: dict[str, Any]
    began_s: float
    copying: Copying
    stall_s: float = 0.0
    thread: threading.Thread | None = None
    file: FileEntry | None = None
    failure: str = ""
    seconds: float = 0.0


@dataclass
class MemoryWriter:
    """Keeps the newest state of one run in the memory of its servers. All ranks call every method together.

    ``folder`` is this server's. ``exchange`` is a group over all ranks that nothing else uses, since a thread of each
    rank speaks on it; None where there is one server. ``history`` names the one under which states are saved now
    (``triax.checkpoint.history``), empty where none could be begun.
    """

    folder: Path
    ranks: Ranks
    servers: Servers
    exchange: dist.ProcessGroup | None
    run: str
    history: Callable[[], str]
    why_off: str = ""
    """Why no state is kept in memory; empty where one is."""
    _division: Division = field(init=False)
    _saving: _Saving | None = None
    _kept: Path | None = None
    _saved_under: str = field(init=False)

    def __post_init__(self) -> None:
        self._division = Division(self.ranks)
        self._saved_under = self.history()
        if not self._saved_under:
            self.why_off = "the disk does not take the history of the run"

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        """Begin to copy and write the state. Does nothing while one is being written.

        The tensors must not change before ``wait_until_copied`` has returned.
        """
        if self._saving is not None or self.why_off:
            return
        began_s = time.monotonic()
        if self.history() != self._saved_under:
            self._saved_under, self._kept = self.history(), None
            self.keep_only(None)  # the run has gone back, and what was kept is of the way that it left
        slices = self._division.agree(step, tensors)
        if self._kept is None and not self._fits():
            return
        copying = Copying(self._division.part, slices)
        folder = self.folder / folder_name(step)
        self._saving = saving = _Saving(step, folder, {**extra, HISTORY: self._saved_under}, began_s, copying)
        saving.thread = threading.Thread(target=self._write, args=(saving,), name=f"memory-{step}", daemon=True)
        saving.thread.start()
        saving.stall_s = time.monotonic() - began_s

    def wait_until_copied(self) -> None:
        """Return when the state that is being copied may be changed. A rank may call this alone."""
        if self._saving is not None:
            began_s = time.monotonic()
            self._saving.copying.wait()
            self._saving.stall_s += time.monotonic() - began_s

    def poll(self) -> SaveOutcome | None:
        """Return how the save in flight ended, once; None while it goes on, or where there is none. Does not wait."""
        saving = self._saving
        if saving is None or saving.thread is None:
            return None
        goes_on, has_failed = self.ranks.maxima(saving.thread.is_alive(), bool(saving.failure))
        if goes_on:
            return None
        return self._conclude(saving, has_failed=bool(has_failed))

    def keep_only(self, state: Path | None) -> None:
        """Remove every state of the run but ``state`` from this server's memory."""
        if self._is_first:
            try:
                clear(self.folder, self.run, state)
            except OSError as error:
                self.why_off = self.why_off or f"{self.folder} cannot be cleared: {sentence(error)}"

    def close(self) -> None:
        """Remove all that is kept: the run has ended well, and the disk has its last state."""
        if self._saving is not None and self._saving.thread is not None:
            self._saving.thread.join(5.0)
        self.keep_only(None)

    @property
    def _is_first(self) -> bool:
        return self.ranks.rank == self.servers.first_rank(self.servers.of(self.ranks.rank))

    def _fits(self) -> bool:
        """Return whether every server has room for the new state beside the one before it, and its neighbour's."""
        room, problem = 0, ""
        if self._is_first:
            try:
                open_folder(self.folder)
                room = room_bytes(self.folder)
            except BadInput as error:
                problem = str(error)
            except OSError as error:
                problem = f"{self.folder} cannot be made: {sentence(error)}"
        said = self.ranks.gather((self._division.part.num_bytes, room, problem))
        self.why_off = str(self.ranks.broadcast("" if said is None else self._too_small(said)))
        return not self.why_off

    def _too_small(self, said: list[tuple[int, int, str]]) -> str:
        count, inside = self.servers.number, self.servers.local_world_size
        own = [sum(size for size, _, _ in said[server * inside : (server + 1) * inside]) for server in range(count)]
        for server in range(count):
            _, room, problem = said[self.servers.first_rank(server)]
            copies = own[server] + (own[server - 1] if count > 1 else 0)
            # Twice, since the state before stays until this one is whole, and once to copy from.
            needed = 2 * copies + own[server]
            if problem or needed > room:
                return problem or (
                    f"copies of the state need {format_bytes(needed)} of memory on server {server}, and "
                    f"{format_bytes(room)} are free"
                )
        return ""

    def _write(self, saving: _Saving) -> None:
        """On a thread: write this rank's part, and exchange it for that of the server before."""
        rank = self.ranks.rank
        try:
            saving.copying.run()
        except (MemoryError, RuntimeError) as error:
            # The neighbours wait for what this rank sends all the same: nothing.
            saving.failure = f"rank {rank} could not copy its state to host memory: {error}"
        try:
            saving.folder.mkdir(mode=0o700, exist_ok=True)
            mark_once(saving.folder, self.run)
            if not saving.failure:
                saving.file = self._division.part.write(saving.folder, lambda: False)
        except OSError as error:
            saving.failure = f"rank {rank} could not write to {saving.folder}: {sentence(error)}"
        try:
            if self.exchange is not None:
                self._swap(saving, self.exchange)
        except (OSError, RuntimeError) as error:
            saving.failure = saving.failure or f"rank {rank} could not exchange its part: {error}"
        finally:
            saving.seconds = time.monotonic() - saving.began_s

    def _swap(self, saving: _Saving, group: dist.ProcessGroup) -> None:
        to, source = self.servers.neighbour(self.ranks.rank, 1), self.servers.neighbour(self.ranks.rank, -1)
        parts = self._division.part.stream() if saving.file is not None else iter(())
        mine = [part[begin : begin + _CHUNK_BYTES] for part in parts for begin in range(0, len(part), _CHUNK_BYTES)]
        digest = bytes.fromhex(saving.file.sha256) if saving.file is not None else bytes(32)
        theirs = torch.zeros(33, dtype=torch.int64)
        _both(group, torch.tensor([len(mine), *digest]), to, theirs, source)
        count, theirs_sha = int(theirs[0]), bytes(theirs[1:].tolist()).hex()
        name = shard_name(source, self.servers.world_size)
        received = _exchanged(group, mine, to, count, source)
        if count == 0:
            for _ in received:
                pass
            return
        try:
            _, sha256 = write_new(saving.folder / name, received, lambda: False)
        except OSError:
            for _ in received:  # or the sender would wait
                pass
            raise
        if sha256 != theirs_sha:
            raise OSError(f"what rank {source} sent arrived damaged")

    def _conclude(self, saving: _Saving, *, has_failed: bool) -> SaveOutcome:
        """Write the manifest everywhere, or remove what a failed save has left; agree on how it ended."""
        said = self.ranks.gather(
            (saving.failure, saving.seconds, saving.stall_s, None if saving.file is None else saving.file.model_dump())
        )
        failure = ""
        if not has_failed:
            text = self.ranks.broadcast(None if said is None else self._manifest(saving, [one[3] for one in said]))
            if self._is_first:
                try:
                    write_atomically(saving.folder / MANIFEST, text.encode())
                except OSError as error:
                    failure = f"{saving.folder} could not be finished: {sentence(error)}"
        failures = self.ranks.union([failure] if failure else [])
        told = None
        if said is not None:
            failures = [one[0] for one in said if one[0]] + failures
            told = asdict(
                SaveOutcome(
                    step=saving.step, ok=not failures, seconds=max(one[1] for one in said),
                    stall_seconds=max(one[2] for one in said),
                    bytes=sum(one[3]["bytes"] for one in said if one[3]) if not failures else 0,
                    reason="; ".join(failures[:3]),
                )
            )  # fmt: skip
        outcome = SaveOutcome(**self.ranks.broadcast(told))
        self._saving = None
        if outcome.ok:
            self._kept = saving.folder
        else:
            # The neighbours may stand at different places of an exchange: nothing more can be said on this group.
            self.why_off = outcome.reason
        self.keep_only(self._kept)
        return outcome

    def _manifest(self, saving: _Saving, files: Sequence[Any]) -> str:
        entries = [FileEntry.model_validate(file) for file in files if file is not None]
        return manifest_of(saving.step, self.run, saving.extra, self._division.entries, entries).decode()


def mark_once(folder: Path, run: str) -> None:
    """Say that ``run`` writes into ``folder``, whichever rank of a server comes first. Raises OSError."""
    with suppress(FileExistsError):
        mark(folder, run)


def _both(group: dist.ProcessGroup, mine: torch.Tensor, to: int, theirs: torch.Tensor, source: int) -> None:
    sent = dist.isend(mine, group=group, group_dst=to)
    got = dist.irecv(theirs, group=group, group_src=source)
    for work in (sent, got):
        if work is not None:
            work.wait()


def _exchanged(
    group: dist.ProcessGroup, mine: Sequence[memoryview], to: int, count: int, source: int
) -> Iterator[memoryview]:
    """Send ``mine``, piece by piece, and yield the ``count`` pieces that come, each with its length before it."""
    for index in range(max(len(mine), count)):
        sent = []
        if index < len(mine):
            piece = torch.frombuffer(bytearray(mine[index]), dtype=torch.uint8)
            sent = [dist.isend(torch.tensor([piece.numel()]), group=group, group_dst=to)]
            sent.append(dist.isend(piece, group=group, group_dst=to))
        if index < count:
            length = torch.zeros(1, dtype=torch.int64)
            dist.recv(length, group=group, group_src=source)
            theirs = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(theirs, group=group, group_src=source)
            yield theirs.numpy().data
        for work in sent:
            if work is not None:
                work.wait()
