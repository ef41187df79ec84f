"""`controls`: estr with one thing taken away, to tell what its gain hangs on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from .. import figures
from ..lab import Claim, Lab, Report
from ..methods import CLIP, METHODS, REGIMES
from ..protocol import Choice, cell_jobs
from ..statistics import MARGIN, answer, compare_seeds, is_better, judge
from ..sweep import Job
from ..table import by_seed, last_values, weighted_means

TITLE = "random mask, shuffled, constant and the trainer's entropy"

TAUS = {"M": 0.2, "D": 4.0}
"""By regime, from the grid of `compare` on its tuning seeds: with the other's, `estr` itself learns
nothing, and there is no gain to take apart."""
LEARNING_RATE = 5e-4
CONTROLS = {
    "random mask": "estr.lab.controls:RandomMask",
    "shuffled entropy": "estr.lab.controls:ShuffledEntropy",
    "constant entropy": "estr.lab.controls:ConstantEntropy",
    "trainer entropy": "estr",
}


def run(lab: Lab) -> Report:
    rows = lab.run([job for regime in TAUS for job in jobs(lab, regime)])
    accuracy = by_seed(last_values(rows, "accuracy", "regime", "method", "seed"))
    masked = weighted_means(rows, "rho_mask", "eligible_tokens", "regime", "method")
    panels: dict[str, dict[str, list[float]]] = {}
    for (regime, method), values in accuracy.items():
        panels.setdefault(regime, {})[method] = list(values.values())
    lines = [
        {
            "regime": regime,
            "method": method,
            "seeds": str(len(values)),
            "accuracy": f"{fmean(values.values()):.3f} "
            f"({min(values.values()):.3f} to {max(values.values()):.3f})",
            "rho_mask": f"{100 * masked.get((regime, method), 0.0):.2f} %",
        }
        for (regime, method), values in accuracy.items()
    ]
    draw = functools.partial(figures.dots, panels, ylabel="held-out accuracy at the end")
    return Report(rows, claims(accuracy), {"accuracy at the end": lines}, draw if panels else None)


def jobs(lab: Lab, regime: str) -> list[Job]:
    """estr itself, no correction, and the controls, all at the regime's tau."""
    options = {"tau": TAUS[regime], "eps": 0.01, **CLIP}
    entries = {"estr": "estr", **CONTROLS}
    found = []
    for method, name in entries.items():
        choice = Choice(LEARNING_RATE, f"tau {TAUS[regime]:g}", ({"name": name, **options},))
        made = cell_jobs(lab, (regime, method), REGIMES[regime], choice, lab.judge_seeds)
        if method == "trainer entropy":
            made = [
                dataclasses.replace(job, config={**job.config, "entropy_of": "trainer"})
                for job in made
            ]
        found += made
    none = Choice(LEARNING_RATE, *METHODS["none"].default)
    return found + cell_jobs(lab, (regime, "none"), REGIMES[regime], none, lab.judge_seeds)


def claims(accuracy: Mapping[Any, Mapping[int, float]]) -> list[Claim]:
    """For each control: is estr better than it?"""
    regimes = [regime for regime in TAUS if (regime, "estr") in accuracy]
    pairs = {
        (regime, control): compare_seeds(accuracy[regime, "estr"], accuracy[regime, control])
        for regime in regimes
        for control in CONTROLS
        if (regime, control) in accuracy
    }
    judged = judge({f"{r}/{c}": pair for (r, c), pair in pairs.items()})
    found = []
    for control in CONTROLS:
        results: dict[str, bool | None] = {}
        told = []
        for regime in regimes:
            pair = pairs.get((regime, control))
            if pair is None:
                continue
            results[regime] = is_better(pair, judged[f"{regime}/{control}"])
            told.append(f"{regime} {pair.told()}")
        found.append(
            Claim(
                f"ESTR is better than with {control}",
                "the entropy is what scales the noise",
                ", ".join(told),
                answer(results),
                f"better by more than {MARGIN:g}, paired by seed, Holm-corrected",
            )
        )
    return found
