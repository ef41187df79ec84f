"""`estr lab rules`: the space, its tuning, its confirmation, and what decides."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from estr.corrections import TokenColumns, build_correction
from estr.errors import ConfigError
from estr.lab.experiments import rules as experiment
from estr.lab.experiments.rules import decide, plan_of, qualifies, tuning_lines
from estr.lab.lab import Lab
from estr.lab.methods import JUDGE_SEEDS
from estr.lab.noise_floor import engine_noise, raise_tau, region_scores, train_above_noise
from estr.lab.rules import BASELINES, CONFIRM_REGIMES, RULES, TWINS, entrants
from estr.lab.training import RunConfig, train_once
from estr.options.corrections import EstrOptions
from lab_sweep_cases import FakeSweep

PAGE = Path(__file__).parents[1] / "docs" / "lab" / "rules.md"


def of_phase(sweep, phase):
    return [job for job in sweep.seen if job.labels.get("phase") == phase]


# The space


def test_every_rule_of_the_page_is_there_and_no_other():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    told = {cells[1].strip(" `"): cells[3] for line in lines if len(cells := line.split("|")) == 5}
    written = {name: numbers for name, numbers in told.items() if name in RULES}
    assert list(written) == list(RULES)
    for name, rule in RULES.items():
        for setting in rule.settings:
            value = setting.noise_floor or setting.correction[0].get("tau")
            value = setting.correction[0].get("radius", value)
            assert f"{value:g}" in written[name].replace(",", " ").split()


def test_every_setting_can_be_built_and_has_a_name_of_its_own():
    for name, rule in entrants().items():
        assert 1 <= len(rule.settings) <= 3, name
        assert len({setting.option for setting in rule.settings}) == len(rule.settings)
        for setting in rule.settings:
            build_correction(setting.correction)
    assert not RULES.keys() & BASELINES.keys()


def test_the_strongest_of_the_trials_has_this_coefficient():
    """A min(prod r, 2), 0 where delta A > 0 and delta^2 > tau (2(1-p) - gini + 0.01); p = 0.5,
    gini 0.5, tau 1: radius sqrt(0.51)."""
    policy = torch.tensor([-0.1, -0.5, -1.5, -0.5]) + math.log(0.5)
    policy.requires_grad_()
    behavior = torch.tensor([-1.0, -1.0, -1.0, -1.0]) + math.log(0.5) + 1.0
    columns = TokenColumns(
        policy_logprobs=policy,
        behavior_logprobs=behavior - 0.3,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        loss_mask=torch.ones(4, dtype=torch.bool),
        behavior_gini=torch.full((4,), 0.5),
        sequence_ids=torch.tensor([0, 0, 1, 1]),
    )
    from estr.losses import policy_loss

    rule = build_correction(RULES["token_sequence"].settings[0].correction)
    policy_loss(columns, rule, denominators=1).loss.backward()
    # delta 0.2, -0.2 | -1.2, -0.2: products 1 and exp(-1.4); the third token is beyond its radius.
    assert policy.grad.tolist() == pytest.approx([-1.0, -1.0, 0.0, math.exp(-1.4)], rel=1e-5)


# Tuning and confirmation


def test_tuning_and_confirmation_never_share_a_seed_or_a_twin():
    sweep = FakeSweep(lambda labels: 0.9 if labels["method"] == "token_turn" else 0.5)
    experiment.run(Lab(sweep))
    tuned, confirmed = of_phase(sweep, "tune"), of_phase(sweep, "confirm")
    assert len(tuned) == 684
    assert len(confirmed) == 490
    assert {job.labels["seed"] for job in tuned} == {0, 1}
    assert {job.labels["seed"] for job in confirmed} == set(JUDGE_SEEDS)
    assert {job.labels["twin"] for job in tuned} == {"calculator", "countdown"}
    assert {job.config["task"]["name"] for job in confirmed} == {"lookup"}
    assert {job.labels["lr"] for job in tuned if job.labels["regime"] == "D"} == {2e-3}
    methods = {job.labels["method"] for job in confirmed}
    assert len(methods - BASELINES.keys()) == 4
    assert "token_turn" in methods


@pytest.mark.parametrize("twin", TWINS)
def test_every_twin_is_played_under_every_weight(twin):
    """With the built-in model, which knows the characters of all twins."""
    table = {"task": TWINS[twin].get("task", {"name": "calculator"}), "arithmetic": "int8"}
    table |= {"steps": 2, "prompts": 2, "group_size": 2, "eval_problems": 2, "eval_k": 1}
    for rule in ("token_turn", "token_geometric"):
        correction = list(RULES[rule].settings[0].correction)
        rows = train_once(
            {**table, "correction": correction, "staleness": {"inter": 1, "intra": 1}}
        )
        last = {row["measure"]: row["value"] for row in rows}
        assert last["eligible_tokens"] > 0
        assert last["nonfinite_run"] == 0.0


def test_one_setting_of_a_rule_serves_all_cells():
    found = {
        ("token_turn", "tau 1"): {"calculator M": [0.9], "countdown M": [0.1]},
        ("token_turn", "tau 0.25"): {"calculator M": [0.5, 0.7]},
        ("token_turn", "tau 4"): {"calculator M": [0.6, 0.6]},
        ("estr", BASELINES["estr"].settings[0].option): {"countdown M": [0.4]},
    }
    plan = plan_of(found)
    first, *_, last = tuning_lines(found)
    assert (first["setting"], first["mean accuracy"], first["least"]) == (
        "tau 0.25",
        "0.600",
        "0.500",
    )
    assert (first["calculator M"], first["countdown M"]) == ("0.600", "")
    assert (last["rule"], last["calculator M"], last["countdown M"]) == ("estr", "", "0.400")
    assert (plan.finalists, plan.baselines) == (("token_turn",), ("estr",))
    assert plan.settings["token_turn"].option == "tau 0.25"


def test_nothing_is_confirmed_without_tuning():
    sweep = FakeSweep(lambda labels: 0.5)
    with pytest.raises(ConfigError, match=r"leaves out all 684 .*phase is tune"):
        experiment.run(Lab(sweep, only={"phase": ["confirm"]}))
    assert sweep.seen == []
    only_tuned = experiment.run(Lab(sweep, only={"phase": ["tune"], "seed": ["0"]}))
    assert len(sweep.seen) == 342
    assert only_tuned.claims == []


def test_the_calculators_runs_are_those_of_compare():
    from estr.lab.methods import REGIMES
    from estr.lab.protocol import Choice, cell_jobs

    lab = Lab(FakeSweep(lambda labels: 0.5))
    choice = Choice(5e-4, *RULES_OF_COMPARE)
    own = {job.digest for job in cell_jobs(lab, ("M", "estr"), REGIMES["M"], choice, (0, 1))}
    assert own <= {job.digest for job in experiment.tune_jobs(lab)}


RULES_OF_COMPARE = (BASELINES["estr"].settings[0].option, BASELINES["estr"].settings[0].correction)


def test_a_noise_floor_is_a_job_of_its_own():
    jobs = experiment.tune_jobs(Lab(FakeSweep(lambda labels: 0.5)))
    lifted = [job for job in jobs if job.labels["method"] == "outward_token_noise"]
    assert {job.config["factor"] for job in lifted} == {1.0, 4.0}
    assert {job.function for job in lifted} == {"estr.lab.noise_floor:train_above_noise"}
    for job in lifted[:2]:
        RunConfig.read(job.config["run"])


# Decision


def accuracies(**by_name):
    """name -> value in every regime, or {regime: value}; ten seeds that differ a little."""
    return {
        (regime, name): {
            seed: (value[regime] if isinstance(value, dict) else value) + 0.001 * (seed % 3)
            for seed in JUDGE_SEEDS
        }
        for name, value in by_name.items()
        for regime in CONFIRM_REGIMES
    }


def decided(finalist, **baselines):
    decisions = decide(accuracies(rule=finalist, **baselines), ["rule"], list(baselines))
    return {regime: a for (regime, _), a in decisions.items()}


def test_a_rule_that_passes_both_conditions_qualifies():
    own = decided(0.8, estr={"light": 0.8, "M": 0.8, "D": 0.6, "MD": 0.6}, dppo=0.79)
    assert qualifies(own) == "holds"
    assert (own["D"].best, own["D"].not_inferior, own["D"].better) == (
        "dppo",
        "non-inferior",
        "better",
    )
    assert (own["light"].best, own["light"].better) == ("estr", "non-inferior")


def test_a_rule_that_is_worse_than_one_baseline_in_one_regime_does_not():
    own = decided(0.8, estr=0.6, icepop={"light": 0.5, "M": 0.9, "D": 0.5, "MD": 0.5})
    assert own["M"].not_inferior == "inferior"
    assert qualifies(own) == "not here"


def test_a_rule_that_is_only_as_good_as_estr_does_not():
    assert qualifies(decided(0.8, estr=0.8)) == "not here"


def test_few_seeds_and_missing_regimes_decide_nothing():
    accuracy = {cell: {10: v[10]} for cell, v in accuracies(rule=0.9, estr=0.2).items()}
    own = {regime: a for (regime, _), a in decide(accuracy, ["rule"], ["estr"]).items()}
    assert qualifies(own) == "undecided"
    partial = {c: v for c, v in accuracies(rule=0.9, estr=0.2).items() if c[0] == "M"}
    found = decide(partial, ["rule"], ["estr"])
    assert qualifies({regime: a for (regime, _), a in found.items()}) == "undecided"
    assert qualifies({}) == "not run"


@pytest.mark.parametrize("part", [{"num_seeds": 5}, {"only": {"method": ["token_turn", "estr"]}}])
def test_a_reduced_field_decides_nothing(part):
    """One finalist far ahead of the one baseline that was left in."""
    sweep = FakeSweep(lambda labels: 0.9 if labels["method"] == "token_turn" else 0.2)
    report = experiment.run(Lab(sweep, **part))
    answers = {claim.claim.split()[0]: claim.answer for claim in report.claims}
    assert answers["token_turn"] == "undecided"
    assert "a part of the runs decides nothing" in report.claims[0].why


# The floor of tau


def test_region_scores_are_what_tau_is_compared_with():
    columns = TokenColumns(
        policy_logprobs=torch.tensor([-1.0, -2.0]),
        behavior_logprobs=torch.tensor([-1.3, -2.0]),
        advantages=torch.ones(2),
        loss_mask=torch.ones(2, dtype=torch.bool),
        behavior_entropies=torch.tensor([0.89, 0.5]),
    )
    assert region_scores(columns, EstrOptions()).tolist() == pytest.approx([0.1, 0.0])


def test_tau_is_raised_and_never_lowered():
    entries = ({"name": "estr", "tau": 0.25}, {"name": "tis"})
    assert raise_tau(entries, 0.1) == (entries, 0.25)
    raised, tau = raise_tau(entries, 2.0)
    assert (raised[0]["tau"], raised[1], tau) == (2.0, {"name": "tis"}, 2.0)
    assert raise_tau([{"name": "estr"}], 0.5)[1] == 1.0


def test_a_coarser_sampler_has_a_higher_floor_and_a_run_says_its_tau():
    table = {
        "correction": [{"name": "estr", "tau": 1e-9, "scale": "token", "side": "outward"}],
        "arithmetic": "int4",
        "staleness": {"inter": 15},
        "prompts": 4,
        "group_size": 4,
        "steps": 1,
        "eval_problems": 4,
        "eval_k": 1,
    }
    fine = engine_noise(RunConfig.read({**table, "arithmetic": "int8"}))
    coarse = engine_noise(RunConfig.read(table))
    assert 0 < 10 * fine < coarse
    rows = train_above_noise({"run": table, "factor": 2.0})
    assert (rows[0]["measure"], rows[0]["value"]) == ("tau", pytest.approx(2 * coarse))
    assert {"accuracy", "rho_mask", "collapsed"} <= {row["measure"] for row in rows}
