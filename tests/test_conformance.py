"""`estr.conformance`: sound losses pass, and a loss with one known fault is caught for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from estr.conformance import LossInputs, Report, check_policy_loss, correction_loss
from estr.errors import ConfigError


def ratio_of(x: LossInputs) -> Tensor:
    log_ratio = torch.where(x.loss_mask, x.policy_logprobs - x.behavior_logprobs, 0.0)
    return log_ratio.clamp(-20.0, 20.0).exp()


def terms(x: LossInputs) -> Tensor:
    """PPO's per-token losses, masked places 0."""
    ratio, advantages = ratio_of(x), torch.where(x.loss_mask, x.advantages, 0.0)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def sound(x: LossInputs) -> Tensor:
    return terms(x).sum() / x.num_sampled_tokens


def mean_of_the_micro_batch(x: LossInputs) -> Tensor:
    return terms(x).sum() / x.loss_mask.sum()


def mean_of_rows(x: LossInputs) -> Tensor:
    return (terms(x).sum(dim=1) / x.loss_mask.sum(dim=1).clamp(min=1)).mean()


def padded_mean(x: LossInputs) -> Tensor:
    return terms(x).mean()


def mean_of_the_kept(x: LossInputs) -> Tensor:
    keep = x.loss_mask & ((ratio_of(x) - 1).abs() < 0.9)
    return torch.where(keep, terms(x), 0.0).sum() / keep.sum()


def numerator_not_masked(x: LossInputs) -> Tensor:
    ratio = (x.policy_logprobs - x.behavior_logprobs).exp()
    return -(ratio * x.advantages).sum() / x.num_sampled_tokens


def multiplied_mask(x: LossInputs) -> Tensor:
    ratio = (x.policy_logprobs - x.behavior_logprobs).clamp(-20, 20).exp()
    return -(ratio * x.advantages * x.loss_mask).sum() / x.num_sampled_tokens


def where_after_exp(x: LossInputs) -> Tensor:
    ratio = (x.policy_logprobs - x.behavior_logprobs).exp()
    values = torch.where(x.loss_mask, ratio * x.advantages, 0.0)
    return -values.sum() / x.num_sampled_tokens


def nan_silently_masked(x: LossInputs) -> Tensor:
    return torch.nan_to_num(terms(x)).sum() / x.num_sampled_tokens


def clip_without_min(x: LossInputs) -> Tensor:
    advantages = torch.where(x.loss_mask, x.advantages, 0.0)
    return -(ratio_of(x).clamp(0.8, 1.2) * advantages).sum() / x.num_sampled_tokens


def wrong_sign(x: LossInputs) -> Tensor:
    return -sound(x)


def reversed_ratio(x: LossInputs) -> Tensor:
    return -(x.advantages / ratio_of(x) * x.loss_mask).sum() / x.num_sampled_tokens


def through_bfloat16(x: LossInputs) -> Tensor:
    return terms(x).bfloat16().sum() / x.num_sampled_tokens


def rounded_logprobs(x: LossInputs) -> Tensor:
    policy = x.policy_logprobs.bfloat16().float()
    ratio = torch.where(x.loss_mask, policy - x.behavior_logprobs, 0.0).exp()
    advantages = torch.where(x.loss_mask, x.advantages, 0.0)
    return -(ratio * advantages).sum() / x.num_sampled_tokens


def later_rows_count_more(x: LossInputs) -> Tensor:
    scale = 1.0 + torch.arange(len(x.loss_mask))[:, None]
    return (terms(x) * scale).sum() / x.num_sampled_tokens


def scales_in_place(x: LossInputs) -> Tensor:
    x.advantages.mul_(0.5)
    return sound(x)


def raises(x: LossInputs) -> Tensor:
    raise KeyError("a column is missing")


