"""Does the fingerprint of a run name the mathematics, all of it and nothing else?"""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.harness.toy import EVEN, ODD, toy_run
from tests.spec.run_files import Said, changed, make_run, whole
from triax.spec.experts import ExpertSpec
from triax.spec.run import Run

MATHEMATICS: Said = {
    "model.hidden_size": 128,
    "model.intermediate_size": 130,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 1,
    "model.head_dim": 20,
    "model.vocab_size": 258,
    "model.max_position_embeddings": 256,
    "model.rms_norm_eps": 1e-5,
    "model.rope_theta": 1e4,
    "model.tie_word_embeddings": False,
    "model.initializer_range": 0.02,
    "model.hidden_act": "silu",
    "model.attention_bias": False,
    "model.attention_out_bias": False,
    "model.mlp_bias": False,
    "model.qk_norm": "full",
    "model.norm_placement": "post",
    "model.norm_is_offset": False,
    "model.rope_scaling": {"kind": "dynamic", "factor": 2.0},
    "model.rope_local_theta": 1e4,
    "model.partial_rotary_factor": 1.0,
    "model.layers_without_rope": [],
    "model.sliding_window": 8,
    "model.global_layers": [0],
    "model.embedding_multiplier": 1.0,
    "model.attention_multiplier": 0.25,
    "model.residual_multiplier": 1.0,
    "model.logits_scaling": 1.0,
    "model.experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "data.format": "jsonl",
    "data.extensions": [".md"],
    "data.text_field": "text",
    "data.token_dtype": "uint32",
    "data.seq_len": 64,
    "data.attend_across_documents": True,
    "train.tokens_per_step": 1024,
    "train.seed": 8,
    "optimizer.name": "adamw",
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "optimizer.max_grad_norm": 1.0,
    "learning_rate.schedule": "cosine",
    "learning_rate.peak": 3e-4,
    "learning_rate.warmup_steps": 3,
    "learning_rate.decay_steps": 6,
    "learning_rate.final_ratio": 0.1,
    "precision.compute": "bf16",
    "precision.master": "fp32",
    "precision.reduce": "fp32",
    "eval.sequences": 16,
}
"""Another value for every key that changes losses."""

HABITS: Said = {
    "model.family": "llama",
    "data.train": ["/elsewhere"],
    "data.tokenizer": "/elsewhere/tokenizer.json",
    "data.cache_dir": "/elsewhere",
    "train.steps": 200,
    "train.timeout_s": 5.0,
    "train.compile": "aot_eager",
    "eval.every_steps": 5,
    "checkpoint.every_steps": 7,
    "checkpoint.failures_per_1000_server_days": 1.5,
    "checkpoint.memory_every_steps": "auto",
    "checkpoint.upload": "memory://elsewhere",
    "checkpoint.keep": 9,
    "checkpoint.background": True,
    "guard.check_initial_loss": True,
    "guard.initial_loss_tolerance": 0.2,
    "guard.max_skipped_in_a_row": 4,
    "recover.max_restarts": 4,
    "recover.same_fault": 5,
    "recover.backoff_s": 1.5,
    "recover.max_backoff_s": 9.0,
    "recover.lost_after_s": 6.0,
    "recover.join_s": 10.0,
    "guard.on_spike": "warn",
    "guard.window": 32,
    "guard.loss_threshold": 7.0,
    "guard.grad_norm_threshold": 7.0,
    "guard.max_rollbacks": 1,
    "guard.learning_rate_cut": 0.9,
    "guard.hash_every_steps": 0,
    "guard.alert_command": ["elsewhere"],
    "guard.alert_webhook": "http://elsewhere:8000/",
    "watch.console_every": 3,
    "watch.tensorboard": True,
    "watch.timeline_steps": [4],
    "watch.hang_soft_s": 7.0,
    "watch.hang_hard_s": 9.0,
    "watch.straggler_above": 0.5,
    "layout.pp": 1,
    "layout.dp_replicate": 1,
    "layout.dp_shard": 1,
    "layout.cp": 1,
    "layout.tp": 1,
    "layout.ep": 1,
    "layout.zero": 3,
    "layout.schedule": "1F1B",
    "layout.stages_per_rank": 1,
    "layout.stage_cuts": [3],
    "layout.sequences_per_microbatch": 1,
    "layout.microbatches": 1,
    "layout.cp_method": "all_to_all",
    "layout.recompute": "none",
    "layout.order": ["pp", "dp_replicate", "dp_shard", "cp", "tp"],
    "cluster.servers": 1,
    "cluster.cards_per_server": 1,
    "cluster.device": "cpu",
    "cluster.memory_bytes": 1,
    "cluster.peak_flops": 1.0,
    "cluster.matmul_flops_per_s": 1.0,
    "cluster.memory_bytes_per_s": 1.0,
    "cluster.inside_bytes_per_s": 1.0,
    "cluster.across_bytes_per_s": 1.0,
    "cluster.domain_cards": 8,
    "cluster.network": "ethernet-100g",
    "cluster.oversubscription": 1.0,
    "cluster.usd_per_card_hour": 1.0,
}
"""Another value for every key that changes only where, how fast and how long."""


