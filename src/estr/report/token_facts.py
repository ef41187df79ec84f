"""What the ledger says of a run's tokens and trajectories, added up: two scans of it, whatever its
size. Everything here is over all of them; nothing is sampled."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..ledger import Ledger
from .noise import Noise, noise_by_entropy

MOST_STRETCHES = 48
"""Stretches of consecutive steps that a run is told in, and that intervals resample."""

_UNKNOWN = -1.0
"""Stands for the entropy bin of a token without entropy."""

_NUM_LENGTHS = 30
_NUM_INSTANTS = 400


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
    -- Infinite where a token had no chance to be drawn; JSON has no such number.
    select step, trajectory, max(least(score, 3e38)) filter (where not isnan(score)) as max_score
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
        noise=noise_by_entropy(with_entropy, eps, len(stretches)),
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
        if lag is None:  # the version of a token or of its step is not known
            continue
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
