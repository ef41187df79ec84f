"""`--only LABEL=VALUE`: which runs are left in, and what is said where no run has such a label."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..errors import ConfigError
from .sweep import Job

LATER = ("phase", "seed")
"""Labels whose values may first come up after the first runs, once something was tuned."""


class Only:
    """wanted: label -> the values that runs may have. Values are compared as numbers where they are
    some: lr=5e-4 is lr=0.0005."""

    def __init__(self, wanted: Mapping[str, Sequence[str]]) -> None:
        self._wanted = {
            label: {_told(value): value for value in values} for label, values in wanted.items()
        }
        self._known: dict[str, set[str]] = {}

    @property
    def labels(self) -> Collection[str]:
        """That some value was asked of."""
        return self._wanted.keys()

    def wants(self, label: str, value: object) -> bool:
        """Whether this value of a label is left in."""
        return label not in self._wanted or _told(value) in self._wanted[label]

    def matches(self, job: Job) -> bool:
        """Whether a run is left in. One without a label that was asked for is."""
        return all(self.wants(label, value) for label, value in job.labels.items())

    def see(self, jobs: Iterable[Job]) -> None:
        """Learn which labels and values there are."""
        for job in jobs:
            for label, value in job.labels.items():
                self._known.setdefault(label, set()).add(_told(value))

    def check(self, *, but: Collection[str] = ()) -> None:
        """Raises ConfigError naming the first label or value, of other labels than `but`, that no
        run seen so far has, and those that there are."""
        for label, values in self._wanted.items():
            known = self._known.get(label)
            if known is None:
                one = next(iter(values.values()))
                labels = sorted(self._known)
                raise ConfigError(
                    f"--only {label}={one}: no run has a label {label!r}; {_rather(label, labels)}"
                )
            if label in but:
                continue
            for told, value in values.items():
                if told not in known:
                    there = sorted(known)
                    raise ConfigError(
                        f"--only {label}={value}: no run has it; {_rather(told, there)}"
                    )

    def __str__(self) -> str:
        return " ".join(
            f"--only {label}={value}"
            for label, own in self._wanted.items()
            for value in own.values()
        )


def _told(value: object) -> str:
    text = str(value).strip()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def _rather(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{meant}there are {', '.join(known) or 'none'}"
