"""What is needed for a wish: how few cards, how cheap, how large a model or sequence, how fast a network?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from triax.errors import BadInput
from triax.plan.case import Case
from triax.plan.cost import Cost, cost
from triax.plan.enumerate import Fixed, shapes
from triax.plan.goodput import goodput
from triax.plan.search import Ranking, may_fit, search

MOST_SERVERS: Final = 8192
"""No wish is answered with a larger cluster."""
LONGEST_ADVISED: Final = 1 << 20
"""Tokens of a sequence, the longest that advice is given for."""
_GAP: Final = 16
NETWORK_SPEEDS: Final = (0.25, 0.5, 2.0, 4.0)


@dataclass(frozen=True, eq=False)
class Sized:
    """A number of cards, its best layout, and what a run takes there."""

    cards: int
    ranking: Ranking
    cost: Cost


def fits_at_all(case: Case, fixed: Fixed | None = None) -> bool:
    """Return whether any layout of ``case`` fits: whether the smallest variant of any shape does."""
    shaped = shapes(case, fixed)
    return bool(len(shaped)) and bool(may_fit(case, shaped).any())


def sizes(case: Case, most_cards: int | None = None) -> list[int]:
    """Return numbers of cards to try, ascending: parts of a server, then powers of two servers and one and a half."""
    server = case.machine.cards_per_server
    limit = most_cards or MOST_SERVERS * server
    parts = [cards for cards in (1, 2, 4, 8, 16, 32) if cards < server and server % cards == 0]
    servers = sorted({count for power in range(14) for count in (2**power, 3 * 2**power) if count <= MOST_SERVERS})
    return [cards for cards in (*parts, *(server * count for count in servers)) if cards <= limit]


def fewest_cards(case: Case, fixed: Fixed | None = None) -> int | None:
    """Return the fewest cards of this kind on which ``case`` fits; None where none does.

    Between two of ``sizes`` that are few servers apart every number of servers is tried.
    """
    before = 0
    for cards in sizes(case):
        if fits_at_all(case.on_cards(cards), fixed):
            break
        before = cards
    else:
        return None
    server = case.machine.cards_per_server
    between = range(before + server, cards, server) if before >= server and cards - before <= _GAP * server else ()
    return next((fewer for fewer in between if fits_at_all(case.on_cards(fewer), fixed)), cards)


def sized(case: Case, cards: int, tokens: int, usd: float, fixed: Fixed | None = None) -> Sized | None:
    """Return the best layout on ``cards`` cards and its cost for ``tokens``; None where nothing fits."""
    there = case.on_cards(cards)
    found = search(there, fixed, kept=20)
    if not isinstance(found, Ranking):
        return None
    useful = goodput(there).fraction
    return Sized(cards, found, cost(there, float(found.step_s[0]), tokens, usd, useful))


def cheapest(
    case: Case, tokens: int, usd: float, *, days: float | None = None, fixed: Fixed | None = None,
    most_cards: int | None = None,
) -> tuple[Sized | None, list[Sized]]:  # fmt: skip
    """Return the fewest cards that finish ``tokens`` within ``days`` (None: the cheapest of all), and all that were
    tried.

    More cards end sooner and cost more, since they talk more; so the fewest that are fast enough are the cheapest.
    """
    tried: list[Sized] = []
    for cards in sizes(case, most_cards):
        there = case.on_cards(cards)
        if _hopeless(there, tokens, days) or not fits_at_all(there, fixed):
            continue
        one = sized(case, cards, tokens, usd, fixed)
        if one is None:
            continue
        tried.append(one)
        if days is not None and one.cost.days <= days:
            return one, tried
        if days is None and len(tried) >= 3 and one.cost.usd > 1.1 * min(each.cost.usd for each in tried):
            break
    if days is not None:
        return None, tried
    return min(tried, key=lambda each: each.cost.usd, default=None), tried


def _hopeless(case: Case, tokens: int, days: float | None) -> bool:
    """Whether even at the cards' full rate the time would not do: no search is needed then."""
    if days is None:
        return False
    peak = case.machine.cards * case.machine.card.peak(case.workload.precision.matmul)
    return case.flops_per_step / case.workload.tokens_per_step * tokens / peak > days * 86_400


