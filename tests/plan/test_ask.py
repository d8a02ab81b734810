"""Do words become the case they mean, and is what was left open filled in and said?"""

from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from tests.spec.run_files import smallest
from triax.errors import BadInput
from triax.plan.ask import Wish, ask, why_none
from triax.plan.candidates import FULL, SCHEDULE_NAMES
from triax.plan.enumerate import shapes
from triax.plan.search import Ranking, search


def test_a_name_alone_is_enough_and_what_was_assumed_is_said() -> None:
    question = ask(Wish("llama-3.1-8b"))
    told = "; ".join(question.assumed)
    assert question.case.machine.cards == 8
    assert question.case.engine.name == "triax"
    for part in ("1x8xh100", "4,096 tokens", "256 sequences", "for a card and hour"):
        assert part in told
    assert isinstance(search(question.case, question.fixed), Ranking)


def test_what_is_said_is_not_assumed() -> None:
    wish = Wish(
        "llama-3.1-8b", cluster="2x8xa100", seq_len=8192, tokens_per_step=8192 * 64, engine="torchtitan",
        usd_per_card_hour=1.5,
    )  # fmt: skip
    question = ask(wish)
    assert question.assumed == ()
    assert (question.case.workload.sequences_per_step, question.usd) == (64, 1.5)
    assert question.case.engine.name == "torchtitan"


@given(st.integers(1, 10**12), st.sampled_from([512, 4096, 8192]))
def test_a_step_of_any_size_is_near_what_was_said(tokens: int, seq_len: int) -> None:
    wish = Wish("llama-3.1-8b", seq_len=seq_len, tokens_per_step=tokens)
    try:
        question = ask(wish)
    except BadInput as refusal:
        assert "is less than one sequence" in str(refusal) or "are more than" in str(refusal)  # noqa: PT017
        return
    workload = question.case.workload
    assert abs(workload.tokens_per_step - tokens) <= max(tokens / 8, seq_len)
    if tokens % seq_len == 0:
        assert workload.tokens_per_step == tokens


def test_a_step_that_few_ranks_could_share_is_moved_to_one_that_many_can() -> None:
    question = ask(Wish("deepseek-v3", cluster="2048x8xh100", seq_len=4096, tokens_per_step=64_000_000))
    assert question.case.workload.sequences_per_step == 15_360
    assert any("15,360 sequences a step, near what was said" in each for each in question.assumed)


def test_what_triax_does_not_train_is_planned_for_another_framework() -> None:
    assert ask(Wish("mixtral-8x7b")).case.engine.name == "triax"
    question = ask(Wish("deepseek-v2-lite"))
    assert question.case.engine.name == "megatron"
    assert any("triax does not train this" in each for each in question.assumed)
    assert ask(Wish("llama-3.1-8b", precision="fp8")).case.engine.name == "megatron"
    with pytest.raises(BadInput, match="triax does not train deepseek-v2-lite"):
        ask(Wish("deepseek-v2-lite", engine="triax"))
    with pytest.raises(BadInput, match="triax does not train in fp8"):
        ask(Wish("llama-3.1-8b", engine="triax", precision="fp8"))


def run_file(tmp_path: Path, **more: object) -> str:
    said = smallest() | more
    path = tmp_path / "toy.toml"
    path.write_text(tomli_w.dumps(said))
    return str(path)


def test_a_run_file_says_its_own_step_layout_and_cluster(tmp_path: Path) -> None:
    path = run_file(
        tmp_path, layout={"tp": 2, "recompute": "full", "schedule": "1F1B"},
        cluster={"servers": 1, "cards_per_server": 4, "device": "cpu"},
    )  # fmt: skip
    question = ask(Wish(path, words=("train.sequences_per_step=8",), layout=("zero=2",)))
    assert question.run is not None
    assert question.case.workload.sequences_per_step == 8
    assert question.case.machine.cards == 4
    fixed = {"tp": 2, "recompute": FULL, "schedule": SCHEDULE_NAMES.index("1F1B"), "zero": 2}
    assert question.fixed.columns == fixed
    with pytest.raises(BadInput, match=r"--seq-len is for models: .* write data\.seq_len="):
        ask(Wish(path, seq_len=64))


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (Wish("llama-9"), "did you mean llama"),
        (Wish("llama-3.1-8b", cluster="1x8xh1000"), "did you mean h100"),
        (Wish("llama-3.1-8b", cluster="8h100"), "such as 16x8xh100"),
        (Wish("llama-3.1-8b", cluster="1x64xh100"), "at most 8 cards"),
        (Wish("llama-3.1-8b", cluster="no.toml"), "no.toml"),
        (Wish("llama-3.1-8b", engine="megatorn"), "did you mean megatron"),
        (Wish("llama-3.1-8b", precision="int8"), "use bf16, fp16"),
        (Wish("llama-3.1-8b", layout=("tp",)), "write key=value"),
        (Wish("llama-3.1-8b", layout=("tensor=2",)), "unknown key 'tensor'"),
        (Wish("llama-3.1-8b", layout=("tp=many",)), "tp"),
        (Wish("llama-3.1-8b", usd_per_card_hour=-1.0), "use more than 0"),
        (Wish("llama-3.1-8b", usd_per_card_hour=float("nan")), "usd_per_card_hour = nan"),
        (Wish("llama-3.1-8b", seq_len=1, tokens_per_step=10**12), "are more than 1,048,576"),
        (Wish("nothing.toml"), "nothing.toml"),
    ],
)
def test_what_cannot_be_is_refused(wish: Wish, told: str) -> None:
    with pytest.raises(BadInput) as refusal:
        ask(wish)
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (("tp=3",), "tp=3 leaves no layout of 1 x 8 h100: use tp=1, 2, 4 or 8"),
        (("tp=4", "pp=64"), "pp=64 leaves no layout"),
        (("schedule=DualPipeV", "pp=1"), "leaves no layout"),
        (("microbatches=1000",), "microbatches=1000 leaves no layout"),
    ],
)
def test_a_decision_that_leaves_nothing_is_named_with_what_would(layout: tuple[str, ...], told: str) -> None:
    question = ask(Wish("llama-3.1-8b", layout=layout))
    assert not len(shapes(question.case, question.fixed))
    assert told in why_none(question)


def test_cards_that_nothing_divides() -> None:
    question = ask(Wish("llama-3.1-8b", cluster="37x1xh100"))
    assert "no way to cut llama-3.1-8b uses 37 cards" in why_none(question)
