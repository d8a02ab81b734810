"""How do tests make folders of transformers' models, and what does transformers say about a folder?"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.harness.configs import CONFIGS, EAGER

# Its bars on standard error are not what a test of standard error is about.
transformers.utils.logging.disable_progress_bar()


def make(name: str, **changed: Any) -> Any:
    """Return a random model of transformers, in fp32 and with weights large enough that every part of it shows.

    ``changed`` keys replace those of the configuration called ``name``.
    """
    config = AutoConfig.for_model(**CONFIGS[name] | changed, **EAGER)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return model


def save(model: Any, folder: Path, *, shard_bytes: int = 1 << 30) -> Path:
    """Write ``model`` as transformers does, and return the folder."""
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    return folder


def opened(folder: Path) -> Any:
    """Return what transformers makes of ``folder``; fails where it has a word to say about weights.

    About stretched rope it says what it would recommend, also for configurations of its own.
    """
    with _warnings() as said:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            **EAGER,
        )
    assert [line for line in said if "rope" not in line.lower()] == []
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model.eval()


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what transformers warns about in the body of the ``with``."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def tokens_of(model: Any, length: int = 40) -> Tensor:
    """Return two rows of random tokens (2, S)."""
    return torch.randint(3, model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits (B, S, V) of a model of transformers."""
    logits: Tensor = model(tokens).logits
    return logits


def continued(model: Any, tokens: Tensor, count: int = 12) -> list[list[int]]:
    """Return what a model of transformers writes greedily."""
    with torch.no_grad():
        written: Tensor = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return written.tolist()


def edit(path: Path, **changed: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    said = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
