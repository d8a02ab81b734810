"""What does a rank find where it runs: software, cards, names, limits, room?"""

import os
import platform
import resource
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from triax import __version__
from triax.parallel.launch import Process
from triax.watch.record import server_name

SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank found. Sizes in bytes; None: there is no such thing here."""

    rank: int
    server: int
    name: str
    """What the server is called: its host name, unless it was given another."""
    host: str
    address: str
    """The server's own address on the way to rank 0."""
    host_addresses: tuple[str, ...]
    """What the host's name resolves to on the host itself."""
    interface: str | None
    """The card that gloo or NCCL was told to use."""
    python: str
    torch: str
    triax: str
    device: str
    """Name of the card; ``cpu`` for a process that has none."""
    device_bytes: int | None
    cores: int
    files: int
    """Files and connections that this process may have open."""
    locked_bytes: int | None
    """Memory that it may hold in place for network cards; None: as much as there is."""
    shared_memory_bytes: int | None
    run_folder: str
    free_bytes: int
    """In the file system of the run's folder."""


def gather_facts(process: Process, run_folder: Path) -> Facts:
    """Return what this rank finds; nothing is changed."""
    is_cuda = process.device.type == "cuda"
    properties = torch.cuda.get_device_properties(process.device) if is_cuda else None
    folder = existing(run_folder)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    host = socket.gethostname()
    return Facts(
        rank=process.rank,
        server=process.rank // process.local_world_size,
        name=server_name(),
        host=host,
        address=_address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")),
        host_addresses=_resolved(host),
        interface=os.environ.get("NCCL_SOCKET_IFNAME" if is_cuda else "GLOO_SOCKET_IFNAME"),
        python=platform.python_version(),
        torch=torch.__version__,
        triax=__version__,
        device=properties.name if properties is not None else "cpu",
        device_bytes=properties.total_memory if properties is not None else None,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None,
        run_folder=str(folder),
        free_bytes=shutil.disk_usage(folder).free,
    )


def existing(folder: Path) -> Path:
    """Return ``folder``, or the nearest folder above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _resolved(host: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(sorted({str(address[0]) for *_, address in found}))


def _address_towards(host: str) -> str:
    """Return the address that this server would send from; nothing is sent."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
