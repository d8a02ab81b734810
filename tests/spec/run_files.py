"""Which run files do the tests of loading start from?"""

from pathlib import Path
from typing import Any

import tomli_w

from triax.spec.run import Run

Said = dict[str, Any]


def smallest() -> Said:
    """What a run file must say at least."""
    return {
        "model": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": 257,
        },
        "data": {"train": ["corpus.txt"], "seq_len": 32},
        "train": {"steps": 10, "sequences_per_step": 16},
    }  # fmt: skip


def whole() -> Said:
    """A run file that says every key there is, each with a value that is not its default."""
    return {
        "model": {
            "hidden_size": 64, "intermediate_size": 129, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 257, "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6, "rope_theta": 5e5, "tie_word_embeddings": True, "initializer_range": 0.01,
            "family": "qwen3", "hidden_act": "gelu_pytorch_tanh", "attention_bias": True, "attention_out_bias": True,
            "mlp_bias": True, "qk_norm": "head", "norm_placement": "both", "norm_is_offset": True,
            "rope_scaling": {"kind": "linear", "factor": 2.0}, "rope_local_theta": 1e3, "partial_rotary_factor": 0.8,
            "layers_without_rope": [1], "sliding_window": 16, "global_layers": [2], "embedding_multiplier": 2.0,
            "attention_multiplier": 0.5, "residual_multiplier": 0.9, "logits_scaling": 1.5,
            "experts": {
                "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "scoring_func": "sigmoid",
                "norm_topk_prob": False, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2,
                "selection_bias": True, "shared_expert_intermediate_size": 48, "first_k_dense_replace": 1,
                "decoder_sparse_step": 2, "mlp_only_layers": [2], "router_aux_loss_coef": 0.01,
                "router_bias_update_speed": 0.001,
            },
        },
        "data": {
            "train": ["/corpus/a.txt", "/corpus/b.txt"], "format": "text", "extensions": [".txt"], "text_field": "body",
            "token_dtype": "uint16", "tokenizer": "/tokenizer.json", "seq_len": 32, "attend_across_documents": False,
            "cache_dir": "/cache",
        },
        "train": {"steps": 20, "tokens_per_step": 512, "seed": 7, "timeout_s": 60.0, "compile": "none"},
        "optimizer": {
            "name": "sgd", "beta1": 0.8, "beta2": 0.99, "eps": 1e-7, "weight_decay": 0.2, "max_grad_norm": 0.5,
        },
        "learning_rate": {
            "schedule": "wsd", "peak": 1e-4, "warmup_steps": 2, "decay_steps": 5, "final_ratio": 0.2,
        },
        "precision": {"compute": "fp32", "master": "fp64", "reduce": "fp64"},
        "eval": {"every_steps": 4, "sequences": 8},
        "checkpoint": {
            "every_steps": 6, "keep": 2, "background": False, "failures_per_1000_server_days": 2.5,
            "memory_every_steps": 3,
            "upload": "memory://here",
        },
        "guard": {
            "check_initial_loss": False, "initial_loss_tolerance": 0.1, "on_spike": "skip", "window": 64,
            "loss_threshold": 9.0, "grad_norm_threshold": 11.0, "max_skipped_in_a_row": 3, "max_rollbacks": 3,
            "learning_rate_cut": 0.5, "hash_every_steps": 50, "alert_command": ["tell", "me"],
            "alert_webhook": "https://example.org/alert",
        },
        "recover": {
            "max_restarts": 3, "same_fault": 4, "backoff_s": 0.5, "max_backoff_s": 8.0, "lost_after_s": 5.0,
            "join_s": 9.0,
        },
        "watch": {
            "console_every": 2, "tensorboard": False, "timeline_steps": [2],
            "hang_soft_s": 5.0, "hang_hard_s": 8.0, "straggler_above": 0.2,
        },
        "layout": {
            "pp": 2, "dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 2, "ep": 2, "zero": 2, "schedule": "GPipe",
            "stages_per_rank": 2, "stage_cuts": [1, 1, 1, 0], "sequences_per_microbatch": 2, "microbatches": 3,
            "cp_method": "ring", "recompute": "full", "order": ["tp", "cp", "dp_shard", "dp_replicate", "pp"],
        },
        "cluster": {
            "servers": 2, "cards_per_server": 8, "device": "h100", "memory_bytes": 1 << 30, "peak_flops": 1e12,
            "matmul_flops_per_s": 8e11, "memory_bytes_per_s": 2e12,
            "inside_bytes_per_s": 1e9, "across_bytes_per_s": 1e8,
            "domain_cards": 16, "network": "roce-400", "oversubscription": 2.0, "usd_per_card_hour": 2.5,
        },
    }  # fmt: skip


def changed(said: Said, name: str, value: Any) -> Said:
    """Return a copy of ``said`` in which ``section.key`` is ``value``."""
    section, key = name.split(".")
    return {**said, section: {**said.get(section, {}), key: value}}


def make_run(**sections: Said) -> Run:
    """Return the smallest run with the keys of ``sections`` put in."""
    said = smallest()
    for name, keys in sections.items():
        said[name] = {**said.get(name, {}), **keys}
    return Run.model_validate(said)


def write(folder: Path, said: Said, name: str = "run.toml") -> Path:
    """Write ``said`` as TOML and return the file."""
    path = folder / name
    path.write_text(tomli_w.dumps(said), encoding="utf-8")
    return path
