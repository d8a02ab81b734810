"""Does a sequence that is cut over ranks train exactly like a whole one, by each method and with every other axis?

fp64 is the main proof. A fixed, varied sample always runs; degrees x ZeRO stage x schedule for each method, and what
else may be combined, is exhaustive.
"""

import random
from functools import cache
from itertools import product
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.layouts import legal_layouts
from tests.harness.memory import Watch
from tests.harness.ranks import run_ranks
from tests.harness.tolerances import relative_difference
from tests.harness.toy import toy_run
from tests.parallel.equality import assert_equals_one_device
from triax.nn.attention import attend
from triax.nn.decoder import Decoder
from triax.parallel.context import ExchangedContext, GatheredContext, RingContext, SplitContext, split_context
from triax.parallel.mesh import build_mesh
from triax.parallel.recompute import wrap_recompute
from triax.spec.check import check
from triax.spec.layout import AXES, ContextMethod, Layout, Recompute
from triax.spec.model import ModelSpec
from triax.spec.run import Run

METHODS: tuple[ContextMethod, ...] = get_args(ContextMethod)
POLICIES: tuple[Recompute, ...] = get_args(Recompute)
MICROBATCHES = 3
SEQ_LEN = 32
MOST_STAGES = 16

ALWAYS = (
    "2 ranks cp=2 zero=3 all_to_all",
    "2 ranks cp=2 zero=0 all_gather",
    "4 ranks cp=4 zero=3 ring",
    "4 ranks cp=2 tp=2 zero=3 all_to_all",
    "4 ranks dp_shard=2 cp=2 zero=2 ring",
    "4 ranks pp=2 cp=2 zero=3 1F1B all_gather",
    "4 ranks pp=2 cp=2 zero=2 ZBVZeroBubble ring",
    "8 ranks pp=2 cp=2 tp=2 zero=1 Interleaved1F1B all_gather",
)
"""Each method with each other axis, a schedule of split backwards, and each ZeRO stage."""


@cache
def toy_of(num_stages: int, heads: int, *, is_windowed: bool = False) -> Run:
    """Return a run with grouped heads and sizes that divide by little; tied for some numbers of stages."""
    model = ModelSpec(
        hidden_size=12, intermediate_size=23, num_hidden_layers=max(num_stages, 2) + 1, num_attention_heads=2 * heads,
        num_key_value_heads=heads, head_dim=2, vocab_size=61, tie_word_embeddings=num_stages in (1, 4, 16),
        sliding_window=5 if is_windowed else None, global_layers=(1,) if is_windowed else (),
    )  # fmt: skip
    return toy_run(model, train={"sequences_per_step": 4 * MICROBATCHES}, data={"seq_len": SEQ_LEN})


def every_layout(ranks: int) -> list[Layout]:
    return [
        layout.model_copy(update={"cp_method": method})
        for cp in (2, 4, 8)
        for layout in legal_layouts(toy_of(MOST_STAGES, heads=8), ranks, MICROBATCHES, cp)
        for method in METHODS
    ]


def name_of(layout: Layout) -> str:
    degrees = " ".join(f"{axis}={layout.degree(axis)}" for axis in AXES if layout.degree(axis) > 1)
    schedule = f" {layout.schedule}" if layout.pp > 1 else ""
    return f"{layout.world_size} ranks {degrees} zero={layout.zero}{schedule} {layout.cp_method}"


def matrix() -> list[Any]:
    return [
        pytest.param(layout, id=name_of(layout), marks=() if name_of(layout) in ALWAYS else pytest.mark.exhaustive)
        for ranks in (2, 4, 8)
        for layout in every_layout(ranks)
    ]


@pytest.mark.parametrize("layout", matrix())
def test_every_layout_equals_one_device_in_fp64(layout: Layout) -> None:
    """Two documents in each sequence, cut anywhere."""
    heads = layout.tp * (layout.cp if layout.cp_method == "all_to_all" else 1)
    assert_equals_one_device(toy_of(layout.pp * layout.stages_per_rank, max(heads, 2)), layout)


def test_what_always_runs_is_there() -> None:
    names = [name_of(layout) for ranks in (2, 4, 8) for layout in every_layout(ranks)]
    assert len(names) == len(set(names))
    assert set(ALWAYS) <= set(names)


ODD_ONES: dict[str, dict[str, Any]] = {
    "windows": {"sliding_window": 5, "global_layers": (1,)},
    "windows of a chunk": {"sliding_window": 8},
    "one key head": {"num_key_value_heads": 1},
    "norms of heads": {"qk_norm": "head", "attention_multiplier": 0.3},
    "norm of all heads": {"qk_norm": "full"},
    "angles that know the length": {"rope_scaling": {"kind": "dynamic", "factor": 2.0}, "head_dim": 4,
                                    "max_position_embeddings": SEQ_LEN},
    "angles by length": {"rope_scaling": {"kind": "longrope", "factor": 4.0, "short_factor": (1.0,),
                                          "long_factor": (2.0,), "original_max_position_embeddings": 9}},
}  # fmt: skip


def odd_cases() -> list[Any]:
    """Every method with every kind of attention that it can do, each with another policy of recomputing."""
    cases = []
    for number, (name, kind) in enumerate(ODD_ONES.items()):
        for place, method in enumerate(METHODS):
            run = toy_run(
                ModelSpec.model_validate(toy_of(1, heads=4).model.model_dump() | kind),
                train={"sequences_per_step": 4}, data={"seq_len": SEQ_LEN},
            )  # fmt: skip
            layout = Layout(
                cp=2, dp_shard=2, cp_method=method, recompute=POLICIES[(number + place) % 3], zero=2,
                sequences_per_microbatch=2, order=("cp", "tp", "dp_shard", "pp", "dp_replicate"),
            )  # fmt: skip
            if not check(layout, run):
                marks = () if number % 3 == place else pytest.mark.exhaustive
                cases.append(pytest.param(run, layout, id=f"{name} {layout.describe()}", marks=marks))
    return cases


