"""How far off are the planner's predictions from published measurements?

    python benchmarks/planner_accuracy.py --runs FILE --peak-memory FILE --json OUT [--calibration leave-family-out]

Every prediction is made before any measured column is read, with the calibration that comes with triax, or with one
that has seen no run of the row's family of frameworks. Nothing is fitted to the files given. Beside each set stands the
null model, which does see them: each run has the hardware FLOP utilisation of its siblings (same card, framework and
precision), itself left out.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from benchmarks.megatron_arguments import read_peak_row
from benchmarks.published_memory import (
    for_memory,
    measured_peak_bytes,
    peak,
    predicted_bytes,
    printed,
    printed_rank,
    ran_out,
    verdict,
)
from benchmarks.published_networks import Unclear
from benchmarks.published_rows import Row, measured_step_s, positive, read, understood
from triax.errors import BadInput
from triax.plan.calibration import Calibration, Stack, from_value, shipped, stack_of
from triax.plan.memory import memory
from triax.plan.parts import parts
from triax.plan.step import combine

Quantity = Literal["step_s", "peak_bytes", "fits"]
WITHOUT_FAMILIES: Final = Path(__file__).parent / "calibration_without_families.json"


@dataclass
class Prediction:
    """One row of the report; ``measured`` and ``null`` are filled in after all predictions stand.

    Of ``fits`` the value is 1 or 0, ``low`` what the upper end of the predicted bytes would say and ``high`` what the
    lower end would: a row with 0 and 1 is too near to tell.
    """

    id: str
    set: str
    quantity: Quantity
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    calibration: str = ""
    refused: str | None = None
    measured: float | None = field(default=None, repr=False)
    null: float | None = None


def without_families(stack: Stack) -> Calibration:
    """Return the calibration that has seen no run of this stack's family."""
    found = _without_families()
    return found.get(stack.family) or shipped()


@cache
def _without_families() -> dict[str, Calibration]:
    values = json.loads(WITHOUT_FAMILIES.read_text(encoding="utf-8"))
    return {family: from_value(value) for family, value in values.items()}


def predict_run(raw: Mapping[str, str], which: str) -> tuple[Row | None, list[Prediction]]:
    """Return what is predicted for one row of published runs: step time, peak memory, and whether it fits."""
    name = raw.get("id", "")
    try:
        row = understood(raw)
    except (Unclear, BadInput) as error:
        group = raw.get("source_group") or "unknown"
        return None, [Prediction(name, group, each, refused=str(error)) for each in ("step_s", "peak_bytes", "fits")]
    return row, [_step(row, which), *_peak(raw, row)]


def _step(row: Row, which: str) -> Prediction:
    stack = stack_of(row.network, row.workload, row.machine.card, row.engine, row.stack, row.release)
    calibration = shipped() if which == "shipped" else without_families(stack)
    made = parts(row.network, row.workload, row.machine, row.engine, row.candidates)
    seconds = float(combine(made, calibration.factors([stack])).step_s[0])
    factor = float(calibration.interval([stack])[0])
    rests_on = f"{which}: {calibration.describe(stack)}"
    return Prediction(row.id, row.set, "step_s", seconds, seconds / factor, seconds * factor, rests_on)


def _peak(raw: Mapping[str, str], row: Row) -> list[Prediction]:
    try:
        kept = for_memory({**raw, "peak_memory_gb": "", "oom": ""}, row)
    except Unclear as error:
        return [Prediction(row.id, row.set, each, refused=str(error)) for each in ("peak_bytes", "fits")]
    found = peak(kept, pipeline_rank=printed_rank(kept))
    value = predicted_bytes(found, printed(raw, kept))
    low, high = (float(end) for end in found.interval(np.array(value)))
    return [Prediction(row.id, row.set, "peak_bytes", value, low, high, "exact count"), _fits(raw, kept)]


