"""What does each rank do while a cluster is looked at? It tells what it finds, and all learn of all."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from triax.checkpoint.disk import sentence
from triax.errors import TriaxError
from triax.parallel.launch import Process, process_from_environment
from triax.spec.cluster import Cluster
from triax.spec.run import Run
from triax.train.message import tell, write_anything
from triax.verify import preflight
from triax.verify.answerer import Answerer, Asked, ask
from triax.verify.link_speeds import Speeds, measure
from triax.verify.link_speeds import share as share_by_rank
from triax.verify.preflight import Check, Servers
from triax.verify.server_facts import Facts, existing, gather_facts
from triax.verify.shared_folder import answer_token, leave_token, missing_answers, remove_token

_CONNECT_S: Final = 5.0
_LEAST_WAIT_S: Final = 60.0
"""Others may wait so long for a shared folder to show a file, and measure slow links meanwhile."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank is told when its process starts."""

    run: str | None
    """The run as JSON."""
    cluster: str | None
    """The cluster as JSON."""
    folder: str
    json_file: str | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a look at a cluster came to."""

    servers: Servers
    checks: tuple[Check, ...]
    speeds: Speeds | None
    """None where servers do not reach each other."""

    def count(self, verdict: preflight.Verdict) -> int:
        """Return how many things came to ``verdict``."""
        return sum(check.verdict == verdict for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "format_version": 1,
            "fit": self.count("fail") == 0,
            "checks": [asdict(check) for check in self.checks],
            "ranks": [asdict(facts) for facts in self.servers.facts],
            "links": None if self.speeds is None else asdict(self.speeds),
        }


def work(order: Order) -> None:
    """Look at the cluster as one of several ranks; leave the process with the exit code where it is not 0."""
    code = look_as_rank(order)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # gloo's threads would turn the end of a rank that lost a peer into an abort


def look_as_rank(order: Order) -> int:
    """Look at the cluster with all other ranks; rank 0 tells what was found. Return the exit code: 1 where something
    fails, on every rank."""
    write_anything()
    run = None if order.run is None else Run.model_validate_json(order.run)
    cluster = None if order.cluster is None else Cluster.model_validate_json(order.cluster)
    try:
        process = process_from_environment()
        store = _meet(process, order.timeout_s)
        report = look(process, store, Path(order.folder), run, cluster, order.timeout_s)
        # Rank 0 holds the store, and may only leave when nobody needs it.
        store.set(f"doctor/done/{process.rank}", "")
        if process.rank == 0:
            store.multi_get([f"doctor/done/{rank}" for rank in range(process.world_size)])
            _tell(report, order.json_file)
    except TriaxError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            tell(str(error))
        return error.exit_code
    except (DistError, RuntimeError) as error:
        tell(f"rank {process.rank} lost the others while the cluster was looked at: {_first_line(error)}")
        return 1
    return int(report.count("fail") > 0)


def look(
    process: Process, store: dist.Store, folder: Path, run: Run | None, cluster: Cluster | None, timeout_s: float
) -> Report:
    """Return what all ranks find together, the same on each of them; ``store`` is what they share."""

    share = partial(share_by_rank, store, process)
    mine = gather_facts(process, folder)
    servers = Servers(tuple(_facts(each) for each in share("facts", asdict(mine))))
    refused, clocks = _ask_around(process, servers, mine, share)
    checks = [
        preflight.check_versions(servers),
        preflight.check_ranks(servers, cluster),
        preflight.check_names(servers),
        preflight.check_connections(servers, refused),
        preflight.check_clocks(servers, clocks),
        *preflight.check_folder(servers, _look_at_folder(process, existing(folder), share), run),
        preflight.check_limits(servers),
        preflight.check_shared_memory(servers),
    ]
    is_joinable = not any(check.verdict == "fail" and check.name in ("names", "connections") for check in checks)
    if not is_joinable:  # ranks would wait for each other in vain
        return Report(servers, tuple(checks), None)
    if process.world_size == 1:
        return Report(servers, tuple(checks), Speeds((), (), None))
    timeout = timedelta(seconds=timeout_s)
    if process.device.type == "cuda":
        torch.cuda.set_device(process.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if process.device.type == "cuda" else "gloo",
        store=store, rank=process.rank, world_size=process.world_size, timeout=timeout,
    )  # fmt: skip
    speeds = measure(process, store)
    dist.destroy_process_group()
    return Report(servers, (*checks, *preflight.check_links(servers, speeds, cluster)), speeds)


def _meet(process: Process, timeout_s: float) -> dist.Store:
    """Return the store that all ranks share; raise TriaxError where they do not meet."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    store: dist.Store
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        ranks = range(process.world_size)
        store.set(f"doctor/here/{process.rank}", "")
        store.wait([f"doctor/here/{rank}" for rank in ranks], timedelta(seconds=timeout_s))
    except DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise TriaxError(
            f"rank {process.rank} could not meet the other ranks at {where}: {_first_line(error)}"
        ) from None
    store.set_timeout(timedelta(seconds=max(timeout_s, _LEAST_WAIT_S)))
    return store


