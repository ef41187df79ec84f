"""The laboratory's measurements on tokens and gradients: pure statistics, one tiny run of each."""

from __future__ import annotations

import json
import math
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch

from estr.corrections import build_correction
from estr.lab import gradients
from estr.lab.archive import Archive, policy_logprobs, sampled_column
from estr.lab.experiments import fidelity, find_experiment, scaling, switches
from estr.lab.fits import (
    fit_line,
    fit_power,
    fit_tails,
    rank_correlation,
    rank_interval,
    seed_interval,
)
from estr.lab.lab import Lab, write_report
from estr.lab.moments import binned_sums, divergences, token_scale
from estr.lab.noise_statistics import likelihood, rare_excess, spread
from estr.lab.staleness import Staleness
from estr.lab.switch_tokens import Tokens, matched_rows, switch_offsets
from estr.lab.training import RunConfig
from estr.student import mean_interval
from estr.types import RolloutId

# Moments


def test_the_token_scale_is_these():
    # p = (0.5, 0.25, 0.25): gini = 1 - 0.375; given the token: 1 - 2 p_y + 0.375
    log_p = np.log([0.5, 0.25])
    assert token_scale(log_p, np.full(2, 0.625)).tolist() == pytest.approx([0.375, 0.875])
    assert token_scale(np.array([-1e-9]), np.array([2e-9])).tolist() == pytest.approx([0.0])


def test_the_noise_model_is_what_noisy_logits_do():
    """Both second moments, measured on 200,000 draws of independent logit errors."""
    rng = np.random.default_rng(0)
    p = np.array([0.7, 0.2, 0.1])
    sigma = 0.05
    noise = sigma * rng.standard_normal((200_000, 3))
    logits = np.log(p) + noise
    delta = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)) - np.log(p)
    gini = float((p * (1 - p)).sum())
    given = (delta**2).mean(axis=0) / sigma**2
    assert given == pytest.approx(token_scale(np.log(p), np.full(3, gini)), rel=0.02)
    assert (p * given).sum() == pytest.approx(gini, rel=0.02)


def test_divergences_of_whole_distributions():
    mu, pi = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.25, 0.75], [0.9, 0.1]])
    exact, half = divergences(np.log(mu), np.log(pi))
    assert exact.tolist() == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.0])
    expected = 0.25 * (math.log(2) ** 2 + math.log(1.5) ** 2)
    assert half.tolist() == pytest.approx([expected, 0.0])


def test_sums_by_bin():
    sums = binned_sums(np.array([0.0, 0.5, 1.0, 7.0]), (0.5, 2.0), {"x": np.arange(4.0)})
    assert {k: v.tolist() for k, v in sums.items()} == {"tokens": [1, 2, 1], "x": [0, 3, 3]}


# Fits


def test_a_line_and_a_power():
    x = np.array([1.0, 2.0, 4.0, 8.0])
    assert fit_line(x, 3 * x + 1) == pytest.approx((3.0, 1.0, 1.0))
    assert fit_power(x, 5 * x**1.5)[0] == pytest.approx(1.5)
    assert fit_line(np.arange(4.0), np.array([0.0, 1.0, 0.0, 1.0])).r2 == pytest.approx(0.2)
    with pytest.raises(ValueError, match="3"):
        fit_line(x[:2], x[:2])


@pytest.mark.parametrize(
    ("law", "beyond"),
    [
        ("gaussian", lambda x: np.exp(-0.5 * x**2)),
        ("exponential", lambda x: np.exp(-1.5 * x)),
        ("power", lambda x: x**-3.0),
    ],
)
def test_each_tail_is_told_from_the_others(law, beyond):
    edges = np.arange(1.0, 6.1, 0.5)
    survivors = 1e9 * beyond(edges)
    counts = np.concatenate([[0.0], -np.diff(survivors), survivors[-1:]])
    tail = fit_tails(edges.tolist(), counts, 1e9)
    assert tail.best == law
    rates = {"gaussian": 0.5, "exponential": 1.5, "power": 3.0}
    assert getattr(tail, law)[0] == pytest.approx(rates[law])


def test_the_interval_of_a_mean_is_students():
    values = [0.1, 0.2, 0.4, 0.5, 0.8]
    by_seed = np.array([[value, 1.0] for value in values])
    found = seed_interval(lambda s: s[0] / s[1], by_seed)
    assert found == pytest.approx((0.059957, 0.740043), abs=1e-6)
    assert found == pytest.approx(mean_interval(values))


