"""What is a step made of, before anything overlaps and before anything is calibrated?

One array entry a layout. ``parts`` asks ``compute`` and ``comms``; ``triax.plan.step`` puts the parts together. The
two are apart so that calibration can put the same parts together with other factors, for rows of any network at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

import numpy as np

from triax.plan import candidates as bits
from triax.plan.candidates import SCHEDULE_NAMES, Candidates, Integers, Numbers
from triax.plan.comms import (
    Group,
    all_gather_s,
    all_reduce_s,
    group,
    send_s,
    split_group,
)
from triax.plan.compute import Work, optimizer_s, work
from triax.plan.context import attends_by_parts, attention_by_parts_s, context_s, made_again_by_selection
from triax.plan.dispatch import expert_s, sends_again
from triax.plan.engine import Engine
from triax.plan.hardware import Machine
from triax.plan.memory.stages import stage_sizes
from triax.plan.network import Network
from triax.plan.workload import Workload
from triax.spec.schedule import stage_owner

STEP_HOST_S: Final = 10e-3
"""Seconds of a step that belong to no microbatch: data, logging, learning rate (*assumed*; calibrated)."""

EXPERT_LAUNCHES: Final = 24.0
"""Launches and waits of a layer of experts beyond those of an ordinary layer, in those of one."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Seconds, of one microbatch in all layers unless a line says otherwise; ``f`` forward, ``b`` backward."""

    matmul_f: Numbers
    matmul_b: Numbers
    attention_f: Numbers
    attention_b: Numbers
    memory_f: Numbers
    memory_b: Numbers
    host_f: Numbers
    """Of the host to launch it, beside the card's own work."""
    host_b: Numbers
    counts_f: Numbers
    """Of the host while the card has nothing to do: it had to read how many tokens each expert has."""
    counts_b: Numbers
    head_matmul: Numbers
    head_memory: Numbers
    embedding: Numbers
    tp_f: Numbers
    tp_b: Numbers
    tp_crosses: Numbers
    """1: tensor-parallel peers sit in several domains."""
    cp_f: Numbers
    cp_b: Numbers
    hides_cp: Numbers
    """1: attention runs beside it."""
    ep_f: Numbers
    ep_b: Numbers
    ep_crosses: Numbers
    send: Numbers
    """One boundary between pipeline ranks, one direction."""
    gather_f: Numbers
    """Weights of a rank gathered before a forward, each microbatch or once a step."""
    gather_b: Numbers
    reduce: Numbers
    """Gradients of a rank summed."""
    dp_crosses: Numbers
    gathers_each: Numbers
    """1: weights are gathered for each microbatch."""
    reduces_each: Numbers
    units: Numbers
    """Parts that gathering and reducing go in: the first cannot hide, nor the last."""
    optimizer: Numbers
    """Once a step."""
    first_part: Numbers
    """Layers of the first pipeline rank over all layers."""
    middle_part: Numbers
    last_part: Numbers
    pp: Integers
    stages_per_rank: Integers
    microbatches: Integers
    schedule: Integers
    ranks: Numbers
    hides_tp: Numbers
    """Part of the products' time beside which tensor parallelism's traffic may run."""
    tp: Numbers
    hides_dp: Numbers
    hides_ep: Numbers
    hides_pp: Numbers
    tax: Numbers
    """Part of compute that is lost while collectives run beside it."""

    def __len__(self) -> int:
        return len(self.pp)

    @classmethod
    def joined(cls, rows: Sequence["Parts"]) -> Self:
        """Return the parts of all ``rows``, one after another."""
        return cls(**{name: np.concatenate([getattr(row, name) for row in rows]) for name in _NAMES})

    def take(self, chosen: Any) -> Self:
        """Return the entries that a mask or indices choose."""
        return type(self)(**{name: getattr(self, name)[chosen] for name in _NAMES})


_NAMES: Final = tuple(field.name for field in fields(Parts))


