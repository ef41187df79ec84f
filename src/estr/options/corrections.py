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
Level = Literal["token", "turn", "sequence", "geometric"]


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

    The paper's tau is not public; 1.0 is only where to start. The options after clip_high are not
    the paper's; their defaults are what the paper does."""

    tau: float = 1.0
    """Scale of the trust region; above 0, inf: keep all."""
    eps: float = 0.01
    """Added to the entropy, nats (to what stands for it); above 0."""
    clip_low: float = 0.2
    """Ratios are clipped at 1 - clip_low from below."""
    clip_high: float = 0.2
    """Ratios are clipped at 1 + clip_high from above."""
    scale: Literal["entropy", "gini", "token", "constant"] = "entropy"
    """What stands for H: the entropy; gini; token: 2(1-p) - gini, p of the drawn token; constant:
    1, one radius for all."""
    side: Literal["both", "outward"] = "both"
    """outward: drop only tokens whose gradient carries them further out."""
    mask: Literal["hard", "soft"] = "hard"
    """soft: drop nothing, weigh with exp(1 - S/tau) outside the region."""
    surrogate: Literal["clip", "importance", "none"] = "clip"
    """clip: PPO's; importance: the ratio alone; none: another correction of the list brings it."""
    restore_cap: float = 5.0
    """With side = outward: ratios of negative advantages are truncated here; the gradient stays, up
    to a log-ratio of 20."""
    restore_floor: float = 0.0
    """With side = outward and surrogate = importance: ratios of positive advantages are lifted to
    at least this; in [0, 1]."""

    def __post_init__(self) -> None:
        require(self.tau > 0, f"tau must be above 0, not {self.tau}")
        require(self.eps > 0 and math.isfinite(self.eps), f"eps must be above 0, not {self.eps}")
        _check_clip(self.clip_low, self.clip_high)
        require(
            self.restore_cap >= 1 + self.clip_high,
            f"restore_cap must be at least 1 + clip_high, not {self.restore_cap}: below it, the "
            "clip would take the restoring gradient away",
        )
        require(
            0 <= self.restore_floor <= 1,
            f"restore_floor must be in [0, 1], not {self.restore_floor}: above 1 it would lift "
            "ratios that have not drifted",
        )
        require(
            self.restore_floor == 0 or (self.side == "outward" and self.surrogate == "importance"),
            f"restore_floor = {self.restore_floor} has a meaning only with side = outward and "
            "surrogate = importance",
        )


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


@dataclass(frozen=True, slots=True)
class TisOptions:
    """Weigh with the importance weight q/mu, truncated at cap. Keeps every token and brings no
    surrogate: clipped on pi/q unless another correction of the list brings one."""

    level: Level = "token"
    """token: each its own; turn: product over its turn; sequence: product over the trajectory;
    geometric: its geometric mean."""
    cap: float = 2.0
    """Largest weight; above 0."""

    def __post_init__(self) -> None:
        require(self.cap > 0, f"cap must be above 0, not {self.cap}")


@dataclass(frozen=True, slots=True)
class MisOptions:
    """Weigh with the importance weight q/mu and drop what lies outside low to high. Brings no
    surrogate: clipped on pi/q unless another correction of the list brings one."""

    level: Level = "token"
    """token: each its own; turn: product over its turn; sequence: product over the trajectory;
    geometric: its geometric mean."""
    low: float = 0.5
    """Lowest weight that is kept."""
    high: float = 2.0
    """Highest weight that is kept."""

    def __post_init__(self) -> None:
        require(
            0 <= self.low < self.high,
            f"low must be at least 0 and below high, not {self.low} and {self.high}",
        )


@dataclass(frozen=True, slots=True)
class DppoOptions:
    """Drop a token iff it has moved outward (A > 0 with pi > mu, A < 0 with pi < mu) beyond a
    divergence of "this token against the rest". The ratio is not clipped."""

    divergence: Literal["tv", "kl"] = "tv"
    """tv: the difference of probabilities; kl: the Bernoulli divergence of mu from pi."""
    radius: float | None = None
    """Largest divergence that is kept; unset: 0.15 for tv, 0.05 for kl."""
    scale: Literal["none", "entropy", "gini"] = "none"
    """entropy: the radius is radius * sqrt(H + eps); gini: the same with gini for H; not the
    paper's."""
    eps: float = 0.01
    """With a scale: added to the entropy (nats) or to gini; above 0."""
    ratio_cap: float = 20.0
    """Ratios are truncated here; the gradient stays, up to a log-ratio of 20."""

    def __post_init__(self) -> None:
        require(
            self.radius is None or self.radius > 0, f"radius must be above 0, not {self.radius}"
        )
        require(self.eps > 0 and math.isfinite(self.eps), f"eps must be above 0, not {self.eps}")
        require(self.ratio_cap > 1, f"ratio_cap must be above 1, not {self.ratio_cap}")

    @property
    def reach(self) -> float:
        """The radius, or its default for the divergence."""
        return self.radius or {"tv": 0.15, "kl": 0.05}[self.divergence]


@dataclass(frozen=True, slots=True)
class M2poOptions:
    """Drop the tokens of largest squared log-ratio of q against mu until the mean over the rest of
    the optimizer step is within a budget. Costs one more forward pass a step. The ratio is not
    clipped."""

    budget: float = 0.04
    """Largest mean of squared log-ratios; above 0."""
    tokens: Literal["harmful", "all"] = "harmful"
    """harmful: count and drop only those whose advantage pushes further out; all: every token."""

    def __post_init__(self) -> None:
        require(self.budget > 0, f"budget must be above 0, not {self.budget}")


@dataclass(frozen=True, slots=True)
class DualClipOptions:
    """No mask, clipped surrogate, and for negative advantages at least bound * A."""

    edge: Literal["E", "U"] = "E"
    """E: the ratio pi/mu; U: the ratio pi/q."""
    bound: float = 3.0
    """Ratio beyond which a negative advantage has no gradient; above 1 + clip_high."""
    clip_low: float = 0.2
    """Ratios are clipped at 1 - clip_low from below."""
    clip_high: float = 0.2
    """Ratios are clipped at 1 + clip_high from above."""

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        require(
            self.bound > 1 + self.clip_high,
            f"bound must be above 1 + clip_high, not {self.bound}: it bounds what the clip leaves",
        )


@dataclass(frozen=True, slots=True)
class DecoupledOptions:
    """Clipped surrogate on pi/q, weighed with q/mu truncated at cap. Keeps every token."""

    cap: float = 5.0
    """Largest weight; above 0."""
    clip_low: float = 0.2
    """Ratios are clipped at 1 - clip_low from below."""
    clip_high: float = 0.2
    """Ratios are clipped at 1 + clip_high from above."""

    def __post_init__(self) -> None:
        require(self.cap > 0, f"cap must be above 0, not {self.cap}")
        _check_clip(self.clip_low, self.clip_high)


CORRECTION_OPTIONS: dict[str, type] = {
    "none": NoneOptions,
    "estr": EstrOptions,
    "icepop": IcepopOptions,
    "kpop": KpopOptions,
    "tis": TisOptions,
    "mis": MisOptions,
    "dppo": DppoOptions,
    "m2po": M2poOptions,
    "dual_clip": DualClipOptions,
    "decoupled": DecoupledOptions,
}
"""The registered names. A correction of one's own is named "module:Class" instead; the class
carries its options dataclass as the attribute `Options`."""
