"""Which rank did srun or mpirun mean this process to be, said in torchrun's variables?

Everything after this reads one set of names: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
Slurm's variables: srun(1), "OUTPUT ENVIRONMENT VARIABLES". Open MPI's: "Environmental variables set by mpirun". Hydra
(MPICH, Intel MPI) sets PMI_* and MPI_LOCAL*.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from triax.errors import BadInput

_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0
"""Slurm numbers the step of a batch script, of an interactive shell and of its own services from here on."""

_PORTS: Final = range(15000, 30000)
"""Where rank 0 listens if nobody says: below the ports that a system hands out by itself."""

_TASKS: Final = re.compile(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?")
"""One item of ``SLURM_STEP_TASKS_PER_NODE``: ``4`` or ``4(x2)``, four tasks on each of two servers."""

_BRACKET: Final = re.compile(r"\[([0-9]+)[0-9,-]*\]")
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one process stands, and by whose word."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would have set, for a process that srun or mpirun started as one of several ranks.

    Empty where RANK is set (it wins), and where this process is alone: a step of one task, a batch script, or a shell
    inside an allocation may start ranks, but is none. The innermost launcher counts: mpirun inside an allocation
    reaches other servers through srun, whose variables its ranks then inherit. MASTER_ADDR and MASTER_PORT stay as they
    are where they are set. Raises BadInput where variables contradict each other or do not say where rank 0 is.
    """
    if "RANK" in environment:
        return {}
    place = _of_open_mpi(environment) or _of_hydra(environment) or _of_slurm(environment)
    if place is None or place.world_size == 1:
        return {}
    _check(place)
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _first_host(environment, place),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_port(environment)),
    }


def _of_open_mpi(environment: Mapping[str, str]) -> _Place | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return _Place("mpirun", *(_number(environment, f"OMPI_COMM_WORLD_{name}") for name in names))


def _of_hydra(environment: Mapping[str, str]) -> _Place | None:
    if "PMI_RANK" not in environment or "PMI_SIZE" not in environment:
        return None
    rank, world_size = _number(environment, "PMI_RANK"), _number(environment, "PMI_SIZE")
    if world_size == 1:
        return _Place("mpirun", 0, 1, 0, 1)
    if "MPI_LOCALRANKID" in environment:
        local = (_number(environment, "MPI_LOCALRANKID"), _number(environment, "MPI_LOCALNRANKS"))
        return _Place("mpirun", rank, world_size, *local)
    # srun --mpi=pmi2 sets both families; they are of one launcher where they say the same.
    slurm = _of_slurm(environment)
    if slurm is not None and (slurm.rank, slurm.world_size) == (rank, world_size):
        return slurm
    raise BadInput(
        f"PMI_RANK={rank} and PMI_SIZE={world_size} do not say which rank of its server this is: set LOCAL_RANK and "
        f"LOCAL_WORLD_SIZE with RANK and WORLD_SIZE, or start with torchrun."
    )


def _of_slurm(environment: Mapping[str, str]) -> _Place | None:
    # Only a step of srun has tasks: a batch script has SLURM_PROCID=0 too, and the shell of salloc SLURM_NTASKS.
    if not {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
        return None
    if _number(environment, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    rank, world_size, local_rank = (_number(environment, name) for name in names)
    return _Place("srun", rank, world_size, local_rank, _tasks_here(environment, world_size))


def _tasks_here(environment: Mapping[str, str], world_size: int) -> int:
    """Return how many tasks of the step run on each server; raise BadInput where servers differ."""
    said = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    items = [_TASKS.fullmatch(item) for item in said.split(",")]
    counts = {int(item.group(1)) for item in items if item}
    servers = sum(int(item.group(2) or 1) for item in items if item)
    if not all(items) or len(counts) != 1 or (tasks := counts.pop()) * servers != world_size:
        raise BadInput(
            f"srun started {world_size} tasks as SLURM_STEP_TASKS_PER_NODE={said!r}, and ranks must be equally many on "
            f"each server: start them with srun --ntasks-per-node=N."
        )
    return tasks


def _check(place: _Place) -> None:
    """Raise BadInput unless ranks are numbered server by server: who shares a server is told from the numbers."""
    rank, inside = place.rank, place.local_world_size
    said = f"rank {rank} of {place.world_size} as number {place.local_rank} of {inside} on its server"
    if not (rank < place.world_size and place.local_rank < inside <= place.world_size):
        raise BadInput(f"{place.launcher} contradicts itself: it started {said}.")
    if place.world_size % inside or rank % inside != place.local_rank:
        how = "srun --distribution=block" if place.launcher == "srun" else "mpirun --map-by slot"
        raise BadInput(
            f"{place.launcher} started {said}, and ranks must be equally many on each server and numbered server by "
            f"server: use {how}."
        )


def _first_host(environment: Mapping[str, str], place: _Place) -> str:
    """Return the server of rank 0."""
    if place.local_world_size == place.world_size:
        return "127.0.0.1"
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    said = next((environment[name] for name in names if environment.get(name)), None)
    if said is None:
        raise BadInput(
            f"{place.launcher} started {place.world_size} ranks on several servers and does not say where rank 0 is: "
            f"set MASTER_ADDR to the name of its server."
        )
    # The first of `rack[1-2]node[03-06,9],login1` is rack1node03: each bracket begins with its first number.
    host = re.split(r",(?![^\[]*\])", said)[0]
    host = _BRACKET.sub(r"\1", host)
    if _HOST.fullmatch(host) is None:
        raise BadInput(
            f"the list of servers {said[:200]!r} does not begin with a name: set MASTER_ADDR to the name of rank 0's "
            f"server."
        )
    return host


def _port(environment: Mapping[str, str]) -> int:
    """Return a port that all ranks of a step come to, and that other jobs on the same server hardly do."""
    said = (environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", ""))
    job, step = (int(number[-18:]) if number.isdecimal() else 0 for number in said)
    return _PORTS[(job * 64 + step % 64) % len(_PORTS)]


def _number(environment: Mapping[str, str], name: str) -> int:
    said = environment.get(name, "")
    if not (said.isascii() and said.isdecimal() and len(said) <= 18):
        raise BadInput(f"{name}={said[:80]!r} is no number: it should say where the launcher put this process.")
    return int(said)