def parts(network: Network, workload: Workload, machine: Machine, engine: Engine, candidates: Candidates) -> Parts:
    """Return what a step of each candidate is made of. Candidates must be legal; nothing is checked here."""
    c = candidates
    tokens = c.sequences_per_microbatch * workload.seq_len / c.cp
    done = _distinct_work(network, workload, machine, engine, c)
    done = _attention_by_parts(network, workload, machine, engine, c, tokens, done)
    again = _again(network, engine, c, done)
    host, counted = _host_s(network, engine)
    is_full = (c.recompute & bits.FULL) > 0
    tp_f, tp_b, tp_crosses = _tensor_s(network, workload, machine, engine, c, tokens)
    ep_f, ep_crosses = expert_s(network, workload, machine, engine, c, tokens)
    first, middle, last = _layer_parts(network, engine, c)
    data = _data_s(network, workload, machine, engine, c, np.maximum(first, np.maximum(middle, last)))
    ones = np.ones(len(c))
    context = context_s(network, workload, machine, engine, c, tokens)
    backward = 1.0 / (2 if workload.lora_rank else 1)
    return Parts(
        matmul_f=done.matmul_f,
        matmul_b=done.matmul_b * backward + again[0],
        attention_f=done.attention_f,
        attention_b=done.attention_b + again[1],
        memory_f=done.memory_f,
        memory_b=done.memory_b + again[2],
        host_f=(host - counted) / 3 * ones,
        host_b=(host * 2 / 3 + (host - counted) / 3 * is_full) * ones,
        counts_f=counted / 3 * ones,
        counts_b=counted / 3 * is_full * ones,
        head_matmul=done.head_matmul,
        head_memory=done.head_memory,
        embedding=done.embedding,
        tp_f=tp_f,
        tp_b=tp_b + np.where(is_full, tp_f, 0.0),
        tp_crosses=tp_crosses,
        cp_f=network.attention_layers * context.forward,
        cp_b=network.attention_layers * context.backward,
        hides_cp=context.hides,
        ep_f=ep_f,
        ep_b=ep_f * (1 + sends_again(engine, c)),
        ep_crosses=ep_crosses,
        send=_send_s(network, machine, c, tokens),
        optimizer=optimizer_s(workload, machine.card, data.updated) + STEP_HOST_S,
        first_part=first,
        middle_part=middle,
        last_part=last,
        pp=c.pp,
        stages_per_rank=c.stages_per_rank,
        microbatches=c.microbatches,
        schedule=c.schedule,
        ranks=c.world_size.astype(np.float64),
        hides_tp=engine.hides_tp * (1.0 - done.ffn_f / done.matmul_f * (network.expert_layers > 0)),
        tp=c.tp.astype(np.float64),
        hides_dp=engine.hides_dp * ones,
        hides_ep=engine.hides_ep * ones,
        hides_pp=np.where(c.stages_per_rank > 1, 1.0, engine.hides_pp),
        tax=min(engine.comm_sms / machine.card.sms, 0.5) * ones,  # a core counts as one unit, and is not lost whole
        gather_f=data.gather_f,
        gather_b=data.gather_b,
        reduce=data.reduce,
        dp_crosses=data.crosses,
        gathers_each=data.gathers_each,
        reduces_each=data.reduces_each,
        units=np.maximum(network.layers / c.pp, 1.0),
    )


