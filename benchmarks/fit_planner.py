"""Fit the planner's calibration to published runs, and say honestly how good it is on runs it has not seen.

    python benchmarks/fit_planner.py --runs FILE [-o triax/plan/calibration.json]

The parts of each run are computed once; then logarithms of eight factors are fitted, in levels (see
``triax.plan.calibration``), by least absolute deviations with a normal prior on each. Errors are of runs left out: a
tenth of the configurations at a time, a whole source, or a whole family of frameworks.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.published_networks import Unclear
from benchmarks.published_rows import Row, measured_step_s, read, understood
from triax.plan.calibration import FORMAT_VERSION, Calibration, Stack, stack_of
from triax.plan.parts import Parts, parts
from triax.plan.step import FACTOR_NAMES, Factors, combine

NOISE: Final = 0.04
"""Spread of repeated runs across releases: 5.9 % median of pairs."""
FACTOR_SD: Final = {
    "compute": 1.0, "attention": 1.0, "memory": 1.5, "host": 1.0, "inside": 1.5, "across": 2.0, "fixed": 2.0,
    "jitter": 0.7,
}  # fmt: skip
"""How much freer a factor is than that of compute."""


@dataclass(frozen=True)
class Runs:
    """Rows that are understood and were measured."""

    rows: list[Row]
    parts: Parts
    stacks: list[Stack]
    log_measured: NDArray[np.float64]
    weight: NDArray[np.float64]


def gathered(path: Path, keep: Callable[[Row], bool] = lambda row: row.quality != "C") -> Runs:
    """Return the rows of ``path`` that are to be fitted."""
    rows, pieces, measured = [], [], []
    for raw in read(path):
        try:
            row = understood(raw)
        except Unclear:
            continue
        seconds = measured_step_s(raw, row)
        if seconds is None or not keep(row) or raw.get("oom") == "y":
            continue
        rows.append(row)
        pieces.append(parts(row.network, row.workload, row.machine, row.engine, row.candidates))
        measured.append(np.log(seconds))
    counts = Counter(row.set for row in rows)
    weight = np.array([min(1.0, (60.0 / counts[row.set]) ** 0.5) for row in rows])
    stacks = [stack_of(r.network, r.workload, r.machine.card, r.engine, r.stack, r.release) for r in rows]
    return Runs(rows, Parts.joined(pieces), stacks, np.array(measured), weight)


def level_sd(level: str, factor: str) -> float:
    """Return the prior standard deviation of a factor's logarithm in a level; 0 where the level has none of it.

    Narrow levels say how fast a stack is, wide ones also what it spends its time on.
    """
    word = level.split()[0]
    narrow = level.count(" ")
    if "release" in level:
        mixed = "moe" in level or "hybrid" in level
        return {"compute": 0.2 if mixed else 0.06, "host": 0.3 if mixed else 0.0}.get(factor, 0.0)
    if factor == "host" and (word not in ("family", "engine") or "card" in level):
        return 0.0
    if word == "stack":
        return 0.15 if factor == "compute" else 0.0
    if narrow > 4:
        return 0.1 * FACTOR_SD[factor] if factor in ("compute", "inside", "across") else 0.0
    if "width" in level:
        return 0.1 * FACTOR_SD[factor] if factor in ("compute", "memory") else 0.0
    return {"all": 0.15, "lora": 0.2}.get(word, 0.1) * FACTOR_SD[factor]


def fit(runs: Runs, chosen: NDArray[np.int64], rounds: int = 8) -> Calibration:
    """Return the calibration that the chosen runs support.

    Iteratively reweighted Gauss-Newton: residuals of logarithms have a long tail, and a few odd runs should not bend
    the rest. Runs of equal levels share one block of the normal equations.
    """
    some, target, weight = runs.parts.take(chosen), runs.log_measured[chosen], runs.weight[chosen]
    patterns = {levels: index for index, levels in enumerate(dict.fromkeys(runs.stacks[i].levels() for i in chosen))}
    pattern = np.array([patterns[runs.stacks[i].levels()] for i in chosen])
    names = sorted({level for levels in patterns for level in levels})
    column = {level: index for index, level in enumerate(names)}
    members = [np.array([column[level] for level in levels]) for levels in patterns]
    width, count = len(names), len(FACTOR_NAMES)
    sds = np.array([[level_sd(level, name) for level in names] for name in FACTOR_NAMES]).reshape(-1)
    free = np.flatnonzero(sds)
    prior = np.where(sds > 0, 1 / np.maximum(sds, 1e-9) ** 2, 1.0)
    theta = np.zeros((count, width))
    for _ in range(rounds):
        logs = np.stack([theta[:, member].sum(axis=1) for member in members])[pattern]
        base = predicted(some, logs)
        slopes = np.stack([(predicted(some, logs + 0.02 * np.eye(count)[k]) - base) / 0.02 for k in range(count)])
        residual = target - base
        scale = weight / np.maximum(np.abs(residual) / NOISE, 0.5) / NOISE**2
        normal, gradient = np.diag(prior).reshape(count, width, count, width), -(prior.reshape(count, width) * theta)
        for index, member in enumerate(members):
            of = pattern == index
            block = (slopes[:, of] * scale[of]) @ slopes[:, of].T
            side = (slopes[:, of] * scale[of]) @ residual[of]
            normal[:, member[:, None], :, member[None, :]] += block[None, None]
            gradient[:, member] += side[:, None]
        move = np.zeros(count * width)
        square = normal.reshape(count * width, -1)[np.ix_(free, free)]
        move[free] = np.linalg.solve(square, gradient.reshape(-1)[free])
        theta = theta + np.clip(move, -0.5, 0.5).reshape(theta.shape)
    return Calibration(
        {level: {name: float(theta[k, column[level]]) for k, name in enumerate(FACTOR_NAMES)} for level in names}
    )


def predicted(some: Parts, logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm of the step time of each entry under logarithms of factors (entry, factor)."""
    factors = Factors(**{name: np.exp(logs[:, k]) for k, name in enumerate(FACTOR_NAMES)})
    result: NDArray[np.float64] = np.log(combine(some, factors).step_s)
    return result


