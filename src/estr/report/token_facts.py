"""What the ledger says of a run's tokens and trajectories, added up: two scans of it, whatever its
size. Everything here is over all of them; nothing is sampled."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ledger import Ledger
from ..scores import LEVEL

MOST_STRETCHES = 48
"""Stretches of consecutive steps that a run is told in, and that intervals resample."""

_FEWEST_STRETCHES = 5
"""Fewer are too few to resample."""

_FEWEST_TOKENS = 100
"""Of a bin that the slope is fitted to."""

_UNKNOWN = -1.0
"""Stands for the entropy bin of a token without entropy."""

_NUM_RESAMPLES = 1000
_NUM_LENGTHS = 30
_NUM_INSTANTS = 400

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NoiseBin:
    """Tokens of like entropy: mean entropy, E[log_ratio^2] with its interval, how many."""

    entropy: float
    second_moment: float
    low: float | None
    high: float | None
    tokens: int
    fitted: bool


@dataclass(frozen=True, slots=True)
class Noise:
    """E[log_ratio^2] by entropy. slope: of log E[log_ratio^2] in log(entropy + eps), least squares
    over the bins with enough tokens; 1 is what a trust region scaled by the entropy supposes.
    which: the tokens it is about, in words."""

    which: str
    eps: float
    bins: list[NoiseBin]
    slope: float | None
    intercept: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens of one kind: how many, how many of them rejected and clipped. key: what kind."""

    key: list[float]
    tokens: int
    rejected: int
    clipped: int


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """Sums over the whole ledger. stretches: [first step, last step]; staleness: of each of intra,
    inter, staleness (trajectories) and lag (tokens) rows of [stretch, value, count]; tokens without
    entropy are in no entropy bin; lengths: rows of [from, all, trained, rewards summed over
    scored]; in_flight: [seconds, rollouts]."""

    num_trajectories: int
    num_tokens: int
    num_trained_tokens: int
    stretches: list[list[int]]
    staleness: dict[str, list[list[int]]]
    noise: Noise
    num_without_entropy: int
    by_entropy: list[Share]
    by_lag: list[Share]
    by_cell: list[Share]
    by_entropy_and_lag: list[Share]
    length_width: int
    lengths: list[list[float]]
    in_flight: list[list[float]]


_CUBE = """
select
    stretch, lag,
    case when has_entropy then entropy_bin::double else $unknown end as entropy_bin,
    case when has_entropy then floor(log2(greatest(behavior_entropies, 0) + $eps))::int
        else 0 end as noise_bin,
    sign(advantage)::int as advantage_sign,
    case when isnan(log_ratio) then 0 else sign(log_ratio) end::int as log_ratio_sign,
    count(*) as tokens,
    count(*) filter (where not kept) as rejected,
    count(*) filter (where clipped) as clipped,
    count(*) filter (where usable) as finite,
    coalesce(sum(greatest(behavior_entropies, 0)::double) filter (where usable), 0) as entropy,
    coalesce(sum(log_ratio::double * log_ratio) filter (where usable), 0) as squares
from (
    select
        *, coalesce(isfinite(behavior_entropies), false) as has_entropy,
        has_entropy and isfinite(log_ratio) as usable
    from trained_tokens join stretches using (step)
)
group by all
"""

_FACTS = """
create temp table report_facts as
with scores as (
    select step, trajectory, max(score) filter (where isfinite(score)) as max_score
    from trained_tokens group by step, trajectory
)
select f.*, stretch, max_score
from trajectory_facts f join stretches using (step) left join scores using (step, trajectory)
"""


def prepare(ledger: Ledger) -> list[list[int]]:
    """Give a ledger the tables that a report asks: stretches (step, stretch), and report_facts,
    which is trajectory_facts with stretch and max_score. Returns the first and last step of each
    stretch."""
    stretches = _make_stretches(ledger)
    ledger.connection.execute(_FACTS)
    return stretches


