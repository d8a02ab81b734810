"""Do tokens on their way to experts weigh what the trainer sends, and does a rank keep what it keeps of them?"""

from typing import Any

import numpy as np
import pytest

from tests.harness.experts import with_experts
from tests.plan.cases import TOY, case_of, toy_case
from triax.plan.candidates import FULL, SELECTIVE, Candidates
from triax.plan.dispatch import dispatched_bytes, expert_s, sends_again
from triax.plan.engine import engine
from triax.plan.network import network_of
from triax.plan.workload import Workload, precision

MICROBATCHES, SEQUENCES, SEQ_LEN = 3, 2, 16


def sent_in_a_step(rank: int, world: int, run: Any, layout: Any) -> int:
    """Return the bytes of all rows that this rank sends on their way."""
    from tests.harness.training import Engine
    from triax.parallel import expert

    exchange, sent = expert._all_to_all, []

    def counted(rows: Any, *sizes: Any) -> Any:
        sent.append(rows.nbytes)
        return exchange(rows, *sizes)

    trained = Engine(run, layout, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert, "_all_to_all", counted)
        trained.step(0)
    return sum(sent)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_dispatched_is_what_ranks_are_counted_to_send(recompute: Any) -> None:
    """Over all ranks together: which of them has how many rows the routing says."""
    pytest.importorskip("torch")
    from tests.harness.ranks import run_ranks
    from tests.harness.toy import toy_run
    from triax.spec.layout import Layout

    model = with_experts(TOY.model_copy(update={"num_hidden_layers": 2}), num_experts=4)
    ranks = 2
    run = toy_run(
        model, train={"sequences_per_step": MICROBATCHES * SEQUENCES * ranks}, data={"seq_len": SEQ_LEN},
        precision={"compute": "bf16", "master": "fp32", "reduce": "fp32"},
    )  # fmt: skip
    layout = Layout(
        dp_shard=ranks, ep=ranks, zero=1, microbatches=MICROBATCHES, sequences_per_microbatch=SEQUENCES,
        recompute=recompute,
    )  # fmt: skip
    counted = sum(run_ranks(sent_in_a_step, ranks, run, layout))
    network, c = network_of(model), Candidates.from_layouts([layout])
    workload = Workload(run.sequences_per_step, SEQ_LEN, precision("bf16"))
    tokens = np.array([float(SEQUENCES * SEQ_LEN)])
    one = float(dispatched_bytes(network, workload, engine("triax"), c, tokens)[0])
    ways = 2 * (2 + float(sends_again(engine("triax"), c)[0]))
    assert counted == ranks * MICROBATCHES * network.expert_layers * ways * one


def test_each_choice_is_sent_by_us_and_each_rank_once_by_others() -> None:
    network = network_of(with_experts(TOY, num_experts=8))
    assert network.experts is not None
    c, tokens = Candidates.of(ep=2), np.array([64.0])
    workload = Workload(8, 64, precision("bf16"))
    ours, theirs = (
        float(dispatched_bytes(network, workload, engine(name), c, tokens)[0]) for name in ("triax", "megatron")
    )
    assert ours == 64 * network.experts.per_token * network.hidden * 2
    assert theirs < ours


def test_ways_that_are_computed_again_are_paid_again() -> None:
    for name, bits, expected in (("triax", SELECTIVE, 1), ("megatron", SELECTIVE, 0), ("triax", FULL, 1),
                                 ("megatron", FULL, 1), ("triax", 0, 0)):  # fmt: skip
        assert sends_again(engine(name), Candidates.of(ep=2, recompute=bits))[0] == expected


def test_spreading_over_servers_is_slower() -> None:
    case = case_of("qwen3-30b-a3b", "2x8xh100", 32)
    c = Candidates.of(2, dp_shard=16, ep=np.array([8, 16]))
    seconds, crosses = expert_s(
        case.network, case.workload, case.machine, engine("triax"), c, np.array([4096.0, 4096.0])
    )
    assert crosses.tolist() == [0, 1]
    assert seconds[1] > 2 * seconds[0] > 0


def test_what_crosses_goes_to_each_server_once() -> None:
    """Eight experts a token over 64 ranks of eight servers: 7.6 ranks, but 5.3 servers, of which one is its own."""
    case = case_of("qwen3-235b-a22b", "8x8xh100", 64, engine_name="megatron")
    assert case.network.experts is not None
    tokens, c = np.array([65536.0]), Candidates.of(dp_shard=64, ep=64)
    seconds, _ = expert_s(case.network, case.workload, case.machine, case.engine, c, tokens)
    crossed = 65536 * case.network.hidden * 2 * 8 * (1 - (1 - 1 / 8) ** 8) * 7 / 8
    ways = 2 * case.network.expert_layers
    assert seconds[0] == pytest.approx(ways * crossed / case.machine.card_network_bytes_per_s, rel=0.01)


def test_ranks_that_share_an_expert_gather_what_each_was_sent() -> None:
    case = case_of("mixtral-8x22b", "1x8xh100", 8, engine_name="megatron")
    c = Candidates.of(2, dp_shard=2, tp=4, ep=2, etp=np.array([1, 4]))
    whole, shared = expert_s(case.network, case.workload, case.machine, case.engine, c, np.array([65536.0, 65536.0]))[0]
    gathered = 2 * 65536 * case.network.hidden * 2 * 3 / 4 / case.machine.inside_all_gather
    assert shared - whole == pytest.approx(2 * case.network.expert_layers * gathered, rel=0.02)


def test_the_busiest_rank_is_waited_for() -> None:
    """A rank with all experts has no more tokens than another; with a part of them it has up to 1.3 times as many."""
    case = toy_case("1x4xh100", 16, model=with_experts(TOY, num_experts=8))
    kept = [float(case.memory(Candidates.of(dp_shard=4, ep=ep, microbatches=4)).activations[0]) for ep in (1, 4)]
    assert 1.0 < kept[1] / kept[0] < 1.3
