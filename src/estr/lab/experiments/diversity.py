"""`diversity`: does keeping high-entropy tokens raise pass@k?"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from statistics import fmean

from .. import figures
from ..lab import Claim, Lab, Report
from ..methods import CLIP, REGIMES, SYNC, Table
from ..protocol import Choice, cell_jobs
from ..statistics import MARGIN, answer, compare_seeds, is_better, judge
from ..sweep import Job
from ..table import Row, by_seed, last_values, weighted_means

TITLE = "pass@k with tokens dropped by their entropy"

TASKS: dict[str, Table] = {
    "random order": {"task": {"name": "calculator", "order": "random"}, "model": "warmstart"},
    "countdown": {"task": {"name": "countdown"}, "model": "warmstart"},
}
COMPARED = {"no lag": SYNC, "D": REGIMES["D"]}
LEARNING_RATE = 5e-4
SHARE = 0.2
K = 16
KS = (1, 4, 16)
QUICK_K = 4

MASKS = {
    "all kept": "none",
    "low dropped": "estr.lab.entropy_masks:DropLow",
    "high dropped": "estr.lab.entropy_masks:DropHigh",
    "any dropped": "estr.lab.entropy_masks:DropAny",
}
KEEPS_HIGH = "low dropped"
RIVALS = ("high dropped", "any dropped", "all kept")

Cell = tuple[str, str, str]
"""(task, regime, mask)"""
Found = Mapping[Cell, Mapping[int, float]]


def run(lab: Lab) -> Report:
    rows = lab.run(jobs(lab))
    ks = (1, QUICK_K) if lab.quick else KS
    found = {k: pass_at(rows, k) for k in ks}
    panels: dict[str, dict[str, list[float]]] = {}
    for (task, regime, mask), values in found[ks[-1]].items():
        panels.setdefault(f"{task}, {regime}", {})[mask] = list(values.values())
    draw = functools.partial(figures.dots, panels, ylabel=f"pass@{ks[-1]}, held out")
    return Report(
        rows,
        [claim(found[ks[-1]], rival, f"pass@{ks[-1]}") for rival in RIVALS]
        + [claim(found[1], RIVALS[0], "pass@1")],
        {"held out, at the end": lines(rows, found)},
        draw if panels else None,
    )


def jobs(lab: Lab) -> list[Job]:
    """Every mask at one share and learning rate; the quick form is one task without lag."""
    tasks: Sequence[tuple[str, Table]] = list(TASKS.items())
    regimes = dict(COMPARED)
    k = K
    if lab.quick:
        tasks, regimes, k = [("calculator", {})], {"no lag": SYNC}, QUICK_K
    found = []
    for task, table in tasks:
        for regime, its in regimes.items():
            for mask, name in MASKS.items():
                options = CLIP if name == "none" else {"share": SHARE, **CLIP}
                choice = Choice(LEARNING_RATE, "", ({"name": name, **options},))
                found += [
                    dataclasses.replace(job, config={**job.config, **table, "eval_k": k})
                    for job in cell_jobs(
                        lab, (regime, mask), its, choice, lab.judge_seeds, task=task
                    )
                ]
    return found


def pass_at(rows: Sequence[Row], k: int) -> Found:
    return by_seed(last_values(rows, f"pass_at_{k}", "task", "regime", "method", "seed"))


def claim(found: Found, rival: str, measure: str) -> Claim:
    """Is what keeps the high-entropy tokens better than `rival`, wherever both were run?"""
    pairs = {
        f"{task}, {regime}": compare_seeds(values, found.get((task, regime, rival), {}))
        for (task, regime, mask), values in found.items()
        if mask == KEEPS_HIGH
    }
    judged = judge(pairs)
    results: dict[str, bool | None] = {}
    told = []
    for cell, pair in pairs.items():
        if pair is None:
            continue
        told.append(f"{cell} {pair.told()}")
        results[cell] = is_better(pair, judged[cell])
    return Claim(
        f"{measure} is higher with low-entropy tokens dropped than with {rival}",
        "AIME pass@4: estr 28.38, sync 27.68, icepop 24.96" if measure != "pass@1" else "",
        "; ".join(told),
        answer(results),
        f"better by more than {MARGIN:g}, {SHARE:.0%} of the tokens dropped, paired by seed, Holm",
    )


def lines(rows: Sequence[Row], found: Mapping[int, Found]) -> list[dict[str, str]]:
    kept = weighted_means(rows, "rho_mask", "eligible_tokens", "task", "regime", "method")
    entropy = by_seed(last_values(rows, "policy_entropy", "task", "regime", "method", "seed"))
    return [
        {
            "task": task,
            "regime": regime,
            "mask": mask,
            "seeds": str(len(values)),
            **{
                f"pass@{k}": f"{fmean(its[task, regime, mask].values()):.3f}"
                for k, its in found.items()
            },
            "entropy, last window": f"{fmean(entropy[task, regime, mask].values()):.3f}"
            if (task, regime, mask) in entropy
            else "",
            "dropped": f"{100 * kept.get((task, regime, mask), 0.0):.1f} %",
        }
        for (task, regime, mask), values in found[1].items()
    ]
