"""Log-prob, entropy and gini: literal values, gradients against plain torch, memory, alignment."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from estr.logprobs import (
    TokenStatistics,
    entropy_and_gini,
    log_distribution,
    next_token,
    statistics_from_hidden,
    token_statistics,
)

INF = math.inf


def log_of(*probs: float) -> torch.Tensor:
    return torch.tensor([probs]).log()


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens)


# --- the distribution ---------------------------------------------------------------------------


def test_temperature_acts_on_the_logits_check_38() -> None:
    statistics = token_statistics(torch.tensor([[2.0, 0.0]]), ids(0), temperature=0.5)
    assert float(statistics.logprobs) == pytest.approx(-0.018150, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_distribution_is_log_softmax_of_the_scaled_logits(
    temperature: float, dtype: torch.dtype
) -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = log_distribution(logits, temperature=temperature)
    expected = (logits.double() / temperature).log_softmax(-1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)


def test_padded_vocabulary_is_left_out_check_44() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]], requires_grad=True)
    assert log_distribution(logits, vocab_size=3).shape == (1, 3)
    statistics = token_statistics(logits, ids(2), vocab_size=3, entropy_grad=True)
    assert statistics.logprobs.tolist() == pytest.approx([-0.407606], abs=1e-6)
    assert statistics.entropies.tolist() == pytest.approx([0.832396], abs=1e-6)
    (statistics.logprobs + statistics.entropies).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 3] == 0.0
    assert logits.grad[0, :3].abs().min() > 0.0


def test_padded_vocabulary_is_left_out_of_the_output_matrix_check_44() -> None:
    weight = torch.tensor([[1.0], [2.0], [3.0], [0.0]], requires_grad=True)
    statistics = statistics_from_hidden(torch.ones(1, 1), weight, ids(2), vocab_size=3)
    assert statistics.logprobs.tolist() == pytest.approx([-0.407606], abs=1e-6)
    assert statistics.entropies.tolist() == pytest.approx([0.832396], abs=1e-6)
    statistics.logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad[3] == 0.0


def test_nothing_is_scaled_in_place_check_46() -> None:
    for logits in (torch.tensor([[2.0, 0.0]]), torch.tensor([[2.0, 0.0]]).bfloat16()):
        before = logits.clone()
        for _ in range(2):
            statistics = token_statistics(logits, ids(0), temperature=2.0)
            assert float(statistics.logprobs) == pytest.approx(-0.313262, abs=1e-6)
        assert torch.equal(logits, before)


def test_entropy_and_gini_leave_their_argument_alone_check_46() -> None:
    log_probs = log_of(0.7, 0.2, 0.1)
    before = log_probs.clone()
    first, second = entropy_and_gini(log_probs), entropy_and_gini(log_probs)
    assert torch.equal(log_probs, before)
    assert torch.equal(first[0], second[0])
    assert first[1] is not None
    assert second[1] is not None
    assert torch.equal(first[1], second[1])


# --- entropy and gini ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([0.0, 0.0, -INF], 0.693147),
        ([0.0, -INF, -INF], 0.0),
        ([0.0, 0.0, -1000.0], 0.693147),
        ([0.0, 0.0, -150.0], 0.693147),
    ],
)
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_zero_probability_contributes_nothing_check_48(
    logits: list[float], expected: float, entropy_grad: bool
) -> None:
    values = torch.tensor([logits, [1.0, 2.0, 3.0]], requires_grad=True)
    statistics = token_statistics(values, ids(0, 1), entropy_grad=entropy_grad)
    assert statistics.entropies.tolist() == pytest.approx([expected, 0.832396], abs=1e-6)
    assert statistics.gini is not None
    assert float(statistics.gini[0]) == pytest.approx(0.5 if expected else 0.0, abs=1e-7)
    (statistics.logprobs + statistics.entropies).sum().backward()
    assert values.grad is not None
    assert bool(values.grad.isfinite().all())


def test_entropy_is_no_function_of_the_token_drawn_check_49() -> None:
    logits = log_of(0.7, 0.2, 0.1).repeat(2, 1)
    statistics = token_statistics(logits, ids(2, 0))
    assert statistics.entropies.tolist() == pytest.approx([0.801819, 0.801819], abs=1e-6)
    assert statistics.logprobs.tolist() == pytest.approx([-2.302585, -0.356675], abs=1e-6)
    assert statistics.gini is not None
    assert statistics.gini.tolist() == pytest.approx([0.46, 0.46], abs=1e-6)


def test_entropy_of_logits_and_of_their_log_softmax_agree() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(1)) * 4
    direct = token_statistics(logits, torch.zeros(5))
    shifted = token_statistics(logits.log_softmax(-1), torch.zeros(5))
    for one, other in zip(direct, shifted, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_gini_keeps_its_digits_where_float32_rounds_the_top_probability_to_one() -> None:
    _, gini = entropy_and_gini(torch.tensor([[30.0, 0.0]]).log_softmax(-1))
    assert gini is not None
    # 2 p (1 - p) with 1 - p = 1 / (1 + e^30); 1 - sum p^2 gives 0 in float32.
    assert float(gini) == pytest.approx(1.8715245e-13, rel=1e-5)


@given(
    st.lists(st.floats(-40, 40, width=32), min_size=2, max_size=12),
    st.floats(0.0, 60.0, width=32),
)
@settings(max_examples=150, deadline=None)
def test_gini_and_entropy_agree_with_float64(values: list[float], lead: float) -> None:
    logits = torch.tensor([values], dtype=torch.float32)
    logits[0, 0] += lead
    exact = logits.double().log_softmax(-1)
    # sum p(1-p) = sum over i != j of p_i p_j, which has no cancellation at all.
    pairs = exact[0].exp().outer(exact[0].exp())
    gini64 = float(pairs.fill_diagonal_(0.0).sum())
    entropy64 = float(-(exact.exp() * exact).sum())
    entropy, gini = entropy_and_gini(log_distribution(logits))
    assert gini is not None
    assert 0.0 <= float(gini) <= 1.0
    assert float(gini) == pytest.approx(gini64, rel=2e-5, abs=1e-37)
    assert float(entropy) >= 0.0
    assert float(entropy) == pytest.approx(entropy64, rel=1e-5, abs=1e-6)


def test_an_entropy_that_rounds_below_zero_is_zero() -> None:
    entropy, _ = entropy_and_gini(torch.tensor([[1e-7, -30.0]]))
    assert entropy.tolist() == [0.0]


def test_gini_is_left_out_when_not_asked_for() -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    assert token_statistics(logits, ids(0, 1, 2, 3), gini=False).gini is None
    assert statistics_from_hidden(logits, logits, ids(0, 1, 2, 3), gini=False).gini is None


def test_a_nan_logit_stays_visible() -> None:
    statistics = token_statistics(torch.tensor([[0.0, math.nan], [0.0, 0.0]]), ids(0, 0))
    for column in statistics:
        assert column is not None
        assert column.isnan().tolist() == [True, False]


# --- gradients ----------------------------------------------------------------------------------


def test_only_the_log_prob_carries_gradient_unless_asked() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    for source in (
        token_statistics(logits, ids(0, 1)),
        statistics_from_hidden(logits, torch.eye(3), ids(0, 1)),
    ):
        assert source.logprobs.requires_grad
        assert not source.entropies.requires_grad
        assert source.gini is not None
        assert not source.gini.requires_grad
    for source in (
        token_statistics(logits, ids(0, 1), entropy_grad=True),
        statistics_from_hidden(logits, torch.eye(3), ids(0, 1), entropy_grad=True),
    ):
        assert source.entropies.requires_grad
        assert source.gini is not None
        assert not source.gini.requires_grad


def test_gradcheck_from_logits() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = token_statistics(x, ids(0, 4, 2), temperature=0.7, vocab_size=5, entropy_grad=True)
        return found.logprobs, found.entropies

    assert torch.autograd.gradcheck(outputs, (logits,))


@pytest.mark.parametrize("keep", [0, 13, 100])
@pytest.mark.parametrize("tile", [(2, 3), (8, 8), (5, 2), (2, 8)])
def test_gradcheck_from_hidden(tile: tuple[int, int], keep: int) -> None:
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)

    def outputs(
        h: torch.Tensor, w: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = statistics_from_hidden(
            h,
            w,
            ids(0, 4, 2, 2, 5),
            head_bias=b,
            temperature=1.3,
            vocab_size=6,
            tile=tile,
            keep=keep,
            entropy_grad=True,
        )
        return found.logprobs, found.entropies

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


def both_paths(
    tile: tuple[int, int],
    *,
    entropy_grad: bool,
    keep: int = 0,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(outputs, then gradients to hidden, weight and bias) of the tiled and of the plain path."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 9, (5,), generator=generator)
    data = [torch.randn(*shape, generator=generator) for shape in ((5, 4), (11, 4), (11,))]
    mix = torch.randn(2, 5, generator=generator)
    results = []
    for tiled in (True, False):
        hidden, weight, bias = (t.to(dtype).requires_grad_() for t in data)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if tiled:
                found = statistics_from_hidden(
                    hidden,
                    weight,
                    tokens,
                    head_bias=bias,
                    temperature=0.8,
                    vocab_size=9,
                    tile=tile,
                    keep=keep,
                    entropy_grad=entropy_grad,
                )
            else:
                logits = F.linear(hidden, weight, bias)
                found = token_statistics(
                    logits, tokens, temperature=0.8, vocab_size=9, entropy_grad=entropy_grad
                )
        (found.logprobs * mix[0] + found.entropies * mix[1]).sum().backward()
        outputs = [t.detach() for t in found if t is not None]
        grads = [t.grad for t in (hidden, weight, bias) if t.grad is not None]
        assert len(outputs) == len(grads) == 3
        results.append(outputs + grads)
    return results[0], results[1]


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("keep", [0, 20, 100])
@pytest.mark.parametrize("tile", [(1, 1), (2, 4), (5, 2), (5, 9), (8, 16)])
def test_the_tile_changes_nothing_check_53(
    tile: tuple[int, int], keep: int, entropy_grad: bool
) -> None:
    tiled, plain = both_paths(tile, keep=keep, entropy_grad=entropy_grad)
    for one, other in zip(tiled, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("keep", [0, 20, 100])
@pytest.mark.parametrize("tile", [(2, 3), (8, 8), (5, 2), (2, 8)])
def test_bf16_products_give_float32_statistics(
    tile: tuple[int, int], keep: int, dtype: torch.dtype, autocast: bool
) -> None:
    tiled, plain = both_paths(tile, keep=keep, entropy_grad=True, dtype=dtype, autocast=autocast)
    assert all(t.dtype == torch.float32 for t in tiled[:3])
    for one, other in zip(tiled[:3], plain[:3], strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    for one, other in zip(tiled[3:], plain[3:], strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)


def test_weight_gradient_is_summed_in_float32() -> None:
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    tokens = torch.zeros(1024, dtype=torch.int64)
    statistics_from_hidden(hidden, weight, tokens, tile=(1, 2)).logprobs.sum().backward()
    assert weight.grad is not None
    # Each token gives +-0.5; a sum kept in bf16 stops growing at 128.
    assert weight.grad.flatten().tolist() == [512.0, -512.0]


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(6, 3)
    statistics_from_hidden(hidden, weight, ids(0, 1, 2, 3), tile=(2, 6)).logprobs.sum().backward()
    plain = hidden.detach().clone().requires_grad_()
    token_statistics(plain @ weight.T, ids(0, 1, 2, 3)).logprobs.sum().backward()
    expected = plain.grad
    assert weight.grad is None
    assert expected is not None
    torch.testing.assert_close(hidden.grad, expected, atol=1e-6, rtol=1e-6)


def test_a_column_of_probability_zero_in_the_head_check_48() -> None:
    hidden = torch.randn(3, 2, requires_grad=True)
    weight = torch.randn(4, 2, requires_grad=True)
    bias = torch.tensor([0.0, 0.5, -INF, 0.1])
    gradients = []
    for found in (
        statistics_from_hidden(
            hidden, weight, ids(0, 1, 3), head_bias=bias, tile=(2, 3), entropy_grad=True
        ),
        token_statistics(F.linear(hidden, weight, bias), ids(0, 1, 3), entropy_grad=True),
    ):
        outputs = (found.logprobs + found.entropies).sum()
        gradients.append(torch.autograd.grad(outputs, (hidden, weight)))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


ATEN = torch.ops.aten
PRODUCTS = (ATEN.mm.default, ATEN.mm.out, ATEN.addmm.default, ATEN.addmm.out, ATEN.addmm_.default)


class Operations(TorchDispatchMode):
    """Notes the largest tensor that any operation gives back, and the dtype of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.product_dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *(t.numel() for t in tensors)])
        if func in PRODUCTS:
            self.product_dtypes += [t.dtype for t in tensors]
        return result


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_governs_the_products_of_both_passes(autocast: bool) -> None:
    hidden = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(6, 3, requires_grad=True)
    with Operations() as operations:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = statistics_from_hidden(hidden, weight, ids(0, 1, 2, 3), tile=(2, 6))
        found.logprobs.sum().backward()
    assert set(operations.product_dtypes) == {torch.bfloat16 if autocast else torch.float32}


