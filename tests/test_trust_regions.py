"""dppo, m2po, dual_clip and estr's own options: regions, golden values, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.corrections import TokenColumns, Verdict, build_correction, for_step
from estr.corrections.base import concatenate
from estr.corrections.m2po import second_moment_limit
from estr.corrections.surrogates import ClippedSurrogate, ImportanceSurrogate
from estr.errors import ConfigError, DataError
from estr.losses import policy_loss

INF = math.inf


def columns_of(
    policy: list[float], behavior: list[float], advantages: list[float], **more: Any
) -> TokenColumns:
    n = len(policy)
    return TokenColumns(
        policy_logprobs=torch.tensor(policy).requires_grad_(),
        behavior_logprobs=torch.tensor(behavior),
        advantages=torch.tensor(advantages),
        loss_mask=more.pop("loss_mask", torch.ones(n, dtype=torch.bool)),
        **{name: torch.tensor(values) for name, values in more.items()},
    )


def verdict_of(columns: TokenColumns, name: str, **options: Any) -> Verdict:
    return build_correction([{"name": name, **options}])(columns)


def kept(columns: TokenColumns, name: str, **options: Any) -> list[bool]:
    return [bool(k) for k in verdict_of(columns, name, **options).keep]


def loss_and_gradient(
    columns: TokenColumns, name: str, **options: Any
) -> tuple[list[float], list[float]]:
    """(terms, gradient of -sum of terms) with denominator 1."""
    result = policy_loss(columns, build_correction([{"name": name, **options}]), denominators=1)
    (gradient,) = torch.autograd.grad(result.loss, columns.policy_logprobs)
    return result.terms.tolist(), gradient.tolist()


# --- dppo ---------------------------------------------------------------------------------------

# (p, m, D_tv, D_kl(m || p)); computed by hand from the Bernoulli formula
MOVES = [
    (0.6, 0.4, 0.2, 0.081093),
    (0.4, 0.6, 0.2, 0.081093),
    (0.99, 0.9, 0.09, 0.144479),
    (0.9, 0.99, 0.09, 0.071306),
    (0.002, 0.001, 0.001, 0.000307),
]


@pytest.mark.parametrize(("p", "m", "tv", "kl"), MOVES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_dppo_drops_only_outward_moves_beyond_its_radius(
    p: float, m: float, tv: float, kl: float, advantage: float
) -> None:
    columns = columns_of([math.log(p)], [math.log(m)], [advantage])
    outward = (p > m) == (advantage > 0)
    for divergence, value in (("tv", tv), ("kl", kl)):
        for radius, inside in ((value * 1.01, True), (value * 0.99, False)):
            keep = kept(columns, "dppo", divergence=divergence, radius=radius)
            assert keep == [inside or not outward]


def test_dppo_default_radii() -> None:
    policy, behavior = [math.log(m[0]) for m in MOVES], [math.log(m[1]) for m in MOVES]
    columns = columns_of(policy, behavior, [1.0, -1.0, 1.0, -1.0, 1.0])
    assert kept(columns, "dppo") == [False, False, True, True, True]
    assert kept(columns, "dppo", divergence="kl") == [False, False, False, False, True]


def test_dppo_radius_scaled_by_the_entropy() -> None:
    """radius 0.1 * sqrt(H + 0.01): 0.01 at H = 0, 0.1005 at H = 1, 0.2002 at H = 4."""
    for reach, entropy in ((0.01, 0.0), (0.100499, 1.0), (0.200250, 4.0)):
        for scale, inside in ((1.001, False), (0.999, True)):
            columns = columns_of(
                [math.log(0.3 + reach * scale)],
                [math.log(0.3)],
                [1.0],
                behavior_entropies=[entropy],
            )
            assert kept(columns, "dppo", scale="entropy", radius=0.1) == [inside]


def test_dppo_radius_scaled_by_gini() -> None:
    """radius 0.1 * sqrt(gini + 0.01): 0.06 at gini 0.35; the entropy is not looked at."""
    assert build_correction([{"name": "dppo", "scale": "gini"}]).needs == {"behavior_gini"}
    for move, inside in ((0.0599, True), (0.0601, False)):
        columns = columns_of([math.log(0.3 + move)], [math.log(0.3)], [1.0], behavior_gini=[0.35])
        assert kept(columns, "dppo", scale="gini", radius=0.1) == [inside]


def test_dppo_has_the_gradient_of_the_truncated_ratio() -> None:
    columns = columns_of(
        [math.log(0.004), math.log(0.3), math.log(0.004)],
        [math.log(0.0001), math.log(0.25), math.log(0.0001)],
        [1.0, 2.0, -1.0],
    )
    terms, gradient = loss_and_gradient(columns, "dppo")
    assert terms == pytest.approx([20.0, 2.4, -20.0], rel=1e-5)
    assert gradient == pytest.approx([-20.0, -2.4, 20.0], rel=1e-5)


# --- m2po ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("squares", "budget", "limit"),
    [
        ([0.01, 0.02, 0.03], 0.04, INF),
        ([0.01, 0.02, 0.03, 0.20], 0.04, 0.20),  # mean of all 0.065, of the rest 0.02
        ([0.04, 0.04, 0.04], 0.04, INF),
        ([0.5, 0.6], 0.04, 0.5),
        ([0.0, 0.09, 0.09], 0.05, 0.09),  # means 0, 0.045, 0.06: equal ones go together
        ([0.0, INF], 0.04, INF),
        ([], 0.04, INF),
    ],
)
def test_the_limit_of_the_second_moment(squares: list[float], budget: float, limit: float) -> None:
    values = torch.tensor(squares)
    for order in (values, values.flip(0)):
        found = second_moment_limit(order, budget)
        assert found == (float(torch.tensor(limit)) if squares else INF)
        rest = order[order < found].double()
        # 0.04 is not a float32; its square sums are compared in float64
        assert not len(rest) or float(rest.mean()) <= budget + 1e-9


def test_m2po_drops_the_largest_harmful_log_ratios() -> None:
    """Squares 0.01, 0.04, 0.25, 0.36, of which the second and the last push inward."""
    columns = columns_of([-0.9, -0.8, -1.5, -1.6], [-1.0] * 4, [1.0, -1.0, -1.0, 1.0])
    assert kept(columns, "m2po") == [True, True, False, True]
    assert kept(columns, "m2po", budget=0.1301) == [True] * 4
    assert kept(columns, "m2po", tokens="all") == [True, True, False, False]
    terms, gradient = loss_and_gradient(columns, "m2po")
    ratios = [math.exp(0.1), math.exp(0.2), 0.0, math.exp(-0.6)]
    assert terms == pytest.approx([ratios[0], -ratios[1], 0.0, ratios[3]])
    assert gradient == pytest.approx([-ratios[0], ratios[1], 0.0, -ratios[3]])


@given(
    st.lists(st.tuples(st.floats(-2, 2, width=32), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_m2po_judges_by_the_whole_step_however_it_is_cut(
    tokens: list[tuple[float, bool]], size: int
) -> None:
    policy = [-3.0 + delta for delta, _ in tokens]
    advantages = [1.0 if positive else -1.0 for _, positive in tokens]
    whole = columns_of(policy, [-3.0] * len(tokens), advantages)
    parts = [
        columns_of(
            policy[i : i + size], [-3.0] * len(policy[i : i + size]), advantages[i : i + size]
        )
        for i in range(0, len(tokens), size)
    ]
    correction = build_correction([{"name": "m2po"}])
    of_step = for_step(correction, concatenate(parts))
    cut = torch.cat([of_step(part).keep for part in parts])
    assert torch.equal(cut, correction(whole).keep)


def test_m2po_composes_and_is_prepared_within_a_list() -> None:
    columns = columns_of([-0.9, -1.5], [-1.0, -1.0], [1.0, -1.0], behavior_entropies=[0.0, 9.0])
    both = build_correction(
        [{"name": "m2po"}, {"name": "estr", "tau": 1.0, "eps": 0.001, "surrogate": "none"}]
    )
    assert "whole_step" in both.needs
    assert for_step(both, columns)(columns).keep.tolist() == [False, False]
    plain = build_correction([{"name": "none"}])
    assert for_step(plain, columns) is plain


def test_concatenate_leaves_out_what_one_part_lacks() -> None:
    first = columns_of([-1.0], [-1.0], [1.0], behavior_entropies=[1.0], versions=[3])
    second = columns_of([-2.0], [-1.0], [1.0], versions=[4])
    joined = concatenate([first, second])
    assert joined.behavior_entropies is None
    assert joined.versions is not None
    assert joined.versions.tolist() == [3, 4]


# --- dual_clip ----------------------------------------------------------------------------------


def test_dual_clip_bounds_the_negative_branch() -> None:
    ratios = [0.5, 1.5, 2.9, 3.1, 100.0]
    policy, n = [math.log(r) for r in ratios], len(ratios)
    terms, gradient = loss_and_gradient(columns_of(policy, [0.0] * n, [-1.0] * n), "dual_clip")
    assert terms == pytest.approx([-0.8, -1.5, -2.9, -3.0, -3.0])
    assert gradient == pytest.approx([0.0, 1.5, 2.9, 0.0, 0.0])
    terms, gradient = loss_and_gradient(columns_of(policy, [0.0] * n, [1.0] * n), "dual_clip")
    assert terms == pytest.approx([0.5, 1.2, 1.2, 1.2, 1.2])
    assert gradient == pytest.approx([-0.5, 0.0, 0.0, 0.0, 0.0])


def test_dual_clip_reports_where_a_bound_is_active() -> None:
    columns = columns_of([math.log(3.1), math.log(2.9)], [0.0, 0.0], [-1.0, -1.0])
    correction = build_correction([{"name": "dual_clip"}])
    assert policy_loss(columns, correction, denominators=1).clipped.tolist() == [True, False]


def test_dual_clip_on_edge_u_never_looks_at_mu() -> None:
    columns = columns_of([0.0], [-50.0], [-1.0], proximal_logprobs=[-math.log(2.0)])
    assert loss_and_gradient(columns, "dual_clip", edge="U")[0] == pytest.approx([-2.0])


# --- estr beyond the paper ----------------------------------------------------------------------


def test_estr_scales() -> None:
    """p = 0.7 of [0.7, 0.2, 0.1]: H 0.801819, gini 0.46, 2(1-p) - gini 0.14; p = 0.1: 1.34."""
    squares = {"entropy": (0.801819, 0.801819), "gini": (0.46, 0.46), "token": (0.14, 1.34)}
    for scale, values in squares.items():
        for p, square in zip((0.7, 0.1), values, strict=True):
            for factor, inside in ((0.999, True), (1.001, False)):
                delta = -math.sqrt((square + 0.01) * 0.5) * factor
                columns = columns_of(
                    [math.log(p) + delta],
                    [math.log(p)],
                    [1.0],
                    behavior_entropies=[0.801819],
                    behavior_gini=[0.46],
                )
                assert kept(columns, "estr", tau=0.5, scale=scale) == [inside]


def test_a_constant_scale_is_one_radius_for_all_tokens() -> None:
    """tau 0.04, eps 0.01: |delta| <= 0.2010, whatever the entropy; no column is needed."""
    assert build_correction([{"name": "estr", "scale": "constant"}]).needs == frozenset()
    columns = columns_of([-1.2009, -1.2011, -3.0], [-1.0, -1.0, -3.2009], [1.0, 1.0, -1.0])
    assert kept(columns, "estr", tau=0.04, scale="constant") == [True, False, True]


def test_a_missing_gini_is_an_error_and_never_zero() -> None:
    columns = columns_of([-1.0], [-1.0], [1.0], behavior_entropies=[1.0])
    with pytest.raises(DataError, match="needs behavior_gini"):
        kept(columns, "estr", scale="gini")


def test_estr_outward_spares_what_comes_back() -> None:
    columns = columns_of(
        [0.0, 0.0, -2.0, -2.0, -1.0],
        [-1.0] * 5,
        [1.0, -1.0, 1.0, -1.0, 1.0],
        behavior_entropies=[0.0] * 5,
    )
    assert kept(columns, "estr") == [False, False, False, False, True]
    assert kept(columns, "estr", side="outward") == [False, True, True, False, True]


def test_restoring_ratios_are_truncated_and_keep_their_gradient() -> None:
    ratios, n = [2.0, 8.0, 0.1], 3
    policy = [math.log(r) - 5.0 for r in ratios]
    columns = columns_of(policy, [-5.0] * n, [-1.0, -1.0, 1.0], behavior_entropies=[0.0] * n)
    for surrogate in ("clip", "importance"):
        terms, gradient = loss_and_gradient(columns, "estr", side="outward", surrogate=surrogate)
        assert terms == pytest.approx([-2.0, -5.0, 0.1])
        assert gradient == pytest.approx([2.0, 5.0, -0.1])
    terms, gradient = loss_and_gradient(columns, "estr", side="outward", restore_cap=100.0)
    assert terms == pytest.approx([-2.0, -8.0, 0.1])
    assert gradient == pytest.approx([2.0, 8.0, -0.1])


def test_restoring_ratios_are_lifted_where_the_advantage_is_positive() -> None:
    """Ratios 0.1, 0.1, 0.7, 3: the floor 0.5 takes the first's place, in value and gradient."""
    policy = [math.log(r) - 5.0 for r in (0.1, 0.1, 0.7, 3.0)]
    columns = columns_of(policy, [-5.0] * 4, [2.0, -1.0, 1.0, 1.0], behavior_entropies=[9.0] * 4)
    options = {"side": "outward", "surrogate": "importance", "restore_floor": 0.5}
    terms, gradient = loss_and_gradient(columns, "estr", tau=9.0, **options)
    assert terms == pytest.approx([1.0, -0.1, 0.7, 3.0])
    assert gradient == pytest.approx([-1.0, 0.1, -0.7, -3.0])


