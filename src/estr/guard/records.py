"""What the columns and labels of a batch say about themselves: no model, no torch.

    check_labels           every trajectory belongs to its group, its members to one problem
    check_advantages       the advantages are those of the group's rewards
    check_alignment        mask, turns, log-probs and entropies speak of the same tokens
    Surprise.check         tokens are as surprising as their distributions promise
    Trained.check          no group is trained twice

Every check returns findings, none on consistent batches.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..advantages import group_advantages
from ..buffer import TrainingGroup
from ..options.run import LossOptions
from ..types import BoolArray, Finding, Segment, Trajectory

ADVANTAGE_TOLERANCE = 1e-9
"""Advantages are computed twice by the same float64 function, so they agree to the bit."""

SURPRISE_Z = 6.0
"""How many standard errors the mean surprisal may lie from the mean entropy..."""
SURPRISE_SHARE = 0.25
"""... and how far, as a share of the entropy, before both together are an alarm."""

_REMEMBERED = 100_000
"""Trained groups whose ids are remembered."""


def check_labels(groups: Sequence[TrainingGroup], *, seed: int) -> Iterator[Finding]:
    """Trajectories that stand under another group than the one they name, members that occur
    twice, and groups whose members were not asked the same."""
    for group in groups:
        members = group.trajectories
        strangers = [t for t in members if t.id.group != group.id or t.id.run != seed]
        if strangers:
            yield Finding(
                "labels",
                "swapped_groups",
                f"group {group.id} holds {len(strangers)} trajectories that name another one, "
                f"such as {strangers[0].id}",
            )
        indices = [t.id.index for t in members]
        if len(set(indices)) < len(indices):
            yield Finding("labels", "doubled_member", f"group {group.id} has members {indices}")
        problems = {(t.task, t.problem) for t in members}
        prompts = {_prompt(t) for t in members if t.num_tokens}
        if len(problems) > 1 or len(prompts) > 1:
            yield Finding(
                "labels",
                "mixed_group",
                f"the members of group {group.id} were asked {len(problems)} problems in "
                f"{len(prompts)} wordings; advantages compare members of one",
            )


def _prompt(trajectory: Trajectory) -> bytes:
    """What the model read before its first turn."""
    first = trajectory.segments[0]
    start = next((turn.start for turn in trajectory.turns if turn.segment == 0), len(first))
    return first.token_ids[:start].tobytes()


def check_advantages(groups: Sequence[TrainingGroup], *, loss: LossOptions) -> Iterator[Finding]:
    """Advantages that are not those of the group's own rewards."""
    for group in groups:
        due = group_advantages(
            [t.reward for t in group.trajectories],
            [t.outcome for t in group.trajectories],
            kind=loss.advantage,
            variance_of=loss.variance_of,
        )
        carried = list(group.advantages)
        if len(due) == len(carried) and all(map(_same, carried, due)):
            continue
        shuffled = Counter(carried) == Counter(due)
        how = "shuffled among its members" if shuffled else "not those of its rewards"
        yield Finding(
            "advantages",
            "shuffled_advantages" if shuffled else "foreign_advantages",
            f"the advantages of group {group.id} are {how}: carried {_short(carried)}, "
            f"due {_short(due)}",
        )


def _same(carried: float | None, due: float | None) -> bool:
    if carried is None or due is None:
        return carried is due
    return abs(carried - due) <= ADVANTAGE_TOLERANCE


def _short(values: Sequence[float | None]) -> str:
    return "[" + ", ".join("-" if v is None else f"{v:.3f}" for v in values[:8]) + "]"


