"""Why this layout? Plain sentences from numbers; each appears only where its numbers make it true."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from triax.plan.alternatives import ACROSS, TERMS, best_of, one_row, why_not_tensor
from triax.plan.candidates import CP_METHODS, FULL, SCHEDULE_NAMES, Candidates
from triax.plan.case import Case
from triax.plan.inverse import context_pays_from, network_speeds
from triax.plan.legal import ZERO_STAGES, legal_mask
from triax.plan.memory import Memory
from triax.plan.search import Ranking
from triax.plan.step import WATERFALL
from triax.plan.walk import walked
from triax.spec.layout import AXES
from triax.spec.legal_values import both, divisors
from triax.units import format_bytes, format_count, format_seconds

LORA_RANK: Final = 16
QLORA_BYTES: Final = 0.516
"""Of one weight: 4 bits, and constants that are quantised again (arXiv:2305.14314, section 3)."""
_TEXTBOOK: Final = {1: "towards 4x", 2: "towards 8x"}
"""With two-byte gradients, as ranks become many (arXiv:1910.02054, figure 1)."""
_MOST_COMPARED: Final = 300_000
"""Layouts of a question up to which it is asked again for longer sequences."""
_SHOWS: Final = 0.005
"""A part of a step below it is not worth a sentence."""

Money = Callable[[float], str]
"""What a run costs in words, such as "$1.2M", by the seconds of its step."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A few sentences on one topic."""

    topic: str
    text: str


def explain(ranking: Ranking, money: Money) -> list[Reason]:
    """Return why the first layout of ``ranking`` is the one to take, for somebody who splits a model the first time."""
    topics = (
        ("fit", _fit(ranking)), ("first cut", _first_cut(ranking)), ("tensor parallel", _tensor(ranking, money)),
        ("context parallel", _context(ranking)), ("expert parallel", _experts(ranking)), ("ZeRO", _sharing(ranking)),
        ("pipeline", _pipeline(ranking)), ("memory", _recompute(ranking)),
        ("what binds", _binds(ranking)), ("fine-tuning", _adapters(ranking)), ("replicas", _replicas(ranking)),
    )  # fmt: skip
    told = ((topic, " ".join(sentences)) for topic, sentences in topics)
    return [Reason(topic, text) for topic, text in told if text]


def _alone(case: Case) -> tuple[Case, Memory]:
    """Return the case on one card, and its bytes with one sequence at a time and everything recomputed."""
    one = case.on_cards(1)
    row = Candidates.of(
        1, microbatches=case.workload.sequences_per_step, recompute=FULL, zero=min(ZERO_STAGES[case.engine.family])
    )
    return one, one.memory(row)


def _states(memory: Memory, index: int = 0) -> float:
    return float(memory.weights[index] + memory.gradients[index] + memory.optimizer[index])


def _fit(ranking: Ranking) -> Iterator[str]:
    case = ranking.case
    _, memory = _alone(case)
    name, card = case.network.name or "the model", case.machine.card
    needed, weights = float(memory.needed_bytes[0]), case.network.parameters
    if memory.fits[0]:
        yield f"{name} fits one {card.name}: {format_bytes(needed)} of {format_bytes(card.memory_bytes)}."
        return
    states = _states(memory)
    yield (
        f"{name} does not fit one {card.name}: its {format_count(weights)} weights need {format_bytes(states)} with "
        f"gradients and optimizer ({states / weights:.3g} bytes each), {_times(states / card.memory_bytes)} times what "
        f"a card has."
    )