def test_the_logits_are_never_held_whole() -> None:
    num_tokens, width, vocab_size, tile = 64, 4, 50, (16, 25)
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    weight = torch.randn(vocab_size, width, requires_grad=True)
    tokens = torch.randint(0, vocab_size, (num_tokens,))
    with Operations() as operations:
        found = statistics_from_hidden(hidden, weight, tokens, tile=tile, entropy_grad=True)
        (found.logprobs + found.entropies).sum().backward()
    assert operations.numel == 16 * 25


@pytest.mark.parametrize(
    ("keep", "num_products"), [(0, 8), (11, 8), (12, 7), (23, 7), (24, 6), (100, 6)]
)
@pytest.mark.parametrize("tile", [(2, 6), (4, 3)])
def test_logits_are_computed_again_only_where_they_were_not_kept(
    tile: tuple[int, int], keep: int, num_products: int
) -> None:
    hidden = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(6, 3, requires_grad=True)
    with Operations() as operations:
        found = statistics_from_hidden(hidden, weight, ids(0, 1, 2, 3), tile=tile, keep=keep)
        found.logprobs.sum().backward()
    assert len(operations.product_dtypes) == num_products


def test_a_negative_keep_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more, not -1"):
        statistics_from_hidden(torch.zeros(1, 2), torch.zeros(3, 2), ids(0), keep=-1)


