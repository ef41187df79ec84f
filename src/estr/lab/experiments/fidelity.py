"""`fidelity`: what a rule makes of the gradient, beside the on-policy gradient at the same
weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import figures
from ..fits import seed_interval
from ..gradients import ON_POLICY
from ..lab import Claim, Lab, Report
from ..methods import ALL_METHODS, METHODS, REGIMES
from ..moments import Floats
from ..statistics import answer
from ..sweep import Job
from ..table import Row

TITLE = "gradients of the rules against the on-policy gradient"

STEPS = 40
GROUPS = 24
REFERENCE_GROUPS = 48
QUICK = (10, 8, 16)
"""With --quick, in the same order, in the first regime alone."""
COMPARED = {5e-4: ("M", "D"), 2e-3: ("D", "MD")}
"""Learning rate of the weights' history -> regimes."""

LEFT_OUT = ("dual_clip", "kpop")

PRODUCTS = ("own", "cross", "reference", "size", "kept")

Interval = tuple[float, float]
Pools = dict[tuple[str, str], dict[str, dict[int, float]]]
"""(regime, method) -> measure -> seed -> value"""


def corrections() -> dict[str, Any]:
    """Methods at their defaults, and two at what heavy mismatch calls for."""
    found = {n: m.default[1] for n, m in ALL_METHODS.items() if n not in LEFT_OUT}
    found["estr, tau 0.2"] = METHODS["estr"].variants[1][1]
    found["kpop, phi 0.05"] = METHODS["kpop"].variants[2][1]
    return found


def jobs(lab: Lab) -> list[Job]:
    """One for each learning rate and seed."""
    steps, groups, reference_groups = QUICK if lab.quick else (STEPS, GROUPS, REFERENCE_GROUPS)
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
                "regimes": {
                    f"{name}, lr {lr:g}": REGIMES[name].config()
                    for name in (("M",) if lab.quick else names)
                },
                "corrections": corrections(),
                "groups": groups,
                "reference_groups": reference_groups,
            },
            function="estr.lab.gradients:measure",
        )
        for lr, names in (list(COMPARED.items())[:1] if lab.quick else COMPARED.items())
        for seed in lab.judge_seeds
    ]


def run(lab: Lab) -> Report:
    rows = lab.run(jobs(lab))
    pools = pooled(rows)
    found = measured(pools)
    panels = {
        regime: {m: [value.cosine[0]] for (its, m), value in found.items() if its == regime}
        for regime in dict.fromkeys(regime for regime, _ in found)
    }
    draw = functools.partial(figures.dots, panels, ylabel="cosine to the on-policy gradient")
    return Report(
        rows, claims(found), {"gradients [95 % over seeds]": lines(found)}, draw if panels else None
    )


@dataclass(frozen=True, slots=True, eq=False)
class Fidelity:
    """Of a rule's expected gradient: cosine to the on-policy one, norm over its norm, both with
    intervals over seeds. noise: mean square of a batch's gradient over that of a fresh batch. kept:
    share of tokens. sums [seeds, 3]: cross, own, reference."""

    sums: Floats
    cosine: tuple[float, Interval]
    norm_ratio: tuple[float, Interval]
    noise: float
    kept: float


def pooled(rows: Sequence[Row]) -> Pools:
    """Products by seed; those of fresh rollouts at each learning rate as a regime of their own."""
    rows = [row for row in rows if row["measure"] in PRODUCTS]
    pools: Pools = {}
    for row in rows:
        fresh = row["regime"] == ON_POLICY
        regime = f"{ON_POLICY}, lr {row['lr']:g}" if fresh else row["regime"]
        pools.setdefault((regime, row["method"]), {}).setdefault(row["measure"], {})[
            row["seed"]
        ] = row["value"]
    return pools


def measured(pools: Pools) -> dict[tuple[str, str], Fidelity]:
    found = {}
    for (regime, method), by_seed in pools.items():
        fresh = pools[f"{ON_POLICY}, lr {regime.rpartition('lr ')[2]}", "fresh"]
        seeds = sorted(by_seed["own"])
        sums = np.array(
            [[by_seed[name][seed] for name in ("cross", "own", "reference")] for seed in seeds]
        )
        size = sum(by_seed["size"].values()) / sum(fresh["size"].values())
        kept = sum(by_seed["kept"].values()) / len(seeds)
        found[regime, method] = Fidelity(
            sums,
            (cosine(sums.sum(axis=0)), seed_interval(cosine, sums)),
            (norm_ratio(sums.sum(axis=0)), seed_interval(norm_ratio, sums)),
            size,
            kept,
        )
    return found


def cosine(sums: Floats) -> float:
    """cross / sqrt(own * reference) of the sums over seeds (cross, own, reference); NaN where an
    estimated square is not above 0. May exceed 1 by its noise."""
    cross, own, reference = sums.tolist()
    return cross / math.sqrt(own * reference) if min(own, reference) > 0 else math.nan


def norm_ratio(sums: Floats) -> float:
    """sqrt(own / reference), as above."""
    _, own, reference = sums.tolist()
    return math.sqrt(own / reference) if min(own, reference) > 0 else math.nan


def projection(value: Fidelity) -> float:
    """The cheap selector: how far a step goes along the on-policy gradient, were all of one norm:
    cosine over the root of the batch's mean square, in units of a fresh batch's."""
    return value.cosine[0] * value.norm_ratio[0] / math.sqrt(value.noise)


def claims(found: Mapping[tuple[str, str], Fidelity]) -> list[Claim]:
    regimes = [r for r in dict.fromkeys(regime for regime, _ in found) if ON_POLICY not in r]
    made = []
    for other in ("none", "icepop", "kpop, phi 0.05", "dppo", "estr_token", "estr_sequence"):
        results: dict[str, bool | None] = {}
        told = []
        for regime in regimes:
            value, (low, high) = _difference(found[regime, "estr"], found[regime, other])
            results[regime] = True if low > 0 else False if high < 0 else None
            told.append(f"{regime}: {value:+.2f} [{low:+.2f}, {high:+.2f}]")
        made.append(
            Claim(
                f"the gradient of estr is nearer to the on-policy one than that of {other}",
                "ESTR keeps the gradient's direction",
                "; ".join(told),
                answer(results),
                "difference of the cosines of expected gradients, same rollouts, paired by seed",
            )
        )
    return made


def _difference(first: Fidelity, second: Fidelity) -> tuple[float, Interval]:
    def of(sums: Floats) -> float:
        return cosine(sums[:3]) - cosine(sums[3:])

    pairs = np.concatenate([first.sums, second.sums], axis=1)
    return of(pairs.sum(axis=0)), seed_interval(of, pairs)


def lines(found: Mapping[tuple[str, str], Fidelity]) -> list[dict[str, str]]:
    """Best selector first within each regime."""
    ordered = sorted(found.items(), key=lambda item: (item[0][0], -_rank(item[1])))
    return [
        {
            "regime": regime,
            "method": method,
            "cosine": _told(*value.cosine),
            "norm ratio": _told(*value.norm_ratio),
            "mean square of a batch": f"{value.noise:.2f}",
            "selector": f"{projection(value):.2f}",
            "kept": f"{100 * value.kept:.1f} %",
        }
        for (regime, method), value in ordered
    ]


def _rank(value: Fidelity) -> float:
    found = projection(value)
    return -math.inf if math.isnan(found) else found


def _told(value: float, interval: Interval) -> str:
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
