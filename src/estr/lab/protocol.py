"""Tuned on some seeds, judged on others: the same for every method and regime.

grid x TUNE_SEEDS --> best mean accuracy at the end --> JUDGE_SEEDS
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .lab import Lab
from .methods import LEARNING_RATES, REFERENCE, Corrections, Method, Regime
from .statistics import Judgement, Paired, compare_seeds, judge
from .sweep import Job
from .table import Row, by_seed, last_values, select, weighted_means

Cell = tuple[str, str]
"""(regime, method)"""

SYNC_CELL: Cell = (REFERENCE, "none")


@dataclass(frozen=True, slots=True)
class Choice:
    """A point of a method's grid."""

    lr: float
    option: str
    correction: Corrections


def cell_jobs(
    lab: Lab, cell: Cell, regime: Regime, choice: Choice, seeds: Sequence[int], **labels: Any
) -> list[Job]:
    """One job for each seed."""
    name, method = cell
    told = {"regime": name, "method": method, "option": choice.option, "lr": choice.lr, **labels}
    return [
        Job(
            {**told, "seed": seed},
            {
                **lab.base(),
                **regime.config(),
                "correction": list(choice.correction),
                "lr": choice.lr,
                "seed": seed,
            },
        )
        for seed in seeds
    ]


def tune(
    lab: Lab, cells: Mapping[Cell, tuple[Regime, Method]]
) -> tuple[list[Row], dict[Cell, Choice]]:
    """All rows of the grids, and the best point of each cell: highest mean accuracy at the end over
    the tuning seeds, the first of the grid among equals. Without tuning seeds: the default."""
    grids = {
        cell: [Choice(lr, *variant) for lr in LEARNING_RATES for variant in method.variants]
        for cell, (_, method) in cells.items()
    }
    if not lab.tune_seeds:
        return [], {cell: grid[0] for cell, grid in grids.items()}
    jobs = [
        job
        for cell, grid in grids.items()
        for choice in grid
        for job in cell_jobs(lab, cell, cells[cell][0], choice, lab.tune_seeds, phase="tune")
    ]
    rows = lab.run(jobs)
    found = by_seed(last_values(rows, "accuracy", "regime", "method", "option", "lr", "seed"))
    chosen = {}
    for cell, grid in grids.items():
        means = [
            (fmean(found[key].values()), choice)
            for choice in grid
            if (key := (*cell, choice.option, choice.lr)) in found
        ]
        if means:
            chosen[cell] = max(means, key=lambda pair: pair[0])[1]
    return rows, chosen


def judged(
    lab: Lab, cells: Mapping[Cell, tuple[Regime, Method]], chosen: Mapping[Cell, Choice]
) -> list[Row]:
    """The rows of the chosen points on the judging seeds."""
    jobs = [
        job
        for cell, choice in chosen.items()
        for job in cell_jobs(lab, cell, cells[cell][0], choice, lab.judge_seeds, phase="judge")
    ]
    return lab.run(jobs)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a cell came out on the judging seeds. against: its paired difference to synchronous
    training, judgement: after Holm's correction over the methods of its regime."""

    accuracy: Mapping[int, float]
    collapses: int
    rho_mask: float
    against: Paired | None
    judgement: Judgement


def standings(rows: Sequence[Row]) -> dict[Cell, Standing]:
    """Of the judged rows of every cell; reference is SYNC_CELL."""
    rows = select(rows, phase="judge")
    accuracy = by_seed(last_values(rows, "accuracy", "regime", "method", "seed"))
    collapsed = by_seed(last_values(rows, "collapsed", "regime", "method", "seed"))
    masked = weighted_means(rows, "rho_mask", "eligible_tokens", "regime", "method")
    reference = accuracy.get(SYNC_CELL, {})
    pairs = {cell: compare_seeds(found, reference) for cell, found in accuracy.items()}
    judgements: dict[Cell, Judgement] = {}
    for regime in {cell[0] for cell in accuracy}:
        family = {c[1]: p for c, p in pairs.items() if c[0] == regime}
        judgements |= {(regime, method): j for method, j in judge(family).items()}
    return {
        cell: Standing(
            found,
            int(sum(collapsed[cell].values())),
            masked.get(cell, math.nan),
            pairs[cell],
            judgements[cell],
        )
        for cell, found in accuracy.items()
    }


def standing_lines(
    found: Mapping[Cell, Standing], chosen: Mapping[Cell, Choice]
) -> list[dict[str, str]]:
    """The standings as lines of a table, best first within each regime."""
    lines = []
    for cell, standing in sorted(
        found.items(), key=lambda item: (item[0][0], -fmean(item[1].accuracy.values()))
    ):
        values = list(standing.accuracy.values())
        against = standing.against
        choice = chosen.get(cell)
        lines.append(
            {
                "regime": cell[0],
                "method": cell[1],
                "chosen": f"lr {choice.lr:g}, {choice.option}" if choice else "",
                "seeds": str(len(values)),
                "accuracy": f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})",
                "minus sync": "" if against is None or cell == SYNC_CELL else against.told(),
                "judgement": "reference" if cell == SYNC_CELL else standing.judgement,
                "collapses": f"{standing.collapses} of {len(values)}",
                "rho_mask": f"{100 * standing.rho_mask:.2f} %",
            }
        )
    return lines
