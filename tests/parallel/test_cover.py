"""Do the habits that any layout may have train like one device in every combination of two?

Degrees with the way to cut a sequence, ZeRO stage, schedule, recompute policy, heads, experts over as many ranks as
there are, and what goes with all of them: a pairwise cover. Its first settings, which try the most pairs each, always
run.
"""

from itertools import product
from typing import Any

import pytest

from tests.harness.pairwise import Setting, all_pairs, pairs_of, pairwise_cover
from tests.harness.toy import toy_run
from tests.parallel.equality import assert_equals_one_device
from triax.spec.check import check
from triax.spec.layout import Layout
from triax.spec.model import ModelSpec
from triax.spec.run import Run
from triax.spec.schedule import SCHEDULES

NUM_ALWAYS = 4

DEGREES: dict[str, dict[str, Any]] = {
    " ".join(f"{axis}={degree}" for axis, degree in degrees.items()): degrees
    for degrees in (
        {"dp_shard": 4, "tp": 2},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        {"dp_replicate": 4, "tp": 2},
        {"dp_shard": 2, "tp": 4},
        {"pp": 2},
        {"pp": 2, "tp": 4},
        {"pp": 2, "dp_shard": 2, "tp": 2},
        {"pp": 2, "dp_replicate": 2, "tp": 2},
        {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
        {"pp": 4, "dp_shard": 2},
        {"pp": 4, "tp": 2},
        {"cp": 4, "tp": 2, "cp_method": "ring"},
        {"dp_shard": 2, "cp": 2, "tp": 2, "cp_method": "all_to_all"},
        {"dp_replicate": 2, "cp": 4, "cp_method": "all_gather"},
        {"pp": 2, "cp": 2, "tp": 2, "cp_method": "all_gather"},
        {"pp": 2, "dp_shard": 2, "cp": 2, "cp_method": "ring"},
        {"pp": 2, "cp": 4, "cp_method": "all_to_all"},
    )
}

RELATIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": {
        "attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "qk_norm": "head",
        "norm_placement": "both", "norm_is_offset": True,
    },
    "windowed": {
        "sliding_window": 3, "global_layers": (1,), "layers_without_rope": (0,), "hidden_act": "gelu_pytorch_tanh",
        "embedding_multiplier": 1.5, "residual_multiplier": 0.5, "logits_scaling": 1.2, "norm_placement": "post",
    },
    "experts": {
        "experts": {
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "router_aux_loss_coef": 0.1,
            "router_z_loss_coef": 0.1, "shared_expert_intermediate_size": 23,
        },
    },
}  # fmt: skip

BF16 = "bf16 sgd"

FREE: dict[str, list[Any]] = {
    "is_tied": [True, False],
    "vocab_size": [61, 64],
    "intermediate_size": [23, 24],
    "relative": list(RELATIVES),
    "layers_left_over": [0, 1, 3],
    "stage_cuts": ["by cost", "given"],
    "microbatches": [1, 3, 5],
    "sequences_per_microbatch": [1, 2],
    # AdamW takes steps of one size in the direction of each gradient's sign, and in bf16 that is chance near zero.
    "numbers": ["fp64 adamw", "fp64 sgd", "fp32 adamw", "fp32 sgd", BF16],
    "max_grad_norm": [0.0, 0.3],
    "order": [
        ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
        ("tp", "cp", "dp_shard", "dp_replicate", "pp"),
        ("dp_shard", "pp", "tp", "dp_replicate", "cp"),
    ],
}
"""Any value goes with any value of any other knob."""

NEVER = {
    *((("relative", relative), ("numbers", BF16)) for relative in ("biased", "windowed", "experts")),
    *((("relative", "windowed"), ("degrees", name)) for name in DEGREES if "ring" in name),
}
"""But for rings with windows, which are refused, and for three relatives in bf16. Biases start at zero, so that after a
step they are all gradient, and that is rounding there; norms behind blocks bring small numbers up to one, their
rounding with them; and tokens choose other experts where two score alike."""

