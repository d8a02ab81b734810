"""What happens between the command and the first step? Everything that can be checked is, before a process starts.

Torch-free until the ranks run: a mistake in a run file is told in a tenth of a second.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from triax.errors import BadInput, TriaxError
from triax.spec.check import require_legal
from triax.spec.cluster import Cluster
from triax.spec.load import layout_words, load_plan, load_run
from triax.spec.plan import Plan, make_plan
from triax.spec.resolve import resolve_layout

if TYPE_CHECKING:
    from triax.data.store import TokenStore
    from triax.train.run_folder import RunFolder


def start_training(
    target: Path, overrides: list[str], layout: str | None, *, num_ranks: int | None, run_dir: Path | None, quiet: bool
) -> int:
    """Train what the file ``target`` says; return the exit code of the run."""
    from triax.launch.agent import warm_up
    from triax.launch.environment import torchrun_variables
    from triax.train.run_folder import RunFolder

    os.environ.update(torchrun_variables(os.environ))
    is_rank = "RANK" in os.environ
    if is_rank and num_ranks is not None:
        raise BadInput(f"--ranks {num_ranks} starts processes, and this one was started as a rank: leave it out.")
    plan, text = _read(target, [*overrides, *layout_words(layout or "")], num_ranks)
    folder = RunFolder(run_dir if run_dir is not None else Path("runs") / _name_of(target))
    if is_rank:
        return _train_as_started(plan, folder, text, quiet)
    with folder.locked():
        folder.prepare(plan, text)
        if plan.cluster.num_cards > 1:
            warm_up("triax.train.worker", num_ranks=plan.cluster.num_cards)
        tokens = _tokens(plan, quiet)
        return _train_here(plan, folder, tokens, quiet)


def _read(target: Path, overrides: list[str], num_ranks: int | None) -> tuple[Plan, str]:
    """Return the plan and the text of the run file; a plan.json says no text of its own."""
    if target.suffix == ".json":
        if overrides:
            raise BadInput(f"{target} is a plan and is trained as it is: change the run file instead ({overrides[0]}).")
        plan = load_plan(target)
        ranks = _world_size(num_ranks, plan.cluster)
        require_legal(plan.layout, plan.run, _cluster_of(plan.cluster, ranks))
        return plan, ""
    run = load_run(target, overrides)
    ranks = _world_size(num_ranks, run.cluster)
    cluster = _cluster_of(run.cluster, ranks)
    layout = resolve_layout(run, ranks)
    require_legal(layout, run, cluster)
    return make_plan(run, cluster, layout), target.read_text(encoding="utf-8")


def _name_of(target: Path) -> str:
    """``runs/NAME`` is named after the run file, or after the folder of the run that a plan.json lies in."""
    return target.resolve().parent.name if target.name == "plan.json" else target.stem


def _world_size(num_ranks: int | None, cluster: Cluster | None) -> int:
    if "RANK" in os.environ:
        said = os.environ.get("WORLD_SIZE", "")
        if not said.isdecimal() or int(said) < 1:
            raise BadInput(
                f"RANK is set and WORLD_SIZE={said!r} is no number: start ranks with torchrun, srun or mpirun, or "
                f"unset RANK."
            )
        return int(said)
    if num_ranks is not None:
        return num_ranks
    if cluster is not None and cluster.servers == 1:
        return cluster.cards_per_server
    if cluster is not None:
        raise BadInput(
            f"the cluster has {cluster.servers} servers: start this command on each with torchrun, srun or mpirun, or "
            f"say --ranks for processes of this server alone."
        )
    return max(_num_cards(), 1)


def _num_cards() -> int:
    """Return how many NVIDIA cards this server has, without loading CUDA."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is not None:
        return len([name for name in said.split(",") if name.strip()])
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def _cluster_of(said: Cluster | None, ranks: int) -> Cluster:
    """Return the cluster that ``ranks`` ranks run on: as said where it has as many cards, else this start's shape."""
    if said is not None and said.num_cards == ranks:
        return said
    inside = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    shape = Cluster(servers=max(ranks // inside, 1), cards_per_server=inside)
    return shape if said is None else said.model_copy(update=shape.model_dump(include={"servers", "cards_per_server"}))


def _tokens(plan: Plan, quiet: bool) -> "TokenStore":
    from triax.cli.progress import preparing
    from triax.data.batch import batches_of

    run = plan.run
    tokens = preparing(run, quiet=quiet)
    batches_of(
        tokens, seq_len=run.data.seq_len, attend_across_documents=run.data.attend_across_documents,
        eval_sequences=run.eval.sequences, seed=run.train.seed,
    )  # fmt: skip
    return tokens


def _train_here(plan: Plan, folder: "RunFolder", tokens: "TokenStore", quiet: bool) -> int:
    from triax.launch.agent import REQUEUE, run_workers
    from triax.train.places import explanation, make_places
    from triax.train.worker import Order, train_as_rank, work

    ranks = plan.cluster.num_cards
    if ranks == 1:
        return train_as_rank(Order(plan.model_dump_json(), str(folder.path), str(tokens.folder), quiet))
    places = make_places(folder.places, ranks)
    order = Order(plan.model_dump_json(), str(folder.path), str(tokens.folder), quiet, str(folder.places))
    ended = run_workers(work, order, ranks, shutdown_s=int(plan.run.train.timeout_s))
    if ended.code == REQUEUE and not folder.stopped.exists():
        raise TriaxError("the run was asked to stop and could not save its state; the newest checkpoint still stands.")
    reason = explanation(places, plan.layout, ended.killed) if ended.code == 1 else ""
    if reason:
        raise TriaxError(f"{reason} Start the same command again to go on from the newest checkpoint.")
    return ended.code


def _train_as_started(plan: Plan, folder: "RunFolder", text: str, quiet: bool) -> int:
    """Train as one of the ranks that torchrun started; rank 0 keeps the folder."""
    from triax.train.worker import Order, leave, train_as_rank

    with ExitStack() as held:
        if os.environ["RANK"] == "0":
            held.enter_context(folder.locked())
            folder.prepare(plan, text)
        code = train_as_rank(Order(plan.model_dump_json(), str(folder.path), None, quiet))
        if code:
            leave(code)
    return code