def test_no_tokens_at_all() -> None:
    hidden = torch.randn(0, 3, requires_grad=True)
    weight = torch.randn(5, 3, requires_grad=True)
    found = statistics_from_hidden(hidden, weight, torch.zeros(0, dtype=torch.int64))
    assert [t.shape for t in found if t is not None] == [(0,), (0,), (0,)]
    found.logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


# --- alignment ----------------------------------------------------------------------------------


def test_next_token_pairs_each_token_with_the_state_before_it() -> None:
    states = torch.arange(8.0).reshape(2, 4, 1).requires_grad_()
    token_ids = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    mask = torch.tensor([[False, True, False, True], [False, False, True, False]])
    rows, tokens = next_token(states, token_ids, mask)
    assert rows.flatten().tolist() == [0.0, 2.0, 5.0]
    assert tokens.tolist() == [11, 13, 22]
    rows.sum().backward()
    assert states.grad is not None
    assert states.grad.flatten().tolist() == [1, 0, 1, 0, 0, 1, 0, 0]


def test_next_token_of_logits_is_the_shifted_log_softmax() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 5, 7, generator=generator)
    token_ids = torch.randint(0, 7, (2, 5), generator=generator)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[:, 0] = False
    rows, tokens = next_token(logits, token_ids, mask)
    columns = token_statistics(rows, tokens).spread(mask)
    shifted = logits[:, :-1].log_softmax(-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(columns.logprobs[:, 1:], shifted)
    assert bool(columns.logprobs[:, 0].isnan().all())


def test_spread_leaves_what_was_never_computed_apart_check_51() -> None:
    mask = torch.tensor([[True, True, False]])
    entropies = torch.tensor([1.0, 0.5], requires_grad=True)
    columns = TokenStatistics(entropies, entropies, None).spread(mask)
    generated = columns.entropies.detach()[mask]
    assert float(generated.mean()) == 0.75
    assert float(generated.max()) == 1.0
    assert columns.entropies.isnan().tolist() == [[False, False, True]]
    assert columns.gini is None
    columns.entropies[mask].sum().backward()
    assert entropies.grad is not None
    assert entropies.grad.tolist() == [1.0, 1.0]


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, INF])
def test_a_temperature_without_a_distribution_is_refused_check_43(temperature: float) -> None:
    logits = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="temperature must be finite and above 0"):
        log_distribution(logits, temperature=temperature)
    with pytest.raises(ValueError, match="temperature must be finite and above 0"):
        statistics_from_hidden(logits, torch.eye(2), ids(0), temperature=temperature)


@pytest.mark.parametrize("token", [-1, 3, 382])
def test_a_token_outside_the_vocabulary_is_an_error_check_41(token: int) -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 3"):
        token_statistics(logits, ids(0, token), vocab_size=3)
    with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 3"):
        statistics_from_hidden(logits, torch.zeros(4, 4), ids(0, token), vocab_size=3)


@pytest.mark.parametrize("vocab_size", [0, 5])
def test_a_vocabulary_larger_than_the_logits_is_refused(vocab_size: int) -> None:
    with pytest.raises(ValueError, match="vocab_size must be within 1 and the 4 columns"):
        log_distribution(torch.zeros(1, 4), vocab_size=vocab_size)


def test_a_tile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a tile must hold at least 1 token"):
        statistics_from_hidden(torch.zeros(1, 2), torch.zeros(3, 2), ids(0), tile=(0, 4))


def test_next_token_refuses_the_first_token_and_unequal_shapes() -> None:
    states, token_ids = torch.zeros(1, 3, 2), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="token 0 of a row cannot be scored"):
        next_token(states, token_ids, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="must share their first two dimensions"):
        next_token(states, token_ids, torch.zeros(1, 2, dtype=torch.bool))
