"""Where are the tokens of a run? Prepared once, by one process of each server, and opened by all."""

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triax.data.corpus import Corpus, open_corpus, prepare_corpus
from triax.data.prepare import Progress
from triax.data.tokenizer import check_fits, load_tokenizer
from triax.spec.run import Run

if TYPE_CHECKING:
    from torch.distributed import Store

_PATIENCE: Final = timedelta(hours=24)
"""Preparing a corpus may take hours, and no rank has anything else to do meanwhile."""


def prepare_tokens(run: Run, progress: Progress | None = None, *, num_processes: int | None = None) -> Corpus:
    """Return the tokens of ``run``, made now or found in the cache; raise BadInput where the corpus cannot be used."""
    tokenizer = load_tokenizer(run.data.tokenizer)
    check_fits(tokenizer, run.model.vocab_size)
    return prepare_corpus(run.data, tokenizer, cache_folder(run), num_processes=num_processes, progress=progress)


def cache_folder(run: Run) -> Path:
    """Return the folder of prepared tokens: the run's own, or ``triax`` in the user's cache folder."""
    if run.data.cache_dir is not None:
        return Path(run.data.cache_dir)
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "triax"


def share_tokens(run: Run, store: "Store", server: int, *, is_first_of_server: bool) -> Corpus:
    """Return the tokens of ``run``; the first rank of each server prepares them while its neighbours wait."""
    key = f"triax/tokens/{server}"
    if is_first_of_server:
        corpus = prepare_tokens(run)
        store.set(key, corpus.address)
        return corpus
    store.wait([key], _PATIENCE)
    return open_corpus(store.get(key).decode())
