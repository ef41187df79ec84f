"""KL to a frozen reference: values, gradients, effect in the loss and in the reward, resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from estr.check import check_recipe
from estr.checkpoint import restore_trainer, save_trainer
from estr.config import recipe_from_table
from estr.errors import CheckpointError, ConfigError, NumericsError
from estr.kl import kl_estimates, kl_loss
from estr.trainer import Trainer
from estr.weights import MemoryWeightStore
from tiny import draw_groups, tiny_model, tiny_recipe


def trainer(seed: int = 0, **table) -> Trainer:
    return Trainer(tiny_model(seed), tiny_recipe(**table), MemoryWeightStore())


def row(own: Trainer, groups) -> dict:
    (result,) = own.train([groups])
    return result.metrics.to_row()


# -- the estimates --------------------------------------------------------------------------------


def test_values_are_those_of_schulman() -> None:
    policy, ref = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -2.0, -1.0])
    k1, k3 = (kl_estimates(policy, ref, name) for name in ("k1", "k3"))
    torch.testing.assert_close(k1, torch.tensor([0.0, 1.0, -1.0]))
    torch.testing.assert_close(k3, torch.tensor([0.0, math.exp(-1), math.e - 2]))


@pytest.mark.parametrize("distance", [1e-5, -1e-5, 1e-4, 1e-3, -1e-3, 0.1])
def test_k3_has_digits_next_to_the_reference(distance: float) -> None:
    """About d^2 / 2, of which exp(-d) - 1 + d in float32 has none left below d = 1e-4."""
    policy, ref = torch.tensor([-1.0 + distance]), torch.tensor([-1.0])
    d = float(policy.double() - ref.double())
    expected = d**2 / 2 - d**3 / 6 + d**4 / 24 - d**5 / 120
    assert float(kl_estimates(policy, ref, "k3")) == pytest.approx(expected, rel=0.02, abs=0.0)


def test_gradients_are_as_documented() -> None:
    policy = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    ref = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    for name, expected in (
        ("k1", [0.0, 1.0, -1.0]),
        ("k3", [0.0, 1 - math.exp(-1), 1 - math.e]),
    ):
        (gradient,) = torch.autograd.grad(kl_estimates(policy, ref, name).sum(), policy)
        torch.testing.assert_close(gradient, torch.tensor(expected))
        assert not kl_estimates(policy.detach(), ref, name).requires_grad


@pytest.mark.parametrize(("name", "forward"), [("k1", False), ("k3", True)])
def test_expected_gradient_is_that_of_the_divergence_named(name: str, forward: bool) -> None:
    """Exactly, by the sum over the vocabulary: k1 is the gradient of KL(pi, ref), k3 that of
    KL(ref, pi)."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(7, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    weighted = policy.exp().detach() * kl_estimates(policy, ref, name)
    (found,) = torch.autograd.grad(weighted.sum(), logits, retain_graph=True)
    p, q = (ref, policy) if forward else (policy, ref)
    (expected,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_far_tokens_stay_finite_and_nan_is_named() -> None:
    policy = torch.tensor([-80.0, 0.0], requires_grad=True)
    values = kl_estimates(policy, torch.tensor([0.0, -80.0]), "k3")
    assert values.isfinite().all()
    (gradient,) = torch.autograd.grad(values.sum(), policy)
    assert gradient.tolist() == [0.0, 0.0]
    with pytest.raises(NumericsError, match="1 log-ratios"):
        kl_estimates(policy, torch.tensor([math.nan, 0.0]), "k1")


def test_the_loss_has_the_denominators_of_the_step() -> None:
    policy, ref = torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -3.0])
    loss = kl_loss(policy, ref, coefficient=0.5, estimator="k1", denominators=8.0)
    assert float(loss) == pytest.approx(0.5 * (1.0 + 2.0) / 8.0)


# -- in the loss ----------------------------------------------------------------------------------


def test_coefficient_zero_keeps_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    own = trainer()
    passes = []
    score = own.score
    monkeypatch.setattr(own, "score", lambda *given: passes.append(given) or score(*given))
    (result,) = own.train([draw_groups(own.model)])
    assert own.reference is None
    assert len(passes) == 1
    assert all(c.ref_logprobs is None for c in result.consumptions)
    assert "ref_kl_k1" not in result.metrics.to_row()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_policy_is_held_near_the_reference(estimator: str) -> None:
    free = trainer(trainer={"warmup_steps": 0})
    held = trainer(trainer={"warmup_steps": 0}, kl={"coefficient": 5.0, "estimator": estimator})
    groups = draw_groups(free.model)
    measured = trainer(kl={"coefficient": 1e-12})
    distances = []
    for own in (free, held):
        for _ in range(6):
            own.train([groups])
        measured.load_master_state(own.master_state())
        distances.append(row(measured, groups)["ref_kl_k3"])
    assert 0 < distances[1] < 0.5 * distances[0]


def test_the_reference_is_what_the_run_started_from() -> None:
    own = trainer(kl={"coefficient": 0.1, "estimator": "k3"})
    groups = draw_groups(own.model)
    first = row(own, groups)
    assert first["ref_kl_k1"] == first["ref_kl_k3"] == first["kl_loss"] == 0.0
    (result,) = own.train([groups])
    second = result.metrics.to_row()
    assert second["ref_kl_k3"] > 0
    assert second["kl_loss"] == pytest.approx(0.1 * second["ref_kl_k3"], rel=1e-5)
    trajectories = [t for g in groups for t in g.trajectories]
    for t, made in zip(trajectories, result.consumptions, strict=True):
        (segment,) = t.segments
        drawn = segment.sampled
        # They were drawn by the very weights that are the reference.
        np.testing.assert_allclose(
            made.ref_logprobs[drawn], segment.behavior_logprobs[drawn], atol=1e-5
        )
        assert np.isnan(made.ref_logprobs[~drawn]).all()


