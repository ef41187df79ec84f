"""F, the invariant that bounds staleness, over the number of groups of each deadline.

F(v): for every k >= 0 at most (k+1)*B outstanding groups have a deadline <= v+k, and none has one
< v. The steps at v, v+1, ..., v+k take (k+1)*B groups, so no more than that may be due by then.
docs/the-loop.md proves what follows from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


class Deadlines:
    """How many outstanding groups have which deadline, and how many of those are finished.

    groups_per_step: B. outstanding: deadlines of the groups there are already, none finished. An
    answer costs the number of distinct deadlines, not of groups.
    """

    def __init__(self, groups_per_step: int, outstanding: Iterable[int] = ()) -> None:
        self._groups_per_step = groups_per_step
        self._outstanding = Counter(outstanding)
        self._finished: Counter[int] = Counter()

    @property
    def num_finished(self) -> int:
        """Groups that are finished."""
        return self._finished.total()

    def add(self, deadline: int) -> None:
        """One more outstanding group."""
        self._outstanding[deadline] += 1

    def finish(self, deadline: int) -> None:
        """One of them has finished."""
        self._finished[deadline] += 1

    def remove(self, deadline: int, *, finished: bool) -> None:
        """One of them has left."""
        _subtract(self._outstanding, deadline)
        if finished:
            _subtract(self._finished, deadline)

    def admits(self, deadline: int, version: int) -> bool:
        """Would F(version) hold with one more group of that deadline?"""
        return self.overfull(version, taken={deadline: -1}) is None

    def overfull_by_unfinished(self, version: int) -> int | None:
        """The first deadline at which the unfinished groups alone break F(version), or None. Once
        the most urgent finished ones are taken, no others can (docs/the-loop.md, lemma 3)."""
        return self.overfull(version, taken=self._finished)

    def overfull(self, version: int, taken: Mapping[int, int]) -> int | None:
        """The first deadline at which F(version) fails once `taken` groups (by deadline) are gone,
        or None.

        Deadlines that no group has need no look: the count stays there and its limit rises.
        """
        count = 0
        for deadline in sorted(self._outstanding.keys() | taken.keys()):
            count += self._outstanding[deadline] - taken.get(deadline, 0)
            if count > max(0, deadline - version + 1) * self._groups_per_step:
                return deadline
        return None


def _subtract(counts: Counter[int], deadline: int) -> None:
    """One less; entries at zero are dropped, so that walks stay as short as the deadlines."""
    counts[deadline] -= 1
    if not counts[deadline]:
        del counts[deadline]
