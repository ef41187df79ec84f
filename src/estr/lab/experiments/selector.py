"""`selector`: does a rule's gradient on one batch foretell how the rule trains?

fidelity's gradients --predictors of every setting--.
rules' tuning runs   --held-out accuracy at the end-`--> do both put the settings in one order?
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from .. import figures
from ..fits import rank_correlation, rank_interval
from ..lab import Claim, Lab, Report
from ..rules import BASELINES, NUM_TUNE_SEEDS, RATES, TUNE_REGIMES, entrants
from ..statistics import answer, with_interval
from ..sweep import Job
from ..table import Row, last_values
from .fidelity import ESTR, Fidelity, jobs, measured, named, pooled, regime_label
from .rules import jobs_of

TITLE = "does the gradient foretell which rule trains well?"

TWIN = "calculator"
QUICK = ("none", "icepop", "estr", "outward_token")
"""Rules with --quick, at their defaults, in the first regime."""

PREDICTORS: dict[str, Callable[[Fidelity], float]] = {
    "relative cosine": lambda found: found.cosine[0],
    "certain relative cosine": lambda found: found.cosine[1][0],
    "progress": lambda found: found.progress[0],
    "shortness": lambda found: -found.norm[0],
    "kept": lambda found: found.kept,
}
"""Higher foretells better."""
ENOUGH = 0.5
"""A rank correlation that would be of use."""

Foretold = Mapping[str, Fidelity]
"""setting -> its gradient"""


@dataclass(frozen=True, slots=True)
class Ranking:
    """How a predictor orders the settings of one regime. pick: the setting that it likes best;
    best: the one that trains best."""

    correlation: float
    interval: tuple[float, float]
    pick: str
    best: str


def run(lab: Lab) -> Report:
    gradient_rows = lab.run(jobs(lab))
    trained_rows = lab.run(training_jobs(lab))
    found = measured(pooled(gradient_rows))
    accuracy = accuracies(trained_rows)
    rankings: dict[tuple[str, str], Ranking] = {}
    panels: dict[str, dict[str, figures.Points]] = {}
    for regime, trained in accuracy.items():
        own = {m: v for (its, m), v in found.items() if its == regime and m in trained}
        if not own:
            continue
        for name, predictor in PREDICTORS.items():
            rankings[regime, name] = ranking(own, trained, predictor)
        panels[regime] = points(own, trained)
    draw = functools.partial(
        figures.curves,
        panels,
        xlabel="relative cosine",
        ylabel="held-out accuracy at the end",
        joined=False,
    )
    return Report(
        gradient_rows + trained_rows,
        [claim(name, rankings) for name in PREDICTORS],
        {"predictors": lines(rankings, accuracy)},
        draw if panels else None,
    )


def training_jobs(lab: Lab) -> list[Job]:
    """The runs by which `rules` tunes, of one twin."""
    names = QUICK if lab.quick else tuple(entrants())
    seeds = lab.tune_seeds[:NUM_TUNE_SEEDS] or lab.judge_seeds
    return [
        job
        for regime in (TUNE_REGIMES[:1] if lab.quick else TUNE_REGIMES)
        for name in names
        for setting in entrants()[name].settings[: 1 if lab.quick else None]
        if not setting.noise_floor
        for job in jobs_of(lab, (regime, name), setting, seeds, phase="tune", twin=TWIN)
    ]


def accuracies(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """regime, as `fidelity` calls it -> setting, as it calls it -> mean over seeds."""
    names = {
        (name, setting.option): named(name, setting)
        for name, rule in entrants().items()
        for setting in rule.settings
    }
    found: dict[str, dict[str, list[float]]] = {}
    for (regime, *setting, _), value in last_values(
        rows, "accuracy", "regime", "method", "option", "seed"
    ).items():
        label = regime_label(regime, RATES[regime])
        found.setdefault(label, {}).setdefault(names[tuple(setting)], []).append(value)
    return {r: {n: fmean(values) for n, values in own.items()} for r, own in found.items()}


def ranking(
    own: Foretold, trained: Mapping[str, float], predictor: Callable[[Fidelity], float]
) -> Ranking:
    """The settings of one rule are alike, so only rules count as independent."""
    foretold = {name: predictor(value) for name, value in own.items()}
    foretold = {name: value for name, value in foretold.items() if np.isfinite(value)}
    if not foretold:
        return Ranking(np.nan, (np.nan, np.nan), "", "")
    found = rank_correlation(
        np.array(list(foretold.values())), np.array([trained[name] for name in foretold])
    )
    num_rules = len({name.partition(",")[0] for name in foretold})
    return Ranking(
        found,
        rank_interval(found, num_rules),
        pick=max(foretold, key=lambda name: foretold[name]),
        best=max(foretold, key=lambda name: trained[name]),
    )


def points(own: Foretold, trained: Mapping[str, float]) -> dict[str, figures.Points]:
    """What is drawn of one regime, by kind."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name, value in own.items():
        rule = name.partition(",")[0]
        kind = ESTR if rule == ESTR else "other baselines" if rule in BASELINES else "rules"
        xs, ys = found.setdefault(kind, ([], []))
        xs.append(value.cosine[0])
        ys.append(trained[name])
    return dict(found)


def claim(name: str, rankings: Mapping[tuple[str, str], Ranking]) -> Claim:
    results: dict[str, bool | None] = {}
    told = []
    for (regime, predictor), its in rankings.items():
        if predictor != name:
            continue
        low, high = its.interval
        results[regime] = (
            True if low > 0 and its.correlation >= ENOUGH else False if high < ENOUGH else None
        )
        told.append(f"{regime}: {with_interval(its.correlation, low, high, '+.2f')}")
    return Claim(
        f"settings with more {name} train better",
        "",
        "; ".join(told),
        answer(results),
        f"Spearman's correlation with the accuracy at the end is at least {ENOUGH:g}, and above 0 "
        "with its whole 95 % interval",
    )


def lines(
    rankings: Mapping[tuple[str, str], Ranking], accuracy: Mapping[str, Mapping[str, float]]
) -> list[dict[str, str]]:
    return [
        {
            "regime": regime,
            "predictor": predictor,
            "rank correlation": with_interval(its.correlation, *its.interval, "+.2f"),
            "its pick": f"{its.pick}: {accuracy[regime][its.pick]:.3f}" if its.pick else "",
            "best": f"{its.best}: {accuracy[regime][its.best]:.3f}" if its.best else "",
            "mean": f"{fmean(accuracy[regime].values()):.3f}",
            "settings": str(len(accuracy[regime])),
        }
        for (regime, predictor), its in rankings.items()
    ]