@dataclass(frozen=True, slots=True)
class _Columns:
    """Segments of a batch, one behind the other, with one entry between each two that belongs to
    none, so that a shift never carries a token from one into the next."""

    sampled: BoolArray
    written: BoolArray
    """Is the token in a turn?"""
    logprobs: npt.NDArray[np.float32]
    entropies: npt.NDArray[np.float32]
    wrong_stops: int
    """Turns that say "stop" and do not end in a stop token."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> _Columns:
        segments: list[Segment] = []
        starts: list[int] = []
        stops: list[int] = []
        ends: list[tuple[int, tuple[int, ...]]] = []
        at = 0
        for t in trajectories:
            places = []
            for segment in t.segments:
                places.append(at)
                at += len(segment) + 1
                segments.append(segment)
            for number, start, stop, reason in t.turns:
                starts.append(places[number] + start)
                stops.append(places[number] + stop)
                if reason == "stop":
                    last = int(t.segments[number].token_ids[stop - 1])
                    ends.append((last, t.sampling.stop_token_ids))
        edges = np.zeros(at + 1, dtype=np.int64)
        np.add.at(edges, np.array(starts, dtype=np.int64), 1)
        np.add.at(edges, np.array(stops, dtype=np.int64), -1)
        return cls(
            _joined([s.sampled for s in segments], False),
            (np.cumsum(edges) > 0)[:at],
            _joined([s.behavior_logprobs for s in segments], np.nan),
            _joined([s.behavior_entropies for s in segments], np.nan),
            sum(token not in allowed for token, allowed in ends),
        )


def _joined(arrays: Sequence[npt.NDArray[Any]], between: float | bool) -> npt.NDArray[Any]:
    if not arrays:
        return np.zeros(0, dtype=bool if between is False else np.float32)
    gap = np.array([between], dtype=arrays[0].dtype)
    return np.concatenate([part for array in arrays for part in (array, gap)])


def check_alignment(trajectories: Sequence[Trajectory]) -> Iterator[Finding]:
    """Columns that do not speak of the tokens that the turns say were written; off by one is told
    from any other disagreement."""
    columns = _Columns.of(trajectories)
    pairs = (
        ("mask", "the mask and the turns", columns.sampled, columns.written),
        ("logprobs", "log-probs and mask", ~np.isnan(columns.logprobs), columns.sampled),
        ("entropies", "entropies and mask", ~np.isnan(columns.entropies), columns.sampled),
    )
    for name, which, has, should in pairs:
        wrong = int((has != should).sum())
        if not wrong:
            continue
        offset = _offset(has, should, wrong)
        yield Finding(
            "alignment",
            f"shifted_{name}" if offset else f"misplaced_{name}",
            f"{which} disagree on {wrong} of {len(has)} tokens"
            + (f"; off by one ({offset:+d}) explains it" if offset else ""),
        )
    if columns.wrong_stops:
        yield Finding(
            "alignment",
            "turn_end",
            f"{columns.wrong_stops} turns end with 'stop', but not in a stop token",
        )


def _offset(has: BoolArray, should: BoolArray, wrong: int) -> int:
    """The shift by one that explains two thirds of what is wrong, all but the ends of segments;
    0: none does."""
    for offset in (1, -1):
        if (np.roll(has, -offset) != should).sum() * 3 <= wrong:
            return offset
    return 0


class Surprise:
    """Are tokens as surprising as their distributions promise? Over the last three batches.

    The mean of d = surprisal - entropy is 0 for honest draws, whatever the model. A finding asks
    for |sum d| > SURPRISE_Z * sqrt(sum V) and |sum d| > SURPRISE_SHARE * (sum of entropies), where
    V bounds the variance of one surprisal by its entropy H and the size of the vocabulary n (see
    `largest_variance`). Where one token is nearly certain the variance is that of rare events, and
    a batch in which none of them happened says nothing; the variance of the d themselves would
    miss that.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._batches: deque[npt.NDArray[np.float64]] = deque(maxlen=3)

    def check(self, trajectories: Sequence[Trajectory]) -> list[Finding]:
        """Take a batch; what the last ones together say."""
        self._batches.append(_surprise(trajectories, self._vocab_size))
        count, surprisal, entropy, variance = np.sum(list(self._batches), axis=0)
        excess = surprisal - entropy
        spread = float(np.sqrt(variance))
        if abs(excess) <= max(SURPRISE_Z * spread, SURPRISE_SHARE * entropy):
            return []
        kind, how = ("drawn_colder", "less") if excess < 0 else ("drawn_hotter", "more")
        return [
            Finding(
                "temperature",
                kind,
                f"{count:.0f} tokens are {how} surprising than their entropies promise: mean "
                f"surprisal {surprisal / count:.3f}, mean entropy {entropy / count:.3f}, "
                f"{abs(excess) / spread:.0f} standard errors apart",
            )
        ]


def largest_variance(
    entropies: npt.NDArray[np.float64], vocab_size: int
) -> npt.NDArray[np.float64]:
    """A bound on the variance of the surprisal of a token of entropy H among n:

        min(H (3 + log(1 + 1/H) + log n), 1 + log(n)^2 / 4), H at least 1e-12

    Of one entropy, distributions of two distinct probabilities vary most (Lagrange: log p solves a
    quadratic equation), and over those the bound holds."""
    width = math.log(vocab_size)
    entropies = np.maximum(entropies, 1e-12)
    rare = entropies * (3.0 + np.log1p(1.0 / entropies) + width)
    return np.minimum(rare, 1.0 + width**2 / 4.0)


def _surprise(trajectories: Sequence[Trajectory], vocab_size: int) -> npt.NDArray[np.float64]:
    """Sums over the sampled tokens: 1, surprisal, entropy, bound on the surprisal's variance."""
    drawn = [s for t in trajectories if t.sampling.temperature > 0 for s in t.segments]
    if not drawn:
        return np.zeros(4)
    mask = np.concatenate([s.sampled for s in drawn])
    logprobs = np.concatenate([s.behavior_logprobs for s in drawn])[mask].astype(np.float64)
    entropies = np.concatenate([s.behavior_entropies for s in drawn])[mask].astype(np.float64)
    known = np.isfinite(logprobs) & np.isfinite(entropies)
    logprobs, entropies = logprobs[known], entropies[known]
    variance = largest_variance(entropies, vocab_size)
    return np.array([len(logprobs), -logprobs.sum(), entropies.sum(), variance.sum()])


class Trained:
    """Remembers which groups were trained, since it was made."""

    def __init__(self) -> None:
        self._at: OrderedDict[tuple[int, int], int] = OrderedDict()

    def check(self, groups: Sequence[TrainingGroup], version: int) -> list[Finding]:
        """Groups seen before, in this batch or an earlier one. version: of the trainer now."""
        found = []
        for group in groups:
            runs = {t.id.run for t in group.trajectories}
            for key in {(run, t.id.group) for run in runs for t in group.trajectories}:
                before = self._at.get(key)
                if before is None:
                    self._at[key] = version
                    continue
                found.append(
                    Finding(
                        "twice",
                        "trained_twice",
                        f"group {key[1]} is trained at version {version}, as it was at {before}",
                    )
                )
        while len(self._at) > _REMEMBERED:
            self._at.popitem(last=False)
        return found
