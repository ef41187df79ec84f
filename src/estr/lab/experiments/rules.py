"""`rules`: the rule space written down beforehand, tuned on two twins, confirmed on a third."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .. import figures
from ..lab import Claim, Lab, Report
from ..methods import JUDGE_SEEDS, REGIMES, SYNC
from ..protocol import Cell, Choice, cell_jobs
from ..rules import (
    BASELINES,
    BETTER_IN,
    CONFIRM_REGIMES,
    CONFIRM_TWIN,
    NUM_FINALISTS,
    NUM_TUNE_SEEDS,
    RATES,
    RULES,
    TUNE_REGIMES,
    TUNE_TWINS,
    TWINS,
    Setting,
    entrants,
)
from ..statistics import MARGIN, Answer, Judgement, Paired, compare_seeds, judge
from ..sweep import Job
from ..table import Row, by_seed, last_values, weighted_means

TITLE = "the rule space, tuned on two twins, confirmed on a third"

PAPER = "estr"
REFERENCE = "no lag"
"""The regime of synchronous training, there for orientation: nothing is decided by it."""
QUICK = (("outward_token", "token_sequence"), ("estr", "dppo"), ("M",), "calculator")
"""With --quick: finalists, baselines, regimes and twin, all at their first setting."""

Accuracy = Mapping[Cell, Mapping[int, float]]
Scores = dict[tuple[str, str], dict[str, list[float]]]
"""(name, option) -> twin and regime -> accuracy at the end of each tuning run there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is confirmed: names, where, and the setting of each."""

    finalists: tuple[str, ...]
    baselines: tuple[str, ...]
    regimes: tuple[str, ...]
    twin: str
    settings: Mapping[str, Setting]


def run(lab: Lab) -> Report:
    rows: list[Row] = []
    if lab.quick:
        finalists, baselines, regimes, twin = QUICK
        firsts = {name: rule.settings[0] for name, rule in entrants().items()}
        plan = Plan(finalists, baselines, regimes, twin, firsts)
        found: Scores = {}
    else:
        rows = lab.run(tune_jobs(lab))
        found = scores(rows)
        plan = plan_of(found)
    if lab.only.wants("phase", "confirm"):
        rows += lab.run(confirm_jobs(lab, plan))
    confirmed = [row for row in rows if row.get("phase") == "confirm"]
    accuracy = by_seed(last_values(confirmed, "accuracy", "regime", "method", "seed"))
    decisions = decide(accuracy, plan.finalists, plan.baselines)
    panels: dict[str, dict[str, list[float]]] = {}
    for (regime, method), values in accuracy.items():
        panels.setdefault(regime, {})[method] = list(values.values())
    whole = len(lab.judge_seeds) == len(JUDGE_SEEDS) and set(lab.only.labels) <= {"phase"}
    return Report(
        rows,
        claims(decisions, whole and not lab.quick),
        {
            "tuning": tuning_lines(found),
            "confirmation": confirmation_lines(confirmed, accuracy, plan),
            "decision": decision_lines(decisions),
        },
        functools.partial(figures.dots, panels, ylabel="held-out accuracy at the end")
        if panels
        else None,
    )


def tune_jobs(lab: Lab) -> list[Job]:
    """Every setting of every rule and baseline, on two twins."""
    return [
        job
        for twin in TUNE_TWINS
        for regime in TUNE_REGIMES
        for name, rule in entrants().items()
        for setting in rule.settings
        for job in jobs_of(
            lab, (regime, name), setting, lab.tune_seeds[:NUM_TUNE_SEEDS], phase="tune", twin=twin
        )
    ]


def confirm_jobs(lab: Lab, plan: Plan) -> list[Job]:
    """Finalists and baselines at one setting each, and synchronous training beside them."""
    if not plan.finalists:
        return []
    reference = BASELINES["none"].settings[0]
    cells = [((REFERENCE, "none"), reference)] + [
        ((regime, name), plan.settings[name])
        for regime in plan.regimes
        for name in (*plan.finalists, *plan.baselines)
    ]
    return [
        job
        for cell, setting in cells
        for job in jobs_of(lab, cell, setting, lab.judge_seeds, phase="confirm", twin=plan.twin)
    ]


def jobs_of(
    lab: Lab, cell: Cell, setting: Setting, seeds: Sequence[int], *, phase: str, twin: str
) -> list[Job]:
    """One job for each seed, at the learning rate of its regime."""
    regime = REGIMES.get(cell[0], SYNC)
    choice = Choice(RATES.get(cell[0], RATES["light"]), setting.option, setting.correction)
    jobs = [
        dataclasses.replace(job, config={**job.config, **TWINS[twin]})
        for job in cell_jobs(lab, cell, regime, choice, seeds, phase=phase, twin=twin)
    ]
    if not setting.noise_floor:
        return jobs
    return [
        dataclasses.replace(
            job,
            config={"run": job.config, "factor": setting.noise_floor},
            function="estr.lab.noise_floor:train_above_noise",
        )
        for job in jobs
    ]


def scores(rows: Iterable[Row]) -> Scores:
    found: Scores = {}
    keys = ("method", "option", "twin", "regime", "seed")
    for (name, option, twin, regime, _), value in last_values(rows, "accuracy", *keys).items():
        there = found.setdefault((name, option), {})
        there.setdefault(f"{twin} {regime}", []).append(value)
    return found


def _runs(by_cell: Mapping[str, Sequence[float]]) -> list[float]:
    return [value for values in by_cell.values() for value in values]


def plan_of(found: Scores) -> Plan:
    """Of each name the setting of highest mean accuracy, the first among equals; the best rules by
    that mean are finalists."""
    best: dict[str, tuple[float, Setting]] = {}
    for name, rule in entrants().items():
        for setting in rule.settings:
            values = _runs(found.get((name, setting.option), {}))
            if values and (name not in best or fmean(values) > best[name][0]):
                best[name] = (fmean(values), setting)
    ranked = sorted((n for n in best if n in RULES), key=lambda n: -best[n][0])
    return Plan(
        tuple(ranked[:NUM_FINALISTS]),
        tuple(n for n in BASELINES if n in best),
        CONFIRM_REGIMES,
        CONFIRM_TWIN,
        {name: setting for name, (_, setting) in best.items()},
    )


@dataclass(frozen=True, slots=True)
class Against:
    """A finalist in one regime against the best baseline there, and against the paper's ESTR."""

    best: str
    to_best: Paired
    not_inferior: Judgement
    to_paper: Paired | None
    better: Judgement