def test_the_importance_surrogate_has_no_clip() -> None:
    columns = columns_of(
        [math.log(3.0) - 5.0, -5.0 - math.log(3.0)],
        [-5.0, -5.0],
        [2.0, -1.0],
        behavior_entropies=[2.0, 2.0],
    )
    terms, gradient = loss_and_gradient(columns, "estr", surrogate="importance")
    assert terms == pytest.approx([6.0, -1 / 3])
    assert gradient == pytest.approx([-6.0, 1 / 3])
    assert loss_and_gradient(columns, "estr")[1] == [0.0, 0.0]


def test_the_soft_mask_decays_from_the_border_and_drops_nothing() -> None:
    """S/tau = 0.25, 1, 4, 16: weights 1, 1, exp(-3), exp(-15)."""
    deltas = [0.5, 1.0, 2.0, 4.0]
    columns = columns_of(
        [d - 9.0 for d in deltas], [-9.0] * 4, [-1.0] * 4, behavior_entropies=[0.99] * 4
    )
    verdict = verdict_of(columns, "estr", mask="soft")
    assert verdict.keep.all()
    assert verdict.weight is not None
    assert verdict.weight.tolist() == pytest.approx(
        [1.0, 1.0, math.exp(-3), math.exp(-15)], rel=1e-4
    )
    assert verdict.weight_edge is None
    terms, gradient = loss_and_gradient(columns, "estr", mask="soft")
    expected = [math.exp(d) * w for d, w in zip(deltas, verdict.weight.tolist(), strict=True)]
    assert gradient == pytest.approx(expected, rel=1e-5)
    assert terms == pytest.approx([-e for e in expected], rel=1e-5)
    spared = verdict_of(columns, "estr", mask="soft", side="outward")
    assert spared.weight is not None
    assert spared.weight.tolist() == [1.0] * 4
    everywhere = verdict_of(columns, "estr", mask="soft", tau=INF)
    assert everywhere.weight is not None
    assert everywhere.weight.tolist() == [1.0] * 4


