"""Do other tools read plain bytes as the same ids?"""

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from triax.data.byte_level import END_OF_TEXT, byte_tokenizer_json
from triax.data.tokenizer import ByteTokenizer

LIBRARY = tokenizers.Tokenizer.from_str(byte_tokenizer_json())


@given(st.text())
def test_every_text_has_the_ids_of_its_bytes(text: str) -> None:
    if END_OF_TEXT in text:
        return
    ids = LIBRARY.encode(text).ids
    assert ids == ByteTokenizer().encode_batch([text])[0].tolist()
    assert LIBRARY.decode(ids) == text


def test_every_byte_is_known() -> None:
    assert sorted(LIBRARY.get_vocab().values()) == list(range(257))
    text = "".join(map(chr, range(0x100))) + "日本🙂\n\t  x 123"
    assert LIBRARY.encode(text).ids == list(text.encode())