def decide(
    accuracy: Accuracy, finalists: Sequence[str], baselines: Sequence[str]
) -> dict[Cell, Against]:
    """(regime, finalist) -> how it came out; both families Holm-corrected over all cells. The best
    baseline is the one of highest mean on the very seeds that judge, which is in its favor."""
    to_best: dict[Cell, tuple[str, Paired]] = {}
    to_paper: dict[Cell, Paired | None] = {}
    for regime in dict.fromkeys(regime for regime, _ in accuracy):
        there = {n: accuracy[regime, n] for n in baselines if (regime, n) in accuracy}
        if not there or regime == REFERENCE:
            continue
        best = max(there, key=lambda n: fmean(there[n].values()))
        for name in finalists:
            own = accuracy.get((regime, name), {})
            pair = compare_seeds(own, there[best])
            if pair is not None:
                to_best[regime, name] = (best, pair)
                to_paper[regime, name] = compare_seeds(own, there.get(PAPER, {}))
    first = judge({"/".join(cell): pair for cell, (_, pair) in to_best.items()})
    second = judge({"/".join(cell): pair for cell, pair in to_paper.items()})
    return {
        cell: Against(best, pair, first["/".join(cell)], to_paper[cell], second["/".join(cell)])
        for cell, (best, pair) in to_best.items()
    }


