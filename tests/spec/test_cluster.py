"""Is a cluster read from its short form, and refused with the form when it is not one?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.errors import BadInput
from triax.spec.cluster import Cluster, parse_cluster


@given(st.integers(1, 999_999), st.integers(1, 9999), st.sampled_from(["cpu", "h100", "mi300x", "a100-80gb", "l40.s"]))
def test_the_short_form(servers: int, cards: int, device: str) -> None:
    cluster = parse_cluster(f"{servers}x{cards}x{device}")
    assert cluster == Cluster(servers=servers, cards_per_server=cards, device=device)
    assert cluster.num_cards == servers * cards


def test_capitals_and_blanks_around_do_not_matter() -> None:
    assert parse_cluster(" 16x8xH100 ") == Cluster(servers=16, cards_per_server=8, device="h100")


@pytest.mark.parametrize("text", ["", "16", "16x8", "x8xh100", "0x8xh100", "16 x 8 x h100", "-1x8xcpu"])
def test_other_words_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(BadInput, match="such as 16x8xh100") as refusal:
        parse_cluster(text)
    assert repr(text) in str(refusal.value)


@given(st.text() | st.from_regex(r"[0-9]{1,12}x[0-9]{1,12}x[a-z]{0,50}", fullmatch=True))
def test_any_text_is_a_cluster_or_is_refused(text: str) -> None:
    try:
        cluster = parse_cluster(text)
    except BadInput:
        return
    assert cluster.num_cards >= 1


def test_memory_is_said_in_bytes_with_a_unit() -> None:
    assert Cluster(memory_bytes="80 GiB").memory_bytes == 80 * 2**30  # type: ignore[arg-type]
