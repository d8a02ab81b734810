"""Does any run file at all either work or end in a sentence, never in a traceback?"""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import event, given
from hypothesis import strategies as st

from tests.spec.run_files import Said, changed, smallest, whole
from triax.errors import BadInput
from triax.spec.check import check
from triax.spec.cluster import Cluster
from triax.spec.foreign_keys import FOREIGN_KEYS
from triax.spec.layout import AXES, Layout
from triax.spec.load import layout_words, load_cluster, load_plan, load_run
from triax.spec.plan import Plan, make_plan
from triax.spec.resolve import resolve_layout
from triax.spec.run import Run

SECTIONS = list(Run.model_fields)
KEYS = [f"{section}.{key}" for section, said in whole().items() for key in said]
NAMES = sorted({key.split(".")[1] for key in KEYS} | set(SECTIONS) | set(FOREIGN_KEYS) | {"format_version"})
RANKS = st.integers(1, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def use(path: Path, overrides: list[str], ranks: int) -> None:
    """Go all the way from a run file to a plan on disk, as the command does before it starts a process."""
    try:
        run = load_run(path, overrides)
        event("a run")
        layout = resolve_layout(run, ranks)
        event("a layout")
        cluster = Cluster(cards_per_server=ranks)
        refusals = check(layout, run, cluster)
        event("refused" if refusals else "legal")
    except BadInput as refusal:
        lines = str(refusal).split("\n")
        assert all(line.strip() and len(line) < 2000 for line in lines)
        return
    plan = make_plan(run, cluster, layout)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    path.write_text(tomli_w.dumps(run.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
    assert load_run(path).fingerprint == run.fingerprint


WORDS = ["bf16", "fp64", "sgd", "wsd", "GPipe", "ZBVZeroBubble", "full", "text", "tp", "64k", "80 GiB", "1e400"]
PATHS = ["~/x", "~no-such-user/x", "*", "[", "..", "a\0b", "", " ", "/", "x" * 5000]
# What a shell hands over: any bytes but NUL, those that are no UTF-8 as surrogates.
ARGUMENTS = st.binary(max_size=30).map(lambda raw: raw.replace(b"\0", b"0").decode("utf-8", "surrogateescape"))

SIMPLE = (
    st.booleans() | st.integers() | st.integers(0, 70) | st.floats() | st.text() | st.sampled_from(WORDS + PATHS)
    | st.dates() | st.times() | st.datetimes()
)  # fmt: skip
VALUES = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=6,
)


def like(value: Any) -> st.SearchStrategy[Any]:
    """Values of the kind that a key takes, legal ones often enough to get past the first check."""
    match value:
        case bool():
            return st.booleans()
        case int():
            return st.integers(0, 20) | st.integers(0, 20).map(lambda power: 2**power) | st.integers()
        case float():
            return st.floats(0, 1) | st.integers(0, 9) | st.floats()
        case str():
            return st.sampled_from(WORDS + PATHS) | st.text() | ARGUMENTS
        case dict():
            return st.fixed_dictionaries({}, optional={key: like(item) for key, item in value.items()})
        case _:
            return st.lists(like(value[0]), max_size=5) | st.permutations(AXES)


def settings(names: list[str]) -> st.SearchStrategy[tuple[str, Any]]:
    """One of the keys ``section.key`` and a value for it."""
    values = {f"{section}.{key}": value for section, said in whole().items() for key, value in said.items()}
    return st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), like(values[name]) | VALUES))


def writable(value: Any) -> bool:
    """Whether a file can hold it: a shell can hand over text that no UTF-8 file can say."""
    return "\\udc" not in ascii(value)


@given(st.binary(max_size=300), RANKS)
def test_any_bytes(folder: Path, content: bytes, ranks: int) -> None:
    path = folder / "bytes.toml"
    path.write_bytes(content)
    use(path, [], ranks)
    for load in (load_plan, lambda path: load_cluster(str(path))):
        path.write_bytes(content)
        with contextlib.suppress(BadInput):
            load(path)


