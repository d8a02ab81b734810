"""Is what is wrong with a cluster said in one sentence that names the server, and nothing said of one that is fit?"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.typed import make_run
from triax.spec.cluster import Cluster
from triax.spec.load import load_run
from triax.spec.run import Run
from triax.verify import preflight
from triax.verify.answerer import Asked
from triax.verify.link_speeds import Exchange, Speeds
from triax.verify.preflight import Check, Servers, state_bytes
from triax.verify.server_facts import Facts

GIB = 1 << 30
RANK = Facts(
    rank=0, server=0, name="node0", host="node0", address="10.0.0.1", host_addresses=("10.0.0.1",), interface=None,
    python="3.11.7", torch="2.13.0", triax="0.1.0", device="NVIDIA H100", device_bytes=80 * GIB, cores=96, files=65536,
    locked_bytes=None, shared_memory_bytes=64 * GIB, run_folder="/shared/runs", free_bytes=1000 * GIB,
)  # fmt: skip


def cluster_of(num_servers: int, inside: int = 2, **changed_on_1: object) -> Servers:
    """Servers that are fit, but for what is changed on server 1."""
    facts = []
    for rank in range(num_servers * inside):
        server = rank // inside
        address = f"10.0.0.{server + 1}"
        fit = replace(RANK, rank=rank, server=server, name=f"node{server}", address=address, host_addresses=(address,))
        facts.append(replace(fit, **changed_on_1) if server == 1 else fit)  # type: ignore[arg-type]
    return Servers(tuple(facts))


def said(check: Check, verdict: str, *fragments: str) -> None:
    assert check.verdict == verdict, check
    for fragment in fragments:
        assert fragment in check.sentence
    assert check.sentence.endswith(".")
    assert "\n" not in check.sentence


@pytest.mark.parametrize("num_servers", [1, 2, 7])
def test_a_fit_cluster_is_ok_in_everything(num_servers: int) -> None:
    servers = cluster_of(num_servers)
    cluster = Cluster(servers=num_servers, cards_per_server=2, inside_bytes_per_s=1e9, across_bytes_per_s=1e8)
    exchanges = tuple(Exchange((0, other), 0.9e8, 1e-5) for other in range(1, num_servers))
    speeds = Speeds((0.9e9,) * num_servers, exchanges, 1e8)
    checks = [
        preflight.check_versions(servers), preflight.check_ranks(servers, cluster), preflight.check_names(servers),
        preflight.check_connections(servers, []),
        preflight.check_clocks(servers, {server: Asked(0.01, 0.001) for server in range(1, num_servers)}),
        *preflight.check_folder(servers, {}, None), preflight.check_limits(servers),
        preflight.check_shared_memory(servers), *preflight.check_links(servers, speeds, cluster),
    ]  # fmt: skip
    assert {check.verdict for check in checks} == {"ok"}, checks


@pytest.mark.parametrize("what", ["triax", "torch", "python"])
def test_another_version_is_named_with_its_server(what: str) -> None:
    check = preflight.check_versions(cluster_of(3, **{what: "9.9"}))
    said(check, "fail", "server 1 (node1)", f"{what} 9.9", getattr(RANK, what))


def test_hosts_that_share_a_name_are_told_apart_by_address() -> None:
    check = preflight.check_versions(cluster_of(3, torch="2.0", name="node0"))
    said(check, "fail", "server 1 (10.0.0.2)")


def test_cards_and_ranks() -> None:
    other_card = cluster_of(3, device="NVIDIA A100")
    said(preflight.check_ranks(other_card, None), "fail", "server 1 (node1)", "NVIDIA A100, 80.00 GiB", "NVIDIA H100")
    planned = Cluster(servers=4, cards_per_server=8)
    said(preflight.check_ranks(cluster_of(2), planned), "warn", "2 servers of 2 ranks", "4 servers of 8 cards")
    crowded = Servers((replace(RANK, device="cpu", device_bytes=None, cores=1),) * 2)
    said(preflight.check_ranks(crowded, None), "warn", "2 ranks share 1 core on server 0")


@pytest.mark.parametrize(
    ("changed", "fragments"),
    [
        ({"host_addresses": ("127.0.1.1",)}, ["resolves to 127.0.1.1 there", "GLOO_SOCKET_IFNAME"]),
        ({"host_addresses": ("::1",)}, ["resolves to ::1"]),
        ({"host_addresses": ()}, ["resolves to nothing"]),
        ({"address": "127.0.0.1"}, ["MASTER_ADDR leads to 127.0.0.1"]),
    ],
)
def test_names_that_lead_nowhere(changed: dict[str, object], fragments: list[str]) -> None:
    said(preflight.check_names(cluster_of(3, **changed)), "fail", "server 1 (node1)", *fragments)


def test_a_named_network_card_makes_the_name_not_matter() -> None:
    check = preflight.check_names(cluster_of(2, host_addresses=("127.0.1.1",), interface="ib0"))
    said(check, "ok", "ib0")
    alone = Servers((replace(RANK, host_addresses=("127.0.1.1",), address="127.0.0.1"),))
    said(preflight.check_names(alone), "ok", "one server")


def test_who_cannot_connect_to_whom() -> None:
    check = preflight.check_connections(cluster_of(3), [(2, 1, "timed out"), (0, 1, "timed out")])
    said(check, "fail", "server 2 (node2) cannot connect to server 1 (node1) (1 more pairs): timed out", "firewall")


@pytest.mark.parametrize(("ahead_s", "words"), [(5.0, "5.0 s behind"), (-120.0, "2 min 00 s ahead")])
def test_a_wrong_clock_is_named(ahead_s: float, words: str) -> None:
    """``ahead_s``: what server 1 learned of the first server's clock."""
    check = preflight.check_clocks(cluster_of(3), {1: Asked(ahead_s, 0.01), 2: Asked(0.1, 0.01)})
    said(check, "warn", "the clock of server 1 (node1) is", words, "that of server 0 (node0)")