def _first_cut(ranking: Ranking) -> Iterator[str]:
    case, c = ranking.case, ranking.candidates
    cuts = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(c, axis)[0] > 1]
    data, step_s = int(c.data_ranks[0]), float(ranking.step_s[0])
    shown = float(ranking.time.dp[0])
    fits_one = bool(_alone(case)[1].fits[0])
    if case.machine.cards == 1:
        yield "With one card there is nothing to split."
    elif not cuts and fits_one:
        yield (
            f"Only speed is missing, so each of {data} cards gets other sequences and nothing inside the network is "
            f"cut: data parallel talks least, {format_seconds(shown)} of {format_seconds(step_s)} a step that nothing "
            f"hides."
        )
    elif not cuts:
        yield (
            f"Sharing weights, gradients and optimizer over {c.dp_shard[0]} cards (ZeRO-{c.zero[0]}) makes it fit, so "
            f"no matrix has to be cut; {format_seconds(shown)} of {format_seconds(step_s)} a step go into gathering "
            f"that nothing hides."
        )
    else:
        yield from _not_data_alone(ranking, cuts)


def _not_data_alone(ranking: Ranking, cuts: list[str]) -> Iterator[str]:
    case, step_s = ranking.case, float(ranking.step_s[0])
    data = best_of(case, tp=1, pp=1, cp=1, ep=1)
    if data is None:
        yield f"Data parallel alone fits in no ZeRO stage, so the network itself is cut along {both(cuts)}."
        return
    slower = float(data.step_s[0]) / step_s - 1
    if slower <= case.tie:
        plain = data.candidates.layout(0).describe()
        yield f"Data parallel alone would be as fast, as far as a prediction can tell: {plain}."
        return
    more = {name: float(getattr(data.time, name)[0] - getattr(ranking.time, name)[0]) for name in WATERFALL}
    worst = max(more, key=lambda name: more[name])
    again = ", because it must compute activations again" if worst == "compute" else ""
    yield (
        f"Data parallel alone ({data.candidates.layout(0).describe()}) would take "
        f"{format_seconds(float(data.step_s[0]))} a step instead of {format_seconds(step_s)}: "
        f"{format_seconds(more[worst])} more for {TERMS[worst]}{again}. So the network is cut along {both(cuts)} too."
    )


def _tensor(ranking: Ranking, money: Money) -> Iterator[str]:
    case, c = ranking.case, ranking.candidates
    if "tp" not in case.engine.axes or case.machine.cards == 1:
        return
    tp, step_s, spent = int(c.tp[0]), float(ranking.step_s[0]), float(ranking.time.tp[0])
    if tp > 1:
        where = "inside a server, on its fast links" if tp <= case.machine.domain else "across servers"
        yield (
            f"tp={tp} stays {where}: {format_seconds(spent)} of {format_seconds(step_s)} a step go into its exchanges, "
            f"several in each layer."
        )
    more = best_of(case, tp=2 * tp)
    if why := why_not_tensor(case, 2 * tp):
        yield f"tp={2 * tp} {why}."
    elif more is None:
        yield f"tp={2 * tp} fits in no layout."
    elif float(more.step_s[0]) > step_s * (1 + case.tie):
        yield (
            f"tp={2 * tp} would take {format_seconds(float(more.step_s[0]))} a step, "
            f"{format_seconds(float(more.time.tp[0]))} of it tensor parallel."
        )
    else:
        yield f"tp={2 * tp} would be as fast, as far as a prediction can tell."
    yield from _across(ranking if tp > 1 else more, money)


def _across(inside: Ranking | None, money: Money) -> Iterator[str]:
    """What the same degrees do with tensor parallelism across servers: the split to avoid."""
    if inside is None or inside.case.machine.cards <= inside.case.machine.domain:
        return
    case, tp = inside.case, int(inside.candidates.tp[0])
    wrong = walked(case, one_row(inside.candidates, 0, order=ACROSS))
    good_s, bad_s = float(inside.step_s[0]), float(wrong.step_s[0])
    if bad_s < 1.05 * good_s:
        return
    good, bad = (float(case.utilisation(each)) for each in (good_s, bad_s))
    yield (
        f"Across servers, tp={tp} would spend {format_seconds(float(wrong.tp[0]))} instead of "
        f"{format_seconds(float(inside.time.tp[0]))} there: {format_seconds(bad_s)} a step, the cards' utilisation "
        f"{bad:.0%} instead of {good:.0%}, and {money(bad_s)} instead of {money(good_s)}."
    )


