"""What rollouts say about models: pure functions of numbers, no torch.

pass_at_k(n, c, k)                  chance that one of k is solved, from c solved of n
majority(answers, solved)           is the answer that most rollouts give the right one?
bootstrap_intervals(values)         95 % intervals of means over problems
bounded_intervals(values)           the same of values within bounds, where all may be equal
compare_paired(first, second)       two models on the same problems: difference, p, sample size
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Interval = tuple[float, float]

LEVEL = 0.95
"""Of every interval."""
POWER = 0.8
ONE_POINT = 0.01

_NUM_RESAMPLES = 2000
_NUM_FLIPS = 10_000
_MAX_EXACT = 14
_MOST_SIGNS = 1 << 22
"""Drawn at a time, so that memory does not grow with the number of problems."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate, from c solved rollouts of n, of the chance that at least one of k is
    solved: 1 - C(n-c, k) / C(n, k), in exact integers until the last division.

    Source: Chen et al., "Evaluating large language models trained on code" (2021), equation 1.
    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    every = math.comb(n, k)
    return (every - math.comb(n - c, k)) / every


def majority(answers: Sequence[str | None], solved: Sequence[bool]) -> float:
    """1.0 if the answer that most of the rollouts of a problem give is right, 0.0 if it is wrong or
    none gives any. None does not vote. Where several answers lead with equally many votes, the
    mean over them, as a fair draw would have it.

    Source: Wang et al., "Self-consistency improves chain of thought reasoning" (2023), section 2.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    right = [
        fmean(s for a, s in zip(answers, solved, strict=True) if a == leader)
        for leader, number in votes.items()
        if number == most
    ]
    return fmean(right)


def bootstrap_intervals(values: Float64Array, *, seed: int) -> list[Interval]:
    """95 % percentile bootstrap intervals of the column means of values [num_problems, m], with the
    problems drawn anew, whole rows at a time. Source: Efron and Tibshirani, "An introduction to the
    bootstrap" (1993), chapter 13."""
    rng = np.random.default_rng(seed)
    num_problems = len(values)
    means = np.stack(
        [
            values[rng.integers(0, num_problems, num_problems)].mean(axis=0)
            for _ in range(_NUM_RESAMPLES)
        ]
    )
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def bounded_intervals(
    values: Float64Array, *, lowest: float, highest: float, seed: int
) -> list[Interval]:
    """`bootstrap_intervals` of values [num_problems, m] that lie within lowest and highest.

    Where all problems of a column have the same value the bootstrap has nothing to draw from and
    would be certain. There the exact binomial bound stands in for it: a share of more than
    1 - 0.025^(1 / num_problems) of all problems would not have stayed unseen, and that share may be
    anywhere within the bounds. Source: Clopper and Pearson, "The use of confidence or fiducial
    limits" (1934), for no success in n trials.
    """
    unseen = 1.0 - ((1 - LEVEL) / 2) ** (1 / len(values))
    intervals = bootstrap_intervals(values, seed=seed)
    for i, column in enumerate(values.T):
        if (column == column[0]).all():
            value = float(column[0])
            below, above = unseen * (value - lowest), unseen * (highest - value)
            intervals[i] = value - below, value + above
    return intervals


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the same problems, difference = first - second.

    p_value: of the two-sided sign-flip test of "no difference". problems_for_one_point: how many
    problems, with as many rollouts of each, would show a true difference of 0.01 at the 5 % level
    four times out of five (None: on no problem do the two differ, so their spread is unknown).
    better, worse: problems on which the first did better, or worse.
    """

    num_problems: int
    difference: float
    interval: Interval
    p_value: float
    better: int
    worse: int
    problems_for_one_point: int | None


def compare_paired(first: Float64Array, second: Float64Array, *, seed: int) -> Comparison:
    """first, second: [num_problems], the mean score of every problem under either model, 0 to 1.

    Source of the test: Fisher, "The design of experiments" (1935), section 21; of the sample size:
    the normal approximation ((z_0.975 + z_0.8) * sd / 0.01)^2, sd that of the paired differences.
    Raises ValueError for other shapes, or no problem.
    """
    if first.shape != second.shape or first.ndim != 1 or not len(first):
        raise ValueError(f"needs two scores of each problem, not {first.shape} and {second.shape}")
    differences = first - second
    (interval,) = bounded_intervals(differences[:, None], lowest=-1.0, highest=1.0, seed=seed)
    return Comparison(
        num_problems=len(differences),
        difference=float(differences.mean()),
        interval=interval,
        p_value=_sign_flip(differences, seed),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
        problems_for_one_point=_problems_for(ONE_POINT, differences),
    )


def _sign_flip(differences: Float64Array, seed: int) -> float:
    """Share of all sign patterns whose sum is at least as far from 0: all of them where few
    problems differ, else 10,000 drawn ones and the one observed."""
    moved = differences[differences != 0]
    observed = abs(moved.sum()) - 1e-9
    if len(moved) <= _MAX_EXACT:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(moved))))
        return float((abs(signs @ moved) >= observed).mean())
    rng = np.random.default_rng(seed)
    as_far, left = 0, _NUM_FLIPS
    while left:
        rows = min(left, max(1, _MOST_SIGNS // len(moved)))
        signs = rng.choice(np.array([1.0, -1.0], dtype=np.float32), size=(rows, len(moved)))
        as_far += int((abs(signs @ moved) >= observed).sum())
        left -= rows
    return (as_far + 1) / (_NUM_FLIPS + 1)


def _problems_for(difference: float, differences: Float64Array) -> int | None:
    spread = float(differences.std(ddof=1)) if len(differences) > 1 else 0.0
    if spread == 0:
        return None
    normal = NormalDist()
    z = normal.inv_cdf(1 - (1 - LEVEL) / 2) + normal.inv_cdf(POWER)
    return math.ceil((z * spread / difference) ** 2)