BOUND: dict[str, list[Any]] = {
    "degrees": list(DEGREES),
    "zero": [0, 1, 2, 3],
    "schedule": list(SCHEDULES),
    "recompute": ["none", "selective", "full"],
    "num_key_value_heads": [2, 4, 8],
}
"""Values that rule each other out, as ``triax.spec.check`` says."""


def layout_and_run(setting: Setting) -> tuple[Layout, Run]:
    degrees, kind = DEGREES[setting["degrees"]], SCHEDULES[setting["schedule"]]
    stages = degrees.get("pp", 1) * kind.min_stages_per_rank
    layers = max(stages + setting["layers_left_over"], 2)
    cuts = (layers - stages + 1, *[1] * (stages - 1))
    layout = Layout(
        **degrees, zero=setting["zero"], schedule=kind.name, stages_per_rank=kind.min_stages_per_rank,
        stage_cuts=cuts if setting["stage_cuts"] == "given" else None, recompute=setting["recompute"],
        sequences_per_microbatch=setting["sequences_per_microbatch"], microbatches=setting["microbatches"],
        order=setting["order"],
    )  # fmt: skip
    if setting["relative"] == "experts":
        layout = layout.model_copy(update={"ep": layout.expert_ranks})
    model = ModelSpec(
        hidden_size=24, intermediate_size=setting["intermediate_size"], num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=setting["num_key_value_heads"], head_dim=8, vocab_size=setting["vocab_size"],
        tie_word_embeddings=setting["is_tied"], **RELATIVES[setting["relative"]],
    )  # fmt: skip
    precision, optimizer = setting["numbers"].split()
    # With AdamW's usual eps a bias that starts at zero is moved by one step's rate, however small its gradient and
    # however large the rounding of that: eps is chosen above the smallest gradients.
    master = "fp64" if precision == "fp64" else "fp32"
    # In bf16, two steps of 3e-2 on a single sequence leave the plain loop itself 4e-3 off the weights of fp64.
    rate = 3e-4 if optimizer == "adamw" else 1e-2 if precision == "bf16" else 3e-2
    run = toy_run(
        model,
        train={"sequences_per_step": layout.sequences_per_step},
        data={"seq_len": 8},
        precision={"compute": precision, "master": master, "reduce": master},
        optimizer={"name": optimizer, "max_grad_norm": setting["max_grad_norm"], "eps": 1e-2},
        learning_rate={"peak": rate},
    )
    return layout, run


def bound_settings() -> list[Setting]:
    first = {name: values[0] for name, values in FREE.items()}
    settings = (dict(zip(BOUND, values, strict=True)) for values in product(*BOUND.values()))
    return [setting for setting in settings if not check(*layout_and_run(setting | first))]


COVER = pairwise_cover(bound_settings(), FREE, NEVER)


def name_of(setting: Setting) -> str:
    named = {name: value for name, value in setting.items() if name != "order"}
    order = {"outermost": setting["order"][0]}
    return " ".join(str(v) if isinstance(v, str) else f"{k}={v}" for k, v in sorted((named | order).items()))


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=name_of(setting), marks=() if index < NUM_ALWAYS else pytest.mark.exhaustive)
        for index, setting in enumerate(COVER)
    ],
)
def test_every_pair_of_settings_equals_one_device(setting: Setting) -> None:
    layout, run = layout_and_run(setting)
    assert_equals_one_device(run, layout)


def test_the_cover_covers() -> None:
    tried = {pair for setting in COVER for pair in pairs_of(setting)}
    bound = bound_settings()
    assert tried == all_pairs(bound, FREE, NEVER)
    assert {(name, value) for setting in bound for name, value in setting.items()} == {
        (name, value) for name, values in BOUND.items() for value in values
    }, "a value that nothing may have is not tried"
