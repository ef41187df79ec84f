"""`compare`: the methods against synchronous training, tuned and judged on different seeds."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from statistics import fmean

from .. import figures
from ..lab import Claim, Lab, Report
from ..methods import ALL_METHODS, METHODS, REGIMES, SYNC
from ..protocol import (
    SYNC_CELL,
    Cell,
    Standing,
    judged,
    standing_lines,
    standings,
    tune,
)
from ..statistics import MARGIN, MIN_PAIRS, answer, compare_seeds, is_better, judge

TITLE = "methods in four regimes against synchronous training"

FIXED = ("icepop", "kpop")
"""The paper's fixed thresholds."""


def run(lab: Lab) -> Report:
    regimes = {"sync": SYNC, **REGIMES}
    cells = {SYNC_CELL: (SYNC, METHODS["none"])} | {
        (regime, method): (regimes[regime], ALL_METHODS[method])
        for regime in (("M", "D") if lab.quick else REGIMES)
        for method in (METHODS if lab.quick else ALL_METHODS)
    }
    rows, chosen = tune(lab, cells)
    rows = [*rows, *judged(lab, cells, chosen)]
    found = standings(rows)
    panels = {
        regime: {m: list(s.accuracy.values()) for (r, m), s in found.items() if r == regime}
        for regime in dict.fromkeys(cell[0] for cell in found)
    }
    draw = functools.partial(figures.dots, panels, ylabel="held-out accuracy at the end")
    return Report(
        rows,
        claims(found),
        {"judged seeds": standing_lines(found, chosen)},
        draw if panels else None,
    )


def claims(found: Mapping[Cell, Standing]) -> list[Claim]:
    """What becomes of the paper's main claims."""
    regimes = [regime for regime in REGIMES if (regime, "estr") in found]
    stale = [regime for regime in regimes if regime != "light"]
    return [
        Claim(
            "asynchronous training without a correction loses accuracy against synchronous",
            "GSM8K 96.07 sync, 60.72 async",
            _values(found, stale, "none"),
            answer({r: _judged(found, r, "none", "inferior") for r in stale}),
            f"lower than sync by more than {MARGIN:g} in the regimes with mismatch or lag",
        ),
        Claim(
            "ESTR keeps up with synchronous training",
            "GSM8K 95.69 against 96.07",
            _values(found, regimes, "estr"),
            answer({r: _judged(found, r, "estr", "better", "non-inferior") for r in regimes}),
            f"non-inferior to sync by the margin of {MARGIN:g}",
        ),
        *(
            Claim(
                f"ESTR is better than {name}",
                f"GSM8K 95.69 against {published}",
                _values(found, stale, name),
                answer({r: _better(found, r, "estr", name) for r in stale}),
                f"better by more than {MARGIN:g}, paired by seed",
            )
            for name, published in (("icepop", "65.01"), ("kpop", "70.51"))
        ),
        Claim(
            "ESTR masks about ten times fewer tokens than fixed thresholds",
            "rho_mask about 10x lower",
            _masks(found, stale),
            answer({r: _masks_less(found, r) for r in stale}),
            "a tenth of both icepop's and kpop's rho_mask",
        ),
    ]


def _values(found: Mapping[Cell, Standing], regimes: list[str], method: str) -> str:
    told = []
    for regime in regimes:
        if (regime, method) in found:
            told.append(f"{regime} {fmean(found[regime, method].accuracy.values()):.3f}")
    if told and SYNC_CELL in found:
        told.append(f"sync {fmean(found[SYNC_CELL].accuracy.values()):.3f}")
    return ", ".join(told)


def _judged(found: Mapping[Cell, Standing], regime: str, method: str, *wanted: str) -> bool | None:
    standing = found.get((regime, method))
    if standing is None or standing.judgement in ("undecided", "too few seeds"):
        return None
    return standing.judgement in wanted


def _better(found: Mapping[Cell, Standing], regime: str, first: str, second: str) -> bool | None:
    """Holm-corrected over the fixed thresholds."""
    if (regime, first) not in found or (regime, second) not in found:
        return None
    family = {
        name: compare_seeds(found[regime, first].accuracy, found[regime, name].accuracy)
        for name in FIXED
        if (regime, name) in found
    }
    return is_better(family[second], judge(family)[second])


def _masks(found: Mapping[Cell, Standing], regimes: list[str]) -> str:
    told = []
    for regime in regimes:
        rates = [
            f"{name} {100 * found[regime, name].rho_mask:.2f} %"
            for name in ("estr", *FIXED)
            if (regime, name) in found
        ]
        told.append(f"{regime}: {', '.join(rates)}")
    return "; ".join(told)


def _masks_less(found: Mapping[Cell, Standing], regime: str) -> bool | None:
    cells = [found.get((regime, name)) for name in ("estr", *FIXED)]
    if any(cell is None or len(cell.accuracy) < MIN_PAIRS for cell in cells):
        return None
    own = found[regime, "estr"].rho_mask
    return all(found[regime, name].rho_mask >= 10 * own for name in FIXED)
