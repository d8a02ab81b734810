"""Does a run that lost all its processes, or a server, go on from memory with the bits that it would have had?"""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import RanksFailed, run_ranks
from tests.harness.runs import Told, saved_weights, series, start
from tests.harness.tolerances import assert_losses_equal
from tests.harness.toy import lay
from tests.train.test_resume import STEPS, assert_bits_equal, make_run
from triax.checkpoint import memory_folder
from triax.checkpoint.part import Part
from triax.errors import TriaxError
from triax.parallel.launch import Process
from triax.spec.cluster import Cluster
from triax.spec.layout import Layout
from triax.spec.plan import make_plan
from triax.spec.run import Run
from triax.train.corpus import prepare_tokens
from triax.train.guard import Guard, Judgement, StepReport
from triax.train.loop import train
from triax.train.run_folder import RunFolder
from triax.train.saver import Saver
from triax.train.step import Stepper


def run_in_memory(folder: Path, **checkpoint: Any) -> Run:
    run = make_run(folder)
    said = {"every_steps": 0, "memory_every_steps": 1, **checkpoint}
    return run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update=said)})


def be_rank(
    rank: int, world: int, run: Run, layout: Layout, folder: str, memory: str, inside: int, killed_at: int | None
) -> Told:
    """Be one rank of servers with ``inside`` ranks each, whose memories are folders of ``memory``."""
    os.environ[memory_folder.PLACE] = f"{memory}/server-{rank // inside}"
    take, poll = Stepper.take, Saver.poll

    def take_or_die(self: Stepper, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == killed_at:
            os._exit(9)
        return take(self, step, *args, **kwargs)

    def poll_when_written(self: Saver) -> None:
        # So that each step's copy is there before the next: what a test finds does not hang on speed.
        writer = self._tier._writer
        if writer is not None and writer._saving is not None and writer._saving.thread is not None:
            writer._saving.thread.join()
        poll(self)

    Stepper.take, Saver.poll = take_or_die, poll_when_written  # type: ignore[method-assign]
    plan = make_plan(run, Cluster(servers=world // inside, cards_per_server=inside, peak_flops=1e12), layout)
    process = Process(rank, world, rank % inside, inside, torch.device("cpu"))
    try:
        train(plan, RunFolder(Path(folder)), process, prepare_tokens(run), quiet=True)
    except TriaxError as error:
        return Told(type(error).__name__, str(error))
    return Told()


class Servers:
    """A run on emulated servers."""

    def __init__(self, home: Path, run: Run, inside: int) -> None:
        self.home, self.run, self.inside = home, run, inside
        self.folder, self.memory = home / "run", home / "memory"
        for server in range(4):
            (self.memory / f"server-{server}").mkdir(parents=True)
        prepare_tokens(run)

    def start(self, layout: Layout, killed_at: int | None = None) -> list[Told]:
        arguments = (self.run, layout, str(self.folder), str(self.memory), self.inside, killed_at)
        try:
            return run_ranks(be_rank, layout.world_size, *arguments)
        except RanksFailed:
            if killed_at is None:
                raise
            return [Told("killed")] * layout.world_size

    def lose(self, server: int) -> None:
        shutil.rmtree(self.memory / f"server-{server}")
        (self.memory / f"server-{server}").mkdir()

    def files(self) -> list[Path]:
        return [path for path in self.memory.rglob("*") if path.is_file()]

    def resumed(self) -> tuple[int, bool]:
        """The step from which the newest start went on, and whether from memory."""
        events = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        newest = [event for event in events if event["kind"] in ("start", "resume")][-1]
        return newest["step"], newest["detail"]["from_memory"]

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [event for event in events if event["kind"] == kind]


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_killed_run_goes_on_from_memory_bit_for_bit(zero: int, ram: Path, tmp_path: Path) -> None:
    run = run_in_memory(tmp_path)
    layout = lay(run, 1, **({"dp_replicate": 2} if zero == 0 else {"dp_shard": 2}), zero=zero)
    start(run.model_copy(update={"checkpoint": make_run(tmp_path).checkpoint}), layout, tmp_path / "whole")
    servers = Servers(ram, run, inside=2)
    servers.start(layout, killed_at=3)
    assert (servers.folder / "checkpoints" / "history.json").exists()
    assert not list((servers.folder / "checkpoints").glob("step-*"))
    servers.start(layout, killed_at=5)
    assert servers.resumed() == (2, True)
    assert servers.start(layout) == [Told(), Told()]
    assert servers.resumed() == (4, True)
    assert series(servers.folder, "train/loss") == series(tmp_path / "whole", "train/loss")
    assert_bits_equal(saved_weights(servers.folder, run), saved_weights(tmp_path / "whole", run))
    # The run has ended, and the memory is free again.
    assert servers.files() == []
    assert list((servers.memory / "server-0").iterdir()) == []


def test_memory_is_free_when_the_guard_has_stopped_a_run(
    ram: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody starts it again, and what is in memory was judged to be wrong."""
    judge = Guard.judge

    def judged(self: Guard, report: StepReport, *args: Any) -> Judgement:
        is_held = any(ram.rglob("manifest.json"))  # how many there are is a matter of how fast copies are written
        return Judgement("stop", f"held: {is_held}") if report.step == 3 else judge(self, report, *args)

    monkeypatch.setattr(Guard, "judge", judged)
    run = run_in_memory(tmp_path)
    servers = Servers(ram, run, inside=1)
    told = servers.start(lay(run, 1, dp_shard=2, zero=3))
    assert [(one.error, one.message) for one in told] == [("StoppedByGuard", "held: True")] * 2
    assert [list((servers.memory / f"server-{server}").iterdir()) for server in (0, 1)] == [[], []]


def test_updates_wait_for_a_slow_copy_of_the_state_before_them(
    ram: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in_memory(tmp_path, every_steps=4)
    layout = lay(run, 1, dp_shard=2, zero=3)
    start(run, layout, tmp_path / "whole")
    copy = Part.copy

    def slowly(self: Part, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.2)
        copy(self, *args, **kwargs)

    monkeypatch.setattr(Part, "copy", slowly)
    servers = Servers(ram, run, inside=2)
    servers.start(layout, killed_at=6)
    assert servers.start(layout) == [Told(), Told()]
    assert servers.resumed() == (5, True)
    assert_bits_equal(saved_weights(servers.folder, run), saved_weights(tmp_path / "whole", run))


@pytest.mark.parametrize(
    "lost",
    [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow)],
    ids=["the first is lost", "the second is lost", "none is lost"],
)
def test_what_a_lost_server_had_is_with_its_neighbour(lost: int | None, ram: Path, tmp_path: Path) -> None:
    run = run_in_memory(tmp_path)
    layout = lay(run, 1, dp_shard=4, zero=3)
    servers = Servers(ram, run, inside=2)
    servers.start(layout, killed_at=5)
    if lost is not None:
        servers.lose(lost)
    # It comes back empty, and is given what it needs.
    assert servers.start(layout) == [Told()] * 4
    assert servers.resumed() == (4, True)
    start(run.model_copy(update={"checkpoint": make_run(tmp_path).checkpoint}), layout, tmp_path / "whole")
    assert_bits_equal(saved_weights(servers.folder, run), saved_weights(tmp_path / "whole", run))


@pytest.mark.parametrize("stays", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_goes_on_from_memory_on_the_server_that_is_left(stays: int, ram: Path, tmp_path: Path) -> None:
    run = run_in_memory(tmp_path)
    servers = Servers(ram, run, inside=2)
    servers.start(lay(run, 1, dp_shard=4, zero=3), killed_at=5)
    if stays == 1:  # it is the first one now
        servers.lose(0)
        shutil.rmtree(servers.memory / "server-0")
        (servers.memory / "server-1").rename(servers.memory / "server-0")
    assert servers.start(lay(run, 2, dp_replicate=2, zero=1)) == [Told(), Told()]
    assert servers.resumed() == (4, True)
    start(run, lay(run, 1, dp_shard=4, zero=3), tmp_path / "whole")
    assert_losses_equal(series(servers.folder, "train/loss"), series(tmp_path / "whole", "train/loss"), "fp32")


def flip_all(servers: Servers) -> None:
    for path in servers.files():
        if path.suffix == ".safetensors" and path.stat().st_size:
            data = bytearray(path.read_bytes())
            data[-5] ^= 4
            path.write_bytes(data)


def cut_manifests(servers: Servers) -> None:
    for path in servers.files():
        if path.name == "manifest.json":
            os.truncate(path, 100)


def lose_both(servers: Servers) -> None:
    servers.lose(0)
    servers.lose(1)


def open_to_all(servers: Servers) -> None:
    for path in servers.memory.glob("server-*/triax-*"):
        path.chmod(0o755)


@pytest.mark.parametrize(
    "damage",
    [flip_all, *(pytest.param(how, marks=pytest.mark.slow) for how in (cut_manifests, lose_both, open_to_all))],
)
def test_memory_that_cannot_be_trusted_leaves_the_disk(
    damage: Callable[[Servers], None], ram: Path, tmp_path: Path
) -> None:
    run = run_in_memory(tmp_path, every_steps=4, background=False)
    layout = lay(run, 1, dp_shard=2, zero=3)
    servers = Servers(ram, run, inside=1)
    servers.start(layout, killed_at=6)
    damage(servers)
    assert servers.start(layout) == [Told(), Told()]
    assert servers.resumed() == (4, False)
    assert series(servers.folder, "step") == list(range(1, STEPS + 1))
    if damage is flip_all:
        (refused,) = servers.events("checkpoint_refused")
        assert "in memory cannot be used" in refused["detail"]["reason"]
        assert "checksum" in refused["detail"]["reason"]


@pytest.mark.slow
def test_memory_serves_where_the_newest_checkpoint_on_disk_is_damaged(ram: Path, tmp_path: Path) -> None:
    run = run_in_memory(tmp_path, every_steps=4, memory_every_steps=3)
    layout = lay(run, 1, dp_shard=2, zero=3)
    servers = Servers(ram, run, inside=2)
    servers.start(layout, killed_at=6)
    (shard, *_) = sorted((servers.folder / "checkpoints" / "step-00000004").glob("*.safetensors"))
    shard.write_bytes(b"")
    assert servers.start(layout) == [Told(), Told()]
    assert servers.resumed() == (3, True)


def test_what_lies_in_memory_of_a_way_that_was_left_never_wins(ram: Path, tmp_path: Path) -> None:
    run = run_in_memory(tmp_path, every_steps=4, background=False)
    layout = lay(run, 1, dp_shard=2, zero=3)
    servers = Servers(ram, run, inside=2)
    servers.start(layout, killed_at=6)
    # The server is away, with step 5 in its memory, while the run goes on from the disk.
    (servers.memory / "server-0").rename(servers.memory / "away")
    (servers.memory / "server-0").mkdir()
    servers.start(layout, killed_at=5)
    assert servers.resumed() == (4, False)
    servers.lose(0)
    shutil.rmtree(servers.memory / "server-0")
    (servers.memory / "away").rename(servers.memory / "server-0")
    assert servers.start(layout) == [Told(), Told()]
    assert servers.resumed() == (4, False)


@pytest.mark.slow
def test_a_run_that_stops_keeping_copies_leaves_none_that_count(ram: Path, tmp_path: Path) -> None:
    run = run_in_memory(tmp_path, every_steps=4, background=False)
    layout = lay(run, 1, dp_shard=2, zero=3)
    servers = Servers(ram, run, inside=2)
    servers.start(layout, killed_at=3)
    servers.run = run_in_memory(tmp_path, every_steps=4, memory_every_steps=0)
    servers.start(layout, killed_at=6)
    assert servers.resumed() == (2, True)
    # Where step 2 was gone on from, it stays until the run has ended; it is older than what the disk has now.
    assert {path.parent.name for path in servers.files()} == {"step-00000002"}
    assert servers.start(layout) == [Told(), Told()]
    assert servers.resumed() == (4, False)
    assert servers.files() == []


def test_copies_that_do_not_fit_are_left_out_and_said(
    ram: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triax.checkpoint.memory_save.room_bytes", lambda _: 50_000)
    servers = Servers(ram, run_in_memory(tmp_path), inside=2)
    assert servers.start(lay(servers.run, 1, dp_shard=2, zero=3)) == [Told(), Told()]
    (off,) = servers.events("memory_off")
    assert "copies of the state need" in off["detail"]["reason"]
    assert "48.83 KiB are free" in off["detail"]["reason"]
    assert servers.files() == []
