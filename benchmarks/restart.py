"""How long does training stand still when a rank is killed: here, and under torchrun with the same run?

    python -m benchmarks.restart [--ranks 2] [--repetitions 5] [--json FILE]

Rank 0 is killed outright after a checkpoint, and the seconds are measured until the next step stands in metrics.jsonl,
in a network so small that what is measured is the restart alone. Three ways to come back, which take turns:

- ``triax``: the command goes on by itself;
- ``torchrun``: ``torchrun --max-restarts`` starts all ranks of the same worker anew;
- ``started again``: the command ends (``--max-restarts 0``), and is started again at once.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from benchmarks.output import write_json
from benchmarks.startup import RUN_FILE

STEPS = 400
KILLED_AFTER = 12
SAVED_EVERY = 5
PATIENCE_S = 300.0


def last_step(metrics: Path) -> tuple[int, int]:
    """Return how many lines there are, and the step of the last one."""
    lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
    return len(lines), int(json.loads(lines[-1])["step"]) if lines else 0


def rank_0(pid: int, run_dir: Path) -> int | None:
    """Return the process below ``pid`` that holds the run's folder as rank 0; None where none does now."""
    found, level = [], [pid]
    while level:
        level = [child for each in level for child in children(each)]
        found += level
    lock = str(run_dir / ".rank-0.lock")
    return next((each for each in found if lock in open_files(each)), None)


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def open_files(pid: int) -> list[str]:
    """Return the names of the files that a process has open."""
    with suppress(OSError):
        return [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    return []


def seconds_to_next_step(command: list[str], run_dir: Path, cwd: Path, *, starts_again: bool) -> float:
    """Return the seconds from the death of rank 0 until the first step after it is written down."""
    metrics = run_dir / "metrics.jsonl"
    with (cwd / "said.txt").open("a") as said:
        process = subprocess.Popen(command, cwd=cwd, stdout=said, stderr=said)
        wait_until(lambda: last_step(metrics)[1] >= KILLED_AFTER)
        victim = rank_0(process.pid, run_dir)
        assert victim is not None, "rank 0 is not to be found"
        os.kill(victim, signal.SIGKILL)
        killed_s = time.perf_counter()
        before, _ = last_step(metrics)
        if starts_again:
            process.wait()
            process = subprocess.Popen(command, cwd=cwd, stdout=said, stderr=said)
        wait_until(lambda: last_step(metrics)[0] > before)
        stood_still_s = time.perf_counter() - killed_s
        process.terminate()
        process.wait()
    return stood_still_s


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for something to be so."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise SystemExit("benchmark: the run did not come so far in time")
        time.sleep(0.002)


def main() -> int:
    """Print one JSON object: medians, and every repetition."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", default="-")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Without it torchrun hands a restarted rank the addresses of the attempt before, and no restart succeeds.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    python, ranks = sys.executable, str(arguments.ranks)
    words = ["train", "run.toml", "--quiet", "--run-dir"]
    triax = [python, "-m", "triax", *words[:2], "--ranks", ranks, *words[2:]]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--nproc-per-node", ranks]
    ways = {
        "triax": (triax, [], False),
        "torchrun": ([*torchrun, "-m", "triax", *words], [], False),
        "started again": (triax, ["--max-restarts", "0"], True),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="triax-restart-") as scratch:
        folder = Path(scratch)
        (folder / "corpus.txt").write_text("Some words to read, again and again. " * 4000)
        text = RUN_FILE.format(ranks=arguments.ranks).replace("steps = 1", f"steps = {STEPS}", 1)
        (folder / "run.toml").write_text(f"{text}[checkpoint]\nevery_steps = {SAVED_EVERY}\n")
        subprocess.run([python, "-m", "triax", "data", "prepare", "run.toml", "--quiet"], cwd=folder, check=True)
        for number in range(arguments.repetitions):
            for way, (command, more, starts_again) in ways.items():
                run_dir = folder / f"{way.replace(' ', '-')}-{number}"
                took_s = seconds_to_next_step(
                    [*command, str(run_dir), *more], run_dir, folder, starts_again=starts_again
                )
                seconds[way].append(took_s)
    write_json(
        {
            # What benchmarks.goodput reads.
            "costs": {"restart_s": statistics.median(seconds["triax"]), "restart_ranks": arguments.ranks},
            "ranks": arguments.ranks,
            "cores": os.cpu_count(),
            "seconds_to_next_step": {way: statistics.median(taken) for way, taken in seconds.items()},
            "repetitions": seconds,
        },
        arguments.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
