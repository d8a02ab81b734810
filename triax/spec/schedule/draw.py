"""What does a schedule look like in a terminal?"""

from collections.abc import Iterator
from statistics import fmean

from triax.spec.schedule.price import Timeline, price
from triax.spec.schedule.table import ScheduleTable
from triax.units import format_seconds


def draw(table: ScheduleTable, timeline: Timeline | None = None, width: int = 120) -> str:
    """Return the table as plain text, a row per rank and time to the right, in bands of at most ``width`` columns.

    Without a ``timeline`` the axis is in forwards (``unit_cost``). Labels are those of the text form, without the
    stage where a rank has only one: ``F3`` is the forward of microbatch 3, ``0F3+3B1`` an overlapped pair. Before each
    row: the share of time that the rank idles, and the most microbatches x stages it holds at once.
    """
    timed = timeline or price(table)
    length = f"{timed.makespan_s:g} forwards" if timeline is None else format_seconds(timed.makespan_s)
    stages = f"{table.num_stages} stages" if table.num_stages > 1 else "1 stage"
    microbatches = f"{table.microbatches} microbatch" + ("es" if table.microbatches > 1 else "")
    title = (
        f"{table.name}: pp={table.pp}, {stages}, {microbatches}; "
        f"one step lasts {length}, {timed.mean_bubble_fraction:.1%} of it idle"
    )
    heads = [
        f"{f'rank {rank}':<8} {timed.bubble_fraction(rank):>6.1%} {table.max_in_flight(rank):>5} |"
        for rank in range(table.pp)
    ]
    scale, cell = _columns_per_second(timed)
    bodies = [_row(timed, rank, scale) for rank in range(table.pp)]
    # Bands end where a shortest slot would, so that with equal costs few labels are cut in two.
    room = max((width - len(heads[0])) // cell, 1) * cell
    lines = [title, f"{'':<8} {'idle':>6} {'holds':>5} |"]
    for left in range(0, max(map(len, bodies)), room):
        if left:
            lines.append("")
        lines += [(head + body[left : left + room]).rstrip() for head, body in zip(heads, bodies, strict=True)]
    return "\n".join(lines) + "\n"


def _spans(timeline: Timeline, rank: int) -> Iterator[tuple[str, float, float]]:
    """Yield label, start and end of every slot of ``rank``."""
    table = timeline.table
    for slot, start, end in zip(table.rows[rank], timeline.start_s[rank], timeline.end_s[rank], strict=True):
        labels = [
            str(action) if table.stages_per_rank > 1 else str(action)[len(str(action.stage)) :] for action in slot.parts
        ]
        yield "+".join(labels), start, end


def _columns_per_second(timeline: Timeline) -> tuple[float, int]:
    """Return a scale that shows labels whole unless some slots are far shorter than most, and the shortest's width."""
    spans = [
        (end - start, len(label) + 1)
        for rank in range(timeline.table.pp)
        for label, start, end in _spans(timeline, rank)
        if end > start
    ]
    if not spans:
        return 0.0, 1
    readable = max(columns / duration for duration, columns in spans)
    bearable = 4 * max(columns for _, columns in spans) / fmean(duration for duration, _ in spans)
    scale = min(readable, bearable)
    return scale, max(round(min(spans)[0] * scale), 1)


def _row(timeline: Timeline, rank: int, scale: float) -> str:
    text = ""
    for label, start, end in _spans(timeline, rank):
        left, room = round(start * scale), max(round(end * scale) - round(start * scale) - 1, 0)
        text = text.ljust(left) + label[:room].ljust(room, "-")
    return text
