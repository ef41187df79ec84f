"""The policy loss: one correction, one surrogate, one explicit denominator.

    columns --correction--> keep, weight, surrogate
    log-ratio of the surrogate's edge, 0 where rejected --exp--> ratio --surrogate--> terms
    loss = - sum over kept tokens of weight * term / denominator

The order is what makes it safe: a token is judged on its raw log-ratio, and what is rejected or
not eligible is replaced before exp, so that neither its value nor its gradient can be touched by
whatever stands there. A loss is a sum over one micro-batch; the losses of a step's micro-batches
add up, because the denominators speak of the whole step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .corrections.base import Correction, TokenColumns, Verdict
from .corrections.estr import Estr
from .corrections.surrogates import MAX_LOG_RATIO, ClippedSurrogate, Surrogate, bounded_ratio
from .options.corrections import EstrOptions


class Judged(Protocol):
    """What became of some tokens, as `PolicyLoss` has it."""

    @property
    def kept(self) -> Tensor: ...

    @property
    def clipped(self) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """A micro-batch's share of the loss of an optimizer step, and what became of its tokens.

    loss: scalar, the only member with a gradient. The rest has the columns' shape or is a count (a
    tensor without dimensions). terms: what was maximized, weight included, before the denominator;
    0 where not kept. kept: bool, eligible and inside the trust region. clipped: bool, kept but with
    a surrogate bound active, so without gradient. log_ratio: log pi - log mu; 0 where not eligible
    and where infinite. num_clamped: kept tokens whose log-ratio was cut at +-20. num_impossible:
    eligible tokens that the record says mu could not draw (a behavior log-prob of -inf); they are
    rejected whatever the correction says.
    """

    loss: Tensor
    terms: Tensor
    kept: Tensor
    clipped: Tensor
    log_ratio: Tensor
    num_clamped: Tensor
    num_impossible: Tensor


def policy_loss(
    columns: TokenColumns, correction: Correction, *, denominators: float | Tensor
) -> PolicyLoss:
    """-sum(keep * weight * surrogate(ratio, advantage) / denominators) over a micro-batch.

    denominators: with aggregation "batch" the number of ALL sampled tokens of the optimizer step,
    rejected ones and zero-variance groups included; with "group" a tensor that broadcasts to the
    columns, num_groups * tokens_of_group at each token. Masking therefore never shrinks it.

    The gradient reaches columns.policy_logprobs, and is exactly 0 where a token is not eligible or
    not kept. keep and weight are constants to it. If the correction brings no surrogate it is
    ClippedSurrogate with its default bounds: on edge U under a weight that stands for q/mu
    (Verdict.weight_edge), on edge E otherwise.

    Raises NumericsError and DataError as `TokenColumns.check` does, ValueError on a denominator
    that is not finite and above 0.
    """
    columns.check(correction.needs)
    mask = columns.loss_mask
    denominators = _checked(denominators, mask)
    verdict = correction(columns)
    impossible = mask & (columns.behavior_logprobs == -math.inf)
    keep = verdict.keep & mask & ~impossible
    surrogate = verdict.surrogate or default_surrogate(verdict)
    log_ratio = torch.where(keep, columns.log_ratio(surrogate.edge), 0.0)
    advantages = torch.where(keep, columns.advantages, 0.0)
    values, bounded = surrogate(bounded_ratio(log_ratio), advantages)
    if verdict.weight is not None:
        values = values * torch.where(keep, verdict.weight.detach(), 0.0)
    terms = torch.where(keep, values, 0.0)
    raw = columns.log_ratio("E").detach()
    return PolicyLoss(
        loss=-(terms / denominators).sum(),
        terms=terms.detach(),
        kept=keep,
        clipped=keep & bounded,
        log_ratio=torch.where(raw.isfinite(), raw, 0.0),
        num_clamped=(log_ratio.detach().abs() > MAX_LOG_RATIO).sum(),
        num_impossible=impossible.sum(),
    )


def estr_loss(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    behavior_entropies: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    tau: float,
    eps: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    num_sampled_tokens: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """The ESTR loss alone, for any trainer: (scalar loss, bool keep_mask).

    All tensors have one shape, say [B, T]. loss = -1/num_sampled_tokens * sum of
    M * min(r A, clip(r) A) with r = exp(log pi - log mu) and M = 1 iff
    (log pi - log mu)^2 <= tau * (H + eps), H the entropy (nats) of the whole distribution that the
    token was drawn from. num_sampled_tokens counts the tokens of the whole optimizer step that are
    True in loss_mask, rejected ones included; pass that number in every micro-batch and add up.

    Gradient, errors and numerical rules are those of `policy_loss`; ValueError on options out of
    range (tau > 0, may be inf; eps > 0).
    """
    columns = TokenColumns(
        policy_logprobs=policy_logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
        behavior_entropies=behavior_entropies,
    )
    correction = Estr(EstrOptions(tau, eps, clip_low, clip_high))
    result = policy_loss(columns, correction, denominators=num_sampled_tokens)
    return result.loss, result.kept


def default_surrogate(verdict: Verdict) -> Surrogate:
    return ClippedSurrogate("U" if verdict.weight_edge == "B" else "E")


def _checked(denominators: float | Tensor, mask: Tensor) -> float | Tensor:
    """The denominators, with 1 at places that are not eligible."""
    if isinstance(denominators, Tensor):
        denominators = torch.where(mask, denominators, 1.0)
        if denominators.shape != mask.shape:
            raise ValueError(
                f"denominators of shape {tuple(denominators.shape)} do not broadcast to the "
                f"columns' {tuple(mask.shape)}"
            )
        valid = bool((denominators.isfinite() & (denominators > 0)).all())
    else:
        valid = math.isfinite(denominators) and denominators > 0
    if not valid:
        raise ValueError(
            f"denominators must be finite and above 0, not {denominators}: "
            "they count the sampled tokens of the whole optimizer step"
        )
    return denominators
