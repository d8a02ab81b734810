"""How do other tools read the ids of plain bytes? As a byte-level BPE without a single merge."""

from typing import Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from triax.data.tokenizer import ByteTokenizer

END_OF_TEXT: Final = "<|endoftext|>"
"""How the id after all bytes is written."""


def byte_tokenizer_json() -> str:
    """Return a Hugging Face ``tokenizer.json`` that gives every text the ids of ``ByteTokenizer``.

    A text that spells out the end token is the one exception: other tools read it as that token.
    """
    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    assert tokenizer.token_to_id(END_OF_TEXT) == ByteTokenizer().eos_id
    return tokenizer.to_str()


def _letters() -> list[str]:
    """Return the letter that stands for each byte: itself where it prints, else the next one after all bytes (GPT-2's
    ``bytes_to_unicode``, which the library's byte level follows)."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]