def token_facts(ledger: Ledger, stretches: list[list[int]], *, schedule: Path) -> TokenFacts:
    """Add up a ledger. stretches: from `prepare`; schedule: of the run, which says whether it was
    ever resumed."""
    eps = float(ledger.query("select eps from settings order by step desc limit 1").rows[0][0])
    cube = ledger.connection.execute(_CUBE, {"eps": eps, "unknown": _UNKNOWN}).fetchnumpy()
    known = np.asarray(cube["entropy_bin"]) != _UNKNOWN
    with_entropy = {name: np.asarray(column)[known] for name, column in cube.items()}
    trajectories, tokens, trained = ledger.query(
        "select count(*), sum(num_tokens), sum(num_trained_tokens) from report_facts"
    ).rows[0]
    width, lengths = _lengths(ledger)
    staleness = {kind: _counts(ledger, kind) for kind in ("intra", "inter", "staleness")}
    staleness["lag"] = _lag_counts(cube)
    return TokenFacts(
        num_trajectories=trajectories,
        num_tokens=int(tokens),
        num_trained_tokens=int(trained),
        stretches=stretches,
        staleness=staleness,
        noise=_noise(cube, eps, len(stretches)),
        num_without_entropy=int(np.asarray(cube["tokens"])[~known].sum()),
        by_entropy=_shares(with_entropy, "entropy_bin"),
        by_lag=_shares(cube, "lag"),
        by_cell=_shares(cube, "advantage_sign", "log_ratio_sign"),
        by_entropy_and_lag=_shares(with_entropy, "entropy_bin", "lag"),
        length_width=width,
        lengths=lengths,
        in_flight=[] if _was_resumed(schedule) else _in_flight(ledger),
    )


