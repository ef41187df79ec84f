"""A metric carries its reducer: however it is cut and merged, the row is that of the whole."""

import json
import math
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.errors import DataError
from estr.metrics import Metrics, MetricsWriter, read_metrics, supersede_after

FEW = settings(max_examples=60, deadline=None)
numbers = st.floats(-1e6, 1e6)


def merged(*parts: Metrics) -> Metrics:
    whole = Metrics()
    for part in parts:
        whole.merge(part)
    return whole


def mean_of(*pairs) -> float | None:
    """The mean metric whose parts are (total, count), one part each."""
    parts = []
    for total, count in pairs:
        part = Metrics()
        part.add_mean("x", total, count)
        parts.append(part)
    return merged(*parts).to_row()["x"]


# Reducers


def test_a_mean_is_never_a_mean_of_means_check_130():
    assert mean_of((1.0 * 2, 2), (3.0 * 6, 6)) == 2.5


def test_no_micro_batch_overwrites_another_check_132():
    assert mean_of((0.2 * 2, 2), (0.4 * 2, 2), (0.0 * 4, 4)) == pytest.approx(0.15, abs=1e-12)


def test_a_mean_of_nothing_is_none_and_not_zero():
    assert mean_of((0.0, 0)) is None
    assert mean_of((0.0, 0), (3.0, 1)) == 3.0
    assert mean_of((0.0, 2)) == 0.0


def test_sum_max_min():
    parts = []
    for value in (2.0, -5.0, 3.0):
        part = Metrics()
        part.add_sum("sum", value)
        part.add_max("max", value)
        part.add_min("min", value)
        parts.append(part)
    row = merged(*parts).to_row()
    assert (row["sum"], row["max"], row["min"]) == (0.0, 3.0, -5.0)


def test_variance_and_effective_sample_size_against_numpy():
    values = np.array([0.5, 1.0, 1.5, 4.0])
    parts = []
    for cut in (values[:1], values[1:]):
        part = Metrics()
        part.add_variance("var", cut.sum(), (cut**2).sum(), len(cut))
        part.add_ess("ess", cut.sum(), (cut**2).sum(), len(cut))
        parts.append(part)
    row = merged(*parts).to_row()
    assert row["var"] == pytest.approx(values.var(), rel=1e-12)
    assert row["ess"] == pytest.approx(49 / (4 * 19.5), rel=1e-12)


def test_equal_weights_are_all_effective_and_no_weight_has_no_share():
    whole = Metrics()
    whole.add_ess("equal", 3 * 7.0, 3 * 49.0, 3)
    whole.add_ess("nothing", 0.0, 0.0, 0)
    whole.add_variance("constant", 3 * 0.1, 3 * 0.1**2, 3)
    whole.add_variance("none", 0.0, 0.0, 0)
    row = whole.to_row()
    assert row["equal"] == pytest.approx(1.0, rel=1e-12)
    assert row["nothing"] is None
    assert row["constant"] == pytest.approx(0.0, abs=1e-12)
    assert row["constant"] >= 0.0
    assert row["none"] is None


def test_quantiles_are_values_that_occurred():
    whole = Metrics()
    whole.add_quantiles("lag", range(10))
    row = whole.to_row()
    assert row["lag_mean"] == 4.5
    assert (row["lag_p50"], row["lag_p90"], row["lag_p99"], row["lag_max"]) == (4.0, 8.0, 9.0, 9.0)


def test_quantiles_of_nothing_are_none():
    whole = Metrics()
    whole.add_quantiles("lag", [])
    row = whole.to_row()
    assert [row[f"lag_{q}"] for q in ("mean", "p50", "p90", "p99", "max")] == [None] * 5


@FEW
@given(st.lists(st.integers(-5, 50), min_size=1, max_size=60), st.data())
def test_quantiles_do_not_depend_on_the_cut(values, data):
    cut = data.draw(st.integers(0, len(values)))
    parts = []
    for some in (values[:cut], values[cut:]):
        part = Metrics()
        part.add_quantiles("x", np.array(some, dtype=np.int32))
        parts.append(part)
    row = merged(*parts).to_row()
    ordered = sorted(values)
    for q in (50, 90, 99):
        # the smallest value that at least q % of the values do not exceed, in whole numbers
        expected = next(
            v for v in ordered if 100 * sum(w <= v for w in ordered) >= q * len(ordered)
        )
        assert row[f"x_p{q}"] == expected
    assert row["x_max"] == max(values)
    assert row["x_mean"] == pytest.approx(np.mean(values), rel=1e-12, abs=1e-12)


# Merging


