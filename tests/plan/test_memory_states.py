"""Are weights, gradients and optimizer the textbook's bytes a parameter, and ours?"""

from dataclasses import replace

import numpy as np
import pytest

from triax.plan.candidates import Candidates
from triax.plan.catalogue import card
from triax.plan.engine import Engine, engine
from triax.plan.memory.stages import probes
from triax.plan.memory.states import owned, states
from triax.plan.network import Experts, LatentAttention, Network
from triax.plan.workload import Recipe, Workload, precision

PLAIN = Network(4, 64, 4, 2, 16, 128, 1024)
GPT = replace(PLAIN, is_gated=False, norm="layer", is_tied=True, has_qkv_bias=True, has_out_bias=True,
              has_mlp_bias=True, learned_positions=64)  # fmt: skip
MIXED = replace(PLAIN, experts=Experts(8, 2, 96, shared_ffn=64, dense_layers=1))
LATENT = replace(MIXED, latent_attention=LatentAttention(q_rank=32, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16))
N = 8
H100 = card("h100")
MEGATRON = replace(engine("megatron"), bucket_padding=1, vocab_padding=1)


def per_parameter(
    of: Engine, recipe: Recipe = "bf16", *, reduce_bytes: int | None = None, **columns: int
) -> tuple[float, float, float]:
    """Bytes a parameter of weights, gradients and optimizer between microbatches on one rank."""
    candidates = Candidates.of(**columns)
    workload = Workload(64, 64, precision(recipe), grad_reduce_bytes=reduce_bytes)
    at = probes(PLAIN, of, candidates)
    held = states(PLAIN, workload, H100, of, candidates, owned(PLAIN, of, candidates, at), at)
    return tuple(float(each[0, 0]) / PLAIN.parameters for each in (held.weights, held.gradients, held.optimizer))  # type: ignore[return-value]


@pytest.mark.parametrize(("zero", "total"), [(0, 16.0), (1, 4 + 12 / N), (2, 2 + 14 / N), (3, 16 / N)])
def test_the_textbooks_bytes(zero: int, total: float) -> None:
    """Rajbhandari et al. 2019, arXiv:1910.02054, figure 1, with gradients in two bytes."""
    of = replace(MEGATRON, grad_bytes=2)
    assert sum(per_parameter(of, zero=zero, dp_shard=N)) == pytest.approx(total)


@pytest.mark.parametrize(("zero", "total"), [(0, 18.0), (1, 6 + 12 / N)])
def test_megatrons_bytes_with_gradients_in_fp32(zero: int, total: float) -> None:
    """Megatron Core's table of its distributed optimizer: 18, and 6 + 12/d with bf16 weights and fp32 gradients."""
    assert sum(per_parameter(MEGATRON, zero=zero, dp_shard=N)) == pytest.approx(total)


