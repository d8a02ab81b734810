"""How does a test get several servers on this machine, and what does it ask of them?

    with servers(2) as cluster:
        train = start_triax(cluster, 1, "train", "run.toml", log=tmp_path / "1.log")
        wait_for(lambda: "step 10" in (tmp_path / "1.log").read_text(), "step 10")
        cluster.lose(1)

What can be done to them is said in triax/launch/emulated.py.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from triax.launch.emulated import EmulatedCluster, emulated_cluster
from triax.launch.namespaces import CannotEmulate

ROOT: Final = Path(__file__).parents[2]

# Python that starts in 20 ms, since it reads no site-packages.
_PYTHON: Final = (sys.executable, "-I", "-S", "-c")

_RECEIVE: Final = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
peer, _ = listener.accept()
peer.sendall(b"!")
while peer.recv(1 << 20): pass
peer.sendall(b".")
"""
_SEND: Final = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
peer.recv(1)
peer.settimeout(100)
began_s = time.monotonic()
peer.sendall(bytes(int(sys.argv[3])))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(time.monotonic() - began_s)
"""
_LISTEN: Final = """
import socket, sys
listener = socket.create_server((sys.argv[1], 4001), backlog=1000)
print("listening", flush=True)
while True: listener.accept()
"""
_CONNECT: Final = """
import select, socket, sys, time
trying = {}
for address in sys.argv[1:]:
    peer = socket.socket()
    peer.setblocking(False)
    peer.connect_ex((address, 4001))
    trying[peer] = address
deadline_s = time.monotonic() + 0.5
while trying and (left_s := deadline_s - time.monotonic()) > 0:
    for peer in select.select([], list(trying), [], left_s)[1]:
        address = trying.pop(peer)
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0: print(address)
"""


@contextmanager
def servers(num_servers: int, link_bytes_per_s: float | None = None) -> Iterator[EmulatedCluster]:
    """Give emulated servers; the test is skipped, with the reason, where this machine or user cannot have them."""
    # Only the way in is asked: what a test does wrong with its servers fails it.
    context = emulated_cluster(num_servers, link_bytes_per_s)
    try:
        cluster = context.__enter__()
    except CannotEmulate as refusal:
        pytest.skip(str(refusal))
    try:
        yield cluster
    finally:
        context.__exit__(None, None, None)


def start_triax(
    cluster: EmulatedCluster, server: int, *words: str, log: Path, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start ``triax WORDS`` of this checkout on a server; it writes all it says into ``log``, after what is there."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("ab") as output:
        return cluster.run(
            server,
            [sys.executable, "-m", "triax", *words],
            environment={"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})},
            folder=log.parent,
            output=output,
        )


def wait_for(is_so: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Return once ``is_so()`` is; fail the test, naming what was waited for, when it is not within the time."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            pytest.fail(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.02)


def connections(cluster: EmulatedCluster, present: Collection[int] | None = None) -> set[tuple[int, int]]:
    """Return all pairs (who, whom) of different servers where who can connect to whom within half a second."""
    there = [server for server in cluster.servers if present is None or server.index in present]
    listeners = [
        cluster.run(server.index, [*_PYTHON, _LISTEN, server.address], output=subprocess.PIPE) for server in there
    ]
    try:
        for listener in listeners:
            assert listener.stdout is not None
            assert listener.stdout.readline() == b"listening\n"
        by_address = {server.address: server.index for server in there}
        asking = {
            index: cluster.run(index, [*_PYTHON, _CONNECT, *(by_address.keys() - {address})], output=subprocess.PIPE)
            for address, index in by_address.items()
        }
        said = {index: process.communicate(timeout=30)[0].decode().split() for index, process in asking.items()}
    finally:
        for listener in listeners:
            _end(listener)
    return {(index, by_address[address]) for index, addresses in said.items() for address in addresses}


def measured_bytes_per_s(cluster: EmulatedCluster, sender: int, receiver: int, num_bytes: int) -> float:
    """Send ``num_bytes`` over one connection and return how fast they came through."""
    address = cluster.servers[receiver].address
    listener = cluster.run(receiver, [*_PYTHON, _RECEIVE, address], output=subprocess.PIPE)
    try:
        assert listener.stdout is not None
        port = listener.stdout.readline().decode().strip()
        words = (address, port, str(num_bytes))
        said, _ = cluster.run(sender, [*_PYTHON, _SEND, *words], output=subprocess.PIPE).communicate(timeout=120)
    finally:
        _end(listener)
    return num_bytes / float(said)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
