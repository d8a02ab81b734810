"""What exactly is asked? Names, words and numbers become a case, with what was left open filled in and said."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triax.errors import BadInput
from triax.plan.candidates import CP_METHODS, ORDERS, RECOMPUTE, SCHEDULE_NAMES
from triax.plan.case import Case
from triax.plan.catalogue import machine, usd_per_card_hour
from triax.plan.engine import engine
from triax.plan.enumerate import Fixed, shapes
from triax.plan.models import PlannedModel, find_model
from triax.plan.network import network_of
from triax.plan.workload import Recipe, Workload, precision, workload_of
from triax.spec.cluster import Cluster
from triax.spec.faults import validated
from triax.spec.legal_values import either, multiples
from triax.spec.load import load_cluster, load_run
from triax.spec.run import LayoutRequest, Run

DEFAULT_CLUSTER: Final = "1x8xh100"
_SEQ_LEN: Final = 4096
_TOKENS_PER_STEP: Final = 1 << 20
_LONGEST_SEQUENCE: Final = 1 << 27
_MOST_SEQUENCES: Final = 1 << 20


@dataclass(frozen=True)
class Wish:
    """What a user said, as it was said; absent means left open."""

    target: str
    words: tuple[str, ...] = ()
    cluster: str | None = None
    seq_len: int | None = None
    tokens_per_step: int | None = None
    engine: str | None = None
    precision: str | None = None
    layout: tuple[str, ...] = ()
    lora_rank: int = 0
    usd_per_card_hour: float | None = None


@dataclass(frozen=True)
class Question:
    """A case, and what is needed around it."""

    case: Case
    model: PlannedModel
    cluster: Cluster
    fixed: Fixed
    run: Run | None
    """The run that a run file says."""
    usd: float
    """Of one card for an hour."""
    assumed: tuple[str, ...]
    """What was filled in, in words."""


def ask(wish: Wish) -> Question:
    """Return the question that ``wish`` is; raise BadInput where a name is unknown or a number cannot be."""
    run = load_run(Path(wish.target), wish.words) if wish.target.endswith(".toml") else None
    assumed: list[str] = []
    model = _model(wish, run)
    if model.note:
        assumed.append(model.note)
    cluster = _cluster(wish, run, assumed)
    made = machine(cluster)
    workload = _workload(wish, run, model, cluster, assumed)
    name = wish.engine or _engine_for(model, workload, assumed)
    framework = engine(name)
    if workload.precision.recipe not in framework.recipes:
        raise BadInput(
            f"{framework.name} does not train in {workload.precision.recipe}: use {either(framework.recipes)}, or "
            f"another --engine."
        )
    if framework.name == "triax" and model.spec is None:
        raise BadInput(
            f"triax does not train {model.name} (experts, latent attention or learned positions): plan it for another "
            f"framework, such as --engine megatron."
        )
    case = Case(model.network, workload, made, framework)
    usd, is_default = usd_per_card_hour(cluster)
    if is_default:
        assumed.append(f"${usd:.2f} for a card and hour")
    return Question(case, model, cluster, _fixed(wish, run), run, usd, tuple(assumed))


def question_of(run: Run, cluster: Cluster) -> Question:
    """Return the question of a run that triax will train on ``cluster``; raise BadInput where it knows no such card."""
    model = PlannedModel("the run", network_of(run.model), run.model, run.model.max_position_embeddings, "the run file")
    case = Case(model.network, workload_of(run), machine(cluster), engine("triax"))
    return Question(case, model, cluster, _fixed_by(run.layout), run, usd_per_card_hour(cluster)[0], ())


def _model(wish: Wish, run: Run | None) -> PlannedModel:
    if run is None:
        return find_model(wish.target, wish.words)
    return PlannedModel(
        Path(wish.target).stem, network_of(run.model), run.model, run.model.max_position_embeddings, wish.target
    )


def _cluster(wish: Wish, run: Run | None, assumed: list[str]) -> Cluster:
    if wish.cluster is not None:
        cluster = load_cluster(wish.cluster)
    elif run is not None and run.cluster is not None:
        cluster = run.cluster
    else:
        assumed.append(f"a cluster of {DEFAULT_CLUSTER} (say --cluster)")
        cluster = load_cluster(DEFAULT_CLUSTER)
    if wish.usd_per_card_hour is not None:
        said = cluster.model_dump() | {"usd_per_card_hour": wish.usd_per_card_hour}
        cluster = validated(Cluster, said, "--usd-per-card-hour")
    return cluster


def _workload(wish: Wish, run: Run | None, model: PlannedModel, cluster: Cluster, assumed: list[str]) -> Workload:
    if run is not None:
        said = [name for name in ("seq_len", "tokens_per_step", "precision") if getattr(wish, name) is not None]
        if said:
            keys = {"seq_len": "data.seq_len", "tokens_per_step": "train.tokens_per_step",
                    "precision": "precision.compute"}  # fmt: skip
            options = either(f"--{name.replace('_', '-')}" for name in said)
            raise BadInput(f"{options} is for models: {wish.target} says it; write {either(keys[n] for n in said)}=...")
        return workload_of(run)
    seq_len = wish.seq_len
    if seq_len is None:
        seq_len = min(_SEQ_LEN, model.longest or _SEQ_LEN)
        assumed.append(f"sequences of {seq_len:,} tokens")
    if not 1 <= seq_len <= _LONGEST_SEQUENCE:
        raise BadInput(f"--seq-len {seq_len} cannot be: use 1 to {_LONGEST_SEQUENCE}.")
    if model.longest is not None and seq_len > model.longest:
        assumed.append(f"sequences longer than the {model.longest:,} that {model.name} says it is meant for")
    tokens = wish.tokens_per_step
    if tokens is None:
        least = max(_TOKENS_PER_STEP // seq_len, 1)
        sequences = 1 << max(least - 1, cluster.num_cards // 8 - 1, 0).bit_length()
        assumed.append(f"{sequences:,} sequences a step")
    elif tokens < seq_len:
        raise BadInput(f"--tokens-per-step {tokens} is less than one sequence of {seq_len}: use {seq_len} or more.")
    else:
        sequences = tokens // seq_len
        if tokens % seq_len or not _divides_well(sequences, cluster.num_cards):
            sequences = _even(sequences)
            assumed.append(f"{sequences:,} sequences a step, near what was said and easy to divide")
    if sequences > _MOST_SEQUENCES:
        raise BadInput(
            f"{sequences:,} sequences in a step are more than {_MOST_SEQUENCES:,}: use fewer tokens per step, at most "
            f"{_MOST_SEQUENCES * seq_len}."
        )
    return Workload(sequences, seq_len, precision(_recipe(wish)), lora_rank=wish.lora_rank)


def _divides_well(sequences: int, cards: int) -> bool:
    """Return whether a good part of ``cards`` can see different sequences: 15,625 of them divide over no pair."""
    return 64 * math.gcd(sequences, cards) >= min(sequences, cards)


def _even(sequences: int) -> int:
    """Return a number near ``sequences`` that many numbers of ranks divide: its first four binary digits."""
    unit = 1 << max(sequences.bit_length() - 4, 0)
    return max(round(sequences / unit) * unit, 1)


def _recipe(wish: Wish) -> Recipe:
    legal: tuple[Recipe, ...] = (
        "bf16", "fp16", "fp32", "fp8_delayed", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4",
    )  # fmt: skip
    said = wish.precision or "bf16"
    meant = {"fp8": "fp8_tensorwise", "fp4": "nvfp4"}.get(said, said)
    for each in legal:
        if each == meant:
            return each
    raise BadInput(
        f"--precision {said[:40]} cannot be: use {either(('bf16', 'fp16', 'fp32', 'fp8', 'fp4', *legal[3:]))}."
    )


def _engine_for(model: PlannedModel, workload: Workload, assumed: list[str]) -> str:
    if model.spec is not None and workload.precision.recipe in engine("triax").recipes:
        return "triax"
    assumed.append("Megatron-Core, since triax does not train this (say --engine)")
    return "megatron"


def _fixed(wish: Wish, run: Run | None) -> Fixed:
    """Return the columns that a run file's layout or ``--layout`` decides."""
    said: dict[str, Any] = {} if run is None else run.layout.model_dump(exclude_none=True)
    words: dict[str, Any] = {}
    for word in wish.layout:
        key, equals, text = word.partition("=")
        if not equals:
            raise BadInput(f"{word[:60]!r} is no part of a layout: write key=value, such as tp=2.")
        words[key] = int(text) if text.isdigit() else text
    if "order" in words:
        words["order"] = tuple(str(words["order"]).strip("[]").replace('"', "").replace("'", "").split(","))
    return _fixed_by(validated(LayoutRequest, said | words, "--layout"))


