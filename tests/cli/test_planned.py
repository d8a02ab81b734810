"""Is a run without a layout planned for the machine it finds, once, and alike on all ranks and at every start?"""

import multiprocessing
import tomllib
from pathlib import Path
from typing import Any

import pytest

import triax.cli.start
import triax.watch.processor
from tests.cli.typed import Typed, make_run, tiny
from tests.harness.commands import be_worker, free_port
from tests.spec.run_files import write
from triax.cli.planned import planned
from triax.spec.cluster import Cluster
from triax.spec.layout import Layout
from triax.spec.load import load_plan, load_run
from triax.spec.plan import make_plan
from triax.train.order import Order, work
from triax.train.run_folder import RunFolder
from triax.watch.processor import ProcessorShare


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of ranks of each measurement, which all find something else."""
    asked: list[int] = []

    def measure(num_ranks: int, *, is_double: bool = False) -> ProcessorShare:
        asked.append(num_ranks)
        return ProcessorShare(5e10 * len(asked), 1e10 * len(asked), 10**9 * len(asked))

    monkeypatch.setattr(triax.watch.processor, "measure_processor", measure)
    return asked


def test_a_processor_is_measured_once_and_the_same_layout_planned_again(
    tmp_path: Path, here: Typed, measured: list[int]
) -> None:
    run_file = make_run(tmp_path)
    write(tmp_path, {name: keys for name, keys in tiny().items() if name != "cluster"})
    assert load_run(run_file).cluster is None
    words = ("train", "run.toml", "--ranks", 1, "--run-dir", "run", "-q")
    assert here(*words).code == 0
    folder = RunFolder(tmp_path / "run")
    first = load_plan(folder.plan)
    assert (first.cluster.matmul_flops_per_s, first.cluster.memory_bytes) == (5e10, 10**9)
    assert first.predictions["step_s"].value > 0
    assert here(*words, "train.steps=5").code == 0
    again = load_plan(folder.plan)
    assert (again.cluster, again.layout, measured) == (first.cluster, first.layout, [1])
    # What is damaged is measured anew.
    folder.cluster.write_text("servers = [", encoding="utf-8")
    assert here(*words, "train.steps=6").code == 0
    assert (len(measured), load_plan(folder.plan).cluster.matmul_flops_per_s) == (2, 1e11)


def test_what_is_said_of_a_machine_wins_and_cards_are_not_measured(tmp_path: Path, measured: list[int]) -> None:
    run, folder = load_run(make_run(tmp_path)), RunFolder(tmp_path / "run")

    def cluster_of(said: Cluster, has_cards: bool = False) -> Cluster:
        return planned(run, said, folder, has_cards=has_cards).cluster

    whole = Cluster(matmul_flops_per_s=1e11, memory_bytes_per_s=1e9)
    assert cluster_of(whole) == whole
    assert cluster_of(Cluster(device="h100")) == Cluster(device="h100")
    assert cluster_of(Cluster(), has_cards=True) == Cluster()
    assert measured == []
    half = cluster_of(Cluster(cards_per_server=2, memory_bytes_per_s=7e9))
    assert (half.memory_bytes_per_s, half.matmul_flops_per_s, measured) == (7e9, 5e10, [2])


def test_files_of_the_folder_say_their_format(tmp_path: Path, here: Typed) -> None:
    make_run(tmp_path)
    assert here("train", "run.toml", "--ranks", 1, "--run-dir", "run", "-q").code == 0
    for name in ("cluster.toml", "resolved.toml"):
        assert tomllib.loads((tmp_path / "run" / name).read_text())["format_version"] == 1
    resolved = load_run(tmp_path / "run" / "resolved.toml")
    assert resolved.fingerprint == load_run(tmp_path / "run.toml").fingerprint


# Ranks that another launcher started


def start_ranks(orders: list[Order]) -> list[int | None]:
    """Run each order as a rank of its own, as under torchrun, and return their exit codes."""
    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = [
        context.Process(target=be_worker, args=(work, order, rank, len(orders), port))
        for rank, order in enumerate(orders)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    return [process.exitcode for process in ranks]


def order_of(run_file: Path, layout: Layout, *words: str) -> Order:
    plan = make_plan(load_run(run_file, words), Cluster(cards_per_server=2), layout)
    return Order(
        plan.model_dump_json(), "", str(run_file.parent / "run"), tokens=None, quiet=True, asks_rank_0=True
    )  # fmt: skip


def test_all_ranks_train_in_the_layout_of_rank_0(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    chosen = Layout(dp_replicate=2, zero=0, microbatches=2)
    other = Layout(dp_shard=2, zero=3, sequences_per_microbatch=2)
    assert start_ranks([order_of(run_file, chosen), order_of(run_file, other)]) == [0, 0]
    assert load_plan(tmp_path / "run" / "plan.json").layout == chosen


def test_a_rank_with_another_run_is_named_with_what_differs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_file = make_run(tmp_path)
    layout = Layout(dp_replicate=2, zero=0, microbatches=2)
    brief = "train.timeout_s=10"  # for which rank 0 waits; a launcher ends it sooner
    codes = start_ranks([order_of(run_file, layout, brief), order_of(run_file, layout, brief, "train.seed=4")])
    assert codes[1] == 2
    told = capfd.readouterr().err
    assert "rank 0 trains another run than this rank (seed was 0 and is now 4)" in told
    assert "Traceback" not in told


def test_only_rank_0_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    orders: list[Any] = []
    monkeypatch.setattr("triax.train.worker.train_as_rank", lambda order: orders.append(order) or 0)
    asked: list[Cluster] = []

    def plan(run: Any, cluster: Cluster, folder: RunFolder, *, has_cards: bool) -> Any:
        asked.append(cluster)
        return planned(run, cluster, folder, has_cards=has_cards)

    monkeypatch.setattr("triax.cli.planned.planned", plan)
    places = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for rank in range(2):
        for name, value in {**places, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
            monkeypatch.setenv(name, value)
        code = triax.cli.start.start_training(
            tmp_path / "run.toml", [], None, num_ranks=None, run_dir=tmp_path / "run", quiet=True
        )
        assert code == 0
    assert [order.asks_rank_0 for order in orders] == [True, True]
    assert [cluster.num_cards for cluster in asked] == [2]
    assert tiny()["cluster"]["matmul_flops_per_s"] == asked[0].matmul_flops_per_s
