"""What do agents say to each other? Files in a folder that all servers share, so that no server is special.

Beats are rewritten again and again. Leases, generations and the end of the run are made once: whoever comes second sees
that the name is taken.
"""

import errno
import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from triax.launch.members import Beat, Generation, Lease
from triax.spec.generations import file_name, newest_number
from triax.spec.run import FORMAT_VERSION

Said = TypeVar("Said")

_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_LARGEST_BYTES: Final = 1 << 26
_KEPT: Final = 64
"""Files of a kind that stay, to see afterwards what happened."""


@dataclass(frozen=True, slots=True)
class Over:
    """How the run ended in a generation."""

    generation: int
    code: int
    sentence: str = ""


class Board:
    """The files of one run. Every method may raise OSError, and may take as long as the disk does."""

    def __init__(self, folder: Path) -> None:
        """Make ``folder`` if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._read: dict[str, Any] = {}

    def write_beat(self, beat: Beat) -> None:
        """Replace what this server said of itself."""
        path = self._folder / f"server-{beat.server}.json"
        fresh = self._folder / f".{path.name}.{beat.start}"
        fresh.write_bytes(_encoded(beat))
        fresh.replace(path)

    def leave(self, beat: Beat) -> None:
        """Remove what this server said of itself."""
        (self._folder / f"server-{beat.server}.json").unlink(missing_ok=True)

    def beats(self) -> list[Beat]:
        """Return what all servers say of themselves, also those that are long gone."""
        found = (_decoded(Beat, path) for path in sorted(self._folder.glob("server-*.json")))
        return [beat for beat in found if beat is not None]

    def newest_lease(self) -> Lease | None:
        """Return the lease of the highest number."""
        return self._newest("lease", Lease)

    def take(self, lease: Lease) -> bool:
        """Make ``lease`` unless somebody has made one of its number; return whether it was made."""
        return self._make("lease", lease.number, lease)

    def newest_generation(self) -> Generation | None:
        """Return the newest generation."""
        return self._newest("generation", Generation)

    def begin(self, generation: Generation) -> bool:
        """Make ``generation`` the newest unless there is one of its number; return whether it was made."""
        return self._make("generation", generation.number, generation)

    def newest_over(self) -> Over | None:
        """Return the newest end of the run; it may be that of an earlier start."""
        return self._newest("over", Over)

    def end(self, over: Over) -> bool:
        """Say that the run is over, unless somebody has said so of this generation."""
        return self._make("over", over.generation, over)

    def _newest(self, kind: str, of: type[Said]) -> Said | None:
        number = newest_number(self._folder, kind)
        if number == 0:
            return None
        name = file_name(kind, number)
        if name not in self._read:
            read = _decoded(of, self._folder / name)
            if read is None:
                return None  # not all of it is there yet
            self._read = {key: value for key, value in self._read.items() if not key.startswith(kind)} | {name: read}
        newest: Said = self._read[name]
        return newest

    def _make(self, kind: str, number: int, said: Any) -> bool:
        """Make the file of ``number`` unless it is there, and drop one that is so old that nobody asks for it."""
        with suppress(OSError):
            (self._folder / file_name(kind, max(number - _KEPT, 0))).unlink(missing_ok=True)
        name = self._folder / file_name(kind, number)
        fresh = self._folder / f".{name.name}.{secrets.token_hex(4)}"
        fresh.write_bytes(_encoded(said))
        try:
            os.link(fresh, name)
        except FileExistsError:
            # A network file system may ask twice, and report the second time that it had been done.
            return fresh.stat().st_nlink == 2
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _made_without_links(name, fresh.read_bytes())
        finally:
            with suppress(OSError):
                fresh.unlink()
        return True


def _made_without_links(path: Path, content: bytes) -> bool:
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def _encoded(said: Any) -> bytes:
    return json.dumps({"format_version": FORMAT_VERSION, **asdict(said)}).encode()


def _decoded(of: type[Said], path: Path) -> Said | None:
    """Return what a file says; None where it is not all there, or is none of ours."""
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            return None
        return TypeAdapter(of).validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
