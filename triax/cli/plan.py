"""Which layout is best, what does it cost, and why? The verb ``plan``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from triax.cli.files import write_json, write_text
from triax.cli.page import print_page
from triax.errors import BadInput
from triax.units import format_bytes, format_count, parse_count

if TYPE_CHECKING:
    from triax.plan.answer import Answer
    from triax.plan.ask import Question
    from triax.plan.search import Misfit

plan_app = typer.Typer()


@plan_app.command()
def plan(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|RUN.toml", help="A model's name, its config.json or folder, or a run file.")
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Sizes of the model, or keys of the run file.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="16x8xh100, or a .toml file.")] = None,
    seq_len: Annotated[str | None, typer.Option(help="Tokens of a sequence.")] = None,
    tokens_per_step: Annotated[str | None, typer.Option(help="Tokens of a step over all cards, such as 4M.")] = None,
    token_budget: Annotated[str | None, typer.Option(help="Tokens of the whole run, such as 15T.")] = None,
    engine: Annotated[str | None, typer.Option(help="Framework: triax, megatron, torchtitan, deepspeed, ...")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, fp8, fp4; int4 for inference.")] = None,
    purpose: Annotated[
        Literal["train", "finetune", "inference"], typer.Option("--for", help="finetune: low-rank adapters (LoRA).")
    ] = "train",
    layout: Annotated[
        str | None, typer.Option(metavar='"tp=4 zero=1"', help="What is decided; the rest is planned.")
    ] = None,
    fewest_cards: Annotated[bool, typer.Option("--fewest-cards", help="The fewest cards that fit.")] = False,
    cheapest: Annotated[bool, typer.Option("--cheapest", help="The number of cards that costs least.")] = False,
    days: Annotated[float | None, typer.Option(help="The fewest cards that train the budget in so many days.")] = None,
    longest_sequence: Annotated[
        bool, typer.Option("--longest-sequence", help="The longest sequence that fits.")
    ] = False,
    deepest: Annotated[bool, typer.Option("--deepest", help="The most layers of this kind that fit.")] = False,
    context: Annotated[str | None, typer.Option(help="Tokens of a sequence, for inference.")] = None,
    usd_per_card_hour: Annotated[float | None, typer.Option(help="Price of a card; absent: an assumed one.")] = None,
    export: Annotated[
        str | None, typer.Option(help="Say the layout to megatron, torchtitan, deepspeed or accelerate.")
    ] = None,
    is_confirmed: Annotated[
        bool, typer.Option("--confirm", help="Dry-run the first and last stage of the best layouts; drop what fails.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a plan.json that `triax train` runs.")
    ] = None,
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Everything as JSON.")] = None,
) -> None:
    """Find the best layout of a model on a cluster, and say why, what it costs, and how sure that is."""
    from triax.plan.ask import Wish, ask
    from triax.plan.explain import LORA_RANK

    is_served = purpose == "inference"
    wish = Wish(
        target=target, words=tuple(words or ()), cluster=cluster, seq_len=_count(seq_len, "--seq-len"),
        tokens_per_step=_count(tokens_per_step, "--tokens-per-step"), engine=engine,
        precision=None if is_served else precision, layout=tuple((layout or "").split()),
        lora_rank=LORA_RANK if purpose == "finetune" else 0, usd_per_card_hour=usd_per_card_hour,
    )  # fmt: skip
    question = ask(wish)
    budget = _count(token_budget, "--token-budget")
    if days is not None and not 0 < days < 1e6:
        raise BadInput(f"--days {days} cannot be: use a number above 0.")
    if output is not None and question.run is None:
        raise BadInput(
            f"a plan.json trains as it is, and {target} says no data and no steps: write a run file and plan that, or "
            f"use --json for the layout alone."
        )
    if is_served:
        _serve(question, precision or "bf16", _count(context, "--context") or question.case.workload.seq_len, json_file)
    elif fewest_cards or cheapest or days is not None:
        if question.fixed.columns:
            _refuse_illegal(question)
        _size(question, budget, days, json_file, is_cheapest=cheapest)
    elif longest_sequence or deepest:
        _refuse_illegal(question)
        _largest(question, json_file, is_deepest=deepest)
    else:
        _best(question, budget, export, output, json_file, is_confirmed=is_confirmed)


def _refuse_illegal(question: "Question") -> None:
    """Raise BadInput where no layout is legal at all."""
    from triax.plan.ask import why_none
    from triax.plan.enumerate import shapes

    if not len(shapes(question.case, question.fixed)):
        raise BadInput(why_none(question))


def _count(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    try:
        value = parse_count(text)
    except BadInput as error:
        raise BadInput(f"{option}: {error}") from None
    if value < 1:
        raise BadInput(f"{option} {text} cannot be: use 1 or more.")
    return value


def _best(
    question: "Question", budget: int | None, export: str | None, output: Path | None, json_file: str | None, *,
    is_confirmed: bool,
) -> None:  # fmt: skip
    from triax.plan.answer import Answer
    from triax.plan.ask import why_none
    from triax.plan.page import page
    from triax.plan.search import Misfit, search

    found = search(question.case, question.fixed)
    if found is None:
        raise BadInput(why_none(question))
    if isinstance(found, Misfit):
        raise BadInput(_too_big(question, found))
    answer, dry_runs = Answer(question, found, budget), None
    if is_confirmed:
        from triax.verify import confirm

        answer, confirmed = confirm.confirm(answer)
        dry_runs = confirm.as_json(confirmed), list(confirm.lines(confirmed))
    if export is not None:
        from triax.plan.export import export as say

        print(say(question.case, answer.layout, export))
        return
    if output is not None:
        _write_plan(answer, output)
    if json_file is not None:
        write_json(answer.as_json() | ({} if dry_runs is None else {"dry_runs": dry_runs[0]}), json_file)
    if json_file != "-":
        print_page([*page(answer), *([] if dry_runs is None else dry_runs[1])])


def _too_big(question: "Question", miss: "Misfit") -> str:
    """Return what is missing, and the smallest cluster of such cards that would do."""
    from triax.plan.inverse import fewest_cards
    from triax.plan.memory import CATEGORIES

    memory = miss.memory
    parts = {name: float(getattr(memory, name)[0]) for name in CATEGORIES}
    most = max(parts, key=lambda name: parts[name])
    needed, usable = float(memory.needed_bytes[0]), memory.usable_bytes * (1 - memory.margin)
    case = question.case
    cards = fewest_cards(case, question.fixed)
    server = case.machine.cards_per_server
    enough = "no cluster of such cards would do"
    if cards is not None:
        shape = f"{cards // server}x{server}" if cards >= server else f"1x{cards}"
        enough = f"the smallest cluster of such cards that would do is {shape}x{case.machine.card.name}"
    return (
        f"{question.model.name} fits {case.machine.name} in none of {miss.considered:,} layouts: the smallest "
        f"({miss.candidates.layout(0).describe()}) needs {format_bytes(needed)} a card, of which "
        f"{format_bytes(parts[most])} {most}, and a card has {format_bytes(usable)}, so "
        f"{format_bytes(needed - usable)} is missing; {enough}."
    )


def _write_plan(answer: "Answer", path: Path) -> None:
    from triax.spec.check import require_legal
    from triax.spec.plan import plan_as_json

    made = answer.plan()
    require_legal(made.layout, made.run, made.cluster)
    write_text(path, json.dumps(plan_as_json(made), indent=2) + "\n")


def _size(
    question: "Question", budget: int | None, days: float | None, json_file: str | None, *, is_cheapest: bool
) -> None:
    from triax.plan import inverse
    from triax.plan.page import sizes_page

    case, fixed = question.case, question.fixed
    if budget is None and (days is not None or is_cheapest):
        raise BadInput("days and money are of a whole run: say its tokens, such as --token-budget 1T.")
    tokens = budget or 10**9
    if days is None and not is_cheapest:
        cards = inverse.fewest_cards(case, fixed)
        chosen = None if cards is None else inverse.sized(case, cards, tokens, question.usd, fixed)
        tried = [] if chosen is None else [chosen]
        wish = f"the fewest cards that fit; cost for {format_count(tokens)} tokens"
    else:
        chosen, tried = inverse.cheapest(case, tokens, question.usd, days=None if is_cheapest else days, fixed=fixed)
        wish = f"the cheapest for {format_count(tokens)} tokens" if is_cheapest else (
            f"the fewest cards that train {format_count(tokens)} tokens in {days:g} days"
        )  # fmt: skip
    if chosen is None:
        best = min((each.cost.days for each in tried), default=None)
        nearest = "none fits" if best is None else f"the fastest of those tried takes {best:,.1f} days"
        most = inverse.MOST_SERVERS * case.machine.cards_per_server
        raise BadInput(
            f"no number of {case.machine.card.name} up to {most:,} does it with a step of "
            f"{case.workload.sequences_per_step:,} sequences: {nearest}."
        )
    if json_file is not None:
        rows = [
            {"cards": each.cards, "step_s": float(each.ranking.step_s[0]), "days": each.cost.days, "usd": each.cost.usd,
             "layout": each.ranking.candidates.layout(0).model_dump(mode="json"), "is_chosen": each is chosen}
            for each in tried
        ]  # fmt: skip
        write_json({"format_version": 1, "wish": wish, "sizes": rows}, json_file)
    if json_file != "-":
        print_page(sizes_page(question, tried, chosen, wish))


def _largest(question: "Question", json_file: str | None, *, is_deepest: bool) -> None:
    from triax.plan import inverse
    from triax.plan.page import top

    case = question.case
    what = "layers" if is_deepest else "tokens in a sequence"
    found = (
        inverse.deepest_network(case, question.fixed) if is_deepest else inverse.longest_sequence(case, question.fixed)
    )
    if found == 0:
        raise BadInput(f"not even the least number of {what} fits {case.machine.name}: use more or larger cards.")
    if json_file is not None:
        write_json({"format_version": 1, "what": what, "most": found}, json_file)
    if json_file != "-":
        print_page([*top(question), f"  at most {found:,} {what} fit (to one part in 32)"])


def _serve(question: "Question", precision: str, context: int, json_file: str | None) -> None:
    from dataclasses import asdict

    from triax.plan.inference import WEIGHT_BYTES, cache_bytes_per_token, plan_inference
    from triax.plan.page import inference_page
    from triax.spec.legal_values import either

    if precision not in WEIGHT_BYTES:
        raise BadInput(f"--precision {precision[:40]} cannot be for inference: use {either(WEIGHT_BYTES)}.")
    case = question.case
    found = plan_inference(case.network, case.machine, context=context, precision=precision, usd=question.usd)
    if not found:
        weights = case.network.parameters * WEIGHT_BYTES[precision]
        cache = cache_bytes_per_token(case.network, context) * context
        have = case.machine.cards * case.machine.card.memory_bytes
        raise BadInput(
            f"{question.model.name} needs {format_bytes(weights)} of weights in {precision} and {format_bytes(cache)} "
            f"of keys and values for one sequence of {context:,} tokens, and {case.machine.name} holds "
            f"{format_bytes(have)}: use more cards, a shorter --context or a narrower --precision."
        )
    if json_file is not None:
        rows = [asdict(row) | {"tokens_per_s": row.tokens_per_s, "cards": row.cards} for row in found]
        write_json({"format_version": 1, "servings": rows}, json_file)
    if json_file != "-":
        print_page(inference_page(question, found, precision))
