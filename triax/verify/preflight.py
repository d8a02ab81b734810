"""Is a cluster fit to train on? Each thing that was looked at comes to one sentence: ok, warn or fail.

The judgement alone: what it judges is gathered elsewhere, so that servers nobody has can be judged in a test.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from triax.spec.cluster import Cluster
from triax.spec.run import Run
from triax.spec.weights import num_parameters
from triax.units import format_bytes, format_seconds
from triax.verify.answerer import Asked
from triax.verify.link_speeds import Speeds
from triax.verify.server_facts import Facts

Verdict = Literal["ok", "warn", "fail"]

_SLOW: Final = 0.7
"""Part of the expected rate below which a link is named."""
_CLOCK_S: Final = 1.0
"""Clocks further apart than this put events of a run in a wrong order; nothing in triax compares two clocks."""
_SHARED_MEMORY_BYTES: Final = 1 << 30
"""NCCL's guide asks for --shm-size=1g (docs.nvidia.com, NCCL, troubleshooting); a container has 64 MiB unless told."""
_MOST_NAMED: Final = 4


@dataclass(frozen=True, slots=True)
class Check:
    """What looking at one thing came to."""

    name: str
    verdict: Verdict
    sentence: str


@dataclass(frozen=True, slots=True)
class Servers:
    """What all ranks found, and how their servers are called."""

    facts: tuple[Facts, ...]
    """By rank; equally many of each server."""

    @property
    def first(self) -> list[Facts]:
        """What the first rank of each server found."""
        return list(self.facts[:: len(self.facts) // self.count])

    @property
    def count(self) -> int:
        """Number of servers."""
        return self.facts[-1].server + 1

    def name(self, server: int) -> str:
        """Return what a person calls a server: with its name, or its address where servers share one."""
        names = [each.name for each in self.first]
        of = self.first[server]
        return f"server {server} ({of.name if names.count(of.name) == 1 or self.count == 1 else of.address})"

    def names(self, servers: Iterable[int]) -> str:
        """Return the names of several, cut short where they are many."""
        names = [self.name(server) for server in sorted(set(servers))]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return ", ".join(names[:_MOST_NAMED]) + more


def check_versions(servers: Servers) -> Check:
    """All ranks must run the same software: a collective of two versions may hang or be wrong without a word."""
    for what in ("triax", "torch", "python"):
        said = [(getattr(each, what), each.server) for each in servers.facts]
        usual = Counter(version for version, _ in said).most_common(1)[0][0]
        others = {server: version for version, server in said if version != usual}
        if others:
            versions = " and ".join(sorted(set(others.values())))
            return Check(
                "versions", "fail",
                f"{servers.names(others)} has {what} {versions} and the others have {usual}: install the same.",
            )  # fmt: skip
    one = servers.facts[0]
    where = f"on {_counted(servers.count, 'server')}"
    return Check("versions", "ok", f"triax {one.triax}, torch {one.torch}, python {one.python} {where}.")


def check_ranks(servers: Servers, cluster: Cluster | None) -> Check:
    """Ranks are one for each card, as many as the cluster file says, and the cards are of one kind."""
    inside = len(servers.facts) // servers.count
    kinds = Counter((each.device, each.device_bytes) for each in servers.facts)
    usual = kinds.most_common(1)[0][0]
    shape = f"{_counted(servers.count, 'server')} of {_counted(inside, 'rank')}"
    odd = {each.server for each in servers.facts if (each.device, each.device_bytes) != usual}
    if odd:
        kind = next(each for each in servers.facts if each.server in odd and (each.device, each.device_bytes) != usual)
        return Check(
            "ranks", "fail",
            f"{servers.names(odd)} has another card ({_card(kind.device, kind.device_bytes)}) than the others "
            f"({_card(*usual)}): all steps wait for the slowest, and layouts are planned for equal cards.",
        )  # fmt: skip
    if cluster is not None and (cluster.servers, cluster.cards_per_server) != (servers.count, inside):
        return Check(
            "ranks", "warn",
            f"{shape} were started, and the cluster is said to be {_counted(cluster.servers, 'server')} of "
            f"{_counted(cluster.cards_per_server, 'card')}: what is planned for it may not fit.",
        )  # fmt: skip
    few = {each.server for each in servers.first if each.device == "cpu" and each.cores < inside}
    if few:
        cores = min(servers.first[server].cores for server in few)
        return Check(
            "ranks", "warn",
            f"{_counted(inside, 'rank')} share {_counted(cores, 'core')} on {servers.names(few)}: steps take longer.",
        )  # fmt: skip
    return Check("ranks", "ok", f"{shape}, each on {_card(*usual)}.")


def check_names(servers: Servers) -> Check:
    """A host's name must lead to an address that other servers can use, since gloo and NCCL publish it."""
    if servers.count == 1:
        return Check("names", "ok", f"one server, {servers.first[0].host}: ranks meet inside it.")
    alone = {each.server for each in servers.first if _is_loopback(each.address)}
    if alone:
        return Check(
            "names", "fail",
            f"MASTER_ADDR leads to {servers.first[min(alone)].address} on {servers.names(alone)}, which no other "
            f"server reaches: give it an address of a network.",
        )  # fmt: skip
    told = {each.server for each in servers.first if each.interface}
    lost = {each.server for each in servers.first if not each.host_addresses} - told
    if lost:
        return Check(
            "names", "fail",
            f"the name of {servers.names(lost)} resolves to nothing there: name the network card in GLOO_SOCKET_IFNAME "
            f"and NCCL_SOCKET_IFNAME, or the host in /etc/hosts.",
        )  # fmt: skip
    inward = {each.server for each in servers.first if all(map(_is_loopback, each.host_addresses))} - told
    if inward:
        address = servers.first[min(inward)].host_addresses[0]
        return Check(
            "names", "fail",
            f"the name of {servers.names(inward)} resolves to {address} there, which no other server reaches: name the "
            f"network card in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or mend /etc/hosts.",
        )  # fmt: skip
    if told:
        cards = " and ".join(sorted({each.interface for each in servers.first if each.interface}))
        return Check("names", "ok", f"the network card to use is named: {cards}.")
    return Check("names", "ok", f"all {servers.count} names resolve to addresses of a network.")


def check_connections(servers: Servers, refused: Sequence[tuple[int, int, str]]) -> Check:
    """Servers must reach ports of each other that are not known beforehand; ``refused``: who, whom, why."""
    if not refused:
        said = "one server, none to reach." if servers.count == 1 else "servers reach ports of each other."
        return Check("connections", "ok", said)
    who, whom, why = refused[0]
    more = f" ({len(refused) - 1} more pairs)" if len(refused) > 1 else ""
    return Check(
        "connections", "fail",
        f"{servers.name(who)} cannot connect to {servers.name(whom)}{more}: {why}; open the firewall between servers "
        f"for all ports of the private network.",
    )  # fmt: skip


def check_clocks(servers: Servers, asked: dict[int, Asked]) -> Check:
    """``asked``: by server, what it learned of the first server's clock."""
    apart = {server: answer for server, answer in asked.items() if abs(answer.ahead_s) - answer.uncertain_s > _CLOCK_S}
    if apart:
        worst = max(apart, key=lambda server: abs(apart[server].ahead_s))
        ahead_s = apart[worst].ahead_s
        way = "behind" if ahead_s > 0 else "ahead of"
        others = f", and {len(apart) - 1} more are wrong" if len(apart) > 1 else ""
        return Check(
            "clocks", "warn",
            f"the clock of {servers.name(worst)} is {format_seconds(abs(ahead_s))} {way} that of {servers.name(0)}"
            f"{others}: lines of different servers will not line up; set the clocks (chrony).",
        )  # fmt: skip
    if not asked:
        return Check("clocks", "ok", "one server, one clock.")
    most_s = max(abs(answer.ahead_s) + answer.uncertain_s for answer in asked.values())
    return Check("clocks", "ok", f"within {format_seconds(most_s)} of each other.")


def check_folder(servers: Servers, wrong: dict[int, str], run: Run | None) -> list[Check]:
    """``wrong``: by server, what is wrong with the run's folder there, as the end of a sentence."""
    folder = servers.first[0].run_folder
    if wrong:
        server = min(wrong)
        where = f"{folder} on {servers.name(server)}" if servers.count > 1 else folder
        more = f" ({len(wrong) - 1} more servers)" if len(wrong) > 1 else ""
        shared = ", on a disk that all servers share" if servers.count > 1 else ""
        give = f"give a folder for the run with --run-dir{shared}"
        shown = Check("folder", "fail", f"{where} {wrong[server]}{more}; {give}.")
    elif servers.count == 1:
        shown = Check("folder", "ok", f"{folder} can be written, synced and renamed in.")
    else:
        shown = Check("folder", "ok", f"{folder} is one and the same on all {servers.count} servers.")
    return [shown, _room(servers, run)]


def _room(servers: Servers, run: Run | None) -> Check:
    free = min(each.free_bytes for each in servers.first)
    where = f"{format_bytes(free)} are free in {servers.first[0].run_folder}"
    if run is None:
        return Check("room", "ok", f"{where}; give a run file to compare that with its checkpoints.")
    size = state_bytes(run)
    kept = run.checkpoint.keep + 1  # the oldest goes once the newest is whole
    need = f"a checkpoint of this run takes about {format_bytes(size)}"
    if free < size:
        return Check("room", "fail", f"{where}, and {need}: make room, or give another --run-dir.")
    if free < kept * size:
        return Check("room", "warn", f"{where}, and {need}, of which {kept} are there at a time: make room.")
    return Check("room", "ok", f"{where}; {need}, of which {kept} are there at a time.")


def state_bytes(run: Run) -> int:
    """Return about how much a checkpoint of ``run`` takes: weights in fp32, with AdamW two moments of each."""
    return num_parameters(run.model) * (12 if run.optimizer.name == "adamw" else 4)


def check_limits(servers: Servers) -> Check:
    """Each rank keeps a connection to every other; network cards need memory that stays in place."""
    need = 64 + 4 * len(servers.facts)
    few = {each.server for each in servers.first if each.files < need}
    if few:
        files = min(each.files for each in servers.first)
        return Check(
            "limits", "fail",
            f"a process on {servers.names(few)} may open {files} files, and {len(servers.facts)} ranks need about "
            f"{need} connections each: raise `ulimit -n`.",
        )  # fmt: skip
    is_cuda = servers.facts[0].device_bytes is not None
    pinned = {each.server for each in servers.first if each.locked_bytes is not None}
    if is_cuda and servers.count > 1 and pinned:
        return Check(
            "limits", "warn",
            f"a process on {servers.names(pinned)} may lock only part of its memory, and InfiniBand needs more: set "
            f"`ulimit -l unlimited`.",
        )  # fmt: skip
    return Check("limits", "ok", f"a process may open {min(each.files for each in servers.first)} files.")


def check_shared_memory(servers: Servers) -> Check:
    """NCCL and the copies of state in memory use /dev/shm."""
    sizes = {each.server: each.shared_memory_bytes or 0 for each in servers.first}
    small = {server for server, size in sizes.items() if size < _SHARED_MEMORY_BYTES}
    if small:
        least = format_bytes(min(sizes.values()))
        return Check(
            "memory", "warn",
            f"/dev/shm has {least} on {servers.names(small)}: give a container --shm-size=1g or more.",
        )  # fmt: skip
    return Check("memory", "ok", f"/dev/shm has {format_bytes(min(sizes.values()))}.")


def check_links(servers: Servers, speeds: Speeds, cluster: Cluster | None) -> list[Check]:
    """Compare rates with what the cluster file says, and where it says nothing, servers with each other."""
    checks = []
    if speeds.inside_bytes_per_s:
        rates = dict(enumerate(speeds.inside_bytes_per_s))
        said = cluster.inside_bytes_per_s if cluster is not None else None
        checks.append(_link("inside", servers, rates, said, "reduces among its ranks at"))
    if speeds.exchanges:
        best = best_rates(servers, speeds)
        said = cluster.across_bytes_per_s if cluster is not None else None
        checks.append(_link("across", servers, best, said, "sends to others, or gets from them, at most"))
        latencies = [each.latency_s for each in speeds.exchanges]
        checks.append(
            Check("latency", "ok", f"{format_seconds(median(latencies))} from server to server, at most "
                  f"{format_seconds(max(latencies))}.")
        )  # fmt: skip
    if speeds.all_bytes_per_s is not None:
        checks.append(_all_reduce(servers, speeds, cluster))
    return checks


def _all_reduce(servers: Servers, speeds: Speeds, cluster: Cluster | None) -> Check:
    """All ranks at once: what switches between servers let through, which pairs of servers do not show."""
    assert speeds.all_bytes_per_s is not None
    sentence = f"of all {_counted(len(servers.facts), 'rank')} at {_rate(speeds.all_bytes_per_s)}"
    rate, said = speeds.across_bytes_per_s, cluster.across_bytes_per_s if cluster is not None else None
    if rate is None:
        return Check("all-reduce", "ok", f"{sentence}.")
    sentence += f"; between all servers at once {_rate(rate)} of each"
    if said is None:
        return Check("all-reduce", "ok", f"{sentence}.")
    # A slow link has its own sentence, and holds up all: what is missing beyond that is lost between the servers.
    slowest = min(best_rates(servers, speeds).values())
    if rate < _SLOW * min(said, slowest):
        return Check(
            "all-reduce", "warn",
            f"{sentence}, where pairs of servers reach {_rate(slowest)} and the cluster file says {_rate(said)}: look "
            f"at the switches between them (`oversubscription` in the cluster file tells the planner).",
        )  # fmt: skip
    return Check("all-reduce", "ok", f"{sentence}; the cluster file says {_rate(said)}.")


def best_rates(servers: Servers, speeds: Speeds) -> dict[int, float]:
    """Return for each server the best rate of its exchanges: a slow one is slow with all its partners, and a good one
    fast with one of them."""
    return {
        server: max(each.bytes_per_s for each in speeds.exchanges if server in each.servers)
        for server in range(servers.count)
    }


def _link(name: str, servers: Servers, rates: dict[int, float], said: float | None, doing: str) -> Check:
    expected = said if said is not None else median(rates.values())
    source = "the cluster file says" if said is not None else "the median server reaches"
    slow = {server: rate for server, rate in rates.items() if rate < _SLOW * expected}
    if slow:
        worst = min(slow, key=lambda server: slow[server])
        rest = set(slow) - {worst}
        more = f"; also slow: {servers.names(rest)}" if rest else ""
        return Check(
            name, "warn",
            f"{servers.name(worst)} {doing} {_rate(slow[worst])}, and {source} {_rate(expected)}{more}.",
        )  # fmt: skip
    slowest = min(rates.values())
    beside = f"; the cluster file says {_rate(said)}" if said is not None else ""
    return Check(name, "ok", f"every server {doing} {_rate(slowest)} or more{beside}.")


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"


def _card(device: str, num_bytes: int | None) -> str:
    return "the CPU" if num_bytes is None else f"{device}, {format_bytes(num_bytes)}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
