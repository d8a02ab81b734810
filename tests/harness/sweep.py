"""Layouts drawn at random over everything that decides about memory: what is predicted, and what a dry run says."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from triax.plan.ask import question_of
from triax.plan.candidates import Candidates
from triax.plan.memory import ALLOCATED
from triax.plan.models import find_model
from triax.spec.check import check
from triax.spec.cluster import Cluster
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run
from triax.spec.schedule import SCHEDULES, splits_backward
from triax.verify.dryrun import dry_run


@dataclass(frozen=True)
class Drawn:
    """A layout of a run on a cluster, and the pipeline rank to look at."""

    name: str
    run: Run
    layout: Layout
    cluster: Cluster
    pipeline_rank: int

    def __str__(self) -> str:
        run, layout = self.run, self.layout
        said = {key: value for key, value in layout.model_dump().items() if value != Layout.model_fields[key].default}
        words = " ".join(f"{key}={value}" for key, value in said.items() if key != "order")
        precision = f"{run.precision.compute}/{run.precision.reduce}"
        return f"{self.name} {precision} seq_len={run.data.seq_len} {words}, pipeline rank {self.pipeline_rank}"

    @property
    def splits(self) -> bool:
        """Its backwards come in two parts."""
        return splits_backward(self.layout.schedule)

    def predicted(self) -> dict[str, float]:
        """Return the bytes of the walked peak by category, without scratch space; experts are routed to equally."""
        case = question_of(self.run, self.cluster).case
        memory = case.walked_memory(
            Candidates.from_layouts([self.layout]), pipeline_rank=self.pipeline_rank, imbalance=1.0
        )
        return {name: float(getattr(memory, name)[0]) for name in ALLOCATED if name != "workspaces"}

    def dry_peak(self) -> dict[str, int]:
        """Return what a dry run holds at its peak."""
        place = self.layout.coordinate(0)._replace(pp=self.pipeline_rank)
        return dict(dry_run(self.run, self.layout, self.cluster, self.layout.rank(place)).step.peak.held)


def models(layers: int) -> dict[str, ModelSpec]:
    """Return published networks with fewer layers: dense ones, mixtures, one with a shared expert."""
    names = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-8b", "qwen2.5-7b", "mixtral-8x7b", "qwen3-30b-a3b")
    found = {}
    for name in names:
        spec = find_model(name).spec
        assert spec is not None
        found[name] = spec.model_copy(update={"num_hidden_layers": layers})
    mixture = found["qwen3-30b-a3b"]
    assert mixture.experts is not None
    shared = {
        "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "scoring_func": "sigmoid",
        "shared_expert_intermediate_size": 2816, "first_k_dense_replace": 1,
    }  # fmt: skip
    found["shared"] = mixture.model_copy(update={"experts": mixture.experts.model_copy(update=shared)})
    return found


def drawn(seed: int, layers: int, most_microbatches: int) -> Iterator[Drawn]:
    """Yield legal layouts without end, the same for the same arguments.

    Left out: layers that run again under a split backward, of which the prediction is rough.
    """
    chance = random.Random(seed)
    known = models(layers)
    while True:
        name = chance.choice(list(known))
        pick = chance.choice
        schedule = pick(list(SCHEDULES))
        pp = pick([1, 1, 2, 4])
        cp = pick([1, 1, 1, 2, 4])
        degrees = {
            "pp": pp, "tp": pick([1, 2, 4, 8]), "cp": cp, "dp_replicate": pick([1, 1, 1, 2]),
            "dp_shard": pick([1, 2, 4, 8, 16]), "ep": pick([1, 2, 4, 8, 16]), "zero": pick([0, 1, 2, 3]),
            "schedule": schedule if pp > 1 else "1F1B", "sequences_per_microbatch": pick([1, 1, 2, 4]),
            "microbatches": chance.randint(1, most_microbatches), "recompute": pick(["none", "selective", "full"]),
            "cp_method": pick(["all_gather", "ring", "all_to_all"]) if cp > 1 else "all_gather",
        }  # fmt: skip
        degrees["stages_per_rank"] = SCHEDULES[degrees["schedule"]].min_stages_per_rank
        layout = Layout(**degrees)
        # Attention by parts is tile by tile, which takes long.
        seq_len = 2048 if cp > 1 else pick([2048, 4096, 8192])
        compute, reduce = pick([("bf16", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")])
        run = Run.model_validate(
            {
                "model": known[name], "data": {"train": ("nowhere",), "seq_len": seq_len},
                "train": {"steps": 1, "sequences_per_step": layout.sequences_per_step},
                "precision": {"compute": compute, "reduce": reduce},
            }
        )  # fmt: skip
        cards = min(layout.world_size, 8)
        cluster = Cluster(servers=layout.world_size // cards, cards_per_server=cards, device="h100")
        is_rough = splits_backward(layout.schedule) and layout.recompute == "full"
        shares_nothing = layout.zero > 0 and layout.dp_shard * layout.cp == 1
        if not (is_rough or shares_nothing or layout.world_size > 256 or check(layout, run, cluster)):
            yield Drawn(name, run, layout, cluster, pick([0, layout.pp - 1]))
