"""How long does a step take, and what does its time go to?

``combine`` puts the parts of a step together: what runs at once, what waits, what the slowest pipeline rank does. The
result is a waterfall: its terms add up to the step.
"""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from triax.plan.candidates import Integers, Numbers
from triax.plan.parts import Parts
from triax.plan.timeline import Ranks, closed_form_s

JITTER: Final = 0.01
"""Standard deviation of one rank's step over its mean (*assumed*; calibrated): the slowest of n is waited for."""


@dataclass(frozen=True, eq=False)
class Factors:
    """What a stack was measured to take, over what the parts say; 1 is as the parts say. One array entry a layout."""

    compute: Numbers
    """All work of the card."""
    attention: Numbers
    """Attention beside other work."""
    memory: Numbers
    """Memory-bound beside other work."""
    host: Numbers
    inside: Numbers
    """Collectives inside a domain."""
    across: Numbers
    """Collectives and sends on the network."""
    fixed: Numbers
    """Optimizer and what else happens once a step."""
    jitter: Numbers

    @classmethod
    def ones(cls, count: int) -> "Factors":
        """Return factors that change nothing."""
        return cls(**{field.name: np.ones(count) for field in fields(cls)})


FACTOR_NAMES: Final = tuple(field.name for field in fields(Factors))


@dataclass(frozen=True, eq=False)
class StepTime:
    """Seconds of one step by what they go to; they add up to ``step_s``."""

    compute: Numbers
    tp: Numbers
    cp: Numbers
    ep: Numbers
    bubble: Numbers
    """A pipeline rank waits for others."""
    pp: Numbers
    """Sends between pipeline ranks that nothing hides."""
    dp: Numbers
    """Gathering weights and summing gradients, where nothing hides it, and what it takes from compute where it does."""
    optimizer: Numbers
    host: Numbers
    """The card waits for the host to launch work."""
    jitter: Numbers

    @property
    def step_s(self) -> Numbers:
        """Seconds of the step."""
        total: Numbers = sum((getattr(self, name) for name in WATERFALL), np.zeros_like(self.compute))
        return total

    def take(self, rows: Integers) -> "StepTime":
        """Return the candidates at ``rows``."""
        return StepTime(**{name: getattr(self, name)[rows] for name in WATERFALL})


WATERFALL: Final = tuple(field.name for field in fields(StepTime))


@dataclass(frozen=True, eq=False)
class Layers:
    """Seconds of one microbatch in all layers of the network, and what of them is not compute."""

    forward: Numbers
    backward: Numbers
    tp: Numbers
    cp: Numbers
    ep: Numbers
    host: Numbers
    head: Numbers
    """Of the last stage besides its layers, forward and backward: a third and two thirds."""
    embedding: Numbers
    """Of the first stage besides its layers, forward and backward: a half each."""


def layers(parts: Parts, factors: Factors) -> Layers:
    """Return what a microbatch takes under ``factors``, wherever its layers stand."""
    p, x = parts, factors
    gpu_f = x.compute * (p.matmul_f + x.attention * p.attention_f + x.memory * p.memory_f)
    gpu_b = x.compute * (p.matmul_b + x.attention * p.attention_b + x.memory * p.memory_b)
    on_tp = np.where(p.tp_crosses > 0, x.across, x.inside)
    on_ep = np.where(p.ep_crosses > 0, x.across, x.inside) * (1 - p.hides_ep)
    tp_f = _beside_products(on_tp * p.tp_f, x.compute * p.matmul_f, p)
    tp_b = _beside_products(on_tp * p.tp_b, x.compute * p.matmul_b, p)
    ep_f, ep_b = on_ep * p.ep_f, on_ep * p.ep_b
    # Keys and values of the next part arrive while scores of this one are computed, where anything is hidden.
    hides, least = p.hides_cp * x.compute * x.attention, 1 - 0.9 * p.hides_cp
    cp_f = np.maximum(x.inside * p.cp_f - hides * p.attention_f, least * x.inside * p.cp_f)
    cp_b = np.maximum(x.inside * p.cp_b - hides * p.attention_b, least * x.inside * p.cp_b)
    card_f, card_b = gpu_f + tp_f + cp_f + ep_f, gpu_b + tp_b + cp_b + ep_b
    host_f, host_b = x.host * p.host_f, x.host * p.host_b
    wait_f = _longer(card_f, host_f) - card_f + x.host * p.counts_f
    wait_b = _longer(card_b, host_b) - card_b + x.host * p.counts_b
    return Layers(
        forward=card_f + wait_f,
        backward=card_b + wait_b,
        tp=tp_f + tp_b,
        cp=cp_f + cp_b,
        ep=ep_f + ep_b,
        host=wait_f + wait_b,
        head=x.compute * (p.head_matmul + x.memory * p.head_memory),
        embedding=x.compute * x.memory * p.embedding,
    )


