"""What does ``plan.json`` hold: a run, the layout it will have, what was predicted, and what was not chosen.

``run.toml`` is the order and ``plan.json`` the lockfile: it trains as it is.
"""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from triax.spec.cluster import Cluster
from triax.spec.layout import Layout
from triax.spec.run import FORMAT_VERSION, Run
from triax.spec.value import Value, as_tuple


class Prediction(Value):
    """One predicted quantity with its 80 % interval, in the unit that its name ends in."""

    value: float
    low: float
    high: float
    formula: str = ""


class Alternative(Value):
    """A layout that was considered, and why another was chosen."""

    layout: Layout
    predictions: dict[str, Prediction] = {}
    reason: str = ""


class Plan(Value):
    """A run resolved: the layout is whole, and ``fingerprint`` says for which mathematics it was made."""

    format_version: int = Field(default=FORMAT_VERSION, ge=1, le=FORMAT_VERSION)
    fingerprint: str
    run: Run
    cluster: Cluster
    layout: Layout
    predictions: dict[str, Prediction] = {}
    alternatives: Annotated[tuple[Alternative, ...], BeforeValidator(as_tuple)] = ()
    refusals: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()

    @model_validator(mode="after")
    def _made_for_this_run(self) -> Self:
        if self.fingerprint != self.run.fingerprint:
            raise ValueError(
                f"the plan was made for run {self.fingerprint}, and the run it holds is {self.run.fingerprint}: "
                f"it was edited; make the plan again."
            )
        return self


def make_plan(run: Run, cluster: Cluster, layout: Layout) -> Plan:
    """Return the plan that says ``layout`` without predictions."""
    return Plan(fingerprint=run.fingerprint, run=run, cluster=cluster, layout=layout)


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return ``plan`` as plain values for ``plan.json``."""
    return plan.model_dump(mode="json")