def _distinct_work(network: Network, workload: Workload, machine: Machine, engine: Engine, c: Candidates) -> Work:
    """Operators depend on a few columns only: price each distinct combination once, then spread."""
    columns = (c.sequences_per_microbatch, c.cp, c.tp, c.ep, c.etp, c.sequence_parallel)
    code = np.zeros(len(c), dtype=np.int64)
    for column in columns:
        code = code * (int(column.max()) + 1) + column
    _, first, spread = np.unique(code, return_index=True, return_inverse=True)
    mbs, cp, tp, ep, etp, sequence_parallel = (column[first] for column in columns)
    distinct = work(
        network, workload, machine.card, engine, tokens=mbs * workload.seq_len / cp, tp=tp, cp=cp, ep=ep, etp=etp,
        is_sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return Work(**{field.name: getattr(distinct, field.name)[spread] for field in fields(Work)})


def _again(network: Network, engine: Engine, c: Candidates, done: Work) -> tuple[Numbers, Numbers, Numbers]:
    """Return forward seconds that recomputation repeats: matrix products, attention, memory-bound work."""

    def has(bit: int) -> Numbers:
        return ((c.recompute & bit) > 0).astype(np.float64)

    stage_layers = network.layers / (c.pp * c.stages_per_rank)
    part = np.where(c.recompute_layers > 0, np.minimum(c.recompute_layers / stage_layers, 1.0), 1.0)
    full = has(bits.FULL)
    selective = has(bits.SELECTIVE)
    linear = done.matmul_f - done.ffn_f
    matmul = np.minimum(
        full * done.matmul_f
        + selective * engine.selective_matmul_again * done.matmul_f
        + np.maximum(has(bits.MLP), has(bits.EXPERTS)) * done.ffn_f
        + 0.3 * has(bits.SHARED_EXPERTS) * done.ffn_f
        + has(bits.LATENT_UP) * (0.4 if network.latent_attention is not None else 0.0) * linear,
        done.matmul_f,
    )
    attention = np.maximum(full, has(bits.CORE_ATTENTION))
    attention = np.maximum(attention, made_again_by_selection(engine, c) * selective) * done.attention_f
    memory = np.minimum(full + selective + 0.35 * has(bits.NORMS) + 0.25 * has(bits.ACTIVATION), 1.0) * done.memory_f
    return part * matmul, part * attention, part * memory


def _host_s(network: Network, engine: Engine) -> tuple[float, float]:
    """Return the host's seconds to launch all layers of a microbatch, forward and backward; and the part of it that
    routing takes, of which the forward third is launched only after counts of tokens were waited for.

    Routing launches many small operators (published runs of one sequence a microbatch take about ten times as long a
    layer as dense ones; *assumed*, calibrated). How many rows go where and to which expert is known to the card alone,
    so that the host stops in each forward until it has read it (``_maybe_dtoh_and_synchronize`` of Megatron-Core's
    dispatchers; splits of ``all_to_all_single`` elsewhere), and then the card waits for the host. A backward knows.
    """
    if engine.has_cuda_graphs:
        return 0.0, 0.0
    ordinary = engine.op_host_s * engine.ops_per_layer * network.layers
    routing = EXPERT_LAUNCHES * network.expert_layers / network.layers
    host = ordinary * (1.0 + routing + (0.5 if network.latent_attention is not None else 0.0))
    return host, ordinary * routing if engine.waits_for_counts else 0.0


def _tensor_s(
    network: Network, workload: Workload, machine: Machine, engine: Engine, c: Candidates, tokens: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """Two all-reduces a layer each way, or as many pairs of all-gather and reduce-scatter (arXiv:2205.05198).

    Some engines quantise what they gather before they do; sums are of the wide type.
    """
    peers = group(c, ("tp",), machine)
    message = tokens * network.hidden * 2.0
    is_narrow = workload.precision.recipe in engine.gathers_narrow
    narrow = workload.precision.matmul_input_bytes / 2.0 if is_narrow else 1.0
    pair = all_gather_s(machine, peers, narrow * message) + all_gather_s(machine, peers, message)
    one = np.where(c.sequence_parallel == 1, pair, all_reduce_s(machine, peers, message))
    # Of layers with experts only attention meets over tp: tokens of experts that are cut are gathered on their way.
    blocks = network.attention_layers + network.dense_layers + 0.5 * network.expert_layers
    mixers = 0 if network.state_space is None else network.state_space.layers
    forward = np.where(c.tp > 1, (blocks + mixers) * one, 0.0)
    return forward, forward, ((c.tp > 1) & (peers.domains > 1)).astype(np.float64)


def _attention_by_parts(
    network: Network, workload: Workload, machine: Machine, engine: Engine, c: Candidates, tokens: Numbers, done: Work
) -> Work:
    by_parts = attends_by_parts(engine, c)
    if not by_parts.any():
        return done
    fused = (done.attention_f, done.attention_b)
    forward, backward = attention_by_parts_s(network, workload, machine.card, c, tokens, fused)
    return replace(
        done,
        attention_f=np.where(by_parts, forward, done.attention_f),
        attention_b=np.where(by_parts, backward, done.attention_b),
    )


def _send_s(network: Network, machine: Machine, c: Candidates, tokens: Numbers) -> Numbers:
    message = tokens * network.hidden * 2.0 / np.where(c.sequence_parallel == 1, c.tp, 1)
    return np.where(c.pp > 1, send_s(machine, c.stride("pp"), message), 0.0)


def _layer_parts(network: Network, engine: Engine, c: Candidates) -> tuple[Numbers, Numbers, Numbers]:
    """Return layers of the first, of a middle and of the last pipeline rank, over all layers.

    triax cuts by cost. In other engines every stage has as many, rounded up; what is too much is taken from the last
    stage, then from the first, which also hold head and embedding.
    """
    layers, stages = network.layers, c.pp * c.stages_per_rank
    most = np.ceil(layers / stages)
    spare = most * stages - layers
    from_last = np.minimum(np.ceil(spare / 2), most)
    from_first = np.minimum(spare - from_last, most)
    rank = most * c.stages_per_rank
    first: Numbers = (rank - from_first).astype(np.float64)
    middle: Numbers = rank.astype(np.float64)
    last: Numbers = (rank - from_last).astype(np.float64)
    if engine.family == "triax":
        first, middle, last = _cut_by_cost(network, c)
    for index, cuts in enumerate(c.cuts):
        for pp in np.unique(c.pp[c.cut == index]):
            chosen = (c.cut == index) & (c.pp == pp)
            per_rank = np.asarray(cuts).reshape(-1, pp).sum(axis=0)
            first = np.where(chosen, per_rank[0], first)
            last = np.where(chosen, per_rank[-1], last)
            middle = np.where(chosen, per_rank[1:-1].max() if pp > 2 else per_rank.max(), middle)
    alone = c.pp == 1
    parts_of = (np.where(alone, layers, each) / layers for each in (first, middle, last))
    one, two, three = parts_of
    return one, two, three


def _cut_by_cost(network: Network, c: Candidates) -> tuple[Numbers, Numbers, Numbers]:
    """Return layers of the first, of the fullest middle and of the last rank, as ``stage_sizes`` cuts them."""
    code = (c.pp * (int(c.stages_per_rank.max()) + 1) + c.stages_per_rank) * len(SCHEDULE_NAMES) + c.schedule
    _, at, spread = np.unique(code, return_index=True, return_inverse=True)
    distinct = []
    for index in at:
        pp, chunks = int(c.pp[index]), int(c.stages_per_rank[index])
        owner = stage_owner(SCHEDULE_NAMES[c.schedule[index]], pp, chunks)
        of_rank = np.bincount(owner, weights=stage_sizes(network, pp * chunks, None, is_by_cost=True))
        distinct.append((of_rank[0], of_rank[1:-1].max() if pp > 2 else of_rank.max(), of_rank[-1]))
    first, middle, last = np.asarray(distinct).T[:, spread]
    return first, middle, last


@dataclass(frozen=True, eq=False)
class _Data:
    gather_f: Numbers
    gather_b: Numbers
    reduce: Numbers
    crosses: Numbers
    gathers_each: Numbers
    reduces_each: Numbers
    updated: Numbers


def _data_s(
    network: Network, workload: Workload, machine: Machine, engine: Engine, c: Candidates, share: Numbers
) -> _Data:
    """What the data axes move for the rank with the most layers, ``share`` of all; experts in their own groups."""
    all_experts = network.expert_layers * (network.experts.count if network.experts else 0) * network.expert_parameters
    outside = max(network.embedding_parameters, network.vocab * network.hidden)
    both = np.where(c.pp == 1, network.embedding_parameters + network.head_parameters, outside)
    dense = (share * (network.layers_parameters - all_experts) + both) / c.tp
    routed = share * all_experts / (c.ep * c.etp)
    shards = group(c, ("dp_shard", "cp"), machine)
    copies = group(c, ("dp_replicate",), machine)
    expert_size = np.maximum(c.data_ranks * c.cp * c.tp // (c.ep * c.etp), 1)
    expert_peers = split_group(expert_size, c.ep * c.etp, machine)
    weight_bytes = 1.0 if workload.precision.recipe == "mxfp8" else 2.0
    grad_bytes = float(workload.grad_reduce_bytes or engine.grad_reduce_bytes)
    trained = 1.0 if not workload.lora_rank else 0.01
    plain = c.zero == 0

    def collect(numbers: Numbers, width: float, peers: Group) -> Numbers:
        return np.where((peers.size > 1) & (numbers > 0), all_gather_s(machine, peers, numbers * width), 0.0)

    def summed(numbers: Numbers, peers: Group) -> Numbers:
        return np.where((peers.size > 1) & (numbers > 0), all_reduce_s(machine, peers, numbers * grad_bytes), 0.0)

    per_unit = np.maximum(network.layers * share, 1.0)
    gather = _latency_aware(collect, dense, weight_bytes, shards, c, per_unit)
    gather = gather + collect(routed, weight_bytes, expert_peers)
    reduce = _latency_aware(collect, dense, grad_bytes, shards, c, per_unit) + collect(routed, grad_bytes, expert_peers)
    whole = Group(shards.inside * copies.inside, shards.domains * copies.domains)
    reduce = np.where(plain, summed(dense, whole) + summed(routed, expert_peers), reduce)
    reduce = reduce + np.where(plain, 0.0, summed(dense / shards.size, copies))
    deep = c.zero == 3
    shard_size = np.where(plain, 1.0, shards.size)
    return _Data(
        gather_f=np.where(plain, 0.0, gather),
        gather_b=np.where(deep, gather, 0.0),
        reduce=reduce * trained,
        crosses=(np.maximum(whole.domains, np.where(routed > 0, expert_peers.domains, 1)) > 1).astype(np.float64),
        gathers_each=deep.astype(np.float64),
        reduces_each=((c.zero >= 2) & engine.reduces_each_microbatch).astype(np.float64),
        updated=trained * (dense / shard_size + routed / np.where(plain, 1.0, expert_size)),
    )


def _latency_aware(
    collect: Any, numbers: Numbers, width: float, peers: Group, c: Candidates, units: Numbers
) -> Numbers:
    """Under ZeRO-3 each layer is gathered by itself, and so pays the latency; else a few large buckets do."""
    pieces = np.where(c.zero == 3, units, 1.0)
    result: Numbers = pieces * collect(numbers / pieces, width, peers)
    return result
