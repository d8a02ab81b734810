"""How many bytes does a layer of triax keep, and how many more while it runs?"""

from dataclasses import dataclass
from typing import Final

from triax.plan.memory.activations import RUNS_LEFT
from triax.plan.memory.own_backward import run_backward
from triax.plan.memory.own_forward import LayerSizes, run_forward
from triax.plan.memory.tape import Tape

_PRODUCTS: Final = ("q_lin", "k_lin", "v", "out", "log_sums", "proj", "gate", "up", "down", "rows_out", "mixed",
                    "s_gate", "s_up", "s_down", "scores")  # fmt: skip
"""What selective recomputation keeps, where it is not made of parts: outputs of products, attention, scores."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer and microbatch, beside the residual stream that comes in and goes out."""

    kept: float
    """Until its backward."""
    forward: float
    """The most while its forward runs, what it keeps included."""
    backward: float
    """The most while its backward runs, what it keeps and gradients of its weights included."""
    split: float
    """Between the two parts of a split backward: what is kept, and gradients of what products and norms put out."""
    runs: float
    """What the second part leaves of the runs that it needs of a layer that keeps its input alone."""


def layer_bytes(sizes: LayerSizes, recompute: str, *, adds_at_once: bool) -> LayerBytes:
    """Return the bytes of a layer. ``adds_at_once``: gradients of weights are added to what is there as they come."""
    saved = _saved(sizes)
    kept = {"none": saved, "selective": _dear(sizes), "full": frozenset({"x"})}[recompute]
    forward = Tape(kept)
    forward.take("x", sizes.number_bytes * sizes.cut)
    run_forward(forward, sizes, is_again=False)
    out = forward.held.pop("out_stream")
    left = forward.now - out
    backward = Tape(saved)
    for name, size in forward.held.items():
        backward.take(name, size)
    run_backward(backward, sizes, is_again=recompute != "none", adds_at_once=adds_at_once)
    stream = sizes.number_bytes * sizes.cut
    whole = Tape(saved)
    whole.take("x", stream)
    run_forward(whole, sizes, is_again=False)
    runs = 0.0 if recompute == "none" else RUNS_LEFT * (whole.now - stream)
    return LayerBytes(left, forward.peak, backward.peak + stream, left + _outputs(sizes), runs)


def _outputs(s: LayerSizes) -> float:
    """Gradients of what matrices and norms put out, which a split backward keeps."""
    numbers = s.full + s.query + 2 * s.key + 2 * s.cut
    if s.choices:
        numbers += s.choices + 2 * s.expert_inner + (s.full + 2 * s.shared if s.shared else 0.0)
    else:
        numbers += s.full + 2 * s.inner
    if s.has_head_norms:
        numbers += s.query + s.key
    return s.number_bytes * numbers


def _saved(sizes: LayerSizes) -> frozenset[str]:
    """Return what a backward reads."""
    entry = "whole" if sizes.tp > 1 else "normed"
    names = {"q", "k", "v", "out", "out_again", "log_sums", "gate", "act", "up", "product"}
    names |= {f"{tensor}{norm}" for tensor in ("narrow", "statistic") for norm in (1, 2)} | {f"{entry}1"}
    names |= {"q_narrow", "k_narrow"} | ({"q_wide", "k_wide"} if sizes.is_low else {"q_lin", "k_lin"})
    if not sizes.has_head_norms:
        names -= {"q_lin", "k_lin"}
    names |= {"wide1", "wide2"} if sizes.is_low else {"x", "hidden"}
    if sizes.choices:
        names |= {"rows_in" if sizes.is_exchanged else "rows", "collected", "router", "s_gate", "s_act", "s_up"}
        names |= (
            {"s_product"}
            | ({"router_wide"} if sizes.is_low else {"normed2"})
            | ({f"{entry}2"} if sizes.shared else set())
        )
    else:
        names |= {f"{entry}2"}
    return frozenset(names)


def _dear(sizes: LayerSizes) -> frozenset[str]:
    names = set(_PRODUCTS) | {"x"}
    if sizes.context == "ring":
        names -= {"out", "log_sums"}
    return frozenset(names)
