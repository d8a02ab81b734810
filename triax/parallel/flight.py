"""Which collectives were under way when ranks hung? NCCL's flight recorder knows: switched on before groups are made.

torch 2.13 keeps the last collectives of a rank, with their sizes, states and stacks, in memory, and writes them to a
file where one times out or where somebody writes into a pipe that it listens to. It reads what it should do from the
environment when the first group of NCCL is made. Torch-free, since who asks is the process that started the ranks.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_KEPT: Final = 2000
"""Collectives; torch's own number where it is not said, which its pipe does not take for one."""


def recorder_variables(folder: Path, pid: int) -> dict[str, str]:
    """Return the environment in which process ``pid`` keeps its collectives and writes them to ``nccl-RANK`` in
    ``folder``, at a timeout or when it is asked. The older names are those that torch's pipe and timeout know."""
    return {
        "TORCH_FR_BUFFER_SIZE": str(_KEPT),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(_KEPT),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "nccl-"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "nccl-"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": _pipe_stem(pid),
    }


@contextmanager
def flight_recorder(folder: Path, rank: int) -> Iterator[None]:
    """Let this process, which has made no group yet, record for the body of the ``with``; what the environment says
    already stays so."""
    for name, value in recorder_variables(folder, os.getpid()).items():
        os.environ.setdefault(name, value)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        _pipe(os.getpid(), rank).unlink(missing_ok=True)


def ask_for_record(pid: int, rank: int) -> None:
    """Ask process ``pid``, which is ``rank`` among all, to write down its collectives; nothing where it keeps none."""
    with suppress(OSError):
        pipe = os.open(_pipe(pid, rank), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b"1")
        finally:
            os.close(pipe)


def _pipe_stem(pid: int) -> str:
    """Return where torch makes its pipe: on a disk of this server, since others may have no pipes."""
    return os.path.join(tempfile.gettempdir(), f"triax-{pid}-nccl-")


def _pipe(pid: int, rank: int) -> Path:
    return Path(f"{_pipe_stem(pid)}{rank}.pipe")
