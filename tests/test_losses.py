"""The policy loss: worked values, denominators, gradients, and what must never touch them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from estr.corrections import TokenColumns, Verdict, build_correction
from estr.errors import DataError, NumericsError
from estr.losses import PolicyLoss, estr_loss, policy_loss
from estr.options.corrections import Edge

INF, NAN = math.inf, math.nan

VARIANTS: list[dict[str, Any]] = [
    {"name": "none"},
    {"name": "none", "edge": "U"},
    {"name": "estr", "tau": 0.5, "eps": 0.05},
    {"name": "estr", "tau": INF},
    {"name": "icepop"},
    {"name": "icepop", "edge": "B"},
    {"name": "kpop"},
    {"name": "kpop", "edge": "B"},
    {"name": "estr", "tau": 0.5, "side": "outward"},
    {"name": "estr", "tau": 0.5, "surrogate": "importance"},
    {"name": "tis"},
    {"name": "mis"},
    {"name": "decoupled"},
    {"name": "dppo"},
    {"name": "dppo", "divergence": "kl", "scale": "entropy"},
    {"name": "dual_clip"},
    {"name": "dual_clip", "edge": "U"},
]


def columns_of(
    policy: Any, behavior: Any, advantages: Any, mask: Any = None, **more: Any
) -> TokenColumns:
    """Columns from nested lists; the policy log-probs are a leaf that requires a gradient."""
    policy = torch.tensor(policy, dtype=torch.float32).requires_grad_()
    eligible = torch.ones_like(policy, dtype=torch.bool) if mask is None else torch.tensor(mask) > 0
    return TokenColumns(
        policy_logprobs=policy,
        behavior_logprobs=torch.tensor(behavior, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        loss_mask=eligible,
        **{name: torch.tensor(values) for name, values in more.items()},
    )


def loss_of(
    columns: TokenColumns, denominators: float | Tensor, name: str = "none", **options: Any
) -> PolicyLoss:
    correction = build_correction([{"name": name, **options}])
    return policy_loss(columns, correction, denominators=denominators)


def gradient_of(result: PolicyLoss, columns: TokenColumns) -> Tensor:
    (gradient,) = torch.autograd.grad(result.loss, columns.policy_logprobs)
    return gradient


def losses_as_terms(losses: Any, mask: Any = None) -> TokenColumns:
    """Columns at ratio 1 whose per-token losses are the given values (loss = -advantage)."""
    values = torch.tensor(losses, dtype=torch.float32)
    zeros = torch.zeros_like(values).tolist()
    return columns_of(zeros, zeros, (-values).tolist(), mask)


# --- worked values ------------------------------------------------------------------------------

WORKED: dict[str, Any] = {
    "policy": [[-1.0, -0.5], [-2.0, -0.02]],
    "behavior": [[-1.1, -0.5], [-1.2, -0.35]],
    "advantages": [[1.0, 1.0], [-0.5, -0.5]],
    "behavior_entropies": [[1.0, 0.6], [1.5, 0.01]],
}


def test_the_whole_loss_of_one_group_check_1() -> None:
    columns = columns_of(**WORKED)
    result = loss_of(columns, 4, "estr", tau=0.5, eps=0.05)
    assert result.loss.item() == pytest.approx(-0.426293, abs=1e-6)
    assert result.kept.tolist() == [[True, True], [True, False]]
    assert result.clipped.tolist() == [[False, False], [True, False]]
    assert result.terms.flatten().tolist() == pytest.approx([1.105171, 1.0, -0.4, 0.0], abs=1e-6)
    assert result.log_ratio.flatten().tolist() == pytest.approx([0.1, 0.0, -0.8, 0.33], abs=1e-6)
    gradient = gradient_of(result, columns).flatten().tolist()
    assert gradient == pytest.approx([-0.276293, -0.25, 0.0, 0.0], abs=1e-6)


def test_without_a_mask_the_same_tokens_give_another_loss_check_1() -> None:
    result = loss_of(columns_of(**WORKED), 4, "none")
    assert result.loss.item() == pytest.approx(-0.252422, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, -1.0, 1.5, 1.5),
        (0.5, -1.0, 0.8, 0.0),
        (1.5, 1.0, -1.2, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (1.1, 1.0, -1.1, -1.1),
        (1.1, -1.0, 1.1, 1.1),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("name", ["none", "estr", "icepop", "kpop"])
def test_pessimistic_minimum_check_5(
    name: str, ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    columns = columns_of([math.log(ratio) - 3.0], [-3.0], [advantage], behavior_entropies=[5.0])
    result = loss_of(columns, 1, name)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert gradient_of(result, columns).tolist() == pytest.approx([gradient], abs=1e-6)
    assert result.clipped.tolist() == [gradient == 0.0 and advantage != 0.0]


def test_clip_bounds_are_apart() -> None:
    columns = columns_of([math.log(1.5), math.log(0.5)], [0.0, 0.0], [1.0, -1.0])
    result = loss_of(columns, 1, "none", clip_low=0.1, clip_high=0.3)
    assert result.terms.tolist() == pytest.approx([1.3, -0.9], abs=1e-6)


def test_icepop_on_edge_b_weighs_a_surrogate_on_u() -> None:
    # q/mu = e^0.4 and e^-0.8 (below alpha = 0.5: rejected); pi/q = e^0.1
    columns = columns_of([-1.5, -1.9], [-2.0, -1.2], [2.0, 2.0], proximal_logprobs=[-1.6, -2.0])
    result = loss_of(columns, 2, "icepop", edge="B")
    assert result.kept.tolist() == [True, False]
    assert result.terms.tolist() == pytest.approx([2 * 1.491825 * 1.105171, 0.0], rel=1e-6)
    expected = [-1.491825 * 1.105171, 0.0]
    assert gradient_of(result, columns).tolist() == pytest.approx(expected, rel=1e-6)


def test_icepop_on_edge_e_has_weight_one() -> None:
    columns = columns_of([-1.9, -2.0], [-2.0, -1.2], [2.0, 2.0])
    result = loss_of(columns, 2, "icepop")
    assert result.terms.tolist() == pytest.approx([2 * 1.105171, 0.0], rel=1e-6)


def test_kpop_drops_what_is_outside_both_divergences() -> None:
    # (p, m) = (0.6, 0.3): divergences 0.19, r = 2, clipped at 1.2; (0.05, 0.5): 0.83, rejected
    columns = columns_of(
        [math.log(0.6), math.log(0.05)], [math.log(0.3), math.log(0.5)], [1.0, 1.0]
    )
    result = loss_of(columns, 2, "kpop")
    assert result.terms.tolist() == pytest.approx([1.2, 0.0], rel=1e-6)


def test_edge_u_without_a_proximal_pass_is_the_plain_policy_gradient() -> None:
    columns = columns_of([-1.0, -3.0], [-9.0, -0.1], [2.0, -1.0])
    result = loss_of(columns, 4, "none", edge="U")
    assert result.terms.tolist() == [2.0, -1.0]
    assert gradient_of(result, columns).tolist() == [-0.5, 0.25]


def test_edge_u_reads_the_proximal_policy_and_never_mu() -> None:
    first = columns_of([-1.0], [-1.0], [1.0], proximal_logprobs=[-1.1])
    second = columns_of([-1.0], [-7.0], [1.0], proximal_logprobs=[-1.1])
    for columns in (first, second):
        result = loss_of(columns, 1, "none", edge="U")
        assert result.terms.tolist() == pytest.approx([1.105171], abs=1e-6)


class Double:
    """Keeps all with a weight of 2 for q/mu and brings no surrogate."""

    needs: frozenset[str] = frozenset()

    def __call__(self, columns: TokenColumns) -> Verdict:
        return Verdict(columns.loss_mask, 1.0 - columns.policy_logprobs, weight_edge="B")


class KeepAll:
    needs: frozenset[str] = frozenset()

    def __call__(self, columns: TokenColumns) -> Verdict:
        return Verdict(columns.loss_mask)


class Offset:
    """A surrogate that is worth something, and bounded, also where nothing is kept."""

    edge: Edge = "E"

    def __call__(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        return ratio * advantages + 5.0, torch.ones_like(ratio, dtype=torch.bool)


class KeepFirst:
    needs: frozenset[str] = frozenset()

    def __call__(self, columns: TokenColumns) -> Verdict:
        keep = torch.zeros_like(columns.loss_mask)
        keep[0] = True
        return Verdict(keep, surrogate=Offset())


def test_a_surrogate_of_ones_own_counts_only_where_kept() -> None:
    columns = columns_of([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1, 1, 0])
    result = policy_loss(columns, KeepFirst(), denominators=2)
    assert result.terms.tolist() == [6.0, 0.0, 0.0]
    assert result.clipped.tolist() == [True, False, False]
    assert result.loss.item() == -3.0
    assert gradient_of(result, columns).tolist() == [-0.5, 0.0, 0.0]


def test_without_a_surrogate_a_mask_gets_edge_e_and_a_weight_edge_u() -> None:
    columns = columns_of([-1.0], [-2.0], [1.0])
    masked = policy_loss(columns, KeepAll(), denominators=1)
    assert masked.terms.tolist() == pytest.approx([1.2])
    weighted = policy_loss(columns, Double(), denominators=1)
    assert weighted.terms.tolist() == [2.0]
    assert gradient_of(weighted, columns).tolist() == [-2.0]


# --- denominators -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "split",
    [[[1.0], [0.0, 0.0, 0.0]], [[1.0, 0.0, 0.0, 0.0]], [[1.0], [0.0], [0.0], [0.0]]],
)
def test_token_mean_does_not_depend_on_the_split_check_8(split: list[list[float]]) -> None:
    total = sum(loss_of(losses_as_terms(part), 4).loss.item() for part in split)
    assert total == 0.25


def test_masked_positions_have_no_value_and_no_gradient_check_10() -> None:
    columns = losses_as_terms([[2.0, 7.0], [4.0, -9.0]], [[1, 0], [1, 0]])
    result = loss_of(columns, 2)
    assert result.loss.item() == 3.0
    # d(loss)/d(logp) is the per-token loss over the denominator at ratio 1.
    assert gradient_of(result, columns).tolist() == [[1.0, 0.0], [2.0, 0.0]]


def test_one_global_token_mean_check_16() -> None:
    columns = losses_as_terms([[1.0, 0.0, 0.0], [3.0, 3.0, 3.0]], [[1, 0, 0], [1, 1, 1]])
    assert loss_of(columns, 4).loss.item() == 2.5


def test_group_aggregation_means_groups_of_token_means() -> None:
    columns = losses_as_terms([[1.0, 9.0, 9.0], [0.0, 0.0, 0.0]], [[1, 0, 0], [1, 1, 1]])
    by_group = torch.tensor([[2 * 1], [2 * 3]])
    assert loss_of(columns, by_group).loss.item() == 0.5
    assert loss_of(columns, 4).loss.item() == 0.25


def test_tool_tokens_do_not_count_check_18() -> None:
    columns = losses_as_terms([1.0] * 4 + [9.0] * 6, [1] * 4 + [0] * 6)
    assert loss_of(columns, 4).loss.item() == 1.0


def test_masking_never_shrinks_the_denominator_check_37() -> None:
    # Four tokens of ratio 1 or e^2; tau decides how many are kept, each kept one stays worth 1/4.
    table = {
        "policy": [-1.0, -1.0, 0.0, 0.0],
        "behavior": [-1.0, -1.0, -2.0, -2.0],
        "advantages": [1.0, 1.0, -1.0, -1.0],
        "behavior_entropies": [1.0, 1.0, 1.0, 1.0],
    }
    for tau, num_kept in ((1.0, 2), (10.0, 4)):
        columns = columns_of(**table)
        result = loss_of(columns, 4, "estr", tau=tau)
        assert int(result.kept.sum()) == num_kept
        assert gradient_of(result, columns)[:2].tolist() == [-0.25, -0.25]
    columns = columns_of(**table, mask=[1, 0, 1, 0])
    result = loss_of(columns, 2, "estr", tau=1.0)
    assert result.kept.tolist() == [True, False, False, False]
    assert 1 - int(result.kept.sum()) / int(columns.loss_mask.sum()) == 0.5


@pytest.mark.parametrize("denominators", [0, -1.0, NAN, INF, torch.tensor([1.0, 0.0])])
def test_a_denominator_that_counts_nothing_is_refused(denominators: float | Tensor) -> None:
    with pytest.raises(ValueError, match="denominators must be finite and above 0"):
        loss_of(losses_as_terms([1.0, 1.0]), denominators)


def test_denominators_matter_only_where_eligible() -> None:
    columns = losses_as_terms([1.0, 1.0], [1, 0])
    result = loss_of(columns, torch.tensor([2.0, 0.0]))
    assert result.loss.item() == 0.5
    assert gradient_of(result, columns).tolist() == [0.5, 0.0]


def test_denominators_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="do not broadcast"):
        loss_of(losses_as_terms([1.0, 1.0]), torch.ones(2, 1))


# --- numerical rules ----------------------------------------------------------------------------


@pytest.mark.parametrize("entry", VARIANTS)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_a_masked_slot_may_hold_anything_check_12(entry: dict[str, Any], garbage: float) -> None:
    clean = columns_of([-1.0], [-1.1], [1.0], behavior_entropies=[1.0], proximal_logprobs=[-1.05])
    dirty = columns_of(
        [-1.0, garbage],
        [-1.1, garbage],
        [1.0, garbage],
        [1, 0],
        behavior_entropies=[1.0, garbage],
        proximal_logprobs=[-1.05, garbage],
    )
    expected, found = loss_of(clean, 1, **entry), loss_of(dirty, 1, **entry)
    assert found.loss.item() == expected.loss.item()
    assert gradient_of(found, dirty).tolist() == [*gradient_of(expected, clean).tolist(), 0.0]
    for column in (found.terms, found.log_ratio, found.kept, found.clipped):
        assert float(column[1]) == 0.0


@pytest.mark.parametrize("entry", VARIANTS)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_no_nan_arises_even_between_the_operations(entry: dict[str, Any], garbage: float) -> None:
    """Selection comes before arithmetic: torch's anomaly mode finds no NaN on the way back."""
    columns = columns_of(
        [-1.0, garbage, -INF],
        [-1.1, garbage, -INF],
        [1.0, garbage, 1.0],
        [1, 0, 1],
        behavior_entropies=[1.0, garbage, 1.0],
    )
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        gradient = gradient_of(loss_of(columns, 2, **entry), columns)
    assert gradient[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("entry", VARIANTS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_rejected_token_cannot_overflow(entry: dict[str, Any], advantage: float) -> None:
    columns = columns_of(
        [-1.0, -0.1], [-1.0, -3e4], [1.0, advantage], behavior_entropies=[1.0, 1.0]
    )
    result = loss_of(columns, 2, **entry)
    assert math.isfinite(result.loss.item())
    gradient = gradient_of(result, columns)
    assert gradient.isfinite().all()
    if not bool(result.kept[1]):
        assert gradient[1] == 0.0
        assert result.terms[1] == 0.0


@pytest.mark.parametrize("delta", [100.0, 1e4, -100.0])
@pytest.mark.parametrize("entry", [{"name": "none"}, {"name": "estr", "tau": INF}])
def test_an_extreme_ratio_times_no_advantage_is_nothing_check_33(
    entry: dict[str, Any], delta: float
) -> None:
    columns = columns_of([0.0], [-delta], [0.0], behavior_entropies=[1.0])
    result = loss_of(columns, 1, **entry)
    assert result.kept.tolist() == [True]
    assert result.terms.tolist() == [0.0]
    assert gradient_of(result, columns).tolist() == [0.0]


def test_the_exponent_is_bounded_and_the_hits_are_counted() -> None:
    columns = columns_of(
        [0.0, 0.0, -50.0, 0.0], [-19.0, -25.0, -1.0, -60.0], [-1.0, -1.0, -1.0, NAN], [1, 1, 1, 0]
    )
    result = loss_of(columns, 1)
    assert int(result.num_clamped) == 2
    # e^19, e^20 in place of e^25, and the clipped branch of a ratio that is next to nothing
    expected = [-1.7848230e8, -4.8516520e8, -0.8, 0.0]
    assert result.terms.tolist() == pytest.approx(expected, rel=1e-6)
    expected_gradient = [1.7848230e8, 0.0, 0.0, 0.0]
    assert gradient_of(result, columns).tolist() == pytest.approx(expected_gradient, rel=1e-6)


def test_a_rejected_token_is_no_clamp_hit() -> None:
    columns = columns_of([0.0, 0.0], [-25.0, -25.0], [1.0, 1.0], behavior_entropies=[1.0, 1e4])
    result = loss_of(columns, 1, "estr", tau=1.0)
    assert result.kept.tolist() == [False, True]
    assert int(result.num_clamped) == 1


@pytest.mark.parametrize("entry", VARIANTS)
@pytest.mark.parametrize("column", ["policy", "behavior", "advantages"])
def test_nan_on_an_eligible_token_is_raised_check_33(entry: dict[str, Any], column: str) -> None:
    table: dict[str, Any] = {
        "policy": [-1.0, -1.0],
        "behavior": [-1.0, -1.0],
        "advantages": [1.0, 1.0],
    }
    table[column] = [1.0, NAN]
    with pytest.raises(NumericsError, match=r"1 of 2 eligible tokens .* nan at \[1\]"):
        loss_of(columns_of(**table, behavior_entropies=[1.0, 1.0]), 2, **entry)


def test_a_missing_or_nan_entropy_is_never_zero() -> None:
    with pytest.raises(DataError, match="needs behavior_entropies"):
        loss_of(columns_of([-1.0], [-1.0], [1.0]), 1, "estr")
    with pytest.raises(NumericsError, match=r"behavior_entropies: 1 of 1"):
        loss_of(columns_of([-1.0], [-1.0], [1.0], behavior_entropies=[NAN]), 1, "estr")


@pytest.mark.parametrize("entry", VARIANTS)
@pytest.mark.parametrize("policy", [-1.0, -INF])
def test_a_token_that_mu_could_not_draw_is_rejected_and_counted(
    entry: dict[str, Any], policy: float
) -> None:
    columns = columns_of([-1.0, policy], [-1.0, -INF], [1.0, 1.0], behavior_entropies=[1.0, 1.0])
    result = loss_of(columns, 2, **entry)
    assert result.kept.tolist() == [True, False]
    assert int(result.num_impossible) == 1
    assert result.loss.item() == -0.5
    assert gradient_of(result, columns).tolist() == [-0.5, 0.0]
    assert result.log_ratio.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "entry", [*VARIANTS, {"name": "estr", "tau": INF, "mask": "soft"}, {"name": "mis", "low": 0.0}]
)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_token_that_pi_cannot_draw_has_no_gradient(
    entry: dict[str, Any], advantage: float
) -> None:
    """delta = -inf; and with q = pi, log pi - log q would be inf - inf."""
    columns = columns_of(
        [-1.0, -INF], [-1.0, -1.0], [1.0, advantage], behavior_entropies=[1.0, 1.0]
    )
    result = loss_of(columns, 2, **entry)
    assert math.isfinite(result.loss.item())
    assert result.terms[0] == 1.0
    assert gradient_of(result, columns).tolist() == [-0.5, 0.0]


def test_a_masked_impossible_token_is_not_counted() -> None:
    result = loss_of(columns_of([-1.0, -1.0], [-1.0, -INF], [1.0, 1.0], [1, 0]), 1)
    assert int(result.num_impossible) == 0


def test_a_batch_without_eligible_tokens_has_no_loss() -> None:
    columns = columns_of([-1.0, NAN], [-1.0, NAN], [1.0, NAN], [0, 0])
    result = loss_of(columns, 7)
    assert result.loss.item() == 0.0
    assert gradient_of(result, columns).tolist() == [0.0, 0.0]


def test_zero_advantages_change_no_parameter_check_14() -> None:
    columns = columns_of([-1.0, -2.0], [-1.5, -1.5], [0.0, 0.0], behavior_entropies=[1.0, 1.0])
    for entry in VARIANTS:
        assert gradient_of(loss_of(columns, 2, **entry), columns).tolist() == [0.0, 0.0]


# --- properties ---------------------------------------------------------------------------------

token = st.tuples(
    st.floats(-6, 0, width=32),
    st.floats(-6, 0, width=32),
    st.floats(-2, 2, width=32),
    st.floats(0, 3, width=32),
    st.booleans(),
)
tokens = st.lists(token, min_size=1, max_size=12)
variants = st.sampled_from(VARIANTS)


def from_tokens(values: list[tuple[float, float, float, float, bool]]) -> TokenColumns:
    policy, behavior, advantages, entropies, mask = (list(c) for c in zip(*values, strict=True))
    return columns_of(policy, behavior, advantages, mask, behavior_entropies=entropies)


@given(tokens, variants, st.randoms(use_true_random=False), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_split_order_and_padding_change_nothing(
    values: list[Any], entry: dict[str, Any], random: Any, size: int, padding: int
) -> None:
    denominator = float(len(values))
    whole = from_tokens(values)
    result = loss_of(whole, denominator, **entry)
    gradient = gradient_of(result, whole)

    order = list(range(len(values)))
    random.shuffle(order)
    loss, shuffled = 0.0, torch.zeros(len(values))
    for start in range(0, len(order), size):
        part = order[start : start + size]
        pad = [(NAN, NAN, NAN, NAN, False)] * padding
        columns = from_tokens([values[i] for i in part] + pad)
        piece = loss_of(columns, denominator, **entry)
        loss += piece.loss.item()
        shuffled[part] = gradient_of(piece, columns)[: len(part)]
    assert loss == pytest.approx(result.loss.item(), abs=1e-6, rel=1e-6)
    assert torch.equal(shuffled, gradient)


@given(tokens, variants)
@settings(max_examples=80, deadline=None)
def test_gradient_is_exactly_zero_where_masked_rejected_or_clipped(
    values: list[Any], entry: dict[str, Any]
) -> None:
    columns = from_tokens(values)
    result = loss_of(columns, 3.0, **entry)
    gradient = gradient_of(result, columns)
    silent = ~result.kept | result.clipped
    assert not gradient[silent].any()
    assert not (result.kept & ~columns.loss_mask).any()
    speaking = result.kept & ~result.clipped & (columns.advantages.abs() > 1e-6)
    assert bool((gradient[speaking] != 0).all())


@given(tokens)
@settings(max_examples=60, deadline=None)
def test_tau_inf_is_the_plain_clip(values: list[Any]) -> None:
    first, second = from_tokens(values), from_tokens(values)
    estr, none = loss_of(first, 5.0, "estr", tau=INF), loss_of(second, 5.0, "none")
    assert torch.equal(estr.loss, none.loss)
    assert torch.equal(gradient_of(estr, first), gradient_of(none, second))


@given(tokens, st.floats(0.01, 2.0))
@settings(max_examples=60, deadline=None)
def test_a_smaller_tau_only_takes_terms_away(values: list[Any], tau: float) -> None:
    first, second = from_tokens(values), from_tokens(values)
    narrow, wide = (
        loss_of(first, 5.0, "estr", tau=tau),
        loss_of(second, 5.0, "estr", tau=INF),
    )
    assert not (narrow.kept & ~wide.kept).any()
    assert torch.equal(narrow.terms, torch.where(narrow.kept, wide.terms, 0.0))
    kept = torch.where(narrow.kept, gradient_of(wide, second), 0.0)
    assert torch.equal(gradient_of(narrow, first), kept)


# --- gradients against plain torch --------------------------------------------------------------


@pytest.mark.parametrize("entry", VARIANTS)
def test_gradcheck(entry: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(6)
    policy = (-2 * torch.rand(2, 6, generator=generator, dtype=torch.float64)).requires_grad_()
    behavior = policy.detach() - 0.3 * torch.randn(2, 6, generator=generator, dtype=torch.float64)
    advantages = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    proximal = policy.detach() - 0.03
    mask = torch.rand(2, 6, generator=generator) < 0.7
    correction = build_correction([entry])

    def loss(logprobs: Tensor) -> Tensor:
        columns = TokenColumns(
            logprobs, behavior, advantages, mask, proximal, torch.ones_like(behavior)
        )
        return policy_loss(columns, correction, denominators=7.0).loss

    # The detached weight and mask are constants of the objective, so a finite difference agrees
    # only where they do not move: the weight reads the proximal policy, the mask is not at an edge.
    assert torch.autograd.gradcheck(loss, (policy,))


def test_estr_loss_is_the_printed_formula_in_plain_torch() -> None:
    generator = torch.Generator().manual_seed(7)
    shape = (4, 8)
    behavior = -3 * torch.rand(shape, generator=generator)
    start = behavior + 0.4 * torch.randn(shape, generator=generator)
    entropies = 2 * torch.rand(shape, generator=generator)
    advantages = torch.randn(4, 1, generator=generator).expand(shape)
    mask = torch.rand(shape, generator=generator) < 0.8
    policy, plain = start.clone().requires_grad_(), start.clone().requires_grad_()
    count = int(mask.sum())

    loss, keep = estr_loss(
        policy,
        behavior,
        entropies,
        advantages,
        mask,
        tau=0.1,
        eps=0.05,
        clip_low=0.1,
        clip_high=0.3,
        num_sampled_tokens=count,
    )
    delta = plain - behavior
    ratio = delta.exp()
    score = delta.detach() ** 2 / (entropies + 0.05)
    chosen = (score <= 0.1) & mask
    terms = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.3) * advantages)
    expected = -(terms * chosen).sum() / count

    assert 0 < int(keep.sum()) < count
    assert torch.equal(keep, chosen)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(policy.grad, plain.grad)


def test_estr_loss_gives_the_worked_value_check_1() -> None:
    worked = {name: torch.tensor(values) for name, values in WORKED.items()}
    loss, keep = estr_loss(
        worked["policy"],
        worked["behavior"],
        worked["behavior_entropies"],
        worked["advantages"],
        torch.ones(2, 2, dtype=torch.bool),
        tau=0.5,
        eps=0.05,
        num_sampled_tokens=4,
    )
    assert loss.item() == pytest.approx(-0.426293, abs=1e-6)
    assert keep.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("options", [{"tau": 0.0, "eps": 0.1}, {"tau": 1.0, "eps": 0.0}])
def test_estr_loss_refuses_options_out_of_range(options: dict[str, float]) -> None:
    ones = torch.ones(1)
    with pytest.raises(ValueError, match="must be above 0"):
        estr_loss(ones, ones, ones, ones, ones > 0, num_sampled_tokens=1, **options)


def test_only_the_loss_carries_a_gradient() -> None:
    result = loss_of(columns_of(**WORKED), 4, "estr")
    assert result.loss.requires_grad
    assert not result.terms.requires_grad
    assert not result.log_ratio.requires_grad
    assert not result.num_clamped.requires_grad