def _fixed_by(request: LayoutRequest) -> Fixed:
    columns: dict[str, int] = {}
    for key, value in request.model_dump(exclude_none=True).items():
        match key:
            case "schedule":
                columns[key] = SCHEDULE_NAMES.index(value)
            case "recompute":
                columns[key] = RECOMPUTE[request.recompute] if request.recompute is not None else 0
            case "cp_method":
                columns[key] = CP_METHODS.index(value)
            case "order":
                columns[key] = ORDERS.index(tuple(value))
            case "stage_cuts":
                raise BadInput("stage_cuts stand in a layout that is given whole: leave them out to have one planned.")
            case _:
                columns[key] = int(value)
    return Fixed(columns)


def why_none(question: Question) -> str:
    """Return why no layout is legal at all: which of the decided keys has to give, or the size of the step."""
    case, fixed = question.case, question.fixed
    cards, step, machine_name = case.machine.cards, case.workload.sequences_per_step, case.machine.name
    for key in fixed.columns:
        rest = Fixed({name: value for name, value in fixed.columns.items() if name != key})
        there = shapes(case, rest)
        if len(there) and hasattr(there, key):
            legal = _said(key, sorted({int(value) for value in getattr(there, key)}))
            asked = _said(key, [fixed.columns[key]])[0]
            return f"{key}={asked} leaves no layout of {machine_name}: use {key}={either(legal[:12])}, or leave it out."
    if fixed.columns and len(shapes(case)):
        return f"what --layout says leaves no layout of {machine_name}: leave some of it out."
    sizes = either(multiples(cards, step)) if cards <= _MOST_SEQUENCES else str(cards)
    return (
        f"no way to cut {question.model.name} uses {cards} cards on {step} sequences a step: use a number of cards "
        f"that divides layers, heads or sequences, or steps of {sizes} sequences."
    )


def _said(key: str, values: Sequence[int]) -> list[str]:
    """Return values of a column as a layout says them."""
    names = {bits: name for name, bits in RECOMPUTE.items()}
    if key == "schedule":
        return [SCHEDULE_NAMES[value] for value in values]
    if key == "recompute":
        return [names[value] for value in values]
    if key == "cp_method":
        return [CP_METHODS[value] for value in values]
    return [str(value) for value in values]
