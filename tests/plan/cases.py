"""Cases that tests of the planner share."""

from triax.plan.case import Case
from triax.plan.catalogue import machine
from triax.plan.engine import engine
from triax.plan.models import find_model
from triax.plan.network import network_of
from triax.plan.workload import Recipe, Workload, precision
from triax.spec.cluster import parse_cluster
from triax.spec.data import DataSpec
from triax.spec.model import ModelSpec
from triax.spec.run import Run, TrainSpec

TOY = ModelSpec(
    hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=97,
)  # fmt: skip


def case_of(
    model: str,
    cluster: str,
    sequences: int,
    *,
    seq_len: int = 4096,
    engine_name: str = "triax",
    recipe: Recipe = "bf16",
) -> Case:
    """A model of the catalogue on a cluster in its short form."""
    workload = Workload(sequences, seq_len, precision(recipe))
    return Case(find_model(model).network, workload, machine(parse_cluster(cluster)), engine(engine_name))


def run_of(model: ModelSpec, sequences: int, seq_len: int) -> Run:
    """A run of ``model`` with nothing but defaults."""
    data = DataSpec(train=("text",), seq_len=seq_len)
    return Run(model=model, data=data, train=TrainSpec(steps=10, sequences_per_step=sequences))


def toy_case(cluster: str, sequences: int, seq_len: int = 64, model: ModelSpec = TOY) -> Case:
    """A toy that triax trains."""
    workload = Workload(sequences, seq_len, precision("bf16"))
    return Case(network_of(model), workload, machine(parse_cluster(cluster)), engine("triax"))