@st.composite
def metrics(draw) -> Metrics:
    part = Metrics()
    values = draw(st.lists(st.integers(-100, 100), min_size=1, max_size=4))
    total, squares = float(sum(values)), float(sum(v * v for v in values))
    for name in draw(st.sets(st.sampled_from("abc"))):
        part.add_mean(f"mean_{name}", total, len(values))
        part.add_sum(f"sum_{name}", total)
        part.add_max(f"max_{name}", max(values))
        part.add_min(f"min_{name}", min(values))
        part.add_variance(f"variance_{name}", total, squares, len(values))
        part.add_ess(f"ess_{name}", total, squares, len(values))
        part.add_quantiles(f"quantiles_{name}", values)
        if draw(st.booleans()):
            part.add_max(f"max_{name}", math.nan)
    return part


@FEW
@given(metrics(), metrics(), metrics())
def test_merging_is_associative_commutative_and_has_an_identity(a, b, c):
    left = merged(merged(a, b), c).to_row()
    assert left == merged(a, merged(b, c)).to_row()
    assert left == merged(c, a, b).to_row()
    assert left == merged(Metrics(), a, b, c, Metrics()).to_row()


def test_merging_leaves_the_other_part_alone():
    a, b = Metrics(), Metrics()
    a.add_mean("x", 1.0)
    b.add_mean("x", 3.0)
    a.merge(b)
    assert (a.to_row()["x"], b.to_row()["x"]) == (2.0, 3.0)


@FEW
@given(metrics())
def test_metrics_cross_a_process_border(part):
    assert pickle.loads(pickle.dumps(part)).to_row() == part.to_row()


def test_one_name_has_one_reducer():
    whole = Metrics()
    whole.add_mean("x", 1.0)
    with pytest.raises(ValueError, match="'x' is a Mean, not a Sum"):
        whole.add_sum("x", 1.0)
    variance = Metrics()
    variance.add_variance("v", 1.0, 1.0, 1)
    with pytest.raises(ValueError, match="'v' is a Variance, not a Effect"):
        variance.add_ess("v", 1.0, 1.0, 1)


def test_a_metric_does_not_follow_its_tensor_check_137():
    divergence = torch.tensor([0.1, 0.2])
    whole = Metrics()
    whole.add_mean("kl", divergence.sum(), divergence.numel())
    whole.add_quantiles("kl_token", divergence)
    divergence.mul_(-0.5).add_(1.0)
    assert whole.to_row()["kl"] == pytest.approx(0.15, abs=1e-7)
    assert whole.to_row()["kl_token_max"] == pytest.approx(0.2, abs=1e-7)


# Values that are not finite

BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_value_is_counted_and_hides_no_other(bad):
    whole = Metrics()
    for value in (1.0, bad, 3.0):
        whole.add_mean("mean", value)
        whole.add_sum("sum", value)
        whole.add_max("max", value)
        whole.add_min("min", value)
        whole.add_variance("variance", value, 1.0, 1)
        whole.add_ess("ess", 1.0, value, 1)
    whole.add_quantiles("lag", [1.0, bad, bad, 3.0])
    row = whole.to_row()
    assert (row["mean"], row["sum"], row["max"], row["min"]) == (2.0, 4.0, 3.0, 1.0)
    assert (row["lag_mean"], row["lag_max"]) == (2.0, 3.0)
    assert row["nonfinite"] == 8.0
    assert row["nonfinite/lag"] == 2.0
    for name in ("mean", "sum", "max", "min", "variance", "ess"):
        assert row[f"nonfinite/{name}"] == 1.0


@pytest.mark.parametrize("bad", BAD)
def test_nothing_but_bad_values_is_none(bad):
    a, b = Metrics(), Metrics()
    a.add_max("norm", bad)
    b.merge(a)
    assert b.to_row() == {"norm": None, "nonfinite": 1.0, "nonfinite/norm": 1.0}


def test_a_clean_row_says_so():
    assert Metrics().to_row() == {"nonfinite": 0.0}


# The file


def write(folder, *rows, tensorboard=False):
    with MetricsWriter(folder, tensorboard=tensorboard) as writer:
        for step, values in enumerate(rows):
            writer.write(step=step, version=step, wall_s=0.5 * step, values=values)


def test_what_is_written_is_read(tmp_path):
    write(tmp_path, {"loss": 0.25, "n": 3}, {"loss": -1.0, "n": 4})
    assert read_metrics(tmp_path / "metrics.jsonl") == (
        [
            {"step": 0, "version": 0, "wall_s": 0.0, "loss": 0.25, "n": 3},
            {"step": 1, "version": 1, "wall_s": 0.5, "loss": -1.0, "n": 4},
        ],
        None,
    )


