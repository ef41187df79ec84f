"""The trajectories that can be read token by token: which ones, and their tokens as columns.

A third of them hold the highest scores of the run, so the most suspicious tokens are always there;
the others are drawn at random, all with the same chance.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ledger import Ledger
from ..ledger.schema import logged_entries
from .texts import TokenTexts

COPIED_COLUMNS: dict[str, str] = {
    "segment": "<u2",
    "versions": "<i4",
    "behavior_logprobs": "<f4",
    "behavior_entropies": "<f4",
    "behavior_gini": "<f4",
    "policy_logprobs": "<f4",
}
"""Columns of the ledger that go to the page as they are, NaN for NULL, by type."""

SAMPLED, TRAINED, KEPT, CLIPPED = 1, 2, 4, 8
"""Bits of the column `flags`."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be embedded: trajectories of each run, and tokens of all of its trajectories
    together."""

    trajectories: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One trajectory. offset: where its tokens begin in the columns. picked: "score" or "random".
    turns: [segment, start, stop, finish reason]. max_score: of its tokens; None: none is trained.
    eps, tau: of the correction `estr` at its step; tau is None under any other."""

    step: int
    trajectory: int
    group_id: int
    index: int
    attempt: int
    problem: int
    status: str
    error: str | None
    outcome: float | None
    reward: float | None
    rewards: dict[str, float]
    advantage: float | None
    target_version: int
    intra: int | None
    inter: int | None
    num_sampled_tokens: int
    num_trained_tokens: int
    num_kept_tokens: int
    max_score: float | None
    mean_entropy: float | None
    turns: list[list[Any]]
    eps: float
    tau: float | None
    picked: str
    offset: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Microscope:
    """num_all: trajectories of the run that these were taken from. left_out: chosen, but beyond
    the token budget. texts: of the distinct tokens; columns: base64 of little-endian arrays, one
    entry for each token: "token_ids", "text" (index into texts), "flags", and
    COPIED_COLUMNS. note: what is odd about the texts."""

    num_all: int
    num_scored: int
    num_random: int
    left_out: int
    trajectories: list[TrajectoryRow]
    texts: list[str]
    columns: dict[str, str]
    note: str | None


_PICKED = """
create temp table picked as
with by_score as (
    select step, trajectory, 'score' as picked, row_number() over (
        order by max_score desc nulls last, step, trajectory) as place
    from report_facts where max_score is not null
    qualify place <= $scored
),
by_chance as (
    select step, trajectory, 'random' as picked, row_number() over (
        order by hash(step, trajectory), step, trajectory) as place
    from report_facts anti join by_score using (step, trajectory)
    qualify place <= $random
)
select
    step, trajectory, picked, (row_number() over (order by picked desc, place))::int as place
from (from by_score union all from by_chance)
"""

_ROWS = """
select
    step, trajectory, group_id, index, attempt, problem, status, error, outcome, reward, rewards,
    advantage, f.target_version, intra, inter, num_sampled_tokens, num_trained_tokens,
    num_kept_tokens, max_score, mean_entropy, turns, s.eps, f.correction, p.picked, num_tokens,
    p.place
from report_facts f join picked p using (step, trajectory) join settings s using (step)
order by p.place
"""

_TOKENS = """
select
    place, position, token_ids, segment, sampled, versions, behavior_logprobs, behavior_entropies,
    behavior_gini, policy_logprobs, kept, clipped
from tokens join picked using (step, trajectory)
where place in (select unnest($places))
order by place, position
"""


def microscope(ledger: Ledger, texts: TokenTexts, budget: Budget) -> Microscope:
    """Choose trajectories and take their tokens out of a ledger that `prepare` has seen."""
    connection = ledger.connection
    num_all, num_scorable = ledger.query(
        "select count(*), count(max_score) from report_facts"
    ).rows[0]
    wanted = min(budget.trajectories, num_all)
    scored = min(num_scorable, wanted if wanted == num_all else -(-wanted // 3))
    connection.execute(_PICKED, {"scored": scored, "random": wanted - scored})
    rows, places = _rows(ledger, budget.tokens)
    columns = connection.execute(_TOKENS, {"places": places}).fetchnumpy()
    distinct, text = np.unique(np.asarray(columns["token_ids"]), return_inverse=True)
    encoded = {
        "token_ids": _base64(columns["token_ids"], "<i4"),
        "text": _base64(text, "<u4"),
        "flags": _base64(_flags(columns), "<u1"),
        **{name: _base64(columns[name], kind) for name, kind in COPIED_COLUMNS.items()},
    }
    return Microscope(
        num_all=num_all,
        num_scored=sum(row.picked == "score" for row in rows),
        num_random=sum(row.picked == "random" for row in rows),
        left_out=wanted - len(rows),
        trajectories=rows,
        texts=texts.of(distinct.tolist()),
        columns=encoded,
        note=texts.note,
    )


def _rows(ledger: Ledger, most_tokens: int) -> tuple[list[TrajectoryRow], list[int]]:
    """The facts of the picked, in their order, up to the budget of tokens; and their places."""
    names, picked, _ = ledger.query(_ROWS)
    rows: list[TrajectoryRow] = []
    places = []
    offset = 0
    for values in picked:
        row = dict(zip(names, values, strict=True))
        if offset + row["num_tokens"] > most_tokens:
            continue
        places.append(row.pop("place"))
        row["tau"] = tau_of(row.pop("correction"))
        row["rewards"] = dict(row["rewards"] or {})
        row["turns"] = [list(turn.values()) for turn in row["turns"] or []]
        rows.append(TrajectoryRow(**row, offset=offset))
        offset += row["num_tokens"]
    return rows, places


def tau_of(correction: str) -> float | None:
    """What these corrections (JSON, as in the ledger) bound the score by; None: nothing."""
    for entry in logged_entries(correction):
        if entry["name"] == "estr" and entry.get("scale", "entropy") == "entropy":
            return float(entry["tau"])
    return None


def _flags(columns: dict[str, Any]) -> npt.NDArray[np.uint8]:
    """The four verdicts in one byte; what is NULL in `kept` was not trained on."""
    kept, clipped = columns["kept"], columns["clipped"]
    trained = ~np.ma.getmaskarray(kept)
    bits = SAMPLED * np.asarray(columns["sampled"]).astype(np.uint8)
    bits += TRAINED * trained.astype(np.uint8)
    bits += KEPT * np.ma.filled(kept, False).astype(np.uint8)
    bits += CLIPPED * np.ma.filled(clipped, False).astype(np.uint8)
    return bits


def _base64(values: Any, kind: str) -> str:
    if kind.startswith("<f"):
        values = np.ma.filled(np.ma.asarray(values).astype(np.float32), np.nan)
    else:
        values = np.ma.filled(np.ma.asarray(values), -1)
    return base64.b64encode(np.asarray(values).astype(kind).tobytes()).decode()