def _make_stretches(ledger: Ledger) -> list[list[int]]:
    """A table (step, stretch); returns the first and last step of each stretch."""
    steps = [row[0] for row in ledger.query("select distinct step from settings order by 1").rows]
    number = min(MOST_STRETCHES, len(steps))
    rows = [[step, i * number // len(steps)] for i, step in enumerate(steps)]
    ledger.connection.execute("create temp table stretches (step integer, stretch integer)")
    ledger.connection.executemany("insert into stretches values (?, ?)", rows)
    grouped = itertools.groupby(rows, key=lambda row: row[1])
    parts = [[row[0] for row in part] for _, part in grouped]
    return [[part[0], part[-1]] for part in parts]


def _counts(ledger: Ledger, kind: str) -> list[list[int]]:
    rows = ledger.query(
        f"select stretch, {kind}, count(*) from report_facts "
        f"where advantage is not null and {kind} is not null group by all order by all"
    ).rows
    return [list(row) for row in rows]


def _lag_counts(cube: dict[str, Any]) -> list[list[int]]:
    counts: dict[tuple[int, int], int] = {}
    columns = (cube[name].tolist() for name in ("stretch", "lag", "tokens"))
    for stretch, lag, tokens in zip(*columns, strict=True):
        counts[stretch, lag] = counts.get((stretch, lag), 0) + tokens
    return [[*place, count] for place, count in sorted(counts.items())]


def _shares(cube: dict[str, Any], *names: str) -> list[Share]:
    """The cube added up to these of its sides."""
    keys = np.stack([np.asarray(cube[name], dtype=np.float64) for name in names], axis=1)
    distinct, place = np.unique(keys, axis=0, return_inverse=True)
    sums = [
        np.bincount(place.reshape(-1), weights=cube[name], minlength=len(distinct))
        for name in ("tokens", "rejected", "clipped")
    ]
    return [
        Share(key, *(int(column[i]) for column in sums)) for i, key in enumerate(distinct.tolist())
    ]


def _noise(cube: dict[str, Any], eps: float, num_stretches: int) -> Noise:
    """Stale tokens where there are any: at lag 0 the weights are the same, and what differs is
    arithmetic."""
    stale = np.asarray(cube["lag"]) >= 1
    which = "lag 1 and more" if stale.any() else "lag 0"
    chosen = stale if stale.any() else np.ones_like(stale)
    bins, place = np.unique(np.asarray(cube["noise_bin"])[chosen], return_inverse=True)
    shape = (num_stretches, len(bins))
    sums = np.zeros((3, *shape))  # tokens, entropy, squares
    where = (np.asarray(cube["stretch"])[chosen], place)
    for i, name in enumerate(("finite", "entropy", "squares")):
        np.add.at(sums[i], where, np.asarray(cube[name], dtype=np.float64)[chosen])
    totals = sums.sum(axis=1)
    fitted = (totals[0] >= _FEWEST_TOKENS) & (totals[2] > 0)
    slope, intercept = _line(totals[:, fitted], eps)
    resampled = _resampled(sums)
    slope_low = slope_high = None
    if slope is not None and resampled is not None:
        slopes = [_line(one[:, fitted], eps)[0] for one in resampled]
        slope_low, slope_high = _interval(np.array([s for s in slopes if s is not None]))
    found = []
    for i in range(len(bins)):
        tokens, entropy, squares = totals[:, i]
        if not tokens:
            continue
        low = high = None
        if resampled is not None and tokens >= _FEWEST_TOKENS:
            drawn = resampled[:, :, i]
            low, high = _interval(drawn[drawn[:, 0] > 0][:, 2] / drawn[drawn[:, 0] > 0][:, 0])
        mean, moment = float(entropy / tokens), float(squares / tokens)
        found.append(NoiseBin(mean, moment, low, high, int(tokens), bool(fitted[i])))
    return Noise(which, eps, found, slope, intercept, slope_low, slope_high)


def _resampled(sums: Floats) -> Floats | None:
    """Totals [resample, 3, bin] with the stretches drawn anew: the tokens of a stretch share their
    weights, so they are not independent, while stretches nearly are. None: too few of them."""
    num_stretches = sums.shape[1]
    if num_stretches < _FEWEST_STRETCHES:
        return None
    rng = np.random.default_rng(0)
    times = rng.multinomial(
        num_stretches, np.full(num_stretches, 1 / num_stretches), _NUM_RESAMPLES
    )
    drawn: Floats = np.einsum("rs,ksb->rkb", times.astype(np.float64), sums)
    return drawn


def _line(totals: Floats, eps: float) -> tuple[float | None, float | None]:
    """(slope, intercept) of log E[log_ratio^2] in log(entropy + eps); None of fewer than 3 bins."""
    tokens, entropy, squares = totals
    usable = (tokens > 0) & (squares > 0)
    if usable.sum() < 3:
        return None, None
    x = np.log(entropy[usable] / tokens[usable] + eps)
    y = np.log(squares[usable] / tokens[usable])
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


def _interval(values: Floats) -> tuple[float | None, float | None]:
    if not len(values):
        return None, None
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def _lengths(ledger: Ledger) -> tuple[int, list[list[float]]]:
    """(width of a bin, rows of [from, all, trained, sum of rewards])."""
    longest = ledger.query("select max(num_sampled_tokens) from report_facts").rows[0][0] or 0
    width = max(1, -(-(longest + 1) // _NUM_LENGTHS))
    rows = ledger.query(
        "select num_sampled_tokens // $1 * $1 as start, count(*), count(advantage), "
        "coalesce(sum(reward) filter (where advantage is not null), 0) "
        "from report_facts group by start order by start",
        [width],
    ).rows
    return width, [[float(cell) for cell in row] for row in rows]


def _in_flight(ledger: Ledger) -> list[list[float]]:
    """How many of the consumed rollouts were under way, at even instants."""
    rows = ledger.connection.execute(
        "select times_s['start'] as start_s, times_s['end'] as end_s from report_facts "
        "where start_s is not null and end_s is not null"
    ).fetchnumpy()
    starts, ends = (np.sort(np.asarray(rows[name])) for name in ("start_s", "end_s"))
    if not len(starts):
        return []
    instants = np.linspace(0.0, float(ends[-1]), _NUM_INSTANTS)
    begun, over = (np.searchsorted(times, instants, side="right") for times in (starts, ends))
    return [
        [round(t, 3), n] for t, n in zip(instants.tolist(), (begun - over).tolist(), strict=True)
    ]


def _was_resumed(schedule: Path) -> bool:
    """Each life of a run has a clock of its own."""
    return schedule.is_file() and b'{"event":"resume"' in schedule.read_bytes()
