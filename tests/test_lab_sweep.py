"""The laboratory's book-keeping: tables, statistics, verdicts."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner

from estr.cli import cli
from estr.errors import DataError
from estr.lab.experiments import EXPERIMENTS, find_experiment
from estr.lab.lab import Claim, Lab, Report, write_report
from estr.lab.methods import ALL_METHODS, JUDGE_SEEDS, METHODS, REGIMES, TUNE_SEEDS
from estr.lab.natural import rows_of_run
from estr.lab.protocol import SYNC_CELL, standings, tune
from estr.lab.statistics import answer, compare_seeds, holm, is_better, judge, with_interval
from estr.lab.table import last_values, read_table, weighted_means, write_table

# Table


def test_a_table_comes_back_and_gives_last_values(tmp_path):
    rows = [
        {"job": "a", "seed": 1, "measure": "accuracy", "step": 0, "value": 0.4},
        {"job": "a", "seed": 1, "measure": "accuracy", "step": 9, "value": 0.9},
        {"job": "b", "seed": 2, "measure": "accuracy", "step": 9, "value": None, "lr": 0.1},
    ]
    write_table(rows, tmp_path / "table.parquet")
    back = read_table(tmp_path / "table.parquet")
    assert back == rows
    values = last_values(back, "accuracy", "seed")
    assert values[(1,)] == 0.9
    assert values[(2,)] != values[(2,)]
    with pytest.raises(ValueError, match="two jobs"):
        last_values(back, "accuracy", "measure")


def test_windows_count_by_their_tokens():
    rows = [
        {"job": "a", "measure": m, "step": s, "value": v}
        for m, s, v in (
            ("rho_mask", 10, 0.1),
            ("rho_mask", 20, 0.4),
            ("eligible_tokens", 10, 300.0),
            ("eligible_tokens", 20, 100.0),
        )
    ]
    assert weighted_means(rows, "rho_mask", "eligible_tokens", "job") == {
        ("a",): pytest.approx(0.175)
    }


# Statistics


def test_holm_steps_down():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_paired_differences_by_seed():
    method = {seed: 0.90 + 0.001 * seed for seed in range(10, 20)}
    pair = compare_seeds(method, dict.fromkeys(range(5, 15), 0.9))
    assert pair.num_pairs == 5
    assert pair.difference == pytest.approx(0.012)
    # Differences .010 to .014: standard error .000707, 2.776 of them on either side; t = 59.4.
    assert (pair.low, pair.high) == pytest.approx((0.010037, 0.013963), abs=1e-6)
    assert pair.p_non_inferior == pytest.approx(2.4057e-7, rel=1e-3)
    assert pair.p_better > 0.999
    assert compare_seeds(method, {0: 0.5}) is None


def test_judgements_are_by_the_margin():
    seeds = range(10, 20)
    zero = dict.fromkeys(seeds, 0.5)

    def pair(*differences):
        shifted = {s: 0.5 + differences[i % len(differences)] for i, s in enumerate(seeds)}
        return compare_seeds(shifted, zero)

    family = {
        "far above": pair(0.04, 0.06),
        "just above": pair(0.01, 0.03),
        "as good": pair(-0.02, 0.02),
        "far below": pair(-0.04, -0.2),
        "unclear": pair(-0.4, 0.4),
        "absent": None,
    }
    assert judge(family) == {
        "far above": "better",
        "just above": "non-inferior",
        "as good": "non-inferior",
        "far below": "inferior",
        "unclear": "undecided",
        "absent": "too few seeds",
    }
    assert judge({"a": compare_seeds({1: 0.9, 2: 0.9}, {1: 0.1, 2: 0.1})}) == {"a": "too few seeds"}


def test_one_seed_has_no_interval_and_decides_nothing():
    pair = compare_seeds({1: 0.9}, {1: 0.5})
    assert pair.told() == "+0.400 (no interval)"
    assert is_better(pair, judge({"a": pair})["a"]) is None
    worse = compare_seeds({1: 0.1, 2: 0.1}, {1: 0.9, 2: 0.9})
    assert is_better(worse, judge({"a": worse})["a"]) is None
    assert is_better(None, "too few seeds") is None
    seeds = range(6)
    level = compare_seeds(dict.fromkeys(seeds, 0.5), dict.fromkeys(seeds, 0.5))
    assert is_better(level, judge({"a": level})["a"]) is False
    assert level.told() == "+0.000 [+0.000, +0.000]"
    assert with_interval(math.nan, math.nan, math.nan, ".2f") == "no figure"


@pytest.mark.parametrize("name", ["controls", "compare"])
def test_no_claim_is_decided_on_two_seeds(name):
    for num_seeds in (1, 2):
        sweep = FakeSweep(lambda job: len(job.labels["method"]) / 100)
        report = find_experiment(name).run(Lab(sweep, num_seeds=num_seeds))
        answers = {c.claim: c.answer for c in report.claims if "fewer tokens" not in c.claim}
        assert set(answers.values()) == {"undecided"}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"M": True, "D": True}, "holds"),
        ({"M": True, "D": False}, "in part"),
        ({"M": True, "D": None}, "in part"),
        ({"M": False, "D": None}, "not here"),
        ({"M": None}, "undecided"),
        ({}, "not run"),
    ],
)
def test_one_answer_from_the_regimes(found, expected):
    assert answer(found) == expected


# Natural lag


def test_a_real_run_gives_rows_of_the_same_names(tmp_path):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "version": 1, "wall_s": 0.5, "rho_mask": 0.25, "eligible_tokens": 40.0}\n'
    )
    summary = {"start_accuracy": 0.4, "final_accuracy": 0.1, "steps": 1}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert rows_of_run(tmp_path) == [
        {"measure": "rho_mask", "step": 1, "value": 0.25},
        {"measure": "eligible_tokens", "step": 1, "value": 40.0},
        {"measure": "accuracy", "step": 0, "value": 0.4},
        {"measure": "accuracy_start", "step": 1, "value": 0.4},
        {"measure": "accuracy_end", "step": 1, "value": 0.1},
        {"measure": "accuracy", "step": 1, "value": 0.1},
        {"measure": "collapsed", "step": 1, "value": 1.0},
    ]
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "final_accuracy": None}))
    with pytest.raises(DataError, match="held-out accuracy"):
        rows_of_run(tmp_path)


# Protocol and experiments


class FakeSweep:
    """Answers every job by a rule, without running it."""

    def __init__(self, rule):
        self.rule, self.seen = rule, []

    def run(self, jobs):
        self.seen += jobs
        rows = []
        for its in jobs:
            values = {"accuracy": self.rule(its), "collapsed": 0.0, "rho_mask": 0.1}
            values["eligible_tokens"] = 10.0
            rows += [
                {**its.labels, "job": its.digest, "measure": m, "step": 1, "value": v}
                for m, v in values.items()
            ]
        return rows


def test_tuning_sees_the_tuning_seeds_only_and_takes_the_best():
    sweep = FakeSweep(
        lambda j: 0.9 if (j.labels["option"], j.labels["lr"]) == ("beta 2", 2e-3) else 0.5
    )
    cells = {("M", "icepop"): (REGIMES["M"], METHODS["icepop"])}
    _, chosen = tune(Lab(sweep), cells)
    assert {j.labels["seed"] for j in sweep.seen} == set(TUNE_SEEDS)
    assert len(sweep.seen) == 2 * 3 * len(TUNE_SEEDS)
    (choice,) = chosen.values()
    assert (choice.option, choice.lr) == ("beta 2", 2e-3)
    assert choice.correction[0]["beta"] == 2.0


def test_compare_judges_on_other_seeds_against_sync():
    sweep = FakeSweep(lambda j: {"none": 0.2, "estr": 0.9}.get(j.labels["method"], 0.85))
    report = find_experiment("compare").run(Lab(sweep, only={"regime": ["M"], "method": ["estr"]}))
    judged = {j.labels["seed"] for j in sweep.seen if j.labels["phase"] == "judge"}
    assert judged == set(JUDGE_SEEDS)
    found = standings(report.rows)
    assert found.keys() == {SYNC_CELL, ("M", "estr")}
    assert found["M", "estr"].judgement == "better"
    assert found["M", "estr"].rho_mask == pytest.approx(0.1)
    assert report.claims[1].answer == "holds"
    assert report.claims[0].answer == "undecided"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_reports_on_few_rows_and_on_none(name, tmp_path):
    module = find_experiment(name)
    for only in ({}, {"seed": ["nothing"]}):
        sweep = FakeSweep(lambda j: 0.5 + 0.01 * j.labels["seed"])
        lab = Lab(sweep, quick=True, only=only)
        lab.strict = False
        report = module.run(lab)
        paths = write_report(name, report, tmp_path / name if only else tmp_path)
        assert all(path.stat().st_size for path in paths)
        assert {c.answer for c in report.claims} <= {"not run", "undecided"}


def test_every_method_can_be_built():
    from estr.corrections import build_correction

    for method in ALL_METHODS.values():
        assert 1 <= len(method.variants) <= 3
        for _, correction in method.variants:
            build_correction(correction)


def test_verdicts_are_json(tmp_path):
    claim = Claim("it works", "yes", "no", "not here", "because")
    write_report(
        "own",
        Report(
            [{"job": "a", "measure": "m", "step": 1, "value": 1.0}],
            [claim],
            {"all": [{"a": "x | y\nz"}]},
        ),
        tmp_path,
        {"runs": 1},
    )
    kept = json.loads((tmp_path / "verdict.json").read_text())
    assert kept["claims"][0]["answer"] == "not here"
    assert (kept["made"], kept["tables"]) == ({"runs": 1}, {"all": [{"a": "x | y\nz"}]})
    assert "| x \\| y z |" in (tmp_path / "report.md").read_text()
    assert "| it works | yes | no | not here | because |" in (tmp_path / "report.md").read_text()


def test_the_command_refuses_before_it_computes():
    runner = CliRunner()
    unknown = runner.invoke(cli, ["lab", "nothing"])
    assert (unknown.exit_code, "known: compare" in unknown.output) == (2, True)
    wrong = runner.invoke(cli, ["lab", "compare", "--only", "M"])
    assert (wrong.exit_code, "label=value" in wrong.output) == (2, True)
