"""`collapse` and `diversity`: onsets, alarms, thresholds, masks by entropy, pass@k."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from estr.corrections import TokenColumns, build_correction
from estr.errors import ConfigError
from estr.lab.experiments import collapse, diversity
from estr.lab.indicators import (
    INDICATORS,
    Indicator,
    RunCurves,
    as_line,
    changes,
    first_alarm,
    onset,
    runs_of,
    threshold_of,
    warned,
)
from estr.lab.lab import Lab
from estr.lab.methods import JUDGE_SEEDS
from estr.lab.training import pass_curve

UP = Indicator("x", "up", 0.01)

# Collapses and alarms


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.4, 0.5, 0.6], None),
        ([0.4, 0.19, 0.5, 0.1, 0.0], 15),
        ([0.4, 0.1, 0.1], 5),
        ([0.4, 0.3, 0.2], None),  # half of the start is not below it
        ([0.4, 0.3, 0.19], 10),
    ],
)
def test_the_onset_is_where_accuracy_falls_for_good(values, expected):
    assert onset([(5 * i, v) for i, v in enumerate(values)], 0.4) == expected


def test_a_run_that_ends_in_nan_collapses_at_its_last_step():
    assert onset([(0, 0.4), (5, 0.5), (7, 0.45)], 0.4, nonfinite=True) == 7
    assert onset([(0, 0.4), (5, 0.1), (7, 0.1)], 0.4, nonfinite=True) == 5


def test_changes_are_factors_since_the_first_record_in_one_direction():
    curve = [(5, 0.001), (10, 0.02), (15, 0.005)]
    assert changes(curve, UP) == [
        (5, 0.0),
        (10, pytest.approx(math.log(2.0))),
        (15, 0.0),
    ]
    down = changes(curve, Indicator("x", "down", 0.01))
    assert down[1] == (10, pytest.approx(-math.log(2.0)))


def test_an_alarm_counts_only_before_the_onset():
    change = [(5, 0.0), (10, 0.5), (15, 2.0)]
    assert first_alarm(change, 0.4, None) == 10
    assert first_alarm(change, 0.4, 10) is None
    assert first_alarm(change, 0.6, 20) == 15
    assert first_alarm(change, 3.0, None) is None


def run_of(seed, values, at=None):
    return RunCurves(seed, {"x": [(5 * (i + 1), v) for i, v in enumerate(values)]}, at)


def test_the_threshold_lets_a_tenth_of_the_healthy_cry_wolf():
    healthy = [run_of(0, [1.0, 1.0 + i]) for i in range(20)]
    assert math.exp(threshold_of(healthy, UP)) == pytest.approx(18.0)  # 19 and 20 are above
    assert math.exp(threshold_of(healthy[:5], UP)) == pytest.approx(5.0)
    assert threshold_of([run_of(0, [1.0, 0.5])], UP) == 0.0
    assert threshold_of([run_of(0, [1.0, 9.0], at=10)], UP) is None


def test_thresholds_are_set_on_other_seeds_than_they_are_judged_on():
    """Even seeds rise to 2 when healthy, odd ones to 4; each half is judged by the other's."""
    runs = [
        run_of(0, [1.0, 2.0, 2.0]),
        run_of(1, [1.0, 4.0, 1.0]),
        run_of(2, [1.0, 3.0, 8.0], at=20),
        run_of(3, [1.0, 3.0, 8.0], at=20),
        run_of(5, [1.0, 1.0, 8.0], at=15),
    ]
    found = warned(runs, UP)
    # The even half is held to 4: its collapse is seen at step 15. The odd half is held to 2: one
    # collapse is seen at step 10, one not before its onset, and the healthy run cries wolf.
    assert (found.collapsed, found.leads) == (3, (5, 10))
    assert (found.healthy, found.false_alarms) == (2, 1)
    assert found.factor == (pytest.approx(2.0), pytest.approx(4.0))
    line = as_line("it", found)
    assert line["collapses preceded"] == "2 of 3"
    assert line["steps before, median (quartiles)"] == "8 (6 to 9)"
    assert line["cried wolf"] == "1 of 2"
    assert warned(runs[:2], UP) is None
    assert warned(runs[1:], UP) is None


def table(seed, accuracies, variances):
    job = f"job {seed}"
    rows = [
        {"job": job, "seed": seed, "measure": "accuracy", "step": 5 * i, "value": v}
        for i, v in enumerate(accuracies)
    ]
    return rows + [
        {"job": job, "seed": seed, "measure": "kl_k3", "step": 5 * (i + 1), "value": v}
        for i, v in enumerate(variances)
    ]


def test_runs_are_read_off_the_table():
    rows = table(10, [0.4, 0.5, 0.5], [0.1, 0.1]) + table(11, [0.4, 0.1, 0.0], [0.1, None])
    first, second = runs_of(rows)
    assert (first.seed, first.onset, first.curves["kl_k3"]) == (10, None, [(5, 0.1), (10, 0.1)])
    assert (second.seed, second.onset, second.curves["kl_k3"]) == (11, 5, [(5, 0.1)])