def _ask_around(
    process: Process, servers: Servers, mine: Facts, share: Callable[[str, Any], list[Any]]
) -> tuple[list[tuple[int, int, str]], dict[int, Asked]]:
    """Let the first rank of each server connect to others; return who could not, and what they learned of the first
    server's clock."""
    with Answerer(mine.address) as answerer:
        ports = share("ports", answerer.port)
        asked, failed = {}, {}
        for other in partners(mine.server, servers.count) if process.local_rank == 0 else ():
            rank = other * process.local_world_size
            try:
                asked[other] = asdict(ask(servers.facts[rank].address, ports[rank], _CONNECT_S))
            except OSError as error:
                failed[other] = (error.strerror or str(error)).lower()
        said = share("asked", {"asked": asked, "failed": failed})  # also: nobody leaves while another asks
    refused, clocks = [], {}
    for server, each in enumerate(said[:: process.local_world_size]):
        refused += [(server, int(whom), str(why)) for whom, why in each["failed"].items()]
        if "0" in each["asked"]:
            clocks[server] = Asked(**each["asked"]["0"])
    return refused, clocks


def partners(server: int, count: int) -> Sequence[int]:
    """Return the servers that ``server`` connects to: the first, for its clock, and those at distances 1, 2, 4 ...,
    so that thousands of servers ask a dozen each, and one that is cut off is found."""
    distances = (1 << power for power in range(count.bit_length()))
    return sorted({0, *((server + distance) % count for distance in distances)} - {server})


def _look_at_folder(process: Process, folder: Path, share: Callable[[str, Any], list[Any]]) -> dict[int, str]:
    """Return by server what is wrong with the run's folder there."""
    is_first_of_server = process.local_rank == 0
    server = process.rank // process.local_world_size
    name, wrong = leave_token(folder) if process.rank == 0 else ("", None)
    name, of_first = share("token", [name, wrong])[0]
    if of_first is None and is_first_of_server and process.rank > 0:
        wrong = answer_token(folder, name, server)
    said = share("folder", wrong)[:: process.local_world_size]
    found = {number: each for number, each in enumerate(said) if each is not None}
    if process.rank == 0:
        answered = [number for number in range(1, len(said)) if number not in found] if of_first is None else []
        for number in missing_answers(folder, name, answered):
            found[number] = "is not where the first server looks for it"
        remove_token(folder, name)
    return {int(number): what for number, what in share("found", found)[0].items()}


def _facts(said: dict[str, Any]) -> Facts:
    return Facts(**{**said, "host_addresses": tuple(said["host_addresses"])})


def _tell(report: Report, json_file: str | None) -> None:
    text = json.dumps(report.as_json(), indent=2)
    if json_file == "-":
        sys.stdout.write(text + "\n")
    else:
        for check in report.checks:
            sys.stdout.write(f"{check.verdict:4}  {check.name:11}  {check.sentence}\n")
        if json_file is not None:
            _write(Path(json_file), text + "\n")
    sys.stdout.flush()
    fails, warnings = report.count("fail"), report.count("warn")
    if fails:
        tell(f"{fails} of {len(report.checks)} checks failed: training here would fail, or be wrong.")
    elif json_file != "-":
        beside = f" ({warnings} to look at)" if warnings else ""
        sys.stdout.write(f"fit to train on{beside}\n")
        sys.stdout.flush()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TriaxError(f"{path} cannot be written: {sentence(error)}.") from None


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split())[:300]