def _fits(raw: Mapping[str, str], row: Row) -> Prediction:
    try:
        found = verdict(raw, row)
    except Unclear as error:
        return Prediction(row.id, row.set, "fits", refused=str(error))
    low, value, high = (float(each) for each in (found.fits_at_most, found.fits, found.fits_at_least))
    return Prediction(row.id, row.set, "fits", value, low, high, "exact count")


def predict_peak(raw: Mapping[str, str]) -> Prediction:
    """Return what is predicted for one row of peak memories: bytes allocated on the last pipeline rank."""
    name = raw.get("id", "")
    try:
        row = read_peak_row(raw)
    except (Unclear, BadInput) as error:
        return Prediction(name, "peak-memory", "peak_bytes", refused=str(error))
    found = memory(row.network, row.workload, row.machine.card, row.engine, row.candidates, pipeline_rank=-1)
    value = float(found.allocated_bytes[0])
    low, high = (float(end) for end in found.interval(np.array(value)))
    which = f"peak-memory/{'moe' if row.is_moe else 'dense'}"
    return Prediction(name, which, "peak_bytes", value, low, high, "exact count")


def read_measurements(
    raws: Sequence[Mapping[str, str]], rows: Sequence[Row | None], predictions: Sequence[Sequence[Prediction]]
) -> None:
    """Fill in what was measured."""
    for raw, row, made in zip(raws, rows, predictions, strict=True):
        for one in made:
            if one.quantity == "step_s" and row is not None and not ran_out(raw):
                one.measured = measured_step_s(raw, row)
            elif one.quantity == "peak_bytes" and not ran_out(raw):
                one.measured = measured_peak_bytes(raw)
            elif one.quantity == "fits" and raw.get("oom"):
                one.measured = 0.0 if ran_out(raw) else 1.0


def fill_null_model(rows: Sequence[Row | None], predictions: Sequence[Sequence[Prediction]]) -> None:
    """Fill in what a run would take with the median utilisation of its siblings, itself left out."""
    siblings: dict[tuple[str, ...], list[tuple[float, float, Prediction]]] = defaultdict(list)
    for row, made in zip(rows, predictions, strict=True):
        if row is None or made[0].measured is None:
            continue
        work = hardware_flops(row) / (
            float(row.candidates.world_size[0]) * row.machine.card.peak(row.workload.precision.matmul)
        )
        key = (row.machine.card.name, row.stack, row.workload.precision.matmul)
        siblings[key].append((work, work / made[0].measured, made[0]))
    for group in siblings.values():
        reached = np.array([each for _, each, _ in group])
        for index, (work, _, one) in enumerate(group):
            if len(group) > 1:
                one.null = work / float(np.median(np.delete(reached, index)))


def hardware_flops(row: Row) -> float:
    """Return the operations of a step, those that full recomputation repeats included."""
    forward = sum(row.network.forward_flops(row.workload.mean_attended).values())
    head = 2.0 * row.network.vocab * row.network.hidden
    again = (forward - head) if int(row.candidates.recompute[0]) & 256 else 0.0
    return (3 * forward + again) * row.workload.tokens_per_step


