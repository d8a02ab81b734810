"""What comes and goes while a layer of triax runs its backward, tensor by tensor?

As in ``own_forward``, with ``g_`` before gradients of tensors and ``w_`` before those of weights.
"""

from triax.plan.memory.own_forward import LayerSizes, run_forward, tile_numbers
from triax.plan.memory.tape import Tape


def run_backward(t: Tape, s: LayerSizes, *, is_again: bool, adds_at_once: bool) -> None:
    """Run a layer's backward; the gradient of the residual stream is no part of it. ``is_again``: run what the forward
    did not keep again. ``adds_at_once``: gradients of weights are added to what is there as they come."""
    if s.tp > 1 and not (s.choices and not s.shared):
        t.take("g_whole", s.number_bytes * s.full)
        t.touch(s.number_bytes * s.full * (s.sequences > 1))
    if is_again:
        run_forward(t, s, is_again=True)
    if s.choices:
        _experts_backward(t, s, adds_at_once=adds_at_once)
    else:
        _feed_forward_backward(t, s, "", s.inner, adds_at_once=adds_at_once)
        _scatter_backward(t, s)
    _norm_backward(t, s, "2", s.cut)
    t.drop("hidden")
    _attention_backward(t, s, adds_at_once=adds_at_once)
    _scatter_backward(t, s)
    _norm_backward(t, s, "1", s.cut)
    t.drop("x", "down", "proj", "s_down", "mixed", "rows_out", "scores", "router")


def _weight(t: Tape, s: LayerSizes, name: str, *, adds_at_once: bool) -> None:
    size = s.number_bytes * s.weight(name)
    if adds_at_once:
        t.touch(size)
    else:
        t.take(f"w_{name}", size)


def _feed_forward_backward(t: Tape, s: LayerSizes, prefix: str, inner: float, *, adds_at_once: bool) -> None:
    """What comes out of it stands in ``g_in``, gathered over tp."""
    e = s.number_bytes
    entry = "whole2" if s.tp > 1 else "normed2"
    down = 0.0 if not adds_at_once else e * s.weight(prefix + "down")
    _weight(t, s, prefix + "down", adds_at_once=adds_at_once)
    t.touch(down + e * inner)
    t.take("g_product", e * inner)
    t.drop("g_whole", prefix + "product")
    t.take("g_act", e * inner)
    t.take("g_up", e * inner)
    t.drop("g_product", prefix + "up", prefix + "act")
    _weight(t, s, prefix + "up", adds_at_once=adds_at_once)
    t.take("g_one", e * s.full)
    t.drop("g_up")
    t.take("g_gate", e * inner)
    t.drop("g_act", prefix + "gate")
    _weight(t, s, prefix + "gate", adds_at_once=adds_at_once)
    t.take("g_two", e * s.full)
    t.drop("g_gate")
    if not (s.choices and s.tp == 1 and not s.is_low):
        t.drop(entry)
    t.take("g_in", e * s.full)
    t.drop("g_one", "g_two")


def _scatter_backward(t: Tape, s: LayerSizes) -> None:
    e = s.number_bytes
    if s.tp > 1:
        t.touch(e * s.full * (s.sequences > 1) + e * s.cut)
        t.drop("g_in")
        t.take("g_in", e * s.cut)


def _norm_backward(t: Tape, s: LayerSizes, name: str, size: float) -> None:
    """The stream's own gradient is no part of this."""
    e, wide = s.number_bytes, s.wide_bytes
    t.touch(2 * e * size)
    if s.is_low:
        t.drop("g_in", f"narrow{name}")
        t.touch((5 * wide) * size)
        t.drop(f"wide{name}")
        t.touch(2 * e * size)
    else:
        t.drop("g_in", f"narrow{name}")
        t.touch(3 * wide * size)
    t.drop(f"statistic{name}")


