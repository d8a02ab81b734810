"""Are emulated servers apart from each other, as fast as they are said to be, and gone when they should be?"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.servers import ROOT, connections, measured_bytes_per_s, servers, wait_for
from triax.errors import BadInput, TriaxError
from triax.launch import emulated
from triax.launch.emulated import EmulatedCluster, emulated_cluster
from triax.launch.namespaces import CannotEmulate, remove_leftovers

SLEEP = ("sleep", "600")
TALK = """
import socket, sys
at = (sys.argv[1], 4000)
peer = socket.create_connection(at) if len(sys.argv) == 3 else socket.create_server(at).accept()[0]
peer.settimeout(0.2)
while True:
    try:
        peer.sendall(b"x" * 100)
        said = len(peer.recv(1000))
    except TimeoutError:
        said = -1
    print(said, flush=True)
    if said == 0:
        break
"""


def namespaces() -> set[str]:
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in said.splitlines() if line}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def sees(cluster: EmulatedCluster) -> set[str]:
    """Who reaches whom, such as {"01", "10"}."""
    return {f"{who}{whom}" for who, whom in connections(cluster)}


def fastest(cluster: EmulatedCluster, sender: int, receiver: int, num_bytes: int, at_least: float) -> float:
    """Send until it was as fast as ``at_least``, four times at most: other work on the machine may slow one down,
    and nothing speeds one up."""
    rates: list[float] = []
    while len(rates) < 4 and max(rates, default=0.0) < at_least:
        rates.append(measured_bytes_per_s(cluster, sender, receiver, num_bytes))
    return max(rates)


@pytest.mark.parametrize("megabits", [50, 400])
def test_a_link_carries_what_it_is_shaped_to(megabits: int) -> None:
    rate = megabits * 1e6 / 8
    with servers(2, rate) as cluster:
        assert fastest(cluster, 0, 1, int(rate * 0.8), 0.85 * rate) == pytest.approx(rate, rel=0.15)
        before = cluster.crossed(0)
        measured_bytes_per_s(cluster, 0, 1, int(rate * 0.8))
        after = cluster.crossed(0)
    assert after.sent_bytes - before.sent_bytes == pytest.approx(rate * 0.8, rel=0.15)
    assert after.received_bytes - before.received_bytes < rate * 0.05


def test_rates_are_changed_of_one_link_and_between_two() -> None:
    fast, slow = 25e6, 5e6
    with servers(3) as cluster:
        assert fastest(cluster, 0, 1, 20_000_000, 2 * fast) > 2 * fast
        cluster.shape(0, fast)
        cluster.shape_between(0, 2, slow)
        assert fastest(cluster, 0, 1, 15_000_000, 0.85 * fast) == pytest.approx(fast, rel=0.15)
        assert fastest(cluster, 0, 2, 3_000_000, 0.85 * slow) == pytest.approx(slow, rel=0.15)
        assert fastest(cluster, 2, 0, 3_000_000, 0.85 * slow) == pytest.approx(slow, rel=0.15)
        cluster.shape(0, None)
        cluster.shape_between(0, 2, None)
        assert fastest(cluster, 0, 2, 20_000_000, 2 * fast) > 2 * fast


def test_parts_reach_only_themselves_until_healed() -> None:
    with servers(3) as cluster:
        assert sees(cluster) == {"01", "02", "10", "12", "20", "21"}
        cluster.partition({1})
        assert sees(cluster) == {"02", "20"}
        cluster.partition({0, 1})
        assert sees(cluster) == {"01", "10"}
        cluster.heal()
        cluster.cut_between(0, 2)
        assert sees(cluster) == {"01", "10", "12", "21"}
        cluster.heal()
        cluster.unplug(2)
        assert sees(cluster) == {"01", "10"}
        cluster.heal()
        assert sees(cluster) == {"01", "02", "10", "12", "20", "21"}


def talkers(cluster: EmulatedCluster, folder: Path) -> "tuple[list[subprocess.Popen[bytes]], list[Path]]":
    """Start two servers that talk to each other without end over one connection, and write down what they hear."""
    logs = [folder / "0", folder / "1"]
    address = cluster.servers[0].address
    processes = []
    for server, words in ((0, [address]), (1, [address, "connect"])):
        with logs[server].open("wb") as output:
            command = [sys.executable, "-I", "-S", "-c", TALK, *words]
            processes.append(cluster.run(server, command, output=output))
        wait_for(lambda: ":0FA0 " in connections_of_0(cluster), "the listener")  # 4000 in hexadecimal
    wait_for(lambda: "100" in logs[0].read_text() and "100" in logs[1].read_text(), "both to hear each other")
    return processes, logs


def connections_of_0(cluster: EmulatedCluster) -> str:
    said, _ = cluster.run(0, ["cat", "/proc/net/tcp"], output=subprocess.PIPE).communicate()
    return said.decode()


def test_a_connection_outlives_a_short_cut(tmp_path: Path) -> None:
    with servers(2) as cluster:
        processes, logs = talkers(cluster, tmp_path)
        cluster.partition({1})
        wait_for(lambda: all(log.read_text().endswith("-1\n-1\n") for log in logs), "silence on both sides")
        cluster.heal()
        wait_for(lambda: all(not log.read_text().endswith("-1\n") for log in logs), "both to hear each other again")
        assert [process.poll() for process in processes] == [None, None]


def test_a_lost_server_says_no_goodbye_and_comes_back_empty(tmp_path: Path) -> None:
    with servers(2, 12.5e6) as cluster:
        processes, logs = talkers(cluster, tmp_path)
        child = cluster.run(1, ["sh", "-c", "setsid sleep 600 & wait"])
        wait_for(lambda: len(cluster.processes(1)) == 3, "the child of a child")
        everyone = cluster.processes(1)
        cluster.lose(1)
        assert [is_alive(pid) for pid in everyone] == [False] * 3
        assert child.returncode == -signal.SIGKILL
        assert cluster.processes(1) == []
        wait_for(lambda: logs[0].read_text().endswith("-1\n" * 5), "silence")
        assert processes[0].poll() is None  # a closed connection would have ended it
        for forbidden in (lambda: cluster.run(1, SLEEP), lambda: cluster.lose(1), lambda: cluster.crossed(1)):
            with pytest.raises(BadInput, match="server1 is lost: bring it back first"):
                forbidden()
        cluster.bring_back(1)
        assert cluster.processes(1) == []
        assert fastest(cluster, 1, 0, 8_000_000, 0.85 * 12.5e6) == pytest.approx(12.5e6, rel=0.15)
        with pytest.raises(BadInput, match="was not lost"):
            cluster.bring_back(1)


def said_by(cluster: EmulatedCluster, server: int, line: str) -> str:
    said, _ = cluster.run(server, ["sh", "-c", line], output=subprocess.PIPE).communicate(timeout=30)
    return said.decode().strip()


def test_a_server_has_a_memory_of_its_own_that_goes_with_its_power() -> None:
    mine = Path("/dev/shm") / f"triax-test-{os.getpid()}"
    with servers(2) as cluster:
        said_by(cluster, 0, f"echo state > {mine}")
        assert not mine.exists()
        assert [said_by(cluster, server, f"cat {mine} 2>&1 || true") for server in (0, 1)] == [
            "state",
            f"cat: {mine}: No such file or directory",
        ]
        cluster.lose(0)
        cluster.bring_back(0)
        assert said_by(cluster, 0, "ls -A /dev/shm") == ""
        folders = [folder for folder in mine.parent.iterdir() if f"-{os.getpid()}-" in folder.name]
        assert len(folders) == 2
    assert [folder for folder in folders if folder.exists()] == []


def test_a_disk_is_lost_for_one_server_alone(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def beats(server: int) -> str:
        return (disk / str(server)).read_text()

    with servers(2) as cluster:
        for server in (0, 1):
            # A shell that starts another one for each line: who is there when the disk goes passes it on.
            with (tmp_path / f"{server}.log").open("wb") as log:
                loop = f"n=0; while sleep 0.02; do n=$((n+1)); (echo $n > {disk}/{server}) || true; done"
                cluster.run(server, ["sh", "-c", loop], output=log)
        wait_for(lambda: (disk / "0").exists() and (disk / "1").exists(), "both to write")
        cluster.lose_disk(0, disk)
        wait_for(lambda: "Read-only file system" in (tmp_path / "0.log").read_text(), "the first to fail")
        before = beats(0), beats(1)
        wait_for(lambda: beats(1) not in ("", before[1]), "the second to write on")
        assert beats(0) == before[0]
        cluster.bring_disk_back(0, disk)
        wait_for(lambda: beats(0) not in ("", before[0]), "the first to write again")
        assert (tmp_path / "1.log").read_text() == ""


def test_nothing_is_left_behind_when_the_body_fails() -> None:
    started = []

    def fail_with_servers() -> None:
        with servers(2) as cluster:
            started.append(cluster.run(0, SLEEP))
            wait_for(lambda: cluster.processes(0), "sleep")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_with_servers()
    assert started[0].returncode == -signal.SIGKILL
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name]


def test_what_a_killed_process_left_is_removed_by_the_next() -> None:
    code = """
