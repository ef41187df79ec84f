"""`fidelity`: what a rule makes of the gradient, beside the on-policy gradient at the same
weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from .. import figures
from ..fits import seed_interval
from ..gradients import ON_POLICY
from ..lab import Claim, Lab, Report
from ..methods import OPTIONS, REGIMES
from ..moments import Floats
from ..rules import Setting, entrants
from ..statistics import answer, with_interval
from ..sweep import Job
from ..table import Row

TITLE = "gradients of the rules against the on-policy gradient"

STEPS = 25
GROUPS = 128
NORM_GROUPS = 12
REFERENCE_GROUPS = 512
QUICK = (10, 8, 4, 8)
"""With --quick, in the same order, in the first regime alone."""
COMPARED = {5e-4: ("M", "D", "MD"), 2e-3: ("D",)}
"""Learning rate of the weights' history -> regimes: those that `rules` trains in, and drift at the
smaller step."""

ESTR = "estr"
RIVALS = (
    "none",
    "icepop",
    "kpop, phi 0.05",
    "tis, level sequence, cap 2",
    "dppo",
    "outward_token",
    "token_sequence",
)

DEFAULTS = (*entrants(), "none_u", "no_clip")
"""Shown apart, and drawn."""

MEASURES = ("progress", "square", "kept")

Interval = tuple[float, float]
Pools = dict[tuple[str, str], dict[str, Floats]]
"""(regime, method) -> measure -> [seeds]"""


def corrections() -> dict[str, Any]:
    """Every setting of every rule and baseline of `rules` whose numbers need no training, and two
    forms of no correction; a default goes by the name of its rule alone."""
    found: dict[str, Any] = {
        named(name, setting): setting.correction
        for name, rule in entrants().items()
        for setting in rule.settings
        if not setting.noise_floor
    }
    return found | {name: OPTIONS[name].default[1] for name in ("none_u", "no_clip")}


def named(name: str, setting: Setting) -> str:
    default = setting == entrants()[name].settings[0]
    return name if default else f"{name}, {setting.option}"


def regime_label(regime: str, lr: float) -> str:
    return f"{regime}, lr {lr:g}"


def jobs(lab: Lab) -> list[Job]:
    """One for each learning rate and seed."""
    usual = (STEPS, GROUPS, NORM_GROUPS, REFERENCE_GROUPS)
    steps, groups, norm_groups, reference_groups = QUICK if lab.quick else usual
    compared = {5e-4: ("M",)} if lab.quick else COMPARED
    return [
        Job(
            {"lr": lr, "seed": seed},
            {
                "run": {
                    "seed": seed,
                    "steps": steps,
                    "lr": lr,
                    "correction": [{"name": "none"}],
                },
                "regimes": {regime_label(r, lr): REGIMES[r].config() for r in regimes},
                "corrections": corrections(),
                "groups": groups,
                "norm_groups": norm_groups,
                "reference_groups": reference_groups,
            },
            function="estr.lab.gradients:measure",
        )
        for lr, regimes in compared.items()
        for seed in lab.judge_seeds
    ]


def run(lab: Lab) -> Report:
    rows = lab.run(jobs(lab))
    found = measured(pooled(rows))
    shown = {cell: value for cell, value in found.items() if cell[1] in DEFAULTS}
    panels: dict[str, dict[str, list[float]]] = {}
    for (regime, method), value in shown.items():
        panels.setdefault(regime, {})[method] = [value.cosine[0]]
    draw = functools.partial(figures.dots, panels, ylabel="relative cosine", lines={"fresh": 1})
    tables = {
        "gradients of the defaults [95 % over seeds]": lines(shown),
        "the reference": reference_lines(rows),
        "every setting": lines(found),
    }
    return Report(rows, claims(found), tables, draw if panels else None)


@dataclass(frozen=True, slots=True, eq=False)
class Fidelity:
    """Of a rule, each over a fresh batch's with its interval over seeds. progress: along the
    on-policy gradient; norm: of a batch's gradient; cosine = progress / norm, the cheap selector:
    how far a step of given norm goes along the on-policy gradient. kept: share of tokens. sums
    [seeds, 4]: progress, square, and those of the fresh batch."""

    sums: Floats
    progress: tuple[float, Interval]
    norm: tuple[float, Interval]
    cosine: tuple[float, Interval]
    kept: float


def pooled(rows: Sequence[Row]) -> Pools:
    """Values by seed; a fresh batch stands under the regimes of its learning rate as "fresh"."""
    rows = [row for row in rows if row["measure"] in MEASURES]
    regimes = {row["regime"]: row["lr"] for row in rows if row["regime"] != ON_POLICY}
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in rows:
        fresh = row["regime"] == ON_POLICY
        own = [regime for regime, lr in regimes.items() if lr == row["lr"]]
        for regime in own if fresh else [row["regime"]]:
            values = found.setdefault((regime, row["method"]), {})
            values.setdefault(row["measure"], {})[row["seed"]] = row["value"]
    return {
        cell: {name: np.array([v for _, v in sorted(by.items())]) for name, by in values.items()}
        for cell, values in found.items()
    }


def measured(pools: Pools) -> dict[tuple[str, str], Fidelity]:
    found = {}
    for (regime, method), own in pools.items():
        fresh = pools[regime, "fresh"]
        if method == "fresh":
            continue
        columns = [values[name] for values in (own, fresh) for name in ("progress", "square")]
        sums = np.stack(columns, axis=1)
        found[regime, method] = Fidelity(
            sums,
            progress=(progress(sums.sum(axis=0)), seed_interval(progress, sums)),
            norm=(norm(sums.sum(axis=0)), seed_interval(norm, sums)),
            cosine=(cosine(sums.sum(axis=0)), seed_interval(cosine, sums)),
            kept=float(own["kept"].mean()),
        )
    return found


def progress(sums: Floats) -> float:
    """Of sums over seeds (progress, square, and those of the fresh batch): over the fresh one's;
    NaN where that is not above 0."""
    own, _, fresh, _ = sums.tolist()
    return own / fresh if fresh > 0 else math.nan


def norm(sums: Floats) -> float:
    """The root of the squares' ratio."""
    _, own, _, fresh = sums.tolist()
    return math.sqrt(own / fresh) if fresh > 0 else math.nan


