"""In which layout does a run train whose file leaves it open? In the best one known for the machine it is started on.

Of cards a catalogue tells what they can do. Processors differ too much for that, so theirs is measured, once: the run's
folder keeps the numbers, so that the same command plans the same layout again, whatever else the server does then.
"""

from typing import TYPE_CHECKING, Any, Final

from triax.errors import BadInput
from triax.spec.cluster import Cluster
from triax.spec.load import load_cluster
from triax.spec.plan import Plan, make_plan
from triax.spec.resolve import resolve_layout
from triax.spec.run import Run

if TYPE_CHECKING:
    from triax.train.run_folder import RunFolder

_MEASURED: Final = ("matmul_flops_per_s", "memory_bytes_per_s", "memory_bytes")


def planned(run: Run, cluster: Cluster, folder: "RunFolder", *, has_cards: bool) -> Plan:
    """Return the best plan of ``run`` on ``cluster``; where none is known, that of ZeRO-3 over all ranks.

    ``has_cards``: this server has accelerators, whatever the catalogue knows of them. ``folder`` is the run's, which
    may hold what an earlier start measured.
    """
    from triax.plan.answer import plan_for

    if cluster.device == Cluster().device and not has_cards:
        cluster = _with_rates(run, cluster, folder)
    return plan_for(run, cluster) or make_plan(run, cluster, resolve_layout(run, cluster.num_cards))


def _with_rates(run: Run, cluster: Cluster, folder: "RunFolder") -> Cluster:
    """Return ``cluster`` with what it does not say of its processors: as an earlier start found it, or measured now."""
    if cluster.matmul_flops_per_s is not None and cluster.memory_bytes_per_s is not None:
        return cluster
    found = _kept(cluster, folder) or _measured(run, cluster)
    said = cluster.model_dump(exclude_none=True)
    return Cluster(**{**{name: found[name] for name in _MEASURED}, **said})


def _kept(cluster: Cluster, folder: "RunFolder") -> dict[str, Any] | None:
    """Return what the run's folder holds of the same number of ranks; None where it holds nothing of them."""
    if not folder.cluster.is_file():
        return None
    try:
        kept = load_cluster(str(folder.cluster))
    except BadInput:  # it is written anew by this start
        return None
    is_same = (kept.servers, kept.cards_per_server, kept.device) == (
        cluster.servers, cluster.cards_per_server, cluster.device,
    )  # fmt: skip
    found = {name: getattr(kept, name) for name in _MEASURED}
    return found if is_same and None not in found.values() else None


def _measured(run: Run, cluster: Cluster) -> dict[str, Any]:
    from triax.watch.processor import measure_processor

    share = measure_processor(cluster.cards_per_server, is_double=run.precision.compute == "fp64")
    return {name: getattr(share, name) for name in _MEASURED}