def summary(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return errors by set and quantity."""
    groups: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
    for one in predictions:
        groups[one.set, one.quantity].append(one)
    return [_of_set(name, quantity, ones) for (name, quantity), ones in sorted(groups.items())]


def _of_set(name: str, quantity: str, ones: list[Prediction]) -> dict[str, Any]:
    used = [one for one in ones if one.predicted is not None and one.measured is not None]
    result: dict[str, Any] = {
        "set": name, "quantity": quantity, "used": len(used),
        "refused": sum(one.refused is not None for one in ones),
    }  # fmt: skip
    if not used:
        return result
    off = [(one.predicted or 0.0) / one.measured - 1 if one.measured else float(bool(one.predicted)) for one in used]
    inside = [one.low <= one.measured <= one.high for one in used if one.low is not None and one.high is not None]  # type: ignore[operator]
    result |= {
        "median": float(np.median(np.abs(off))), "p90": float(np.quantile(np.abs(off), 0.9)),
        "bias": float(np.median(off)), "coverage": float(np.mean(inside)),
    }  # fmt: skip
    nulls = [abs(one.null / one.measured - 1) for one in used if one.null is not None and one.measured]
    if nulls:
        result |= {"null_median": float(np.median(nulls)), "null_p90": float(np.quantile(nulls, 0.9))}
    return result


def regret(rows: Sequence[Row | None], predictions: Sequence[Sequence[Prediction]]) -> dict[str, Any]:
    """Return how much slower the layout predicted fastest was than the fastest, where several were measured."""
    arenas: dict[str, list[tuple[Row, Prediction]]] = defaultdict(list)
    for row, made in zip(rows, predictions, strict=True):
        if row is not None and made[0].measured is not None:
            arenas[row.arena].append((row, made[0]))
    lost = []
    for runs in arenas.values():
        if len({row.config for row, _ in runs}) < 2:
            continue
        best = min(one.measured or np.inf for _, one in runs)
        chosen = min((one for _, one in runs), key=lambda one: one.predicted or np.inf)
        lost.append((chosen.measured or np.inf) / best - 1)
    if not lost:
        return {"groups": 0}
    return {"groups": len(lost), "median": float(np.median(lost)), "p90": float(np.quantile(lost, 0.9))}


def as_row(one: Prediction) -> dict[str, Any]:
    """Return a prediction as the report shows it, without the measurement."""
    keys = ("id", "set", "quantity", "predicted", "low", "high", "calibration", "refused")
    return {key: getattr(one, key) for key in keys}


def print_table(sets: Sequence[Mapping[str, Any]]) -> None:
    """Print errors by set in percent, the null model's beside them."""
    print(
        f"{'set':<36}{'quantity':<12}{'used':>5}{'ref':>5}{'median':>8}{'p90':>8}{'bias':>8}{'cover':>7}{'null':>8}{'null90':>8}"
    )
    for each in sets:
        cells = "".join(
            f"{100 * each[key]:>{width}.1f}" if key in each else " " * width
            for key, width in (
                ("median", 8),
                ("p90", 8),
                ("bias", 8),
                ("coverage", 7),
                ("null_median", 8),
                ("null_p90", 8),
            )
        )
        print(f"{each['set']:<36}{each['quantity']:<12}{each['used']:>5}{each['refused']:>5}{cells}")


def main() -> None:
    """Predict, then read what was measured, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--peak-memory", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--calibration", choices=("shipped", "leave-family-out"), default="shipped")
    given = parser.parse_args()
    raws = [] if given.runs is None else read(given.runs)
    peaks = [] if given.peak_memory is None else read(given.peak_memory)
    made = [predict_run(raw, given.calibration) for raw in raws]
    rows, predictions = [row for row, _ in made], [ones for _, ones in made]
    of_peaks = [predict_peak(raw) for raw in peaks]
    # All predictions stand; from here on measurements are read.
    read_measurements(raws, rows, predictions)
    for raw, one in zip(peaks, of_peaks, strict=True):
        one.measured = positive(raw.get("peak_allocated_bytes", ""))
    fill_null_model(rows, predictions)
    everything = [one for ones in predictions for one in ones] + of_peaks
    sets, chosen = summary(everything), regret(rows, predictions)
    value = {"rows": [as_row(one) for one in everything], "sets": sets, "regret": chosen}
    given.json.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    print_table(sets)
    used = [one for one in everything if one.quantity == "step_s" and one.predicted and one.measured]
    if used:
        inside = np.mean([(one.low or 0) <= (one.measured or 0) <= (one.high or 0) for one in used])
        print(f"step_s: {100 * inside:.1f} % of {len(used)} rows lie in their 80 % interval")
    print(f"regret: {chosen}", file=sys.stdout)


if __name__ == "__main__":
    main()