@pytest.mark.parametrize(
    ("recipe", "reduce_bytes", "totals"),
    [
        ("bf16", 4, (16.0, 6 + 12 / N, 2 + 16 / N, 16 / N)),
        ("bf16", 2, (14.0, 4 + 12 / N, 2 + 16 / N, 16 / N)),
        ("fp32", 4, (16.0, 8 + 12 / N, 4 + 16 / N, 16 / N)),
    ],
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_our_bytes_are_those_that_the_trainers_tests_measure(
    zero: int, recipe: Recipe, reduce_bytes: int, totals: tuple[float, ...]
) -> None:
    """The table of ``triax.parallel.shard``, which tests/parallel/test_bytes.py holds equal to real tensors."""
    shares = {"dp_replicate": N} if zero == 0 else {"dp_shard": N}
    total = sum(per_parameter(engine("triax"), recipe, reduce_bytes=reduce_bytes, zero=zero, **shares))
    assert total == pytest.approx(totals[zero])


def test_replicas_keep_gradients_in_the_reduce_precision_until_they_are_summed() -> None:
    _, gradients, _ = per_parameter(engine("triax"), reduce_bytes=2, zero=2, dp_shard=4, dp_replicate=2)
    assert gradients == pytest.approx(2 / 4)


def test_torchtitan_gathers_once_where_there_is_a_pipeline() -> None:
    alone = per_parameter(engine("torchtitan"), zero=3, dp_shard=N)
    assert alone == pytest.approx((4 / N, 4 / N, 8 / N))
    candidates = Candidates.of(zero=3, dp_shard=N, pp=2, microbatches=4)
    of = engine("torchtitan")
    at = probes(PLAIN, of, candidates, pipeline_rank=0)
    own = owned(PLAIN, of, candidates, at)
    held = states(PLAIN, Workload(64, 64, precision("bf16")), H100, of, candidates, own, at)
    assert held.weights[0, 0] == pytest.approx(own.all[0, 0] * (2 + 4 / N))
    assert held.gradients[0, 0] == pytest.approx(own.all[0, 0] * 4)


@pytest.mark.parametrize("network", [PLAIN, GPT, MIXED, LATENT], ids=["plain", "gpt", "experts", "latent"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_ranks_of_a_pipeline_own_the_network_between_them(network: Network, pp: int) -> None:
    """A tied embedding stands on the first and on the last rank."""
    candidates = Candidates.of(pp=pp, microbatches=4)
    numbers = 0.0
    for rank in range(pp):
        at = probes(network, MEGATRON, candidates, pipeline_rank=rank)
        numbers += float(owned(network, MEGATRON, candidates, at).all[0, 0])
    copy = network.vocab * network.hidden if network.is_tied and pp > 1 else 0
    assert numbers == network.parameters + copy


def test_tensor_parallelism_leaves_norms_routers_and_latents_whole() -> None:
    candidates = Candidates.of(tp=[1, 4], etp=1)
    at = probes(LATENT, MEGATRON, candidates)
    own = owned(LATENT, MEGATRON, candidates, at)
    latent, experts = LATENT.latent_attention, LATENT.experts
    assert latent is not None
    assert experts is not None
    ways_in = 64 * (32 + 16 + 8) + 32 + 16
    whole = LATENT.layers * (ways_in + 2 * 64) + 64 + LATENT.expert_layers * 64 * experts.count
    assert own.dense[0, 1] == pytest.approx(whole + (own.dense[0, 0] - whole) / 4)
    assert own.expert[0, 1] == own.expert[0, 0]


def test_experts_are_shared_by_the_ranks_that_hold_the_same_one() -> None:
    """64 ranks in groups of 8 that hold all experts between them: 8 copies of each, so a share of an eighth."""
    candidates = Candidates.of(dp_shard=64, ep=8, zero=1)
    at = probes(MIXED, MEGATRON, candidates)
    own = owned(MIXED, MEGATRON, candidates, at)
    assert float(own.expert[0, 0]) == MIXED.expert_layers * MIXED.expert_parameters
    held = states(MIXED, Workload(64, 64, precision("bf16")), H100, MEGATRON, candidates, own, at)
    assert held.optimizer[0, 0] == pytest.approx(12 * (own.dense[0, 0] / 64 + own.expert[0, 0] / 8))


def test_shards_are_rounded_up_to_megatrons_buckets() -> None:
    candidates = Candidates.of(dp_shard=3, zero=1)
    of = engine("megatron")
    at = probes(PLAIN, of, candidates)
    own = owned(PLAIN, of, candidates, at)
    held = states(PLAIN, Workload(6, 64, precision("bf16")), H100, of, candidates, own, at)
    padded = np.ceil(own.all[0, 0] / 384) * 384
    assert held.optimizer[0, 0] == pytest.approx(12 * padded / 3)


def test_adapters_leave_the_frozen_weights_two_bytes() -> None:
    candidates = Candidates.of()
    at = probes(PLAIN, engine("fsdp1"), candidates)
    own = owned(PLAIN, engine("fsdp1"), candidates, at)
    workload = Workload(4, 64, precision("bf16"), lora_rank=8)
    held = states(PLAIN, workload, H100, engine("fsdp1"), candidates, own, at)
    trained = 8 * PLAIN.layers * sum(a + b for a, b in (*PLAIN.attention_matrices, *PLAIN.ffn_matrices(PLAIN.ffn)))
    assert held.weights[0, 0] == pytest.approx(2 * PLAIN.parameters + 4 * trained)
    assert held.optimizer[0, 0] == pytest.approx(8 * trained)


@pytest.mark.parametrize(
    ("recipe", "name", "copies"),
    [
        ("fp8_tensorwise", "h100", 2), ("fp8_tensorwise", "gb200", 1), ("fp8_delayed", "b200", 1),
        ("fp8_tensorwise", "rtx-5090", 2), ("mxfp8", "gb200", 2 + 2 / 32),
    ],
)  # fmt: skip
def test_one_scale_and_a_card_that_multiplies_any_way_need_no_transposed_weights(
    recipe: Recipe, name: str, copies: float
) -> None:
    """Blocks with scales of their own are quantised along each dimension whatever the card does."""
    candidates = Candidates.of(dp_shard=N)
    at = probes(PLAIN, MEGATRON, candidates)
    own = owned(PLAIN, MEGATRON, candidates, at)

    def weights(of: Engine) -> float:
        workload = Workload(64, 64, precision(recipe))
        return float(states(PLAIN, workload, card(name), of, candidates, own, at).weights[0, 0])

    assert weights(MEGATRON) == 2 * own.dense[0, 0] + copies * own.matmul[0, 0]
    assert weights(replace(MEGATRON, has_transformer_engine=False)) >= weights(MEGATRON)


def test_moments_in_bf16_take_half() -> None:
    narrow = replace(MEGATRON, moment_bytes=4.0)
    assert per_parameter(MEGATRON, zero=1, dp_shard=N)[2] == pytest.approx((4 + 8) / N)
    assert per_parameter(narrow, zero=1, dp_shard=N)[2] == pytest.approx((4 + 4) / N)