def test_the_interval_of_a_ratio_is_over_whole_seeds():
    by_seed = np.array([[1.0, 10.0], [3.0, 20.0], [4.0, 10.0]])
    # Pooled 8/40. Without one seed 7/30, 5/20, 4/30: a standard error of 0.0728604, times 4.302653.
    assert seed_interval(lambda s: s[0] / s[1], by_seed) == pytest.approx(
        (-0.113493, 0.513493), abs=1e-6
    )
    assert all(map(math.isnan, seed_interval(lambda s: s[0], by_seed[:1])))
    assert all(map(math.isnan, seed_interval(lambda s: math.nan, by_seed)))


def test_nine_of_ten_intervals_of_five_seeds_hold_the_slope():
    """Where those of a percentile bootstrap over seeds would be eight of ten."""
    rng, x = np.random.default_rng(0), np.linspace(0.1, 2, 8)
    slope = partial(_slope, x)
    held = 0
    for _ in range(400):
        noise = rng.normal(0, 0.1, (5, 8)) + rng.normal(0, 0.1, (5, 1))
        low, high = seed_interval(slope, x**1.5 * np.exp(noise))
        held += low <= 1.5 <= high
    assert 372 <= held <= 392


def _slope(x, y):
    return fit_power(x, y).slope


def test_rank_correlations_are_spearmans():
    assert rank_correlation(np.array([1.0, 2, 3, 4, 5]), np.array([20.0, 1, 400, 30, 5000])) == (
        pytest.approx(0.8)
    )
    ties = rank_correlation(np.array([1.0, 2, 2, 3]), np.array([1.0, 2, 3, 4]))
    assert ties == pytest.approx(4.5 / math.sqrt(22.5))
    assert math.isnan(rank_correlation(np.array([1.0, 1, 1]), np.array([1.0, 2, 3])))
    assert rank_interval(0.8, 20) == pytest.approx((0.502364, 0.928135), abs=1e-6)
    assert rank_interval(1.0, 20)[0] < 1.0
    assert all(map(math.isnan, rank_interval(0.8, 3)))


def test_statistics_of_sums():
    tokens = np.array([500.0, 0, 0, 0, 400.0, 400.0, 100.0])
    z, z2 = 0.5 * tokens, np.array([9e9, 0, 0, 0, 200.0, 500.0, 9e9])
    assert spread(tokens, z, z2) == pytest.approx((500 / 400 - 0.25) / (200 / 400 - 0.25))
    one = np.array([2.0])
    assert likelihood(one, one * 4, one * math.log(3)) == pytest.approx(
        0.5 * (math.log(4) + math.log(3))
    )
    tokens = np.zeros(15)
    tokens[[1, 5]] = 100, 200
    delta2 = 3.0 * tokens
    delta2[5] = 100.0
    assert rare_excess(tokens, delta2) == pytest.approx(6.0)


# Archive


@pytest.fixture(scope="module")
def archive():
    run = {"steps": 3, "prompts": 2, "group_size": 8, "correction": [{"name": "none"}]}
    return Archive(RunConfig.read(run), keep=2, stride=2)


def test_any_kept_version_draws_and_scores(archive):
    """Version 0 of two kept ones, two apart, is that after the first of three steps."""
    assert archive.run.trainer.version == 3
    drawn = archive.draw(Staleness(inter=1), "float32", 2, size=3)
    assert [t.id for t in drawn] == [
        RolloutId(0, 500_000 + group, member) for group in range(2) for member in range(3)
    ]
    recorded = sampled_column(drawn, "behavior_logprobs")
    for version, largest in ((0, 2e-4), (1, 10.0)):
        scored = policy_logprobs(archive.log_distributions(version, drawn), drawn)
        error = np.abs(scored - recorded).max()
        assert (error > 1e-3) == (version == 1)
        assert error < largest
    with pytest.raises(ValueError, match="need 4 steps"):
        Archive(RunConfig.read({"steps": 3}), keep=5)


# Switches


def test_offsets_from_the_nearest_switch():
    versions = np.array([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2])
    assert switch_offsets(versions).tolist() == [4, 4, -3, -2, -1, 0, 1, -1, 0, 1, 2, 3, 4]