def _context(ranking: Ranking) -> Iterator[str]:
    case, cp, step_s = ranking.case, int(ranking.candidates.cp[0]), float(ranking.step_s[0])
    if "cp" not in case.engine.axes or case.machine.cards == 1:
        return
    if cp == 1:
        yield from _context_later(ranking)
        return
    method = CP_METHODS[int(ranking.candidates.cp_method[0])]
    how = {"all_to_all": "exchanging positions for heads", "ring": "passing keys and values around",
           "all_gather": "gathering keys and values"}[method]  # fmt: skip
    how = how if case.engine.family == "triax" else "passing keys and values on"
    yield (
        f"cp={cp} cuts each sequence of {case.workload.seq_len:,} tokens into {cp} parts, and with it what is kept of "
        f"each microbatch; {how} takes {format_seconds(float(ranking.time.cp[0]))} of {format_seconds(step_s)}."
    )
    if case.engine.family == "triax":
        yield from _other_methods(ranking, method)
    whole = best_of(case, cp=1)
    if whole is None:
        yield "Whole sequences fit in no layout."
    elif (longer := float(whole.step_s[0])) > step_s * (1 + case.tie):
        plain = whole.candidates.layout(0).describe()
        yield f"With whole sequences the best ({plain}) would take {format_seconds(longer)} a step."


def _other_methods(ranking: Ranking, chosen: str) -> Iterator[str]:
    """What the same degrees would take with other ways for parts to meet."""
    case, c = ranking.case, ranking.candidates
    rows = {name: one_row(c, 0, cp_method=index) for index, name in enumerate(CP_METHODS) if name != chosen}
    legal = {name: walked(case, row) for name, row in rows.items() if legal_mask(case, row)[0]}
    told = [f"{format_seconds(float(time.step_s[0]))} with cp_method={name}" for name, time in legal.items()]
    refused = [f"cp_method={name}" for name in rows if name not in legal]
    if told:
        by_parts = "" if case.machine.card.sms == 1 else ", whose attention to a part of the keys has no fused kernel"
        yield f"It would be {both(told)}{by_parts if chosen == 'all_to_all' else ''}."
    if refused:
        yield f"{both(refused)} cannot be here: it needs heads that divide, or attention without windows."


def _context_later(ranking: Ranking) -> Iterator[str]:
    """From which length of sequences cp pays, where few enough layouts are to be compared to find out."""
    case = ranking.case
    if ranking.considered > _MOST_COMPARED or case.workload.sequences_per_step < 2:
        return
    found = context_pays_from(case)
    if found is not None:
        yield (
            f"Sequences of {case.workload.seq_len:,} tokens stay whole. In steps of as many tokens, the best layout "
            f"cuts sequences from about {found.seq_len:,} tokens on (cp={found.cp})."
        )


def _experts(ranking: Ranking) -> Iterator[str]:
    case, ep, experts = ranking.case, int(ranking.candidates.ep[0]), ranking.case.network.experts
    if experts is None or "ep" not in case.engine.axes or case.machine.cards == 1:
        return
    if ep == 1:
        yield from _experts_together(ranking)
        return
    where = "inside a server" if ep <= case.machine.domain else "across servers"
    yield (
        f"ep={ep} leaves {experts.count // ep} of {experts.count} experts of a layer on each rank; sending tokens "
        f"to their {experts.per_token} experts and back, {where}, takes {format_seconds(float(ranking.time.ep[0]))} of "
        f"{format_seconds(float(ranking.step_s[0]))}."
    )


