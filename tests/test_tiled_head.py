"""Running sums over tiles of the vocabulary: what a tile boundary could spoil."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.logprobs import TokenStatistics, statistics_from_hidden, token_statistics
from estr.tiled_head import default_tile


def tiled(logits: torch.Tensor, token_ids: torch.Tensor, tile: tuple[int, int]) -> TokenStatistics:
    """The statistics of these very logits: hidden is a row of the identity."""
    return statistics_from_hidden(
        torch.eye(len(logits)), logits.T.contiguous(), token_ids, tile=tile
    )


@given(
    st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=9),
    st.integers(0, 8),
    st.integers(1, 9),
)
@settings(max_examples=150, deadline=None)
def test_any_tile_gives_what_float64_gives(values: list[float], token: int, columns: int) -> None:
    logits = torch.tensor([values], dtype=torch.float32)
    token_ids = torch.tensor([token % len(values)])
    found = tiled(logits, token_ids, (1, columns))
    exact = token_statistics(logits.double(), token_ids)
    assert found.gini is not None
    assert exact.gini is not None
    assert float(found.logprobs) == pytest.approx(float(exact.logprobs), rel=1e-5, abs=1e-6)
    assert float(found.entropies) == pytest.approx(float(exact.entropies), rel=1e-5, abs=1e-12)
    assert float(found.gini) == pytest.approx(float(exact.gini), rel=1e-5, abs=1e-37)


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_equal_largest_logits_in_one_tile_or_in_several(columns: int) -> None:
    found = tiled(torch.tensor([[5.0, 5.0, -math.inf, 5.0]]), torch.tensor([3]), (1, columns))
    assert found.gini is not None
    assert float(found.logprobs) == pytest.approx(-math.log(3))
    assert float(found.entropies) == pytest.approx(math.log(3))
    assert float(found.gini) == pytest.approx(2 / 3)


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_tile_without_any_probability_adds_nothing(at: int) -> None:
    logits = torch.zeros(1, 6)
    logits[:, at : at + 2] = -math.inf
    found = tiled(logits, torch.tensor([at]), (1, 2))
    assert found.gini is not None
    assert float(found.logprobs) == -math.inf
    assert float(found.entropies) == pytest.approx(math.log(4))
    assert float(found.gini) == pytest.approx(0.75)


@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_impossible_logit_stays_visible_in_its_row_only(bad: float, columns: int) -> None:
    hidden = torch.tensor([[1.0], [bad], [1.0]])
    found = statistics_from_hidden(
        hidden, torch.ones(4, 1), torch.tensor([0, 1, 2]), tile=(2, columns)
    )
    for column in found:
        assert column is not None
        assert column.isnan().tolist() == [False, True, False]


def test_no_probability_at_all_is_no_distribution() -> None:
    nothing = statistics_from_hidden(
        torch.zeros(1, 1),
        torch.zeros(4, 1),
        torch.tensor([0]),
        head_bias=torch.full((4,), -math.inf),
        tile=(1, 2),
    )
    for column in nothing:
        assert column is not None
        assert bool(column.isnan().all())


def test_sharp_distributions_keep_their_digits_across_tiles() -> None:
    found = tiled(torch.tensor([[30.0, 0.0]]), torch.tensor([0]), (1, 1))
    assert found.gini is not None
    rest = math.exp(-30.0)
    assert float(found.gini) == pytest.approx(2 * rest, rel=1e-5)
    assert float(found.entropies) == pytest.approx(31 * rest, rel=1e-5)


def test_the_gradient_may_be_taken_twice_from_one_forward_pass() -> None:
    hidden = torch.randn(3, 2, requires_grad=True)
    found = statistics_from_hidden(hidden, torch.randn(5, 2), torch.tensor([0, 4, 2]))
    one, other = (
        torch.autograd.grad(found.logprobs.sum(), hidden, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(one, other)


def test_a_tile_is_of_one_size_and_a_small_vocabulary_fits_whole() -> None:
    cpu = torch.device("cpu")
    for vocab_size in (1, 64, 1000, 49152, 151936):
        tokens, columns = default_tile(cpu, vocab_size)
        assert 1 <= columns <= vocab_size
        assert 2**19 < tokens * columns <= 2**20
    assert default_tile(cpu, 64) == (2**14, 64)