@given(st.text("[]{}=.,\"'#\n\\ abtrue019-+_:TZexouin", max_size=200), RANKS)
def test_any_text_that_looks_like_toml(folder: Path, content: str, ranks: int) -> None:
    path = folder / "text.toml"
    path.write_text(content, encoding="utf-8")
    use(path, [], ranks)


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(), VALUES, max_size=5), RANKS)
def test_any_structure(folder: Path, said: Said, ranks: int) -> None:
    path = folder / "structure.toml"
    path.write_text(tomli_w.dumps(said), encoding="utf-8")
    use(path, [], ranks)
    path.write_text(tomli_w.dumps(said), encoding="utf-8")
    with contextlib.suppress(BadInput):
        load_cluster(str(path))


@given(st.sampled_from([smallest(), whole()]), st.lists(settings(KEYS).filter(writable), max_size=3), RANKS)
def test_any_value_of_any_key(folder: Path, said: Said, changes: list[tuple[str, Any]], ranks: int) -> None:
    path = folder / "values.toml"
    for name, value in changes:
        said = changed(said, name, value)
    path.write_text(tomli_w.dumps(said), encoding="utf-8")
    use(path, [], ranks)


def edited(content: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    """Return ``content`` with some bytes replaced: where they start (0 to 1), how many go, what comes instead."""
    for where, length, put in edits:
        start = int(where * len(content))
        content = content[:start] + put + content[start + length :]
    return content


EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), st.binary(max_size=6)), min_size=1, max_size=4)


@given(st.sampled_from([smallest(), whole()]), EDITS, RANKS)
def test_a_file_with_a_slip_of_the_pen(
    folder: Path, said: Said, edits: list[tuple[float, int, bytes]], ranks: int
) -> None:
    path = folder / "edited.toml"
    path.write_bytes(edited(tomli_w.dumps(said).encode(), edits))
    use(path, [], ranks)


@given(EDITS)
def test_a_plan_with_a_slip_of_the_pen(folder: Path, edits: list[tuple[float, int, bytes]]) -> None:
    path = folder / "plan.json"
    plan = make_plan(Run.model_validate(whole()), Cluster(), Layout())
    path.write_bytes(edited(plan.model_dump_json(indent=1).encode(), edits))
    with contextlib.suppress(BadInput):
        load_plan(path)


@given(
    st.lists(ARGUMENTS | settings(KEYS).map("{0[0]}={0[1]}".format), max_size=3),
    st.sampled_from([smallest(), whole()]),
    RANKS,
)
def test_any_overrides(folder: Path, words: list[str], said: Said, ranks: int) -> None:
    path = folder / "overridden.toml"
    path.write_text(tomli_w.dumps(said), encoding="utf-8")
    use(path, words, ranks)


LAYOUT_KEYS = [key for key in KEYS if key.startswith("layout.")]
LAYOUT_WORDS = settings(LAYOUT_KEYS).map(lambda setting: f"{setting[0].removeprefix('layout.')}={setting[1]}")


@given(ARGUMENTS | st.lists(LAYOUT_WORDS, max_size=4).map(" ".join), RANKS)
def test_any_layout_on_the_command_line(folder: Path, text: str, ranks: int) -> None:
    path = folder / "layout.toml"
    path.write_text(tomli_w.dumps(smallest()), encoding="utf-8")
    use(path, layout_words(text), ranks)


@given(st.integers(1, 6000), st.sampled_from(KEYS), RANKS)
def test_any_length_of_number(folder: Path, digits: int, name: str, ranks: int) -> None:
    """Python reads a number of any length in hexadecimal, and then writes it only up to 4300 digits in decimals."""
    path = folder / "numbers.toml"
    for number in ("0x" + "f" * digits, "1" + "0" * digits, "0." + "0" * digits + "1"):
        path.write_text(tomli_w.dumps(smallest()), encoding="utf-8")
        use(path, [f"{name}={number}"], ranks)


@given(ARGUMENTS)
def test_any_path(text: str) -> None:
    for load in (load_run, load_plan):
        with pytest.raises(BadInput):
            load(Path("/nowhere") / text.lstrip("/"))
    with contextlib.suppress(BadInput):
        load_cluster(text)