def _experts_together(ranking: Ranking) -> Iterator[str]:
    """Why each rank has all experts: what the best layout that spreads them would take."""
    case, step_s = ranking.case, float(ranking.step_s[0])
    experts = case.network.experts
    assert experts is not None
    spread = [ep for ep in divisors(experts.count) if 1 < ep <= min(case.machine.cards, case.machine.domain)]
    best = min(
        (found for ep in spread[-2:] if (found := best_of(case, ep=ep)) is not None),
        key=lambda found: float(found.step_s[0]), default=None,
    )  # fmt: skip
    if best is None:
        return
    ep, longer, spent = int(best.candidates.ep[0]), float(best.step_s[0]), float(best.time.ep[0])
    if longer > step_s * (1 + case.tie):
        yield (
            f"Every rank computes with all {experts.count} experts of a layer; spread over ep={ep} a step would take "
            f"{format_seconds(longer)}, {format_seconds(spent)} of it to send tokens to their experts and back."
        )
    else:
        yield f"Spread over ep={ep}, experts would be as fast, as far as a prediction can tell."


def _sharing(ranking: Ranking) -> Iterator[str]:
    """What each stage of ZeRO leaves on a card here, and how much of its traffic shows."""
    case, c = ranking.case, ranking.candidates
    data = int(c.data_ranks[0] * c.cp[0])
    stages = [stage for stage in ZERO_STAGES[case.engine.family] if stage]
    if c.data_ranks[0] < 2 or not stages:
        return
    rows = [one_row(c, 0, zero=0, dp_replicate=c.data_ranks[0], dp_shard=1)]
    rows += [one_row(c, 0, zero=stage, dp_replicate=1, dp_shard=c.data_ranks[0]) for stage in stages]
    # Of one pipeline rank throughout: with less shared, another one may be the fullest.
    states = [_states(case.memory(row, pipeline_rank=0)) for row in rows]
    traffic = [float(case.time(row).dp[0]) for row in rows]
    parts = [
        f"ZeRO-{stage} {format_bytes(kept)} ({_times(states[0] / kept)}x less; textbook "
        f"{_TEXTBOOK.get(stage, f'{data}x')})"
        for stage, kept in zip(stages, states[1:], strict=True)
    ]
    yield (
        f"Weights, gradients and optimizer are {format_bytes(states[0])} a card where nothing is shared; over {data} "
        f"ranks {both(parts)}."
    )
    if max(traffic) - min(traffic) > _SHOWS * float(ranking.step_s[0]):
        costs = [f"{format_seconds(each)} with ZeRO-{stage}" for stage, each in zip(stages, traffic[1:], strict=True)]
        yield f"Of the traffic, {both([f'{format_seconds(traffic[0])} without', *costs])} show in a step."


def _pipeline(ranking: Ranking) -> Iterator[str]:
    case, c = ranking.case, ranking.candidates
    pp, microbatches, step_s = int(c.pp[0]), int(c.microbatches[0]), float(ranking.step_s[0])
    if pp == 1:
        return
    idle = float(ranking.time.bubble[0])
    name = SCHEDULE_NAMES[int(c.schedule[0])]
    yield (
        f"{pp} pipeline ranks wait {format_seconds(idle)} of {format_seconds(step_s)} for each other "
        f"({idle / step_s:.1%}) with {microbatches} microbatches in schedule {name}."
    )
    plain = one_row(c, 0, schedule=SCHEDULE_NAMES.index("1F1B"), stages_per_rank=1)
    if name != "1F1B" and (longer := float(walked(case, plain).bubble[0])) > idle + _SHOWS * step_s:
        yield f"Plain 1F1B would wait {format_seconds(longer)}."
    if idle > 0.02 * step_s:
        doubled = replace(case, workload=replace(
            case.workload, sequences_per_step=2 * case.workload.sequences_per_step
        ))  # fmt: skip
        time = walked(doubled, one_row(c, 0, microbatches=2 * microbatches))
        yield (
            f"Twice the microbatches (a step of {format_count(doubled.workload.tokens_per_step)} tokens) would bring "
            f"that to {float(time.bubble[0] / time.step_s[0]):.1%}."
        )