def applied(runs: Runs, calibration: Calibration, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return log(predicted / measured) of the chosen runs."""
    factors = calibration.factors([runs.stacks[index] for index in chosen])
    return np.log(combine(runs.parts.take(chosen), factors).step_s) - runs.log_measured[chosen]


def held_out(runs: Runs, groups: Sequence[Any]) -> NDArray[np.float64]:
    """Return log(predicted / measured) of every run, each predicted without its group."""
    errors = np.zeros(len(runs.rows))
    labels = np.array([str(group) for group in groups])
    for label in sorted(set(labels)):
        errors[labels == label] = applied(
            runs, fit(runs, np.flatnonzero(labels != label)), np.flatnonzero(labels == label)
        )
    return errors


def folds(runs: Runs, count: int = 10) -> list[int]:
    """Return a fold for each run: runs of one configuration share one."""
    order = {config: index for index, config in enumerate(sorted({row.config for row in runs.rows}))}
    shuffled = np.random.default_rng(0).permutation(len(order))
    return [int(shuffled[order[row.config]] % count) for row in runs.rows]


def table(runs: Runs, errors: NDArray[np.float64], by: Callable[[Row], str] = lambda row: row.set) -> str:
    """Return median, p90 and bias in percent, by set."""
    lines = [f"{'set':<42}{'rows':>5}{'median':>8}{'p90':>8}{'bias':>8}"]
    labels = np.array([by(row) for row in runs.rows])
    for label in [*sorted(set(labels)), "all"]:
        some = errors[(labels == label) | (label == "all")]
        off = np.abs(np.expm1(some)) * 100
        lines.append(
            f"{label:<42}{len(some):>5}{np.median(off):>8.1f}{np.quantile(off, 0.9):>8.1f}"
            f"{np.expm1(np.median(some)) * 100:>8.1f}"
        )
    return "\n".join(lines)


def spreads(runs: Runs, errors: NDArray[np.float64], unknown: NDArray[np.float64], least: int = 12) -> dict[str, float]:
    """Return the held-out 80th percentile of each level with rows enough, shrunk to that of all rows."""
    members: dict[str, list[int]] = {}
    for index, stack in enumerate(runs.stacks):
        for level in stack.levels():
            members.setdefault(level, []).append(index)
    overall = float(np.quantile(np.abs(errors), 0.8))
    found = {"unknown": float(np.quantile(np.abs(unknown), 0.8))}
    rare = [i for i, stack in enumerate(runs.stacks) if len(members[f"stack {stack.framework}"]) < least]
    if rare:
        found["few"] = float(np.quantile(np.abs(errors[rare]), 0.8))
    for level, indices in members.items():
        if len(indices) >= least and not level.startswith(("all", "width", "kind")):
            own = float(np.quantile(np.abs(errors[indices]), 0.8))
            found[level] = float(np.exp((len(indices) * np.log(own) + 8 * np.log(overall)) / (len(indices) + 8)))
    return found


def as_json(calibration: Calibration, spread: dict[str, float], about: str) -> dict[str, Any]:
    """Return a calibration as the file holds it; logarithms too small to matter are left out."""
    levels = {
        level: kept
        for level, logs in calibration.levels.items()
        if (kept := {name: round(log, 4) for name, log in logs.items() if abs(log) > 5e-4})
    }
    rounded = {level: round(each, 4) for level, each in spread.items()}
    return {"format_version": FORMAT_VERSION, "about": about, "levels": levels, "spread": rounded}


def main() -> None:
    """Fit, print errors of runs left out, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("-o", "--out", type=Path, help="where the calibration goes")
    parser.add_argument("--without-families", type=Path, help="where those go that know nothing of one family")
    given = parser.parse_args()
    runs = gathered(given.runs)
    every = np.arange(len(runs.rows))
    print("nothing calibrated\n" + table(runs, applied(runs, Calibration(), every)))
    by_fold = held_out(runs, folds(runs))
    print("\na tenth of the configurations left out\n" + table(runs, by_fold))
    by_source = held_out(runs, [row.set.split("/")[0] for row in runs.rows])
    print("\na source left out\n" + table(runs, by_source))
    families = np.array([stack.family for stack in runs.stacks])
    by_family, without = np.zeros(len(every)), {}
    for family in sorted(set(families)):
        known = fit(runs, np.flatnonzero(families != family))
        by_family[families == family] = applied(runs, known, np.flatnonzero(families == family))
        without[family] = known
    print("\na family of frameworks left out\n" + table(runs, by_family))
    spread = spreads(runs, by_fold, by_family)
    about = f"fitted to {len(runs.rows)} published runs by benchmarks/fit_planner.py"
    if given.out:
        value = as_json(fit(runs, every), spread, about)
        given.out.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if given.without_families:
        unknown = {"unknown": spread["unknown"]}
        values = {family: as_json(known, unknown, f"{about}, without {family}") for family, known in without.items()}
        given.without_families.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
