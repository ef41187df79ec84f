"""Trajectories become padded micro-batches and per-token results find their way back."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.batch import Batch, make_batches, scatter_back, turn_ids
from estr.corrections import TokenColumns, build_correction
from estr.corrections.base import concatenate
from estr.errors import NumericsError
from estr.losses import policy_loss
from estr.token_results import token_columns
from estr.types import COLUMNS, NOT_SAMPLED, RolloutId, SamplingSettings, Segment, Trajectory

FEW = settings(max_examples=60, deadline=None)


def segment(mask: str, *, version: int = 3, first: int = 1, gini: bool = True) -> Segment:
    """One token per letter: "." read, "s" sampled. The values are told apart by position."""
    parts = []
    for t, letter in enumerate(mask):
        if letter == ".":
            parts.append(Segment.context([first + t]))
        else:
            recorded = [0.1 * (first + t)]
            parts.append(
                Segment.drawn(
                    [first + t],
                    [-x for x in recorded],
                    recorded,
                    [version],
                    gini=recorded if gini else None,
                )
            )
    return Segment.join(parts)


def trajectory(*segments: Segment, group: int = 0, index: int = 0) -> Trajectory:
    return Trajectory(
        id=RolloutId(0, group, index),
        task="t",
        problem=0,
        segments=segments,
        turns=(),
        sampling=SamplingSettings(),
        status="ok",
        dispatch_version=0,
        outcome=1.0,
        reward=1.0,
    )


def batches_of(
    trajectories, advantages=None, groups=None, *, aggregation="batch", token_budget=1000, **options
) -> list[Batch]:
    return make_batches(
        trajectories,
        [1.0] * len(trajectories) if advantages is None else advantages,
        [0] * len(trajectories) if groups is None else groups,
        aggregation=aggregation,
        token_budget=token_budget,
        **options,
    )


# One batch, entry by entry


def test_columns_entry_by_entry():
    one = trajectory(segment(".s", version=4, first=11))
    two = trajectory(segment(".ss.s", version=7, first=21))
    (batch,) = batches_of([one, two], [0.5, -2.0], pad_token_id=9)
    nan = math.nan
    assert batch.rows == ((1, 0), (0, 0))
    assert batch.token_ids.tolist() == [[21, 22, 23, 24, 25], [11, 12, 9, 9, 9]]
    assert batch.attention_mask.tolist() == [[True] * 5, [True, True, False, False, False]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 0, 1], [0, 1, 0, 0, 0]]
    assert batch.versions.tolist() == [[-1, 7, 7, -1, 7], [-1, 4, -1, -1, -1]]
    recorded = np.array([[nan, 2.2, 2.3, nan, 2.5], [nan, 1.2, nan, nan, nan]], dtype=np.float32)
    np.testing.assert_array_equal(batch.behavior_logprobs, -recorded)
    np.testing.assert_array_equal(batch.behavior_entropies, recorded)
    np.testing.assert_array_equal(batch.behavior_gini, recorded)
    assert batch.advantages.tolist() == [[-2.0] * 5, [0.5] * 5]
    assert batch.sequence_ids.tolist() == [[1] * 5, [0] * 5]
    assert batch.denominators == 4.0
    assert (batch.num_sampled_tokens, batch.num_groups) == (4, 1)


def test_a_turn_is_a_run_of_sampled_tokens():
    one = trajectory(segment(".s..ss"), segment(".s", version=2))
    two = trajectory(segment(".ss.s"))
    (batch,) = batches_of([one, two])
    turns, mask = turn_ids(batch.loss_mask), batch.loss_mask
    assert turns.dtype == torch.int64
    assert [turns[i][mask[i]].tolist() for i in range(3)] == [[1, 2, 2], [3, 3, 4], [5]]
    columns = token_columns(batch, batch.behavior_logprobs[mask], None)
    assert columns.turn_ids.tolist() == [1, 2, 2, 3, 3, 4, 5]


def test_dtypes_follow_the_definition_of_the_columns():
    (batch,) = batches_of([trajectory(segment(".s"))])
    assert batch.token_ids.dtype == torch.int64
    for column in COLUMNS:
        name = "loss_mask" if column.name == "sampled" else column.name
        if name != "token_ids":
            tensor = getattr(batch, name)
            assert tensor.numpy().dtype == column.dtype, name
    assert batch.advantages.dtype == torch.float32
    assert batch.sequence_ids.dtype == torch.int64
    assert not any(
        isinstance(t, torch.Tensor) and t.requires_grad
        for t in (getattr(batch, f.name) for f in dataclasses.fields(batch))
    )


def test_segments_are_rows_that_share_one_advantage_under_their_own_masks_check_28():
    steps = trajectory(segment(".ss."), segment("...s"))
    (batch,) = batches_of([steps], [0.5])
    seen = torch.where(batch.loss_mask, batch.advantages, torch.zeros(()))
    assert seen.tolist() == [[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 0.5]]
    assert batch.rows == ((0, 0), (0, 1))
    assert batch.sequence_ids.tolist() == [[0] * 4, [0] * 4]


def test_tool_output_is_neither_in_the_mask_nor_in_the_count_checks_18_and_76():
    (batch,) = batches_of([trajectory(segment(".ssss......"))])
    assert batch.denominators == 4.0
    ones = torch.ones(batch.loss_mask.shape)
    assert float(ones[batch.loss_mask].sum()) / batch.denominators == 1.0
    (batch,) = batches_of([trajectory(segment(".ss...s"))])
    losses = torch.tensor([[9.0, 1, 1, 9, 9, 9, 1]])
    assert float(losses[batch.loss_mask].sum()) / batch.denominators == 1.0


# Denominators


def test_batch_aggregation_counts_every_sampled_token_once_check_16():
    trajectories = [trajectory(segment(".s")), trajectory(segment(".sss"))]
    for budget in (1, 4, 100):
        batches = batches_of(trajectories, groups=[0, 1], token_budget=budget)
        assert [b.denominators for b in batches] == [4.0] * len(batches)
        losses = {0: 1.0, 1: 3.0}
        total = sum(
            losses[row.trajectory] * int(b.loss_mask[i].sum()) / b.denominators
            for b in batches
            for i, row in enumerate(b.rows)
        )
        assert total == 2.5


@pytest.mark.parametrize(("aggregation", "value"), [("group", 0.5), ("batch", 0.25)])
def test_the_two_aggregations_on_groups_with_losses_1_and_000(aggregation, value):
    trajectories = [trajectory(segment(".s")), trajectory(segment(".sss"))]
    for budget in (1, 100):
        batches = batches_of(
            trajectories, groups=[5, 9], aggregation=aggregation, token_budget=budget
        )
        total = 0.0
        for batch in batches:
            losses = (batch.sequence_ids == 0).float() / batch.denominators
            total += float(losses[batch.loss_mask].sum())
        assert total == value


def test_group_denominators_are_groups_times_the_tokens_of_the_group():
    trajectories = [trajectory(segment(mask)) for mask in (".s", ".sss", ".ssssss", ".ss")]
    (batch,) = batches_of(trajectories, groups=[1, 2, 1, 2], aggregation="group")
    assert batch.num_groups == 2
    assert [row.trajectory for row in batch.rows] == [2, 1, 3, 0]
    assert batch.denominators.tolist() == [[14.0], [10.0], [10.0], [14.0]]


@pytest.mark.parametrize("aggregation", ["batch", "group"])
def test_zero_variance_groups_stay_in_the_denominator(aggregation):
    trajectories = [trajectory(segment(".ss")), trajectory(segment(".ss"))]
    (batch,) = batches_of(trajectories, [0.0, 1.0], [0, 1], aggregation=aggregation)
    assert (batch.num_sampled_tokens, batch.num_groups) == (4, 2)
    assert torch.as_tensor(batch.denominators).unique().tolist() == [4.0]
    assert int(batch.loss_mask.sum()) == 4


def test_unscored_trajectories_leave_loss_and_counts():
    trajectories = [trajectory(segment(".ss")), trajectory(segment(".ssss")), trajectory()]
    (batch,) = batches_of(trajectories, [1.0, None, None], [0, 1, 2], aggregation="group")
    assert batch.rows == ((0, 0),)
    assert (batch.num_sampled_tokens, batch.num_groups) == (2, 1)
    assert batch.denominators.tolist() == [[2.0]]


def test_a_group_in_which_nothing_was_sampled_is_not_counted():
    trajectories = [trajectory(segment(".ss")), trajectory(segment("..")), trajectory()]
    (batch,) = batches_of(trajectories, groups=[0, 1, 2], aggregation="group")
    assert (batch.num_groups, batch.rows) == (1, ((0, 0),))


def test_nothing_to_learn_gives_no_batch():
    assert batches_of([trajectory(segment(".s"))], [None]) == []
    assert batches_of([trajectory(segment(".."))], [1.0]) == []


@pytest.mark.parametrize("aggregation", ["batch", "group"])
def test_every_tensor_is_on_the_device_that_was_asked_for(aggregation):
    (batch,) = batches_of([trajectory(segment(".s"))], aggregation=aggregation, device="meta")
    tensors = [getattr(batch, f.name) for f in dataclasses.fields(batch)]
    tensors = [value for value in tensors if isinstance(value, torch.Tensor)]
    assert len(tensors) == 9 + (aggregation == "group")
    assert {tensor.device.type for tensor in tensors} == {"meta"}


# Micro-batches


def test_like_lengths_share_a_micro_batch_longest_first():
    lengths = [3, 9, 4, 8, 2]
    trajectories = [trajectory(segment("." + "s" * (n - 1))) for n in lengths]
    batches = batches_of(trajectories, token_budget=18)
    assert [b.token_ids.shape for b in batches] == [(2, 9), (3, 4)]
    assert [[row.trajectory for row in b.rows] for b in batches] == [[1, 3], [2, 0, 4]]


def test_a_row_longer_than_the_budget_forms_its_own_micro_batch():
    trajectories = [trajectory(segment("." + "s" * n)) for n in (1, 9, 9, 1)]
    batches = batches_of(trajectories, token_budget=5)
    assert [b.token_ids.shape for b in batches] == [(1, 10), (1, 10), (2, 2)]


segments = st.text(alphabet=".s", max_size=6).map(lambda mask: segment("." + mask))
trajectory_lists = st.lists(
    st.lists(segments, max_size=3).map(lambda parts: trajectory(*parts)), min_size=1, max_size=8
)


def advantages_and_groups(data, number):
    advantage = st.none() | st.floats(-2, 2, width=32)
    return (
        data.draw(st.lists(advantage, min_size=number, max_size=number)),
        data.draw(st.lists(st.integers(0, 3), min_size=number, max_size=number)),
    )


@FEW
@given(trajectory_lists, st.integers(1, 60), st.sampled_from(["batch", "group"]), st.data())
def test_every_cut_holds_each_scored_token_once_under_the_same_denominator(
    trajectories, budget, aggregation, data
):
    advantages, groups = advantages_and_groups(data, len(trajectories))
    batches = batches_of(
        trajectories, advantages, groups, aggregation=aggregation, token_budget=budget
    )
    expected = Counter()
    for i, whole in enumerate(trajectories):
        for s, part in enumerate(whole.segments):
            if advantages[i] is not None and part.sampled.any():
                for t in np.flatnonzero(part.sampled):
                    expected[i, s, int(t)] += 1
    found = Counter()
    for batch in batches:
        rows, length = batch.token_ids.shape
        assert rows == 1 or rows * length <= budget
        assert batch.num_sampled_tokens == expected.total()
        for i, row in enumerate(batch.rows):
            for t in batch.loss_mask[i].nonzero().flatten().tolist():
                found[row.trajectory, row.segment, t] += 1
            scored = trajectories[row.trajectory]
            assert batch.advantages[i, 0] == advantages[row.trajectory]
            of_group = sum(
                whole.num_sampled_tokens
                for j, whole in enumerate(trajectories)
                if groups[j] == groups[row.trajectory] and advantages[j] is not None
            )
            if aggregation == "group":
                assert batch.denominators[i] == batch.num_groups * of_group
            else:
                assert batch.denominators == expected.total()
            ids = scored.segments[row.segment].token_ids
            assert batch.token_ids[i, : len(ids)].tolist() == ids.tolist()
            assert int(batch.attention_mask[i].sum()) == len(ids)
    assert found == expected


@FEW
@given(trajectory_lists, st.integers(1, 60), st.data())
def test_the_same_input_gives_the_same_micro_batches(trajectories, budget, data):
    advantages, groups = advantages_and_groups(data, len(trajectories))
    once, again = (
        batches_of(trajectories, advantages, groups, token_budget=budget) for _ in range(2)
    )
    assert [b.rows for b in once] == [b.rows for b in again]
    for a, b in zip(once, again, strict=True):
        for f in dataclasses.fields(Batch):
            left, right = getattr(a, f.name), getattr(b, f.name)
            if isinstance(left, torch.Tensor):
                np.testing.assert_array_equal(left.numpy(), right.numpy())
            else:
                assert left == right


def loss_and_gradient(batches) -> tuple[float, float]:
    """The ESTR loss of a one-parameter policy that moves each token by its own amount."""
    theta = torch.tensor(0.03, requires_grad=True)
    correction = build_correction([{"name": "estr", "tau": 0.02}])
    total = 0.0
    for batch in batches:
        policy = torch.nan_to_num(batch.behavior_logprobs) + theta * (batch.token_ids % 5)
        columns = TokenColumns(
            policy_logprobs=policy,
            behavior_logprobs=batch.behavior_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            behavior_entropies=batch.behavior_entropies,
        )
        result = policy_loss(columns, correction, denominators=batch.denominators)
        result.loss.backward()
        total += float(result.loss.detach())
    return total, 0.0 if theta.grad is None else float(theta.grad)


@FEW
@given(trajectory_lists, st.sampled_from(["batch", "group"]), st.data())
def test_split_order_and_padding_change_neither_loss_nor_gradient_check_8(
    trajectories, aggregation, data
):
    advantages, groups = advantages_and_groups(data, len(trajectories))
    reference = loss_and_gradient(
        batches_of(trajectories, advantages, groups, aggregation=aggregation)
    )
    order = data.draw(st.permutations(range(len(trajectories))))
    permuted = ([values[i] for i in order] for values in (trajectories, advantages, groups))
    other = batches_of(
        *permuted,
        aggregation=aggregation,
        token_budget=data.draw(st.integers(1, 60)),
        pad_token_id=data.draw(st.integers(0, 9)),
    )
    assert loss_and_gradient(other) == pytest.approx(reference, abs=1e-6)


def test_gini_is_there_for_the_whole_step_or_not_at_all():
    with_gini = trajectory(segment(".sss"))
    without = trajectory(segment(".s", gini=False))
    for budget in (1, 100):
        assert all(
            b.behavior_gini is None for b in batches_of([with_gini, without], token_budget=budget)
        )
        assert all(
            b.behavior_gini is not None
            for b in batches_of([with_gini, without], [1.0, None], token_budget=budget)
        )


# Back again


@FEW
@given(trajectory_lists, st.integers(1, 60), st.booleans(), st.data())
def test_results_return_to_their_own_tokens(trajectories, budget, flat, data):
    advantages, groups = advantages_and_groups(data, len(trajectories))
    batches = batches_of(trajectories, advantages, groups, token_budget=budget)
    for name in ("behavior_logprobs", "versions", "loss_mask"):
        column = "sampled" if name == "loss_mask" else name
        tensors = [getattr(b, name)[b.loss_mask] if flat else getattr(b, name) for b in batches]
        arrays = scatter_back(batches, tensors, trajectories)
        assert len(arrays) == len(trajectories)
        for whole, advantage, array in zip(trajectories, advantages, arrays, strict=True):
            if not batches:
                assert np.isnan(array).all()
                continue
            recorded = getattr(Segment.join(whole.segments), column)
            fill = {"behavior_logprobs": np.nan, "versions": NOT_SAMPLED, "loss_mask": False}[name]
            expected = np.full_like(recorded, fill) if advantage is None else recorded
            np.testing.assert_array_equal(array, expected)


def test_values_outside_the_loss_mask_never_come_back():
    whole = trajectory(segment(".s.s"))
    (batch,) = batches_of([whole])
    (array,) = scatter_back([batch], [torch.full((1, 4), 7.0)], [whole])
    np.testing.assert_array_equal(array, [math.nan, 7.0, math.nan, 7.0])


def test_a_result_with_a_gradient_comes_back_as_plain_numbers():
    whole = trajectory(segment(".s"))
    (batch,) = batches_of([whole])
    (array,) = scatter_back([batch], [torch.ones(1, 2, requires_grad=True)], [whole])
    assert array.tolist()[1] == 1.0


@pytest.mark.parametrize("shape", [(1, 3), (2,), (3, 1), (1, 4, 1), ()])
def test_a_result_of_another_shape_is_refused(shape):
    whole = trajectory(segment(".sss"))
    (batch,) = batches_of([whole])
    with pytest.raises(ValueError, match=r"expected \(1, 4\), or \(3,\)"):
        scatter_back([batch], [torch.zeros(shape)], [whole])


def test_a_missing_result_is_refused():
    whole = trajectory(segment(".s"))
    with pytest.raises(ValueError, match="1 batches but 0 tensors"):
        scatter_back(batches_of([whole]), [], [whole])


# Refusals


def test_an_empty_step_is_refused():
    with pytest.raises(ValueError, match="no trajectories"):
        batches_of([])


@pytest.mark.parametrize(("advantages", "groups"), [([], [0]), ([1.0], []), ([1.0, 1.0], [0])])
def test_lengths_that_differ_are_refused(advantages, groups):
    with pytest.raises(ValueError, match="every trajectory needs one of each"):
        batches_of([trajectory(segment(".s"))], advantages, groups)


@pytest.mark.parametrize("advantage", [math.nan, math.inf, -math.inf])
def test_an_advantage_that_is_not_finite_is_refused_by_name(advantage):
    trajectories = [trajectory(segment(".s"), group=4, index=i) for i in range(2)]
    with pytest.raises(NumericsError, match=r"group 4 member 1 attempt 0 is (nan|-?inf)"):
        batches_of(trajectories, [0.0, advantage])


def test_a_first_token_without_history_is_refused_by_name():
    headless = trajectory(segment(".s"), segment("s."), group=2)
    with pytest.raises(ValueError, match=r"segment 1 of group 2 .* begins with a sampled token"):
        batches_of([headless])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "sequence"}, "'sequence' is unknown; known: batch, group"),
        ({"token_budget": 0}, "token_budget must be at least 1, not 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        batches_of([trajectory(segment(".s"))], **options)


# Whole trajectories in one micro-batch


@FEW
@given(trajectory_lists, st.integers(1, 60), st.data())
def test_a_whole_trajectory_stays_in_one_micro_batch_when_asked_for(trajectories, budget, data):
    advantages, groups = advantages_and_groups(data, len(trajectories))
    cut = {"token_budget": budget, "aggregation": "group"}
    loose = batches_of(trajectories, advantages, groups, **cut)
    whole = batches_of(trajectories, advantages, groups, whole_trajectories=True, **cut)
    homes = Counter(t for b in whole for t in {row.trajectory for row in b.rows})
    assert set(homes.values()) <= {1}
    rows = [sorted(row for b in batches for row in b.rows) for batches in (loose, whole)]
    assert rows[0] == rows[1]
    for batch in whole:
        fits = batch.token_ids.numel() <= budget
        assert fits or len({row.trajectory for row in batch.rows}) == 1
    assert loss_and_gradient(whole) == pytest.approx(loss_and_gradient(loose), abs=1e-6)


def test_turns_of_several_micro_batches_stay_apart() -> None:
    def part(*turns: int) -> TokenColumns:
        n = len(turns)
        columns = [torch.ones(n) for _ in range(3)]
        mask = torch.ones(n, dtype=torch.bool)
        return TokenColumns(*columns, mask, turn_ids=torch.tensor(turns, dtype=torch.int64))

    joined = concatenate([part(1, 1, 2), part(), part(1, 2, 2), part(1)])
    assert joined.turn_ids is not None
    assert joined.turn_ids.tolist() == [1, 1, 2, 3, 4, 4, 5]
