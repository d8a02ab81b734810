"""May this layout train this run on this cluster? All reasons why not, at once, before any process starts.

The planner's proposals and the trainer's validation pass through this one function, so that what is proposed is never
refused later.
"""

import math

from triax.errors import BadInput
from triax.spec.cluster import Cluster
from triax.spec.context import chunk_count
from triax.spec.layout import AXES, Axis, Layout, Refusal
from triax.spec.legal_values import both, divisors, either, multiples, nearest
from triax.spec.model import ModelSpec
from triax.spec.run import Run
from triax.spec.schedule import legal, schedule_kind, splits_backward
from triax.spec.value import LARGEST_SMALL_COUNT


def check(layout: Layout, run: Run, cluster: Cluster | None = None) -> list[Refusal]:
    """Return every reason why ``layout`` cannot train ``run`` on ``cluster``; an empty list means that it can."""
    model = run.model
    refusals = [
        *_experts(layout, model), *_context(layout, model, run.data.seq_len),
        *_tensor(layout, model, run.data.seq_len), *_pipeline(layout, model), *_sharing(layout), *_step(layout, run),
        *_compiled(layout, run),
    ]  # fmt: skip
    return refusals if cluster is None else [*refusals, *_ranks(layout, run, cluster)]


def require_legal(layout: Layout, run: Run, cluster: Cluster | None = None) -> None:
    """Raise BadInput with every refusal, each on its own line, unless ``layout`` is legal."""
    refusals = check(layout, run, cluster)
    if refusals:
        raise BadInput("\n".join(refusal.message for refusal in refusals))


def _experts(layout: Layout, model: ModelSpec) -> list[Refusal]:
    """Each of the ``ep`` ranks must get equally many experts, and there must be ranks to borrow."""
    ep, borrowed = layout.ep, layout.expert_ranks
    if model.experts is None:
        if ep == 1:
            return []
        return [Refusal("ep", f"ep={ep} asks for experts, and this model has none: use ep=1.")]
    count = model.experts.num_experts
    faults = [f"does not divide num_experts={count}"] if count % ep else []
    if borrowed % ep:
        what = "is more than" if ep > borrowed else "does not divide"
        degrees = f"dp_shard={layout.dp_shard} x cp={layout.cp} x tp={layout.tp}"
        faults.append(f"{what} the {borrowed} ranks it borrows ({degrees})")
    if not faults:
        return []
    fitting = divisors(math.gcd(count, borrowed))
    return [Refusal("ep", f"ep={ep} {both(faults)}: use ep={either(nearest(fitting, ep))}.")]


def _context(layout: Layout, model: ModelSpec, seq_len: int) -> list[Refusal]:
    """A sequence must have two chunks for each ``cp`` rank, and the method must fit the attention.

    What fills a sequence up counts for nothing anywhere but at a router, which would send it to experts.
    """
    cp, chunks, refusals = layout.cp, chunk_count(layout.cp), []
    fault = ""
    if cp > 1 and chunks > seq_len:
        fault = f"seq_len={seq_len} has fewer positions"
    elif model.experts is not None and seq_len % chunks:
        lengths = either(multiples(chunks, seq_len))
        fault = f"seq_len={seq_len} does not divide into them, as it must where there are experts ({lengths} would)"
    if fault:
        message = (
            f"cp={cp} cuts a sequence into {chunks} chunks, two for each rank, and {fault}: use cp="
            f"{either(nearest(_fitting_cp(layout, model, seq_len), cp))}."
        )
        refusals.append(Refusal("cp", message))
    undivided = [f"{name}={size}" for name, size in _heads(model).items() if size % cp]
    if layout.cp_method == "all_to_all" and undivided:
        fewer = [f"cp={degree}" for degree in nearest(_fitting_cp(layout, model, seq_len), cp)]
        message = (
            f"cp_method=all_to_all gives each of the cp={cp} ranks whole heads, and cp={cp} does not divide "
            f"{both(undivided)}: use {either(['cp_method=all_gather', *fewer])}."
        )
        refusals.append(Refusal("cp_method", message))
    if layout.cp_method == "ring" and cp > 1 and _has_windows(model, seq_len):
        message = (
            f"cp_method=ring takes every key past every rank, and layers with sliding_window={model.sliding_window} "
            f"see few of seq_len={seq_len}: use cp_method=all_gather."
        )
        refusals.append(Refusal("cp_method", message))
    return refusals