class TableSweep:
    """Half of the jobs collapse at step 20, after KL has grown tenfold at step 10."""

    def run(self, jobs):
        rows = []
        for job in jobs:
            bad = job.labels["method"] == "none"
            accuracy = [0.4, 0.5, 0.5, 0.5, 0.1, 0.1] if bad else [0.4, 0.5, 0.6, 0.6, 0.6, 0.6]
            kl = [0.1, 1.0, 1.0, 1.0, 1.0] if bad else [0.1, 0.2, 0.2, 0.2, 0.2]
            own = table(job.labels["seed"], accuracy, kl)
            rows += [{**row, **job.labels, "job": job.digest} for row in own]
        return rows


def test_the_experiment_tells_what_warned_and_what_did_not():
    report = collapse.run(Lab(TableSweep(), only={"method": ["none", "estr"], "regime": ["M"]}))
    told = {claim.claim: claim for claim in report.claims}
    assert told["KL (k3) warns of a collapse"].answer == "holds"
    assert told["KL (k3) warns of a collapse"].measured == (
        "10 of 10 collapses by 10 steps or more, 0 of 10 healthy runs for nothing"
    )
    assert told["gradient norm warns of a collapse"].answer == "undecided"
    assert [line["collapsed"] for line in report.tables["collapses"]] == ["10 of 10", "0 of 10"]


def test_every_indicator_is_a_measure_of_a_run():
    from estr.lab.training import train_once

    rows = train_once({"steps": 1, "prompts": 2, "eval_problems": 2, "eval_k": 2})
    measures = {row["measure"] for row in rows}
    assert {indicator.measure for indicator in INDICATORS.values()} <= measures
    assert {"pass_at_1", "pass_at_2", "pass_at_k"} <= measures


# Masks by entropy


def columns_of(entropies, mask=None):
    n = len(entropies)
    return TokenColumns(
        policy_logprobs=torch.zeros(n),
        behavior_logprobs=torch.zeros(n),
        advantages=torch.ones(n),
        loss_mask=torch.ones(n, dtype=torch.bool) if mask is None else mask,
        behavior_entropies=torch.tensor(entropies),
    )


def kept(name, columns, share):
    entry = {"name": f"estr.lab.entropy_masks:{name}", "share": share}
    return build_correction([entry])(columns).keep.tolist()


def test_masks_drop_from_either_end():
    columns = columns_of([0.3, 1.2, 0.0, 0.7])
    assert kept("DropHigh", columns, 0.25) == [True, False, True, True]
    assert kept("DropLow", columns, 0.5) == [False, True, False, True]


@given(
    entropies=st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0]), min_size=1, max_size=40),
    share=st.floats(0.05, 0.9),
)
def test_all_masks_keep_the_same_number_of_eligible_tokens(entropies, share):
    mask = torch.arange(len(entropies)) % 3 != 1
    columns = columns_of(entropies, mask)
    counts = {sum(kept(n, columns, share)) for n in ("DropHigh", "DropLow", "DropAny")}
    eligible = int(mask.sum())
    assert counts == {eligible - round(share * eligible)}
    assert not any(k and not m for k, m in zip(kept("DropLow", columns, share), mask, strict=True))


def test_ties_are_broken_by_lot():
    columns = columns_of([0.0] * 50)
    low = kept("DropLow", columns, 0.5)
    assert 5 < sum(low[:25]) < 20
    with pytest.raises(ConfigError, match="share must be in"):
        kept("DropLow", columns, 1.0)


# pass@k


def test_pass_at_k_of_powers_of_two_and_of_all():
    outcomes = np.array([[1.0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    curve = pass_curve(outcomes)
    assert list(curve) == [1, 2, 4, 6]
    assert list(curve.values()) == pytest.approx(
        [(1 / 6 + 1) / 3, (1 / 3 + 1) / 3, (4 / 6 + 1) / 3, 2 / 3]
    )


class PassSweep:
    """pass@16 hangs on the mask, pass@1 does not."""

    def run(self, jobs):
        value = {"low dropped": 0.9, "all kept": 0.89, "any dropped": 0.8, "high dropped": 0.7}
        return [
            {**job.labels, "job": job.digest, "step": 120, "measure": measure, "value": v}
            for job in jobs
            for measure, v in (
                ("pass_at_1", 0.5),
                ("pass_at_4", 0.6),
                ("pass_at_16", value[job.labels["method"]]),
            )
        ]


def test_diversity_compares_masks_of_one_share():
    lab = Lab(PassSweep())
    jobs = diversity.jobs(lab)
    assert len(jobs) == 160
    assert {job.labels["seed"] for job in jobs} == set(JUDGE_SEEDS)
    shares = {job.config["correction"][0].get("share") for job in jobs}
    assert shares == {0.2, None}
    found = {claim.claim: claim.answer for claim in diversity.run(lab).claims}
    assert found == {
        "pass@16 is higher with low-entropy tokens dropped than with high dropped": "holds",
        "pass@16 is higher with low-entropy tokens dropped than with any dropped": "holds",
        "pass@16 is higher with low-entropy tokens dropped than with all kept": "not here",
        "pass@1 is higher with low-entropy tokens dropped than with high dropped": "not here",
    }