import sys
from triax.launch.emulated import emulated_cluster
with emulated_cluster(2) as cluster:
    print(cluster.run(1, ["sleep", "600"]).pid, *(server.namespace for server in cluster.servers), flush=True)
    sys.stdin.read()
"""
    with servers(1):  # or skip
        pass
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid, *left = process.stdout.readline().split()
    remove_leftovers()
    assert set(left) <= namespaces()  # the process lives
    process.kill()
    process.wait()  # what it started still holds the pipe
    process.stdout.close()
    assert is_alive(int(pid))
    remove_leftovers()
    wait_for(lambda: not is_alive(int(pid)), "the end of what ran on the lost server", timeout_s=5)
    assert not set(left) & namespaces()


def test_two_clusters_do_not_meet() -> None:
    with servers(2) as first, servers(2) as second:
        assert first.servers[0].address == second.servers[0].address
        second.unplug(1)
        assert (sees(first), sees(second)) == ({"01", "10"}, set())
    began_s = time.monotonic()
    with servers(3):
        assert time.monotonic() - began_s < 3


@pytest.mark.parametrize(
    ("num_servers", "rate", "message"),
    [(0, None, "use 1 to 250"), (251, None, "use 1 to 250"), (2, 10.0, "use 1000 to"), (2, 1e12, "use 1000 to")],
)
def test_what_cannot_be_is_refused(num_servers: int, rate: float | None, message: str) -> None:
    with pytest.raises(BadInput, match=message), emulated_cluster(num_servers, rate):
        pass


def test_parts_are_of_different_servers() -> None:
    with servers(2) as cluster:
        for parts in (({0}, {0}), ({2},)):
            with pytest.raises(BadInput, match="different servers below 2"):
                cluster.partition(*parts)


def test_who_cannot_have_servers_reads_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotEmulate, match=r"by user 1000, since only root .* use sudo"), emulated_cluster(2):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CannotEmulate, match="without ip, tc, mount, nsenter: install iproute2"), emulated_cluster(2):
        pass


def test_a_kernel_that_lacks_a_part_is_told_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_buckets(name: str, card: str, bytes_per_s: float) -> None:
        raise TriaxError(f"`tc -n {name}` failed: Specified qdisc kind is unknown.")

    with servers(1):  # or skip
        pass
    monkeypatch.setattr(emulated, "shape", without_buckets)
    with (
        pytest.raises(CannotEmulate, match=r"refuses a part of it: .* is unknown"),
        emulated_cluster(2, 1e6),
    ):
        pass
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name]
