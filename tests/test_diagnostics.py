"""What a step reports of its tokens and trajectories: golden values, invariance to the cut."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.corrections import TokenColumns, build_correction
from estr.diagnostics import ENTROPY_EDGES, token_diagnostics, trajectory_diagnostics
from estr.errors import StalenessError
from estr.losses import policy_loss
from estr.metrics import Metrics
from estr.types import RolloutId, SamplingSettings, Segment, Trajectory

FEW = settings(max_examples=50, deadline=None)


def columns_of(delta, advantages, entropies=None, *, versions=None, mask=None, behavior=-1.0):
    """Columns of one row with the given log-ratios; a float64-exact behavior log-prob."""
    delta = torch.tensor(delta)
    mask = torch.ones(len(delta), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return TokenColumns(
        policy_logprobs=(behavior + delta).requires_grad_(),
        behavior_logprobs=torch.full_like(delta, behavior),
        advantages=torch.tensor(advantages),
        loss_mask=mask,
        behavior_entropies=None if entropies is None else torch.tensor(entropies),
        versions=None if versions is None else torch.tensor(versions, dtype=torch.int32),
    )


def report(columns, *, correction="estr", target_version=5, **options) -> Metrics:
    tables = [{"name": "estr", "tau": 0.5, "eps": 0.05}] if correction == "estr" else correction
    loss = policy_loss(
        columns, build_correction(tables), denominators=float(len(columns.loss_mask))
    )
    return token_diagnostics(columns, loss, target_version=target_version, **options)


NO_MASK = [{"name": "none"}]


# Golden values


def test_the_worked_example_check_1():
    columns = columns_of(
        [0.1, 0.0, -0.8, 0.33], [1.0, 1.0, -0.5, -0.5], [1.0, 0.6, 1.5, 0.01], versions=[5, 4, 4, 2]
    )
    policy_entropies = torch.tensor([1.0, 0.5, 1.0, 0.5])
    row = report(columns, policy_entropies=policy_entropies, eps=0.05).to_row()
    assert row["eligible_tokens"] == 4.0
    assert row["rho_mask"] == 0.25
    assert row["rho_mask/advantage_pos_log_ratio_pos"] == 0.0
    assert row["rho_mask/advantage_pos_log_ratio_neg"] is None
    assert row["rho_mask/advantage_neg_log_ratio_neg"] == 0.0
    assert row["rho_mask/advantage_neg_log_ratio_pos"] == 1.0
    assert row["rho_mask/entropy_0.01_to_0.1"] == 1.0
    assert row["rho_mask/entropy_0.5_to_1"] == 0.0
    assert row["rho_mask/entropy_1_to_2"] == 0.0
    assert row["rho_mask/entropy_from_2"] is None
    assert row["low_entropy_share"] == 0.25
    assert row["behavior_entropy"] == pytest.approx(0.7775, abs=1e-6)
    assert row["policy_entropy"] == pytest.approx(0.75, abs=1e-6)
    # r = 1.105171, 1, 0.449329, 1.390968
    assert row["ratio_deviation"] == pytest.approx((0.105171 + 0.550671 + 0.390968) / 4, abs=1e-6)
    assert row["ratio_deviation_kept"] == pytest.approx((0.105171 + 0.550671) / 3, abs=1e-6)
    assert row["log_ratio_variance"] == pytest.approx(np.var([0.1, 0, -0.8, 0.33]), abs=1e-6)
    assert row["log_ratio_variance_kept"] == pytest.approx(np.var([0.1, 0, -0.8]), abs=1e-6)
    assert row["kl_k1"] == pytest.approx(0.0925, abs=1e-6)
    assert row["kl_k3"] == pytest.approx((3.945468 - 4 + 0.37) / 4, abs=1e-6)
    assert row["effective_sample_size"] == pytest.approx(3.945468**2 / (4 * 4.358093), abs=1e-6)
    # A < 0 and r = 0.449329: the bound 0.8 is active
    assert row["clip_fraction"] == 0.25
    assert (row["lag_mean"], row["lag_p50"], row["lag_max"]) == (1.25, 1.0, 3.0)
    assert row["nonfinite_log_ratios"] == 0.0
    assert row["clamped_log_ratios"] == 0.0
    assert row["missing_entropies"] == 0.0
    assert row["nonfinite"] == 0.0


def test_rho_mask_is_over_eligible_tokens_check_37():
    # two eligible tokens, the second far outside; what stands in padding is not looked at
    columns = columns_of(
        [0.0, 9.0, math.nan, 9.0],
        [1.0, 1.0, math.nan, 1.0],
        [1.0, 1.0, math.nan, 1.0],
        mask=[True, True, False, False],
    )
    assert report(columns).to_row()["rho_mask"] == 0.5


def test_padding_is_in_no_statistic_checks_12_and_51():
    bad = [math.nan, math.inf, 1e30]
    columns = TokenColumns(
        policy_logprobs=torch.tensor([[-1.0, -2.0, *bad]]),
        behavior_logprobs=torch.tensor([[-1.0, -2.0, *bad[::-1]]]),
        advantages=torch.tensor([[1.0, -1.0, *bad]]),
        loss_mask=torch.tensor([[True, True, False, False, False]]),
        behavior_entropies=torch.tensor([[1.0, 0.5, *bad]]),
        versions=torch.tensor([[3, 4, -1, -1, 99]], dtype=torch.int32),
    )
    row = report(columns, policy_entropies=torch.tensor([[1.0, 0.5, *bad]])).to_row()
    assert row["eligible_tokens"] == 2.0
    assert row["behavior_entropy"] == 0.75
    assert row["policy_entropy"] == 0.75
    assert row["lag_max"] == 2.0
    assert row["effective_sample_size"] == 1.0
    assert row["rho_mask"] == 0.0
    assert row["nonfinite"] == 0.0


@pytest.mark.parametrize(
    ("advantage", "delta", "cell"),
    [
        (1.0, 3.0, "advantage_pos_log_ratio_pos"),
        (1.0, -3.0, "advantage_pos_log_ratio_neg"),
        (-1.0, 3.0, "advantage_neg_log_ratio_pos"),
        (-1.0, -3.0, "advantage_neg_log_ratio_neg"),
        (0.0, 3.0, None),
        (1.0, 0.0, None),
    ],
)
def test_each_token_falls_into_its_own_cell(advantage, delta, cell):
    row = report(columns_of([delta], [advantage], [0.1])).to_row()
    cells = {name.removeprefix("rho_mask/"): v for name, v in row.items() if "log_ratio_" in name}
    cells = {name: value for name, value in cells.items() if name.startswith("advantage_")}
    assert len(cells) == 4
    assert {name for name, value in cells.items() if value is not None} == ({cell} - {None})
    assert all(value in (None, 1.0) for value in cells.values())


def test_entropy_bins_cover_everything_and_a_border_belongs_above():
    middle = [0.0, *ENTROPY_EDGES, 100.0]
    columns = columns_of([0.0] * len(middle), [1.0] * len(middle), middle)
    parts = [
        report(columns_of([9.0], [1.0], [float(np.nextafter(np.float32(edge), np.float32(0)))]))
        for edge in ENTROPY_EDGES
    ]
    row = report(columns).to_row()
    bins = [name for name in row if name.startswith("rho_mask/entropy")]
    assert bins == [
        "rho_mask/entropy_below_0.01",
        "rho_mask/entropy_0.01_to_0.1",
        "rho_mask/entropy_0.1_to_0.5",
        "rho_mask/entropy_0.5_to_1",
        "rho_mask/entropy_1_to_2",
        "rho_mask/entropy_from_2",
    ]
    assert all(row[name] == 0.0 for name in bins)
    assert row["low_entropy_share"] == 1 / 7
    for below, part in zip(bins, parts, strict=False):
        hits = {name: v for name, v in part.to_row().items() if name in bins and v is not None}
        assert hits == {below: 1.0}


def test_a_missing_entropy_is_counted_and_never_a_zero():
    columns = columns_of([0.0, 0.0, 0.0], [1.0] * 3, [math.nan, 1.0, 0.0])
    row = report(columns, correction=NO_MASK).to_row()
    assert row["missing_entropies"] == 1.0
    assert row["behavior_entropy"] == 0.5
    assert row["low_entropy_share"] == 0.5
    assert row["rho_mask/entropy_below_0.01"] == 0.0
    row = report(columns_of([0.0], [1.0]), correction=NO_MASK).to_row()
    assert "behavior_entropy" not in row


def test_an_impossible_token_is_rejected_counted_and_spoils_no_mean():
    columns = TokenColumns(
        policy_logprobs=torch.tensor([-1.0, -1.0]),
        behavior_logprobs=torch.tensor([-math.inf, -1.0]),
        advantages=torch.tensor([1.0, 1.0]),
        loss_mask=torch.ones(2, dtype=torch.bool),
        behavior_entropies=torch.tensor([1.0, 1.0]),
    )
    row = report(columns).to_row()
    assert row["nonfinite_log_ratios"] == 1.0
    assert row["rho_mask"] == 0.5
    assert row["rho_mask/advantage_pos_log_ratio_pos"] == 1.0
    assert (row["kl_k1"], row["kl_k3"], row["ratio_deviation"]) == (0.0, 0.0, 0.0)
    assert row["nonfinite"] == 0.0


@pytest.mark.parametrize(("delta", "hits"), [(20.0, 0.0), (-20.0, 0.0), (20.5, 1.0), (-99.0, 1.0)])
def test_clamped_log_ratios_are_counted_and_stay_finite(delta, hits):
    row = report(columns_of([delta, 0.0], [1.0, 1.0], [1.0, 1.0])).to_row()
    assert row["clamped_log_ratios"] == hits
    assert row["nonfinite"] == 0.0
    assert row["kl_k3"] >= -1e-12


def test_k1_reads_the_raw_log_ratio_and_the_rest_the_clamped_one():
    row = report(columns_of([25.0], [1.0], [1.0])).to_row()
    assert row["kl_k1"] == -25.0
    assert row["kl_k3"] == pytest.approx(math.exp(20) - 21, rel=1e-12)
    assert row["ratio_deviation"] == pytest.approx(math.exp(20) - 1, rel=1e-12)


def test_no_eligible_token_gives_no_numbers_and_no_error():
    columns = columns_of([0.5], [1.0], [1.0], versions=[3], mask=[False])
    row = report(columns, policy_entropies=torch.tensor([1.0])).to_row()
    assert row["eligible_tokens"] == 0.0
    counts = ("eligible_tokens", "nonfinite", "nonfinite_log_ratios", "clamped_log_ratios")
    counts = (*counts, "missing_entropies")
    assert {name for name, value in row.items() if value is not None} == set(counts)


def test_diagnostics_change_nothing_and_carry_no_gradient():
    columns = columns_of([0.1, -0.3], [1.0, -1.0], [1.0, 0.5], versions=[1, 2])
    before = [t.detach().clone() for t in (columns.policy_logprobs, columns.advantages)]
    report(columns, policy_entropies=torch.tensor([1.0, 1.0], requires_grad=True))
    assert torch.equal(columns.policy_logprobs.detach(), before[0])
    assert torch.equal(columns.advantages, before[1])
    assert columns.policy_logprobs.grad is None


def test_a_token_of_the_future_is_an_error_check_65():
    columns = columns_of([0.0, 0.0], [1.0, 1.0], [1.0, 1.0], versions=[5, 6])
    with pytest.raises(StalenessError, match=r"version 6 is newer than .* version 5"):
        report(columns, target_version=5)
    assert report(columns, target_version=6).to_row()["lag_max"] == 1.0


token = st.tuples(
    st.floats(-3, 3, width=32),
    st.sampled_from([-1.0, 0.0, 0.5]),
    st.floats(0, 4, width=32),
    st.integers(0, 5),
)


@FEW
@given(st.lists(token, min_size=1, max_size=30), st.data())
def test_the_cut_into_micro_batches_changes_nothing_check_130(tokens, data):
    def of(some):
        if not some:
            return Metrics()
        delta, advantages, entropies, versions = (
            list(values) for values in zip(*some, strict=True)
        )
        return report(columns_of(delta, advantages, entropies, versions=versions))

    cut = data.draw(st.integers(0, len(tokens)))
    parts = of(tokens[:cut])
    parts.merge(of(tokens[cut:]))
    whole = of(tokens).to_row()
    assert parts.to_row() == {
        name: value if value is None else pytest.approx(value, rel=1e-9, abs=1e-9)
        for name, value in whole.items()
    }


@FEW
@given(st.lists(token, min_size=1, max_size=30))
def test_bounds_of_the_estimators(tokens):
    delta, advantages, entropies, _ = (list(values) for values in zip(*tokens, strict=True))
    row = report(columns_of(delta, advantages, entropies)).to_row()
    assert row["kl_k3"] >= -1e-12
    assert 1 / len(tokens) - 1e-9 <= row["effective_sample_size"] <= 1.0 + 1e-9
    assert 0.0 <= row["rho_mask"] <= 1.0
    shares = [v for name, v in row.items() if name.startswith("rho_mask/") and v is not None]
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert row["clip_fraction"] <= 1.0 - row["rho_mask"] + 1e-9


# Trajectories


def trajectory(
    *versions, group=0, index=0, outcome=1.0, reward=None, status="ok", rewards=None
) -> Trajectory:
    n = len(versions)
    drawn = Segment.drawn([1] * n, [-0.5] * n, [0.7] * n, versions)
    return Trajectory(
        id=RolloutId(0, group, index),
        task="t",
        problem=0,
        segments=(Segment.join([Segment.context([0, 0]), drawn]),),
        turns=(),
        sampling=SamplingSettings(),
        status=status,
        dispatch_version=0,
        outcome=outcome,
        rewards=rewards or {},
        reward=outcome if reward is None else reward,
    )


def describe(trajectories, *, target_version=9, max_staleness=4):
    return trajectory_diagnostics(
        trajectories, target_version=target_version, max_staleness=max_staleness
    ).to_row()


def test_staleness_by_hand():
    row = describe([trajectory(5, 5, 6), trajectory(9), trajectory(7, 8, 9)])
    assert (row["intra_mean"], row["intra_p50"], row["intra_max"]) == (1.0, 1.0, 2.0)
    assert (row["inter_mean"], row["inter_p50"], row["inter_max"]) == (1.0, 0.0, 3.0)
    assert (row["staleness_mean"], row["staleness_max"]) == (2.0, 4.0)
    assert row["staleness_allowed"] == 4.0


def test_staleness_is_that_of_what_is_trained():
    failed = trajectory(1, outcome=None, status="engine_error")
    row = describe([trajectory(8), failed, trajectory()])
    assert (row["staleness_max"], row["inter_max"], row["intra_max"]) == (1.0, 1.0, 0.0)


def test_a_trajectory_of_the_future_is_an_error_check_65():
    with pytest.raises(StalenessError, match=r"group 3 member 1 .* version 7.* version 6"):
        describe([trajectory(5), trajectory(5, 7, group=3, index=1)], target_version=6)


def test_unscored_is_counted_and_not_a_zero_check_140():
    trajectories = [
        trajectory(1, outcome=1.0),
        trajectory(1, outcome=None, status="grader_error"),
        trajectory(1, outcome=0.0),
    ]
    row = describe(trajectories)
    assert (row["outcome_mean"], row["reward_mean"]) == (0.5, 0.5)
    assert (row["num_trajectories"], row["num_unscored"]) == (3.0, 1.0)


def test_nothing_scored_has_no_mean_check_140():
    row = describe([trajectory(1, outcome=None, status="env_error")])
    assert row["outcome_mean"] is None
    assert row["reward_mean"] is None
    assert row["num_groups"] == 0.0


def test_the_reported_reward_is_the_trained_one_check_139():
    # components (1, 1) under weights (1, 0.2)
    row = describe([trajectory(1, outcome=1.0, reward=1.2, rewards={"a": 1.0, "b": 1.0})])
    assert row["reward_mean"] == 1.2
    assert row["outcome_mean"] == 1.0


def test_lengths_count_sampled_tokens_only_check_76():
    row = describe([trajectory(1, 1, 1), trajectory(1, outcome=None, status="timeout")])
    assert (row["length_mean"], row["length_max"]) == (2.0, 3.0)
    assert row["length_trained_mean"] == 3.0
    assert row["length_failed_mean"] == 1.0


def test_zero_variance_is_read_from_raw_outcomes_checks_14_and_25():
    trajectories = [
        trajectory(1, group=0, outcome=1.0, reward=1.0),
        trajectory(1, group=0, outcome=1.0, reward=0.8),
        trajectory(1, group=1, outcome=0.0),
        trajectory(1, group=1, outcome=0.0),
        trajectory(1, group=2, outcome=1.0),
        trajectory(1, group=2, outcome=0.0),
        trajectory(1, group=3, outcome=None, status="env_error"),
    ]
    row = describe(trajectories)
    assert (row["num_groups"], row["num_zero_variance_groups"]) == (3.0, 2.0)


def test_every_status_has_its_count():
    trajectories = [trajectory(1), trajectory(1, status="truncated"), trajectory(1)]
    row = describe(trajectories)
    statuses = {name.removeprefix("status/"): v for name, v in row.items() if "status/" in name}
    assert statuses == {
        "ok": 2.0,
        "truncated": 1.0,
        "timeout": 0.0,
        "env_error": 0.0,
        "engine_error": 0.0,
        "grader_error": 0.0,
        "cancelled": 0.0,
        "leftover": 0.0,
    }


def test_a_step_without_trajectories_has_no_numbers_and_no_error():
    row = describe([])
    assert (row["num_trajectories"], row["reward_mean"], row["intra_max"]) == (0.0, None, None)


@FEW
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6),
    st.integers(0, 6),
)
def test_whole_groups_merge_to_the_step(versions, cut):
    trajectories = [trajectory(*v, group=i, outcome=float(i % 2)) for i, v in enumerate(versions)]
    parts = trajectory_diagnostics(trajectories[:cut], target_version=9, max_staleness=4)
    parts.merge(trajectory_diagnostics(trajectories[cut:], target_version=9, max_staleness=4))
    assert parts.to_row() == pytest.approx(describe(trajectories))
