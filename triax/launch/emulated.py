"""How can one Linux machine be several servers, with links that are slow and that are cut?

Each server is a network namespace with one card, ``eth0``, on a switch that lives in a namespace of its own, so the
network of the machine itself is untouched, and has a ``/dev/shm`` of its own, which goes with it. Cores and disks are
shared: what is real is the network, its speed and its faults. The kernel's token buckets shape the links. Latency is
the machine's own, some 20 us.

Made with ``ip`` and ``tc`` of iproute2, by root.
"""

import json
import os
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from triax.errors import BadInput, TriaxError
from triax.launch.namespaces import (
    CannotEmulate,
    add,
    bucket,
    check_machine,
    claim,
    command_inside,
    processes,
    remove,
    remove_leftovers,
    shape,
    tool,
    tool_at_disks,
    unshape,
)

MOST_SERVERS: Final = 250
"""The last byte of an address tells them apart."""

LEAST_BYTES_PER_S: Final = 1000
"""Slower than this a single packet takes seconds, and the kernel's buckets hold none."""

_CARD: Final = "eth0"
_SWITCH: Final = "switch"
_NOWHERE: Final = "02:00:00:00:00:00"
"""The switch's own address: it takes frames to there, and nobody is at home."""
_CARRIER_S: Final = 10.0
_UNSHAPED_BYTES_PER_S: Final = 10**11


@dataclass(frozen=True, slots=True)
class EmulatedServer:
    """Where one server is found."""

    index: int
    name: str
    address: str
    """IPv4, the same on every emulated cluster."""
    namespace: str
    """The name ``ip netns exec`` takes."""

    @property
    def port(self) -> str:
        """The switch's end of the server's cable."""
        return f"port{self.index}"

    @property
    def hardware_address(self) -> str:
        """Fixed, so that who comes back is found at once."""
        return f"02:00:00:00:01:{self.index + 1:02x}"


@dataclass(frozen=True, slots=True)
class Crossed:
    """What went over one server's cable since it was plugged in, in bytes with all headers."""

    sent_bytes: int
    received_bytes: int


