"""What comes and goes while a layer of triax runs its forward, tensor by tensor?

Written down from the operations that the engine's layers dispatch; ``tests/verify/test_predicted_memory.py`` holds it
to them. Names stand for tensors: those of ``attention`` and ``feed_forward`` in the order of ``triax.nn``.
"""

from dataclasses import dataclass

from triax.plan.context import TILE_NUMBERS, TILE_ROWS
from triax.plan.memory.tape import Tape


@dataclass(frozen=True)
class LayerSizes:
    """Numbers in the tensors of a layer, on one rank."""

    number_bytes: float
    sequences: int
    """Of a microbatch."""
    tp: int
    cut: float
    """A hidden state of this rank's part of the sequence."""
    full: float
    """The same, gathered over tp."""
    rows: float
    """Tokens of this rank's part."""
    query: float
    key: float
    query_heads: float
    """Heads times tokens."""
    has_head_norms: bool
    context: str
    """How parts of a sequence meet: ``whole``, or a ``cp_method``."""
    cp: int
    seq_len: int
    inner: float = 0.0
    """Inside a feed-forward network; 0 where there are experts instead."""
    choices: float = 0.0
    """Rows that are sent to experts, times hidden."""
    expert_inner: float = 0.0
    """Inside experts."""
    is_exchanged: bool = False
    """Experts are spread over ranks."""
    shared: float = 0.0
    """Inside the shared expert."""
    router_bytes: float = 0.0
    """Scores, choices and the order of rows."""
    scores_bytes: float = 0.0
    """Of them, what selective recomputation keeps."""
    weights: tuple[tuple[str, float], ...] = ()
    """Numbers of this rank's matrices, by name."""

    @property
    def wide_bytes(self) -> float:
        """Bytes of a number where at least fp32 is asked for."""
        return max(4.0, self.number_bytes)

    @property
    def is_low(self) -> bool:
        """Wide copies are tensors of their own."""
        return self.number_bytes < 4

    def weight(self, name: str) -> float:
        """Return the numbers of one matrix."""
        return dict(self.weights).get(name, 0.0)


def run_forward(t: Tape, s: LayerSizes, *, is_again: bool) -> None:
    """Run a layer's forward; ``is_again``: only as far as the backward needs it."""
    e = s.number_bytes
    _norm(t, s, "1", "x", s.cut)
    _gather(t, s, "1")
    _attention(t, s)
    t.take("proj", e * s.full)
    if s.tp > 1:
        t.touch(e * s.full * (s.sequences > 1) + e * s.cut)
        t.take("attended", e * s.cut)
        t.leave("proj", "normed1", "whole1")
    else:
        t.leave("normed1")
    t.take("hidden", e * s.cut)
    _norm(t, s, "2", "hidden", s.cut)
    if s.choices:
        _experts(t, s)
    else:
        _gather(t, s, "2")
        _feed_forward(t, s, "", s.inner)
    if is_again:
        t.leave("attended", "hidden", "proj", "whole2", "normed2", "rows", "rows_out", "mixed", "s_down")
        return
    if not s.choices:
        _down(t, s, "down")
    t.leave("whole2", "normed2")
    t.take("out_stream", e * s.cut)
    t.leave("down", "down_part", "mixed", "hidden", "attended", "proj", "x", "rows_out", "s_down", "s_part", "both")


def _norm(t: Tape, s: LayerSizes, name: str, source: str, size: float) -> None:
    e, wide = s.number_bytes, s.wide_bytes
    if s.is_low:
        t.take(f"wide{name}", wide * size)
    t.take(f"statistic{name}", wide * s.rows)
    t.touch(wide * size)
    t.take(f"unit{name}", wide * size)
    if s.is_low:
        t.take(f"narrow{name}", e * size)
        t.take(f"normed{name}", e * size)
        t.drop(f"unit{name}")
        t.leave(f"narrow{name}", f"wide{name}", f"statistic{name}")
    else:
        t.take(f"normed{name}", e * size)
        t.held[f"narrow{name}"] = t.held.pop(f"unit{name}")
        t.leave(f"narrow{name}", f"statistic{name}")


def _gather(t: Tape, s: LayerSizes, name: str) -> None:
    if s.tp > 1:
        t.take(f"whole{name}", s.number_bytes * s.full)
        t.touch(s.number_bytes * s.full * (s.sequences > 1))


def _attention(t: Tape, s: LayerSizes) -> None:
    e = s.number_bytes
    for name, size in (("q", s.query), ("k", s.key)):
        t.take(f"{name}_lin", e * size)
        if s.has_head_norms:
            _head_norm(t, s, name, size)
    t.take("v", e * s.key)
    for name, size in (("q", s.query), ("k", s.key)):
        _turn(t, s, name, size)
    t.leave("q_lin", "k_lin")
    t.drop("q_normed", "k_normed")
    _attend(t, s)
    t.leave("q", "k", "v", "out", "log_sums")


