"""The first run, shown: train on four local ranks, be interrupted, go on, and write a few lines.

Runs the same commands a person would type, and fails where one of them does not do what it promises.
"""

import json
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUN_DIR = Path("runs") / "demo"
RANKS = 4
INTERRUPT_AFTER = 80


def main() -> int:
    started_s = time.monotonic()
    if (RUN_DIR / "checkpoints").exists():
        say(f"{RUN_DIR} is there already: this goes on from it (remove the folder to see it from the start)")
    corpus = json.dumps([sysconfig.get_path("stdlib") + "/*.py"])
    train = ["triax", "train", str(HERE / "run.toml"), f"data.train={corpus}", "--ranks", str(RANKS)]
    train += ["--run-dir", str(RUN_DIR)]

    say(f"Train on {RANKS} ranks; optimizer state and gradients are shared (ZeRO 2).")
    if last_step() < INTERRUPT_AFTER:
        expect(train_until(train, INTERRUPT_AFTER), 75, "an interrupted run saves its state and leaves with 75")

    say("The same command goes on where it was interrupted.")
    expect(run(train), 0, "the run ends")
    tell_losses()

    say("What the network writes, one byte after another:")
    expect(run(["triax", "generate", str(RUN_DIR), "--prompt", "def ", "--max-tokens", "160"]), 0, "it writes")
    say(f"Done in {time.monotonic() - started_s:.0f} s. Everything is in {RUN_DIR}; look at its metrics.jsonl.")
    return 0


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def start(words: list[str]) -> "subprocess.Popen[bytes]":
    print(f"$ {shlex.join(words)}", flush=True)
    return subprocess.Popen([sys.executable, "-m", *words])


def run(words: list[str]) -> int:
    return start(words).wait()


def train_until(words: list[str], step: int) -> int:
    """Ask the run to stop once it has passed ``step``, as a cluster would before it takes the machine away."""
    process = start(words)
    while process.poll() is None and last_step() < step:
        time.sleep(0.1)
    if process.poll() is None:
        say(f"Interrupt it after step {step} (SIGTERM, as a cluster sends before it takes a machine away).")
        process.send_signal(signal.SIGTERM)
    return process.wait()


def metrics() -> list[dict[str, float]]:
    path = RUN_DIR / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.strip().endswith("}")]


def last_step() -> int:
    written = metrics()
    return int(written[-1]["step"]) if written else 0


def tell_losses() -> None:
    series = {int(line["step"]): line for line in metrics()}
    first, last = series[min(series)], series[max(series)]
    held_out = [line["eval/loss"] for line in series.values() if "eval/loss" in line]
    say(
        f"The loss fell from {first['train/loss']:.3f} (guessing among 257 bytes is {5.549:.3f}) to "
        f"{last['train/loss']:.3f}, on held-out text to {held_out[-1]:.3f}."
    )
    if not last["train/loss"] < 0.6 * first["train/loss"]:
        raise SystemExit("demo: the loss did not fall as it must")


def expect(code: int, wanted: int, what: str) -> None:
    if code != wanted:
        raise SystemExit(f"demo: exit code {code}, expected {wanted}: {what}")


if __name__ == "__main__":
    sys.exit(main())
