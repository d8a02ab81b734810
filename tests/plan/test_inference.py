"""Do servings hold what is known of serving: how many cards models need, and what bounds a token?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.plan.catalogue import machine
from triax.plan.inference import cache_bytes_per_token, largest_batch, plan_inference, serve
from triax.plan.models import find_model
from triax.spec.cluster import parse_cluster

H100 = machine(parse_cluster("8x8xh100"))


@pytest.mark.parametrize(
    ("model", "cluster", "precision", "cards"),
    [("llama-3.1-8b", "8x8xh100", "bf16", 1), ("llama-3.1-70b", "8x8xh100", "bf16", 2),
     ("llama-3.1-70b", "8x8xh100", "fp8", 1), ("llama-3.1-405b", "8x8xh100", "fp8", 8),
     ("deepseek-v3", "8x8xh200", "fp8", 8), ("deepseek-v3", "8x8xh100", "fp8", 16),
     ("llama-3.1-70b", "1x8xrtx-4090", "int4", 2), ("llama-3.1-405b", "8x8xh100", "bf16", 16)],
)  # fmt: skip
def test_cards_that_models_are_known_to_need(model: str, cluster: str, precision: str, cards: int) -> None:
    found = plan_inference(
        find_model(model).network, machine(parse_cluster(cluster)), context=4096, precision=precision, usd=3.0
    )
    assert found[0].cards == cards


def test_keys_and_values_of_known_models() -> None:
    """Llama 2 7B: half a megabyte a token; grouped queries an eighth of their heads' (arXiv:2305.13245); DeepSeek-V3:
    576 numbers a layer (arXiv:2412.19437)."""
    assert cache_bytes_per_token(find_model("llama-2-7b").network, 4096) == 524_288
    assert cache_bytes_per_token(find_model("llama-3.1-70b").network, 4096) == 2 * 2 * 8 * 128 * 80
    assert cache_bytes_per_token(find_model("deepseek-v3").network, 4096) == 576 * 2 * 61
    windowed = find_model("gpt-oss-20b").network
    assert cache_bytes_per_token(windowed, 128) > cache_bytes_per_token(windowed, 100_000) > 0


def test_one_sequence_is_bound_by_reading_the_weights() -> None:
    one = serve(find_model("llama-3.1-8b").network, H100, tp=1, pp=1, batch=1, context=2048, precision="bf16", usd=3.0)
    assert 1 / one.token_s == pytest.approx(3.35e12 * 0.75 / (7.5e9 * 2 + 2048 * 131072), rel=0.02)


@given(st.integers(1, 500))
def test_a_batch_shares_the_reading(batch: int) -> None:
    network = find_model("llama-3.1-8b").network
    one, more = (
        serve(network, H100, tp=1, pp=1, batch=size, context=1024, precision="bf16", usd=3.0)
        for size in (batch, batch + 1)
    )
    assert more.tokens_per_s > one.tokens_per_s
    assert more.usd_per_million_tokens < one.usd_per_million_tokens
    assert more.token_s >= one.token_s


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    network = find_model("llama-3.1-8b").network
    most = largest_batch(network, H100, tp=1, pp=1, context=8192, precision="bf16")
    weights = network.parameters * 2
    assert weights + most * 8192 * 131072 < H100.card.memory_bytes < weights + (most + 8) * 8192 * 131072 * 1.1


def test_what_fits_nowhere_has_no_serving() -> None:
    small = machine(parse_cluster("1x1xrtx-4090"))
    assert plan_inference(find_model("llama-3.1-405b").network, small, context=4096, precision="bf16", usd=1.0) == []
