"""From rewards to advantages: golden values, and what no reward may do to them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.advantages import group_advantages, is_zero_variance
from estr.config import load_recipe
from estr.errors import ConfigError, NumericsError

FEW = settings(max_examples=100, deadline=None)
KINDS = ("grpo", "no_std", "leave_one_out")
kinds = st.sampled_from(KINDS)
rewards = st.floats(-100, 100)
groups = st.lists(rewards, min_size=2, max_size=8)


def advantages(values, kind="grpo", outcomes=None):
    return group_advantages(values, values if outcomes is None else outcomes, kind=kind)


# Golden values


@pytest.mark.parametrize(
    ("kind", "one_right", "three_right"),
    [
        ("no_std", [0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]),
        ("leave_one_out", [1.0, -1 / 3, -1 / 3, -1 / 3], [1 / 3, 1 / 3, 1 / 3, -1.0]),
        # deviations over 0.5 + 1e-6; the population std would give 1.732051 and -0.577350
        (
            "grpo",
            [1.499997, -0.499999, -0.499999, -0.499999],
            [0.499999, 0.499999, 0.499999, -1.499997],
        ),
    ],
)
def test_every_kind_does_what_its_name_says_check_19(kind, one_right, three_right):
    assert advantages([1, 0, 0, 0], kind) == pytest.approx(one_right, abs=1e-9)
    assert advantages([1, 1, 1, 0], kind) == pytest.approx(three_right, abs=1e-9)


def test_a_standard_deviation_over_the_batch_is_not_offered_check_19():
    with pytest.raises(ConfigError, match=r"loss\.advantage = 'batch_std'.*grpo, no_std, leave"):
        load_recipe(overrides=["loss.advantage=batch_std"])


def test_grpo_of_unequal_rewards():
    # mean 2, std (n-1) sqrt(7)
    assert advantages([0.0, 1.0, 5.0]) == pytest.approx(
        [-2 / (math.sqrt(7) + 1e-6), -1 / (math.sqrt(7) + 1e-6), 3 / (math.sqrt(7) + 1e-6)],
        rel=1e-12,
    )


def test_leave_one_out_against_the_definition():
    values = [0.0, 1.0, 5.0]
    expected = [values[i] - np.mean(values[:i] + values[i + 1 :]) for i in range(3)]
    assert advantages(values, "leave_one_out") == pytest.approx(expected, rel=1e-12)


# Groups that teach nothing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [0.0, 1.0, -3.5, 1e300])
def test_a_group_of_one_scored_member_is_zero_check_21(kind, reward):
    assert advantages([reward], kind) == [0.0]
    assert advantages([None, reward, None], kind) == [None, 0.0, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outcome", [0.0, 1.0, 0.1])
def test_shaped_rewards_do_not_revive_a_group_of_equal_outcomes_check_25(kind, outcome):
    assert is_zero_variance([outcome] * 4)
    assert advantages([1, 1, 0.8, 1], kind, [outcome] * 4) == [0.0, 0.0, 0.0, 0.0]


@FEW
@given(st.lists(rewards, min_size=1, max_size=8), rewards, kinds)
def test_equal_outcomes_are_exactly_zero_whatever_the_rewards_check_25(values, outcome, kind):
    assert advantages(values, kind, [outcome] * len(values)) == [0.0] * len(values)


def test_a_group_is_kept_or_dropped_whole_check_30():
    assert not is_zero_variance([1, 0, 0, 0])
    assert all(a != 0.0 for a in advantages([1, 0, 0, 0]))


@FEW
@given(st.integers(2, 8), st.integers(0, 7), kinds)
def test_one_odd_member_keeps_all_the_others_check_30(size, odd, kind):
    outcomes = [1.0 if i == odd % size else 0.0 for i in range(size)]
    assert all(a is not None and a != 0.0 for a in advantages(outcomes, kind))


def test_equal_rewards_under_different_outcomes_stay_at_zero():
    for kind in KINDS:
        assert advantages([0.5, 0.5], kind, [1.0, 0.0]) == [0.0, 0.0]
        # 0.1 less the mean of three of them is not 0.
        assert advantages([0.1] * 3, kind, [0.0, 1.0, 0.0]) == [0.0] * 3
        assert advantages([0.1, None, 0.1, 0.1], kind, [0.0, 1.0, 1.0, 0.0]) == [0, None, 0, 0]


# Unscored members


def test_unscored_is_not_zero():
    assert advantages([1.0, None, 0.0], "no_std") == [0.5, None, -0.5]
    assert advantages([1.0, 0.0, 0.0], "no_std") == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert advantages([None, None]) == [None, None]
    assert advantages([]) == []


def test_a_member_needs_both_a_reward_and_an_outcome():
    assert group_advantages([1.0, 2.0, 0.0], [1.0, None, 0.0], kind="no_std") == [0.5, None, -0.5]
    assert group_advantages([1.0, None, 0.0], [1.0, 5.0, 0.0], kind="no_std") == [0.5, None, -0.5]


def test_an_unscored_member_does_not_make_a_group_differ():
    assert group_advantages([1.0, None, 0.8], [1.0, 0.0, 1.0], kind="grpo") == [0.0, None, 0.0]
    assert is_zero_variance([1.0, None, 1.0])
    assert is_zero_variance([None, None])
    assert is_zero_variance([])


@FEW
@given(groups, kinds, st.data())
def test_unscored_members_leave_the_statistics(values, kind, data):
    holes = data.draw(st.lists(st.integers(0, len(values)), max_size=4))
    padded = list(values)
    for hole in sorted(holes, reverse=True):
        padded.insert(hole, None)
    result = advantages(padded, kind)
    assert [a for a, r in zip(result, padded, strict=True) if r is not None] == advantages(
        values, kind
    )
    assert all((a is None) == (r is None) for a, r in zip(result, padded, strict=True))


# Invariants


@FEW
@given(groups, kinds)
def test_advantages_sum_to_zero_and_keep_the_order(values, kind):
    result = np.array(advantages(values, kind))
    assert abs(result.sum()) <= 1e-6
    if not is_zero_variance(values):
        order = np.argsort(values, kind="stable")
        assert (np.diff(result[order]) >= 0).all()


@FEW
@given(groups, st.floats(-50, 50), st.permutations(range(8)), kinds)
def test_shifting_changes_nothing_and_permuting_permutes(values, shift, order, kind):
    result = advantages(values, kind, list(range(len(values))))
    shifted = advantages([v + shift for v in values], kind, list(range(len(values))))
    spread = max(values) - min(values)
    if spread > 1e-3 or kind != "grpo":
        assert shifted == pytest.approx(result, rel=1e-6, abs=1e-9)
    order = [i for i in order if i < len(values)]
    permuted = advantages([values[i] for i in order], kind, order)
    assert permuted == pytest.approx([result[i] for i in order], rel=1e-6, abs=1e-6)


@FEW
@given(st.lists(st.none() | st.floats(-1e100, 1e100), max_size=8), kinds)
def test_never_nan_check_21(values, kind):
    for reward, advantage in zip(values, advantages(values, kind), strict=True):
        assert (advantage is None) == (reward is None)
        assert advantage is None or math.isfinite(advantage)


# Refusals


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_value_that_is_not_finite_is_refused_with_its_place(kind, bad, place):
    values = [1.0, 0.0, 1.0]
    values[place] = bad
    with pytest.raises(NumericsError, match=f"reward of member {place} is"):
        group_advantages(values, [1.0, 0.0, 1.0], kind=kind)
    with pytest.raises(NumericsError, match=f"outcome of member {place} is"):
        is_zero_variance(values)


@pytest.mark.parametrize("values", [[1e200, -1e200], [1.7e308, 1.7e308, 0.0]])
def test_overflow_is_named_and_not_a_quiet_zero(values):
    with pytest.raises(NumericsError, match="too large"):
        advantages(values)


def test_lengths_and_kinds_are_checked():
    with pytest.raises(ValueError, match="2 rewards but 1 outcomes"):
        group_advantages([1.0, 0.0], [1.0], kind="grpo")
    for values in ([1.0, 0.0], [1.0, 1.0], []):
        with pytest.raises(ValueError, match="'zscore' is unknown; known: grpo, no_std"):
            group_advantages(values, values, kind="zscore")


def test_what_must_differ_for_a_group_to_teach_is_a_choice() -> None:
    rewards, outcomes = [0.1, 0.0, 0.0, 0.1], [0.0, 0.0, 0.0, 0.0]
    assert group_advantages(rewards, outcomes, kind="no_std") == [0.0] * 4
    taught = group_advantages(rewards, outcomes, kind="no_std", variance_of="reward")
    assert taught == pytest.approx([0.05, -0.05, -0.05, 0.05])
    equal = group_advantages([0.5] * 4, [0.0, 1.0, 0.0, 1.0], kind="grpo", variance_of="reward")
    assert equal == [0.0] * 4
