"""How is an answer told on a page of text? Lines of a hundred columns; those without an indent are headings."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from triax.plan.alternatives import TERMS
from triax.plan.answer import Answer
from triax.plan.ask import Question
from triax.plan.catalogue import title
from triax.plan.explain import placement
from triax.plan.inference import Serving
from triax.plan.inverse import Sized
from triax.units import format_bytes, format_count, format_seconds

WIDTH: Final = 100
_BAR: Final = 30


def page(answer: Answer) -> Iterator[str]:
    """Yield the lines of the page; those without an indent are headings."""
    yield from top(answer.question)
    yield from _chosen(answer)
    yield from _bars("where a step's time goes", answer.seconds, answer.step_s, format_seconds, TERMS)
    total = sum(answer.bytes.values())
    yield from _bars(f"what the fullest card holds, {answer.peak_at}", answer.bytes, total, format_bytes, {})
    yield "why"
    for reason in answer.reasons:
        yield from _paragraph(reason.topic, reason.text)
    if answer.others:
        yield "what else there is"
        for other in answer.others:
            yield from _paragraph(format_seconds(other.step_s), f"{other.layout.describe()}: {other.reason}")
    if answer.refused:
        yield "what cannot be"
        for each in answer.refused:
            yield from _paragraph("", f"{each.what}: {each.why}.")
    yield from _foot(answer)


def top(question: Question) -> Iterator[str]:
    """Yield what the plan is of."""
    case, workload = question.case, question.case.workload
    weights = format_count(case.network.parameters)
    active = case.network.active_parameters
    of_each = "" if active == case.network.parameters else f", {format_count(active)} of them for each token"
    yield f"{question.model.name} ({weights} weights{of_each}) on {case.machine.name} ({title(case.machine.card.name)})"
    yield (
        f"  a step is {workload.sequences_per_step:,} sequences of {workload.seq_len:,} tokens = "
        f"{format_count(workload.tokens_per_step)} tokens, in {workload.precision.recipe}, by {case.engine.name}"
    )


def _chosen(answer: Answer) -> Iterator[str]:
    case, layout, found = answer.question.case, answer.layout, answer.predictions()
    step, memory = found["step_s"], found["peak_needed_bytes"]
    usable = case.machine.card.memory_bytes
    yield "the layout"
    yield f"  {layout.describe()}"
    yield (
        f"  {layout.microbatches} microbatches of {layout.sequences_per_microbatch} on each of {layout.data_ranks} "
        f"data ranks; outermost first: {placement(answer.ranking.candidates, 0)}"
    )
    tokens = found["tokens_per_sec"].value
    yield (
        f"  step    {format_seconds(step.value)} ({format_seconds(step.low)} to {format_seconds(step.high)} in 80 % of "
        f"cases), {format_count(tokens)} tokens/s, {tokens / case.machine.cards:,.0f} a card"
    )
    yield f"  cards   reach {found['mfu'].value:.0%} of their peak in what the mathematics needs"
    yield (
        f"  memory  {format_bytes(memory.value)} ({format_bytes(memory.low)} to {format_bytes(memory.high)}) of "
        f"{format_bytes(usable)}"
    )
    yield from _cost(answer)


def _cost(answer: Answer) -> Iterator[str]:
    spent, good = answer.cost_at(answer.step_s), answer.goodput
    what = f"{format_count(spent.tokens)} tokens"
    yield (
        f"  cost    {what} take {_long(spent.hours * 3600)}, {format_count(spent.card_hours)} card-hours, "
        f"${format_count(spent.usd)}, {format_count(spent.kwh)} kWh"
    )
    yield (
        f"  useful  {good.fraction:.1%} of the time: a failure every {_long(good.failure_s)}, a save every "
        f"{_long(good.interval_s)}"
    )


def _long(seconds: float) -> str:
    """Return a duration that may be many days."""
    return format_seconds(seconds) if seconds < 48 * 3600 else f"{seconds / 86400:,.1f} days"


def _bars(
    name: str, parts: dict[str, float], total: float, show: Callable[[float], str], words: Mapping[str, str]
) -> Iterator[str]:
    yield name
    for key, value in parts.items():
        if value > 0.0005 * total:
            bar = "█" * max(round(_BAR * value / total), 1 if value > 0.01 * total else 0)
            yield f"  {words.get(key, key):<40}{show(value):>12} {value / total:>6.1%} {bar}".rstrip()


def _paragraph(label: str, text: str) -> Iterator[str]:
    indent = "  " if not label else f"  {label}: "
    yield from textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent="      ", break_on_hyphens=False)


def _foot(answer: Answer) -> Iterator[str]:
    yield "what this rests on"
    ranking = answer.ranking
    yield f"  {ranking.considered:,} layouts were compared, {ranking.priced:,} priced in full; the others are slower."
    yield f"  Times are calibrated on: {answer.question.case.rests_on}."
    if answer.question.assumed:
        yield from _paragraph("assumed", "; ".join(answer.question.assumed) + ".")


def sizes_page(question: Question, tried: Sequence[Sized], chosen: Sized | None, wish: str) -> Iterator[str]:
    """Yield the answer to how many cards are needed."""
    yield from top(question)
    yield "how many cards"
    for each in tried:
        layout = each.ranking.candidates.layout(0)
        mark = "->" if each is chosen else "  "
        days = _long(each.cost.hours * 3600)
        yield (
            f"{mark} {each.cards:>6} cards {format_seconds(float(each.ranking.step_s[0])):>12} a step {days:>14} "
            f"${format_count(each.cost.usd):>7}  {layout.describe()}"
        )
    yield f"  {wish}"


def inference_page(question: Question, servings: Iterable[Serving], precision: str) -> Iterator[str]:
    """Yield what it takes to let the model answer."""
    rows = list(servings)
    first, last = rows[0], rows[-1]
    case = question.case
    yield f"{question.model.name} ({format_count(case.network.parameters)} weights) answering in {precision} on " + (
        f"{case.machine.card.name}"
    )
    held = f"{format_bytes(first.weights_bytes)} of weights on each"
    yield f"  {first.cards} cards hold one copy: tp={first.tp} pp={first.pp}, {held}"
    yield f"  sequences of {first.context:,} tokens, {first.prompt_tokens_per_s:,.0f} tokens/s of prompt"
    yield "at once    a token every   tokens/s together   keys and values     $ a million tokens"
    for row in rows:
        yield (
            f"  {row.batch:>6}   {format_seconds(row.token_s):>12}   {row.tokens_per_s:>17,.0f}   "
            f"{format_bytes(row.cache_bytes):>15}   {row.usd_per_million_tokens:>20,.2f}"
        )
    yield "why"
    share = first.usd_per_million_tokens / last.usd_per_million_tokens
    sentences = [
        f"Each token reads all the weights it uses once, so one sequence alone is bound by the memory's rate: "
        f"{1 / first.token_s:,.0f} tokens/s, however many operations the cards could do."
    ]
    if last.batch > first.batch:
        sentences.append(
            f"{last.batch} sequences share that reading and cost {share:,.0f} times less a token; more do not fit, "
            f"since keys and values of each take {format_bytes(last.cache_bytes / last.batch)} on a card."
        )
    yield from _paragraph("", " ".join(sentences))
    yield from _paragraph("assumed", f"${question.usd:.2f} for a card and hour, all of it used.")