@pytest.mark.parametrize("bad", [*BAD, None, np.float32("nan")])
def test_what_is_no_number_is_null(tmp_path, bad):
    write(tmp_path, {"x": bad, "y": np.float32(0.5), "z": np.int64(2)})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 0,
        "version": 0,
        "wall_s": 0.0,
        "x": None,
        "y": 0.5,
        "z": 2.0,
    }


def test_a_record_is_readable_before_the_writer_closes(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(3):
            writer.write(step=step, version=0, wall_s=0.0, values={})
            assert len(read_metrics(writer.path).records) == step + 1


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_record_check_127(tmp_path, separator):
    path = tmp_path / "metrics.jsonl"
    records = [{"step": 1, "text": f"a{separator}b"}, {"step": 2, "text": "c"}]
    dumped = [json.dumps(record, ensure_ascii=False) for record in records]
    path.write_bytes("".join(line + "\n" for line in dumped).encode())
    assert read_metrics(path) == (records, None)


def test_a_metric_may_be_named_with_a_line_separator_check_127(tmp_path):
    write(tmp_path, {"a\u2028b\x85": 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl").records[0]["a\u2028b\x85"] == 1.0


def test_a_torn_last_record_is_named_and_the_others_read(tmp_path):
    write(tmp_path, {"x": 1.0}, {"x": 2.0})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        records, torn = read_metrics(path)
        assert [r["x"] for r in records] == [1.0]
        if length == first:
            assert torn is None
        else:
            assert torn == f"{path}, line 2 is unfinished ({length - first} bytes)"


def test_a_record_after_a_torn_one_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, {"x": 1.0})
    path.write_bytes(path.read_bytes() + b'{"step": 1, "ver')
    write(tmp_path, {"x": 2.0})
    records, torn = read_metrics(path)
    assert [r["x"] for r in records] == [1.0, 2.0]
    assert torn is None


@pytest.mark.parametrize("line", [b"{", b"\xff", b"3", b"[]", b"", b"{} {}", b"{}"])
def test_a_damaged_record_in_the_middle_is_refused_by_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2 (is not|does not say)"):
        read_metrics(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl"):
        read_metrics(tmp_path / "none.jsonl")


def test_an_empty_file_holds_no_records(tmp_path):
    write(tmp_path)
    assert read_metrics(tmp_path / "metrics.jsonl") == ([], None)


@pytest.mark.parametrize("name", ["step", "version", "wall_s"])
def test_a_metric_cannot_shadow_the_record(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        Metrics().add_sum(name, 1.0)
    with pytest.raises(ValueError, match=name):
        write(tmp_path, {name: 1.0})


def test_a_run_that_goes_on_from_a_step_keeps_each_step_once(tmp_path):
    write(tmp_path, {"x": 0.0}, {"x": 1.0}, {"x": 2.0}, {"x": 3.0})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 4, "ver')
    supersede_after(tmp_path, 1)
    assert [r["x"] for r in read_metrics(path).records] == [0.0, 1.0]
    superseded = tmp_path / "metrics.superseded.jsonl"
    assert [r["x"] for r in read_metrics(superseded).records] == [2.0, 3.0]
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(step=2, version=2, wall_s=1.0, values={"x": 20.0})
    assert [r["x"] for r in read_metrics(path).records] == [0.0, 1.0, 20.0]
    supersede_after(tmp_path, 0)
    assert [r["x"] for r in read_metrics(path).records] == [0.0]
    assert [r["x"] for r in read_metrics(superseded).records] == [2.0, 3.0, 1.0, 20.0]


def test_a_run_without_metrics_goes_on(tmp_path):
    supersede_after(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_the_same_numbers(tmp_path):
    write(tmp_path, {"loss": 0.25, "none": None, "nan": math.nan}, tensorboard=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    data = events.read_bytes()
    assert b"loss" in data
    assert np.float32(0.25).tobytes() in data
    assert b"nan" not in data
    assert b"none" not in data


def test_closing_twice_is_fine(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.close()
    writer.close()
    assert read_metrics(writer.path).records == []


def test_a_whole_run_merges_to_the_numbers_of_its_tokens():
    rng = random.Random(0)
    values = [rng.gauss(0, 1) for _ in range(1000)]
    whole = Metrics()
    while values:
        part = [values.pop() for _ in range(min(len(values), rng.randrange(1, 50)))]
        step = Metrics()
        step.add_mean("x", sum(part), len(part))
        whole.merge(step)
    rng = random.Random(0)
    assert whole.to_row()["x"] == pytest.approx(np.mean([rng.gauss(0, 1) for _ in range(1000)]))
