"""How is it shown that a layout trains as one process does? Reference, ranks, and a table of what they came to."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from triax.cli.files import write_json
from triax.errors import BadInput, Interrupted, TriaxError
from triax.units import format_count

if TYPE_CHECKING:
    from rich.console import Console

    from triax.spec.layout import Layout
    from triax.spec.run import Run
    from triax.verify.finding import Finding
    from triax.verify.shrink import Case

verify_app = typer.Typer()


@verify_app.command("verify")
def verify_layout(
    target: Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file, or a plan.json.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace those of the file."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar='"pp=2 dp_shard=2 tp=2"', help="Short for layout.KEY=VALUE overrides.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Take the model whole, instead of a small one of its kind.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, max=20, help="Updates to compare.")] = 3,
    precision: Annotated[
        Literal["fp64", "fp32"], typer.Option(help="Numbers of both sides; fp64 is the proof.")
    ] = "fp64",
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE|-", help="Write every comparison as JSON; - is standard output."),
    ] = None,
) -> None:
    """Prove on this machine's CPUs that a layout trains RUN.toml as one process does; exit code 1 where it does not.

    Both train a few steps: one process by a plain loop, and local ranks in the layout by what trains any run. Losses,
    outputs, gradients, norms and weights are compared, and the first that differs is named.
    """
    from rich.console import Console

    from triax.verify.shrink import small_cases, whole_cases

    if "RANK" in os.environ:
        raise BadInput("verify starts its own ranks, and this process was started as one: run it without torchrun.")
    run, asked = _read(target, words or [], layout)
    cases = (whole_cases if full else small_cases)(run, asked, precision, steps)
    console = Console(stderr=json_file == "-", soft_wrap=True, highlight=False, markup=False, emoji=False)
    compared = [_compare(run, case, full, console) for case in cases]
    if json_file is not None:
        _write_findings(json_file, asked, precision, list(zip(cases, compared, strict=True)))
    for case, findings in zip(cases, compared, strict=True):
        first = _first(findings)
        if first is not None:
            raise TriaxError(_difference(case, first, findings))
    console.print(_agreement(asked, precision, steps, compared))


def _read(target: Path, words: list[str], layout: str | None) -> "tuple[Run, Layout]":
    """Return the run and the layout to compare, proved legal."""
    from triax.spec.check import require_legal
    from triax.spec.load import layout_words, load_plan, load_run

    overrides = [*words, *layout_words(layout or "")]
    if target.suffix == ".json":
        if overrides:
            raise BadInput(f"{target} is a plan and is taken as it is: give its run file to change {overrides[0]}.")
        plan = load_plan(target)
        run, asked = plan.run, plan.layout
    else:
        run = load_run(target, overrides)
        asked = _layout_of(run)
    require_legal(asked, run)
    return run, asked


def _layout_of(run: "Run") -> "Layout":
    """Return the layout that ``run`` has on its cluster; without one, on as many ranks as its degrees ask for."""
    from math import prod

    from triax.spec.layout import AXES
    from triax.spec.resolve import resolve_layout

    rest = run.layout.dp_replicate if run.layout.zero == 0 else run.layout.dp_shard
    if rest is None and run.cluster is not None:
        return resolve_layout(run, run.cluster.num_cards)
    return resolve_layout(run, prod(getattr(run.layout, axis) or 1 for axis in AXES))


def _compare(run: "Run", case: "Case", full: bool, console: "Console") -> "list[Finding]":
    """Train ``case`` on both sides and show how they compare."""
    from triax.launch.agent import alone, run_workers
    from triax.launch.workers import warm_up

    ranks = case.layout.world_size
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # both sides compute on CPUs
    warm_up("triax.verify.parity", num_ranks=ranks)
    console.print(_opening(run, case))

    from triax.cli.progress import preparing
    from triax.train.places import failure_of, make_places
    from triax.train.stop import StopWish, stop_signals
    from triax.verify.parity import ParityOrder, work, write_reference
    from triax.verify.sides import collected, reference_of
    from triax.verify.tokens import small_corpus

    with tempfile.TemporaryDirectory(prefix="triax-verify-") as name:
        folder = Path(name)
        corpus, what = (preparing(run), "the run's own") if full else small_corpus(run, case.run, folder / "tokens")
        console.print(f"tokens: {what}")
        trained = reference_of(case, corpus)
        write_reference(trained, folder / "reference.safetensors")
        places = make_places(folder / "places", ranks)
        order = ParityOrder(
            case.run.model_dump_json(), case.layout.model_dump_json(), corpus.address,
            str(folder / "reference.safetensors"), str(folder), str(folder / "places"),
        )  # fmt: skip
        wish = StopWish()
        with stop_signals(wish):
            ended = run_workers(work, order, alone(ranks), 0.0, lambda: 0.0 if wish.is_asked else None)
        if wish.is_asked:
            raise Interrupted("interrupted.")
        if ended.code:
            failure = failure_of(places, case.layout, ended.wordless, 0, ranks)
            reason = "a rank failed, see above." if failure.is_told else failure.sentence
            raise TriaxError(f"{case.layout.describe()} could not be compared: {reason}")
        findings = collected(case, trained, folder)
    _show(findings, console)
    return findings


def _opening(run: "Run", case: "Case") -> str:
    from triax.spec.weights import num_parameters

    sizes = []
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        before, after = getattr(run.model, key), getattr(case.run.model, key)
        sizes.append(f"{key} {after}" + (f" (of {before})" if after != before else ""))
    parameters = format_count(num_parameters(case.run.model))
    layout, run_steps = case.layout, case.run.train.steps
    return (
        f"{layout.describe()} against one process: {parameters} parameters, {', '.join(sizes)}; "
        f"{_counted(run_steps, 'step')} of {_counted(layout.microbatches, 'microbatch', 'es')} of "
        f"{layout.sequences_per_microbatch} x {case.run.data.seq_len} tokens on each data rank"
    )


def _counted(count: int, what: str, plural: str = "s") -> str:
    return f"{count} {what}{plural if count != 1 else ''}"


def _show(findings: "Sequence[Finding]", console: "Console") -> None:
    """Print a row for each step, module and weight."""
    steps = sorted({f.step for f in findings if f.kind in ("loss", "norm")})
    _print_table(
        console, ("step", "loss", "norm"),
        [(str(step), *(_cell(findings, kind, "", step) for kind in ("loss", "norm"))) for step in steps],
    )  # fmt: skip
    routes = [f for f in findings if f.kind == "routes"]
    _print_table(
        console, ("experts of", "step", "choices", "fell otherwise"),
        [(f.name, str(f.step), f"{f.choices:,}", f"{f.flips:,}") for f in routes],
    )  # fmt: skip
    modules = [f.name for f in findings if f.kind == "output"]
    _print_table(console, ("forward of", "output"), [(name, _cell(findings, "output", name)) for name in modules])
    weights = dict.fromkeys(f.name for f in findings if f.kind == "initial")
    weights |= dict.fromkeys(f.name for f in findings if f.kind in ("gradient", "weight"))
    _print_table(
        console, ("weight", "initial", "gradient", "weight after"),
        [(name, *(_cell(findings, kind, name) for kind in ("initial", "gradient", "weight"))) for name in weights],
    )  # fmt: skip


def _cell(findings: "Sequence[Finding]", kind: str, name: str, step: int | None = None) -> str:
    """Return the worst verdict on one thing, with its difference."""
    found = [f for f in findings if (f.kind, f.name) == (kind, name) and step in (None, f.step)]
    if not found:
        return ""
    worst = max(found, key=lambda f: (f.verdict == "different", f.verdict == "rounding", f.difference))
    return "equal" if worst.verdict == "equal" else f"{worst.verdict} {worst.difference:.1e}"


def _print_table(console: "Console", head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    if not console.is_terminal:
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            console.print("  ".join(cells).rstrip())
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(*head, box=None, header_style="bold", pad_edge=False)
    styles = {"different": "bold red", "equal": "dim"}
    for row in rows:
        table.add_row(*(Text(cell, styles.get(cell.split(" ")[0], "")) for cell in row))
    console.print(table)


def _first(findings: "Sequence[Finding]") -> "Finding | None":
    return next((finding for finding in findings if finding.verdict == "different"), None)


def _difference(case: "Case", first: "Finding", findings: "Sequence[Finding]") -> str:
    layout = case.layout
    wrong = sum(finding.verdict == "different" for finding in findings)
    ranks = ", ".join(layout.describe_rank(rank) for rank in first.ranks[:2])
    more = f" and {len(first.ranks) - 2} more" if len(first.ranks) > 2 else ""
    where = f" on {ranks}{more}" if ranks else ""
    return (
        f"{layout.describe()} does not train as one process does: {first.what()} is the first that differs{where} "
        f"({first.why()}); {wrong} of {len(findings)} comparisons differ."
    )


def _agreement(asked: "Layout", precision: str, steps: int, compared: "Sequence[Sequence[Finding]]") -> str:
    findings = [finding for of_case in compared for finding in of_case]
    worst = max(findings, key=lambda finding: finding.difference / finding.allowed if finding.allowed else 0.0)
    equal = sum(finding.verdict == "equal" for finding in findings)
    choices = sum(finding.choices for finding in findings)
    routes = f" None of {choices:,} choices of experts fell otherwise." if choices else ""
    return (
        f"{asked.describe()} trains as one process does: {_counted(steps, 'step')} in {precision}, {len(findings)} "
        f"comparisons, {equal} equal to the last bit and the others but for rounding; the largest is {worst.what()}, "
        f"{worst.difference:.1e} where {worst.allowed:.0e} is allowed.{routes}"
    )


def _write_findings(
    file: str, asked: "Layout", precision: str, compared: "Sequence[tuple[Case, Sequence[Finding]]]"
) -> None:
    cases: list[dict[str, Any]] = []
    for case, findings in compared:
        first = _first(findings)
        cases.append(
            {
                "layout": case.layout.model_dump(mode="json"),
                "model": case.run.model.model_dump(mode="json"),
                "steps": case.run.train.steps,
                "first_difference": None if first is None else first.as_json(),
                "comparisons": [finding.as_json() for finding in findings],
            }
        )
    said = {
        "format_version": 1, "layout": asked.model_dump(mode="json"), "precision": precision,
        "equal": all(case["first_difference"] is None for case in cases), "cases": cases,
    }  # fmt: skip
    write_json(said, file)
