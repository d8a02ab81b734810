"""Are the sentences there where their numbers make them true, and do the numbers in them agree with the plan's?"""

import re
from dataclasses import replace

import pytest

from tests.plan.cases import case_of
from triax.plan.alternatives import ACROSS, one_row, others, refused
from triax.plan.answer import Answer
from triax.plan.ask import Wish, ask
from triax.plan.enumerate import Fixed
from triax.plan.explain import explain
from triax.plan.inverse import context_pays_from
from triax.plan.search import Ranking, search
from triax.plan.walk import walked
from triax.units import format_seconds


def ranked(model: str, cluster: str, sequences: int, **more: str) -> Ranking:
    found = search(case_of(model, cluster, sequences, engine_name=more.get("engine_name", "triax")))
    assert isinstance(found, Ranking)
    return found


def told(ranking: Ranking) -> dict[str, str]:
    return {reason.topic: reason.text for reason in explain(ranking, lambda step_s: f"${step_s:.0f}")}


def test_what_fits_one_card_is_data_parallel_and_is_told_no_more() -> None:
    ranking = ranked("llama-3.2-1b", "2x8xh100", 256)
    text = told(ranking)
    assert "llama-3.2-1b fits one h100" in text["fit"]
    assert "Only speed is missing" in text["first cut"]
    assert {"pipeline", "fine-tuning"}.isdisjoint(text)
    assert (ranking.candidates.tp[0], ranking.candidates.pp[0]) == (1, 1)


def test_one_card_has_nothing_to_split() -> None:
    text = told(ranked("llama-3.2-1b", "1x1xh100", 16))
    assert "nothing to split" in text["first cut"]
    assert {"ZeRO", "tensor parallel", "pipeline"}.isdisjoint(text)


@pytest.fixture(scope="module")
def seventy() -> Ranking:
    return ranked("llama-3.1-70b", "8x8xh100", 256)


def test_the_textbooks_story(seventy: Ranking) -> None:
    """A 70B on servers of eight: tensor parallel inside the server, and what it would do across servers."""
    text = told(seventy)
    assert "does not fit one h100" in text["fit"]
    assert "16 bytes each" in text["fit"]
    assert seventy.candidates.tp[0] <= 8
    assert "Across servers" in text["tensor parallel"]
    match = re.search(r"utilisation (\d+)% instead of (\d+)%, and \$(\d+) instead of \$(\d+)", text["tensor parallel"])
    assert match is not None
    bad, good, dear, cheap = map(int, match.groups())
    assert bad < 0.8 * good
    assert dear > 1.2 * cheap
    if seventy.candidates.tp[0] > 1:
        wrong = walked(seventy.case, one_row(seventy.candidates, 0, order=ACROSS))
        assert format_seconds(float(wrong.step_s[0])) in text["tensor parallel"]


def test_zero_stages_are_told_in_this_models_bytes(seventy: Ranking) -> None:
    text = told(seventy)["ZeRO"]
    for stage in (1, 2, 3):
        assert f"ZeRO-{stage} " in text
    factors = [float(number) for number in re.findall(r"\(([\d.]+)x less", text)]
    assert factors == sorted(factors)
    assert factors[-1] == pytest.approx(float(seventy.candidates.data_ranks[0]), rel=0.06)
    assert factors[0] < 4 < factors[-1] or seventy.candidates.data_ranks[0] <= 4


def test_adapters_need_less(seventy: Ranking) -> None:
    text = told(seventy)["fine-tuning"]
    assert "LoRA" in text
    sizes = [float(number) for number in re.findall(r"([\d.]+) GiB", text)]
    assert 120 < sizes[0] < 200
    assert 33 < sizes[1] < 80


def test_experts_and_sequences_that_are_cut_are_told() -> None:
    ranking = ranked("deepseek-v3", "64x8xh100", 1024, engine_name="megatron")
    text, c = told(ranking), ranking.candidates
    assert ("expert parallel" in text) == (c.ep[0] > 1)
    assert ("context parallel" in text) == (c.cp[0] > 1)
    assert f"ep={c.ep[0]} leaves {256 // c.ep[0]} of 256 experts" in text["expert parallel"]


def test_whole_sequences_are_told_from_where_on_they_would_be_cut() -> None:
    found = search(case_of("llama-3.1-8b", "2x8xh100", 1024, seq_len=4096))
    assert isinstance(found, Ranking)
    later = context_pays_from(found.case)
    assert later is not None
    text = told(found)["context parallel"]
    assert "Sequences of 4,096 tokens stay whole" in text
    assert f"from about {later.seq_len:,} tokens on (cp={later.cp})" in text


def test_one_sequence_a_step_cannot_become_longer() -> None:
    found = search(case_of("llama-3.2-1b", "1x2xh100", 1), Fixed({"cp": 1, "dp_shard": 1, "tp": 2}))
    assert isinstance(found, Ranking)
    assert "context parallel" not in told(found)


def test_frameworks_without_an_axis_are_not_told_of_it() -> None:
    text = told(ranked("llama-3.1-8b", "2x8xh100", 64, engine_name="fsdp1"))
    assert "tensor parallel" not in text


def test_alternatives_differ_and_their_reasons_have_their_numbers(seventy: Ranking) -> None:
    found = others(seventy)
    assert 1 <= len(found) <= 5
    chosen = seventy.candidates.layout(0)
    for other in found:
        assert other.layout.describe() != chosen.describe()
        slower = other.step_s / float(seventy.step_s[0]) - 1
        assert (f"{slower:.0%} slower" in other.reason) == (slower > seventy.case.tie)


def test_first_tries_that_do_not_fit_say_what_is_too_big(seventy: Ranking) -> None:
    found = {each.what: each.why for each in refused(seventy)}
    assert "a full copy on each card" in " ".join(found)
    assert all("needs" in why or "does not divide" in why for why in found.values())
    assert not [each for each in refused(ranked("llama-3.2-1b", "1x8xh100", 64)) if "needs" in each.why]


def test_tensor_parallel_beyond_the_heads_is_refused_with_the_most_that_can_be() -> None:
    ranking = search(case_of("llama-3.1-405b", "64x8xh100", 512), Fixed({"tp": 8}))
    assert isinstance(ranking, Ranking)
    assert "does not divide num_key_value_heads=8: at most tp=8" in [each.why for each in refused(ranking)][-1]


def test_a_slow_network_is_said_to_bind() -> None:
    case = case_of("llama-3.1-8b", "4x8xh100", 64)
    slow = replace(case, machine=replace(case.machine, server_bytes_per_s=2e9))
    found = search(slow)
    assert isinstance(found, Ranking)
    assert "network" in told(found)["what binds"]


def test_an_answer_adds_up() -> None:
    question = ask(Wish("llama-3.1-8b", cluster="2x8xh100"))
    found = search(question.case)
    assert isinstance(found, Ranking)
    answer = Answer(question, found, 10**12)
    predictions = answer.predictions()
    assert sum(answer.seconds.values()) == pytest.approx(predictions["step_s"].value)
    assert sum(answer.bytes.values()) == pytest.approx(predictions["peak_device_bytes"].value)
    for each in predictions.values():
        assert each.low < each.value < each.high
        assert each.formula
    said = answer.as_json()
    assert said["considered"] >= said["priced"] > 0
    assert said["front"][0]["step_s"] == pytest.approx(float(found.step_s.min()))
    assert said["cost"]["tokens"] == 10**12
