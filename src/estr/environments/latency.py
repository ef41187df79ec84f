"""The sleeping tool: how long a call takes, for tasks whose tools answer at once by themselves.

Real tools wait for searches, sandboxes and other people's machines. A sleeping tool stands for
them: its times are lognormal, cut off at both ends, and a pure function of problem and call.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from statistics import NormalDist

from ..options.corrections import require
from . import stable_hash


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """The options of every task with a sleeping tool; a task's own options inherit them."""

    latency_mean_s: float = 0.0
    """Mean time of a tool call, lognormal with shape 1, cut off below and above; 0: at once."""
    latency_min_s: float = 0.01
    """Shortest tool call, seconds."""
    latency_max_s: float = 0.2
    """Longest tool call, seconds."""

    def check_latency(self) -> None:
        low, mean, high = self.latency_min_s, self.latency_mean_s, self.latency_max_s
        require(
            mean == 0 or (0 < low < mean < high and math.isfinite(high)),
            f"latency_mean_s must be 0 or lie between latency_min_s and latency_max_s, both "
            f"finite and above 0; they are {mean}, {low} and {high}",
        )


class Latency:
    """exp(mu + z), z standard normal, cut off at latency_min_s and latency_max_s; mu is chosen so
    that the mean after the cut is latency_mean_s, 0 being no time at all."""

    def __init__(self, options: LatencyOptions) -> None:
        self._awake = options.latency_mean_s == 0
        if self._awake:
            return
        self._low, self._high = math.log(options.latency_min_s), math.log(options.latency_max_s)
        # The mean grows with mu, from the lower cut to the upper one: bisection.
        below, above = self._low - 8, self._high + 8
        for _ in range(60):
            self._mu = (below + above) / 2
            if self.mean_s() < options.latency_mean_s:
                below = self._mu
            else:
                above = self._mu

    def mean_s(self) -> float:
        """E[min(max(exp(mu + z), low), high)] in closed form, seconds."""
        if self._awake:
            return 0.0
        below = NormalDist().cdf(self._low - self._mu)
        above = 1 - NormalDist().cdf(self._high - self._mu)
        within = NormalDist(self._mu + 1)
        inside = within.cdf(self._high) - within.cdf(self._low)
        return (
            math.exp(self._low) * below
            + math.exp(self._mu + 0.5) * inside
            + math.exp(self._high) * above
        )

    def seconds(self, *key: str | int) -> float:
        """The time that the call named by `key` takes."""
        if self._awake:
            return 0.0
        uniform = (stable_hash("latency", *key) % 2**52 + 0.5) / 2**52
        time = self._mu + NormalDist().inv_cdf(uniform)
        return math.exp(min(max(time, self._low), self._high))

    async def wait(self, *key: str | int) -> None:
        """Let that time pass."""
        if not self._awake:
            await asyncio.sleep(self.seconds(*key))