def cosine(sums: Floats) -> float:
    """progress / norm; 0 of a rule that masks everything."""
    length = norm(sums)
    return progress(sums) / length if length != 0 else 0.0


def claims(found: Mapping[tuple[str, str], Fidelity]) -> list[Claim]:
    regimes = list(dict.fromkeys(regime for regime, _ in found))
    made = []
    for rival in RIVALS:
        results: dict[str, bool | None] = {}
        told = []
        for regime in regimes:
            value, (low, high) = _difference(found[regime, ESTR], found[regime, rival])
            results[regime] = True if low > 0 else False if high < 0 else None
            told.append(f"{regime}: {with_interval(value, low, high, '+.2f')}")
        made.append(
            Claim(
                f"the gradient of estr is nearer to the on-policy one than that of {rival}",
                "",
                "; ".join(told),
                answer(results),
                "difference of the relative cosines, same rollouts, paired by seed",
            )
        )
    return made


def _difference(first: Fidelity, second: Fidelity) -> tuple[float, Interval]:
    def of(sums: Floats) -> float:
        return cosine(sums[:4]) - cosine(sums[4:])

    pairs = np.concatenate([first.sums, second.sums], axis=1)
    return of(pairs.sum(axis=0)), seed_interval(of, pairs)


def lines(found: Mapping[tuple[str, str], Fidelity]) -> list[dict[str, str]]:
    """The highest cosine first within each regime."""
    ordered = sorted(found.items(), key=lambda item: (item[0][0], -item[1].cosine[0]))
    return [
        {
            "regime": regime,
            "method": method,
            "relative cosine": _told(*value.cosine),
            "norm ratio": _told(*value.norm),
            "progress": _told(*value.progress),
            "kept": f"{100 * value.kept:.1f} %",
        }
        for (regime, method), value in ordered
    ]


def reference_lines(rows: Sequence[Row]) -> list[dict[str, str]]:
    """How well the halves of the on-policy gradient agree."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["measure"] == "cosine":
            found.setdefault(row["lr"], []).append(row["value"])
    return [
        {
            "lr": f"{lr:g}",
            "cosine of the halves": f"{fmean(v):.2f} ({min(v):.2f} to {max(v):.2f})",
        }
        for lr, v in found.items()
    ]


def _told(value: float, interval: Interval) -> str:
    return with_interval(value, *interval, ".2f")
