"""Do cut sequences cost what the trainer sends, and is the way that is chosen the one that costs least?"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.plan.cases import TOY, case_of, toy_case
from triax.plan.candidates import CP_METHODS, RECOMPUTE, Candidates
from triax.plan.case import Case
from triax.plan.context import (
    TILE_OF_FUSED,
    attends_by_parts,
    buffer_bytes,
    context_s,
    made_again_by_selection,
    payloads,
)
from triax.plan.engine import engine
from triax.plan.enumerate import Fixed
from triax.plan.network import network_of
from triax.plan.parts import parts
from triax.plan.search import Ranking, search
from triax.spec.model import ModelSpec

METHODS = {name: index for index, name in enumerate(CP_METHODS)}


def cut(cp: int, method: str, **columns: Any) -> Candidates:
    return Candidates.of(1, cp=cp, cp_method=METHODS[method], **columns)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("method", CP_METHODS)
def test_payloads_are_those_that_ranks_are_counted_to_send(method: Any, cp: int) -> None:
    """The volumes that tests/parallel/test_traffic_of_context.py holds the trainer's collectives to."""
    pytest.importorskip("torch")
    from tests.parallel import test_traffic_of_context as counted

    tokens = np.array([counted.SEQUENCES * counted.SEQ_LEN / cp])
    sent = payloads(network_of(counted.MODEL), cut(cp, method), tokens, 2.0)
    times = counted.MICROBATCHES * counted.MODEL.num_hidden_layers
    by_kind = {kind: times * float(size[0]) for kind, size in sent.items() if size[0]}
    expected = counted.textbook(method, cp)
    match method:
        case "all_gather":  # on CPUs a reduce-scatter is an all-to-all and a sum
            assert by_kind == {
                "all_gather": expected["all_gather", "bfloat16"], "reduce_scatter": expected["all_to_all", "bfloat16"],
            }  # fmt: skip
        case "ring":
            assert by_kind == {
                "send": expected["send", "bfloat16"], "send_gradients": expected["send", "float32"],
            }  # fmt: skip
        case "all_to_all":
            assert by_kind == {"all_to_all": expected["all_to_all", "bfloat16"]}


def test_nothing_is_sent_where_nothing_is_cut() -> None:
    for method in CP_METHODS:
        sent = payloads(network_of(TOY), cut(1, method), np.array([64.0]), 2.0)
        assert not any(size[0] for size in sent.values())


def of_case(case: Case, c: Candidates) -> Any:
    tokens = c.sequences_per_microbatch * case.workload.seq_len / c.cp
    return context_s(case.network, case.workload, case.machine, case.engine, c, tokens)


def test_what_is_computed_again_sends_again() -> None:
    case = case_of("llama-3.1-8b", "2x8xh100", 16, seq_len=65536)
    for method in CP_METHODS:
        plain, selective, full = (of_case(case, cut(8, method, recompute=bits)) for bits in RECOMPUTE.values())
        assert full.backward == pytest.approx(plain.backward + plain.forward)
        is_again = method == "ring"
        assert selective.backward == pytest.approx(plain.backward + is_again * plain.forward)
        assert plain.hides == is_again


def test_ways_that_attend_by_parts_pay_for_it() -> None:
    """On a card many times the fused kernel, whose scores never meet the memory; on a processor a quarter."""
    for cluster, least, most in (("1x8xh100", 5.0, 50.0), ("1x8xcpu", TILE_OF_FUSED, TILE_OF_FUSED)):
        case = case_of("llama-3.1-8b", cluster, 16, seq_len=32768)
        by_method = {
            method: parts(case.network, case.workload, case.machine, case.engine, cut(8, method)) for method in METHODS
        }
        fused = by_method["all_to_all"]
        for method in ("all_gather", "ring"):
            slower = float(by_method[method].attention_f[0] / fused.attention_f[0])
            assert least * 0.999 <= slower <= most * 1.001
            assert by_method[method].matmul_f == fused.matmul_f


def test_other_frameworks_have_one_way() -> None:
    case = case_of("llama-3.1-8b", "1x8xh100", 16, engine_name="megatron")
    for method in CP_METHODS:
        c = cut(4, method)
        assert not attends_by_parts(case.engine, c)[0]
        assert not made_again_by_selection(case.engine, c)[0]
        assert of_case(case, c).forward == of_case(case, cut(4, "all_gather")).forward
    found = search(case, Fixed({"cp": 2}))
    assert isinstance(found, Ranking)
    assert set(found.candidates.cp_method) == {0}


def test_activations_fall_as_one_over_cp_and_buffers_are_each_ways_own() -> None:
    case = case_of("llama-3.1-8b", "1x8xh100", 8, seq_len=65536)
    whole = case.memory(cut(1, "all_gather", tp=2, microbatches=8)).activations[0]
    for method in CP_METHODS:
        part = case.memory(cut(4, method, tp=2, microbatches=8)).activations[0]
        assert part == pytest.approx(whole / 4, rel=0.02)
    tokens = np.array([65536 / 4])
    sizes = {
        method: float(buffer_bytes(case.network, case.workload, case.engine, cut(4, method), tokens)[0])
        for method in CP_METHODS
    }
    assert sizes["all_to_all"] < sizes["ring"] < sizes["all_gather"]
    assert buffer_bytes(case.network, case.workload, case.engine, cut(1, "ring"), tokens)[0] == 0


def test_heads_are_exchanged_where_they_divide_and_keys_gathered_where_not() -> None:
    """On cards the fused kernel decides; with three key/value heads nothing can be exchanged over two ranks."""
    divides = case_of("llama-3.1-8b", "1x8xh100", 8, seq_len=131072)
    found = search(divides, Fixed({"cp": 8}))
    assert isinstance(found, Ranking)
    assert found.candidates.layout(0).cp_method == "all_to_all"
    odd = ModelSpec(
        hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3,
        vocab_size=97,
    )  # fmt: skip
    found = search(toy_case("1x4xh100", 4, 64, model=odd), Fixed({"cp": 4}))
    assert isinstance(found, Ranking)
    assert found.candidates.layout(0).cp_method in ("all_gather", "ring")


def test_long_sequences_are_cut_and_short_ones_are_not() -> None:
    """An 8B on eight cards, a step of a million tokens: at 4k data parallel, at a million cp."""
    chosen = []
    for seq_len in (4096, 1 << 20):
        found = search(case_of("llama-3.1-8b", "2x8xh100", (1 << 22) // seq_len, seq_len=seq_len))
        assert isinstance(found, Ranking)
        chosen.append(int(found.candidates.cp[0]))
    assert chosen[0] == 1
    assert chosen[1] > 1


def test_a_wider_type_sends_more() -> None:
    assert engine("triax").sends_each_choice
    case = case_of("llama-3.1-8b", "2x8xh100", 16, seq_len=65536)
    wide = replace(
        case, workload=replace(case.workload, precision=replace(case.workload.precision, activation_bytes=4))
    )
    assert of_case(wide, cut(8, "all_to_all")).forward > 1.5 * of_case(case, cut(8, "all_to_all")).forward