class EmulatedCluster:
    """Servers on one switch, from :func:`emulated_cluster`; a server is named by its number, from 0."""

    def __init__(self, prefix: str, num_servers: int, link_bytes_per_s: float | None) -> None:
        self._switch = f"{prefix}-{_SWITCH}"
        self.servers = tuple(
            EmulatedServer(index, f"server{index}", f"10.77.0.{index + 1}", f"{prefix}-{index}")
            for index in range(num_servers)
        )
        self._link_bytes_per_s: dict[int, float | None] = dict.fromkeys(range(num_servers), link_bytes_per_s)
        self._between_bytes_per_s: dict[tuple[int, int], float] = {}
        self._lost: set[int] = set()
        self._unplugged: set[int] = set()
        self._started: list[tuple[int, subprocess.Popen[bytes]]] = []

    def run(
        self,
        server: int,
        command: Sequence[str | os.PathLike[str]],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        output: IO[bytes] | int | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Start ``command`` on a server, as the leader of a process group of its own, and return it at once.

        ``environment`` is added to this process's own and to what tells gloo and NCCL which card to use. ``output``
        takes both streams. Nothing started here outlives the cluster.
        """
        self._must_be_there(server)
        process = subprocess.Popen(
            command_inside(self.servers[server].namespace, command),
            env=os.environ | {"GLOO_SOCKET_IFNAME": _CARD, "NCCL_SOCKET_IFNAME": _CARD} | dict(environment or {}),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
        )
        self._started.append((server, process))
        return process

    def processes(self, server: int) -> list[int]:
        """Return the ids of all that runs on a server, also of what its processes have started."""
        return [] if server in self._lost else processes(self.servers[server].namespace)

    def shape(self, server: int, bytes_per_s: float | None) -> None:
        """Limit a server's link to this rate, each way; None: as fast as the machine copies. A running transfer goes
        on at the new rate."""
        _check_rate(bytes_per_s)
        self._link_bytes_per_s[server] = bytes_per_s
        self._apply_rates(server)

    def shape_between(self, first: int, second: int, bytes_per_s: float | None) -> None:
        """Limit what two servers send each other, each way, below what their links carry; None: no longer."""
        _check_rate(bytes_per_s)
        for pair in ((first, second), (second, first)):
            self._between_bytes_per_s.pop(pair, None)
            if bytes_per_s is not None:
                self._between_bytes_per_s[pair] = bytes_per_s
            self._apply_rates(pair[0])

    def unplug(self, server: int) -> None:
        """Pull a server's cable: its card loses the carrier. What is sent is lost without a word."""
        self._must_be_there(server)
        _ip("-n", self._switch, "link", "set", self.servers[server].port, "down")
        self._unplugged.add(server)

    def partition(self, *parts: Collection[int]) -> None:
        """Let servers reach only those of their own part; servers in no part named are one more. Cards keep their
        carrier, so nobody is told. Replaces an earlier partition."""
        named = [server for part in parts for server in part]
        if len(set(named)) != len(named) or not set(named) <= set(range(len(self.servers))):
            raise BadInput(f"the parts {parts} of a partition must be of different servers below {len(self.servers)}.")
        for part, members in enumerate([set(range(len(self.servers))) - set(named), *parts]):
            if part > 0 and not _exists(self._switch, f"part{part}"):
                self._add_bridge(part)
            for server in sorted(set(members) - self._lost):
                _ip("-n", self._switch, "link", "set", self.servers[server].port, "master", f"part{part}")

    def cut_between(self, first: int, second: int) -> None:
        """Lose what two servers send each other, without a word; others still reach both."""
        for server, other in ((first, second), (second, first)):
            self._must_be_there(server)
            there = self.servers[other].address
            _ip(
                "-n", self.servers[server].namespace, "neigh", "replace", there,
                "lladdr", _NOWHERE, "dev", _CARD, "nud", "permanent",
            )  # fmt: skip

    def heal(self) -> None:
        """Undo every cut: all servers that are there reach each other again, at the rates they are shaped to."""
        self.partition()
        for server in self.servers:
            if server.index not in self._lost:
                _ip("-n", server.namespace, "neigh", "flush", "dev", _CARD, "nud", "permanent")
        plugged_in = [self.servers[index] for index in sorted(self._unplugged)]
        for server in plugged_in:
            _ip("-n", self._switch, "link", "set", server.port, "up")
        for server in plugged_in:
            self._await_carrier(server)
        self._unplugged.clear()

    def lose_disk(self, server: int, folder: Path) -> None:
        """Take a folder from all that runs on a server now, as when a network disk is lost: it is empty there, and
        takes nothing. Files that are open stay so, and whose working folder is below it still sees it from there."""
        self._must_be_there(server)
        mount = ("mount", "-t", "tmpfs", "-o", "ro", "lost", str(folder))
        tool_at_disks(self.servers[server].namespace, *mount)

    def bring_disk_back(self, server: int, folder: Path) -> None:
        """Give back what ``lose_disk`` has taken, to the same processes."""
        self._must_be_there(server)
        tool_at_disks(self.servers[server].namespace, "umount", "--lazy", str(folder))

    def lose(self, server: int) -> None:
        """Cut a server's power: its link, its processes and its memory are gone at once, and nobody is told goodbye."""
        self._must_be_there(server)
        # First the link: a dying process closes its connections, and peers must not hear that.
        _ip("-n", self._switch, "link", "delete", self.servers[server].port)
        self._lost.add(server)
        self._unplugged.discard(server)
        self._end({server})

    def bring_back(self, server: int) -> None:
        """Give a lost server its power back: on the switch with all others, at its old address, running nothing."""
        if server not in self._lost:
            raise BadInput(f"{self.servers[server].name} was not lost, so it cannot come back.")
        self._add_server(self.servers[server])
        self._lost.discard(server)
        self._apply_rates(server)

    def crossed(self, server: int) -> Crossed:
        """Return what went over a server's cable since it was plugged in; what stays inside a server does not count."""
        self._must_be_there(server)
        said = _ip("-n", self._switch, "-j", "-s", "link", "show", self.servers[server].port)
        counters = json.loads(said)[0]["stats64"]
        return Crossed(sent_bytes=counters["rx"]["bytes"], received_bytes=counters["tx"]["bytes"])

    def set_up(self) -> None:
        """Make the switch's insides and the servers; the namespace of the switch is there."""
        _ip("-n", self._switch, "link", "set", "lo", "up")
        self._add_bridge(0)
        for server in self.servers:
            self._add_server(server)
            self._apply_rates(server.index)

    def take_down(self) -> None:
        """Kill what runs on the servers and remove them."""
        self._end(set(range(len(self.servers))))
        remove(self._switch)

    def _add_bridge(self, part: int) -> None:
        # mcast_snooping off: a bridge that learns who listens delays the first packets.
        _ip(
            "-n", self._switch, "link", "add", f"part{part}", "address", _NOWHERE, "up",
            "type", "bridge", "mcast_snooping", "0",
        )  # fmt: skip

    def _add_server(self, server: EmulatedServer) -> None:
        add(server.namespace)
        _ip(
            "-n", self._switch, "link", "add", server.port, "type", "veth",
            "peer", "name", _CARD, "address", server.hardware_address, "netns", server.namespace,
        )  # fmt: skip
        _ip("-n", self._switch, "link", "set", server.port, "master", "part0", "up")
        _ip("-n", server.namespace, "address", "add", f"{server.address}/24", "dev", _CARD)
        _ip("-n", server.namespace, "link", "set", "lo", "up")
        _ip("-n", server.namespace, "link", "set", _CARD, "up")

    def _await_carrier(self, server: EmulatedServer) -> None:
        # The kernel looks at carriers that have come back once a second.
        deadline_s = time.monotonic() + _CARRIER_S
        while not (_is_up(server.namespace, _CARD) and _is_up(self._switch, server.port)):
            if time.monotonic() > deadline_s:
                raise TriaxError(f"the card of {server.name} has no carrier {_CARRIER_S:g} s after it was plugged in.")
            time.sleep(0.02)

    def _apply_rates(self, server: int) -> None:
        if server in self._lost:
            return
        place, rate = self.servers[server], self._link_bytes_per_s[server]
        between = {to: slow for (of, to), slow in self._between_bytes_per_s.items() if of == server}
        unshape(self._switch, place.port)
        unshape(place.namespace, _CARD)
        if rate is not None:
            shape(self._switch, place.port, rate)
        if between:
            self._shape_by_destination(place, rate or _UNSHAPED_BYTES_PER_S, between)
        elif rate is not None:
            shape(place.namespace, _CARD, rate)

    def _shape_by_destination(self, server: EmulatedServer, rate: float, between: Mapping[int, float]) -> None:
        """A tree of buckets on the server's card: the link at the root, below it each slow destination and the rest."""

        def limit(kind: str, *words: str) -> None:
            tool("tc", "-n", server.namespace, kind, "add", "dev", _CARD, *words)

        rest = len(self.servers) + 2
        limit("qdisc", "root", "handle", "1:", "htb", "default", f"{rest:x}")
        limit("class", "parent", "1:", "classid", "1:1", "htb", *bucket(rate))
        limit("class", "parent", "1:1", "classid", f"1:{rest:x}", "htb", *bucket(rate))
        for other, slow in between.items():
            flow, to = f"1:{other + 2:x}", f"{self.servers[other].address}/32"
            limit("class", "parent", "1:1", "classid", flow, "htb", *bucket(min(slow, rate)))
            limit("filter", "parent", "1:", "protocol", "ip", "u32", "match", "ip", "dst", to, "flowid", flow)

    def _must_be_there(self, server: int) -> None:
        if server in self._lost:
            raise BadInput(f"{self.servers[server].name} is lost: bring it back first.")

    def _end(self, servers: set[int]) -> None:
        ending = [process for server, process in self._started if server in servers]
        self._started = [(server, process) for server, process in self._started if server not in servers]
        for process in ending:
            process.kill()  # also one that has not entered its namespace yet
        for server in sorted(servers):
            remove(self.servers[server].namespace)
        for process in ending:
            process.wait()


@contextmanager
def emulated_cluster(num_servers: int, link_bytes_per_s: float | None = None) -> Iterator[EmulatedCluster]:
    """Make ``num_servers`` servers, each with a link of ``link_bytes_per_s`` each way (None: not shaped), and remove
    them and all that runs on them at the end of the ``with``.

    Many may be there at once, of one process or of several, and none meets another. What a killed process has left is
    removed by the next one. Raises CannotEmulate where this machine cannot do that, BadInput where nothing could.
    """
    if not 1 <= num_servers <= MOST_SERVERS:
        raise BadInput(f"{num_servers} servers cannot be emulated: use 1 to {MOST_SERVERS}.")
    _check_rate(link_bytes_per_s)
    check_machine()
    remove_leftovers()
    prefix = claim(_SWITCH)
    cluster = EmulatedCluster(prefix, num_servers, link_bytes_per_s)
    try:
        try:
            cluster.set_up()
        except TriaxError as error:
            raise CannotEmulate(f"servers cannot be emulated: this machine refuses a part of it: {error}") from None
        yield cluster
    finally:
        cluster.take_down()


def _check_rate(bytes_per_s: float | None) -> None:
    if bytes_per_s is not None and not LEAST_BYTES_PER_S <= bytes_per_s <= _UNSHAPED_BYTES_PER_S:
        raise BadInput(
            f"a link of {bytes_per_s:g} bytes/s cannot be emulated: use {LEAST_BYTES_PER_S} to "
            f"{_UNSHAPED_BYTES_PER_S:g}, or none for what the machine gives."
        )


def _exists(namespace: str, link: str) -> bool:
    return any(each["ifname"] == link for each in json.loads(_ip("-n", namespace, "-j", "link", "show")))


def _is_up(namespace: str, link: str) -> bool:
    return bool(json.loads(_ip("-n", namespace, "-j", "link", "show", link))[0]["operstate"] == "UP")


def _ip(*words: str) -> str:
    return tool("ip", *words)
