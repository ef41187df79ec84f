"""From the rewards of a group to the advantages of its members.

A member is scored when it has both a reward and an outcome. Unscored members leave the statistics
and get None, which is not the same as an advantage of zero. Whether a group teaches anything is
read from the raw outcomes: a shaped reward (a length penalty, say) makes members differ that the
task itself holds equal. Where that is wanted, `variance_of` says so. Groups are kept or dropped
whole, and there is no statistic over the whole batch, so what else is in the batch never changes an
advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from .errors import NumericsError

AdvantageKind = Literal["grpo", "no_std", "leave_one_out"]
VarianceOf = Literal["outcome", "reward"]

Float64Array = npt.NDArray[np.float64]

STD_EPS = 1e-6
"""Added to the standard deviation of "grpo"."""


def is_zero_variance(outcomes: Sequence[float | None]) -> bool:
    """Do the outcomes that were graded (not None) all agree? True of none and of a single one.

    Raises NumericsError where one is not finite.
    """
    graded = [value for value in outcomes if value is not None]
    _require_finite("outcome", outcomes)
    return not graded or min(graded) == max(graded)


def group_advantages(
    rewards: Sequence[float | None],
    outcomes: Sequence[float | None],
    *,
    kind: AdvantageKind,
    variance_of: VarianceOf = "outcome",
) -> list[float | None]:
    """The advantage of each member of one group, in float64; None where a member is unscored.

    With R the rewards of the n scored members:

    - "grpo": (R - mean R) / (std R + 1e-6), std with n - 1 (GRPO, arXiv:2402.03300, section 4.1.2)
    - "no_std": R - mean R (Dr. GRPO, arXiv:2503.20783, section 3.2)
    - "leave_one_out": R - mean of the other members' R (RLOO, arXiv:2402.14740)

    Exactly 0.0 where the scored members' outcomes (their rewards, if variance_of says so) do not
    differ, where their rewards do not, and for a group of one. Never NaN.
    Raises NumericsError on a reward or outcome that is not finite, or so large that the statistics
    overflow; ValueError when the two sequences differ in length or the kind is unknown.
    """
    if len(rewards) != len(outcomes):
        raise ValueError(f"{len(rewards)} rewards but {len(outcomes)} outcomes in one group")
    if kind not in get_args(AdvantageKind):
        known = ", ".join(get_args(AdvantageKind))
        raise ValueError(f"advantage kind {kind!r} is unknown; known: {known}")
    _require_finite("reward", rewards)
    scored = [
        i
        for i, (reward, outcome) in enumerate(zip(rewards, outcomes, strict=True))
        if reward is not None and outcome is not None
    ]
    advantages: list[float | None] = [None] * len(rewards)
    compared = [rewards] if variance_of == "reward" else [outcomes, rewards]
    # Equal rewards too: R - mean R is then what rounding leaves, and not 0.
    if any(is_zero_variance([column[i] for i in scored]) for column in compared):
        values = np.zeros(len(scored))
    else:
        values = _baselined(np.array([rewards[i] for i in scored], dtype=np.float64), kind)
    for i, value in zip(scored, values, strict=True):
        advantages[i] = float(value)
    return advantages


def _baselined(rewards: Float64Array, kind: AdvantageKind) -> Float64Array:
    """Advantages of at least two rewards."""
    num_members = len(rewards)
    with np.errstate(over="ignore", invalid="ignore"):
        advantages: Float64Array = rewards - rewards.mean()
        scale = 1.0
        if kind == "grpo":
            scale = float(rewards.std(ddof=1)) + STD_EPS
        elif kind == "leave_one_out":
            # R - mean of the others = (R - mean of all) * n / (n - 1)
            scale = (num_members - 1) / num_members
        advantages /= scale
    if not (math.isfinite(scale) and np.isfinite(advantages).all()):
        raise NumericsError(
            f"rewards {rewards.tolist()} are too large for their statistics; scale them down"
        )
    return advantages


def _require_finite(what: str, values: Sequence[float | None]) -> None:
    for i, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise NumericsError(
                f"{what} of member {i} is {value}; a member that cannot be scored has None"
            )
