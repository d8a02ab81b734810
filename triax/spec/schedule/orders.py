"""How is the table of each schedule made?

Written from the published descriptions (``ScheduleKind.source``). The loop-placed schedules are one pattern with
different numbers; the two V-shaped ones are short lists of phases.

Where the tables differ from those PyTorch 2.13 generates, for less time, less memory or fewer refusals:

- every number of microbatches has a table (uneven rounds; a V that is not full), also fewer than ranks or stages;
- the backward of stage 0 is never split (``_with_whole_first_stage``);
- LoopedBFS runs backwards in the order of its forwards, not in reverse, so that every schedule adds up gradients in
  the order of the microbatches: the same bits as one process;
- InterleavedZeroBubble may have one stage per rank (ZB-H1).
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from triax.errors import BadInput
from triax.spec.schedule.rules import legal, schedule_kind
from triax.spec.schedule.table import Action, Overlap, ScheduleTable, Slot

Phases = Sequence[tuple[int, str]]


def build(name: str, pp: int, stages_per_rank: int, microbatches: int) -> ScheduleTable:
    """Return the table of schedule ``name``; raise BadInput with every reason if the sizes are not legal."""
    refusals = legal(name, pp, stages_per_rank, microbatches)
    if refusals:
        raise BadInput("\n".join(refusal.message for refusal in refusals))
    rows = []
    for rank in range(pp):
        match name:
            case "ZBVZeroBubble":
                row = _unroll(_zbv_phases(rank, pp, microbatches), rank, pp, microbatches)
            case "DualPipeV":
                row = _unroll(_dual_pipe_v_phases(rank, pp, microbatches), rank, pp, microbatches)
            case _:
                row = _loop_row(name, rank, pp, stages_per_rank, microbatches)
        rows.append(tuple(_with_whole_first_stage(row) if schedule_kind(name).splits_backward else row))
    return ScheduleTable(name, pp, stages_per_rank, microbatches, tuple(rows))


def _loop_row(name: str, rank: int, pp: int, stages_per_rank: int, microbatches: int) -> Iterator[Action]:
    """Yield a warmup of forwards, then a forward and a backward in turn, then the backwards that are left.

    Forwards walk in rounds: all microbatches of a round through the rank's first stage, then through its second, and
    so on; backwards walk the same rounds through the stages in reverse. Depth first (interleaved) means many small
    rounds, breadth first one round of everything.

    The warmup must reach the rank's last stage in the first round, plus one forward for each hop to the last rank; the
    published interleaved schedule takes two for each hop, which hides the sends and holds more. With split backwards, W
    runs ``rank`` backwards late: every rank then holds as much as the first one does anyway, and the weight gradients
    left over fill the end (Qi et al. 2023, ZB-H1).
    """
    hops = pp - 1 - rank
    breadth_first = name in ("GPipe", "LoopedBFS")
    rounds = [microbatches] if breadth_first else _rounds(microbatches, pp)
    forwards, backwards = [], []
    first = 0
    for size in rounds:
        chunk = [[(local * pp + rank, first + i) for i in range(size)] for local in range(stages_per_rank)]
        forwards += [place for places in chunk for place in places]
        backwards += [place for places in reversed(chunk) for place in places]
        first += size
    per_hop = 2 if name == "Interleaved1F1B" else 1
    warmup = len(forwards) if breadth_first else (stages_per_rank - 1) * max(rounds) + per_hop * hops

    splits = schedule_kind(name).splits_backward
    waiting: deque[tuple[int, int]] = deque()
    begun = 0
    for index, (stage, microbatch) in enumerate(backwards):
        while begun < min(warmup + index + 1, len(forwards)):
            yield Action(forwards[begun][0], "F", forwards[begun][1])
            begun += 1
        yield Action(stage, "I" if splits else "B", microbatch)
        if splits:
            waiting.append((stage, microbatch))
            if index >= rank:
                stage, microbatch = waiting.popleft()
                yield Action(stage, "W", microbatch)
    for stage, microbatch in waiting:
        yield Action(stage, "W", microbatch)


def _rounds(microbatches: int, pp: int) -> list[int]:
    """Cut the microbatches into as many rounds as possible of at least ``pp``, as evenly as possible, larger first.

    With fewer than ``pp`` in a round, the last rank's output comes back to the first rank too late for its next
    stage. Even rounds keep the idle time of the published case, ``microbatches`` divisible by ``pp``, for any number.
    """
    count = max(1, microbatches // pp)
    return [microbatches // count + (index < microbatches % count) for index in range(count)]


def _zbv_phases(rank: int, pp: int, microbatches: int) -> Phases:
    """The phases of ZB-V (Qi et al. 2023, 2024): stages ``a`` go down the V, stages ``b`` come back up."""
    hops = pp - 1 - rank
    total = max(microbatches, 2 * pp - 1)
    return (
        (2 * hops + 1, "Fa"),
        (rank, "Fb Fa"),
        (hops + 1, "Fb Ib Wb"),
        (total - 2 * pp + 1 + rank, "Fa Ia Wa Fb Ib Wb"),
        (hops, "Ia Wa Fb Ib Wb"),
        (rank, "Ia Ib"),
        (hops + 1, "Ia Wa"),
        (rank, "Wb"),
        (rank, "Wa"),
    )


def _dual_pipe_v_phases(rank: int, pp: int, microbatches: int) -> Phases:
    """The phases of DualPipeV: DualPipe (DeepSeek-AI 2024, figure 5) cut in half and folded into a V."""
    hops = pp - 1 - rank
    total = max(microbatches, 2 * pp)
    steady = total - 2 * pp + rank + 1
    # At the turn of the V the first pair runs apart, so that neither result waits for the other to be sent.
    turn = 1 if hops == 0 else 0
    half = (rank + 1) // 2
    return (
        (2 * hops, "Fa"),
        (rank + 1, "Fa Fb"),
        (hops, "Ib W Fb"),
        (turn, "Fa Bb Fb+Ba"),
        (steady - turn, "Fa+Bb Fb+Ba"),
        (hops, "Bb Fb+Ba"),
        (half, "Bb Ba"),
        ((rank + 1) % 2, "Bb Ia"),
        (half, "Ib Ia"),
        (hops, "W Ia"),
        (rank + 1, "W"),
    )


def _unroll(phases: Phases, rank: int, pp: int, microbatches: int) -> Iterator[Slot]:
    """Yield the actions of a V-placed rank whose stages are ``a``, going down, and ``b``, coming back.

    ``(3, "Fa Fb+Ba")`` repeats three times: the next forward of a, then the next forward of b overlapped with the
    next backward of a. ``Wa`` is the oldest weight gradient of a that waits, ``W`` the oldest of both. The phases are
    written for at least as many microbatches as fill the V; leaving out those that do not exist keeps the order, so
    it stays free of deadlock.
    """
    stages = {"a": rank, "b": 2 * pp - 1 - rank}
    begun: Counter[tuple[bool, str]] = Counter()
    waiting: deque[tuple[int, int]] = deque()

    def next_action(token: str) -> Action:
        if token[0] == "W":
            place = next(place for place in waiting if place[0] == stages.get(token[1:], place[0]))
            waiting.remove(place)
            return Action(place[0], "W", place[1])
        kind, stage = token[0], stages[token[1]]
        microbatch = begun[kind == "F", token[1]]
        begun[kind == "F", token[1]] += 1
        if kind == "I":
            waiting.append((stage, microbatch))
            return Action(stage, "I", microbatch)
        return Action(stage, "F" if kind == "F" else "B", microbatch)

    for repeats, pattern in phases:
        for tokens in pattern.split() * repeats:
            real = [a for a in map(next_action, tokens.split("+")) if a.microbatch < microbatches]
            if len(real) == 2:
                yield Overlap(*real)
            else:
                yield from real


def _with_whole_first_stage(row: Iterable[Slot]) -> Iterator[Slot]:
    """Yield ``row`` with the split backwards of stage 0 made whole, at the place of their W.

    Stage 0 reads tokens: no rank waits for its input gradient, so splitting buys nothing, and one pass is cheaper.
    PyTorch's runtime does the same in disguise: there I of stage 0 does nothing and its W runs the whole backward.
    """
    for slot in row:
        if isinstance(slot, Action) and slot.stage == 0 and slot.kind in ("I", "W"):
            if slot.kind == "W":
                yield Action(0, "B", slot.microbatch)
        else:
            yield slot
