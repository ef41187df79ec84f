"""What is compared: corrections by name with their grids, regimes, and the protocol's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Table = dict[str, Any]
Corrections = tuple[Table, ...]

CLIP: Table = {"clip_low": 0.2, "clip_high": 0.28}
NO_BOUND = 1e9
"""A tau that keeps every token; JSON has no infinity."""

TUNE_SEEDS = (0, 1, 2)
JUDGE_SEEDS = tuple(range(10, 20))
LEARNING_RATES = (5e-4, 2e-3)


@dataclass(frozen=True, slots=True)
class Regime:
    """What stands between the sampler and the trainer."""

    text: str
    arithmetic: str
    staleness: Mapping[str, Any]

    def config(self) -> Table:
        return {"arithmetic": self.arithmetic, "staleness": dict(self.staleness)}


REGIMES: dict[str, Regime] = {
    "light": Regime("light mismatch: int8 sampler, no lag", "int8", {}),
    "M": Regime("heavy mismatch: int4 sampler, no lag", "int4", {}),
    "D": Regime("drift: bf16 sampler, inter 15", "bfloat16", {"inter": 15}),
    "MD": Regime("both: int4 sampler, inter 15 + intra 9", "int4", {"inter": 15, "intra": 9}),
}
REFERENCE = "sync"
SYNC = Regime("synchronous: bf16 sampler, no lag", "bfloat16", {})
"""What every regime is measured against, tuned like a method of its own."""


@dataclass(frozen=True, slots=True)
class Method:
    """A correction and its grid: (value of the tuned option as a label, corrections)."""

    text: str
    variants: Sequence[tuple[str, Corrections]]

    @property
    def default(self) -> tuple[str, Corrections]:
        """What stands for it where nothing is tuned: the first of the grid."""
        return self.variants[0]


def _of(name: str, *options: Table, **common: Any) -> list[tuple[str, Corrections]]:
    """One variant for each set of options; its label is what differs."""
    return [
        (
            ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in o.items()),
            ({"name": name, **common, **o},),
        )
        for o in options
    ]


_OUTWARD: Table = {"side": "outward", "surrogate": "importance"}

METHODS: dict[str, Method] = {
    "none": Method("PPO's clip on pi/mu, no correction", _of("none", {"edge": "E"}, **CLIP)),
    "dual_clip": Method(
        "clip, negative advantages bounded",
        _of("dual_clip", {"bound": 3.0}, {"bound": 1.5}, **CLIP),
    ),
    "icepop": Method(
        "fixed band on the ratio",
        _of("icepop", {"beta": 5.0}, {"beta": 2.0}, {"alpha": 0.8, "beta": 1.25}, **CLIP),
    ),
    "kpop": Method(
        "fixed bound on Bernoulli divergences",
        _of("kpop", {"phi": 0.75}, {"phi": 0.2}, {"phi": 0.05}, **CLIP),
    ),
    "tis": Method(
        "truncated importance weight",
        _of(
            "tis",
            {"cap": 2.0},
            {"level": "sequence", "cap": 2.0},
            {"level": "geometric", "cap": 2.0},
        ),
    ),
    "dppo": Method(
        "outward moves beyond a radius dropped, no clip",
        _of("dppo", {"radius": 0.15}, {"radius": 0.05}, {"divergence": "kl", "radius": 0.05}),
    ),
    "m2po": Method(
        "second moment held to a budget",
        _of("m2po", {"budget": 0.04}, {"budget": 0.2}, {"budget": 0.01}),
    ),
    "estr": Method(
        "the paper's entropy-scaled region",
        _of("estr", {"tau": 1.0}, {"tau": 0.2}, {"tau": 4.0}, eps=0.01, **CLIP),
    ),
}
"""The eight of the protocol; a list of three at most each, the default first."""

OPTIONS: dict[str, Method] = {
    "none_u": Method("PPO's clip on pi/q, mu ignored", _of("none", {"edge": "U"}, **CLIP)),
    "no_clip": Method(
        "the ratio alone, nothing else", _of("estr", {"tau": NO_BOUND}, surrogate="importance")
    ),
    "estr_outward": Method(
        "estr, outward moves only, no clip",
        _of("estr", {"tau": 0.25}, {"tau": 1.0}, {"tau": 0.06}, **_OUTWARD),
    ),
    "estr_token": Method(
        "the same, scale = token",
        _of("estr", {"tau": 1.0}, {"tau": 0.25}, {"tau": 4.0}, scale="token", **_OUTWARD),
    ),
    "estr_sequence": Method(
        "estr_token under a truncated sequence weight",
        [
            (
                f"tau {tau:g}",
                (
                    {
                        "name": "estr",
                        "tau": tau,
                        "scale": "token",
                        "side": "outward",
                        "surrogate": "none",
                    },
                    {"name": "tis", "level": "sequence", "cap": 2.0},
                ),
            )
            for tau in (1.0, 0.25, 4.0)
        ],
    ),
}
"""Beside the eight: other forms of no correction, and options of ESTR beyond the paper."""

ALL_METHODS: dict[str, Method] = {**METHODS, **OPTIONS}