def _fitting_cp(layout: Layout, model: ModelSpec, seq_len: int) -> list[int]:
    """Return the degrees, ascending, that fit the sequence and the method and bring ``tp`` no new fault."""

    def is_cut_by_tp(cp: int) -> bool:
        return not any(size % layout.tp for size in _whole_parts(layout, model, seq_len, cp).values())

    heads = math.gcd(*_heads(model).values())
    return [
        cp
        for cp in sorted({*divisors(seq_len), *divisors(heads), max(seq_len // 2, 1)})
        if (chunk_count(cp) <= seq_len or cp == 1)
        and (model.experts is None or seq_len % chunk_count(cp) == 0)
        and (layout.cp_method != "all_to_all" or not any(size % cp for size in _heads(model).values()))
        and (is_cut_by_tp(cp) or not is_cut_by_tp(layout.cp))
    ]


def _heads(model: ModelSpec) -> dict[str, int]:
    return {"num_attention_heads": model.num_attention_heads, "num_key_value_heads": model.kv_heads}


def _has_windows(model: ModelSpec, seq_len: int) -> bool:
    window = model.sliding_window
    return window is not None and window < seq_len and len(set(model.global_layers)) < model.num_hidden_layers


def _whole_parts(layout: Layout, model: ModelSpec, seq_len: int, cp: int) -> dict[str, int]:
    """Return what ``tp`` must divide: heads and, where there are experts, the sequence, or the part that each of ``cp``
    ranks has of them."""
    parts: dict[str, int] = {}
    for name, size in _heads(model).items():
        is_dealt = cp > 1 and layout.cp_method == "all_to_all" and not any(n % cp for n in _heads(model).values())
        parts |= {f"{name}/cp": size // cp} if is_dealt else {name: size}
    if model.experts is None:
        return parts
    is_cut = cp > 1 and seq_len % chunk_count(cp) == 0
    return parts | ({"seq_len/cp": seq_len // cp} if is_cut else {"seq_len": seq_len})


def _tensor(layout: Layout, model: ModelSpec, seq_len: int) -> list[Refusal]:
    """Heads and the sequence must divide over ``tp``.

    Feed-forward and vocabulary need not: they are cut as ``torch.chunk`` cuts, and every rank must get a part.
    """
    tp = layout.tp
    whole_parts = _whole_parts(layout, model, seq_len, layout.cp)
    parts = {**model.feed_forward_widths, "vocab_size": model.vocab_size}
    undivided = [f"{name}={size}" for name, size in whole_parts.items() if size % tp]
    short = [f"{name}={size}" for name, size in parts.items() if not _feeds_all(size, tp)]
    cuts_norm = tp > 1 and model.qk_norm == "full"
    faults = [f"does not divide {both(undivided)}"] if undivided else []
    faults += [f"leaves ranks without a part of {both(short)}"] if short else []
    faults += ["cuts the norm that spans all heads (qk_norm=full)"] if cuts_norm else []
    if not faults:
        return []
    fitting = [
        degree
        for degree in ([1] if model.qk_norm == "full" else divisors(math.gcd(*whole_parts.values())))
        if all(_feeds_all(size, degree) for size in parts.values())
    ]
    return [Refusal("tp", f"tp={tp} {both(faults)}: use tp={either(nearest(fitting, tp))}.")]


def _feeds_all(size: int, parts: int) -> bool:
    """Return whether each of ``parts`` gets something of ``size`` when all but the last get the same, rounded up."""
    return -(-size // parts) * (parts - 1) < size


def _pipeline(layout: Layout, model: ModelSpec) -> list[Refusal]:
    layers, stages = model.num_hidden_layers, layout.pp * layout.stages_per_rank
    faults = {
        refusal.key: refusal.message.partition(": ")[0]
        for refusal in legal(layout.schedule, layout.pp, layout.stages_per_rank, layout.microbatches)
    }
    if stages > layers:
        faults["pp"] = (
            f"pp={layout.pp} x stages_per_rank={layout.stages_per_rank} makes {stages} stages of {layers} layers"
        )
    ways = either(_fitting_stages(layout, layers)) if faults else ""
    refusals = [Refusal(key, f"{fault}: use {ways}.") for key, fault in faults.items()]
    return [*refusals, *_stage_cuts(layout, layers, are_stages_legal=not faults), *_split_backwards(layout)]


def _fitting_stages(layout: Layout, layers: int) -> list[str]:
    """Return up to three changes of schedule, pp and stages_per_rank that fit the layers, fewest keys first."""
    asked = {"schedule": layout.schedule, "pp": layout.pp, "stages_per_rank": layout.stages_per_rank}
    changes: list[dict[str, object]] = []
    for name in dict.fromkeys((layout.schedule, "1F1B")):
        kind = schedule_kind(name)
        fewest, most = kind.min_stages_per_rank, kind.max_stages_per_rank or layers
        nearest_fit = max(min(layout.stages_per_rank, most, layers // layout.pp), fewest)
        for each in (layout.stages_per_rank, nearest_fit, fewest):
            for pp in (layout.pp, max(min(layout.pp, layers // each), kind.min_pp)):
                if pp * each <= layers and not legal(name, pp, each, layout.microbatches):
                    way = {"schedule": name, "pp": pp, "stages_per_rank": each}
                    changes.append({key: value for key, value in way.items() if value != asked[key]})
    offered: list[dict[str, object]] = []
    for change in sorted(changes, key=len):
        if not any(other.keys() <= change.keys() for other in offered):
            offered.append(change)
    return [" ".join(f"{key}={value}" for key, value in change.items()) for change in offered[:3]]


def _stage_cuts(layout: Layout, layers: int, *, are_stages_legal: bool) -> list[Refusal]:
    stages, cuts = layout.pp * layout.stages_per_rank, layout.stage_cuts
    if cuts is None or (len(cuts) == stages and sum(cuts) == layers and min(cuts) >= 1):
        return []
    shown = f"{list(cuts)[:8]}{' ...' if len(cuts) > 8 else ''}"
    message = f"stage_cuts={shown} must be {stages} counts of layers that sum to {layers}: "
    if are_stages_legal and stages <= 8:
        even = [layers // stages + (stage >= stages - layers % stages) for stage in range(stages)]
        message += f"use stage_cuts={even}, or "
    return [Refusal("stage_cuts", f"{message}leave it out.")]


def _split_backwards(layout: Layout) -> list[Refusal]:
    """What cannot be where the gradients of inputs and of weights are made apart."""
    if not splits_backward(layout.schedule):
        return []
    whole = "schedule=1F1B" + ("" if layout.stages_per_rank == 1 else " stages_per_rank=1")
    refusals = []
    if layout.zero == 3:
        message = (
            f"zero=3 lets go of weights after each forward, and schedule={layout.schedule} needs them once for each of "
            f"the two parts of a backward: use zero=1 or zero=2, or {whole}."
        )
        refusals.append(Refusal("zero", message))
    if layout.recompute == "selective":
        message = (
            f"recompute=selective keeps what a backward needs until it was used once, and "
            f"schedule={layout.schedule} uses it in each of the two parts of a backward: use recompute=none or "
            f"recompute=full, or {whole}."
        )
        refusals.append(Refusal("recompute", message))
    return refusals


def _sharing(layout: Layout) -> list[Refusal]:
    if layout.zero > 0 or layout.dp_shard == 1:
        return []
    stages = (1, 2) if splits_backward(layout.schedule) else (1, 2, 3)
    message = (
        f"zero=0 shares nothing, and dp_shard={layout.dp_shard} asks for sharing: use "
        f"dp_replicate={layout.data_ranks} dp_shard=1, or {either(f'zero={stage}' for stage in stages)}."
    )
    return [Refusal("zero", message)]


def _compiled(layout: Layout, run: Run) -> list[Refusal]:
    """What torch.compile cannot trace."""
    if run.train.compile == "none":
        return []
    faults = {
        "cp": layout.cp > 1 and f"cp={layout.cp} exchanges keys inside a layer",
        "ep": layout.ep > 1 and f"ep={layout.ep} exchanges as many tokens as routers decide inside a layer",
        "schedule": splits_backward(layout.schedule) and f"schedule={layout.schedule} takes the backward apart",
    }
    return [
        Refusal(
            key,
            f"train.compile={run.train.compile} traces whole layers, and {fault}: use train.compile=none, or "
            f"{key}={'1F1B' if key == 'schedule' else 1}.",
        )
        for key, fault in faults.items()
        if fault
    ]


def _step(layout: Layout, run: Run) -> list[Refusal]:
    """Sequences of a step must divide over data ranks, and each data rank's share over its microbatches."""
    asked, data_ranks = run.sequences_per_step, layout.data_ranks
    if asked == layout.sequences_per_step:
        return []
    if asked % data_ranks:
        what = "is smaller than" if asked < data_ranks else "does not divide over"
        message = (
            f"a step of {asked} sequences {what} the {data_ranks} data ranks (dp_replicate={layout.dp_replicate} x "
            f"dp_shard={layout.dp_shard}): {_step_sizes(run, data_ranks)}make dp_replicate x dp_shard equal "
            f"{either(nearest(divisors(asked), data_ranks))}."
        )
        return [Refusal("data_ranks", message)]
    return [Refusal("microbatches", _uneven_cut(layout, run, asked // data_ranks))]


def _uneven_cut(layout: Layout, run: Run, share: int) -> str:
    """Return why the microbatches do not make the ``share`` of a data rank, in the keys that the user has set."""
    owner = "the data rank has" if layout.data_ranks == 1 else f"each of {layout.data_ranks} data ranks has"
    what = f"the {share} sequences that {owner} in a step"
    said = [
        key for key in ("microbatches", "sequences_per_microbatch") if getattr(run.layout, key) == getattr(layout, key)
    ]
    if len(said) == 1 and share % (value := getattr(layout, said[0])):
        # The other one was worked out from it, and would be again.
        (key,) = said
        fitting = (f"{key}={each}" for each in nearest(divisors(share), value))
        return f"{key}={value} does not divide {what}: use {either(fitting)}."
    cuts = [(share // sequences, sequences) for sequences in nearest(divisors(share), layout.sequences_per_microbatch)]
    if share % layout.microbatches == 0:
        cuts.insert(0, (layout.microbatches, share // layout.microbatches))
    fitting = (f"microbatches={count} sequences_per_microbatch={each}" for count, each in dict.fromkeys(cuts))
    return (
        f"microbatches={layout.microbatches} x sequences_per_microbatch={layout.sequences_per_microbatch} do not make "
        f"{what}: use {either(fitting)}."
    )


def _step_sizes(run: Run, data_ranks: int) -> str:
    """Return the start of advice: the nearest sizes of a step that ``data_ranks`` divide, in the unit the run uses."""
    sizes = [size for size in multiples(data_ranks, run.sequences_per_step) if size <= LARGEST_SMALL_COUNT]
    key, unit = (
        ("sequences_per_step", 1) if run.train.tokens_per_step is None else ("tokens_per_step", run.data.seq_len)
    )
    return f"use {either(f'train.{key}={size * unit}' for size in sizes)}, or " if sizes else ""


def _ranks(layout: Layout, run: Run, cluster: Cluster) -> list[Refusal]:
    needed, there = layout.world_size, cluster.num_cards
    if needed == there:
        return []
    degrees = " x ".join(f"{axis}={layout.degree(axis)}" for axis in AXES if layout.degree(axis) > 1) or "one rank"
    axis: Axis = "dp_replicate" if layout.zero == 0 else "dp_shard"
    others = needed // layout.degree(axis)
    fits = (
        there % others == 0
        and run.sequences_per_step % (there // others * layout.data_ranks // layout.degree(axis)) == 0
    )
    instead = f"use {axis}={there // others}" if fits else f"choose degrees whose product is {there}"
    message = f"{degrees} needs {needed} ranks, and there are {there}: start {needed} ranks, or {instead}."
    return [Refusal("world_size", message)]
