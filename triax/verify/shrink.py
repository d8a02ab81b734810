"""How small can a run become and still be the same kind of run?

Whatever decides which code runs is kept: the ratio of heads, ties, biases, norms, windows and their pattern, stretched
positions, whether a size divides over the ranks that cut it, uneven stages, the schedule. Only sizes shrink.
Torch-free.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, Final, Literal

from triax.spec.check import require_legal
from triax.spec.layout import AXES, Axis, Layout
from triax.spec.model import ModelSpec
from triax.spec.rope import RopeScaling
from triax.spec.run import Run
from triax.verify.shrink_experts import small_experts

Precision = Literal["fp32", "fp64"]

MOST_RANKS: Final = 8
"""Ranks at once: three axes of two."""

_SEQ_LEN: Final = 32
_VOCABULARY: Final = 300
_HEAD_WIDTH: Final = 8
_MICROBATCHES: Final = 6
"""What sizes shrink to, or to a little less: small enough for seconds, and large enough that nothing is trivial."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run and a layout of it that local ranks can train at once."""

    run: Run
    layout: Layout


def small_cases(run: Run, layout: Layout, precision: Precision, steps: int) -> list[Case]:
    """Return ``run`` shrunk, in ``layout`` with every degree above 1 shrunk to 2.

    Where more than three axes are cut, there is a case for each three of them. ``layout`` must be legal for ``run``.
    """
    model = _small_model(run.model, layout, run.data.seq_len)
    seq_len = _seq_len(run.data.seq_len, layout)
    return [_case(run, model, seq_len, small, precision, steps) for small in _small_layouts(layout, run.model)]


def whole_cases(run: Run, layout: Layout, precision: Precision, steps: int) -> list[Case]:
    """Return ``run`` with its model and sequences whole, in ``layout``, or shrunk degrees where it has too many ranks.

    Raises BadInput where the whole model does not fit the shrunk degrees.
    """
    layouts = [layout]
    if layout.world_size > MOST_RANKS:
        layouts = [
            small.model_copy(update={"stage_cuts": None, "microbatches": layout.microbatches,
                                     "sequences_per_microbatch": layout.sequences_per_microbatch})
            for small in _small_layouts(layout, run.model)
        ]  # fmt: skip
    found = [_case(run, run.model, run.data.seq_len, small, precision, steps) for small in layouts]
    for case in found:
        require_legal(case.layout, case.run)
    return found


def _case(run: Run, model: ModelSpec, seq_len: int, layout: Layout, precision: Precision, steps: int) -> Case:
    """The learning rate stays at its peak, so that every step moves the weights as far as any step of the run will."""
    numbers = {"compute": precision, "master": precision, "reduce": precision}
    said = run.model_dump(exclude={"layout", "cluster", "eval", "checkpoint", "guard", "watch"})
    said |= {"model": model.model_dump(), "precision": numbers}
    said["data"] |= {"seq_len": seq_len}
    said["train"] |= {"steps": steps, "sequences_per_step": layout.sequences_per_step, "tokens_per_step": None}
    said["learning_rate"] = {"schedule": "constant", "peak": run.learning_rate.peak}
    for source in said["data"]["source"] or ():
        source["eval_sequences"] = None  # nothing is held out
    return Case(Run.model_validate(said), layout)


def _small_layouts(layout: Layout, model: ModelSpec) -> list[Layout]:
    cut: Sequence[Axis] = [axis for axis in AXES if layout.degree(axis) > 1]
    most = 3
    chosen = list(combinations(cut, most)) if len(cut) > most else [tuple(cut)]
    return [_small_layout(layout, model, axes) for axes in chosen]


