"""What is done about a step that does not stand, and about ranks that should hold the same weights and do not?"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from triax.errors import BadInput, StoppedByGuard
from triax.spec.layout import Layout
from triax.spec.legal_values import both
from triax.spec.run import Run
from triax.train.guard import Guard, Judgement, StepReport
from triax.train.replicas import Evidence, Odd, Replicas, has_replicas, odd_ones
from triax.train.reporter import Reporter
from triax.train.rollback import Past
from triax.train.saver import Saver
from triax.train.state import TrainState

_KINDS: Final = {"repeat": "spike", "skip": "skip", "accept": "new_level", "rollback": "rollback"}
"""What a verdict is called in events.jsonl."""


@dataclass(slots=True)
class Mender:
    """Does what the guard's verdicts say, and tells of it. All ranks call every method together."""

    guard: Guard
    past: Past
    replicas: Replicas
    saver: Saver
    reporter: Reporter
    run: Run
    layout: Layout
    _evidence: Evidence | None = None
    """What ranks held when they went back, until the replay comes to the same step."""
    _witness: str = ""
    """What the evidence has shown, until the case is closed."""
    _compares: bool = field(init=False)

    def __post_init__(self) -> None:
        self._compares = self.run.guard.hash_every_steps > 0 and has_replicas(self.layout, self.run.model)

    def close(self, judgement: Judgement, report: StepReport) -> None:
        """Tell what a step that stands has shown, if anything."""
        if not judgement.reason:
            return
        reason = judgement.reason + self._witness
        self._witness = ""
        detail = {"reason": reason} | ({"cause": judgement.cause} if judgement.cause else {})
        self.reporter.event("spike_explained" if judgement.cause else "spike", report.step, detail)
        self.reporter.warn(reason)

    def undo(self, judgement: Judgement, before: TrainState, now: TrainState) -> TrainState:
        """Return the state to go on from after a step that was left out; ``before`` is the one that it started from.

        Raises StoppedByGuard where the run must not go on.
        """
        first = before.next_sample
        samples = (first, first + self.run.sequences_per_step)
        again = replace(before, skipped=now.skipped, guard=judgement.state)
        match judgement.verdict:
            case "stop":
                raise self._stopped(judgement.reason, before.step)
            case "repeat" if self._compares and (found := self._compared(again)):
                return found
            case "rollback":
                case = now.guard.case
                assert case is not None
                digests = self.replicas.digests()
                self._tell(judgement, before.step, samples)
                # Later replays read other samples: that they come to other weights says nothing.
                self._evidence = Evidence(before.step, (), digests, {}) if case.replays == 0 else None
                tried = (case.first_sample, first)
                return self._return(judgement, again.reading_again(tried) if case.trial == "skip" else again)
        self._tell(judgement, before.step, samples)
        return again.passing_over(samples) if judgement.verdict == "skip" else again

    def is_due(self, step: int, *, before_save: bool) -> bool:
        """Return whether ``inspect`` must be called now that ``step`` steps were made."""
        if self._evidence is not None and self._evidence.step == step:
            return True
        return self._compares and (before_save or step % self.run.guard.hash_every_steps == 0)

    def inspect(self, state: TrainState) -> TrainState | None:
        """Compare what ranks hold; return the state to go on from where they disagree, None where all is well."""
        self._testify(state)
        return self._compared(state) if self._compares else None

    def _compared(self, state: TrainState) -> TrainState | None:
        digests = self.replicas.digests()
        odd = odd_ones(self.layout, digests)
        if not odd:
            return None
        evidence = self.replicas.evidence(state.step, digests)
        named = sorted({rank for one in odd for rank in one.ranks})
        what = f"after step {state.step}, {_disagreement(odd, named, self.layout)}"
        suspects = named or sorted({rank for one in odd for rank in one.family})
        detail = {"reason": what, "suspects": suspects} | _places(named, self.layout)
        self.reporter.event("corruption", state.step, detail)
        judgement = self.guard.go_back_from(f"{what}.", state.step, state.guard)
        if judgement.verdict == "stop":
            raise self._stopped(judgement.reason, state.step)
        self._tell(judgement, state.step, None)
        self._evidence = evidence
        return self._return(judgement, state)

    def _return(self, judgement: Judgement, now: TrainState) -> TrainState:
        wish = judgement.rollback
        assert wish is not None
        self.saver.finish()
        try:
            then, problem = self.past.return_to(wish, now, judgement.state)
        except BadInput as error:
            raise self._stopped(f"{judgement.reason} But {error}", now.step) from None
        if problem:
            self.reporter.warn(problem)
        self.reporter.say(f"went back to step {then.step}")
        # On disk before anything else happens: a run that is killed now goes on knowing why it went back.
        self.saver.save(then, wait=True)
        self._testify(then)
        return then

    def _testify(self, state: TrainState) -> None:
        """Say who held something else, where a replay has come to the step of the evidence."""
        evidence = self._evidence
        if evidence is None or evidence.step != state.step:
            return
        self._evidence = None
        digests = self.replicas.digests()
        changed = [
            rank for rank, (one, other) in enumerate(zip(evidence.digests, digests, strict=True)) if one != other
        ]
        if not evidence.odd:
            held = "no rank held anything else before" if not changed else (
                f"{_named(changed, self.layout)} held other weights before"
            )  # fmt: skip
            self._witness = f" After step {state.step}, {held}."
            return
        accused = sorted({rank for one in evidence.odd for rank in one.ranks} or self.replicas.accused(evidence))
        if accused:
            what = f"the steps up to {state.step} were trained again: {_named(accused, self.layout)} was wrong before"
        else:
            what = f"the steps up to {state.step} were trained again, and do not show which rank was wrong before"
        self.reporter.event("corruption", state.step, {"reason": what} | _places(accused, self.layout))
        self.reporter.warn(f"{what}.")

    def _tell(self, judgement: Judgement, step: int, samples: tuple[int, int] | None) -> None:
        detail: dict[str, object] = {"reason": judgement.reason}
        if samples is not None:
            detail["samples"] = list(samples)
        if judgement.rollback is not None and judgement.rollback.skip is not None:
            detail["passes_over"] = list(judgement.rollback.skip)
        self.reporter.event(_KINDS[judgement.verdict], step, detail)
        self.reporter.warn(judgement.reason)

    def _stopped(self, reason: str, step: int) -> StoppedByGuard:
        self.reporter.event("stopped_by_guard", step, {"reason": reason})
        return StoppedByGuard(reason)


def _named(ranks: Sequence[int], layout: Layout) -> str:
    if len(ranks) == layout.world_size > 2:
        return f"all {len(ranks)} ranks"
    if len(ranks) <= 4:
        return both([layout.describe_rank(rank) for rank in ranks])
    return f"{', '.join(layout.describe_rank(rank) for rank in ranks[:4])} and {len(ranks) - 4} more"


def _places(ranks: Sequence[int], layout: Layout) -> dict[str, object]:
    return {"ranks": list(ranks), "coordinates": [layout.coordinate(rank)._asdict() for rank in ranks]}


def _disagreement(odd: Sequence[Odd], named: Sequence[int], layout: Layout) -> str:
    if named:
        return f"{_named(named, layout)} held other bits of weights or optimizer state than its replicas"
    families = sorted({one.family for one in odd})
    return (
        f"{_named(families[0], layout)} held different bits of weights or optimizer state that should be equal; two "
        f"cannot say which of them is wrong, and the steps since the last checkpoint, trained again, may"
    )
