"""Which layouts can a run have on N ranks? All of them, each once: the enumerator as a generator of tests.

What ``triax.spec.check`` calls legal is in; nothing here knows a rule of its own. A knob that an axis of degree one
makes meaningless keeps one setting, so that no two layouts differ in nothing.
"""

from collections.abc import Iterator
from itertools import product

from triax.spec.check import check
from triax.spec.layout import Layout
from triax.spec.legal_values import divisors
from triax.spec.run import Run
from triax.spec.schedule import SCHEDULES, splits_backward


def legal_layouts(run: Run, ranks: int, microbatches: int, cp: int = 1) -> Iterator[Layout]:
    """Yield every layout of ``run`` on ``ranks``: degrees x ZeRO stage x schedule with its fewest stages on each rank,
    and where the model has experts, x the ranks that these are spread over.

    Sequences are cut into ``cp`` parts. A step is cut into ``microbatches`` where the data ranks' shares allow it.
    """
    for pp, dp_replicate, dp_shard, tp in product(divisors(ranks), repeat=4):
        data_ranks = dp_replicate * dp_shard
        if pp * data_ranks * cp * tp != ranks or run.sequences_per_step % (data_ranks * microbatches):
            continue
        spreads = [1] if run.model.experts is None else divisors(dp_shard * cp * tp)
        for schedule, zero, ep in product(SCHEDULES, range(4), spreads):
            layout = Layout(
                pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep, zero=zero, schedule=schedule,
                stages_per_rank=SCHEDULES[schedule].min_stages_per_rank, microbatches=microbatches,
                sequences_per_microbatch=run.sequences_per_step // data_ranks // microbatches,
            )  # fmt: skip
            shares_experts = run.model.experts is not None and layout.expert_ranks > ep
            if _is_canonical(layout, shares_experts=shares_experts) and not check(layout, run):
                yield layout


def _is_canonical(layout: Layout, *, shares_experts: bool) -> bool:
    """Return whether this is the layout that stands for all that differ from it in a knob without meaning.

    Where nothing is shared, of the ZeRO stages there remain none and the highest, which a run gets that leaves it open.
    Without a pipeline, schedules only say how long activations live.
    """
    highest = 2 if splits_backward(layout.schedule) else 3
    if layout.dp_shard * layout.cp == 1 and not shares_experts and layout.zero not in (0, highest):
        return False
    return layout.pp > 1 or layout.schedule == "1F1B"