def test_a_token_is_held_against_its_matches_only():
    control = Tokens(
        np.array([7] * 5 + [8] * 5 + [9] * 4),
        np.full(14, 4),
        {"x": np.array([1.0] * 5 + [3.0] * 5 + [100.0] * 4)},
    )
    found = Tokens(
        np.array([7, 8, 9, 5]), np.array([0, 0, 0, 4]), {"x": np.array([2.0, 4.0, 8.0, 16.0])}
    )
    rows = {(r["offset"], r["measure"]): r["value"] for r in matched_rows(found, [control])}
    assert rows["0", "tokens"] == 2.0
    assert rows["0", "unmatched"] == 1.0
    assert rows["0", "x"] == 6.0
    assert rows["0", "control_x"] == 4.0
    assert rows["rest", "tokens"] == 0.0


# Gradients


def test_progress_along_a_direction_is_the_product_of_gradients(archive):
    drawn = archive.draw(Staleness(inter=1), "int3", 4)
    batch = gradients._batch(archive, drawn)
    before = [p.detach().clone() for p in archive.run.trainer.parameters.values()]
    v = gradients.gradient(archive, [gradients._batch(archive, drawn[:16])])
    changes = gradients.changes_along(archive, batch, v)
    policy = gradients._policy(archive, batch)
    for entry in ({"name": "none"}, {"name": "estr", "tau": 0.05}):
        rule = build_correction([entry])
        coefficients, kept = gradients.coefficients_of(batch, policy, rule)
        whole = gradients.gradient(archive, [batch], rule)
        assert float(coefficients @ changes) == pytest.approx(float(whole @ v), rel=0.02)
        assert (kept < 1.0) == (entry["name"] == "estr")
    parts = gradients._batches(archive, drawn, 200)
    assert len(parts) > 2
    torch.testing.assert_close(
        gradients.gradient(archive, parts), gradients.gradient(archive, [batch])
    )
    after = archive.run.trainer.parameters.values()
    assert all(torch.equal(p, old) for p, old in zip(after, before, strict=True))


def test_cosines_are_relative_to_a_fresh_batch():
    sums = np.array([3.0, 4.0, 6.0, 16.0])
    assert fidelity.progress(sums) == pytest.approx(0.5)
    assert fidelity.norm(sums) == pytest.approx(0.5)
    assert fidelity.cosine(sums) == pytest.approx(1.0)
    assert fidelity.cosine(np.array([0.0, 0.0, 6.0, 16.0])) == 0.0
    assert math.isnan(fidelity.progress(np.array([1.0, 1.0, -0.1, 1.0])))


# One tiny run of each


class Direct:
    """A sweep that runs its jobs here and now."""

    def run(self, jobs):
        found = []
        for job in jobs:
            module, _, name = job.function.partition(":")
            config = json.loads(json.dumps(job.config))
            rows = getattr(import_module(module), name)(config)
            found += [{**job.labels, "job": job.digest, **row} for row in rows]
        return found


@pytest.mark.parametrize("name", ["scaling", "switches", "fidelity"])
def test_a_tiny_run_gives_a_report(name, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "QUICK", ((1,), 2, 64))
    monkeypatch.setattr(switches, "SPANS", {"1 switch": (1, 1)})
    monkeypatch.setattr(switches, "QUICK", (2, 4))
    monkeypatch.setattr(fidelity, "QUICK", (2, 4, 4, 6))
    report = find_experiment(name).run(Lab(Direct(), quick=True))
    assert all(path.stat().st_size for path in write_report(name, report, tmp_path))
    measures = {row["measure"] for row in report.rows}
    if name == "scaling":
        sums = scaling.pooled(report.rows)
        assert {source for _, source in sums} == {"bfloat16", "int8", "int4", "int3", "lag 1"}
        moments = {
            source: s["entropy"]["delta2"].sum() / s["entropy"]["tokens"].sum()
            for (_, source), s in sums.items()
        }
        assert 0 < moments["bfloat16"] < moments["int4"] < moments["int3"]
    elif name == "switches":
        assert {"control_entropy", "mask_icepop", "unmatched"} <= measures
        sums = switches.pooled(report.rows)["1 switch", "random", "recompute"]
        assert sums["0"]["tokens"].sum() > 0
    else:
        assert measures == {*fidelity.MEASURES, "cosine"}
        kept = {r["method"]: r["value"] for r in report.rows if r["measure"] == "kept"}
        assert kept["none"] == kept["fresh"] == 1.0
        assert kept["estr, tau 0.2"] < kept["estr"] < 1.0
