"""Does ``triax doctor`` find what is wrong before a run does, on local ranks and on servers that are really apart?"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.typed import Typed, make_run, refuse
from tests.harness.commands import fork_workers, free_port, triax
from tests.harness.servers import servers, start_triax
from triax.launch.emulated import EmulatedCluster

LOOKED_AT = ["versions", "ranks", "names", "connections", "clocks", "folder", "room", "limits", "memory"]


def test_one_process_looks_at_its_server(here: Typed, tmp_path: Path) -> None:
    make_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    told = here("doctor", "run.toml", "--ranks", 1, "--json", "found.json")
    assert (told.code, told.err) == (0, "")
    assert told.out.splitlines()[-1].startswith("fit to train on")
    assert [line.split()[1] for line in told.out.splitlines()[:-1]] == LOOKED_AT
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["format_version"], found["fit"], len(found["ranks"])) == (1, True, 1)
    (room,) = (check for check in found["checks"] if check["name"] == "room")
    assert "a checkpoint of this run takes about" in room["sentence"]
    assert sorted({*before, tmp_path / "found.json"}) == sorted(tmp_path.rglob("*"))


def test_local_ranks_look_together(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    started = fork_workers(monkeypatch)
    said = triax(["doctor", "--ranks", "2", "--cluster", "1x4xcpu", "--json", "-"], capfd)
    assert (said.code, said.err, started) == (0, "", [2])
    found = json.loads(said.out)
    checks = {check["name"]: check for check in found["checks"]}
    assert list(checks) == [*LOOKED_AT, "inside", "all-reduce"]
    assert checks["ranks"]["verdict"] == "warn"
    assert (
        "1 server of 2 ranks were started, and the cluster is said to be 1 server of 4 cards"
        in (checks["ranks"]["sentence"])
    )
    assert found["links"]["inside_bytes_per_s"][0] > 1e6


def test_what_fails_sets_the_exit_code(here: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    from triax.verify import preflight

    monkeypatch.setattr(preflight, "check_limits", lambda servers: preflight.Check("limits", "fail", "too few."))
    told = here("doctor", "--ranks", 1)
    assert told.code == 1
    assert "fail  limits       too few." in told.out.splitlines()
    assert told.sentence == "1 of 9 checks failed: training here would fail, or be wrong."


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["absent.toml"], "absent.toml"),
        (["--cluster", "many"], "is no cluster"),
        (["--ranks", "0"], "0 ranks train nothing"),
        (["--cluster", "2x1xcpu"], "start this command on each with torchrun"),
        (["--json", "absent/found.json"], "cannot be written"),
        (["--run-dir", "/dev/null"], "/dev/null is no folder"),
        (["--nnodes", "none"], "--nnodes none is no number of servers"),
        (["--nnodes", "2", "--local-addr", "192.0.2.7"], "192.0.2.7 is no address of this server"),
        (["--nnodes", "2", "--server", "a/b"], "'a/b' is no name of a server"),
        (["--server", "a"], "give --nnodes with them"),
    ],
)
def test_bad_input_is_refused(here: Typed, words: list[str], fragment: str) -> None:
    refuse(here("doctor", *words), fragment)


def test_ranks_of_a_rank_are_refused(here: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    refuse(here("doctor", "--ranks", 2), "leave it out")
    refuse(here("doctor", "--nnodes", 2), "leave it out")


def test_a_server_that_never_comes_is_told(here: Typed, tmp_path: Path) -> None:
    words = ("--nnodes", 2, "--ranks", 1, "--server", "a", "--local-addr", "127.0.0.1", "--timeout-s", 1)
    told = here("doctor", *words, "--run-dir", "made/for/it")
    assert (told.code, told.out) == (1, "")
    assert told.sentence.startswith("1 of 2 servers came to made/for/it within 1.0 s: a (127.0.0.1); start the command")
    assert list(tmp_path.iterdir()) == []


def test_who_never_comes_is_waited_for_only_so_long(here: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    told = here("doctor", "--timeout-s", 1)
    assert told.code == 1
    assert f"rank 0 could not meet the other ranks at 127.0.0.1:{port}" in told.sentence


def looked_at(cluster: EmulatedCluster, folder: Path, *words: str) -> tuple[list[int], dict[str, Any], str]:
    """Run the doctor as a rank on every server; return exit codes, what the JSON says by check, and all words."""
    world = len(cluster.servers)
    meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": cluster.servers[0].address, "MASTER_PORT": "29500"}
    processes = [
        start_triax(
            cluster, rank, "doctor", *words, "--json", "found.json", log=folder / f"{rank}.log",
            environment={**meeting, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        )
        for rank in range(world)
    ]  # fmt: skip
    codes = [process.wait(timeout=120) for process in processes]
    found = json.loads((folder / "found.json").read_text())
    words_of_all = "".join((folder / f"{rank}.log").read_text() for rank in range(world))
    return codes, {check["name"]: check for check in found["checks"]}, words_of_all


@pytest.mark.slow
def test_a_server_with_a_slow_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("servers = 3\nacross_bytes_per_s = 12.5e6\n")
    with servers(3, 12.5e6) as cluster:
        cluster.shape(2, 1.25e6)
        codes, checks, words = looked_at(cluster, tmp_path, "--cluster", "cluster.toml")
    assert codes == [0, 0, 0], words
    assert {name for name, check in checks.items() if check["verdict"] != "ok"} == {"across"}, words
    sentence = checks["across"]["sentence"]
    assert sentence.startswith("server 2 (10.77.0.3) sends to others, or gets from them, at most 1.")
    assert "the cluster file says 11.92 MiB/s" in sentence
    assert "also slow" not in sentence


@pytest.mark.slow
def test_two_servers_that_cannot_reach_each_other_are_named(tmp_path: Path) -> None:
    with servers(3) as cluster:
        cluster.cut_between(1, 2)
        codes, checks, words = looked_at(cluster, tmp_path)
    assert codes == [1, 1, 1], words
    assert "server 1 (10.77.0.2) cannot connect to server 2 (10.77.0.3)" in checks["connections"]["sentence"]
    assert "across" not in checks
    assert "Traceback" not in words


def looked_at_by_hand(cluster: EmulatedCluster, folder: Path, *words: str) -> tuple[list[int], dict[str, Any], str]:
    """Type the doctor on every server, without a launcher; return what ``looked_at`` does."""
    processes = [
        start_triax(
            cluster, server.index, "doctor", *words, "--nnodes", str(len(cluster.servers)), "--ranks", "2",
            "--server", server.name, "--local-addr", server.address, "--run-dir", "run", "--json", "found.json",
            log=folder / f"{server.name}.log", environment={"CUDA_VISIBLE_DEVICES": ""},
        )
        for server in cluster.servers
    ]  # fmt: skip
    codes = [process.wait(timeout=180) for process in processes]
    said = [(folder / f"{server.name}.log").read_text() for server in cluster.servers]
    found = json.loads((folder / "found.json").read_text()) if (folder / "found.json").exists() else {"checks": []}
    return codes, {check["name"]: check for check in found["checks"]}, "".join(said)


@pytest.mark.slow
def test_servers_without_a_launcher_look_at_each_other(tmp_path: Path) -> None:
    """All that is looked at is fit, with both rates as the cluster file says, and nothing is left behind."""
    (tmp_path / "cluster.toml").write_text("servers = 2\ncards_per_server = 2\nacross_bytes_per_s = 12.5e6\n")
    with servers(2, 12.5e6) as cluster:
        codes, checks, words = looked_at_by_hand(cluster, tmp_path, "--cluster", "cluster.toml")
    assert codes == [0, 0], words
    assert list(checks) == [*LOOKED_AT, "inside", "across", "latency", "all-reduce"]
    assert {name for name, check in checks.items() if check["verdict"] != "ok"} <= {"memory", "ranks"}, words
    for name in ("across", "all-reduce"):
        assert "; the cluster file says 11.92 MiB/s." in checks[name]["sentence"], words
    links = json.loads((tmp_path / "found.json").read_text())["links"]
    assert 0.7 * 12.5e6 < links["across_bytes_per_s"] < 1.2 * 12.5e6  # of both ranks of a server together
    assert "what is found is shown on server server0\n" in words
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_cut_between_servers_without_a_launcher_is_told(tmp_path: Path) -> None:
    """They find each other on the disk, and learn that their networks do not."""
    with servers(2) as cluster:
        cluster.cut_between(0, 1)
        codes, _, words = looked_at_by_hand(cluster, tmp_path, "--timeout-s", "5")
    assert codes == [1, 1], words
    assert "could not meet the other ranks at 10.77.0.1:" in words
    assert "Traceback" not in words
