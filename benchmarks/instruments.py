"""Which part of a step do the instruments take that find hangs and stragglers?

    python -m benchmarks.instruments [--ranks 2] [--layout "pp=2 zero=0"] [--steps 20] [--sequences 8] [--json FILE]

Each instrument is called many times in a loop, which gives its CPU time a call; how often a step calls it is counted in
a step of a real run. Their product, of the CPU time that the thread of a rank takes for a step, is the share. So other
work on the machine hardly matters. What ranks share of how long they were busy is timed as it comes, over all steps.
The process that started the ranks looks at them four times a second; its part is of one core.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.output import write_json
from benchmarks.paired import Order, compare, read_batches
from triax.parallel.launch import peers, process_from_environment
from triax.parallel.place import initialise
from triax.parallel.progress import Progress
from triax.parallel.slot import Slot
from triax.parallel.waits import BusyClock
from triax.spec.layout import Layout
from triax.spec.run import Run, WatchSpec
from triax.train.assemble import assemble
from triax.train.hang import HangWatch
from triax.train.pace import Pace
from triax.train.places import make_places
from triax.train.reporter import Reporter

CALLS = 20_000
INSTRUMENTS = {"phase": (Slot, "change"), "wait": (Slot, "wait_since"), "clock": (BusyClock, "turn")}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the calls of each instrument in the body of the ``with``."""
    counts = dict.fromkeys(INSTRUMENTS, 0)
    before = {name: getattr(where, method) for name, (where, method) in INSTRUMENTS.items()}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return before[name](*args)

        return call

    for name, (where, method) in INSTRUMENTS.items():
        setattr(where, method, counting(name))
    try:
        yield counts
    finally:
        for name, (where, method) in INSTRUMENTS.items():
            setattr(where, method, before[name])


def seconds_a_call(call: Callable[[], object], calls: int = CALLS) -> float:
    """Return the CPU time of one call in this thread."""
    began_s = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - began_s) / calls


class _Quiet:
    """A reporter that nobody reads."""

    def __init__(self, *, is_voice: bool) -> None:
        self.is_voice = is_voice

    def warn(self, text: str) -> None:
        pass

    def event_of(self, *event: object) -> None:
        pass


def work(order: Order) -> None:
    """Be one rank; rank 0 leaves what the instruments have cost."""
    run, layout = Run.model_validate_json(order.run), Layout.model_validate_json(order.layout)
    process = process_from_environment()
    with peers(process, 600):
        progress = Progress(Slot())
        parts = assemble(run, layout, process, read_batches(run), progress)
        initialise(parts.stages, run.model, 0, layout)
        parts.optimizer.copy_tied()
        reporter = cast(Reporter, _Quiet(is_voice=process.rank == 0))
        pace = Pace(layout, process, progress, reporter, 0.15)
        told: dict[str, list[float]] = {"step": [], "share": []}
        with progress.clock.following(), counted() as counts:
            for number in range(order.pairs + 2):
                if number == 2:  # the first ones find memory
                    counts.update(dict.fromkeys(counts, 0))
                    told = {"step": [], "share": []}
                began_s = time.thread_time()
                pace.begin()
                batches = parts.stepper.read_batches(number * run.sequences_per_step)
                pace.read()
                parts.stepper.take(number, batches, asks_stop=False).read()
                ended_s = time.thread_time()
                pace.end(number + 1)
                told["share"].append(time.thread_time() - ended_s)
                told["step"].append(time.thread_time() - began_s)
            told |= {name: [calls / order.pairs] for name, calls in counts.items()}
        with progress.clock.following():
            progress.clock.start("rest")
            slot = Slot()
            told["phase_s"] = [seconds_a_call(lambda: slot.change("step 12, forward of stage 1, microbatch 3"))]
            told["clock_s"] = [seconds_a_call(lambda: progress.clock.turn("rest"))]
            done = dist.all_reduce(torch.ones(1), async_op=True)
            assert done is not None
            done.wait()
            noticed_s = seconds_a_call(lambda: done.wait())
        # The slot is told before and after each wait.
        told["wait_s"] = [max(noticed_s - seconds_a_call(lambda: done.wait()), 0.0) / 2]
        if process.rank == 0:
            order.save(told)


def look_s(num_ranks: int) -> float:
    """Return the CPU time of one look at ``num_ranks`` ranks, as of the process that has started them."""
    with tempfile.TemporaryDirectory() as folder:
        places = make_places(Path(folder) / "places", num_ranks)
        layout = Layout(dp_replicate=num_ranks, zero=0)
        watch = HangWatch(places, layout, 0, num_ranks, WatchSpec(), Path(folder), "here", lambda *told: None)
        for local in range(num_ranks):
            places.slot(local).sign(1, None)
            places.slot(local).enter(3)
            places.slot(local).change("step 3, forward of stage 0, microbatch 0")
        return seconds_a_call(lambda: watch._look(time.monotonic()), 500)


def figures(told: dict[str, list[float]], ranks: int) -> dict[str, Any]:
    """Return the share of each instrument in the CPU time of a step, and of looking in a core."""
    step_s = statistics.median(told["step"])
    parts = {name: told[name][0] * told[f"{name}_s"][0] for name in INSTRUMENTS}
    parts["sharing"] = statistics.fmean(told["share"])
    one_look_s = look_s(ranks)
    return {
        "step_cpu_s": step_s,
        "calls_in_a_step": {name: told[name][0] for name in INSTRUMENTS},
        "cpu_s_a_call": {name: told[f"{name}_s"][0] for name in INSTRUMENTS},
        "cpu_s_a_step": parts,
        "share_of_step": sum(parts.values()) / step_s,
        "look_cpu_s": one_look_s,
        "share_of_core_for_looking": 4 * one_look_s,
    }


def main() -> None:
    """Measure, and print or write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layout", help='such as "pp=2 zero=0"; absent: dp_shard over all ranks, ZeRO-3')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=8, help="of 256 tokens, in a step")
    parser.add_argument("--json", default="-", metavar="FILE|-")
    asked = parser.parse_args()
    said = {key: int(value) for key, _, value in (word.partition("=") for word in (asked.layout or "").split())}
    layout = Layout(**cast(dict[str, Any], said or {"dp_shard": asked.ranks, "zero": 3}))
    _, told = compare(work, layout, asked.sequences, asked.steps)
    found = figures(told, layout.world_size)
    write_json({"format_version": 1, "layout": layout.describe(), "sequences": asked.sequences, **found}, asked.json)


if __name__ == "__main__":
    main()
