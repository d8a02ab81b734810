"""How long does a person wait: for the help, and from a command to the end of its first step?

    python -m benchmarks.startup [--ranks 4] [--repetitions 3] [--json FILE]

Every figure is the median of fresh processes, on a machine whose files are in memory already. The run is tiny and its
tokens are prepared before, so that what is measured is triax: reading the run file, starting ranks, joining them,
laying out the network, and one step.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.output import write_json

HELP_REPETITIONS = 5
RUN_FILE = """
[model]
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
vocab_size = 257
[data]
train = ["corpus.txt"]
seq_len = 64
cache_dir = "cache"
[train]
steps = 1
sequences_per_step = {ranks}
[precision]
compute = "fp32"
[watch]
tensorboard = false
"""


def seconds_of(command: list[str], cwd: Path) -> float:
    """Seconds that a command takes from its start to its end."""
    began_s = time.perf_counter()
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began_s


def first_step_s(command: list[str], run_dir: Path, cwd: Path) -> float:
    """Seconds from the start of a training command until its first step stands in metrics.jsonl."""
    metrics = run_dir / "metrics.jsonl"
    began_s = time.perf_counter()
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL)
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None:
            raise SystemExit(f"benchmark: the run ended with {process.returncode} before its first step")
        time.sleep(0.002)
    waited_s = time.perf_counter() - began_s
    if process.wait():
        raise SystemExit(f"benchmark: the run ended with {process.returncode}")
    return waited_s


def main() -> int:
    """Print one JSON object: medians, and every repetition."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", default="-")
    arguments = parser.parse_args()
    triax = [sys.executable, "-m", "triax"]
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    with tempfile.TemporaryDirectory(prefix="triax-startup-") as scratch:
        folder = Path(scratch)
        (folder / "corpus.txt").write_text("Some words to read, again and again. " * 4000)
        (folder / "run.toml").write_text(RUN_FILE.format(ranks=arguments.ranks))
        seconds_of([*triax, "data", "prepare", "run.toml", "--quiet"], folder)
        help_s = [seconds_of([*triax, "--help"], folder) for _ in range(HELP_REPETITIONS)]
        train_s, whole_s = [], []
        for number in range(arguments.repetitions):
            run_dir = f"run-{number}"
            command = [*triax, "train", "run.toml", "--ranks", str(arguments.ranks), "--run-dir", run_dir, "--quiet"]
            began_s = time.perf_counter()
            train_s.append(first_step_s(command, folder / run_dir, folder))
            whole_s.append(time.perf_counter() - began_s)
    write_json(
        {
            "ranks": arguments.ranks,
            "cores": os.cpu_count(),
            "help_s": statistics.median(help_s),
            "first_step_s": statistics.median(train_s),
            "whole_command_s": statistics.median(whole_s),
            "repetitions": {"help_s": help_s, "first_step_s": train_s, "whole_command_s": whole_s},
        },
        arguments.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
