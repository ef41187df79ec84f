"""tis, mis, decoupled: golden weights at each level, what composes, what would count twice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from estr.corrections import ClippedSurrogate, TokenColumns, Verdict, build_correction
from estr.corrections.sequences import level_log_ratio
from estr.errors import ConfigError, DataError
from estr.losses import policy_loss

NAN = math.nan
# Two trajectories, interleaved: ratios q/mu of the first 2, 3, of the second 0.5, 4, 1.
RATIOS = [2.0, 0.5, 3.0, 4.0, 1.0]
IDS = [7, 2, 7, 2, 2]


def columns_of(ratios: list[float] = RATIOS, ids: list[int] = IDS, **more: Any) -> TokenColumns:
    n = len(ratios)
    return TokenColumns(
        **{
            "policy_logprobs": torch.full((n,), -1.0).requires_grad_(),
            "behavior_logprobs": torch.full((n,), -9.0),
            "advantages": torch.ones(n),
            "loss_mask": torch.ones(n, dtype=torch.bool),
            "proximal_logprobs": torch.tensor(ratios).log() - 9.0,
            "behavior_entropies": torch.ones(n),
            "sequence_ids": torch.tensor(ids),
            **more,
        }
    )


def verdict_of(columns: TokenColumns, *entries: dict[str, Any]) -> Verdict:
    return build_correction(list(entries))(columns)


def weights(verdict: Verdict) -> list[float]:
    assert verdict.weight is not None
    assert not verdict.weight.requires_grad
    return [round(w, 4) for w in verdict.weight.tolist()]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2.0, 0.5, 2.5, 2.5, 1.0]),
        ("sequence", [2.5, 2.0, 2.5, 2.0, 2.0]),  # products 6 and 2
        ("geometric", [2.4495, 1.2599, 2.4495, 1.2599, 1.2599]),  # 6^(1/2), 2^(1/3)
    ],
)
def test_tis_weighs_with_the_truncated_ratio(level: str, expected: list[float]) -> None:
    verdict = verdict_of(columns_of(), {"name": "tis", "level": level, "cap": 2.5})
    assert verdict.keep.all()
    assert weights(verdict) == expected
    assert verdict.surrogate is None


@pytest.mark.parametrize(
    ("level", "keep"),
    [
        ("token", [True, True, False, False, True]),
        ("sequence", [False, True, False, True, True]),
        ("geometric", [False, True, False, True, True]),
    ],
)
def test_mis_drops_what_lies_outside_the_band(level: str, keep: list[bool]) -> None:
    verdict = verdict_of(columns_of(), {"name": "mis", "level": level, "low": 0.45, "high": 2.2})
    assert verdict.keep.tolist() == keep
    whole = verdict_of(columns_of(), {"name": "tis", "level": level, "cap": 100.0})
    kept = torch.tensor(keep)
    assert verdict.weight is not None
    assert whole.weight is not None
    assert torch.equal(verdict.weight[kept], whole.weight[kept])


def test_a_sequence_counts_its_eligible_tokens_only() -> None:
    mask = torch.tensor([True, True, True, False, True])
    columns = columns_of([2.0, 0.5, 3.0, NAN, 1.0], loss_mask=mask)
    verdict = verdict_of(columns, {"name": "tis", "level": "sequence", "cap": 10.0})
    assert weights(verdict)[:3] == [6.0, 0.5, 6.0]
    verdict = verdict_of(columns, {"name": "tis", "level": "geometric", "cap": 10.0})
    assert weights(verdict)[1] == 0.7071


def test_a_turn_counts_its_own_tokens_only() -> None:
    """Turn 5: ratios 2 and 3; turn 6: 0.5 and, masked, 4; turn 9: 1."""
    mask = torch.tensor([True, True, True, False, True])
    turns = torch.tensor([5, 6, 5, 6, 9])
    columns = columns_of(turn_ids=turns, sequence_ids=None, loss_mask=mask)
    verdict = verdict_of(columns, {"name": "tis", "level": "turn", "cap": 10.0})
    assert [weights(verdict)[i] for i in (0, 1, 2, 4)] == [6.0, 0.5, 6.0, 1.0]
    verdict = verdict_of(columns, {"name": "mis", "level": "turn", "low": 0.4, "high": 1.0})
    assert verdict.keep.tolist() == [False, True, False, False, True]
    with pytest.raises(DataError, match="needs turn_ids"):
        verdict_of(columns_of(), {"name": "tis", "level": "turn"})


def test_the_gradient_under_a_turn_weight_is_that_weight_times_the_advantage() -> None:
    columns = columns_of(
        [2.0, 0.5, 3.0], [0, 0, 0], turn_ids=torch.tensor([1, 2, 2]), proximal_logprobs=None
    )
    drift = torch.tensor([2.0, 0.5, 3.0]).log()
    columns = replace(columns, behavior_logprobs=columns.policy_logprobs.detach() - drift)
    correction = build_correction([{"name": "tis", "level": "turn", "cap": 1.8}])
    policy_loss(columns, correction, denominators=1).loss.backward()
    assert columns.policy_logprobs.grad is not None
    assert columns.policy_logprobs.grad.tolist() == pytest.approx([-1.8, -1.5, -1.5])


@given(
    ratios=st.lists(st.floats(0.1, 9.0), min_size=1, max_size=8),
    turns=st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_the_turns_of_a_trajectory_multiply_to_its_product(
    ratios: list[float], turns: list[int]
) -> None:
    own = torch.tensor(turns[: len(ratios)])
    columns = columns_of(ratios, [0] * len(ratios), turn_ids=own)
    of_turn = level_log_ratio(columns, "B", "turn")
    whole = level_log_ratio(columns, "B", "sequence")
    firsts = [turns.index(t) for t in set(own.tolist())]
    assert float(of_turn[firsts].sum()) == pytest.approx(float(whole[0]), abs=1e-4)


def test_a_token_that_mu_could_not_draw_leaves_its_sequence_alone() -> None:
    behavior = torch.tensor([-9.0, -9.0, -math.inf, -9.0, -9.0])
    columns = columns_of(behavior_logprobs=behavior)
    verdict = verdict_of(columns, {"name": "tis", "level": "sequence", "cap": 10.0})
    assert weights(verdict)[0] == 2.0
    result = policy_loss(columns, build_correction([{"name": "mis"}]), denominators=5)
    assert int(result.num_impossible) == 1
    assert not result.kept[2]


def test_a_long_sequence_overflows_nowhere() -> None:
    columns = columns_of([50.0] * 400, [0] * 400)
    correction = build_correction([{"name": "tis", "level": "sequence"}])
    result = policy_loss(columns, correction, denominators=400)
    assert result.loss.item() == pytest.approx(-2.4)
    narrow = build_correction([{"name": "mis", "level": "sequence"}])
    assert not policy_loss(columns, narrow, denominators=400).kept.any()


def test_the_default_surrogate_under_the_weight_reads_pi_over_q() -> None:
    """min(r A, clip(r) A) with r = pi/q = 1.5, weight 2: 1.2 * 2, and no gradient; at r = 1.1 the
    gradient is weight * r * A."""
    proximal = torch.tensor([-1.0 - math.log(1.5), -1.0 - math.log(1.1)])
    columns = columns_of(
        [1.0, 1.0], [0, 0], proximal_logprobs=proximal, behavior_logprobs=proximal - math.log(2)
    )
    result = policy_loss(columns, build_correction([{"name": "tis", "cap": 4.0}]), denominators=1)
    assert result.terms.tolist() == pytest.approx([2.4, 2.2])
    result.loss.backward()
    assert columns.policy_logprobs.grad is not None
    assert columns.policy_logprobs.grad.tolist() == pytest.approx([0.0, -2.2])


def test_decoupled_is_a_capped_weight_on_the_clip_of_pi_over_q() -> None:
    verdict = verdict_of(columns_of([6.0, 0.5], [0, 1]), {"name": "decoupled", "clip_high": 0.3})
    assert verdict.keep.all()
    assert weights(verdict) == [5.0, 0.5]
    assert verdict.surrogate == ClippedSurrogate("U", 0.2, 0.3)


def test_mis_on_tokens_is_icepop_on_edge_b() -> None:
    columns = columns_of()
    mis = verdict_of(columns, {"name": "mis"}, {"name": "none", "edge": "U"})
    icepop = verdict_of(columns, {"name": "icepop", "edge": "B", "beta": 2.0})
    assert torch.equal(mis.keep, icepop.keep)
    assert weights(mis) == weights(icepop)
    assert mis.surrogate == icepop.surrogate


def test_a_sequence_weight_stands_under_the_mask_of_estr() -> None:
    columns = columns_of(behavior_entropies=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]))
    verdict = verdict_of(
        columns,
        {"name": "estr", "tau": 64.0, "eps": 0.5, "surrogate": "none"},
        {"name": "tis", "level": "sequence"},
    )
    assert verdict.keep.tolist() == [True, True, True, True, False]  # |delta| = 8
    assert weights(verdict) == [2.0] * 5
    assert verdict.surrogate is None
    assert verdict.weight_edge == "B"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"name": "tis"}, {"name": "estr"}], "tis weighs with q/mu and the surrogate of estr"),
        ([{"name": "none"}, {"name": "mis"}], "mis weighs with q/mu and the surrogate of none"),
        ([{"name": "tis"}, {"name": "mis"}], "tis and mis each weigh with q/mu"),
        ([{"name": "tis"}, {"name": "decoupled"}], "tis and decoupled each weigh with q/mu"),
        ([{"name": "estr"}, {"name": "estr"}], "estr and estr each bring a surrogate"),
        ([{"name": "tis", "cap": 0.0}], "cap must be above 0"),
        ([{"name": "mis", "low": 2.0}], "low must be at least 0 and below high"),
        ([{"name": "decoupled", "cap": -1.0}], "cap must be above 0"),
        ([{"name": "tis", "level": "phrase"}], "level"),
    ],
)
def test_what_would_count_twice_or_makes_no_sense_is_refused(
    entries: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_correction(entries)