def test_a_cap_at_the_clip_keeps_the_whole_restoring_gradient() -> None:
    """restore_cap = 1 + clip_high: free and clipped value differ by rounding alone."""
    log_ratio = torch.linspace(0.2, 0.9, 29).requires_grad_()
    surrogate = ClippedSurrogate("E", 0.2, 0.2, restore_cap=1.2)
    values, bounded = surrogate(log_ratio.exp(), torch.full((29,), -1.0))
    values.sum().backward()
    assert not bounded.any()
    torch.testing.assert_close(log_ratio.grad, torch.full((29,), -1.2))


@given(st.floats(0.01, 9.0), st.sampled_from([-1.5, 0.0, 0.7]))
def test_the_clip_is_the_minimum_of_the_paper(ratio: float, advantage: float) -> None:
    ratios, advantages = torch.tensor([ratio]), torch.tensor([advantage])
    values, bounded = ClippedSurrogate("E", 0.2, 0.28)(ratios, advantages)
    free, clipped = ratios * advantages, ratios.clamp(0.8, 1.28) * advantages
    assert torch.equal(values, torch.minimum(free, clipped))
    assert bool(bounded) == bool(clipped < free)


def test_options_choose_the_surrogate() -> None:
    columns = columns_of([-1.0], [-1.0], [1.0], behavior_entropies=[1.0])
    assert verdict_of(columns, "estr").surrogate == ClippedSurrogate("E", 0.2, 0.2)
    assert verdict_of(columns, "estr", surrogate="none").surrogate is None
    importance = verdict_of(columns, "estr", surrogate="importance").surrogate
    assert importance == ImportanceSurrogate("E")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "dppo", "radius": 0.0}, "radius must be above 0"),
        ({"name": "dppo", "ratio_cap": 1.0}, "ratio_cap must be above 1"),
        ({"name": "dppo", "eps": 0.0}, "eps must be above 0"),
        ({"name": "dppo", "clip_high": 0.2}, r"unknown key correction\.clip_high of dppo"),
        ({"name": "m2po", "budget": 0.0}, "budget must be above 0"),
        ({"name": "dual_clip", "bound": 1.1}, r"bound must be above 1 \+ clip_high"),
        ({"name": "estr", "restore_cap": 1.0}, r"restore_cap must be at least 1 \+ clip_high"),
        ({"name": "estr", "restore_floor": 0.5}, "only with side = outward"),
        (
            {"name": "estr", "side": "outward", "surrogate": "importance", "restore_floor": 1.5},
            r"restore_floor must be in \[0, 1\]",
        ),
        ({"name": "estr", "scale": "surprisal"}, "scale"),
    ],
)
def test_options_out_of_range_are_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_correction([entry])
