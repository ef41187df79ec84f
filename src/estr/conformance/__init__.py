"""What a policy loss does with its tokens, found out by calling it.

    report = check_policy_loss(my_loss)      # any callable: LossInputs -> scalar
    print(report)

Losses that carry the same name differ in small silent ways: what they divide by, whether masked
places reach the gradient, what an infinite ratio does. Each check calls the loss on small made-up
batches and compares it with itself (cut, permuted, padded, spoiled), so it needs no reference. A
finding that is not ok may be what its author wanted; the detail says what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..corrections import TokenColumns, build_correction
from ..corrections.base import WHOLE_STEP
from ..errors import ConfigError
from ..losses import policy_loss
from .checks import CHECKS, Check
from .inputs import LossFunction, LossInputs

_CARRIED = frozenset(
    {
        "proximal_logprobs",
        "behavior_entropies",
        "sequence_ids",
        "turn_ids",
        "versions",
        WHOLE_STEP,
    }
)

__all__ = [
    "Finding",
    "LossFunction",
    "LossInputs",
    "Report",
    "check_policy_loss",
    "correction_loss",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One property: ok, or not, with what was measured."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `check_policy_loss` found. `str` gives one line for each finding."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    @property
    def faults(self) -> list[str]:
        """Names of the findings that are not ok."""
        return [finding.name for finding in self.findings if not finding.ok]

    def __getitem__(self, name: str) -> Finding:
        return next(finding for finding in self.findings if finding.name == name)

    def __str__(self) -> str:
        return "\n".join(
            f"{'ok  ' if f.ok else 'FAIL'} {f.name:<22} {f.detail}" for f in self.findings
        )


def check_policy_loss(loss: LossFunction) -> Report:
    """Call `loss` on small batches and report, one finding each:

    - micro_batches: the losses and gradients of parts add up to those of the whole
    - denominator: what a token's gradient is divided by, see `estr.conformance.checks`
    - rejection: whether a rejected token changes the weight of the others
    - masked_gradient, masked_value: a masked place has no gradient, and its (finite) content no
      effect
    - masked_nonfinite: NaN and inf in a masked place touch neither value nor gradient
    - extreme_ratio: log-ratios of +-100 with advantage 0 give 0 and leave the rest finite
    - nan_is_visible: a NaN on an eligible token raises or makes the loss NaN, and is not masked
    - sign: no gradient step lowers the probability of A > 0 or raises that of A < 0
    - restoring: tokens that drifted against their advantage (r = 0.5 with A > 0, 1.5 with A < 0)
      still have a gradient; a clip without the min takes it away
    - dtype: float32 stays float32, float64 agrees with it, log-probs are not rounded within
    - permutation, padding: the order of rows, added masked columns and rows change nothing
    - purity: inputs are left as they were, a second call gives the same

    Deterministic, needs no accelerator, takes milliseconds for a loss that does. Whatever the loss
    raises becomes part of a finding.
    """
    return Report(tuple(_attempt(name, check, loss) for name, check in CHECKS.items()))


def _attempt(name: str, check: Check, loss: LossFunction) -> Finding:
    try:
        ok, detail = check(loss)
    except Exception as error:  # noqa: BLE001 - the loss under test may raise anything
        ok, detail = False, f"raised {type(error).__name__}: {error}"
    return Finding(name, ok, detail)


def correction_loss(entries: Sequence[dict[str, Any]]) -> LossFunction:
    """The loss of a recipe's `correction` tables, as a function that can be checked. Each row is
    one sequence of one turn, of one version. Raises ConfigError for corrections that read what
    `LossInputs` has not."""
    correction = build_correction(entries)
    missing = correction.needs - _CARRIED
    if missing:
        raise ConfigError(
            f"a loss that is checked is not given {', '.join(sorted(missing))}, which these "
            "corrections read"
        )

    def loss(inputs: LossInputs) -> Tensor:
        rows = torch.arange(len(inputs.loss_mask))[:, None].expand_as(inputs.loss_mask)
        columns = TokenColumns(
            policy_logprobs=inputs.policy_logprobs,
            behavior_logprobs=inputs.behavior_logprobs,
            advantages=inputs.advantages,
            loss_mask=inputs.loss_mask,
            behavior_entropies=inputs.behavior_entropies,
            sequence_ids=rows,
            turn_ids=rows,
            versions=torch.zeros_like(rows),
        )
        return policy_loss(columns, correction, denominators=inputs.num_sampled_tokens).loss

    return loss
