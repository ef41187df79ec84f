"""`scaling`: how log pi - log mu scatters with the entropy, by source and lag."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import figures
from ..fits import Tail
from ..lab import Claim, Lab, Report
from ..moments import Floats
from ..noise_statistics import FEWEST, Found, Interval, Pools, Sums, measured, pooled, tails
from ..statistics import MIN_PAIRS, Answer, answer, with_interval
from ..sweep import Job
from ..token_noise import ENTROPY_EDGES, PROBABILITY_EDGES, SPLIT

TITLE = "E[log_ratio^2] by entropy, source and lag"

TASKS: dict[str, dict[str, Any]] = {
    "calculator": {"task": {"name": "calculator"}},
    "random order": {"task": {"name": "calculator", "order": "random"}, "model": "warmstart"},
    "countdown": {"task": {"name": "countdown"}, "model": "warmstart"},
}
FIRST = "calculator"
LEARNING_RATE = 5e-4
FULL = ((1, 4, 15, 30), 40, 256)
"""Lags, steps of training and rollouts of each source."""
SHORT = ((1, 4, 15), 25, 160)
"""The same for the tasks that need a warm start, on the first seeds only."""
SHORT_SEEDS = 5
QUICK = ((1, 4), 8, 64)
"""The same with --quick, on the first task alone."""


class Asked(NamedTuple):
    """A claim, the published one that it stands for, the statistic that answers it, the range that
    is asked of that, and what this rests on."""

    claim: str
    published: str
    statistic: str
    low: float
    high: float
    why: str


ASKED = (
    Asked(
        "E[delta^2] at entropy H grows as H",
        "the variance of the log-ratio scales with H",
        "exponent",
        0.8,
        1.25,
        "the exponent over bins from eps on lies in [0.8, 1.25], with its 95 % interval",
    ),
    Asked(
        "E[delta^2] at entropy H is linear in H",
        "the variance of the log-ratio scales with H",
        "R2",
        0.9,
        math.inf,  # an interval may pass the limit that a figure cannot
        "R2 of a straight line through the same bins is at least 0.9",
    ),
    Asked(
        "delta / sqrt(H + eps) has one variance at all entropies",
        "one tau for all tokens",
        "spread of var z",
        -math.inf,
        2.0,
        "the largest variance of a bin from eps on is at most twice the smallest",
    ),
    Asked(
        "the entropy says more of the variance than one constant does",
        "the threshold must follow the entropy",
        "entropy over constant",
        0.0,
        math.inf,
        "Gaussian log-likelihood a token, nats, in favor of the first",
    ),
    Asked(
        "gini is the better scale than the entropy (our noise model)",
        "",
        "gini over entropy",
        0.0,
        math.inf,
        "as above",
    ),
    Asked(
        "2 (1 - p_y) - gini is the better scale than gini (our noise model)",
        "",
        "token over gini",
        0.0,
        math.inf,
        "as above",
    ),
    Asked(
        "KL(mu, pi) is half of E[delta^2]",
        "",
        "half moment / KL",
        0.9,
        1.1,
        "of whole distributions, all tokens; the ratio lies in [0.9, 1.1]",
    ),
    Asked(
        "tokens of low entropy are no outliers of delta^2 > H + eps",
        "",
        "outside, H < eps",
        -math.inf,
        0.0,
        "share outside at H < eps minus the share from eps on",
    ),
    Asked(
        "E[delta^2] at probability p_y stays bounded as p_y goes to 0 (our noise model)",
        "",
        "rare over unlikely",
        -math.inf,
        2.0,
        "E[delta^2] at p_y < 0.003 is at most twice that at 0.01 to 0.1",
    ),
)


def jobs(lab: Lab) -> list[Job]:
    """One for each task and seed; all sources are measured on its weights."""
    found = []
    for name, table in TASKS.items():
        if lab.quick and name != FIRST:
            continue
        own = FULL if name == FIRST else SHORT
        lags, steps, rollouts = QUICK if lab.quick else own
        run = {**table, "steps": steps, "lr": LEARNING_RATE, "correction": [{"name": "none"}]}
        found += [
            Job(
                {"task": name, "seed": seed},
                {"run": {**run, "seed": seed}, "lags": lags, "rollouts": rollouts},
                function="estr.lab.token_noise:measure",
            )
            for seed in lab.judge_seeds[: None if name == FIRST else SHORT_SEEDS]
        ]
    return found


def run(lab: Lab) -> Report:
    rows = lab.run(jobs(lab))
    pools = pooled(rows)
    panels = {
        task: {source: _points(sums) for (its, source), sums in pools.items() if its == task}
        for task in dict.fromkeys(task for task, _ in pools)
    }
    draw = functools.partial(
        figures.curves,
        panels,
        xlabel="entropy H, nats",
        ylabel="E[(log pi - log mu)²]",
        logarithmic=True,
        slope=1.0,
    )
    found, laws = measured(pools), all_tails(pools)
    made = [*claims(found), _gaussian_tails(laws, len(lab.judge_seeds) >= MIN_PAIRS)]
    return Report(rows, made, tables(pools, found, laws), draw if panels else None)


def _points(sums: Sums) -> tuple[list[float], list[float]]:
    own = {name: values.sum(axis=0) for name, values in sums["entropy"].items()}
    used = (own["tokens"] >= FEWEST) & (own["delta2"] > 0)
    n = own["tokens"][used]
    return list(own["entropy"][used] / n), list(own["delta2"][used] / n)


def _within(low: float, high: float, found: Interval) -> bool | None:
    """Whether the whole interval is inside [low, high], or outside; None: neither, or unknown."""
    if low <= found[0] and found[1] <= high:
        return True
    return False if found[1] < low or found[0] > high else None


def _told(value: float, interval: Interval) -> str:
    if np.isnan(value):
        return "too few tokens"
    return with_interval(value, *interval, ".3g")


def claims(found: Found) -> list[Claim]:
    """Each is answered for every task and source; an interval that lies neither inside nor outside
    of what a claim asks for leaves it open there."""
    return [
        Claim(
            asked.claim,
            asked.published,
            _summary(found.get(asked.statistic, {})),
            _answer(found, asked.statistic, asked.low, asked.high),
            asked.why,
        )
        for asked in ASKED
    ]


def _gaussian_tails(laws: Laws, enough: bool) -> Claim:
    """enough: there are seeds to decide it on; a best law has no interval that would say so."""
    gaussian = {
        " ".join(cell): all(tail.best == "gaussian" for tail in own.values()) if own else None
        for (*cell, where), own in laws.items()
        if where == "high"
    }
    count = sum(value is True for value in gaussian.values())
    return Claim(
        "both tails of z fall like a Gaussian's (our noise model)",
        "",
        f"best of three laws for both tails in {count} of {len(gaussian)}" if gaussian else "",
        answer(gaussian if enough else dict.fromkeys(gaussian)),
        f"H >= {SPLIT:g}; R2 of log P(abs z > x) over x^2, x and log x",
    )


Laws = dict[tuple[str, str, str], dict[str, Tail]]
"""(task, source, "low" or "high" entropy) -> side -> its laws"""


def all_tails(pools: Pools) -> Laws:
    return {
        (*cell, where): tails(sums, where)
        for cell, sums in pools.items()
        for where in ("low", "high")
    }


def _answer(found: Found, name: str, low: float, high: float) -> Answer:
    return answer(
        {" ".join(c): _within(low, high, value[1]) for c, value in found.get(name, {}).items()}
    )


def _summary(values: Mapping[tuple[str, str], tuple[float, Interval]]) -> str:
    """The range over sources, task by task."""
    told = []
    for task in dict.fromkeys(task for task, _ in values):
        own = [v for (its, _), (v, _) in values.items() if its == task and not np.isnan(v)]
        if own:
            told.append(f"{task}: {min(own):.3g} to {max(own):.3g}")
    return "; ".join(told)


def tables(pools: Pools, found: Found, laws: Laws) -> dict[str, list[dict[str, str]]]:
    lines = [
        {
            "task": task,
            "source": source,
            "tokens": f"{int(sums['entropy']['tokens'].sum()):,}",
            **{name: _told(*values[task, source]) for name, values in found.items()},
        }
        for (task, source), sums in pools.items()
    ]
    tail_lines = [
        {
            "task": task,
            "source": source,
            "entropy": f"H < {SPLIT:g}" if where == "low" else f"H >= {SPLIT:g}",
            **{
                side: f"{own[side].best}, R2 "
                + " / ".join(f"{fit.r2:.2f}" for fit in own[side])
                + f", power {own[side].power.slope:.1f}"
                if side in own
                else "too few"
                for side in ("left", "right")
            },
        }
        for (task, source, where), own in laws.items()
    ]
    return {
        "statistics [95 % over seeds]": lines,
        "variance of z by entropy: measured / sigma² gini / sigma² token": _bin_lines(
            pools, "entropy", ENTROPY_EDGES, _variance_cell
        ),
        "E[delta²] by probability of the drawn token: measured / sigma² token": _bin_lines(
            pools, "probability", PROBABILITY_EDGES, _probability_cell
        ),
        "tails: best law, R2 gaussian / exponential / power": tail_lines,
    }


def _bin_lines(
    pools: Pools,
    axis: str,
    edges: Sequence[float],
    cell: Callable[[dict[str, Floats], int, float], str],
) -> list[dict[str, str]]:
    """One line for each task and source, one column for each bin."""
    names = [f"< {edges[0]:g}", *(f"{edge:g}+" for edge in edges)]
    lines = []
    for (task, source), sums in pools.items():
        own = {name: values.sum(axis=0) for name, values in sums[axis].items()}
        token = sums["token"]
        sigma2 = float(token["delta2"].sum() / token["token"].sum())
        cells = {
            name: cell(own, i, sigma2) if own["tokens"][i] >= FEWEST else ""
            for i, name in enumerate(names)
        }
        lines.append({"task": task, "source": source, **cells})
    return lines


def _variance_cell(own: dict[str, Floats], i: int, sigma2: float) -> str:
    n = own["tokens"][i]
    measured_here = own["z2"][i] / n - (own["z"][i] / n) ** 2
    model = [sigma2 * own[name][i] / n for name in ("gini_over", "token_over")]
    return f"{measured_here:.3g} / {model[0]:.3g} / {model[1]:.3g}"


def _probability_cell(own: dict[str, Floats], i: int, sigma2: float) -> str:
    n = own["tokens"][i]
    return f"{own['delta2'][i] / n:.3g} / {sigma2 * own['token'][i] / n:.3g}"