def test_the_cut_changes_nothing() -> None:
    table = {"kl": {"coefficient": 0.5, "estimator": "k3"}}
    whole = trainer(**table, trainer={"adam_eps": 1.0})
    cut = trainer(**table, trainer={"adam_eps": 1.0, "token_budget": 40})
    groups = draw_groups(whole.model, num_groups=3)
    for _ in range(2):
        rows = [row(own, groups) for own in (whole, cut)]
    for name in ("loss", "kl_loss", "ref_kl_k1", "ref_kl_k3"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-6)


def test_a_step_without_advantages_still_moves_back() -> None:
    own = trainer(kl={"coefficient": 1.0}, trainer={"warmup_steps": 0})
    groups = draw_groups(own.model)
    for _ in range(3):
        own.train([groups])
    flat = [replace(g, advantages=(0.0,) * 4) for g in groups]
    (result,) = own.train([flat])
    assert not result.skipped
    before = result.metrics.to_row()["ref_kl_k3"]
    for _ in range(3):
        after = row(own, flat)["ref_kl_k3"]
    assert 0 < after < before


# -- in the reward --------------------------------------------------------------------------------


def test_the_price_is_taken_from_the_reward_and_the_outcome_stays() -> None:
    table = {"kl": {"coefficient": 0.25, "place": "reward"}, "loss": {"variance_of": "reward"}}
    own = trainer(seed=0, **table)
    groups = draw_groups(tiny_model(seed=1))  # drawn by other weights than the reference
    (result,) = own.train([groups])
    row = result.metrics.to_row()
    rewards = []
    for t, made in zip(
        [t for g in groups for t in g.trajectories], result.consumptions, strict=True
    ):
        (segment,) = t.segments
        drawn = segment.sampled
        distance = (segment.behavior_logprobs - made.ref_logprobs)[drawn].sum()
        rewards.append(t.reward - 0.25 * distance)
    assert row["reward_mean"] == pytest.approx(np.mean(rewards), rel=1e-5)
    assert row["outcome_mean"] == 0.5
    assert "kl_loss" not in row
    first = np.array(rewards[:4])
    expected = (first - first.mean()) / (first.std(ddof=1) + 1e-6)
    np.testing.assert_allclose([c.advantage for c in result.consumptions[:4]], expected, rtol=1e-4)


def test_equal_outcomes_still_teach_nothing_and_unscored_stay_unscored_check_25() -> None:
    own = trainer(kl={"coefficient": 0.25, "place": "reward"})
    first, second = draw_groups(tiny_model(seed=1))
    alike = replace(
        first,
        trajectories=tuple(replace(t, outcome=1.0, reward=1.0) for t in first.trajectories),
        advantages=(0.0,) * 4,
    )
    lost = replace(second.trajectories[3], reward=None, outcome=None)
    second = replace(
        second,
        trajectories=(*second.trajectories[:3], lost),
        advantages=(*second.advantages[:3], None),
    )
    (result,) = own.train([[alike, second]])
    advantages = [c.advantage for c in result.consumptions]
    assert advantages[:4] == [0.0] * 4
    assert advantages[7] is None
    assert all(a for a in advantages[4:7])


# -- resume and settings --------------------------------------------------------------------------


def test_a_resume_keeps_the_reference(tmp_path: Path) -> None:
    table = {"kl": {"coefficient": 0.5, "estimator": "k3"}}
    straight = trainer(**table)
    groups = draw_groups(straight.model)
    for _ in range(2):
        straight.train([groups])
    save_trainer(straight, tmp_path)
    resumed = trainer(**table)
    restore_trainer(resumed, tmp_path)
    rows = [row(own, groups) for own in (straight, resumed)]
    assert rows[0]["ref_kl_k3"] == rows[1]["ref_kl_k3"] > 0
    for name, value in straight.master_state().items():
        assert torch.equal(value, resumed.master_state()[name]), name


def test_another_start_is_refused_at_a_resume(tmp_path: Path) -> None:
    table = {"kl": {"coefficient": 0.5}}
    save_trainer(trainer(**table), tmp_path)
    with pytest.raises(CheckpointError, match="not the one that checkpoint"):
        restore_trainer(trainer(seed=1, **table), tmp_path)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"coefficient": -0.1}, "coefficient must be finite and at least 0, not -0.1"),
        ({"estimator": "k2"}, "must be one of k1, k3"),
        ({"place": "advantage"}, "must be one of loss, reward"),
        ({"coeficient": 0.1}, "kl.coeficient"),
    ],
)
def test_what_the_table_refuses(table: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe_from_table({"kl": table})


def test_check_warns_of_k3_in_the_reward(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    for estimator, warned in (("k1", False), ("k3", True)):
        file.write_text(f'[kl]\ncoefficient = 0.1\nplace = "reward"\nestimator = "{estimator}"\n')
        assert any("hardly holds" in note for note in check_recipe(file).notes) is warned