@pytest.mark.parametrize(("run", "layout"), odd_cases())
def test_odd_attention_equals_one_device(run: Run, layout: Layout) -> None:
    """In an order of axes in which the ranks that share weights do not stand as their indices do."""
    assert layout.weight_place(1) == (0, 1)
    assert layout.coordinate(1).dp_shard == 1
    assert_equals_one_device(run, layout)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("method", METHODS)
def test_narrow_numbers_equal_one_device(method: ContextMethod, precision: str) -> None:
    run = toy_run(
        toy_of(1, heads=2).model, train={"sequences_per_step": 4}, data={"seq_len": SEQ_LEN},
        precision={"compute": precision, "master": "fp32", "reduce": "fp32"}, optimizer={"name": "sgd"},
    )  # fmt: skip
    assert_equals_one_device(run, Layout(cp=2, cp_method=method, microbatches=2, sequences_per_microbatch=2))


Documents = list[list[int]]
"""Where documents end in each sequence, its own end included."""
B, N, K, H = 2, 8, 4, 6


def random_documents(chance: random.Random, most: int) -> Documents:
    return [sorted({*chance.sample(range(1, SEQ_LEN), chance.randint(0, most)), SEQ_LEN}) for _ in range(B)]


ATTENTIONS: list[tuple[Documents | None, int | None]] = [
    (None, None),
    (None, 1),
    (None, 7),
    (None, 20),
    ([list(range(1, SEQ_LEN + 1)), [SEQ_LEN]], None),
    *((random_documents(random.Random(seed), 1 + 3 * seed), (None, 1, 5, 11)[seed % 4]) for seed in range(10)),
]


def attention_of_a_part(rank: int, world: int) -> list[tuple[str, str, float]]:
    """Return for each method and each of ATTENTIONS by how much this rank's outputs and gradients are off."""
    found = []
    kinds = {"all_gather": GatheredContext, "ring": RingContext, "all_to_all": ExchangedContext}
    for number, (documents, window) in enumerate(ATTENTIONS):
        bounds = None
        if documents is not None:
            ends = [row * SEQ_LEN + end for row, of_row in enumerate(documents) for end in of_row]
            bounds = torch.tensor([0, *ends], dtype=torch.int32)
        draw = torch.Generator().manual_seed(number)
        whole = [
            torch.randn(B, heads, SEQ_LEN, H, dtype=torch.float64, generator=draw, requires_grad=True)
            for heads in (N, K, K)
        ]
        weight = torch.randn(B, N, SEQ_LEN, H, dtype=torch.float64, generator=draw)
        expected = attend(*whole, bounds, window, 0.4)
        gradients = torch.autograd.grad((expected * weight).sum(), whole)
        for name, kind in kinds.items():
            context = kind(dist.group.WORLD)

            def here(x: Tensor, context: SplitContext = context) -> Tensor:
                return context.part(x.detach().transpose(1, 2)).transpose(1, 2)

            mine = [here(x).requires_grad_() for x in whole]
            out = context.attend(*mine, bounds, window, 0.4)
            of_mine = torch.autograd.grad((out * here(weight)).sum(), mine)
            pairs = zip((out, *of_mine), (expected, *gradients), strict=True)
            worst = max(relative_difference(one, here(other)) for one, other in pairs)
            found.append((name, f"{documents} {window}", worst))
    return found


@pytest.mark.parametrize("cp", [2, 4])
def test_attention_of_parts_is_that_of_whole_sequences(cp: int) -> None:
    """One document or one for each token, windows of one position or of several chunks."""
    for found in run_ranks(attention_of_a_part, cp):
        assert len(found) == 3 * len(ATTENTIONS)
        assert [what for what in found if not what[2] < 1e-12] == []


LONG = 128


def kept_by_a_layer(rank: int, world: int) -> dict[tuple[str, str], int]:
    """Return the bytes that three layers keep between forward and backward and two do not."""
    kept = {}
    for method, recompute in product(METHODS, POLICIES):
        three, two = (bytes_after_forward(layers, world, method, recompute) for layers in (3, 2))
        kept[method, recompute] = three - two
    return kept


def bytes_after_forward(layers: int, cp: int, method: ContextMethod, recompute: Recompute) -> int:
    model = toy_of(1, heads=8).model.model_copy(update={"num_hidden_layers": layers})
    stage = Decoder(model)
    split_context(stage, build_mesh(Layout(cp=cp), "cpu"), method)
    wrap_recompute(stage, recompute)
    tokens = torch.arange(B * LONG).reshape(B, LONG) % model.vocab_size
    with Watch() as watch:
        loss = stage(tokens, torch.arange(LONG).expand(B, LONG), None, tokens)
        live = watch.live_bytes()
    loss.backward()
    return live


def test_bytes_of_activations_fall_as_one_over_cp() -> None:
    """Exchanged heads are kept once more than whole ones: as attention put them out, and as the projection took them.
    A ring's parts are made again where recomputation is selective, so that less is kept."""
    whole = run_ranks(kept_by_a_layer, 1)[0]
    attended = B * LONG * 2 * 8 * 2 * 4
    first_position = 8
    for cp in (2, 4):
        for kept in run_ranks(kept_by_a_layer, cp):
            for method, recompute in product(METHODS, POLICIES):
                expected = whole[method, recompute] // cp
                if recompute == "none":
                    expected += attended // cp if method == "all_to_all" else first_position
                if (method, recompute) == ("ring", "selective"):
                    assert kept[method, recompute] < expected
                else:
                    assert kept[method, recompute] == expected
