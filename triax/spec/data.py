"""What does a run read: which files, in which proportions, and how do they become sequences of tokens?"""

import re
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from triax.spec.value import Count, Text, Texts, Value, as_tuple

Format = Literal["text", "jsonl", "csv", "tsv", "parquet", "arrow", "megatron", "tokens"]
"""text: a file is a document. jsonl, csv, tsv, parquet, arrow (a folder that Hugging Face ``datasets`` saved): a row is
one. megatron: tokens in a ``.bin`` with its ``.idx``. tokens: a flat array of tokens, ``.npy`` or raw."""

TokenDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
"""Of raw token arrays, little-endian."""


def _plain(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", name):
        raise ValueError(f"{name[:80]!r} is no name: use at most 60 letters, digits and _ . -")
    return name


Name = Annotated[Text, AfterValidator(_plain)]
"""A short name that can be a part of a file's name."""


class SourceSpec(Value):
    """One ``[[data.source]]``: files that are read as one, and how often beside the others.

    What is absent here but ``name`` and ``eval_sequences`` is as ``[data]`` says.
    """

    train: Texts = Field(min_length=1)
    """Files, folders or glob patterns; relative paths start at the run file's folder."""
    weight: float = Field(gt=0)
    """Share of the sequences of training, and so of the tokens, relative to the other weights."""
    name: Name | None = None
    """What logs call it, in letters, digits and ``_.-``; absent: its place in the file, ``source-1`` for the first."""
    format: Literal["auto", Format] | None = None
    extensions: Texts | None = None
    text_field: Text | None = None
    token_dtype: TokenDtype | None = None
    eval_sequences: Count | None = Field(default=None, ge=0)
    """Sequences held out of this source and measured. Say it for every source or for none; for none, each holds out
    eval.sequences, and as many of all sources are measured together, mixed by weight."""


Sources = Annotated[tuple[SourceSpec, ...], BeforeValidator(as_tuple)]
"""Several sources; TOML writes ``[[data.source]]`` for each."""


class DataSpec(Value):
    """Where text comes from and how it becomes sequences of tokens."""

    train: Texts | None = Field(default=None, min_length=1)
    """Files, folders or glob patterns; relative paths start at the run file's folder."""
    source: Sources | None = Field(default=None, min_length=1, max_length=1024)
    """Several sources, mixed by weight, in place of ``train``: ``[[data.source]]`` for each."""
    format: Literal["auto", Format] = "auto"
    """auto goes by each file's ending."""
    extensions: Texts = ()
    """Endings to take from folders, such as [".py", ".md"]; empty takes every ending the format knows."""
    text_field: Text = "text"
    """The field of JSONL, or the column of a table, that holds the text."""
    token_dtype: TokenDtype | None = None
    """What a raw array of tokens is made of; ``.npy`` and ``.idx`` files say it themselves."""
    tokenizer: Text = "bytes"
    """``bytes`` (257 tokens), or a path to a Hugging Face ``tokenizer.json`` or the folder that holds one."""
    seq_len: Count = Field(ge=2, le=1 << 24)
    """Tokens in one sequence."""
    attend_across_documents: bool = True
    """False: attention and loss stay inside each document although several share a sequence."""
    cache_dir: Text | None = None
    """Folder of prepared tokens; absent means ``~/.cache/triax``."""

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Self:
        if (self.train is None) == (self.source is None):
            raise ValueError("give either train, or a [[data.source]] with train and weight for each of several.")
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two sources are called {name!r}: give each another name.")
        return self

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """Every source with nothing left out; ``train`` is one of weight 1."""
        if self.source is None:
            assert self.train is not None
            return (self._completed(SourceSpec(train=self.train, weight=1.0, name="train")),)
        return tuple(self._completed(source, f"source-{number}") for number, source in enumerate(self.source, start=1))

    def _completed(self, source: SourceSpec, name: str | None = None) -> SourceSpec:
        absent = {
            "name": name, "format": self.format, "extensions": self.extensions, "text_field": self.text_field,
            "token_dtype": self.token_dtype,
        }  # fmt: skip
        return source.model_copy(update={key: said for key, said in absent.items() if getattr(source, key) is None})

    @property
    def weights(self) -> tuple[Fraction, ...]:
        """The share of each source, as written: 0.3 is 3/10. They sum to one."""
        weights = [Fraction(repr(source.weight)) for source in self.sources]
        total = sum(weights)
        return tuple(weight / total for weight in weights)

    def eval_faults(self, eval_sequences: int) -> list[str]:
        """Return what contradicts ``eval_sequences``, the run's number of held-out sequences."""
        said = [source.eval_sequences for source in self.sources]
        given = [count for count in said if count is not None]
        if not given:
            return []
        if len(given) < len(said):
            silent = next(source.name for source in self.sources if source.eval_sequences is None)
            return [f"data.source: {silent!r} says no eval_sequences and others do: give it to all or to none."]
        if sum(given) != eval_sequences:
            return [
                f"eval.sequences={eval_sequences}, and the eval_sequences of the sources sum to {sum(given)}: set "
                f"eval.sequences={sum(given)}."
            ]
        return []

    def mathematics(self) -> dict[str, Any]:
        """Return what decides which losses the same texts give, as plain values: no paths, no names."""
        keys = {"format", "extensions", "text_field"} | ({"token_dtype"} if self.token_dtype is not None else set())
        said = self.model_dump(mode="json", include=keys | {"seq_len", "attend_across_documents"})
        if self.source is None:
            return said
        keys |= {"token_dtype", "eval_sequences"}
        return said | {
            "sources": [
                source.model_dump(mode="json", include=keys) | {"weight": str(weight)}
                for source, weight in zip(self.sources, self.weights, strict=True)
            ]
        }
