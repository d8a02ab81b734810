"""What does a functional test of Megatron-LM run, in the planner's own values?

Arguments that a row leaves out have Megatron's defaults. Measured columns are not read here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.published_machines import card_of, machine_of
from benchmarks.published_networks import Unclear
from triax.plan import candidates as bits
from triax.plan.candidates import SCHEDULE_NAMES, Candidates
from triax.plan.engine import Engine, engine
from triax.plan.hardware import Card, Machine
from triax.plan.network import Experts, LatentAttention, Network
from triax.plan.workload import Optimizer, Recipe, Workload, precision

MIB: Final = 2**20
_VOCABULARIES: Final = {"TikTokenizer": 131072, "Llama2Tokenizer": 32000, "GPT2BPETokenizer": 50257}
_FP8: Final[dict[str, Recipe]] = {
    "tensorwise": "fp8_tensorwise", "blockwise": "fp8_blockwise", "mxfp8": "mxfp8", "delayed": "fp8_delayed",
}  # fmt: skip
_RECOMPUTE: Final = {
    "core_attn": bits.CORE_ATTENTION, "layernorm": bits.NORMS, "moe_act": bits.ACTIVATION, "mlp": bits.MLP,
    "mla_up_proj": bits.LATENT_UP, "moe": bits.EXPERTS, "shared_experts": bits.SHARED_EXPERTS,
}  # fmt: skip


@dataclass(frozen=True)
class PeakRow:
    """One test, its measurements left out. ``candidates`` has one entry."""

    id: str
    family: str
    """Name of the test without environment: rows of one family are left out together."""
    network: Network
    workload: Workload
    machine: Machine
    engine: Engine
    candidates: Candidates

    @property
    def is_moe(self) -> bool:
        """Whether the network has experts."""
        return self.network.experts is not None


class _Arguments:
    """A row's cells; an empty one is an argument that was not given."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self._row = row

    def text(self, name: str, default: str = "") -> str:
        text = (self._row.get(name) or "").strip()
        return default if text.lower() in ("", "none", "nan", "null") else text

    def number(self, name: str, default: int = 0) -> int:
        text = self.text(name)
        try:
            return int(float(text)) if text else default
        except ValueError:
            raise Unclear(f"{name} is {text!r}, which is no number") from None

    def real(self, name: str, default: float) -> float:
        try:
            return float(self.text(name) or default)
        except ValueError:
            raise Unclear(f"{name} is {self.text(name)!r}, which is no number") from None

    def flag(self, name: str) -> bool:
        return self.text(name).lower() in ("true", "1", "yes")


