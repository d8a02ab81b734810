"""Do the lists of kept tensors reproduce the literature, and what torch really saves for triax's own layers?"""

from dataclasses import replace

import pytest

from triax.plan import candidates as bits
from triax.plan.candidates import Candidates
from triax.plan.engine import engine
from triax.plan.memory.activations import activations, held_bytes, working_bytes
from triax.plan.memory.stages import probes
from triax.plan.network import Experts, LatentAttention, Network, network_of
from triax.plan.workload import Workload, precision
from triax.spec.model import ModelSpec

S, B, H, A = 128, 2, 64, 4
GPT = Network(2, H, A, A, H // A, 4 * H, 512, is_gated=False, norm="layer", learned_positions=S, dropout=0.1)
PAPER = replace(engine("megatron"), attention="materialised", makes_attention_mask=False)
BF16 = Workload(64, S, precision("bf16"))


def kept(network: Network = GPT, of: object = PAPER, workload: Workload = BF16, **columns: int) -> float:
    """Bytes that a block keeps of a microbatch, as the candidate recomputes."""
    chosen = Candidates.of(sequences_per_microbatch=B, **columns)
    acts = activations(network, workload, of, chosen, 1.0)  # type: ignore[arg-type]
    kinds = ("attention", "expert" if network.experts else "dense")
    return float(sum(acts.layers[kind].kept_again[0] for kind in kinds))


def statistics(tp: int = 1, *, sequence_parallel: bool = True) -> float:
    """A number in fp32 for each position and norm, which the paper leaves out."""
    return 2 * 4.0 * S * B / (tp if sequence_parallel else 1)


def test_without_fused_attention_it_is_korthikantis_formula() -> None:
    """34 s b h + 5 a s^2 b (Korthikanti et al. 2022, arXiv:2205.05198, equation 1)."""
    assert kept() - statistics() == 34 * S * B * H + 5 * A * S * S * B


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_and_sequence_parallelism_are_equations_2_and_4(tp: int) -> None:
    without = kept(tp=tp, sequence_parallel=0) - statistics()
    assert without == S * B * H * (10 + 24 / tp) + 5 * A * S * S * B / tp
    assert kept(tp=tp) - statistics(tp) == (34 * S * B * H + 5 * A * S * S * B) / tp


def test_selective_recomputation_of_scores_leaves_equation_6() -> None:
    assert kept(recompute=bits.CORE_ATTENTION) - statistics() == 34 * S * B * H


def test_full_recomputation_keeps_the_input_alone() -> None:
    """2 s b h a layer (the same paper, section 5), and one of k inputs with k layers between two checkpoints."""
    columns = {"sequences_per_microbatch": B, "recompute": bits.FULL}
    for between, whole in ((1, 2), (2, 1)):
        chosen = Candidates.of(layers_per_checkpoint=between, **columns)
        acts = activations(GPT, BF16, PAPER, chosen)
        at = probes(GPT, PAPER, chosen)
        assert held_bytes(acts, at.held, at.layers, chosen)[0, 0] == whole * 2 * S * B * H
        _, backward = working_bytes(acts, at, chosen)
        assert backward[0, 0] > between * 34 * S * B * H


def test_some_layers_recompute() -> None:
    def held(**columns: int) -> float:
        chosen = Candidates.of(sequences_per_microbatch=B, **columns)
        at = probes(GPT, PAPER, chosen)
        return float(held_bytes(activations(GPT, BF16, PAPER, chosen), at.held, at.layers, chosen)[0, 0])

    none, half, all_of_them = held(), held(recompute=bits.FULL, recompute_layers=1), held(recompute=bits.FULL)
    assert half == pytest.approx((none + all_of_them) / 2)
    assert held(offload_layers=1) == pytest.approx(none / 2)


def test_fused_attention_keeps_a_number_a_head_and_position() -> None:
    flash = replace(PAPER, attention="flash")
    assert kept(of=flash) - statistics() == 34 * S * B * H + 4 * A * S * B


def test_flash_attention_2_keeps_its_output_twice_unless_there_is_one_sequence() -> None:
    flash = replace(PAPER, attention="flash")
    twice = replace(flash, keeps_context_copy=True)
    assert kept(of=twice) - kept(of=flash) == 2 * S * B * H
    assert kept(of=twice, cp=2) == kept(of=flash, cp=2)


def test_grouped_heads_and_gates_change_their_own_tensors_alone() -> None:
    grouped = replace(GPT, kv_heads=1)
    assert kept() - kept(grouped) == 2 * (A - 1) * (H // A) * S * B * 2
    gated = replace(GPT, is_gated=True)
    assert kept(gated) - kept() == 4 * H * S * B * 2


def test_context_parallelism_divides_everything() -> None:
    flash = replace(PAPER, attention="flash")
    assert kept(of=flash, cp=4) == pytest.approx(kept(of=flash) / 4)


MIXED = replace(GPT, dropout=0.0, is_gated=True, experts=Experts(count=8, per_token=2, ffn=96))


def test_experts_keep_what_each_token_sends_them() -> None:
    """Two experts a token: what they receive (h), gate and up (2 f) and their product (f), in two bytes."""
    flash = replace(PAPER, attention="flash")
    dense = replace(MIXED, experts=None, ffn=96)
    tokens = S * B
    own = tokens * 2 * 2 * (H + 3 * 96)
    router = tokens * (12 * 8 + 16 * 2)
    assert kept(MIXED, flash) - kept(dense, flash) == own + router - tokens * 2 * 3 * 96


def test_a_router_out_of_balance_fills_the_busiest_rank() -> None:
    def bytes_at(imbalance: float, ep: int) -> float:
        chosen = Candidates.of(sequences_per_microbatch=B, ep=ep, dp_shard=8)
        return float(activations(MIXED, BF16, PAPER, chosen, imbalance).layers["expert"].kept[0])

    assert bytes_at(2.0, ep=1) == bytes_at(1.0, ep=1)
    assert bytes_at(1.0, ep=8) < bytes_at(1.5, ep=8) < bytes_at(2.0, ep=8)


def test_each_module_that_is_recomputed_keeps_less() -> None:
    latent = LatentAttention(q_rank=32, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16)
    network = replace(MIXED, latent_attention=latent)
    whole = kept(network)
    for module in (bits.NORMS, bits.ACTIVATION, bits.LATENT_UP, bits.EXPERTS, bits.CORE_ATTENTION, bits.SELECTIVE):
        assert kept(network, recompute=module) < whole
    assert kept(network, recompute=bits.NORMS | bits.ACTIVATION) < kept(network, recompute=bits.NORMS)


def test_latent_attention_keeps_latents_before_and_after_their_norms_and_the_keys_two_parts_apart() -> None:
    """Queries and keys of 24, values of 16, latents of 32 and 16, a turning part of 8 (DeepSeek-V2's list)."""
    latent = LatentAttention(q_rank=32, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16)
    flash = replace(PAPER, attention="flash")
    network = replace(GPT, latent_attention=latent, dropout=0.0)
    plain = replace(GPT, dropout=0.0)
    heads = A * (24 + 24 + 16) - 3 * H
    latents = (32 + 16 + 8) + (32 + 16) + A * 16
    assert kept(network, flash) - kept(plain, flash) == S * B * 2 * (heads + latents)


@pytest.mark.slow  # it imports torch
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("settings", [{}, {"num_experts_per_tok": 3}, {"shared_expert_intermediate_size": 48}])
def test_our_experts_keep_what_torch_saves_for_them(compute: str, settings: dict[str, int]) -> None:
    """But for what does not grow with tokens: the router's matrix in fp32, counts of experts, scalars."""
    import torch

    from triax.nn.decoder import Layer
    from triax.nn.rope import Rotation
    from triax.spec.experts import ExpertSpec

    experts = ExpertSpec(**({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32} | settings))
    model = ModelSpec(
        hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, experts=experts,
    )  # fmt: skip
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[compute]
    torch.manual_seed(0)
    layer = Layer(model, 0).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter.data, std=0.1)
    x = torch.randn(B, S, 64, dtype=dtype, requires_grad=True)
    rotations = {"global": Rotation.at(torch.arange(S).expand(B, S), None, model, "global", dtype)}
    known = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, rotations, None)
    shared = 2 * 16 * 4 * S * B
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) - shared
    counted = kept(network_of(model), engine("triax"), Workload(B, S, precision(compute)))  # type: ignore[arg-type]
    router = 8 * 64 * 4 if compute == "bf16" else 0
    assert 0 <= measured - router - counted < 256


@pytest.mark.slow  # it imports torch
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": "head"}, {"norm_placement": "both"}, {"norm_placement": "post"}])
def test_our_layers_keep_what_torch_saves_for_them(compute: str, changes: dict[str, str]) -> None:
    """But for sines and cosines, which all layers share, and statistics of heads: four bytes a head and position."""
    import torch

    from triax.nn.decoder import Layer
    from triax.nn.rope import Rotation

    model = ModelSpec(
        hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, **changes,
    )  # fmt: skip
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[compute]
    layer = Layer(model, 0).to(dtype)
    x = torch.randn(B, S, 64, dtype=dtype, requires_grad=True)
    rotations = {"global": Rotation.at(torch.arange(S).expand(B, S), None, model, "global", dtype)}
    known = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, rotations, None)
    shared = 2 * 16 * 4 * S * B
    of_heads = 4 * (4 + 2) * S * B if "qk_norm" in changes else 0
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) - shared - of_heads
    workload = Workload(B, S, precision(compute))  # type: ignore[arg-type]
    assert kept(network_of(model), engine("triax"), workload) == measured
