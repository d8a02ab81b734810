"""How does one process become a rank: from the environment that torchrun (or nobody) set, to a process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from triax.errors import BadInput


@dataclass(frozen=True, slots=True)
class Process:
    """Who this process is among its peers. RANK may change at a restart: nothing on disk is tied to it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device

    @property
    def num_servers(self) -> int:
        """Servers of equal size that the ranks run on."""
        return max(self.world_size // self.local_world_size, 1)


def process_from_environment() -> Process:
    """Return who this process is: torchrun's variables, or the only rank where there are none.

    The device is the card with the local rank's number where CUDA has one, else the CPU. Raises BadInput where the
    variables contradict each other.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    defaults = {"LOCAL_RANK": os.environ.get("RANK", "0"), "LOCAL_WORLD_SIZE": os.environ.get("WORLD_SIZE", "1")}
    said = {name: os.environ.get(name, defaults.get(name, "0" if name == "RANK" else "1")) for name in names}
    try:
        rank, world_size, local_rank, local_world_size = (int(said[name]) for name in names)
    except ValueError:
        raise BadInput(f"the environment does not say which rank this is: {said} must be numbers.") from None
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise BadInput(f"the environment contradicts itself: {said} puts this rank outside the world.")
    return Process(rank, world_size, local_rank, local_world_size, _device(local_rank, local_world_size))


def _device(local_rank: int, local_world_size: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 and "SLURM_STEP_ID" in os.environ:
        # srun --gpus-per-task=1 shows each task its own card alone; NCCL refuses one that two ranks share.
        return torch.device("cuda", 0)
    if local_world_size > torch.cuda.device_count():
        raise BadInput(
            f"{local_world_size} ranks were started on a server with {torch.cuda.device_count()} cards: start one rank "
            f"for each card."
        )
    return torch.device("cuda", local_rank)


@contextmanager
def peers(process: Process, timeout_s: float) -> Iterator[dist.Store]:
    """Join the process group for the body of the ``with``; the value is the store that all ranks share.

    Every wait for a peer ends after ``timeout_s`` seconds with an error.
    """
    is_cuda = process.device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(process.device)
    timeout = timedelta(seconds=timeout_s)
    store: dist.Store
    if "RANK" in os.environ:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    else:
        store = dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=store, rank=process.rank, world_size=process.world_size, timeout=timeout,
    )  # fmt: skip
    yield store
    # Not in a finally: after an error the peers may be gone, and waiting for them would hide it.
    dist.destroy_process_group()