def _head_norm(t: Tape, s: LayerSizes, name: str, size: float) -> None:
    e, wide = s.number_bytes, s.wide_bytes
    if s.is_low:
        t.take(f"{name}_wide", wide * size)
    t.touch(wide * size)
    t.take("unit", wide * size)
    if s.is_low:
        t.take(f"{name}_narrow", e * size)
        t.take(f"{name}_normed", e * size)
        t.drop("unit")
    else:
        t.take(f"{name}_normed", e * size)
        t.held[f"{name}_narrow"] = t.held.pop("unit")
    t.leave(f"{name}_narrow", f"{name}_wide", f"{name}_lin")


def _turn(t: Tape, s: LayerSizes, name: str, size: float) -> None:
    """A copy in at least fp32, two products, and their sum."""
    e, wide = s.number_bytes, s.wide_bytes
    t.touch(wide * size * (4 if s.is_low else 3))
    t.take(name, e * size)


def _attend(t: Tape, s: LayerSizes) -> None:
    e, wide = s.number_bytes, s.wide_bytes
    own = 2 * s.key
    heads = s.query_heads
    if s.context == "all_to_all":
        t.touch(2 * e * (s.query + own))
        t.take("dealt", e * (s.query + own))
        t.touch(e * (s.query + own))
        t.take("heads", e * (s.query + own))
        t.drop("dealt")
        t.take("out", e * s.query)
        t.take("log_sums", 4.0 * heads)
        t.touch(3 * e * s.query)
        t.take("out_again", e * s.query)
        if t.saved and "q" in t.saved:
            t.drop("q", "k", "v")  # the heads that came are read instead
        else:
            t.drop("heads")
        t.leave("out_again")
        return
    if s.context in ("all_gather", "ring"):
        keys = s.cp * own if s.context == "all_gather" else own
        t.take("keys", e * keys * (1.5 if s.context == "all_gather" else 2))
        t.take("sums", wide * s.query * (1 if s.context == "all_gather" else 2) + wide * heads)
        t.touch(tile_numbers(s) * (wide + (e if s.is_low else 0)) + wide * s.query * (s.context == "ring"))
        t.take("out", e * s.query)
        t.take("log_sums", wide * heads)
        t.drop("keys", "sums")
        return
    t.take("out", e * s.query)
    t.take("log_sums", 4.0 * heads)


def tile_numbers(s: LayerSizes) -> float:
    """Scores that are made at once."""
    keys = s.seq_len / s.cp if s.context == "ring" else float(s.seq_len)
    heads = s.query_heads / (s.full and s.seq_len / s.cp)
    return min(TILE_NUMBERS, TILE_ROWS * heads * keys)


def _feed_forward(t: Tape, s: LayerSizes, prefix: str, inner: float) -> None:
    e = s.number_bytes
    for name in ("gate", "act"):
        t.take(prefix + name, e * inner)
    t.leave(prefix + "gate")
    t.take(prefix + "up", e * inner)
    t.take(prefix + "product", e * inner)
    t.leave(prefix + "act", prefix + "up")


def _down(t: Tape, s: LayerSizes, name: str, prefix: str = "") -> None:
    e = s.number_bytes
    t.take(name, e * s.full)
    t.leave(prefix + "product")
    if s.tp > 1:
        t.touch(e * s.full * (s.sequences > 1) + e * s.cut)
        t.take(f"{prefix}part" if prefix else "down_part", e * s.cut)
        t.leave(name)


def _experts(t: Tape, s: LayerSizes) -> None:
    e = s.number_bytes
    if s.is_low:
        t.take("router_wide", s.wide_bytes * s.cut)
    t.take("scores", s.scores_bytes)
    t.take("router", s.router_bytes - s.scores_bytes)
    t.leave("router_wide")
    t.take("rows", e * s.choices)
    if s.is_exchanged:
        t.take("came", e * s.choices)
        t.take("rows_in", e * s.choices)
        t.drop("came", "rows")
    for name in ("gate", "act"):
        t.take(name, e * s.expert_inner)
    t.leave("gate")
    t.take("up", e * s.expert_inner)
    t.take("product", e * s.expert_inner)
    t.leave("act", "up")
    t.take("rows_out", e * s.choices)
    t.leave("product", "rows", "rows_in")
    if s.is_exchanged:
        t.touch(e * s.choices)
    t.take("collected", e * s.choices)
    t.take("mixed", e * s.cut)
    t.leave("rows_out", "collected")
    if s.shared:
        _gather(t, s, "2")
        _feed_forward(t, s, "s_", s.shared)
        _down(t, s, "s_down", "s_")
        t.take("both", e * s.cut)
    t.leave("router", "scores")
