"""How far a run has come and how it goes, and the few words that a display has for it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .progress import Row

_WINDOW = 32
"""Optimizer steps that the pace is taken from."""

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class RunProgress:
    """What both displays know of a run: the newest step, the pace, and the curves so far."""

    title: str
    steps: int
    bound: int
    step: int = 0
    version: int = 0
    row: Row = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    accuracies: list[tuple[int, float, int]] = field(default_factory=list)
    marks: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """(step, wall_s, trained tokens up to it), of the last steps."""

    def take(self, step: int, version: int, wall_s: float, row: Row) -> None:
        """One optimizer step."""
        self.step, self.version, self.row = step, version, row
        reward = row.get("reward_mean")
        if reward is not None:
            self.rewards.append(reward)
        before = self.marks[-1][2] if self.marks else 0.0
        tokens = before + (row.get("eligible_tokens") or 0.0)
        self.marks.append((step, wall_s, tokens))

    @property
    def tokens_per_s(self) -> float | None:
        """Trained tokens per second over the last steps."""
        _, seconds, tokens = self._span()
        return tokens / seconds if seconds > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step, at the pace of the last ones."""
        steps, seconds, _ = self._span()
        return seconds / steps * (self.steps - self.step) if steps else None

    def _span(self) -> tuple[int, float, float]:
        """Steps, seconds and tokens between the first mark and the last one."""
        if not self.marks:
            return 0, 0.0, 0.0
        (step, wall_s, tokens), newest = self.marks[0], self.marks[-1]
        return newest[0] - step, newest[1] - wall_s, newest[2] - tokens

    def figures(self) -> Iterator[tuple[str, str]]:
        """(name, value) of what is known of the newest step."""
        row = self.row
        if self.rewards:
            yield "reward", f"{self.rewards[-1]:.3f}"
        if self.accuracies:
            version, accuracy, _ = self.accuracies[-1]
            yield "held-out", f"{accuracy:.3f} (version {version})"
        if self.tokens_per_s is not None:
            yield "tokens/s", rate(self.tokens_per_s)
        spans = [
            f"{name} {row[f'{name}_mean']:.2f}, at most {row[f'{name}_max']:.0f}"
            for name in ("intra", "inter")
            if row.get(f"{name}_mean") is not None and row.get(f"{name}_max") is not None
        ]
        if spans:
            yield "staleness", f"{'; '.join(spans)}; allowed {self.bound}"
        if row.get("rho_mask") is not None:
            yield "rho_mask", f"{row['rho_mask']:.2g}"
        busy = [
            f"{name} {100 * share:.0f} %"
            for name in ("engine", "trainer")
            if (share := row.get(f"{name}_busy")) is not None
        ]
        if busy:
            yield "busy", ", ".join(busy)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last values as bars, lowest to highest; more than `width` of them are averaged."""
    if not values:
        return ""
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    if len(values) <= width:
        edges = list(range(len(values) + 1))
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in means)


def rate(per_s: float) -> str:
    """12,345; 10; 3.1; 0.52: slow is not nothing."""
    return f"{per_s:,.0f}" if per_s >= 9.95 else f"{per_s:.2g}"


def duration(seconds: float) -> str:
    """0:07, 12:30, 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
