"""`switches`: entropy, log-ratio and mask rates around switches of version."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from .. import figures
from ..fits import seed_interval
from ..lab import Claim, Lab, Report
from ..methods import METHODS
from ..moments import Floats
from ..statistics import answer, with_interval
from ..sweep import Job
from ..switch_tokens import REACH
from ..table import Row

TITLE = "what a switch of version does to the tokens around it"

SPANS: dict[str, tuple[int, int]] = {
    "9 switches of 1 step": (9, 1),
    "3 switches of 5 steps": (3, 5),
}
"""name -> (intra, optimizer steps between two versions)"""
STEPS = 40
LEARNING_RATE = 5e-4
GROUPS = 48
QUICK = (15, 8)
"""Steps and groups with --quick."""

MASKING = ("estr", "icepop", "kpop", "dppo", "m2po")
TIGHT = "estr, tau 0.2"

OFFSETS = tuple(str(offset) for offset in range(-REACH, REACH + 1))
LEAST = 0.1
LEAST_RATE = 0.005
"""An effect below these is none."""

Interval = tuple[float, float]
Sums = dict[str, dict[str, Floats]]
"""offset -> measure -> [seeds]"""
Pools = dict[tuple[str, str, str], Sums]
"""(span, switches, kv) -> sums"""


def jobs(lab: Lab) -> list[Job]:
    """One for each span and seed."""
    steps, groups = QUICK if lab.quick else (STEPS, GROUPS)
    corrections = {name: METHODS[name].default[1] for name in MASKING}
    corrections[TIGHT] = METHODS["estr"].variants[1][1]
    return [
        Job(
            {"span": name, "seed": seed},
            {
                "run": {
                    "seed": seed,
                    "steps": steps,
                    "lr": LEARNING_RATE,
                    "correction": [{"name": "none"}],
                },
                "intra": intra,
                "stride": stride,
                "groups": groups,
                "corrections": corrections,
            },
            function="estr.lab.switch_tokens:measure",
        )
        for name, (intra, stride) in SPANS.items()
        for seed in lab.judge_seeds
    ]


def run(lab: Lab) -> Report:
    rows = lab.run(jobs(lab))
    pools = pooled(rows)
    panels = {f"{c[0]}, {c[1]}, kv {c[2]}": _curves(sums) for c, sums in pools.items()}
    draw = functools.partial(
        figures.curves,
        panels,
        xlabel="place after the switch",
        ylabel="over the control, or over tokens out of reach",
    )
    return Report(
        rows,
        claims(pools),
        {"around switches [95 % over seeds]": ratio_lines(pools), "mask rates": mask_lines(pools)},
        draw if panels else None,
    )


def pooled(rows: Sequence[Row]) -> Pools:
    """Sums by seed."""
    rows = [row for row in rows if "offset" in row]
    seeds = {seed: i for i, seed in enumerate(sorted({row["seed"] for row in rows}))}
    pools: Pools = {}
    for row in rows:
        cell = (row["span"], row["switches"], row["kv"])
        sums = pools.setdefault(cell, {}).setdefault(row["offset"], {})
        column = sums.setdefault(row["measure"], np.zeros(len(seeds)))
        column[seeds[row["seed"]]] = row["value"]
    return pools


def matched(sums: Sums, offset: str, name: str) -> tuple[float, Interval]:
    """Mean of a value over the mean of its matches."""
    here = sums[offset]
    return ratio(here[name], here[f"control_{name}"])


def unmatched(sums: Sums, offset: str, name: str) -> tuple[float, Interval]:
    """Mean of a value over its mean at tokens with no switch in reach, wherever they stand."""
    here, rest = sums[offset], sums["rest"]
    sums_of = np.stack([here[name], here["tokens"], rest[name], rest["tokens"]], axis=1)

    def of(found: Floats) -> float:
        value, tokens, other, others = found.tolist()
        return value * others / (tokens * other) if tokens * other > 0 else math.nan

    return of(sums_of.sum(axis=0)), seed_interval(of, sums_of)


def claims(pools: Pools) -> list[Claim]:
    made = []
    for name, what in (("entropy", "entropy"), ("abs_delta", "abs(log pi - log mu)")):
        found = {", ".join(cell): matched(sums, "0", name) for cell, sums in pools.items()}
        made.append(
            Claim(
                f"{what} is raised at the first token after a switch",
                "",
                "; ".join(f"{cell}: {_told(*value)}" for cell, value in found.items()),
                answer({cell: _above(1.0 + LEAST, v[1]) for cell, v in found.items()}),
                f"by more than {LEAST:.0%} of the matched control",
            )
        )
    for method in MASKING:
        rates = {", ".join(c): _excess(sums, method) for c, sums in pools.items()}
        worst = max((v for v, _ in rates.values()), default=math.nan)
        made.append(
            Claim(
                f"{method} masks more at the first token after a switch",
                "",
                f"at most {100 * worst:+.2f} points over the control" if rates else "",
                answer({cell: _above(LEAST_RATE, v[1]) for cell, v in rates.items()}),
                f"by more than {100 * LEAST_RATE:g} points of the matched control",
            )
        )
    return made


def ratio_lines(pools: Pools) -> list[dict[str, str]]:
    return [
        {
            "span": span,
            "switches": switches,
            "kv": kv,
            "ratio": f"{told} {how}",
            **{o: _told(*of(sums, o, name)) for o in OFFSETS},
        }
        for (span, switches, kv), sums in pools.items()
        for name, told in (("entropy", "entropy"), ("abs_delta", "abs delta"))
        for how, of in (("to the control", matched), ("to tokens out of reach", unmatched))
    ]


def mask_lines(pools: Pools) -> list[dict[str, str]]:
    """Per cent of tokens masked: at offset 0 (matched control) and out of reach."""
    return [
        {
            "span": span,
            "switches": switches,
            "kv": kv,
            **{
                method: f"{_rate(sums, '0', f'mask_{method}'):.2f} "
                f"({_rate(sums, '0', f'control_mask_{method}'):.2f}), "
                f"{_rate(sums, 'rest', f'mask_{method}'):.2f}"
                for method in (*MASKING, TIGHT)
            },
        }
        for (span, switches, kv), sums in pools.items()
    ]


def _rate(sums: Sums, offset: str, name: str) -> float:
    here = sums[offset]
    return 100 * ratio(here[name], here["tokens"])[0]


def _excess(sums: Sums, method: str) -> tuple[float, Interval]:
    here = sums["0"]
    more = here[f"mask_{method}"] - here[f"control_mask_{method}"]
    return ratio(more, here["tokens"])


def ratio(above: Floats, below: Floats) -> tuple[float, Interval]:
    """Of sums over seeds [seeds], with its interval; NaN where the lower one is 0."""

    def of(pair: Floats) -> float:
        return float(pair[0] / pair[1]) if pair[1] > 0 else math.nan

    pairs = np.stack([above, below], axis=1)
    return of(pairs.sum(axis=0)), seed_interval(of, pairs)


def _above(least: float, interval: Interval) -> bool | None:
    if interval[0] > least:
        return True
    return False if interval[1] <= least else None


def _told(value: float, interval: Interval) -> str:
    return with_interval(value, *interval, ".2f")


def _curves(sums: Sums) -> dict[str, figures.Points]:
    x = [float(offset) for offset in OFFSETS]
    return {
        f"{told}, {how}": (x, [of(sums, o, name)[0] for o in OFFSETS])
        for name, told in (("entropy", "entropy"), ("abs_delta", "abs delta"))
        for how, of in (("matched", matched), ("unmatched", unmatched))
    }