def largest(fits: Callable[[int], bool], start: int, most: int) -> int:
    """Return the largest number up to ``most`` that ``fits``, to one part in 32; 0 where ``start`` does not.

    What fits must fit when it is smaller.
    """
    if not fits(start):
        return 0
    low, high = start, start
    while high < most and fits(min(2 * high, most)):
        low = high = min(2 * high, most)
    if low >= most:
        return most
    high = min(2 * low, most)
    while high - low > max(low // 32, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def longest_sequence(case: Case, fixed: Fixed | None = None) -> int:
    """Return the longest sequence, in steps of 1,024, that fits with as many sequences in a step as now; 0: none."""

    def fits(thousands: int) -> bool:
        return fits_at_all(replace(case, workload=replace(case.workload, seq_len=1024 * thousands)), fixed)

    return 1024 * largest(fits, 1, 4096)


@dataclass(frozen=True, slots=True)
class FromLength:
    """The shortest sequences, of doubled lengths, that the best layout cuts."""

    seq_len: int
    cp: int


def context_pays_from(case: Case, most: int = LONGEST_ADVISED) -> FromLength | None:
    """Return from which length on the best layout cuts sequences, in steps of as many tokens; None where up to ``most``
    or to one sequence a step none does, or none fits."""
    workload = case.workload
    doublings = [
        power for power in range(1, 24)
        if workload.seq_len << power <= min(most, workload.tokens_per_step)
        and workload.sequences_per_step % (1 << power) == 0
    ]  # fmt: skip

    def cut(power: int) -> int:
        longer = replace(
            workload, seq_len=workload.seq_len << power, sequences_per_step=workload.sequences_per_step >> power
        )
        found = search(replace(case, workload=longer), kept=8, most_slots=0)
        return int(found.candidates.cp[0]) if isinstance(found, Ranking) else 1

    low, high = 0, len(doublings)
    cuts: dict[int, int] = {}
    while low < high:  # the longer, the more there is to gain
        middle = (low + high) // 2
        cuts[middle] = cut(doublings[middle])
        low, high = (low, middle) if cuts[middle] > 1 else (middle + 1, high)
    if low == len(doublings):
        return None
    return FromLength(workload.seq_len << doublings[low], cuts[low])


def deepest_network(case: Case, fixed: Fixed | None = None) -> int:
    """Return how many layers of this network fit, all else equal; 0 where not even one does."""
    if case.network.state_space is not None:
        raise BadInput("the layers of a hybrid network are of several kinds: its depth is not asked for.")

    def fits(layers: int) -> bool:
        experts = case.network.experts
        if experts is not None:
            experts = replace(experts, dense_layers=min(experts.dense_layers, layers - 1))
        return fits_at_all(replace(case, network=replace(case.network, layers=layers, experts=experts)), fixed)

    return largest(fits, 1, 4096)


@dataclass(frozen=True, slots=True)
class AtSpeed:
    """Step times with a network of another speed."""

    factor: float
    kept_s: float
    """Of the layout that was chosen for the network as it is."""
    best_s: float
    """Of the best of those that were kept."""


def network_speeds(ranking: Ranking, factors: Sequence[float] = NETWORK_SPEEDS) -> list[AtSpeed]:
    """Return how the step changes with the network between servers; empty where nothing crosses it."""
    case = ranking.case
    if case.machine.cards <= case.machine.domain:
        return []
    rows, now = [], case.time(ranking.candidates).step_s
    for factor in factors:
        faster = replace(case.machine, server_bytes_per_s=case.machine.server_bytes_per_s * factor)
        there = replace(case, machine=faster)
        # What changes is the traffic, which a walk of the schedule does not see.
        step_s = ranking.step_s + there.time(ranking.candidates).step_s - now
        rows.append(AtSpeed(factor, float(step_s[0]), float(step_s.min())))
    return rows