def qualifies(own: Mapping[str, Against], whole: bool = True) -> Answer:
    """Of one finalist, by regime. whole: all baselines, seeds and settings took part; against fewer
    nothing is decided. holds: non-inferior to the best baseline in all regimes, better
    than the paper's ESTR in BETTER_IN of them; not here: worse than the margin somewhere, with
    certainty, or not better in enough of them whatever more seeds would say; else undecided."""
    if not whole or set(own) != set(CONFIRM_REGIMES):
        return "undecided" if own else "not run"
    sound = all(a.not_inferior in ("better", "non-inferior") for a in own.values())
    if sound and sum(a.better == "better" for a in own.values()) >= BETTER_IN:
        return "holds"
    enough = all(a.not_inferior != "too few seeds" for a in own.values())
    inferior = any(a.not_inferior == "inferior" for a in own.values())
    possible = sum(a.to_paper is not None and a.to_paper.high > MARGIN for a in own.values())
    return "not here" if enough and (inferior or possible < BETTER_IN) else "undecided"


def claims(decisions: Mapping[Cell, Against], whole: bool = True) -> list[Claim]:
    found = []
    part = "" if whole else "; a part of the runs decides nothing"
    for name in dict.fromkeys(name for _, name in decisions):
        own = {regime: a for (regime, its), a in decisions.items() if its == name}
        told = [
            f"{regime}: {a.to_best.difference:+.3f} to {a.best} ({a.not_inferior}), "
            + (f"{a.to_paper.difference:+.3f} to estr ({a.better})" if a.to_paper else "no estr")
            for regime, a in own.items()
        ]
        found.append(
            Claim(
                f"{name} qualifies as the recommended default",
                "",
                "; ".join(told),
                qualifies(own, whole),
                f"by {MARGIN:g} non-inferior to the best baseline in every regime, better than "
                f"estr in {BETTER_IN}; docs/lab/rules.md{part}",
            )
        )
    return found


def tuning_lines(found: Scores) -> list[dict[str, str]]:
    """Best first; the mean in every cell behind that over all runs."""
    cells = list(dict.fromkeys(cell for by_cell in found.values() for cell in by_cell))
    return [
        {
            "rule": name,
            "setting": option,
            "baseline": "yes" if name in BASELINES else "",
            "runs": str(len(_runs(by_cell))),
            "mean accuracy": f"{fmean(_runs(by_cell)):.3f}",
            "least": f"{min(_runs(by_cell)):.3f}",
            **{cell: f"{fmean(by_cell[cell]):.3f}" if cell in by_cell else "" for cell in cells},
        }
        for (name, option), by_cell in sorted(found.items(), key=lambda i: -fmean(_runs(i[1])))
    ]


def confirmation_lines(rows: Sequence[Row], accuracy: Accuracy, plan: Plan) -> list[dict[str, str]]:
    """Best first within each regime."""
    collapsed = by_seed(last_values(rows, "collapsed", "regime", "method", "seed"))
    masked = weighted_means(rows, "rho_mask", "eligible_tokens", "regime", "method")
    ordered = sorted(accuracy.items(), key=lambda i: (i[0][0], -fmean(i[1].values())))
    return [
        {
            "regime": regime,
            "rule": name,
            "setting": "" if regime == REFERENCE else plan.settings[name].option,
            "accuracy": f"{fmean(values.values()):.3f} "
            f"({min(values.values()):.3f} to {max(values.values()):.3f})",
            "collapses": f"{int(sum(collapsed[regime, name].values()))} of {len(values)}",
            "rho_mask": f"{100 * masked.get((regime, name), 0.0):.2f} %",
        }
        for (regime, name), values in ordered
    ]


def decision_lines(decisions: Mapping[Cell, Against]) -> list[dict[str, str]]:
    return [
        {
            "rule": name,
            "regime": regime,
            "best baseline": a.best,
            "minus it": _interval(a.to_best),
            "judgement": a.not_inferior,
            "minus estr": _interval(a.to_paper),
            "to estr": a.better,
        }
        for (regime, name), a in sorted(decisions.items(), key=lambda i: (i[0][1], i[0][0]))
    ]


def _interval(pair: Paired | None) -> str:
    return "" if pair is None else pair.told()