def _small_layout(layout: Layout, model: ModelSpec, axes: Sequence[Axis]) -> Layout:
    changes: dict[str, Any] = {axis: 2 if axis in axes else 1 for axis in AXES}
    if "pp" in axes:
        stages_per_rank = min(layout.stages_per_rank, 2)
        changes |= {"stages_per_rank": stages_per_rank, "stage_cuts": _small_cuts(layout, 2 * stages_per_rank)}
        changes["microbatches"] = _at_most(layout.microbatches, _MICROBATCHES)
    else:
        changes |= {"stages_per_rank": 1, "stage_cuts": None, "schedule": "1F1B"}
        changes["microbatches"] = _at_most(layout.microbatches, _MICROBATCHES // 2)
    changes["sequences_per_microbatch"] = min(layout.sequences_per_microbatch, 2)
    changes["ep"] = _small_ep(layout, changes["dp_shard"] * changes["cp"] * changes["tp"])
    if changes["stage_cuts"] is not None:
        missing = _small_layers(model, layout) - sum(changes["stage_cuts"])
        changes["stage_cuts"] = (*changes["stage_cuts"][:-1], changes["stage_cuts"][-1] + missing)
    return Layout.model_validate(layout.model_dump() | changes)


def _small_ep(layout: Layout, ranks: int) -> int:
    """Return over how many of ``ranks`` experts are spread: all where they were, else two of them."""
    if layout.ep == 1:
        return 1
    return ranks if layout.ep == layout.expert_ranks else min(ranks, 2)


def _small_cuts(layout: Layout, stages: int) -> tuple[int, ...] | None:
    """Return one layer for each stage, and two where the stages that it stands for had more than others."""
    cuts = layout.stage_cuts
    if cuts is None:
        return None
    bounds = [stage * len(cuts) // stages for stage in range(stages + 1)]
    means = [sum(cuts[low:high]) / (high - low) for low, high in pairwise(bounds)]
    return tuple(1 + (mean > min(means)) for mean in means)


def _at_most(count: int, most: int) -> int:
    """Return ``count``, or the largest of its parity that is at most ``most``."""
    return count if count <= most else most - (most - count) % 2


def _seq_len(seq_len: int, layout: Layout) -> int:
    small = min(seq_len, _SEQ_LEN)
    unit = 4 if layout.cp > 1 else 2 if layout.tp > 1 else 1
    return small - small % unit


def _small_model(model: ModelSpec, layout: Layout, seq_len: int) -> ModelSpec:
    heads_per_group = model.num_attention_heads // model.kv_heads
    groups = _groups(model, layout)
    heads = groups * heads_per_group
    width = _head_width(model)
    hidden = heads * width
    if model.head_dim is not None and model.hidden_size != model.num_attention_heads * model.head_width:
        share = model.hidden_size / (model.num_attention_heads * model.head_width)
        hidden = _of_parity(max(round(hidden * share), 8), model.hidden_size % 2)
    ratio = model.intermediate_size / model.hidden_size
    small_seq_len = _seq_len(seq_len, layout)
    picked = _picked_layers(model, _small_layers(model, layout))
    longest = max(small_seq_len, -(-model.max_position_embeddings * small_seq_len // seq_len))
    changes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": _of_parity(max(round(hidden * ratio), 4), _is_uneven(model.intermediate_size, layout.tp)),
        "num_hidden_layers": len(picked),
        "num_attention_heads": heads,
        "num_key_value_heads": None if model.num_key_value_heads is None else groups,
        "head_dim": None if model.head_dim is None else width,
        "vocab_size": _vocabulary(model.vocab_size, layout),
        "max_position_embeddings": longest,
        "sliding_window": _window(model.sliding_window, seq_len, small_seq_len),
        "global_layers": _where(picked, model.global_layers),
        "layers_without_rope": _where(picked, model.layers_without_rope),
    }
    if model.experts is not None:
        sparse = set(model.sparse_layers)
        dense = tuple(place for place, layer in enumerate(picked) if layer not in sparse)
        changes["experts"] = small_experts(model.experts, dense, hidden / model.hidden_size, layout.tp)
    if model.rope_scaling is not None:
        pairs = int(width * model.partial_rotary_factor) // 2
        changes["rope_scaling"] = _small_rope(model.rope_scaling, pairs, small_seq_len, seq_len)
    return ModelSpec.model_validate(model.model_dump() | changes)


def _groups(model: ModelSpec, layout: Layout) -> int:
    """Return how many key/value heads: enough for each rank that heads are cut over."""
    deals_heads = layout.cp > 1 and layout.cp_method == "all_to_all"
    if layout.tp > 1 or deals_heads:
        return 4 if layout.tp > 1 and deals_heads else 2
    return _at_most(model.kv_heads, 3)


def _is_uneven(size: int, parts: int) -> int:
    """Return 1 where ``size`` does not divide over the ranks that cut it, or is odd where none does."""
    return int(size % max(parts, 2) != 0)


def _of_parity(size: int, parity: int) -> int:
    return size + (size % 2 != parity)


def _head_width(model: ModelSpec) -> int:
    """Return the smallest even width of which an even part turns."""
    fewest = 4 if model.rope_scaling is not None and model.rope_scaling.kind == "dynamic" else 2
    for width in range(_HEAD_WIDTH, model.head_width, 2):
        turning = int(width * model.partial_rotary_factor)
        if turning >= fewest and turning % 2 == 0:
            return width
    return model.head_width


def _vocabulary(size: int, layout: Layout) -> int:
    """Return a small size that divides over ``tp``, and over ``dp_shard`` inside it, exactly where ``size`` does."""
    small = min(size, _VOCABULARY)
    if small < 8:
        return small
    if _is_uneven(size, layout.tp):
        return small - (small % 2 == 0)
    is_shard_uneven = size % (max(layout.tp, 2) * layout.dp_shard) != 0
    return small - small % 4 - (2 if is_shard_uneven else 0)


def _window(window: int | None, seq_len: int, small_seq_len: int) -> int | None:
    if window is None or window >= seq_len:
        return window
    return max(min(window * small_seq_len // seq_len, small_seq_len - 1), 1)


def _small_rope(scaling: RopeScaling, pairs: int, small_seq_len: int, seq_len: int) -> dict[str, Any]:
    said = scaling.model_dump()
    original = scaling.original_max_position_embeddings
    if original is not None:
        said["original_max_position_embeddings"] = max(original * small_seq_len // seq_len, 2)
    for name in ("short_factor", "long_factor"):
        factors = said[name]
        said[name] = tuple(factors[pair * len(factors) // pairs] for pair in range(pairs)) if factors else ()
    return said


def _small_layers(model: ModelSpec, layout: Layout) -> int:
    """Return enough layers for every stage and every kind of layer, and one more where stages are uneven."""
    stages = min(layout.pp, 2) * min(layout.stages_per_rank, 2)
    is_uneven = model.num_hidden_layers % (layout.pp * layout.stages_per_rank) != 0
    cuts = _small_cuts(layout, stages)
    fewest = stages + is_uneven if cuts is None else sum(cuts)
    return min(max(fewest, len(set(_kinds(model))), 2), model.num_hidden_layers)


def _kinds(model: ModelSpec) -> list[tuple[str, bool, bool]]:
    sparse = set(model.sparse_layers)
    layers = range(model.num_hidden_layers)
    return [(model.reach(layer), layer in model.layers_without_rope, layer in sparse) for layer in layers]


def _picked_layers(model: ModelSpec, count: int) -> list[int]:
    """Return ``count`` layers, spread evenly, among them one of every kind."""
    kinds = _kinds(model)
    picked = [place * len(kinds) // count for place in range(count)]
    for kind in dict.fromkeys(kinds):
        counts = Counter(kinds[layer] for layer in picked)
        if not counts[kind]:
            commonest = counts.most_common(1)[0][0]
            place = next(place for place, layer in enumerate(picked) if kinds[layer] == commonest)
            picked[place] = kinds.index(kind)
    return sorted(picked)


def _where(picked: Sequence[int], layers: Sequence[int]) -> tuple[int, ...]:
    return tuple(place for place, layer in enumerate(picked) if layer in layers)
