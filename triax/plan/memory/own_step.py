"""What does a rank of triax hold at each moment of a step, and when is that most?

The rank's row of the schedule table is walked instant by instant (``triax.plan.memory.instants``). To what the stage
that runs holds comes what the other microbatches and stages hold, and what stages have sent to each other, which is
held until the schedule ends.
"""

from collections.abc import Iterator, Sequence

from triax.plan.memory.instants import Counts, Instant
from triax.plan.memory.own_stage import Bytes, Moment, Ranks, Stage


class OwnStep:
    """A step of one rank."""

    def __init__(
        self, stages: Sequence[Stage], sends: Sequence[bool], receives: int, microbatches: int, *, splits: bool
    ) -> None:
        """``sends``: whether each stage sends what its forwards and what its backwards make to another rank, two for
        each stage. ``receives``: from how many neighbours stages receive something for each microbatch. ``splits``:
        backwards come in two parts."""
        self._stages, self._sends, self._splits = stages, sends, splits
        self._received = receives * microbatches * stages[0].sizes.stream

    def states(self) -> Bytes:
        """Return the bytes that are always there."""
        ranks: Ranks = self._stages[0].ranks
        units = [unit for stage in self._stages for unit in (*stage.plan.units, stage.plan.root)]
        share = sum(unit.dense / ranks.dense + unit.expert / ranks.expert for unit in units)
        return {"weights": share * ranks.master, "optimizer": share * ranks.moments, "buffers": self._received}

    def moments(self, instants: Sequence[tuple[Instant, Counts]]) -> Iterator[Moment]:
        """Yield every moment of the step, each with what is held beside ``states``."""
        ranks = self._stages[0].ranks
        for instant, sent in instants:
            stage, elsewhere = self._stages[instant.chunk], self._elsewhere(instant, sent)
            for name, held in stage.moments(instant):
                yield name, _sum(elsewhere, held)
            if ranks.is_pipeline and ranks.zero <= 1 and instant.is_last:
                for name, held in stage.reduction():
                    yield name, _sum(elsewhere, held)
        yield "update", {"gradients": sum(stage.shards for stage in self._stages)}

    def _elsewhere(self, instant: Instant, sent: Counts) -> Bytes:
        """What other microbatches and stages hold."""
        stream = self._stages[0].sizes.stream
        found = {"activations": stream * sum(count for count, leaves in zip(sent, self._sends, strict=True) if leaves)}
        found |= {"weights": 0.0, "gradients": 0.0, "logits": 0.0, "buffers": 0.0}
        if self._splits:
            made = zip(instant.has_gradients, self._stages, strict=True)
            found["buffers"] = max(stage.unfreed * (has and not stage.plan.has_embedding) for has, stage in made)
        for index, stage in enumerate(self._stages):
            held, waiting = instant.held[index], instant.waiting[index]
            found["activations"] += held * stage.kept + waiting * stage.split
            found["logits"] += (held + waiting) * stage.after_loss
            if index == instant.chunk:
                continue
            if instant.is_over[index]:
                found["gradients"] += stage.shards
                continue
            if stage.ranks.zero <= 2:
                found["weights"] += stage.copies
            elif instant.is_open[index]:
                found["weights"] += stage.root_copies
            found["gradients"] += stage.gradients if instant.has_gradients[index] else 0.0
        return found


def _sum(one: Bytes, other: Bytes) -> Bytes:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one.keys() | other.keys()}
