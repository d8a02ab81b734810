"""What is the answer to a question, in numbers: predictions with intervals, costs, reasons, alternatives?

One value for the page, for ``--json`` and for plan.json, so that all three say the same.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

from triax.errors import BadInput
from triax.plan.alternatives import Other, Refused, others, refused
from triax.plan.ask import Question, question_of
from triax.plan.cost import Cost, cost
from triax.plan.explain import Reason, explain, placement
from triax.plan.goodput import Goodput, goodput
from triax.plan.memory import CATEGORIES, MOMENTS
from triax.plan.search import Ranking, search
from triax.plan.step import WATERFALL
from triax.spec.cluster import Cluster
from triax.spec.layout import Layout
from triax.spec.plan import Alternative, Plan, Prediction, make_plan
from triax.spec.run import Run
from triax.units import format_count

_TOKENS: Final = 10**9
"""What costs are told for where no budget of tokens is given."""


@dataclass(frozen=True)
class Answer:
    """The best layout of a question and what is known of it."""

    question: Question
    ranking: Ranking
    token_budget: int | None = None

    @property
    def layout(self) -> Layout:
        """The layout that was chosen."""
        return self.ranking.candidates.layout(0)

    @property
    def step_s(self) -> float:
        """Seconds of its step."""
        return float(self.ranking.step_s[0])

    @cached_property
    def goodput(self) -> Goodput:
        """What failures and saves take."""
        return goodput(self.question.case)

    def cost_at(self, step_s: float) -> Cost:
        """Return the cost of the token budget, or of a billion tokens, in steps of ``step_s``."""
        tokens = self.token_budget or _TOKENS
        return cost(self.question.case, step_s, tokens, self.question.usd, self.goodput.fraction)

    def money(self, step_s: float) -> str:
        """Return what the budget, or a billion tokens, costs in words."""
        usd = f"${format_count(self.cost_at(step_s).usd)}"
        return usd if self.token_budget else f"{usd} a billion tokens"

    @cached_property
    def reasons(self) -> list[Reason]:
        """Why it is this layout."""
        return explain(self.ranking, self.money)

    @cached_property
    def others(self) -> list[Other]:
        """Layouts that were not chosen."""
        return others(self.ranking)

    @cached_property
    def refused(self) -> list[Refused]:
        """Layouts that cannot be."""
        return refused(self.ranking)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the step by what they go to; they add up."""
        return {name: float(getattr(self.ranking.time, name)[0]) for name in WATERFALL}

    @property
    def bytes(self) -> dict[str, float]:
        """Bytes of the fullest card by what they are for; they add up."""
        return {name: float(getattr(self.ranking.memory, name)[0]) for name in CATEGORIES}

    @property
    def peak_at(self) -> str:
        """Where and when the peak of memory is, in words."""
        memory = self.ranking.memory
        when = {"forward": "when most activations are held", "loss": "at the loss", "backward": "in the backward",
                "update": "in the update"}[MOMENTS[int(memory.moment[0])]]  # fmt: skip
        on = f"on pipeline rank {int(memory.pipeline_rank[0])}, " if self.layout.pp > 1 else ""
        return f"{on}{when}"

    def predictions(self, index: int = 0) -> dict[str, Prediction]:
        """Return the predictions of one layout of the ranking, each with its 80 % interval."""
        case, memory = self.question.case, self.ranking.memory
        step_s, off = float(self.ranking.step_s[index]), case.interval
        tokens = case.workload.tokens_per_step
        used = float(case.utilisation(step_s))
        found = {
            "step_s": Prediction(value=step_s, low=step_s / off, high=step_s * off, formula=" + ".join(WATERFALL)),
            "tokens_per_sec": Prediction(
                value=tokens / step_s, low=tokens / step_s / off, high=tokens / step_s * off, formula="tokens / step_s"
            ),
            "mfu": Prediction(
                value=used, low=used / off, high=used * off,
                formula="forward and backward operations / (step_s x cards x peak)",
            ),
        }  # fmt: skip
        for name in ("allocated_bytes", "reserved_bytes", "device_bytes", "needed_bytes"):
            values = getattr(memory, name)[index : index + 1]
            low, high = memory.interval(values)
            sides = {"value": float(values[0]), "low": float(low[0]), "high": float(high[0])}
            found[f"peak_{name}"] = Prediction(**sides, formula=_BYTES[name])
        return found

    def plan(self) -> Plan:
        """Return what plan.json holds; the question must be of a run file."""
        assert self.question.run is not None
        plan = make_plan(self.question.run, self.question.cluster, self.layout)
        alternatives = tuple(
            Alternative(layout=other.layout, predictions=self.predictions(other.index), reason=other.reason)
            for other in self.others
        )
        refusals = tuple(f"{each.what}: {each.why}" for each in self.refused)
        found = {"predictions": self.predictions(), "alternatives": alternatives, "refusals": refusals}
        return plan.model_copy(update=found)

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        case = self.question.case
        front = self.ranking.front[:20]
        return {
            "format_version": 1,
            "model": {"name": self.question.model.name, "parameters": case.network.parameters,
                      "active_parameters": case.network.active_parameters, "origin": self.question.model.origin},
            "cluster": self.question.cluster.model_dump(mode="json"),
            "engine": case.engine.name,
            "step": {"sequences": case.workload.sequences_per_step, "seq_len": case.workload.seq_len,
                     "tokens": case.workload.tokens_per_step, "precision": case.workload.precision.recipe},
            "layout": self.layout.model_dump(mode="json"),
            "placement": placement(self.ranking.candidates, 0),
            "predictions": {name: each.model_dump() for name, each in self.predictions().items()},
            "seconds": self.seconds,
            "bytes": self.bytes,
            "peak": self.peak_at,
            "save_bytes": float(self.ranking.memory.save_bytes[0]),
            "resume_bytes": float(self.ranking.memory.resume_bytes[0]),
            "goodput": asdict(self.goodput),
            "cost": asdict(self.cost_at(self.step_s)) | {"usd_per_card_hour": self.question.usd},
            "reasons": [asdict(reason) for reason in self.reasons],
            "alternatives": [
                {"layout": other.layout.model_dump(mode="json"), "step_s": other.step_s, "reason": other.reason}
                for other in self.others
            ],
            "refused": [asdict(each) for each in self.refused],
            "front": [
                {"layout": self.ranking.candidates.layout(int(index)).model_dump(mode="json"),
                 "step_s": float(self.ranking.step_s[index]),
                 "peak_needed_bytes": float(self.ranking.memory.needed_bytes[index]),
                 "usd": self.cost_at(float(self.ranking.step_s[index])).usd}
                for index in front
            ],
            "considered": self.ranking.considered,
            "priced": self.ranking.priced,
            "rests_on": case.rests_on,
            "assumed": list(self.question.assumed),
        }  # fmt: skip


def plan_for(run: Run, cluster: Cluster) -> Plan | None:
    """Return the plan of a run whose file leaves the layout open; None where triax cannot tell what is best.

    That is where the catalogue knows no such card, and where nothing fits by what is predicted: the run may still be
    tried. Equal runs and clusters have equal plans, on every rank that asks.
    """
    try:
        question = question_of(run, cluster)
    except BadInput:
        return None
    found = search(question.case, question.fixed, kept=20)
    return Answer(question, found).plan() if isinstance(found, Ranking) else None


_BYTES: Final = {
    "allocated_bytes": "weights + gradients + optimizer + activations + logits + buffers + workspaces",
    "reserved_bytes": "allocated + what the allocator keeps between blocks",
    "device_bytes": "reserved + CUDA context + communicators",
    "needed_bytes": "the least that the process can do with; what decides whether a layout fits",
}
