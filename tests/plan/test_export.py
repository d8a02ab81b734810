"""Do other frameworks' words say the same layout?"""

import json
import re

import pytest

from tests.plan.cases import case_of
from triax.errors import BadInput
from triax.plan.export import export
from triax.spec.layout import Layout

CASE = case_of("llama-3.1-8b", "2x8xh100", 64)
DEEP = Layout(
    pp=2, dp_replicate=2, dp_shard=2, tp=2, zero=1, schedule="Interleaved1F1B", stages_per_rank=2, microbatches=16,
    recompute="full",
)  # fmt: skip
FLAT = Layout(dp_replicate=2, dp_shard=8, zero=3, microbatches=2, sequences_per_microbatch=2)


def test_megatrons_arguments() -> None:
    said = export(CASE, DEEP, "megatron")
    flags = dict(re.findall(r"(--[\w-]+)(?: (\S+))?", said.replace(" \\", "")))
    assert flags["--tensor-model-parallel-size"] == "2"
    assert flags["--pipeline-model-parallel-size"] == "2"
    assert flags["--num-virtual-stages-per-pipeline-rank"] == "2"
    assert flags["--global-batch-size"] == "64"
    assert flags["--num-distributed-optimizer-instances"] == "2"
    assert flags["--recompute-granularity"] == "full"
    assert "--sequence-parallel" in flags
    assert "--use-distributed-optimizer" in flags
    assert "optim_grads_params" in export(CASE, FLAT, "megatron")
    assert "will run 1F1B" in export(CASE, DEEP.model_copy(update={"schedule": "ZBVZeroBubble"}), "megatron")


def test_torchtitans_options() -> None:
    said = export(CASE, DEEP, "torchtitan")
    assert "--parallelism.tensor_parallel_degree 2" in said
    assert "--training.local_batch_size 16" in said
    assert "fsdp_reshard_after_forward always" in export(CASE, FLAT, "torchtitan")


def test_deepspeeds_json() -> None:
    said = json.loads(export(CASE, FLAT, "deepspeed"))
    assert said["train_batch_size"] == 64
    assert said["train_micro_batch_size_per_gpu"] * said["gradient_accumulation_steps"] * 16 == 64
    assert said["zero_optimization"]["stage"] == 3
    with pytest.raises(BadInput, match=r'no words for pp=2: plan with --layout "pp=1"'):
        export(CASE, DEEP, "deepspeed")


def test_accelerates_yaml() -> None:
    said = export(CASE, FLAT, "accelerate")
    assert "parallelism_config_dp_shard_size: 8" in said
    assert "num_processes: 16" in said


def test_another_tool_is_refused() -> None:
    with pytest.raises(BadInput, match="use megatron, torchtitan, deepspeed or accelerate"):
        export(CASE, DEEP, "alpa")
