"""How does a test type a command, in its own process or in one like a person's, and what run does it train?"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import write_corpus
from tests.spec.run_files import Said, write

ROOT = Path(__file__).parent.parent.parent
RATES: dict[str, Any] = {"peak_flops": 1e12, "matmul_flops_per_s": 5e10, "memory_bytes_per_s": 1e10}
"""Of a machine that needs no measuring: equal commands plan equal layouts, whatever else runs here."""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")


def tiny(**sections: Said) -> Said:
    """The run file of a network that trains a step in a millisecond; ``sections`` are laid over it."""
    said: Said = {
        "model": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "vocab_size": 257,
        },
        "data": {"train": ["corpus.jsonl"], "seq_len": 32, "cache_dir": "cache"},
        "train": {"steps": 4, "sequences_per_step": 4, "timeout_s": 60.0},
        "learning_rate": {"schedule": "constant", "peak": 1e-2},
        "precision": {"compute": "fp32"},
        "checkpoint": {"every_steps": 2},
        "watch": {"tensorboard": False, "console_every": 1},
        "cluster": RATES,
    }  # fmt: skip
    return {**said, **{name: {**said.get(name, {}), **keys} for name, keys in sections.items()}}


def make_run(folder: Path, **sections: Said) -> Path:
    """Write the corpus and the run file into ``folder`` and return the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    write_corpus(folder)
    return write(folder, tiny(**sections))


@dataclass(frozen=True)
class Told:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one sentence on standard error; there must be no other, and never a traceback."""
        assert "Traceback" not in self.err, self.err
        (line,) = self.err.splitlines()
        assert line.startswith("triax: "), line
        return line.removeprefix("triax: ")


Typed = Callable[..., Told]


def typed_here(capsys: pytest.CaptureFixture[str], *words: object) -> Told:
    """Run a command line in this process, and end what a failed one leaves to the end of its process."""
    from triax.cli import run

    code = run([str(word) for word in words])
    if (dist := sys.modules.get("torch.distributed")) is not None and dist.is_initialized():
        dist.destroy_process_group()
    captured = capsys.readouterr()
    return Told(code, captured.out, captured.err)


def refuse(told: Told, *fragments: str) -> None:
    """Assert that a command was bad input, said so in one sentence with these fragments, and did nothing."""
    assert (told.code, told.out) == (2, ""), told
    for fragment in fragments:
        assert fragment in told.sentence, told.sentence


def environment(**changed: str) -> dict[str, str]:
    """The environment of a person who starts no ranks, with two cores for all that is started."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **changed}


def triax(*words: object) -> list[str]:
    """The command line of a process that runs ``triax WORDS``."""
    return [sys.executable, "-m", "triax", *map(str, words)]


def shell(line: str) -> list[str]:
    """The command line of a shell that runs ``line``, in which ``triax`` is this one."""
    python = " ".join(map(shlex.quote, triax()))
    return ["sh", "-c", line.replace("triax", python, 1)]


def torchrun(*words: object) -> list[str]:
    """The command line of a process that runs ``torchrun WORDS``."""
    return [sys.executable, "-m", "torch.distributed.run", *map(str, words)]


def started(command: list[str], cwd: Path, env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """Start a command with its output in pipes, in a process group of its own."""
    return subprocess.Popen(
        command, cwd=cwd, env=environment() if env is None else dict(env), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def ended(process: "subprocess.Popen[str]", timeout_s: float = 120) -> Told:
    """Wait for a command."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout_s:g} s; it said:\n{out}\n{err}") from None
    return Told(process.returncode, out, err)


def until(is_so: Callable[[], Any], process: "subprocess.Popen[str] | None" = None, timeout_s: float = 120) -> None:
    """Wait until ``is_so()``; fail where ``process`` ends before."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the command ended before: {ended(process)}")
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def workers_of(process: "subprocess.Popen[str]") -> list[int]:
    """The processes that are ranks, by rank: children of the fork server, which is a child of the command."""

    def children(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    return [worker for child in children(process.pid) for worker in children(child)]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def losses(run_dir: Path) -> list[float]:
    """The losses of all steps in ``metrics.jsonl``, bit for bit, as a reader of the run sees them."""
    series: dict[int, float] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        if line.strip():
            values = json.loads(line)
            series = {step: loss for step, loss in series.items() if step < values["step"]}
            series[values["step"]] = values["train/loss"]
    return [series[step] for step in sorted(series)]


def copied(folder: Path, to: Path) -> Path:
    """Copy a run folder and return the copy."""
    return Path(shutil.copytree(folder, to, symlinks=True))


def contents(folder: Path) -> dict[str, bytes]:
    """Every regular file below ``folder`` with what it holds: to see that nothing was lost or touched."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
