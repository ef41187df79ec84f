"""What a report reads out of runs."""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estr.errors import DataError
from estr.ledger import open_ledger
from estr.ledger.parts import part_path
from estr.report import Budget, build_report, render
from estr.report.curves import (
    SERIES,
    curves_of,
    mean_interval,
    over_seeds,
    stride_for,
    wilson_interval,
)
from estr.report.microscope import CLIPPED, KEPT, SAMPLED, TRAINED
from estr.report.texts import TokenTexts
from estr.report.token_facts import TokenFacts, prepare, token_facts
from estr.types import RolloutId
from ledger_cases import consumption, record, trajectory, write_random_ledger, write_step
from report_cases import METRICS, finish, highest_score, make_run, save_tokenizer, unpacked

BUDGET = Budget(trajectories=1000, tokens=1_000_000)


def column(seen: Any, name: str, kind: str) -> Any:
    return np.frombuffer(base64.b64decode(seen.columns[name]), dtype=kind)


# Curves


def test_intervals_have_the_values_of_the_textbook():
    mean, (low, high) = mean_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert (low, high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))
    assert mean_interval([0.5]) == (0.5, (0.5, 0.5))
    assert mean_interval([]) is None
    assert wilson_interval(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson_interval(1.0, 0) == (0.0, 1.0)


def test_a_long_run_is_thinned_without_losing_peaks_or_counts():
    records = [
        {
            "step": step,
            "version": step,
            "wall_s": float(step),
            "reward_mean": float(step),
            "inter_max": float(step == 3),
            "eligible_tokens": 10.0,
            "loss": None,
        }
        for step in range(1, 8)
    ]
    curves = curves_of(records, 3)
    assert curves.x == {
        "step": [3, 6, 7],
        "wall_s": [3.0, 6.0, 7.0],
        "tokens": [30.0, 60.0, 70.0],
    }
    assert curves.values["reward_mean"] == [2.0, 5.0, 7.0]
    assert curves.values["inter_max"] == [1.0, 0.0, 0.0]
    assert curves.values["eligible_tokens"] == [30.0, 30.0, 10.0]
    assert curves.values["loss"] == [None, None, None]
    assert [stride_for(n) for n in (0, 1, 500, 501, 10_000)] == [1, 1, 1, 2, 20]


def test_an_evaluation_stands_where_its_version_was_made():
    steps = [
        {"step": n, "version": n - (n > 1), "wall_s": 10.0 * n, "eligible_tokens": 5.0}
        for n in (1, 2, 3)  # the second step was skipped: version 1 twice
    ]
    found = [(0, 0), (1, 3), (2, 3)]
    evaluations = [
        {"step": at, "version": v, "wall_s": 99.0, "eval/accuracy": 0.5, "eval/problems": 4.0}
        for v, at in found
    ]
    curves = curves_of([evaluations[0], *steps, *evaluations[1:]], 1)
    assert [(e.step, e.wall_s, e.tokens) for e in curves.evaluations] == [
        (0, 0.0, 0.0),
        (1, 10.0, 5.0),
        (3, 30.0, 15.0),
    ]


def test_an_interval_is_the_one_that_the_run_recorded():
    """Of two tasks the accuracy is the mean over them, and its interval not Wilson's of all
    problems together."""
    row = {"step": 0, "version": 0, "wall_s": 1.0, "eval/accuracy": 0.5, "eval/problems": 1010.0}
    ends = {"eval/accuracy_low": 0.35, "eval/accuracy_high": 0.65}
    (evaluation,) = curves_of([row | ends], 1).evaluations
    assert (evaluation.low, evaluation.high) == (0.35, 0.65)
    (evaluation,) = curves_of([row], 1).evaluations
    assert (evaluation.low, evaluation.high) == wilson_interval(0.5, 1010.0)


def test_seeds_are_averaged_where_all_of_them_are(tmp_path):
    folders = [make_run(tmp_path, f"s{i}", f"seed={i}", steps=5 - i) for i in (0, 1)]
    for folder in folders:  # one recipe, although the second was stopped a step earlier
        config = folder / "config.toml"
        config.write_text(config.read_text().replace("steps = 4", "steps = 5"))
    report = build_report(folders, BUDGET)
    (recipe,) = report.recipes
    assert recipe.runs == [0, 1]
    assert recipe.curves.x["step"] == [1, 2, 3, 4]
    assert recipe.curves.values["reward_mean"][0] == pytest.approx(0.506)
    half = 12.706205 * 0.01 / 2
    assert recipe.curves.high["reward_mean"][0] == pytest.approx(0.506 + half)
    assert recipe.curves.low["reward_mean"][0] == pytest.approx(0.506 - half)
    (evaluation,) = recipe.curves.evaluations
    assert (evaluation.step, evaluation.accuracy, evaluation.runs) == (0, 0.25, 2)
    assert evaluation.over == "seeds"


def test_runs_of_different_recipes_stay_apart_and_say_how_they_differ(tmp_path):
    one = make_run(tmp_path, "a", "correction=icepop", steps=1)
    two = make_run(tmp_path, "b", "correction=estr", "seed=3", steps=1)
    report = build_report([one, two], BUDGET)
    assert [r.curves for r in report.recipes] == [None, None]
    assert [r.label for r in report.recipes] == ["correction = icepop", "correction = estr"]
    assert [r.tau for r in report.runs] == [None, 1.0]


def test_every_drawn_metric_is_one_that_runs_write():
    described = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    known = set(re.findall(r"`([a-z0-9_]+)`", described))
    bases = {re.sub(r"_(mean|p90|max|kept)$", "", name) for name in SERIES}
    assert {name for name in bases if name not in known and f"{name}_mean" not in known} == set()


def test_seeds_with_no_step_in_common_have_empty_curves():
    one = curves_of([{"step": 1, "version": 1, "wall_s": 1.0}], 1)
    none = curves_of([], 1)
    assert over_seeds([one, none]).x["step"] == []


# Sums over the ledger


def test_sums_are_those_of_the_ledger(tmp_path):
    folder = make_run(tmp_path, "run", steps=8, num_groups=3)
    (run,) = build_report([folder], BUDGET).runs
    ledger = open_ledger(folder)
    trained, rejected = ledger.query(
        "select count(*), count(*) filter (where not kept) from trained_tokens"
    ).rows[0]
    facts = run.facts
    assert facts.num_trained_tokens == trained
    assert facts.num_trajectories == 8 * 3 * 4
    for shares in (facts.by_entropy, facts.by_lag, facts.by_cell, facts.by_entropy_and_lag):
        assert sum(share.tokens for share in shares) == trained
        assert sum(share.rejected for share in shares) == rejected
    bins = ledger.query(
        "select entropy_bin, count(*), count(*) filter (where not kept) "
        "from trained_tokens group by 1 order by 1"
    ).rows
    assert [(s.key[0], s.tokens, s.rejected) for s in facts.by_entropy] == bins
    intra = ledger.query("select step, intra, count(*) from trajectory_facts group by all").rows
    assert sorted((s + 1, v, n) for s, v, n in facts.staleness["intra"]) == sorted(intra)
    assert sum(row[2] for row in facts.staleness["lag"]) == trained
    assert sum(row[1] for row in facts.lengths) == facts.num_trajectories
    assert run.statuses == {"ok": 64, "timeout": 8}


def facts_of(folder: Path) -> TokenFacts:
    ledger = open_ledger(folder)
    return token_facts(ledger, prepare(ledger), schedule=folder / "schedule.jsonl")


def noisy(step: int, power: float) -> Any:
    """A step with log_ratio^2 = entropy^power at four entropies, 60 tokens of each, lag 1."""
    entropies = np.repeat([0.05, 0.2, 0.8, 3.2], 60).astype(np.float32)
    own = trajectory(
        RolloutId(0, step, 0),
        logprobs=np.full(240, -1.0),
        entropies=entropies,
        versions=np.full(240, step - 2),
    )
    return record(step, [(own, consumption(own, (entropies + 0.01) ** (power / 2)))])


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_slope_of_the_noise_is_found(tmp_path, power):
    for step in range(2, 8):
        write_step(tmp_path, noisy(step, power))
    noise = facts_of(tmp_path).noise
    assert noise.which == "lag 1 and more"
    assert [b.tokens for b in noise.bins] == [360] * 4
    assert [fit.from_entropy for fit in noise.fits] == [0.0, 0.1]
    for fit in noise.fits:
        for found in (fit.slope, fit.low, fit.high):  # all stretches say the same
            assert found == pytest.approx(power, abs=1e-4)
    assert noise.bins[0].second_moment == pytest.approx(0.06**power, rel=1e-5)


def test_too_little_for_a_slope_is_no_slope(tmp_path):
    write_random_ledger(tmp_path, steps=1)
    noise = facts_of(tmp_path).noise
    assert noise.fits == []
    assert noise.bins
    assert all(b.low is None and not b.fitted for b in noise.bins)


def test_tokens_without_entropy_are_in_no_bin_and_counted(tmp_path):
    folder = make_run(tmp_path, "run", steps=1, ledger=False)
    own = trajectory(
        RolloutId(0, 0, 0), logprobs=[-1.0] * 3, entropies=[0.2, math.nan, 3.0], versions=[0] * 3
    )
    pair = (own, consumption(own, [0.1, 0.1, 0.1], kept=[True, False, True]))
    write_step(folder, record(1, [pair]))
    (run,) = build_report([folder], BUDGET).runs
    facts = run.facts
    assert "1 trained tokens have no entropy; no entropy bin counts them." in run.notes
    assert [(round(s.key[0], 2), s.tokens, s.rejected) for s in facts.by_entropy] == [
        (0.1, 1, 0),
        (2.0, 1, 0),
    ]
    assert [(s.key, s.tokens, s.rejected) for s in facts.by_lag] == [([0.0], 3, 1)]
    assert [b.tokens for b in facts.noise.bins] == [1, 1]


def test_rollouts_under_way_are_counted_unless_a_resume_has_set_the_clock_back(tmp_path):
    write_random_ledger(tmp_path, steps=2)  # every rollout from 1.0 to 2.5
    schedule = tmp_path / "schedule.jsonl"
    facts = facts_of(tmp_path)
    by_time = dict(map(tuple, facts.in_flight))
    assert {n for t, n in by_time.items() if t < 1.0} == {0}
    assert {n for t, n in by_time.items() if 1.0 < t < 2.5} == {16}
    schedule.write_text('{"event":"start"}\n{"event":"resume","lines":1}\n')
    assert facts_of(tmp_path).in_flight == []


# The sample that can be read


def test_all_trajectories_are_there_with_their_own_numbers(tmp_path):
    folder = make_run(tmp_path, "run", steps=2, ledger=False)
    records = write_random_ledger(folder, steps=2)
    (run,) = build_report([folder], BUDGET).runs
    seen = run.microscope
    assert (len(seen.trajectories), seen.num_all, seen.left_out) == (16, 16, 0)
    entropies = column(seen, "behavior_entropies", "<f4")
    policy = column(seen, "policy_logprobs", "<f4")
    flags = column(seen, "flags", "<u1")
    for row in seen.trajectories:
        one = records[row.step - 1]
        (segment,) = one.trajectories[row.trajectory].segments
        consumed = one.consumptions[row.trajectory]
        here = slice(row.offset, row.offset + row.num_tokens)
        np.testing.assert_array_equal(entropies[here], segment.behavior_entropies)
        np.testing.assert_array_equal(policy[here], consumed.policy_logprobs)
        np.testing.assert_array_equal(flags[here] & SAMPLED > 0, segment.sampled)
        np.testing.assert_array_equal(flags[here] & TRAINED > 0, segment.sampled)
        np.testing.assert_array_equal(flags[here] & KEPT > 0, consumed.kept)
        np.testing.assert_array_equal(flags[here] & CLIPPED > 0, consumed.clipped)
        assert row.turns == [[0, 2, row.num_tokens, "stop"]]
        assert row.tau == 1.0
    assert seen.trajectories[0].max_score == pytest.approx(highest_score(records), rel=1e-5)


def test_a_sample_holds_the_highest_scores_and_says_how_many_it_is_of(tmp_path):
    folder = make_run(tmp_path, "run", steps=10)
    (run,) = build_report([folder], Budget(9, 10_000)).runs
    seen = run.microscope
    assert (seen.num_all, seen.num_scored, seen.num_random) == (80, 3, 6)
    highest = open_ledger(folder).query(
        "select step, trajectory from trained_tokens group by all order by max(score) desc limit 3"
    )
    assert [(r.step, r.trajectory) for r in seen.trajectories[:3]] == highest.rows
    assert len({(r.step, r.trajectory) for r in seen.trajectories}) == 9
    assert build_report([folder], Budget(9, 10_000)).runs[0].microscope == seen


def test_the_budget_of_tokens_is_kept_and_what_it_cost_is_said(tmp_path):
    folder = make_run(tmp_path, "run", steps=4)
    (run,) = build_report([folder], Budget(1000, 60)).runs
    seen = run.microscope
    assert sum(row.num_tokens for row in seen.trajectories) <= 60
    assert seen.left_out == seen.num_all - len(seen.trajectories) > 0
    assert len(column(seen, "flags", "<u1")) == sum(r.num_tokens for r in seen.trajectories)


def test_trajectories_that_were_never_scored_can_be_read(tmp_path):
    folder = make_run(tmp_path, "run", steps=1, ledger=False)
    failed = trajectory(
        RolloutId(0, 0, 0),
        logprobs=[-1.0],
        entropies=[0.5],
        versions=[0],
        outcome=None,
        status="env_error",
        error="the tool broke",
    )
    empty = trajectory(RolloutId(0, 0, 1), logprobs=[], entropies=[], versions=[], outcome=None)
    pairs = [(one, consumption(one, [], advantage=None)) for one in (failed, empty)]
    write_step(folder, record(1, pairs))
    (run,) = build_report([folder], BUDGET).runs
    rows = {row.index: row for row in run.microscope.trajectories}
    assert (rows[0].status, rows[0].error, rows[0].max_score) == (
        "env_error",
        "the tool broke",
        None,
    )
    assert (rows[1].num_sampled_tokens, rows[1].intra) == (0, None)
    assert run.facts.by_entropy == []
    assert run.facts.noise.bins == []
    assert render(build_report([folder], BUDGET))


def test_a_token_that_could_not_have_been_drawn_is_the_most_suspicious(tmp_path):
    folder = make_run(tmp_path, "run", steps=3)
    own = trajectory(
        RolloutId(0, 99, 0), logprobs=[-1.0, -math.inf], entropies=[0.5, 0.5], versions=[3, 3]
    )
    made = consumption(own, [0.0, 0.0], kept=[True, False])
    made.policy_logprobs[3] = -1.0
    write_step(folder, record(4, [(own, made)]))
    report = build_report([folder], Budget(1, 100))
    (row,) = report.runs[0].microscope.trajectories
    assert (row.group_id, row.max_score) == (99, pytest.approx(3e38))
    assert "Infinity" not in unpacked(render(report))


def test_texts_of_tokens(tmp_path):
    save_tokenizer(tmp_path, ["[UNK]", "a", " b", "\n", "</script>"])
    from estr.models import load_tokenizer

    texts = TokenTexts(load_tokenizer(tmp_path / "model" / "last"))
    assert texts.of([1, 2, 3, 4, 99]) == ["a", " b", "\n", "</script>", "[99]"]
    assert TokenTexts(None).of([7]) == ["[7]"]


def test_part_of_a_character_is_shown_by_the_name_of_its_token():
    class Bytes:
        """The part of a tokenizer that matters here: 1 is the first byte of a character."""

        def __len__(self) -> int:
            return 2

        def encode(self, text: str, **_: Any) -> list[int]:
            return [0]

        def decode(self, ids: list[int], **_: Any) -> str:
            return bytes(b"a\xe2"[i] for i in ids).decode(errors="replace")

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return "<0xE2>"

    assert TokenTexts(Bytes()).of([0, 1]) == ["a", "<0xE2>"]


# Runs that lack something


def test_a_run_without_ledger_says_so(tmp_path):
    (run,) = build_report([make_run(tmp_path, "run", ledger=False)], BUDGET).runs
    assert (run.facts, run.microscope) == (None, None)
    assert any("no ledger" in note for note in run.notes)
    assert run.curves.values["rho_mask"][0] == pytest.approx(METRICS["rho_mask"] + 0.001)


def test_an_unfinished_run_says_so_and_a_finished_one_does_not(tmp_path):
    folder = make_run(tmp_path, "run", steps=3)
    assert build_report([folder], BUDGET).runs[0].notes == ["Unfinished: 3 of 3 steps."]
    finish(folder)
    assert build_report([folder], BUDGET).runs[0].notes == []


def test_a_run_that_has_just_begun_has_a_report(tmp_path):
    folder = make_run(tmp_path, "run", steps=3, ledger=False)
    (folder / "metrics.jsonl").write_bytes(b"")
    (run,) = build_report([folder], BUDGET).runs
    assert "No optimizer step is finished yet." in run.notes
    (folder / "metrics.jsonl").unlink()
    assert "It has no metrics.jsonl." in build_report([folder], BUDGET).runs[0].notes


def test_torn_files_are_named(tmp_path):
    folder = make_run(tmp_path, "run", steps=3)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4')
    part_path(folder, "tokens", 2).write_bytes(b"torn")
    (run,) = build_report([folder], BUDGET).runs
    assert any("is unfinished" in note for note in run.notes)
    assert any("step 2" in note and "torn" in note for note in run.notes)
    assert {row.step for row in run.microscope.trajectories} == {1, 3}


def test_a_broken_summary_is_an_error(tmp_path):
    folder = make_run(tmp_path, "run", steps=1)
    (folder / "summary.json").write_text("[1]")
    with pytest.raises(DataError, match=r"summary\.json"):
        build_report([folder], BUDGET)


def test_a_folder_whose_name_is_no_text_has_a_report(tmp_path):
    folder = make_run(tmp_path, "run\udcff", steps=1, ledger=False)
    report = build_report([folder], BUDGET)
    assert report.runs[0].name == "run\\udcff"
    assert render(report)


def test_two_runs_of_one_name_are_told_apart(tmp_path):
    folders = [make_run(tmp_path / place, "run", steps=1) for place in ("x", "y")]
    assert [run.name for run in build_report(folders, BUDGET).runs] == ["x/run", "y/run"]