def _recompute(ranking: Ranking) -> Iterator[str]:
    case, c, memory = ranking.case, ranking.candidates, ranking.memory
    needed, usable = float(memory.needed_bytes[0]), memory.usable_bytes
    yield f"The fullest card holds {format_bytes(needed)} of {format_bytes(usable)} ({needed / usable:.0%})."
    if not c.recompute[0]:
        return
    plain = one_row(c, 0, recompute=0)
    without = case.memory(plain)
    if not without.fits[0]:
        cost = float(ranking.step_s[0] - case.time(plain).step_s[0])
        yield (
            f"Activations are computed again in the backward, since keeping all of them would need "
            f"{format_bytes(float(without.needed_bytes[0]))}; that costs {format_seconds(max(cost, 0.0))} a step."
        )


def _binds(ranking: Ranking) -> Iterator[str]:
    step_s = float(ranking.step_s[0])
    parts = {name: float(getattr(ranking.time, name)[0]) for name in WATERFALL}
    used = float(ranking.case.utilisation(step_s))
    others = {name: seconds for name, seconds in parts.items() if name != "compute"}
    largest = max(others, key=lambda name: others[name])
    if parts["compute"] > 0.9 * step_s:
        share = parts["compute"] / step_s
        yield f"The cards' own speed binds: {share:.0%} of the step is compute, at {used:.0%} of their peak."
    else:
        yield (
            f"{parts['compute'] / step_s:.0%} of the step is compute, {others[largest] / step_s:.0%} {TERMS[largest]}; "
            f"the cards reach {used:.0%} of their peak."
        )
    speeds = {row.factor: row.best_s / float(ranking.step_s.min()) - 1 for row in network_speeds(ranking)}
    if not speeds:
        return
    if speeds[0.5] < 0.01:
        yield f"The network hardly matters: one of half the speed would cost {max(speeds[0.5], 0.0):.1%} of the step."
    else:
        yield (
            f"A network between servers of twice the speed would save {max(0.0, -speeds[2.0]):.0%} of the step, one of "
            f"half the speed would cost {speeds[0.5]:.0%}."
        )


def _adapters(ranking: Ranking) -> Iterator[str]:
    """What low-rank adapters need instead, where training all weights needs more than one card."""
    case = ranking.case
    one, memory = _alone(case)
    if memory.fits[0] or case.workload.lora_rank:
        return
    adapted = replace(one, workload=replace(one.workload, lora_rank=LORA_RANK))
    row = Candidates.of(
        1, microbatches=case.workload.sequences_per_step, recompute=FULL, zero=min(ZERO_STAGES[case.engine.family])
    )
    lora = adapted.memory(row)
    whole = float(lora.needed_bytes[0])
    frozen = case.network.parameters * 2.0
    quantised = whole - frozen + case.network.parameters * QLORA_BYTES
    usable = lora.usable_bytes * (1 - lora.margin)

    def cards(needed: float) -> str:
        count = int(np.ceil(needed / usable))
        return "one card" if count == 1 else f"{count} cards, cut like the above"

    yield (
        f"Fine-tuning needs less: low-rank adapters (LoRA, rank {LORA_RANK}) {format_bytes(whole)} and so "
        f"{cards(whole)}; on weights of 4 bits (QLoRA) {format_bytes(quantised)}, {cards(quantised)}."
    )


def _replicas(ranking: Ranking) -> Iterator[str]:
    """Whether a weight that changes silently on one card could be found."""
    if ranking.case.machine.cards > 1:
        has_experts = ranking.case.network.experts is not None
        said = ranking.candidates.layout(0).describe_replicas(has_experts=has_experts)
        yield f"{said[0].upper()}{said[1:]}."


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}".removesuffix(".0")


def placement(c: Candidates, index: int) -> str:
    """Return the axes that are cut, outermost first: neighbouring cards differ in the last one."""
    layout = c.layout(index)
    return " > ".join(axis for axis in layout.order if axis in AXES and layout.degree(axis) > 1) or "one card"
