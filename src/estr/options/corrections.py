"""Options of the off-policy corrections (one dataclass each; the mathematics stand in
`estr.corrections`, in the file of the same name).

`edge` names the ratio that a rule reads: with behavior mu, proximal q (the trainer's policy at the
start of the batch) and current pi,  "E" is pi/mu, "B" is q/mu, "U" is pi/q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Edge = Literal["E", "B", "U"]


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless condition holds; the recipe reader adds the key's place."""
    if not condition:
        raise ValueError(message)


def _check_clip(clip_low: float, clip_high: float) -> None:
    why = "the ratio is clipped to [1 - clip_low, 1 + clip_high]"
    require(0 < clip_low <= 1, f"clip_low must be in (0, 1], not {clip_low}: {why}")
    require(
        clip_high > 0 and math.isfinite(clip_high),
        f"clip_high must be finite and above 0, not {clip_high}: {why}",
    )


@dataclass(frozen=True, slots=True)
class NoneOptions:
    """No mask, clipped surrogate. edge E clips pi/mu; edge U ignores mu and clips pi/q, as a
    trainer that recomputes its old log-probs does."""

    edge: Literal["E", "U"] = "E"
    """E: the ratio pi/mu; U: the ratio pi/q."""
    clip_low: float = 0.2
    """Ratios are clipped at 1 - clip_low from below."""
    clip_high: float = 0.2
    """Ratios are clipped at 1 + clip_high from above."""

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)


@dataclass(frozen=True, slots=True)
class EstrOptions:
    """Entropy-Scaled Trust Region: keep iff delta^2 <= tau * (H + eps). tau = inf keeps all.

    The paper's tau is not public; 1.0 is only where to start."""

    tau: float = 1.0
    """Scale of the trust region; above 0, inf: keep all."""
    eps: float = 0.01
    """Added to the entropy, nats; above 0."""
    clip_low: float = 0.2
    """Ratios are clipped at 1 - clip_low from below."""
    clip_high: float = 0.2
    """Ratios are clipped at 1 + clip_high from above."""

    def __post_init__(self) -> None:
        require(self.tau > 0, f"tau must be above 0, not {self.tau}")
        require(self.eps > 0 and math.isfinite(self.eps), f"eps must be above 0, not {self.eps}")
        _check_clip(self.clip_low, self.clip_high)


@dataclass(frozen=True, slots=True)
class IcepopOptions:
    """Keep iff alpha <= ratio <= beta. edge E: weight 1, surrogate on pi/mu. edge B (the original):
    weight q/mu inside the band, surrogate on pi/q."""

    edge: Literal["E", "B"] = "E"
    """E: mask on pi/mu; B: mask and weight q/mu, surrogate on pi/q."""
    alpha: float = 0.5
    """Lowest ratio that is kept."""
    beta: float = 5.0
    """Highest ratio that is kept."""
    clip_low: float = 0.2
    """Ratios are clipped at 1 - clip_low from below."""
    clip_high: float = 0.2
    """Ratios are clipped at 1 + clip_high from above."""

    def __post_init__(self) -> None:
        require(
            0 <= self.alpha < self.beta,
            f"alpha must be at least 0 and below beta, not {self.alpha} and {self.beta}",
        )
        _check_clip(self.clip_low, self.clip_high)


@dataclass(frozen=True, slots=True)
class KpopOptions:
    """Keep iff both Bernoulli divergences between pi and mu on "this token against the rest" are
    at most phi. `saturate` reproduces unguarded float32, which masks every token whose probability
    rounds to 1."""

    edge: Literal["E", "B"] = "E"
    """E: pi against mu; B: q against mu, surrogate on pi/q."""
    phi: float = 0.75
    """Largest divergence that is kept, nats; above 0."""
    saturate: bool = False
    """Reproduce unguarded float32."""
    clip_low: float = 0.2
    """Ratios are clipped at 1 - clip_low from below."""
    clip_high: float = 0.2
    """Ratios are clipped at 1 + clip_high from above."""

    def __post_init__(self) -> None:
        require(self.phi > 0, f"phi must be above 0, not {self.phi}")
        _check_clip(self.clip_low, self.clip_high)


CORRECTION_OPTIONS: dict[str, type] = {
    "none": NoneOptions,
    "estr": EstrOptions,
    "icepop": IcepopOptions,
    "kpop": KpopOptions,
}
"""The registered names. A correction of one's own is named "module:Class" instead; the class
carries its options dataclass as the attribute `Options`."""
