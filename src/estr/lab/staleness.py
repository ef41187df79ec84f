"""Controlled staleness: which version of the weights draws which token, imposed exactly.

    v_target          the weights that the loss is taken at
    v_last            v_target - inter, the newest that draws
    v_first           v_last - intra, the oldest that draws; every rollout begins with it

Between the two a rollout passes through all versions, one switch each, in one of three ways:

    even     switches at equal distances over the usual length of a rollout
    random   at places drawn anew for every rollout
    turns    at the borders of turns only, several versions at once where turns are few

A rollout that ends before its last switch has drawn nothing with the versions after it: imposed is
the version of every token, and what came of it (intra, inter) is measured like everywhere else.
Versions below 0 do not exist; the first steps of a run are drawn by version 0 instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import WeightsError
from ..options.corrections import require
from .arithmetic import Arithmetic
from .decoder import Decoder, Weights

Switches = Literal["even", "random", "turns"]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Staleness:
    """inter: v_target - v_last; intra: v_last - v_first; switches: where the versions change. kv:
    what a switch does to the keys and values of a rollout: "recompute" them under the new version
    (every token is then exactly that version's) or "keep" them."""

    inter: int = 0
    intra: int = 0
    switches: Switches = "even"
    kv: Literal["recompute", "keep"] = "recompute"

    def __post_init__(self) -> None:
        require(0 <= self.inter <= 64, f"inter must be in [0, 64], not {self.inter}")
        require(0 <= self.intra <= 64, f"intra must be in [0, 64], not {self.intra}")

    @property
    def depth(self) -> int:
        """How many versions back the oldest one lies."""
        return self.inter + self.intra


class Plan:
    """The versions of one batch of rollouts.

    length, turns: the usual number of sampled tokens and of turns of a rollout. rng: for "random".
    """

    def __init__(
        self,
        staleness: Staleness,
        target: int,
        num_rows: int,
        *,
        length: float = 24.0,
        turns: float = 4.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        self._last = target - staleness.inter
        self._first = self._last - staleness.intra
        self._by_turn = staleness.switches == "turns"
        intra = staleness.intra
        if self._by_turn:
            borders = np.arange(1, intra + 1) * max(turns - 1.0, 1.0) / max(intra, 1)
            places = np.tile(np.ceil(borders), (num_rows, 1))
        elif staleness.switches == "even":
            places = np.tile(np.arange(1, intra + 1) * length / (intra + 1), (num_rows, 1))
        else:
            if rng is None:
                raise ValueError('switches = "random" needs rng')
            places = np.sort(rng.uniform(0.0, length, (num_rows, intra)), axis=1)
        self._borders = places

    def versions(self, rows: IntArray, tokens: IntArray, turns: IntArray) -> IntArray:
        """The version that draws the next token of each row; tokens: how many the row has drawn,
        turns: how many it has ended."""
        at = turns if self._by_turn else tokens
        passed = (self._borders[rows] <= at[:, None]).sum(axis=1)
        versions: IntArray = np.maximum(0, self._first + passed)
        return versions


class WeightHistory:
    """A WeightStore that keeps the newest `keep` versions and has each of them ready for a sampler
    of some arithmetic."""

    def __init__(self, decoder: Decoder, keep: int) -> None:
        self._decoder = decoder
        self._keep = keep
        self._states: dict[int, dict[str, Tensor]] = {}
        self._prepared: dict[tuple[int, Arithmetic], Weights] = {}

    def publish(self, version: int, state: Mapping[str, Tensor]) -> str:
        self._states = {v: kept for v, kept in self._states.items() if v < version}
        self._states[version] = {name: t.detach().clone() for name, t in state.items()}
        for old in sorted(self._states)[: -self._keep]:
            del self._states[old]
        self._prepared = {k: w for k, w in self._prepared.items() if k[0] in self._states}
        return f"history-{version}"

    def fetch(self, version: int) -> dict[str, Tensor]:
        if version not in self._states:
            raise WeightsError(
                f"version {version} is not in the history, which holds {sorted(self._states)}"
            )
        return {name: t.clone() for name, t in self._states[version].items()}

    def latest(self) -> int | None:
        return max(self._states, default=None)

    def weights(self, version: int, arithmetic: Arithmetic) -> Weights:
        """A version as a sampler of this arithmetic has it. Raises WeightsError if absent."""
        key = (version, arithmetic)
        if key not in self._prepared:
            with torch.no_grad():
                self._prepared[key] = self._decoder.prepare(self.fetch(version), arithmetic)
        return self._prepared[key]
