"""Is the FLOP count what a hand counts, and what torch counts on the network itself?"""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.harness.experts import with_experts
from triax.nn.decoder import Decoder
from triax.spec.flops import (
    attended_by,
    describe_flops,
    flop_terms,
    flops_per_token,
    mean_attended,
    palm_flops_per_token,
)
from triax.spec.model import ModelSpec

TINY = ModelSpec(
    hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16, vocab_size=101,
)  # fmt: skip
LLAMA_3_1_8B = ModelSpec(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256,
)  # fmt: skip


def by_name(model: ModelSpec, attended: float) -> dict[str, float]:
    return {term.name: term.per_token for term in flop_terms(model, attended)}


def test_each_term_is_what_a_hand_counts() -> None:
    # Numbers, not the formula again: 6 heads x 16 = 96 query columns, 2 x 16 = 32 for keys and for values.
    assert by_name(TINY, 10.5) == {
        "embedding lookup": 0,
        "attention projections": 6 * 3 * (48 * 96 + 48 * 32 + 48 * 32 + 96 * 48),
        "attention scores": 3 * 3 * (2 * 96 * 10.5 + 2 * 96 * 10.5),
        "mlp": 6 * 3 * 3 * 48 * 80,
        "head": 6 * 48 * 101,
    }


def test_llama_8b_is_what_is_published() -> None:
    """8.03e9 weights (Grattafiori et al. 2024, arXiv:2407.21783) less the 128256 x 4096 lookup, times six."""
    matmuls = flops_per_token(LLAMA_3_1_8B, 0)
    assert matmuls == pytest.approx(6 * (8.0303e9 - 128256 * 4096), rel=1e-4)
    # At 8192 the causal scores are 12 x 32 x 32 x 128 x 4096.5 more.
    assert flops_per_token(LLAMA_3_1_8B, mean_attended([8192])) - matmuls == 12 * 32 * 32 * 128 * 4096.5


def test_a_tied_head_costs_what_an_own_head_costs() -> None:
    tied = TINY.model_copy(update={"tie_word_embeddings": True})
    assert by_name(tied, 7) == by_name(TINY, 7)
    # The other convention counts the lookup of an untied embedding as a matmul; that is all it adds here.
    assert palm_flops_per_token(TINY, 7) - palm_flops_per_token(tied, 7) == 6 * 48 * 101


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    window=st.one_of(st.none(), st.integers(1, 50)),
)
def test_mean_attended_counts_the_mask(lengths: list[int], window: int | None) -> None:
    total = sum(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    query, key = torch.arange(total).unsqueeze(1), torch.arange(total).unsqueeze(0)
    sees = (key <= query) & (document.unsqueeze(1) == document.unsqueeze(0))
    if window is not None:
        sees &= query - key < window
    assert mean_attended(lengths, window) == sees.sum().item() / total


def test_mean_attended_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no position"):
        mean_attended([])


def test_layers_with_a_window_count_what_they_see() -> None:
    windowed = TINY.model_copy(update={"sliding_window": 4, "global_layers": (2,)})
    # Lengths 8 and 2: 36 + 3 positions globally; in a window of 4 the first 8 see 1 + 2 + 3 + 4 x 5 = 26.
    assert attended_by(TINY, [8, 2]) == 3.9
    assert attended_by(windowed, iter([8, 2])) == (2 * 2.9 + 3.9) / 3
    assert by_name(windowed, attended_by(windowed, [8, 2]))["attention scores"] == pytest.approx(
        3 * 4 * 6 * 16 * (2.9 + 2.9 + 3.9)
    )
    assert f"{attended_by(windowed, [24]):,.6g} attended" in describe_flops(windowed, seq_len=24)


@pytest.mark.parametrize("is_tied", [False, True])
def test_torch_counts_the_same_on_the_network(is_tied: bool) -> None:
    """Attention by plain matmuls computes all S x S scores, so there the count with S attended positions is exact."""
    model = TINY.model_copy(update={"tie_word_embeddings": is_tied})
    batch, length = 2, 24
    torch.manual_seed(0)
    decoder = Decoder(model)
    tokens = torch.randint(model.vocab_size, (batch, length))
    positions = torch.arange(length).expand(batch, length)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        decoder(tokens, positions, None, tokens.roll(-1, 1)).backward()
    assert counter.get_total_flops() == batch * length * flops_per_token(model, length)


def test_of_experts_those_that_a_token_chose_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router, a shared expert and the experts, as torch counts them where each expert is a matmul of its own."""
    monkeypatch.setattr("triax.nn.moe.can_group", lambda rows, inner: False)
    settings = {"shared_expert_intermediate_size": 24, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
    model = with_experts(TINY, **settings)
    batch, length = 2, 24
    torch.manual_seed(0)
    decoder = Decoder(model)
    for weight in decoder.parameters():
        weight.data.normal_(0, 0.1)
    tokens = torch.randint(model.vocab_size, (batch, length))
    positions = torch.arange(length).expand(batch, length)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        decoder(tokens, positions, None, tokens.roll(-1, 1)).backward()
    mixing = 3 * 2 * 2 * (2 * 48)  # weighted sums of 2 layers: element-wise work that here is a matmul
    assert counter.get_total_flops() == batch * length * (flops_per_token(model, length) + mixing)
    terms = by_name(model, 1)
    assert terms["experts"] == 6 * 2 * 2 * 3 * 48 * 32
    assert terms["router"] == 6 * 2 * 48 * 6
    assert terms["mlp"] == 6 * 3 * 48 * (80 + 2 * 24)


def test_torch_counts_the_same_on_hugging_face_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **TINY.model_dump(include=set(TINY.model_fields_set)), attn_implementation="eager"
    )
    llama = transformers.LlamaForCausalLM(config)
    batch, length = 2, 24
    tokens = torch.randint(TINY.vocab_size, (batch, length))
    with FlopCounterMode(display=False) as counter:
        llama(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert counter.get_total_flops() == batch * length * flops_per_token(TINY, length)


def test_the_page_adds_up() -> None:
    """Every line's formula, multiplied out by a reader, is its number; and the lines add up to the sum."""
    lines = describe_flops(TINY, seq_len=24).splitlines()[1:]
    row = re.compile(r"  (.{22})\s*([\d,]+)\s+([\d.]+)%  = (.*)")
    rows = [match.groups() for match in map(row.fullmatch, lines) if match]
    assert len(rows) == len(lines) == 7
    numbers = {name.strip(): int(number.replace(",", "")) for name, number, _, _ in rows}
    formulas = {name.strip(): formula for name, _, _, formula in rows}
    terms = flop_terms(TINY, 12.5)
    for term in terms:
        factors = re.findall(r"\d[\d,.]*", formulas[term.name])
        product = 1.0
        for factor in factors[:1] if term.per_token == 0 else factors:
            product *= float(factor.replace(",", ""))
        assert product == term.per_token == numbers[term.name]
    assert numbers["sum"] == sum(term.per_token for term in terms)
    assert numbers["other convention"] == palm_flops_per_token(TINY, 24)
    assert numbers["other convention"] > numbers["sum"]
