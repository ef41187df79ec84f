"""`sensitivity`: accuracy of estr over tau and eps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from .. import figures
from ..lab import Claim, Lab, Report
from ..methods import CLIP, REGIMES
from ..protocol import Choice, cell_jobs
from ..statistics import MARGIN, answer
from ..table import Row, last_values

TITLE = "tau and eps"

TAUS = (0.05, 0.2, 1.0, 4.0)
EPSS = (0.001, 0.01, 0.1)
COMPARED = ("M", "D")
LEARNING_RATE = 5e-4
SEEDS = 5
"""At most; the settings are many, and what is asked is coarse."""


def run(lab: Lab) -> Report:
    taus, epss = ((0.2, 4.0), (0.01,)) if lab.quick else (TAUS, EPSS)
    rows = lab.run(
        [
            job
            for regime in COMPARED
            for tau in taus
            for eps in epss
            for job in cell_jobs(
                lab,
                (regime, "estr"),
                REGIMES[regime],
                Choice(
                    LEARNING_RATE,
                    f"tau {tau:g}, eps {eps:g}",
                    ({"name": "estr", "tau": tau, "eps": eps, **CLIP},),
                ),
                lab.judge_seeds[:SEEDS],
                tau=tau,
                eps=eps,
            )
        ]
    )
    fields = means(rows)
    whole = not lab.quick and len(lab.judge_seeds) >= SEEDS and not lab.only.labels
    return Report(
        rows,
        claims(fields, whole),
        {"mean accuracy at the end": lines(fields)},
        functools.partial(figures.grids, fields, xlabel="tau", ylabel="eps") if fields else None,
    )


Fields = dict[str, dict[tuple[Any, Any], float]]


def means(rows: list[Row]) -> Fields:
    """regime -> (tau, eps) -> mean accuracy over the seeds."""
    values: dict[tuple[Any, ...], list[float]] = {}
    for (*cell, _), value in last_values(rows, "accuracy", "regime", "tau", "eps", "seed").items():
        values.setdefault(tuple(cell), []).append(value)
    fields: Fields = {}
    for (regime, tau, eps), found in values.items():
        fields.setdefault(regime, {})[tau, eps] = fmean(found)
    return fields


def claims(fields: Mapping[str, Mapping[tuple[Any, Any], float]], whole: bool) -> list[Claim]:
    """whole: all settings on all seeds; a part of them decides nothing."""
    near = {
        regime: {cell for cell, value in field.items() if value >= max(field.values()) - MARGIN}
        for regime, field in fields.items()
    }
    shared = set.intersection(*near.values()) if near else set()
    return [
        Claim(
            "one setting of tau and eps serves mismatch and lag alike",
            "one setting for all experiments, tau not public",
            "; ".join(
                f"{regime}: best {max(field.values()):.3f}, worst {min(field.values()):.3f}"
                for regime, field in fields.items()
            ),
            answer({"all": bool(shared) if whole else None} if fields else {}),
            f"settings within {MARGIN:g} of the best in every regime: "
            + (", ".join(f"tau {t:g} eps {e:g}" for t, e in sorted(shared)) or "none"),
        )
    ]


def lines(fields: Mapping[str, Mapping[tuple[Any, Any], float]]) -> list[dict[str, str]]:
    return [
        {
            "regime": regime,
            "eps": f"{eps:g}",
            **{f"tau {tau:g}": f"{v:.3f}" for (tau, e), v in sorted(field.items()) if e == eps},
        }
        for regime, field in fields.items()
        for eps in sorted({eps for _, eps in field})
    ]
