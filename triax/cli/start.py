"""What happens between the command and the first step? Everything that can be checked is, before a process starts.

Torch-free until the ranks run: a mistake in a run file is told in a tenth of a second.
"""

import os
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triax.cli.recover import keep_training, memory_freed, stopped_early
from triax.errors import BadInput
from triax.spec.check import require_legal
from triax.spec.cluster import Cluster
from triax.spec.faults import validated
from triax.spec.load import layout_words, load_plan, load_run
from triax.spec.plan import Plan, make_plan
from triax.spec.resolve import resolve_layout
from triax.spec.run import LayoutRequest

if TYPE_CHECKING:
    from triax.cli.servers import Servers
    from triax.data.corpus import Corpus
    from triax.launch.rank import Rank
    from triax.train.order import Order
    from triax.train.run_folder import RunFolder

_RANKS_PER_CORE: Final = 32
"""More processes than this for each core train nothing in reasonable time (*assumed*), and fill the memory first."""


def start_training(
    target: Path, overrides: list[str], layout: str | None, *, num_ranks: int | None, run_dir: Path | None, quiet: bool,
    max_restarts: int | None = None, servers: "Servers | None" = None,
) -> int:  # fmt: skip
    """Train what the file ``target`` says; return the exit code of the run."""
    from triax.launch.environment import torchrun_variables
    from triax.launch.rank import forget_leftovers, rank_of_process
    from triax.train.stop import raised_by_signals

    # What torch's C++ would warn of is said here in a sentence; its errors still show.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.update(torchrun_variables(os.environ))
    rank = rank_of_process(os.environ)
    if rank is not None:
        refuse_of_a_rank(num_ranks, is_on_each_server=servers is not None)
    if servers is not None:
        words, folder = [*overrides, *layout_words(layout or "")], _folder_of(target, run_dir)
        return _start_on_servers(target, words, servers, folder, num_ranks, quiet=quiet, max_restarts=max_restarts)
    with ExitStack() as held:
        # Until a rank takes over the signals that ask for an end: nothing was done yet, so nothing is lost.
        with raised_by_signals(stopped_early()):
            folder = _folder_of(target, run_dir)
            asked = _read(target, [*overrides, *layout_words(layout or "")], rank, num_ranks, folder)
            if rank is None:
                forget_leftovers(os.environ)
                held.enter_context(folder.locked(asked.plan.run.train.timeout_s))
                order = _prepare(asked, folder, quiet)
                if asked.plan.cluster.num_cards > 1:
                    return keep_training(asked.plan, folder, order, max_restarts)
            else:
                order = _prepare_as_started(asked, folder, rank, quiet, held)
            from triax.train.worker import leave, train_as_rank
        # Who started this rank may start it again, and it then goes on from memory; a rank alone has ended the run.
        with memory_freed(folder, asked.plan.fingerprint) if rank is None else nullcontext():
            code = train_as_rank(order)
    if code and rank is not None:
        leave(code)
    return code


def refuse_of_a_rank(num_ranks: int | None, *, is_on_each_server: bool) -> None:
    """Raise BadInput where a process that a launcher started as a rank was told to start ranks itself."""
    if num_ranks is not None:
        raise BadInput(f"--ranks {num_ranks} starts processes, and this one was started as a rank: leave it out.")
    if is_on_each_server:
        raise BadInput("--nnodes is for one command on each server, and this one was started as a rank: leave it out.")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the command is to do."""

    plan: Plan
    text: str
    """The run file as it is written; a plan.json says none."""
    is_open: bool = False
    """The run file leaves the layout open."""


def _read(
    target: Path, overrides: list[str], rank: "Rank | None", num_ranks: int | None, folder: "RunFolder"
) -> _Asked:
    if target.suffix == ".json":
        if overrides:
            raise BadInput(f"{target} is a plan and is trained as it is: change the run file instead ({overrides[0]}).")
        plan = load_plan(target)
        require_legal(plan.layout, plan.run, _cluster_of(plan.cluster, rank, num_ranks))
        return _Asked(plan, "")
    run = load_run(target, overrides)
    cluster = _cluster_of(run.cluster, rank, num_ranks)
    is_open = run.layout == LayoutRequest()
    if is_open and rank is not None and rank.rank > 0:
        # Rank 0 plans for all that a launcher started: what each of them measured would differ.
        return _Asked(make_plan(run, cluster, resolve_layout(run, cluster.num_cards)), _text_of(target), is_open)
    if is_open:
        from triax.cli.planned import planned

        plan = planned(run, cluster, folder, has_cards=_num_cards() > 0)
    else:
        plan = make_plan(run, cluster, resolve_layout(run, cluster.num_cards))
    require_legal(plan.layout, run, plan.cluster)
    return _Asked(plan, _text_of(target), is_open)


def _start_on_servers(
    target: Path, overrides: list[str], servers: "Servers", folder: "RunFolder", num_ranks: int | None, *, quiet: bool,
    max_restarts: int | None,
) -> int:  # fmt: skip
    from triax.cli.servers import train_on_servers
    from triax.launch.rank import forget_leftovers

    if target.suffix == ".json":
        raise BadInput(f"--nnodes plans for the servers that are there, and {target} is a plan: give the run file.")
    run = load_run(target, overrides)
    inside = run.cluster.cards_per_server if run.cluster is not None and num_ranks is None else None
    cluster = _cluster_of(run.cluster, None, num_ranks or inside)
    forget_leftovers(os.environ)
    text = _text_of(target)
    return train_on_servers(
        run, cluster, text, folder, servers, has_cards=_num_cards() > 0, quiet=quiet, max_restarts=max_restarts
    )


def _text_of(run_file: Path) -> str:
    try:
        return run_file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        raise BadInput(f"{run_file} was changed while it was read: start again.") from None


def _folder_of(target: Path, run_dir: Path | None) -> "RunFolder":
    """Return the run's folder: what was said, the folder of the run that a plan.json lies in, or ``runs/NAME``."""
    from triax.train.run_folder import RunFolder

    if run_dir is not None:
        return RunFolder(run_dir)
    beside = RunFolder(target.parent)
    if target == beside.plan and beside.is_of_a_run():
        return beside
    return RunFolder(Path("runs") / target.stem)