def read_peak_row(row: Mapping[str, str]) -> PeakRow:
    """Return what a row of peak memories describes; raise Unclear with the reason where it cannot be understood."""
    given = _Arguments(row)
    test = given.text("test") or given.text("id").split("@")[0]
    if re.search(r"grpo|rlhf|inference", test):
        raise Unclear("it trains and generates in turns, and its arguments do not say how much is kept for generating")
    if re.search(r"t5|bert|vision|multimodal|retro|mamba|hybrid", test):
        raise Unclear("its network is no decoder of attention and feed-forward alone")
    if "distill" in test:
        raise Unclear("a second network teaches the first, and its arguments are not among the columns")
    if "offload" in test:
        raise Unclear("some activations wait in the server's memory, and the columns do not say which")
    network = _network(given)
    card = _card(given.text("environment") or given.text("id").rpartition("@")[2])
    columns, cards = _degrees(given, network)
    cuts = _cuts(given, network, columns)
    stages = _stages_per_rank(given, network, columns["pp"], cuts)
    micro = max(given.number("micro_batch_size", 1), 1)
    data_ranks = columns["dp_replicate"] * columns["dp_shard"]
    batch = given.number("global_batch_size", micro * data_ranks * 4 * columns["pp"])
    if batch < micro * data_ranks:
        # Fewer sequences than data ranks would take: it ran on fewer cards.
        columns["dp_shard"], columns["dp_replicate"] = max(batch // micro, 1), 1
        data_ranks = columns["dp_shard"]
    candidates = Candidates.of(
        **columns, **_recompute(given), stages_per_rank=stages, cut=-1 if cuts is None else 0,
        cuts=() if cuts is None else (cuts,), sequences_per_microbatch=micro,
        microbatches=max(batch // (micro * data_ranks), 1),
        schedule=SCHEDULE_NAMES.index("Interleaved1F1B" if stages > 1 else "1F1B"),
    )  # fmt: skip
    optimizer: Optimizer = "muon" if "muon" in given.text("optimizer") else "adamw"
    workload = Workload(batch, given.number("seq_length", 1024), precision(_recipe(given)), optimizer=optimizer)
    return PeakRow(
        id=given.text("id"), family=test, network=network, workload=workload,
        machine=machine_of(card, "", cards, None), engine=_engine(given, card.name), candidates=candidates,
    )  # fmt: skip


def _card(environment: str) -> Card:
    known = ("gb300", "gb200", "b200", "h200", "h100")
    return card_of(next((name for name in known if name in environment), "a100"))


def _recipe(given: _Arguments) -> Recipe:
    if given.text("fp8_format"):
        return _FP8.get(given.text("fp8_recipe", "delayed"), "fp8_delayed")
    return "bf16" if given.flag("bf16") else "fp16" if given.flag("fp16") else "fp32"


def _network(given: _Arguments) -> Network:
    layers, hidden = given.number("num_layers"), given.number("hidden_size")
    heads = given.number("num_attention_heads")
    if not (layers and hidden and heads):
        raise Unclear("it does not say layers, width and heads")
    is_gated = given.flag("swiglu")
    ffn = given.number("ffn_hidden_size") or (int(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden)
    has_bias = not given.flag("disable_bias_linear")
    is_grouped = given.flag("group_query_attention")
    positions = given.text("position_embedding_type", "learned_absolute")
    return Network(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=given.number("num_query_groups", heads) if is_grouped else heads,
        head_dim=given.number("kv_channels") or hidden // heads,
        ffn=ffn,
        vocab=_vocabulary(given),
        is_gated=is_gated,
        is_tied=not given.flag("untie_embeddings_and_output_weights"),
        norm="rms" if given.text("normalization") == "RMSNorm" else "layer",
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        has_mlp_bias=has_bias,
        qk_norm="head" if given.flag("qk_layernorm") else "none",
        learned_positions=given.number("max_position_embeddings", 1024) if positions == "learned_absolute" else 0,
        latent_attention=_latent(given, hidden) if given.flag("multi_latent_attention") else None,
        experts=_experts(given, layers, ffn),
        mtp_depth=given.number("mtp_num_layers"),
        dropout=max(given.real("hidden_dropout", 0.1), given.real("attention_dropout", 0.1)),
        name=given.text("test"),
    )


def _latent(given: _Arguments, hidden: int) -> LatentAttention:
    """Ranks are not among the columns: DeepSeek-V3's where heads are as wide as its, else those of the toy."""
    if given.number("kv_channels"):
        return LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    return LatentAttention(q_rank=3 * hidden // 8, kv_rank=hidden // 8, nope_dim=16, rope_dim=8, value_dim=16)


def _experts(given: _Arguments, layers: int, ffn: int) -> Experts | None:
    count = given.number("num_experts")
    if not count:
        return None
    pattern = _layer_pattern(given.text("moe_layer_freq", "1"), layers)
    return Experts(
        count=count,
        per_token=given.number("moe_router_topk", 2),
        ffn=given.number("moe_ffn_hidden_size") or ffn,
        shared_ffn=given.number("moe_shared_expert_intermediate_size"),
        dense_layers=layers - sum(pattern),
    )


def _layer_pattern(text: str, layers: int) -> list[int]:
    """``([0]*3+[1]*11)`` is a list of layers, 1 with experts; a number n is every n-th layer."""
    terms = re.findall(r"\[([01](?:\s*,\s*[01])*)\]\s*(?:\*\s*(\d+))?", text)
    if terms:
        pattern = [int(bit) for bits_, times in terms for bit in re.findall(r"[01]", bits_) * int(times or 1)]
        return pattern[:layers] if len(pattern) >= layers else (pattern * layers)[:layers]
    match = re.search(r"\d+", text)
    every = max(int(match[0]), 1) if match else 1
    return [int(layer % every == 0) for layer in range(layers)]


def _vocabulary(given: _Arguments) -> int:
    tokenizer = given.text("tokenizer_type", "GPT2BPETokenizer")
    if given.number("vocab_size"):
        return given.number("vocab_size") + (1 if tokenizer == "NullTokenizer" else 0)
    if tokenizer in _VOCABULARIES:
        return _VOCABULARIES[tokenizer]
    if "SentencePiece" in tokenizer or "HuggingFace" in tokenizer:
        return 256000  # nemotron_2_256k.model in all of these tests
    return 50257


def _degrees(given: _Arguments, network: Network) -> tuple[dict[str, int], int]:
    tp, pp, cp = (
        max(given.number(name, 1), 1)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    )
    ep = max(given.number("expert_model_parallel_size", 1), 1)
    etp = max(given.number("expert_tensor_parallel_size", tp), 1) if network.experts is not None else 1
    least = tp * pp * cp
    with_experts = pp * ep * etp
    cards = given.number("num_gpus")
    if not cards:
        cards = max(_usual_cards(given.text("test"), given.text("environment"), network), least, with_experts)
    if cards % least:
        raise Unclear(f"tp={tp} x pp={pp} x cp={cp} does not divide {cards} cards")
    data_ranks = cards // least
    instances = max(given.number("num_distributed_optimizer_instances", 1), 1)
    strategy = given.text("data_parallel_sharding_strategy")
    is_sharded = given.flag("use_megatron_fsdp") and strategy.startswith("optim_grads")
    zero = (3 if strategy == "optim_grads_params" else 2) if is_sharded else (
        1 if given.flag("use_distributed_optimizer") else 0)  # fmt: skip
    replicate = instances if zero else data_ranks
    if data_ranks % replicate:
        raise Unclear(f"{instances} instances of the optimizer do not divide {data_ranks} data ranks")
    columns = {
        "tp": tp, "pp": pp, "cp": cp, "ep": ep if network.experts is not None else 1, "etp": etp, "zero": zero,
        "dp_replicate": replicate, "dp_shard": data_ranks // replicate,
        "sequence_parallel": int(given.flag("sequence_parallel") and tp > 1),
    }  # fmt: skip
    return columns, cards


def _usual_cards(test: str, environment: str, network: Network) -> int:
    """Cards of a test that does not say: one server, or what the states of the release tests can only be shared by."""
    if "release" not in test:
        return 8
    if "proxy" in test:
        return 32 if "gb200" in environment else 64
    return 64 if network.experts is None else 128


def _cuts(given: _Arguments, network: Network, columns: Mapping[str, int]) -> tuple[int, ...] | None:
    """Layers of each stage, from a layout such as ``Et*2|(tt|)*5t|tmL`` or where embedding and loss count as layers."""
    text = given.text("pipeline_model_parallel_layout")
    if text:
        flat = re.sub(r"\(([^()]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), text)
        flat = re.sub(r"([A-Za-z|])\*(\d+)", lambda match: match[1] * int(match[2]), flat)
        cuts = tuple(stage.count("t") for stage in flat.split("|"))
        if sum(cuts) != network.layers or len(cuts) % columns["pp"]:
            raise Unclear(f"its pipeline layout {text} is not that of {network.layers} layers on {columns['pp']} ranks")
        return cuts
    stages = columns["pp"] * max(given.number("num_virtual_stages_per_pipeline_rank", 1), 1)
    if network.layers % stages and (network.layers + 2) % stages == 0:
        each = (network.layers + 2) // stages
        return (each - 1, *(each for _ in range(stages - 2)), each - 1)
    return None


def _stages_per_rank(given: _Arguments, network: Network, pp: int, cuts: tuple[int, ...] | None) -> int:
    if pp == 1:
        return 1
    if cuts is not None:
        return len(cuts) // pp
    layers = given.number("num_layers_per_virtual_pipeline_stage")
    if layers:
        return max(network.layers // (pp * layers), 1)
    return max(given.number("num_virtual_stages_per_pipeline_rank", 1), 1)


def _recompute(given: _Arguments) -> dict[str, int]:
    granularity, method = given.text("recompute_granularity"), given.text("recompute_method")
    layers = given.number("recompute_num_layers", 1)
    if granularity == "full":
        if method == "block":
            return {"recompute": bits.FULL, "recompute_layers": layers}
        return {"recompute": bits.FULL, "layers_per_checkpoint": max(layers, 1)}
    if granularity == "selective":
        modules = re.findall(r"[a-z_]+", given.text("recompute_modules", "core_attn"))
        chosen = 0
        for module in modules:
            chosen |= _RECOMPUTE.get(module, 0)
        return {"recompute": chosen}
    return {}


def _engine(given: _Arguments, card: str) -> Engine:
    is_local = given.text("transformer_impl", "transformer_engine") == "local"
    backend = given.text("attention_backend")
    is_unfused = backend == "unfused" or (is_local and backend != "flash" and not given.flag("use_flash_attn"))
    is_native = given.text("cross_entropy_fusion_impl", "native") == "native"
    test = given.text("test")
    # FlashAttention-2 runs on Ampere, and where sums must be deterministic on Blackwell; elsewhere cuDNN does.
    is_flash_2 = card.startswith("a100") or (card.startswith(("gb", "b")) and given.flag("deterministic_mode"))
    is_fused_loss = is_native and given.flag("cross_entropy_loss_fusion")
    grads = 2 if given.flag("fp16") and not given.flag("bf16") else 4
    return replace(
        engine("megatron"),
        attention="materialised" if is_unfused else "flash",
        loss="fused" if is_fused_loss else "vocab_parallel",
        has_transformer_engine=not is_local or "_te_" in test,
        cublas_workspace_bytes=32.0 * MIB if given.flag("deterministic_mode") else None,
        keeps_context_copy=not is_unfused and is_flash_2,
        makes_attention_mask="no_create_attention_mask" not in test,
        grouped_gemm_streams=4 if given.flag("moe_grouped_gemm") else 0,
        deferred_logit_gradients=2.0 if "defer_embedding_wgrad" in test else 0.0,
        vocab_padding=given.number("make_vocab_size_divisible_by", 128),
        grad_bytes=grads,
        grad_reduce_bytes=grads,
    )  # fmt: skip