def combine(parts: Parts, factors: Factors) -> StepTime:
    """Return the step of each entry of ``parts`` under ``factors``."""
    p, x, at = parts, factors, layers(parts, factors)
    ranks = Ranks(
        first_f=p.first_part * at.forward + at.embedding / 2,
        first_b=p.first_part * at.backward + at.embedding / 2,
        middle_f=p.middle_part * at.forward,
        middle_b=p.middle_part * at.backward,
        last_f=p.last_part * at.forward + at.head / 3,
        last_b=p.last_part * at.backward + at.head * 2 / 3,
    )
    busy, idle = closed_form_s(
        ranks, pp=p.pp, stages_per_rank=p.stages_per_rank, microbatches=p.microbatches, schedule=p.schedule
    )
    per_microbatch, whole = busy / p.microbatches, at.forward + at.backward
    forward = per_microbatch * at.forward / whole
    data = _data_exposed(p, x, forward, per_microbatch - forward)
    sends = x.across * 2 * p.send * (p.pp - 1 + (1 - p.hides_pp) * (p.microbatches - 1))
    of_layers = np.where(p.pp == 1, whole, np.minimum(p.middle_part * whole, per_microbatch))
    part = p.microbatches * of_layers / whole
    waits = {name: part * getattr(at, name) for name in ("tp", "cp", "ep", "host")}
    jitter = x.jitter * JITTER * np.sqrt(2 * np.log(np.maximum(p.ranks, 1.0001))) * busy
    return StepTime(
        compute=busy - sum(waits.values()), bubble=idle, pp=np.where(p.pp > 1, sends, 0.0), dp=data,
        optimizer=x.fixed * p.optimizer, jitter=jitter, **waits,
    )  # fmt: skip


def _beside_products(moved: Numbers, products: Numbers, p: Parts) -> Numbers:
    """Return what shows of tensor parallelism's traffic: all of it, or where products run beside it in tp parts, what
    outlasts them, and one part in any case (Transformer Engine's user buffers, PyTorch's async TP)."""
    result: Numbers = np.maximum(moved - p.hides_tp * products, moved / p.tp)
    return result


def _longer(one: Numbers, other: Numbers) -> Numbers:
    """The longer of two that run beside each other and hinder one another when they are alike (fourth-power mean)."""
    result: Numbers = (one**4 + other**4) ** 0.25
    return result


def _data_exposed(p: Parts, x: Factors, forward: Numbers, backward: Numbers) -> Numbers:
    """Return seconds of the data axes that show in a step: what outlasts the work beside it, its first and last unit.

    ``forward`` and ``backward`` are those of one microbatch on a rank.
    """
    factor = np.where(p.dp_crosses > 0, x.across, x.inside)
    gather_f, gather_b, reduce = factor * p.gather_f, factor * p.gather_b, factor * p.reduce
    times_gather = np.where(p.gathers_each > 0, p.microbatches, 1)
    times_reduce = np.where(p.reduces_each > 0, p.microbatches, 1)
    hidden_f, hidden_b = p.hides_dp * forward, p.hides_dp * backward
    # What runs once is hidden by one stage of one microbatch, what runs each time by all of its microbatch.
    first = np.where(p.gathers_each > 0, 1.0, 1.0 / p.stages_per_rank)
    last = np.where(p.reduces_each > 0, 1.0, 1.0 / p.stages_per_rank)
    in_forward = _beyond(gather_f, hidden_f * first, p.units)
    with_reduce = _beyond(gather_b + reduce, hidden_b * last, p.units)
    without = _beyond(gather_b, hidden_b, p.units)
    exposed = times_gather * in_forward + times_reduce * with_reduce + (times_gather - times_reduce) * without
    moved = times_gather * (gather_f + gather_b) + times_reduce * reduce
    return np.maximum(exposed, 0.0) + p.tax * np.maximum(moved - exposed, 0.0)


def _beyond(moved: Numbers, hidden: Numbers, units: Numbers) -> Numbers:
    """Return what is left of ``moved`` beside ``hidden``; one of its ``units`` is always seen."""
    return np.maximum(_longer(moved, hidden) - hidden, moved / units)