FAULTS: dict[Any, set[str]] = {
    mean_of_the_micro_batch: {"micro_batches", "denominator"},
    mean_of_rows: {"micro_batches", "denominator", "padding"},
    padded_mean: {"micro_batches", "denominator", "padding"},
    mean_of_the_kept: {"micro_batches", "denominator", "rejection"},
    numerator_not_masked: {"masked_gradient", "masked_value", "masked_nonfinite"},
    multiplied_mask: {"masked_nonfinite"},
    where_after_exp: {"masked_nonfinite", "extreme_ratio"},
    nan_silently_masked: {"nan_is_visible"},
    clip_without_min: {"restoring"},
    wrong_sign: {"sign", "restoring"},
    reversed_ratio: {"sign", "restoring"},
    through_bfloat16: {"dtype"},
    rounded_logprobs: {"dtype"},
    later_rows_count_more: {"micro_batches", "denominator", "permutation"},
    scales_in_place: {"purity"},
}


def test_a_sound_loss_has_no_fault() -> None:
    report = check_policy_loss(sound)
    assert report.ok, str(report)
    assert report["denominator"].detail == "divides by the count that was handed in"
    assert "(1.5, -1): 1.5" in report["sign"].detail
    assert "(1.5, +1): -1.2" in report["sign"].detail


@pytest.mark.parametrize("loss", FAULTS, ids=lambda loss: loss.__name__)
def test_each_known_fault_is_caught(loss: Any) -> None:
    report = check_policy_loss(loss)
    assert FAULTS[loss] <= set(report.faults), str(report)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (mean_of_the_micro_batch, "the micro-batch's own eligible tokens"),
        (mean_of_rows, "each row's tokens, then the rows"),
        (padded_mean, "the padded size"),
        (lambda x: terms(x).sum(), "nothing (a sum)"),
        (lambda x: terms(x).sum() / len(x.loss_mask), "the rows"),
    ],
)
def test_the_denominator_is_named(loss: Any, kind: str) -> None:
    assert check_policy_loss(loss)["denominator"].detail == f"divides by {kind}"


def test_what_a_loss_raises_becomes_a_finding() -> None:
    report = check_policy_loss(raises)
    assert not report.ok
    assert "raised KeyError" in report["sign"].detail
    assert len(str(report).splitlines()) == len(report.findings)


def test_a_report_reads_as_lines() -> None:
    text = str(check_policy_loss(wrong_sign))
    assert "FAIL sign" in text
    assert "ok   permutation" in text
    assert isinstance(check_policy_loss(sound), Report)


OURS: list[dict[str, Any]] = [
    {"name": "none"},
    {"name": "estr"},
    {"name": "icepop"},
    {"name": "kpop"},
    {"name": "tis"},
    {"name": "dppo"},
    {"name": "dppo", "divergence": "kl"},
    {"name": "dual_clip"},
    {"name": "decoupled"},
]


@pytest.mark.parametrize("entry", OURS, ids=lambda e: "-".join(map(str, e.values())))
def test_our_corrections_conform(entry: dict[str, Any]) -> None:
    report = check_policy_loss(correction_loss([entry]))
    assert report.ok, str(report)


@pytest.mark.parametrize("level", ["sequence", "turn", "geometric"])
def test_weights_of_every_level_are_given_what_they_read(level: str) -> None:
    report = check_policy_loss(correction_loss([{"name": "tis", "level": level}]))
    assert not [f for f in report.findings if "raised" in f.detail], str(report)


@pytest.mark.parametrize(
    "entry", [{"name": "estr", "scale": "gini"}, {"name": "dppo", "scale": "gini"}]
)
def test_a_correction_that_reads_gini_is_refused_at_once(entry: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not given behavior_gini"):
        correction_loss([entry])


def test_m2po_on_its_own_takes_a_micro_batch_for_the_step() -> None:
    """Without the pass over the whole step its limit is that of the columns it is given."""
    report = check_policy_loss(correction_loss([{"name": "m2po", "budget": 1e-4}]))
    assert "micro_batches" in report.faults