def _attention_backward(t: Tape, s: LayerSizes, *, adds_at_once: bool) -> None:
    e = s.number_bytes
    entry = "whole1" if s.tp > 1 else "normed1"
    if s.tp > 1:
        t.take("g_whole", e * s.full)
        t.touch(e * s.full * (s.sequences > 1))
    _weight(t, s, "o", adds_at_once=adds_at_once)
    t.take("g_out", e * s.query)
    t.drop("g_whole")
    _attend_backward(t, s)
    for name, size in (("k", s.key), ("q", s.query)):
        _turn_backward(t, s, name, size)
    if s.has_head_norms:
        t.touch(s.wide_bytes * s.query * 5)
        t.drop("q_narrow", "k_narrow", "q_wide", "k_wide", "q_lin", "k_lin")
    for name in ("v", "k"):
        _weight(t, s, name, adds_at_once=adds_at_once)
        t.take(f"g_in_{name}", e * s.full)
        t.drop(f"g_{name}")
    t.take("g_in", e * s.full)
    t.drop("g_in_v", "g_in_k")
    _weight(t, s, "q", adds_at_once=adds_at_once)
    t.take("g_in_q", e * s.full)
    t.drop("g_q", entry)
    t.touch(e * s.full)
    t.drop("g_in_q")


def _attend_backward(t: Tape, s: LayerSizes) -> None:
    e, wide = s.number_bytes, s.wide_bytes
    own = 2 * s.key
    if s.context == "all_to_all":
        t.touch(2 * e * s.query)
        t.drop("out_again")
        t.take("g_dealt", e * (s.query + own))
        t.drop("out", "log_sums", "heads", "g_out")
        t.touch(3 * e * (s.query + own))
        t.take("g_q", e * s.query)
        t.take("g_k", e * s.key)
        t.take("g_v", e * s.key)
        t.drop("g_dealt", "q", "k", "v")
        return
    if s.context in ("all_gather", "ring"):
        keys = s.cp * own if s.context == "all_gather" else own
        t.take("keys", e * keys * (1.5 if s.context == "all_gather" else 2))
        t.touch(2 * wide * s.query)
        gathered = wide * keys if s.context == "all_gather" else 2 * wide * keys
        t.take("sums", wide * s.query * (1 if s.context == "all_gather" else 2) + gathered)
        t.touch(2 * tile_numbers(s) * wide + tile_numbers(s) * (e if s.is_low else 0))
        t.touch(wide * keys + e * keys * 2)
        t.take("g_k", e * s.key)
        t.take("g_v", e * s.key)
        t.take("g_q", e * s.query)
        t.drop("keys", "sums", "g_out", "q", "k", "v", "out", "log_sums")
        return
    t.take("g_q", e * s.query)
    t.take("g_k", e * s.key)
    t.take("g_v", e * s.key)
    t.drop("g_out", "q", "k", "v", "out", "log_sums")


def _turn_backward(t: Tape, s: LayerSizes, name: str, size: float) -> None:
    e, wide = s.number_bytes, s.wide_bytes
    t.touch((3.5 * wide - e) * size if s.is_low else 2.5 * wide * size)


def _experts_backward(t: Tape, s: LayerSizes, *, adds_at_once: bool) -> None:
    e = s.number_bytes
    if s.shared:
        _feed_forward_backward(t, s, "s_", s.shared, adds_at_once=adds_at_once)
        _scatter_backward(t, s)
        t.take("g_shared", t.held.get("g_in", 0.0))
        t.drop("g_in")
    # Views of the weights were made first in the forward, so that their gradients are added last.
    t.take("g_rows", e * s.choices)
    t.drop("collected")
    t.touch(e * s.choices)
    t.take("w_experts_down", e * s.weight("experts_down"))
    t.take("g_product", e * s.expert_inner)
    t.drop("g_rows", "product")
    t.take("g_act", e * s.expert_inner)
    t.take("g_up", e * s.expert_inner)
    t.drop("g_product", "up", "act")
    t.take("w_experts_up", e * s.weight("experts_up"))
    t.take("g_one", e * s.choices)
    t.drop("g_up")
    t.take("g_gate", e * s.expert_inner)
    t.drop("g_act", "gate")
    t.take("w_experts_gate", e * s.weight("experts_gate"))
    t.take("g_two", e * s.choices)
    t.drop("g_gate", "rows", "rows_in")
    t.touch(e * s.choices)
    t.drop("g_two")
    t.touch(e * s.choices * 2 + e * s.cut)
    t.drop("g_one")
    t.take("g_in", e * s.cut)
    t.touch(s.wide_bytes * s.cut + e * s.cut)
    if not s.is_low:
        t.touch(e * s.weight("experts_down"))  # expert by expert, and then in one
    if adds_at_once:
        t.drop("w_experts_down", "w_experts_up", "w_experts_gate")
    t.drop("router_wide", "router", "scores")
    t.drop("g_shared", "normed2")