def _cluster_of(said: Cluster | None, rank: "Rank | None", num_ranks: int | None) -> Cluster:
    """Return the cluster that ranks run on: as said where it has as many cards, else this start's shape."""
    if rank is not None:
        servers, inside = rank.num_servers, rank.local_world_size
    else:
        servers, inside = 1, num_local_ranks(said, num_ranks)
    if said is not None and said.num_cards == servers * inside:
        return said
    shape: dict[str, Any] = {"servers": servers, "cards_per_server": inside}
    if said is None and (device := _device()):
        shape["device"] = device
    return validated(Cluster, shape if said is None else said.model_dump() | shape, "the ranks that were started")


def num_local_ranks(cluster: Cluster | None, num_ranks: int | None) -> int:
    """Return how many processes this command starts; raise BadInput where this server cannot have so many."""
    cards = _num_cards()
    if num_ranks is not None:
        ranks = num_ranks
    elif cluster is None:
        ranks = max(cards, 1)
    elif cluster.servers == 1:
        ranks = cluster.cards_per_server
    else:
        raise BadInput(
            f"the cluster has {cluster.servers} servers: start this command on each with torchrun, srun or mpirun, or "
            f"say --ranks for processes of this server alone."
        )
    if ranks < 1:
        raise BadInput(f"{ranks} ranks train nothing: start 1 or more.")
    cores = os.cpu_count() or 1
    most, why = (cards, f"{cards} cards") if cards else (_RANKS_PER_CORE * cores, f"{cores} cores")
    if ranks > most:
        raise BadInput(
            f"{ranks} ranks are too many for this server of {why}: start at most {most} here, and more on several "
            f"servers with torchrun, srun or mpirun."
        )
    return ranks


def _device() -> str | None:
    """Return the catalogue's name of this server's cards, as the driver calls them; None where it has none it knows."""
    from triax.plan.catalogue import card_called

    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")) if _num_cards() else []:
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Model:"):
                return card_called(line.partition(":")[2])
    return None


def _num_cards() -> int:
    """Return how many NVIDIA cards this server has for us, without loading CUDA."""
    # A container has the nodes of its own cards alone; the driver makes nodes only once a card is used.
    there = list(Path("/dev").glob("nvidia[0-9]*")) or list(Path("/proc/driver/nvidia/gpus").glob("*"))
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is None or not there:
        return len(there)
    # As CUDA reads it: the first word that names no card ends the list.
    names = [name.strip() for name in said.split(",")]
    return len(list(takewhile(lambda name: name.isdecimal() or name.startswith(("GPU-", "MIG-")), names)))


def _prepare(asked: _Asked, folder: "RunFolder", quiet: bool) -> "Order":
    """Make everything ready for ranks of this server alone, and return what they will be told."""
    from triax.launch.workers import warm_up

    plan = asked.plan
    folder.refuse_another_run(plan)
    if plan.cluster.num_cards > 1:
        warm_up("triax.train.worker", num_ranks=plan.cluster.num_cards)
    tokens = tokens_of(plan, quiet)
    from triax.train.order import Order

    places = str(folder.places) if plan.cluster.num_cards > 1 else None
    return Order(plan.model_dump_json(), asked.text, str(folder.path), tokens.address, quiet, places)


def _prepare_as_started(asked: _Asked, folder: "RunFolder", rank: "Rank", quiet: bool, held: ExitStack) -> "Order":
    """Return what one of the ranks that a launcher started is told; rank 0 keeps the folder, until ``held`` ends."""
    if rank.rank == 0:
        held.enter_context(folder.locked())
        folder.refuse_another_run(asked.plan)
    from triax.train.order import Order

    return Order(asked.plan.model_dump_json(), asked.text, str(folder.path), None, quiet, asks_rank_0=asked.is_open)


def tokens_of(plan: Plan, quiet: bool) -> "Corpus":
    """Return the tokens of the run, and raise BadInput where they are too few for it."""
    from triax.cli.progress import preparing
    from triax.data.batch import batches_of

    run = plan.run
    tokens = preparing(run, quiet=quiet)
    batches_of(
        tokens, seq_len=run.data.seq_len, attend_across_documents=run.data.attend_across_documents,
        eval_sequences=run.eval.sequences, seed=run.train.seed,
    )  # fmt: skip
    return tokens
