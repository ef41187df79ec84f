"""The rule space of `estr lab rules`, written down before any of it was run (docs/lab/rules.md).

    rule = which token is dropped x by what scale x under which surrogate x with which weight

A finite list of named rules, each with at most three settings. One setting of a rule serves all
regimes and tasks: a default cannot know what its user will meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .methods import METHODS, Corrections, Table

RATES = {"light": 2e-3, "M": 5e-4, "D": 2e-3, "MD": 5e-4}
"""Learning rate by regime, the same for every rule."""

TWINS: dict[str, Table] = {
    "calculator": {},
    "countdown": {"task": {"name": "countdown"}, "model": "warmstart"},
    "lookup": {"task": {"name": "lookup"}, "model": "warmstart"},
}
"""By name, what differs from the calculator and its built-in model."""
TUNE_TWINS = ("calculator", "countdown")
CONFIRM_TWIN = "lookup"
TUNE_REGIMES = ("M", "D", "MD")
CONFIRM_REGIMES = ("light", "M", "D", "MD")
NUM_TUNE_SEEDS = 2
NUM_FINALISTS = 4
BETTER_IN = 2
"""Regimes in which a rule must be better than the paper's ESTR."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A rule with numbers in it. option: what tells it from the rule's others. noise_floor: k of
    tau = max(tau, k * q99 of S); 0: tau as it is."""

    option: str
    correction: Corrections
    noise_floor: float = 0.0


@dataclass(frozen=True, slots=True)
class Rule:
    """text: the rule in words. settings: the first stands where nothing is tuned."""

    text: str
    settings: tuple[Setting, ...]


def _estr(taus: tuple[float, ...], *more: Table, noise: float = 0.0, **options: Any) -> Any:
    return tuple(
        Setting(
            f"tau {tau:g}" + (f", k {noise:g}" if noise else ""),
            ({"name": "estr", "tau": tau, "side": "outward", **options}, *more),
            noise,
        )
        for tau in taus
    )


def _weight(level: str) -> Table:
    return {"name": "tis", "level": level, "cap": 2.0}


_RATIO: Table = {"surrogate": "importance"}
_NONE: Table = {"surrogate": "none"}
_CLIP: Table = {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.28}

RULES: dict[str, Rule] = {
    "outward_constant": Rule(
        "outward mask, one radius for all; r A",
        _estr((0.25, 0.04, 1.0), scale="constant", **_RATIO),
    ),
    "outward_entropy": Rule(
        "outward mask, entropy; r A", _estr((0.25, 1.0, 0.06), scale="entropy", **_RATIO)
    ),
    "outward_gini": Rule(
        "outward mask, gini; r A", _estr((0.5, 2.0, 0.12), scale="gini", **_RATIO)
    ),
    "outward_token": Rule(
        "outward mask, 2(1-p) - gini; r A", _estr((1.0, 0.25, 4.0), scale="token", **_RATIO)
    ),
    "outward_token_clip": Rule(
        "outward_token under PPO's clip", _estr((1.0, 0.25, 4.0), scale="token", **_CLIP)
    ),
    "outward_token_lift": Rule(
        "outward_token, restoring ratios lifted to 1",
        _estr((1.0, 0.25), scale="token", restore_floor=1.0, **_RATIO),
    ),
    "outward_token_soft": Rule(
        "outward_token, weighed down outside instead of dropped",
        _estr((1.0, 0.25), scale="token", mask="soft", **_RATIO),
    ),
    "outward_token_noise": Rule(
        "outward_token, tau at least k times the engine's own noise",
        _estr((0.25,), scale="token", noise=1.0, **_RATIO)
        + _estr((0.25,), scale="token", noise=4.0, **_RATIO),
    ),
    "token_sequence": Rule(
        "outward_token's mask, weight min(product over the trajectory, 2); the strongest of trial",
        _estr((1.0, 0.25, 4.0), _weight("sequence"), scale="token", **_NONE),
    ),
    "token_turn": Rule(
        "the same, product over the turn",
        _estr((1.0, 0.25, 4.0), _weight("turn"), scale="token", **_NONE),
    ),
    "token_geometric": Rule(
        "the same, length-normalised: geometric mean over the trajectory",
        _estr((1.0, 0.25, 4.0), _weight("geometric"), scale="token", **_NONE),
    ),
    "constant_sequence": Rule(
        "outward_constant's mask, weight of token_sequence",
        _estr((0.25, 1.0), _weight("sequence"), scale="constant", **_NONE),
    ),
    "dppo_entropy": Rule(
        "dppo, radius by the entropy",
        tuple(
            Setting(f"radius {r:g}", ({"name": "dppo", "scale": "entropy", "radius": r},))
            for r in (0.3, 0.1)
        ),
    ),
    "dppo_gini": Rule(
        "dppo, radius by gini",
        tuple(
            Setting(f"radius {r:g}", ({"name": "dppo", "scale": "gini", "radius": r},))
            for r in (0.4, 0.13)
        ),
    ),
}

BASELINES: dict[str, Rule] = {
    name: Rule(method.text, tuple(Setting(*variant) for variant in method.variants))
    for name, method in METHODS.items()
}
"""The eight of `compare`, with the grids that they have there; "estr" is the paper's."""


def entrants() -> Mapping[str, Rule]:
    """Rules and baselines: both are tuned and judged alike."""
    return {**RULES, **BASELINES}
