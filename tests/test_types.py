"""The record of a rollout: columns agree, segments join, staleness counts sampled tokens only."""

import dataclasses
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.types import COLUMNS, NOT_SAMPLED, RolloutId, SamplingSettings, Segment, Trajectory

FEW = settings(max_examples=50, deadline=None)


def trajectory(*segments: Segment) -> Trajectory:
    return Trajectory(
        id=RolloutId(0, 0, 0),
        task="t",
        problem=0,
        segments=segments,
        turns=(),
        sampling=SamplingSettings(),
        status="ok",
        dispatch_version=0,
    )


def drawn(*versions: int) -> Segment:
    n = len(versions)
    return Segment.drawn(range(n), [-0.5] * n, [0.7] * n, versions, gini=[0.4] * n)


def test_every_column_is_a_field_of_segment_in_the_order_of_the_definition():
    names = [f.name for f in dataclasses.fields(Segment)]
    assert names == [*(c.name for c in COLUMNS), "finish_reason"]


def test_context_holds_nothing_but_ids():
    segment = Segment.context([7, 8])
    assert segment.token_ids.tolist() == [7, 8]
    assert segment.sampled.tolist() == [False, False]
    assert segment.versions.tolist() == [NOT_SAMPLED, NOT_SAMPLED]
    for name in ("behavior_logprobs", "behavior_entropies", "behavior_gini"):
        assert np.isnan(getattr(segment, name)).all()


def test_drawn_keeps_what_was_recorded_in_the_column_types():
    segment = Segment.drawn([3], [-1.5], [0.25], [9], gini=[0.125], finish_reason="stop")
    assert segment.sampled.tolist() == [True]
    assert segment.behavior_logprobs.tolist() == [-1.5]
    assert segment.behavior_entropies.tolist() == [0.25]
    assert segment.behavior_gini is not None
    assert segment.behavior_gini.tolist() == [0.125]
    assert segment.finish_reason == "stop"
    for column in COLUMNS:
        assert getattr(segment, column.name).dtype == column.dtype


@pytest.mark.parametrize("column", [c.name for c in COLUMNS if c.name != "token_ids"])
def test_a_column_of_another_length_is_refused_by_name(column):
    whole = drawn(1, 1, 2)
    with pytest.raises(ValueError, match=column):
        dataclasses.replace(whole, **{column: getattr(whole, column)[:2]})


@pytest.mark.parametrize("column", [c.name for c in COLUMNS])
def test_a_column_of_another_type_is_refused_by_name(column):
    whole = drawn(1, 1)
    with pytest.raises(ValueError, match=column):
        dataclasses.replace(whole, **{column: getattr(whole, column).astype(np.complex64)})


@pytest.mark.parametrize("versions", [[NOT_SAMPLED], [-2], [3, NOT_SAMPLED]])
def test_a_sampled_token_without_a_version_is_refused(versions):
    with pytest.raises(ValueError, match="version"):
        drawn(*versions)


@pytest.mark.parametrize("version", [0, 5, -2])
def test_context_with_a_version_is_refused(version):
    with pytest.raises(ValueError, match="version"):
        dataclasses.replace(Segment.context([1]), versions=np.array([version], dtype=np.int32))


def test_join_extends_every_column_check_63():
    joined = Segment.join([Segment.context([5, 6, 7]), drawn(4, 4)])
    assert joined.sampled.tolist() == [False, False, False, True, True]
    assert joined.versions.tolist() == [-1, -1, -1, 4, 4]
    for column in COLUMNS:
        assert getattr(joined, column.name).shape == (5,)


def test_join_keeps_gini_unless_a_sampled_part_lacks_it():
    bare = Segment.drawn([1], [-0.5], [0.7], [3])
    assert Segment.join([drawn(1), bare]).behavior_gini is None
    context_without = dataclasses.replace(Segment.context([1]), behavior_gini=None)
    gini = Segment.join([context_without, drawn(1)]).behavior_gini
    assert gini is not None
    np.testing.assert_array_equal(gini, np.array([np.nan, 0.4], dtype=np.float32))


def test_join_of_nothing_is_an_empty_segment():
    assert len(Segment.join([])) == 0


@FEW
@given(st.lists(st.lists(st.integers(NOT_SAMPLED, 9), max_size=5), max_size=5))
def test_join_is_concatenation_however_the_parts_are_cut(parts):
    def segment(version):
        return Segment.context([0]) if version == NOT_SAMPLED else drawn(version)

    nested = Segment.join([Segment.join([segment(v) for v in part]) for part in parts])
    flat = Segment.join([segment(v) for part in parts for v in part])
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(nested, column.name), getattr(flat, column.name))


def test_placeholder_versions_stay_out_of_every_statistic_check_55():
    whole = trajectory(Segment.join([Segment.context([1, 2]), drawn(5, 5, 6)]))
    assert (whole.first_version, whole.last_version, whole.intra) == (5, 6, 1)
    assert whole.version_runs == [(5, 2), (6, 1)]
    assert whole.inter(8) == 2
    assert (whole.num_tokens, whole.num_sampled_tokens) == (5, 3)


@FEW
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 20), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_staleness_does_not_see_what_was_not_sampled_check_55(turns):
    with_context = trajectory(
        *(Segment.join([Segment.context([0] * n), drawn(*versions)]) for n, versions in turns)
    )
    versions = [v for _, turn in turns for v in turn]
    assert with_context.first_version == min(versions)
    assert with_context.last_version == max(versions)
    assert with_context.intra == max(versions) - min(versions)
    assert with_context.num_sampled_tokens == len(versions)
    runs = with_context.version_runs
    assert [v for v, n in runs for _ in range(n)] == versions
    assert all(a[0] != b[0] for a, b in pairwise(runs))


def test_a_trajectory_in_which_nothing_was_sampled_has_no_versions():
    for empty in (trajectory(), trajectory(Segment.context([1, 2]))):
        assert empty.first_version is None
        assert empty.last_version is None
        assert empty.version_runs == []
        assert (empty.intra, empty.inter(7), empty.num_sampled_tokens) == (0, 0, 0)


def test_none_and_zero_differ():
    unscored = trajectory()
    assert unscored.reward is None
    assert unscored.outcome is None
    assert dataclasses.replace(unscored, reward=0.0).reward == 0.0


def test_a_trajectory_crosses_a_process_border_whole():
    whole = trajectory(Segment.join([Segment.context([1]), drawn(2, 3)]))
    back = pickle.loads(pickle.dumps(whole))
    assert back.id == whole.id
    for column in COLUMNS:
        np.testing.assert_array_equal(
            getattr(back.segments[0], column.name), getattr(whole.segments[0], column.name)
        )


def test_rollout_ids_are_told_apart_by_every_field_and_sort():
    ids = [
        RolloutId(run, group, index, attempt)
        for run in (0, 1)
        for group in (0, 1)
        for index in (0, 1)
        for attempt in (0, 1)
    ]
    assert len(set(ids)) == 16
    assert sorted(ids, reverse=True) == ids[::-1]