def test_each_key_is_mathematics_or_habit() -> None:
    """A new key must be put into one of the two, and a run file with every key must be kept whole."""
    keys = {f"{section}.{key}" for section, said in whole().items() for key in said}
    assert keys == (MATHEMATICS.keys() | HABITS.keys())
    sections = [(name, value) for name, value in Run.model_validate(whole()) if name != "init"]  # see test_model_source
    fields = {f"{name}.{key}" for name, value in sections for key in type(value).model_fields}
    assert fields == keys | {"data.source", "train.sequences_per_step"}


@pytest.mark.parametrize("name", MATHEMATICS)
def test_mathematics_change_the_fingerprint(name: str) -> None:
    before, after = Run.model_validate(whole()), Run.model_validate(changed(whole(), name, MATHEMATICS[name]))
    assert after != before
    assert after.fingerprint != before.fingerprint


BEFORE_EXPERTS = {"cede0976dcbe328a": ODD, "cee5dec6ef5273cb": EVEN}
"""Fingerprints of runs of dense models as they were before a model could have experts."""


@pytest.mark.parametrize("fingerprint", BEFORE_EXPERTS)
def test_settings_that_came_later_leave_the_fingerprint_of_older_runs(fingerprint: str) -> None:
    """Runs that were begun with an older version go on: a setting that has its default is not there."""
    assert toy_run(BEFORE_EXPERTS[fingerprint]).fingerprint == fingerprint


@pytest.mark.parametrize("key", ExpertSpec.model_fields)
def test_each_setting_of_experts_is_mathematics(key: str) -> None:
    said = whole()["model"]["experts"]
    others = {
        "num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 25, "shared_expert_intermediate_size": 1,
        "mlp_only_layers": [], "first_k_dense_replace": 0, "n_group": 2, "topk_group": 3,
        "router_aux_loss_coef": 0.02, "router_bias_update_speed": 0.002, "routed_scaling_factor": 1.0,
    }  # fmt: skip
    dense = {"scoring_func": "softmax", "norm_topk_prob": True, "decoder_sparse_step": 1}
    change: Said = {key: (others | dense).get(key)}
    if key == "selection_bias":
        change = {key: False, "router_bias_update_speed": 0.0}
    if key == "router_z_loss_coef":
        said = said | {"scoring_func": "softmax"}
        change = {key: 0.1}
    runs = [make_run(model={"num_hidden_layers": 3, "experts": experts}) for experts in (said, said | change)]
    assert runs[0].fingerprint != runs[1].fingerprint


@pytest.mark.parametrize("name", HABITS)
def test_habits_do_not(name: str) -> None:
    before, after = Run.model_validate(whole()), Run.model_validate(changed(whole(), name, HABITS[name]))
    assert after != before
    assert after.fingerprint == before.fingerprint


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"train": {"sequences_per_step": 16}}, {"train": {"sequences_per_step": None, "tokens_per_step": 512}}),
        ({}, {"model": {"num_key_value_heads": 4}}),
        ({}, {"model": {"head_dim": 16}}),
        ({"learning_rate": {"peak": 1}}, {"learning_rate": {"peak": 1.0}}),
        ({}, {"optimizer": {"name": "adamw"}, "cluster": {"servers": 4}}),
    ],
)
def test_the_same_said_otherwise_has_the_same_fingerprint(one: dict[str, Said], other: dict[str, Said]) -> None:
    assert make_run(**one).fingerprint == make_run(**other).fingerprint


def test_sizes_of_a_step() -> None:
    run = make_run(train={"sequences_per_step": None, "tokens_per_step": "2_048"})
    assert (run.sequences_per_step, run.tokens_per_step) == (64, 2048)
    assert make_run().tokens_per_step == 16 * 32


def faults(**sections: Said) -> list[str]:
    with pytest.raises(ValidationError) as refusal:
        make_run(**sections)
    return str(refusal.value.errors()[0]["msg"]).removeprefix("Value error, ").split("\n")


def test_sections_that_contradict_each_other_are_told_together() -> None:
    assert faults(
        model={"max_position_embeddings": 16},
        train={"sequences_per_step": None, "tokens_per_step": 100},
        learning_rate={"warmup_steps": 11},
    ) == [
        "data.seq_len=32 is longer than model.max_position_embeddings=16: use at most 16, or raise the limit to 32.",
        "train.tokens_per_step=100 is not a multiple of data.seq_len=32: use 96 or 128.",
        "learning_rate.warmup_steps=11 is more than train.steps=10: the peak would never be reached; use at most 10.",
    ]


@pytest.mark.parametrize("tokens", [96, 128])
def test_offered_sizes_are_legal(tokens: int) -> None:
    assert make_run(train={"sequences_per_step": None, "tokens_per_step": tokens}).tokens_per_step == tokens


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"tokens_per_step": 512}}, "exactly one of sequences_per_step and tokens_per_step"),
        ({"train": {"sequences_per_step": None}}, "exactly one of sequences_per_step and tokens_per_step"),
        ({"train": {"sequences_per_step": None, "tokens_per_step": 32 << 21}}, "at most 1048576: use at most 33554432"),
        ({"precision": {"compute": "fp64"}}, "master=fp32 is narrower than compute=fp64: use fp64"),
        ({"precision": {"reduce": "bf16", "compute": "fp32"}}, "reduce=bf16 is narrower than compute=fp32: use fp32"),
        ({"eval": {"every_steps": 5}}, "every_steps=5 has nothing to measure: give sequences"),
    ],
)
def test_sections_that_contradict_themselves(sections: dict[str, Any], words: str) -> None:
    assert words in faults(**sections)[0]
