"""Which tokens does a run read, in which proportions, and how are they all prepared?"""

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from triax.data.files import TOKEN_FORMATS, find_source_files
from triax.data.in_place import store_in_place
from triax.data.pieces import SourceFile
from triax.data.prepare import Progress, prepare
from triax.data.store import TokenStore, open_store
from triax.data.tokenizer import Tokenizer
from triax.errors import BadInput
from triax.spec.data import DataSpec, SourceSpec
from triax.spec.value import fingerprint


@dataclass(frozen=True, slots=True)
class Source:
    """Tokens that are read as one: those of some texts, or some files of tokens."""

    name: str
    stores: tuple[TokenStore, ...]
    weight: Fraction = Fraction(1)
    """Share of the sequences of training, relative to the other sources."""
    eval_sequences: int | None = None
    """Sequences held out of this source; None: as many as the run measures of all sources together."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all its stores."""
        return sum(store.index.num_tokens for store in self.stores)


@dataclass(frozen=True, slots=True)
class Corpus:
    """All that a run reads. Its order is part of the run: sources, and the stores of each, one after another."""

    sources: tuple[Source, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sources."""
        return sum(source.num_tokens for source in self.sources)

    @property
    def num_documents(self) -> int:
        """Documents of all sources."""
        return sum(store.index.num_documents for store in self.stores)

    @property
    def stores(self) -> tuple[TokenStore, ...]:
        """The stores of all sources."""
        return tuple(store for source in self.sources for store in source.stores)

    @property
    def fingerprint(self) -> str:
        """Names what the numbers of sequences count: one store's own name, or one made of the names of several."""
        names = [[store.index.fingerprint for store in source.stores] for source in self.sources]
        return names[0][0] if len(self.stores) == 1 else fingerprint(names)

    @property
    def address(self) -> str:
        """What another process of this server needs to open the same corpus."""
        return json.dumps(
            [
                {
                    "name": source.name, "stores": [str(store.folder) for store in source.stores],
                    "weight": str(source.weight), "eval_sequences": source.eval_sequences,
                }
                for source in self.sources
            ]
        )  # fmt: skip


def corpus_of(*stores: TokenStore) -> Corpus:
    """Return a corpus of one source that has ``stores``."""
    return Corpus((Source("train", stores),))


def open_corpus(address: str) -> Corpus:
    """Return the corpus that another process prepared; raise TornStore where one of its stores is not there."""
    return Corpus(tuple(
        Source(
            said["name"], tuple(open_store(Path(folder)) for folder in said["stores"]), Fraction(said["weight"]),
            said["eval_sequences"],
        )
        for said in json.loads(address)
    ))  # fmt: skip


def prepare_corpus(
    data: DataSpec,
    tokenizer: Tokenizer,
    cache_folder: Path,
    *,
    num_processes: int | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Return what ``data`` says, from the cache or made now with ``num_processes``; see ``prepare``.

    Raises BadInput where files cannot be used. ``progress`` hears of the bytes of all sources.
    """
    found = [find_source_files(source) for source in data.sources]
    sizes = [sum(_size(file) for file in files) for files in found]
    sources = []
    for number, (said, files, weight) in enumerate(zip(data.sources, found, data.weights, strict=True)):
        before, total = sum(sizes[:number]), sum(sizes)

        def told(done: int, its_total: int, before: int = before, total: int = total) -> None:
            del its_total
            if progress is not None:
                progress(before + done, total)

        stores = _stores(said, files, tokenizer, cache_folder, num_processes, told)
        assert said.name is not None
        sources.append(Source(said.name, stores, weight, said.eval_sequences))
    return Corpus(tuple(sources))


def _stores(
    said: SourceSpec,
    files: tuple[SourceFile, ...],
    tokenizer: Tokenizer,
    cache_folder: Path,
    num_processes: int | None,
    progress: Progress,
) -> tuple[TokenStore, ...]:
    """Return the stores of one source: one for all its texts, or one for each file of tokens."""
    with_tokens = [file for file in files if file.format in TOKEN_FORMATS]
    if 0 < len(with_tokens) < len(files):
        text = next(file for file in files if file.format not in TOKEN_FORMATS)
        raise BadInput(
            f"{with_tokens[0].path} holds tokens and {text.path} text: give each a [[data.source]] of its own."
        )
    if with_tokens:
        return tuple(store_in_place(file, tokenizer, cache_folder, progress) for file in files)
    assert said.text_field is not None
    return (
        prepare(
            files, tokenizer, cache_folder,
            text_field=said.text_field, num_processes=num_processes, progress=progress,
        ),
    )  # fmt: skip


def _size(file: SourceFile) -> int:
    """Return the bytes that are read of ``file``; of a pair of files, of the one with the tokens."""
    path = file.path.with_suffix(".bin") if file.format == "megatron" else file.path
    return path.stat().st_size if path.exists() else 0
