"""Are sizes read and written as people say them?"""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.errors import BadInput
from triax.units import format_bytes, format_count, format_seconds, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("512", 512),
        ("64k", 64_000),
        ("64K", 64_000),
        (" 64 k ", 64_000),
        ("64_000", 64_000),
        ("1.5M", 1_500_000),
        ("8b", 8_000_000_000),
        ("2G", 2_000_000_000),
        ("1T", 10**12),
        ("3e6", 3_000_000),
        ("1E+3k", 1_000_000),
    ],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("80 GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("512 MB", 512 * 10**6),
        ("1.5 KiB", 1536),
        ("7b", 7),
        ("2TiB", 2**41),
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "k", "-1", "1.5", "1 2", "0x10", "١", "1e", "1e9999", "64q", "nan", "inf", "10000000T", "1GiBs", "1.k"]
)
def test_what_is_no_count_is_said_and_examples_are_given(text: str) -> None:
    with pytest.raises(BadInput, match="count") as refusal:
        parse_count(text)
    assert repr(text) in str(refusal.value)


def test_bytes_are_whole_and_have_a_unit_of_bytes() -> None:
    for text in ("0.1 KiB", "64k", "1 gigabyte"):
        with pytest.raises(BadInput, match="number of bytes"):
            parse_bytes(text)


@given(st.text())
def test_any_text_is_a_count_or_is_refused(text: str) -> None:
    for parse in (parse_count, parse_bytes):
        with contextlib.suppress(BadInput):
            assert 0 <= parse(text) < 2**63


@given(st.integers(0, 2**63 - 1), st.sampled_from(["", " ", "\t"]))
def test_integers_are_read_exactly(number: int, space: str) -> None:
    assert parse_count(f"{space}{number}") == parse_bytes(f"{number}{space}B") == number


@given(st.integers(0, 10**12))
def test_decimal_parts_are_read_exactly(number: int) -> None:
    assert parse_count(f"{number // 1000}.{number % 1000:03d}k") == number


def test_a_long_text_is_quoted_in_part() -> None:
    with pytest.raises(BadInput) as refusal:
        parse_count("9" * 10_000)
    assert len(str(refusal.value)) < 300


@given(st.floats(1, 9e14))
def test_a_count_shows_three_digits_and_no_exponent(value: float) -> None:
    assert "e" not in format_count(value)


@given(st.floats(0.9, 1))
def test_milliseconds_stay_below_a_thousand(seconds: float) -> None:
    assert "e" not in format_seconds(seconds)


def test_what_people_read() -> None:
    assert [format_count(n) for n in (7, 999, 1234, 1_234_567, 8_030_261_248, 2e12)] == [
        "7", "999", "1.23k", "1.23M", "8.03B", "2T",
    ]  # fmt: skip
    assert [format_bytes(n) for n in (12, 1024, 1536, 80 * 2**30, 2**41)] == [
        "12 B", "1.00 KiB", "1.50 KiB", "80.00 GiB", "2.00 TiB",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (0.0005, 0.85, 1, 59.94, 245, 7620)] == [
        "0.5 ms", "850 ms", "1.0 s", "59.9 s", "4 min 05 s", "2 h 07 min",
    ]  # fmt: skip


@given(st.floats(1, 2e6) | st.floats(59.9, 60))
def test_a_duration_never_shows_sixty_seconds_or_minutes(seconds: float) -> None:
    words = format_seconds(seconds).split()
    numbers = dict(zip(words[1::2], map(float, words[::2]), strict=True))
    assert numbers.get("s", 0) < 60
    assert numbers.get("min", 0) < 60
    units = {"s": 1, "min": 60, "h": 3600}
    shown = sum(units[unit] * number for unit, number in numbers.items())
    assert abs(shown - seconds) <= (0.05 if len(numbers) == 1 else 60 if "h" in numbers else 0.5) + 1e-6


@given(st.integers(0, 2**60))
def test_formatted_bytes_say_the_size_to_three_digits(number: int) -> None:
    value, unit = format_bytes(number).split()
    size = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert float(value) * size == pytest.approx(number, rel=0.005)
