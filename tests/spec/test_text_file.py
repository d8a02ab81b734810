"""Is a file that somebody else wrote either read or refused in a sentence?"""

import pytest

from triax.errors import BadInput
from triax.spec.text_file import parse_json


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' stands twice in one object"),
        ('{"a": NaN}', "NaN is no number"),
        ("[1]", "holds a JSON list, and must hold an object"),
        ('{"a": ', "is not valid JSON: Expecting value at line 1"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "is not valid JSON"),
    ],
)
def test_json_that_is_no_object_of_plain_values_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=f"^config.json .*{sentence}"):
        parse_json(text, "config.json")


def test_json_is_read() -> None:
    assert parse_json('{"a": [1, 2.5, null, true], "b": {}}', "") == {"a": [1, 2.5, None, True], "b": {}}
