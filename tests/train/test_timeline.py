"""Does a run time the steps it was asked to, on every rank, and is it shown?"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.commands import fork_workers, triax
from tests.harness.ranks import run_ranks
from tests.train.test_lost_ranks import RUN
from triax.parallel.launch import Process
from triax.parallel.progress import Progress
from triax.spec.layout import Layout
from triax.spec.schedule import executed_table, read_measured
from triax.train.run_folder import RunFolder
from triax.train.timeline import save_timeline


def test_a_run_times_the_steps_it_is_asked_to(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_workers(monkeypatch)
    (tmp_path / "corpus.txt").write_text("to be or not to be that is the question " * 100)
    (tmp_path / "run.toml").write_text(
        RUN.replace("tensorboard = false", "tensorboard = false\ntimeline_steps = [1, 3]")
    )
    folder = tmp_path / "run"
    words = ["--ranks", "4", "--layout", "pp=2 tp=2", "--run-dir", str(folder), "-q"]
    assert triax(["train", str(tmp_path / "run.toml"), *words], capfd).code == 0
    assert RunFolder(folder).timed_steps() == [1, 3]
    measured = read_measured(folder / "timeline-step00000003.json")
    for times in measured.ranks:
        moments = [moment for pair in zip(times.start_s, times.end_s, strict=True) for moment in pair]
        assert moments == sorted(moments), f"rank {times.rank} did two things at once"
        assert 0 <= moments[0] < moments[-1] < 60
    timeline = measured.timeline(1)
    for visit in timeline.table.execution_order:
        for sender, index in visit.waits_for:
            assert timeline.end_s[sender][index] <= timeline.start_s[visit.rank][visit.position]
    shown = triax(["schedule", "--from", str(folder)], capfd)
    assert shown.code == 0
    assert shown.out.startswith(f"step 3 of {folder}: pp=2 tp=2 schedule=1F1B\n1F1B: pp=2, 2 stages, 2 microbatches")
    assert "2 pipelines side by side" in shown.out
    for wrong, said in (
        (["--step", "2"], "has not timed step 2: use --step 1 or 3."),
        (["--rank", "4"], "--rank 4 is none of the 4 ranks"),
        (["1F1B"], "leave out its name and sizes"),
    ):
        refused = triax(["schedule", "--from", str(folder), *wrong], capfd)
        assert (refused.code, said in refused.err) == (2, True), refused.err


def test_servers_count_from_the_barrier_before_the_step(tmp_path: Path) -> None:
    """Their clocks need not agree."""
    layout = Layout(dp_replicate=2, zero=0, microbatches=3)

    def run_one(rank: int, world: int) -> None:
        progress = Progress()
        process = Process(rank, world, 0, 1, torch.device("cpu"))
        progress.time_actions()
        assert progress._stopwatch is not None
        ahead_s = 1e6 * rank  # the clock of the second server
        progress._stopwatch._origin_s += ahead_s
        mark = progress._stopwatch.mark
        progress._stopwatch.mark = lambda: ahead_s + mark()  # type: ignore[method-assign, operator, return-value]
        row = tuple(executed_table(layout).actions(0))
        progress.follow(row)
        for action in row:
            progress.begin(action)
            progress.end()
        save_timeline(progress, 7, layout, process, RunFolder(tmp_path))
        dist.barrier()

    run_ranks(run_one, 2)
    measured = read_measured(RunFolder(tmp_path).timeline(7))
    assert max(times.end_s[-1] for times in measured.ranks) < 60
