"""Which network was run? From the dimensions a row prints, and from its model's name where it prints too few.

What a name adds are facts of the models' own config.json files and papers: latent ranks, shared experts, windows,
mixers. Where a row lacks dimensions and its name is unknown, the row is refused.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from triax.plan.network import Experts, LatentAttention, Network, StateSpace

_GPT_LIKE: Final = re.compile(r"gpt(?![ _-]*oss)|bloom|mpt|bigscience|turing|mt-nlg|nemotron-?4", re.I)
_LATENT_V3: Final = LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)

KNOWN: Final[tuple[tuple[str, Network], ...]] = (
    (
        r"nemotron.{0,4}3.{0,3}super|nemotron v3 super",
        Network(
            88, 4096, 32, 2, 128, 2688, 131072, is_gated=False, num_attention=8, num_ffn=40, mtp_depth=1,
            experts=Experts(512, 22, 2688, shared_ffn=5376, latent=1024), state_space=StateSpace(40, 8192, 128, 8, 128),
        ),
    ),
    (
        r"nemotron.{0,4}3.{0,3}nano|nemotron v3 nano",
        Network(
            52, 2688, 32, 2, 128, 1856, 131072, is_gated=False, num_attention=6, num_ffn=23,
            experts=Experts(128, 6, 1856, shared_ffn=3712), state_space=StateSpace(23, 4096, 128, 8, 64),
        ),
    ),
    (
        r"nemotron-?h-?56b",
        Network(
            118, 8192, 64, 8, 128, 32768, 131072, is_gated=False, num_attention=10, num_ffn=54,
            state_space=StateSpace(54, 16384, 256, 8, 256),
        ),
    ),
    (
        r"nemotron-?h-?8b",
        Network(
            52, 4096, 32, 8, 128, 21504, 131072, is_gated=False, num_attention=4, num_ffn=24,
            state_space=StateSpace(24, 8192, 128, 8, 128),
        ),
    ),
    (
        r"deepseek.{0,3}v3",
        Network(
            61, 7168, 128, 128, 128, 18432, 129280, latent_attention=_LATENT_V3,
            experts=Experts(256, 8, 2048, shared_ffn=2048, dense_layers=3),
        ),
    ),
    (
        r"deepseek.{0,3}v2.{0,3}lite",
        Network(
            27, 2048, 16, 16, 128, 10944, 102400, latent_attention=replace(_LATENT_V3, q_rank=0),
            experts=Experts(64, 6, 1408, shared_ffn=2816, dense_layers=1),
        ),
    ),
    (
        r"deepseek.{0,3}v2",
        Network(
            60, 5120, 128, 128, 128, 12288, 102400, latent_attention=_LATENT_V3,
            experts=Experts(160, 6, 1536, shared_ffn=3072, dense_layers=1),
        ),
    ),
    (
        r"kimi.{0,3}k2",
        Network(
            61, 7168, 64, 64, 128, 18432, 163840, latent_attention=_LATENT_V3,
            experts=Experts(384, 8, 2048, shared_ffn=2048, dense_layers=1),
        ),
    ),
    (
        r"moonlight",
        Network(
            27, 2048, 16, 16, 128, 11264, 163842, latent_attention=replace(_LATENT_V3, q_rank=0),
            experts=Experts(64, 6, 1408, shared_ffn=2816, dense_layers=1),
        ),
    ),
    (
        r"gpt.{0,2}oss.{0,2}120b",
        Network(
            36, 2880, 64, 8, 64, 2880, 201088, window=128, windowed_layers=18, has_qkv_bias=True, has_out_bias=True,
            experts=Experts(128, 4, 2880),
        ),
    ),
    (
        r"gpt.{0,2}oss.{0,2}20b",
        Network(
            24, 2880, 64, 8, 64, 2880, 201088, window=128, windowed_layers=12, has_qkv_bias=True, has_out_bias=True,
            experts=Experts(32, 4, 2880),
        ),
    ),
    (
        r"llama.{0,2}4.{0,2}maverick",
        Network(48, 5120, 40, 8, 128, 16384, 202048, experts=Experts(128, 1, 8192, shared_ffn=8192, dense_layers=24)),
    ),
    (r"llama.{0,2}4.{0,2}scout", Network(48, 5120, 40, 8, 128, 16384, 202048, experts=Experts(16, 1, 8192, 8192))),
    (r"grok", Network(64, 6144, 48, 8, 128, 32768, 131072, experts=Experts(8, 2, 32768))),
    (r"mixtral.{0,2}8.?22b", Network(56, 6144, 48, 8, 128, 16384, 32768, experts=Experts(8, 2, 16384))),
    (r"mixtral.{0,2}8.?7b", Network(32, 4096, 32, 8, 128, 14336, 32000, experts=Experts(8, 2, 14336))),
    (r"qwen3.{0,2}235b", Network(94, 4096, 64, 4, 128, 12288, 151936, qk_norm="head", experts=Experts(128, 8, 1536))),
    (r"qwen3.{0,2}30b", Network(48, 2048, 32, 4, 128, 6144, 151936, qk_norm="head", experts=Experts(128, 8, 768))),
    (r"qwen3.{0,2}32b", Network(64, 5120, 64, 8, 128, 25600, 151936, qk_norm="head")),
    (r"qwen3.{0,2}14b", Network(40, 5120, 40, 8, 128, 17408, 151936, qk_norm="head")),
    (r"qwen3.{0,2}8b", Network(36, 4096, 32, 8, 128, 12288, 151936, qk_norm="head")),
    (r"qwen2.5.{0,2}7b", Network(28, 3584, 28, 4, 128, 18944, 152064, has_qkv_bias=True)),
    (r"qwen2.5.{0,2}14b", Network(48, 5120, 40, 8, 128, 13824, 152064, has_qkv_bias=True)),
    (r"qwen2.5.{0,2}32b", Network(64, 5120, 40, 8, 128, 27648, 152064, has_qkv_bias=True)),
    (r"qwen2.5.{0,2}72b", Network(80, 8192, 64, 8, 128, 29568, 152064, has_qkv_bias=True)),
    (r"mistral.{0,2}7b", Network(32, 4096, 32, 8, 128, 14336, 32000)),
    (r"llama.{0,3}3.{0,4}405b", Network(126, 16384, 128, 8, 128, 53248, 128256)),
    (r"llama.{0,3}3.{0,4}70b", Network(80, 8192, 64, 8, 128, 28672, 128256)),
    (r"llama.{0,3}3.{0,4}8b", Network(32, 4096, 32, 8, 128, 14336, 128256)),
    (r"llama.{0,3}2.{0,4}70b|llama-70b", Network(80, 8192, 64, 8, 128, 28672, 32000)),
    (r"llama.{0,3}2.{0,4}34b|codellama.{0,3}34b", Network(48, 8192, 64, 8, 128, 22016, 32000)),
    (r"llama.{0,3}2.{0,4}13b", Network(40, 5120, 40, 40, 128, 13824, 32000)),
    (r"llama.{0,3}2.{0,4}7b|llama-7b", Network(32, 4096, 32, 32, 128, 11008, 32000)),
    (r"tinyllama", Network(22, 2048, 32, 4, 64, 5632, 32000)),
    (r"olmo-?2.{0,2}7b", Network(32, 4096, 32, 32, 128, 11008, 100352, qk_norm="full")),
    (r"gpt.?3.{0,3}5b", Network(24, 4096, 32, 32, 128, 16384, 51200, is_gated=False, norm="layer")),
    (r"gpt.?3.{0,3}175b", Network(96, 12288, 96, 96, 128, 49152, 51200, is_gated=False, norm="layer")),
    (r"gpt.?2.{0,4}52b", Network(64, 8192, 64, 64, 128, 32768, 51200, is_gated=False, norm="layer")),
    (r"nemotron-?4.{0,3}15b", Network(32, 6144, 48, 8, 128, 24576, 256000, is_gated=False, norm="layer")),
    (r"nemotron-?4.{0,3}340b", Network(96, 18432, 96, 8, 192, 73728, 256000, is_gated=False, norm="layer")),
)  # fmt: skip


class Unclear(Exception):
    """A row does not say enough to predict it."""


def network_of_row(row: Mapping[str, str], number: Callable[[str], int | None]) -> Network:
    """Return the network of a row; raise Unclear where neither its dimensions nor its name say which."""
    name = row.get("model", "")
    known = next((network for pattern, network in KNOWN if re.search(pattern, name, re.I)), None)
    layers, hidden = number("n_layers"), number("hidden")
    if known is not None and (hidden is None or hidden == known.hidden):
        return _adjusted(known, layers, number("vocab"), name)
    if layers is None or hidden is None:
        return _guessed(row, number, layers, hidden)
    heads = number("n_heads") or max(hidden // 128, 1)
    experts = number("n_experts")
    ffn = number("ffn_hidden") or 4 * hidden
    gated = not _GPT_LIKE.search(name) and ffn != 4 * hidden
    network = Network(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=number("n_kv_heads") or heads,
        head_dim=max(hidden // heads, 1) if hidden % heads == 0 else 128,
        ffn=ffn,
        vocab=number("vocab") or (51200 if _GPT_LIKE.search(name) or not gated else 128256),
        is_gated=gated or bool(experts),
        is_tied=bool(_GPT_LIKE.search(name)),
        norm="rms" if gated else "layer",
        learned_positions=0 if gated else 2048,
        experts=None
        if not experts
        else Experts(experts, number("experts_per_token") or 2, number("moe_ffn_hidden") or ffn),
        name=name,
    )
    return _gating_of(network, row)


def _adjusted(known: Network, layers: int | None, vocab: int | None, name: str) -> Network:
    """A published model with fewer layers or another vocabulary; parts of a kind shrink with the layers."""
    if vocab is not None and vocab > 1:
        known = replace(known, vocab=vocab)
    match = re.search(r"\((\d+) layers\)", name)
    layers = int(match[1]) if match else layers
    if layers is None or layers == known.layers:
        return replace(known, name=name)
    part = layers / known.layers
    experts, mixer = known.experts, known.state_space
    if experts is not None:
        experts = replace(experts, dense_layers=min(round(experts.dense_layers * part), layers - 1))
    if mixer is not None:
        mixer = replace(mixer, layers=round(mixer.layers * part))
    return replace(
        known, layers=layers, experts=experts, state_space=mixer, name=name,
        windowed_layers=round(known.windowed_layers * part),
        num_attention=None if known.num_attention is None else max(round(known.num_attention * part), 1),
        num_ffn=None if known.num_ffn is None else max(round(known.num_ffn * part), 1),
    )  # fmt: skip


def _guessed(
    row: Mapping[str, str], number: Callable[[str], int | None], layers: int | None, hidden: int | None
) -> Network:
    """A dense model of which only its size and perhaps its width are known: the usual depth for them."""
    size = _float(row.get("params_b", ""))
    name = row.get("model", "")
    if size is None or number("n_experts") or re.search(r"moe|a\d+b|deepseek|glm|nemotron", name, re.I):
        raise Unclear("its dimensions are not printed, and the model's name is not known here")
    gpt = bool(_GPT_LIKE.search(name))
    if hidden is None:
        hidden = min(
            (1024, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 12288),
            key=lambda width: abs(_depth(size, width) - width / 110),
        )
    depth = layers or max(round(_depth(size, hidden)), 1)
    return Network(
        layers=depth, hidden=hidden, heads=number("n_heads") or hidden // 128,
        kv_heads=number("n_kv_heads") or number("n_heads") or hidden // 128,
        head_dim=hidden // (number("n_heads") or hidden // 128), ffn=number("ffn_hidden") or 4 * hidden,
        vocab=number("vocab") or (51200 if gpt else 131072), is_gated=False, is_tied=gpt,
        norm="layer" if gpt else "rms", name=name,
    )  # fmt: skip


def _depth(size: float, hidden: int) -> float:
    return (size * 1e9 - 1e5 * hidden) / (12 * hidden**2)


def _gating_of(network: Network, row: Mapping[str, str]) -> Network:
    """Two matrices or three in feed-forward? The one whose count is nearer to the printed size, where one is."""
    size = _float(row.get("params_b", ""))
    other = replace(network, is_gated=not network.is_gated)
    if size is None or network.experts is not None or network.ffn == 4 * network.hidden:
        return network

    def off(one: Network) -> float:
        return abs(one.parameters / 1e9 / size - 1)

    return other if off(other) < off(network) - 0.05 else network


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
