"""How is a dry run told on a page of text? Lines of a hundred columns; those without an indent are headings."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from triax.spec.schedule import build
from triax.spec.stages import stage_layers
from triax.units import format_bytes, format_count
from triax.verify.dryrun import DryRun
from triax.verify.ledger import Moment
from triax.verify.traffic import Collective, Link

WIDTH: Final = 100
_BAR: Final = 30
_HEIGHTS: Final = "▁▂▃▄▅▆▇█"
_MOST_ACTIONS: Final = 60
"""Actions of the schedule that a page shows; ``--json`` has all."""


def page(dry: DryRun) -> Iterator[str]:
    """Yield the lines of the page."""
    layout, step, peak = dry.layout, dry.step, dry.step.peak
    cluster = dry.cluster
    yield (
        f"{layout.describe_rank(dry.rank)} of {layout.describe()} on {cluster.servers} x {cluster.cards_per_server} "
        + (cluster.device)
    )
    yield (
        f"  {_held_by(dry)}; a step is {layout.microbatches} microbatches of {layout.sequences_per_microbatch} x "
        f"{dry.run.data.seq_len:,} tokens"
    )
    yield f"what it holds at its peak, {format_bytes(peak.peak_bytes)}, {_where(peak)}"
    for name, held in peak.held.items():
        if held:
            yield _bar(name.replace("_", " "), held, peak.peak_bytes)
    yield "how that comes about"
    yield from _over_time(step.moments)
    yield "what it sends and receives, as payload of whole tensors"
    yield from _traffic(step.collectives)
    yield "what it computes"
    yield f"  {format_count(step.total_flops)} FLOP in matrix products: " + ", ".join(
        f"{format_count(count)} in {name}" for name, count in _by_kind(step.flops).items()
    )
    yield "in which order"
    shown = [str(action) for action in step.actions[:_MOST_ACTIONS]]
    more = len(step.actions) - len(shown)
    yield from _wrapped(" ".join(shown) + (f" ... and {more} more" if more else ""))
    yield "what this rests on"
    yield from _wrapped(
        "The engine itself took this step, on tensors without memory, in its first step as in any. Every token counts"
        + (", and experts are routed to equally" if dry.run.model.experts is not None else "")
        + ". What libraries and the allocator take beside is not in it."
    )


def as_json(dry: DryRun) -> dict[str, Any]:
    """Return everything as plain values."""
    step = dry.step
    return {
        "format_version": 1,
        "rank": dry.rank,
        "coordinate": dry.layout.coordinate(dry.rank)._asdict(),
        "layout": dry.layout.model_dump(mode="json"),
        "cluster": dry.cluster.model_dump(mode="json"),
        "peak_bytes": step.peak.peak_bytes,
        "peak": _moment(step.peak),
        "moments": [_moment(moment) for moment in step.moments],
        "collectives": [
            {
                "kind": each.kind, "axis": each.axis, "peers": list(each.peers), "link": each.link,
                "dtype": each.dtype, "payload_bytes": each.payload_bytes, "phase": each.phase,
                "is_of_setup": each.is_of_setup,
            }
            for each in step.collectives
        ],
        "flops": step.total_flops,
        "flops_by_phase": step.flops,
        "actions": [str(action) for action in step.actions],
    }  # fmt: skip


def _moment(moment: Moment) -> dict[str, Any]:
    return {
        "phase": moment.phase.name, "module": moment.module, "peak_bytes": moment.peak_bytes, "held": moment.held,
    }  # fmt: skip


def _held_by(dry: DryRun) -> str:
    """Return which stages and layers the rank has."""
    layout, model = dry.layout, dry.run.model
    table = build(layout.schedule, layout.pp, layout.stages_per_rank, layout.microbatches)
    layers = stage_layers(model, table.num_stages, layout.stage_cuts)
    mine = table.stages_of(layout.coordinate(dry.rank).pp)
    spans = [_span(layers[stage]) for stage in mine]
    return f"stage{'s' if len(mine) > 1 else ''} {', '.join(map(str, mine))} with {' and '.join(spans)}"


def _span(layers: Sequence[int]) -> str:
    if not layers:
        return "no layers"
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"


def _where(moment: Moment) -> str:
    at = f", at {moment.module}" if moment.module else ""
    return f"in the {moment.phase.name}{at}" if moment.phase.is_action else f"while {moment.phase.name}{at}"


def _bar(name: str, value: int, total: int) -> str:
    bar = "█" * max(round(_BAR * value / total), 1 if value > 0.01 * total else 0)
    return f"  {name:<20}{format_bytes(value):>12} {value / total:>6.1%} {bar}".rstrip()


def _over_time(moments: Sequence[Moment]) -> Iterator[str]:
    """Yield a line of heights, one for each action, and the moments that none before was as full as."""
    actions = [moment for moment in moments if moment.phase.is_action]
    top = max((moment.peak_bytes for moment in moments), default=1) or 1
    heights = "".join(_HEIGHTS[min(8 * moment.peak_bytes // top, 7)] for moment in actions)
    yield from (f"  {heights[at : at + WIDTH - 2]}" for at in range(0, len(heights), WIDTH - 2))
    most = 0
    rising = []
    for moment in moments:
        if moment.peak_bytes > 1.01 * most:
            most = moment.peak_bytes
            rising.append(moment)
    for moment in rising[-8:]:
        yield f"  {format_bytes(moment.peak_bytes):>12}  {_where(moment)}"


def _traffic(collectives: Sequence[Collective]) -> Iterator[str]:
    counts: Counter[tuple[str, str, Link, int]] = Counter()
    sizes: Counter[tuple[str, str, Link, int]] = Counter()
    for each in collectives:
        if not each.is_of_setup:
            key = (each.axis, each.kind, each.link, len(each.peers))
            counts[key] += 1
            sizes[key] += each.payload_bytes
    if not counts:
        yield "  nothing"
    for key in sorted(counts, key=lambda key: -sizes[key]):
        axis, kind, link, ranks = key
        place = "inside a server" if link == "inside" else "across servers"
        among = f"{axis:<12} {kind:<15} {ranks:>5} ranks {place:<16}"
        yield f"  {among} {counts[key]:>6} times {format_bytes(sizes[key]):>12}"


def _by_kind(flops: Mapping[str, int]) -> dict[str, int]:
    """Return operations by kind of action: what stands before `` of stage`` in a phase."""
    kinds: Counter[str] = Counter()
    for phase, count in flops.items():
        kinds[phase.partition(" of stage")[0]] += count
    return dict(kinds)


def _wrapped(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