def test_what_may_be_the_network_is_no_wrong_clock() -> None:
    said(preflight.check_clocks(cluster_of(2), {1: Asked(1.5, 0.8)}), "ok", "within 2.3 s")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return load_run(make_run(tmp_path))


def test_room_is_compared_with_the_checkpoints_of_the_run(run: Run) -> None:
    size = state_bytes(run)
    for free, verdict, fragment in (
        (size - 1, "fail", "make room"),
        (2 * size, "warn", "4 are there"),
        (9 * size, "ok", ""),
    ):
        shown, room = preflight.check_folder(cluster_of(2, free_bytes=free), {}, run)
        said(shown, "ok", "/shared/runs is one and the same on all 2 servers")
        said(room, verdict, "/shared/runs", fragment)


def test_the_size_of_a_checkpoint_is_that_of_one(run: Run, tmp_path: Path) -> None:
    from triax.cli import run as triax

    assert (
        triax(["train", str(tmp_path / "run.toml"), "--run-dir", str(tmp_path / "folder"), "--ranks", "1", "-q"]) == 0
    )
    (newest,) = (tmp_path / "folder/checkpoints").glob("step-00000004")
    stored = sum(file.stat().st_size for file in newest.rglob("*.safetensors"))
    assert state_bytes(run) == pytest.approx(stored, rel=0.2)  # of a tiny network names and shapes are a part


def test_a_folder_that_is_not_shared() -> None:
    check, _ = preflight.check_folder(cluster_of(3), {1: "does not show within 10 s what the first server wrote"}, None)
    said(check, "fail", "/shared/runs on server 1 (node1) does not show", "--run-dir, on a disk that all servers share")


def test_limits() -> None:
    said(preflight.check_limits(cluster_of(100, files=256)), "fail", "server 1 (node1)", "256 files", "ulimit -n")
    said(preflight.check_limits(cluster_of(2, locked_bytes=65536)), "warn", "server 1 (node1)", "ulimit -l unlimited")
    small = preflight.check_shared_memory(cluster_of(2, shared_memory_bytes=64 << 20))
    said(small, "warn", "64.00 MiB on server 1 (node1)", "--shm-size")


def test_a_slow_link_is_named_also_where_no_file_says_what_to_expect() -> None:
    servers = cluster_of(3)
    exchanges = (Exchange((0, 1), 1e7, 1e-5), Exchange((0, 2), 1e8, 1e-5), Exchange((1, 2), 1e7, 1e-5))
    speeds = Speeds((1e9, 1e9, 4e8), exchanges, 1e7)
    for cluster in (None, Cluster(servers=3, cards_per_server=2, across_bytes_per_s=1.2e8, inside_bytes_per_s=1e9)):
        inside, across, *_ = preflight.check_links(servers, speeds, cluster)
        said(inside, "warn", "server 2 (node2) reduces among its ranks at 381.47 MiB/s")
        said(across, "warn", "server 1 (node1) sends to others, or gets from them, at most 9.54 MiB/s")
        assert "also slow" not in across.sentence
    everyone = Cluster(servers=3, cards_per_server=2, across_bytes_per_s=1e9)
    _, across, *_ = preflight.check_links(servers, speeds, everyone)
    said(across, "warn", "the cluster file says 953.67 MiB/s; also slow: server 0 (node0), server 2 (node2)")


def test_what_only_all_servers_together_show() -> None:
    """Pairs reach what is said, and all at once do not: a switch between them lets too little through."""
    servers, said = cluster_of(3), Cluster(servers=3, cards_per_server=2, across_bytes_per_s=1e8)
    exchanges = tuple(Exchange(pair, 0.9e8, 1e-5) for pair in ((0, 1), (0, 2), (1, 2)))
    for between, cluster, verdict in ((0.3e8, said, "warn"), (0.8e8, said, "ok"), (0.3e8, None, "ok")):
        checks = preflight.check_links(servers, Speeds((1e9,) * 3, exchanges, 1e7, between), cluster)
        (check,) = (check for check in checks if check.name == "all-reduce")
        said_of_it = ["look at the switches", "the cluster file says 95.37 MiB/s"] if verdict == "warn" else []
        assert f"of all 6 ranks at 9.54 MiB/s; between all servers at once {between / (1 << 20):.2f}" in check.sentence
        assert check.verdict == verdict
        assert all(fragment in check.sentence for fragment in said_of_it)


def test_a_slow_link_is_named_once() -> None:
    """It holds up the all-reduce too, which is no news."""
    exchanges = (Exchange((0, 1), 1e7, 1e-5), Exchange((0, 2), 1e8, 1e-5), Exchange((1, 2), 1e7, 1e-5))
    cluster = Cluster(servers=3, cards_per_server=2, across_bytes_per_s=1e8)
    checks = preflight.check_links(cluster_of(3), Speeds((1e9,) * 3, exchanges, 1e7, 0.9e7), cluster)
    assert [check.name for check in checks if check.verdict == "warn"] == ["across"]
