"""Do the best layouts of a plan fit by what the engine itself asks for? Dry runs of their first and last stages."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from triax.errors import BadInput
from triax.plan.answer import Answer
from triax.plan.candidates import Candidates
from triax.spec.cluster import Cluster
from triax.spec.faults import validated
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.units import format_bytes
from triax.verify.dryrun import dry_run

MOST_TRIED: Final = 4
"""Layouts that are looked at before the plan gives up."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What a dry run says of one rank of one layout, beside what was predicted."""

    layout: Layout
    rank: int
    predicted_bytes: float
    """Allocated at the peak, as the plan predicts it for this pipeline rank."""
    dry_run_bytes: float
    """The same as a dry run finds it, with the scratch space of libraries that is predicted."""
    needed_bytes: float
    """The least that the process can do with, corrected by the difference of the two."""
    fits: bool


def confirm(answer: Answer) -> tuple[Answer, list[Confirmation]]:
    """Return ``answer`` without the layouts that do not fit by their dry runs, and what these found.

    Layouts are tried in the order of the plan, until one fits. Raises BadInput where none of the first ``MOST_TRIED``
    does, and where triax would not train what is planned.
    """
    question = answer.question
    if question.model.spec is None:
        raise BadInput(
            f"--confirm lets triax take a step, and triax does not train {question.model.name}: leave it out."
        )
    if question.case.engine.name != "triax":
        raise BadInput(
            f"--confirm lets triax take a step, and this plan is for {question.case.engine.name}: use --engine triax."
        )
    if question.case.workload.lora_rank:
        raise BadInput("--confirm takes a step that trains all weights: leave out --for finetune, or --confirm.")
    run = question.run or _run_of(answer)
    found: list[Confirmation] = []
    for index in range(min(MOST_TRIED, len(answer.ranking))):
        of_layout = list(_confirmations(answer, run, index))
        found += of_layout
        if all(each.fits for each in of_layout):
            left = answer.ranking.take(np.arange(index, len(answer.ranking)))
            return replace(answer, ranking=left), found
    worst, tried = max(found, key=lambda each: each.needed_bytes), min(MOST_TRIED, len(answer.ranking))
    usable = answer.ranking.memory.usable_bytes
    raise BadInput(
        f"none of the {tried} best layouts fits by its dry run: {worst.layout.describe()} needs "
        f"{format_bytes(worst.needed_bytes)} of {format_bytes(usable)} on rank {worst.rank}; fix more with --layout, "
        f"such as recompute=full, or use more cards."
    )


def _confirmations(answer: Answer, run: Run, index: int) -> Iterator[Confirmation]:
    case = answer.question.case
    candidate: Candidates = answer.ranking.candidates.take([index])
    layout = candidate.layout(0)
    for pipeline_rank in sorted({0, layout.pp - 1}):
        here = layout.coordinate(0)._replace(pp=pipeline_rank)
        rank = layout.rank(here)
        memory = case.walked_memory(candidate, pipeline_rank=pipeline_rank, imbalance=1.0)
        predicted = float(memory.allocated_bytes[0])
        seen = peak_bytes(run, layout, answer.question.cluster, rank) + float(memory.workspaces[0])
        needed = float(memory.needed_bytes[0]) + seen - predicted
        fits = needed <= memory.usable_bytes * (1 - memory.margin)
        yield Confirmation(layout, rank, predicted, seen, needed, fits)


def peak_bytes(run: Run, layout: Layout, cluster: Cluster, rank: int) -> int:
    """Return the peak of ``rank`` by dry runs of few microbatches, where the step has many.

    Once a pipeline is full, each further microbatch adds the same: what stages have sent to each other is held until
    the schedule ends. Two lengths of the step beyond that give the rest of the line.
    """
    unit = layout.pp
    short = 3 * unit * layout.stages_per_rank + (0 if layout.pp > 1 else 1)
    if layout.microbatches <= short + unit:
        return dry_run(run, layout, cluster, rank).step.peak.peak_bytes
    peaks = [_peak_with(run, layout, cluster, rank, count) for count in (short, short + unit)]
    return peaks[0] + (peaks[1] - peaks[0]) * (layout.microbatches - short) // unit


def _peak_with(run: Run, layout: Layout, cluster: Cluster, rank: int, microbatches: int) -> int:
    fewer = layout.model_copy(update={"microbatches": microbatches})
    train = run.train.model_copy(update={"sequences_per_step": fewer.sequences_per_step, "tokens_per_step": None})
    return dry_run(run.model_copy(update={"train": train}), fewer, cluster, rank).step.peak.peak_bytes


def _run_of(answer: Answer) -> Run:
    """Return a run of the planned model, whose data is nowhere: only its sizes matter."""
    workload = answer.question.case.workload
    said = {
        "model": answer.question.model.spec,
        "data": {"train": ("nowhere",), "seq_len": workload.seq_len},
        "train": {"steps": 1, "sequences_per_step": workload.sequences_per_step},
        "precision": {"compute": workload.precision.recipe},
    }
    return validated(Run, said, "what is planned")


def lines(found: Sequence[Confirmation]) -> Iterator[str]:
    """Yield the part of a plan's page that tells of dry runs."""
    yield "what dry runs say"
    for each in found:
        off = each.dry_run_bytes / each.predicted_bytes - 1
        verdict = "fits" if each.fits else "does not fit, and is left out"
        yield (
            f"  {each.layout.describe()}, rank {each.rank}: {format_bytes(each.dry_run_bytes)} allocated, "
            f"{format_bytes(each.predicted_bytes)} predicted ({off:+.1%}): {verdict}"
        )


def as_json(found: Sequence[Confirmation]) -> list[dict[str, Any]]:
    """Return the same as plain values."""
    return [asdict(each) | {"layout": each.layout.model_dump(mode="json")} for each in found]
