"""`staleness`: the paper's stress grid, one kind of staleness at a time."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from .. import figures
from ..lab import Claim, Lab, Report
from ..methods import METHODS, REFERENCE, SYNC, Regime
from ..protocol import SYNC_CELL, Choice, cell_jobs
from ..statistics import MIN_PAIRS, Judgement, Paired, answer, compare_seeds, judge
from ..sweep import Job
from ..table import Row, by_seed, last_values, weighted_means

TITLE = "intra 1, 5, 7, 9 and inter 1, 5, 15, 20, 30"

INTRA = (1, 5, 7, 9)
INTER = (1, 5, 15, 20, 30)
SWITCHES = ("even", "random", "turns")
COMPARED = ("estr", "none", "icepop", "dppo")
LEARNING_RATE = 5e-4

NATURAL = (4, 16)
"""max_staleness of real asynchronous runs; their lag is whatever the machine makes of it."""
NATURAL_METHODS = ("estr", "none")
NATURAL_SEEDS = 3


def grid(quick: bool) -> dict[str, Regime]:
    """The regimes by name; intra with its three kinds of switches at 9."""
    found: dict[str, dict[str, Any]] = {f"inter {n}": {"inter": n} for n in INTER}
    found |= {f"intra {n}": {"intra": n} for n in INTRA}
    found |= {f"intra 9, {kind}": {"intra": 9, "switches": kind} for kind in SWITCHES[1:]}
    if quick:
        found = {name: found[name] for name in ("inter 30", "intra 9")}
    return {name: Regime(name, "bfloat16", table) for name, table in found.items()}


def run(lab: Lab) -> Report:
    methods = COMPARED[:2] if lab.quick else COMPARED
    cells: dict[tuple[str, str], Regime] = {SYNC_CELL: SYNC}
    cells |= {
        (name, method): regime for name, regime in grid(lab.quick).items() for method in methods
    }
    jobs = [
        job
        for cell, regime in cells.items()
        for job in cell_jobs(
            lab,
            cell,
            regime,
            Choice(LEARNING_RATE, *METHODS[cell[1]].default),
            lab.judge_seeds,
            phase="judge",
        )
    ]
    rows = lab.run(jobs if lab.quick else [*jobs, *natural_jobs(lab)])
    accuracy = by_seed(last_values(rows, "accuracy", "regime", "method", "seed"))
    collapsed = by_seed(last_values(rows, "collapsed", "regime", "method", "seed"))
    panels: dict[str, dict[str, list[float]]] = {}
    for (regime, method), values in accuracy.items():
        panels.setdefault(regime, {})[method] = list(values.values())
    return Report(
        rows,
        claims(accuracy, collapsed),
        {
            "accuracy at the end": lines(accuracy, collapsed),
            "rho_mask": mask_lines(rows),
        },
        functools.partial(figures.dots, panels, ylabel="held-out accuracy at the end"),
    )


def natural_jobs(lab: Lab) -> list[Job]:
    """The same batches by `estr.train`, engine and trainer at their own speeds."""
    return [
        Job(
            {"regime": f"natural {bound}", "method": method, "seed": seed, "lr": LEARNING_RATE},
            {
                "task": {"name": "calculator"},
                "correction": list(METHODS[method].default[1]),
                "seed": seed,
                "steps": lab.base()["steps"],
                "groups_per_step": 8,
                "group_size": 8,
                "max_staleness": bound,
                "engine": {"dtype": "bfloat16"},
                "trainer": {"lr": LEARNING_RATE, "warmup_steps": 20, "schedule": "constant"},
                "eval": {"every": 0},
            },
            function="estr.lab.natural:train_naturally",
        )
        for bound in NATURAL
        for method in NATURAL_METHODS
        for seed in lab.judge_seeds[:NATURAL_SEEDS]
    ]


def claims(accuracy: Mapping[Any, Any], collapsed: Mapping[Any, Any]) -> list[Claim]:
    own = {
        regime: runs
        for (regime, method), runs in collapsed.items()
        if method == "estr" and not _is_natural(regime)
    }
    total = sum(len(runs) for runs in own.values())
    count = int(sum(sum(runs.values()) for runs in own.values()))
    against = _against_sync(accuracy, "estr")
    judged = judge(against)
    return [
        Claim(
            "ESTR does not collapse anywhere on the grid",
            "intra 1 to 9 and inter 1 to 30 without collapse",
            f"{count} of {total} runs collapsed",
            answer(
                {regime: _survives(own.get(regime, {})) for regime in grid(False)} if own else {}
            ),
            f"collapse: accuracy at the end below half of the start, or non-finite; {MIN_PAIRS} "
            "seeds without one in every cell",
        ),
        Claim(
            "ESTR keeps up with synchronous training all over the grid",
            "intra 1 to 9 and inter 1 to 30",
            ", ".join(f"{r} {p.told()}" for r, p in against.items() if p is not None),
            answer({cell: _kept_up(judged.get(cell)) for cell in (grid(False) if own else ())}),
            "non-inferior to sync, Holm-corrected over the grid",
        ),
    ]


def _survives(runs: Mapping[int, float]) -> bool | None:
    """One collapse is one too many; that there is none takes seeds."""
    if any(runs.values()):
        return False
    return True if len(runs) >= MIN_PAIRS else None


def _kept_up(judgement: Judgement | None) -> bool | None:
    if judgement in (None, "undecided", "too few seeds"):
        return None
    return judgement != "inferior"


def _against_sync(accuracy: Mapping[Any, Any], method: str) -> dict[str, Paired | None]:
    reference = accuracy.get(SYNC_CELL, {})
    return {
        regime: compare_seeds(values, reference)
        for (regime, its), values in accuracy.items()
        if its == method and regime != REFERENCE and not _is_natural(regime)
    }


def _is_natural(regime: str) -> bool:
    return regime.startswith("natural")


def lines(accuracy: Mapping[Any, Any], collapsed: Mapping[Any, Any]) -> list[dict[str, str]]:
    """One line for each regime, one column for each method."""
    table: dict[str, dict[str, str]] = {}
    for (regime, method), values in accuracy.items():
        line = table.setdefault(regime, {"regime": regime})
        count = int(sum(collapsed[regime, method].values()))
        line[method] = f"{fmean(values.values()):.3f} ({count} of {len(values)} collapsed)"
    return _filled(table)


def mask_lines(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The share of masked tokens, over all steps, laid out as the accuracies are."""
    table: dict[str, dict[str, str]] = {}
    shares = weighted_means(rows, "rho_mask", "eligible_tokens", "regime", "method")
    for (regime, method), share in shares.items():
        table.setdefault(regime, {"regime": regime})[method] = f"{100 * share:.2f} %"
    return _filled(table)


def _filled(table: Mapping[str, Mapping[str, str]]) -> list[dict[str, str]]:
    names = dict.fromkeys(name for line in table.values() for name in line)
    return [{name: line.get(name, "") for name in names} for line in table.values()]
