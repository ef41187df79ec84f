"""From "recorded and re-scored differ" to what went wrong.

    examine(unit, scores, tolerance) -> Gaps          which tokens differ, in which column
    diagnose(unit, scores, gaps, ...) -> Finding      the first hypothesis that explains them

A hypothesis explains a mismatch if at most one in twenty of the tokens still differs under it.
Those that need no model come first; the others score the unit again, which costs, but only happens
when something is wrong already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..types import BoolArray, Finding
from .rescore import FloatArray, IntArray, Score, Scores, Tolerance, Unit

TEMPERATURES = (0.25, 0.5, 0.7, 0.8, 1.25, 1.5, 2.0, 4.0)
"""Factors by which a temperature may have been wrong."""

OUTLIERS = 4
"""Tokens of a noisy sampler beyond their limit, below which, or below a tenth, nothing is said."""

_MAX_CONTEXTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Which tokens differ, [n] each, and by how much at most, nats."""

    logprobs: BoolArray
    entropies: BoolArray
    worst: float

    @property
    def any(self) -> bool:
        return bool(self.logprobs.any() or self.entropies.any())


def examine(unit: Unit, scores: Scores, tolerance: Tolerance) -> Gaps:
    """Compare what was recorded with the scores of the same tokens. NaN differs from everything."""
    logprobs, entropies = unit.recorded()
    far = np.abs(np.stack([logprobs - scores.logprobs, entropies - scores.entropies]))
    return Gaps(
        _settled(~(far[0] <= tolerance.of_logprobs(scores)), tolerance),
        _settled(~(far[1] <= tolerance.of_entropies(scores)), tolerance),
        float(np.nan_to_num(far, nan=np.inf).max()),
    )


def _settled(wrong: BoolArray, tolerance: Tolerance) -> BoolArray:
    """Of a noisy sampler's tokens a few outliers say nothing: its errors have heavy tails."""
    few = tolerance.noise > 0 and len(wrong) > 1 and wrong.sum() < max(OUTLIERS, 0.1 * len(wrong))
    return np.zeros_like(wrong) if few else wrong


def diagnose(
    unit: Unit,
    scores: Scores,
    gaps: Gaps,
    tolerance: Tolerance,
    score: Score,
    *,
    retained: Sequence[int],
    foreign_weights: bool = False,
) -> Finding:
    """Name the fault. foreign_weights: the canaries of these versions were wrong already, so that
    what differs after a switch is no matter of caches."""
    logprobs, entropies = unit.recorded()
    case = _Case(unit, logprobs, entropies, scores, gaps, tolerance, score)
    kind, words = next(case.hypotheses(retained, foreign_weights))
    differ = gaps.logprobs | gaps.entropies
    first = int(unit.places[np.flatnonzero(differ)[0]])
    return Finding(
        "rescore",
        kind,
        f"{unit.name}: {int(differ.sum())} of {len(differ)} re-scored tokens differ from their "
        f"version's, by up to {gaps.worst:.2g} nats, first at token {first}: {words}",
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    unit: Unit
    logprobs: FloatArray
    entropies: FloatArray
    scores: Scores
    gaps: Gaps
    tolerance: Tolerance
    score: Score

    @property
    def wrong(self) -> BoolArray:
        return self.gaps.logprobs | self.gaps.entropies

    def hypotheses(
        self, retained: Sequence[int], foreign_weights: bool
    ) -> Iterator[tuple[str, str]]:
        """(kind, words) of those that explain it, the most particular first."""
        only_logprobs = not self.gaps.entropies.any()
        only_entropies = not self.gaps.logprobs.any()
        if only_logprobs:
            yield from self._shifted(logprobs=True)
        elif only_entropies:
            if self._is_surprisal():
                yield "surprisal_as_entropy", "what is called entropy is -log-prob"
            yield from self._shifted(entropies=True)
        else:
            yield from self._shifted(logprobs=True, entropies=True)
        yield from self._temperature()
        yield from self._version(retained)
        if only_logprobs:
            yield "foreign_logprobs", "the entropies agree, the log-probs are of nothing known"
        if only_entropies:
            yield "foreign_entropies", "the log-probs agree, the entropies are of nothing known"
        if not foreign_weights:
            yield from self._kept_cache()
            yield from self._context()
        yield (
            "foreign_weights",
            "no shift, temperature, version or context explains it: the sampler's weights or "
            "arithmetic are not those of the version",
        )

    def _is_surprisal(self) -> bool:
        far = np.abs(self.entropies + self.logprobs)
        return _rare(~(far <= self.tolerance.of_entropies(self.scores)))

    def _shifted(
        self, *, logprobs: bool = False, entropies: bool = False
    ) -> Iterator[tuple[str, str]]:
        """Each token carries its neighbor's values, the seams of turns excepted."""
        scores, limits = self.scores, self.tolerance
        columns = (
            (logprobs, "log-probs", self.logprobs, scores.logprobs, limits.of_logprobs(scores)),
            (entropies, "entropies", self.entropies, scores.entropies, limits.of_entropies(scores)),
        )
        names = [name for on, name, *_ in columns if on]
        kind = "columns" if len(names) > 1 else names[0].replace("-", "")
        for offset in (1, -1):
            inner = slice(1, None) if offset == 1 else slice(None, -1)
            wrong = np.zeros(len(self.wrong) - 1, dtype=bool)
            for on, _, recorded, exact, limit in columns:
                if on:
                    far = np.abs(recorded - np.roll(exact, offset))
                    wrong |= ~(far <= np.roll(limit, offset))[inner]
            if wrong.sum() * 2 < self.wrong[inner].sum():
                side = "before" if offset == 1 else "after"
                yield f"shifted_{kind}", f"{' and '.join(names)} are those of the token {side}"

    def _agree(self, scores: Scores | None, where: BoolArray) -> bool:
        """Do these scores of the unit's tokens agree with what was recorded, there?"""
        if scores is None or not where.any():
            return False
        gaps = examine(self.unit, scores, self.tolerance)
        return _rare((gaps.logprobs | gaps.entropies)[where])

    def _under(self, lag: int, temperature: float) -> Scores:
        """The unit's tokens under versions so much newer, at a temperature; NaN: not retained."""
        unit, columns = self.unit, np.full((3, len(self.unit.places)), np.nan)
        for version in np.unique(unit.versions):
            own = unit.versions == version
            found = self.score(int(version) + lag, self._ids(), unit.places[own], temperature)
            if found is not None:
                columns[:, own] = found
        return Scores(*columns)

    def _ids(self) -> IntArray:
        return self.unit.segment.token_ids.astype(np.int64)

    def _temperature(self) -> Iterator[tuple[str, str]]:
        due = self.unit.temperature
        for factor in TEMPERATURES:
            if self._agree(self._under(0, due * factor), self.wrong):
                yield (
                    "wrong_temperature",
                    f"they were drawn at temperature {due * factor:g}, {due:g} was asked for",
                )

    def _version(self, retained: Sequence[int]) -> Iterator[tuple[str, str]]:
        """The tokens that differ are of another version: all, or those beside a switch only."""
        versions = self.unit.versions
        sampled = np.flatnonzero(self.unit.segment.sampled)
        change = np.flatnonzero(np.diff(self.unit.segment.versions[sampled]))
        beside = np.isin(self.unit.places, sampled[np.concatenate([change, change + 1])])
        span = max(retained, default=0) - min(retained, default=0)
        for lag in (sign * size for size in range(1, span + 1) for sign in (-1, 1)):
            known = np.isin(versions + lag, list(retained))
            if (self.wrong & known).sum() * 2 <= self.wrong.sum():
                continue  # too few of them can be judged
            if not self._agree(self._under(lag, self.unit.temperature), self.wrong & known):
                continue
            if not (self.wrong & ~beside).any():
                yield (
                    "shifted_versions",
                    "only tokens beside a switch of weights do, and they are of the version on "
                    "its other side: the column of versions is off by one",
                )
            yield "wrong_version", f"they were drawn under the version {lag:+d} from their own"

    def _kept_cache(self) -> Iterator[tuple[str, str]]:
        """Every differing token follows a switch inside its own turn, and others agree."""
        wrong = self.wrong
        after = np.zeros(len(wrong), dtype=bool)
        for turn in self.unit.turns:
            inside = (self.unit.places >= turn.start) & (self.unit.places < turn.stop)
            whole = self.unit.segment.versions[turn.start : turn.stop]
            after |= inside & (self.unit.segment.versions[self.unit.places] != whole[0])
        if after.any() and not after.all() and not (wrong & ~after).any():
            yield (
                "kept_cache",
                "all of them follow a switch of weights inside their turn: keys and values were "
                'kept, though kv = "recompute"',
            )

    def _context(self) -> Iterator[tuple[str, str]]:
        """The first wrong turn was drawn without one token of its context."""
        unit = self.unit
        first = int(unit.places[np.flatnonzero(self.wrong)[0]])
        turn = next((turn for turn in unit.turns if turn.start <= first < turn.stop), None)
        if turn is None:
            return
        inside = (unit.places >= turn.start) & (unit.places < turn.stop)
        versions = np.unique(unit.versions[inside])
        if len(versions) > 1:
            inside &= unit.versions == versions[0]
        for left_out in self._suspects(turn.start):
            ids = np.delete(self._ids(), left_out)
            found = self.score(int(versions[0]), ids, unit.places[inside] - 1, unit.temperature)
            if found is None:
                return
            columns = np.full((3, len(unit.places)), np.nan)
            columns[:, inside] = found
            if self._agree(Scores(*columns), inside):
                yield (
                    "dropped_context",
                    f"the turn at token {turn.start} was drawn without token {left_out} of its "
                    f"context (id {int(self._ids()[left_out])})",
                )

    def _suspects(self, start: int) -> list[int]:
        """Context tokens at the seams before a turn, the nearest first, the very first last."""
        sampled = self.unit.segment.sampled[:start]
        seams = np.flatnonzero(np.diff(sampled.astype(np.int8)))
        near = [start - 1, *(int(s) + d for s in seams[::-1] for d in (1, 0)), 0]
        context = [place for place in near if not sampled[place]]
        return [p for p in dict.fromkeys(context) if start > 1][:_MAX_CONTEXTS]


def _rare(wrong: npt.NDArray[np.bool_]) -> bool:
    """At most one in twenty."""
    return bool(wrong.sum() * 20 <= len(wrong))
