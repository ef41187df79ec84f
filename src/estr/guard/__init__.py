"""The guard: is the data what the trainer takes it for?

    mini-batches --check--> Guard --> findings      before every batch, in the trainer's process
        records      labels, advantages, surprise, twice               every trajectory
                     alignment                                         every other one
        rescore      log-probs and entropies of one segment's tokens   under their own version
    canaries --check_canaries--> Guard --> findings                    after every weight switch

It draws no random number, and nothing that training computes depends on it. Re-scoring and canaries
share a small part of the CPU time (`worker.CpuBudget`): where it is used up they are left out, but
never more than twice in a row. `docs/guard.md` has the table of faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..buffer import TrainingGroup
from ..errors import GuardError, WeightsError
from ..metrics import Metrics
from ..quantization import inner_linear_weights, quantized_state
from ..types import Finding, Segment, Trajectory
from ..weights import WeightStore
from ..worker import CpuBudget
from .diagnosis import Gaps, diagnose, examine
from .records import Surprise, Trained, check_advantages, check_alignment, check_labels
from .rescore import (
    MAX_NOISE,
    IntArray,
    Rescorer,
    Scores,
    Tolerance,
    Unit,
    logit_noise,
    pick,
    score_unit,
    widen,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..config import Recipe

_CALIBRATION = 16
"""Segments of the first batch that a low-precision sampler's noise is measured on."""

_CACHE_BYTES = 1 << 26
"""Room for states of past versions, so that small models need not be read again for each token."""


class Guard:
    """Checks every batch and every canary of one run. model: for its structure; see Rescorer."""

    def __init__(
        self, model: Any, recipe: Recipe, store: WeightStore, *, vocab_size: int | None = None
    ) -> None:
        self._recipe = recipe
        self._store = store
        self._rescorer = Rescorer(model, vocab_size=vocab_size)
        self._vocab_size = vocab_size or int(model.config.vocab_size)
        self._rounded = inner_linear_weights(self._rescorer.structure)
        self._tolerance: Tolerance | None = None
        if recipe.engine.dtype == "float32":
            self._tolerance = Tolerance()
        self._trained, self._surprise = Trained(), Surprise(self._vocab_size)
        self._states: dict[int, dict[str, Tensor]] = {}
        self._bad_canaries: set[int] = set()
        self._batches = 0
        self._number = 0
        self.budget = CpuBudget()

    def forget(self) -> None:
        """Training goes on from a checkpoint: what was seen belongs to another course of it."""
        self._states.clear()
        self._bad_canaries.clear()
        self._trained, self._surprise = Trained(), Surprise(self._vocab_size)

    def check(
        self, minibatches: Sequence[Sequence[TrainingGroup]], version: int
    ) -> tuple[list[Finding], Metrics]:
        """What is wrong with a batch about to be trained at `version`, and the figures: tokens
        re-scored, the largest gap (nats), CPU seconds of the guard.

        Raises GuardError where something is wrong and guard = "stop".
        """
        metrics = Metrics()
        before = self.budget.spent_s
        with self.budget.spending():
            groups = [group for minibatch in minibatches for group in minibatch]
            trajectories = [t for group in groups for t in group.trajectories]
            self._batches += 1
            found = [
                *check_labels(groups, seed=self._recipe.seed),
                *check_advantages(groups, loss=self._recipe.loss),
                *check_alignment(trajectories[self._batches % 2 :: 2]),
                *self._surprise.check(trajectories),
            ]
            found += self._trained.check(groups, version)
        if self.budget.allows():
            with self.budget.spending():
                found += self._rescore(groups, metrics)
        metrics.add_sum("guard_s", self.budget.spent_s - before)
        self.stop_on(found)
        return found, metrics

    def check_canaries(self, canaries: Sequence[Segment]) -> list[Finding]:
        """What an engine drew after a switch, compared with the version that it claims. Raises
        GuardError as `check` does."""
        found: list[Finding] = []
        if canaries:
            with self.budget.spending():
                found = self._check_canaries(canaries)
        self.stop_on(found)
        return found

    def stop_on(self, findings: Sequence[Finding]) -> None:
        """Raise GuardError if there are any and guard = "stop"."""
        if findings and self._recipe.guard == "stop":
            raise GuardError(
                "; ".join(f"{f.check}, {f.kind}: {f.message}" for f in findings[:3])
                + '. guard = "stop" ends the run before it trains on this; "warn" goes on'
            )

    def _rescore(self, groups: Sequence[TrainingGroup], metrics: Metrics) -> list[Finding]:
        """One segment's tokens under the versions that they name."""
        trajectories = [t for group in groups for t in group.trajectories]
        number, self._number = self._number, self._number + 1
        found: list[Finding] = []
        if self._tolerance is None:
            found += self._calibrate(trajectories)
        unit = pick(trajectories, number, kv=self._recipe.kv, retained=self._retained())
        if unit is None or self._tolerance is None:
            return found
        unit, scores = score_unit(unit, self._score)
        if not len(unit.places):
            return found
        gaps = examine(unit, scores, self._tolerance)
        metrics.add_sum("guard_rescored_tokens", len(unit.places))
        metrics.add_max("guard_gap", gaps.worst)
        if gaps.any:
            found.append(self._name(unit, scores, gaps, self._tolerance))
        return found

    def _name(self, unit: Unit, scores: Scores, gaps: Gaps, tolerance: Tolerance) -> Finding:
        """What is wrong with a unit that differs, on the evidence of its whole segment, where that
        differs too."""
        retained = self._retained()
        whole, all_scores = score_unit(
            widen(unit, kv=self._recipe.kv, retained=retained), self._score
        )
        all_gaps = examine(whole, all_scores, tolerance)
        if all_gaps.any:
            unit, scores, gaps = whole, all_scores, all_gaps
        return diagnose(
            unit,
            scores,
            gaps,
            tolerance,
            self._score,
            retained=retained,
            foreign_weights=bool(self._bad_canaries & set(unit.versions.tolist())),
        )

    def _calibrate(self, trajectories: Sequence[Trajectory]) -> list[Finding]:
        """The usual noise of a low-precision sampler, from the first batch."""
        recorded, scored = [], []
        for number in range(_CALIBRATION):
            unit = pick(trajectories, 2 * number + 1, kv=self._recipe.kv, retained=self._retained())
            if unit is not None:
                unit, scores = score_unit(unit, self._score)
                recorded.append(unit.recorded()[0])
                scored.append(scores)
        if not recorded or not sum(map(len, recorded)):
            return []
        columns = Scores(*(np.concatenate(column) for column in zip(*scored, strict=True)))
        noise = logit_noise(np.concatenate(recorded), columns)
        self._tolerance = Tolerance(min(noise, MAX_NOISE))
        if noise <= MAX_NOISE:
            return []
        return [
            Finding(
                "rescore",
                "noisy_sampler",
                f"the sampler's logits differ from those of its weights by {noise:.2g} nats, more "
                f"than {self._recipe.engine.dtype} explains",
            )
        ]

    def _check_canaries(self, canaries: Sequence[Segment]) -> list[Finding]:
        units = [
            Unit(f"canary {i}", s, np.flatnonzero(s.sampled), self._recipe.sampling.temperature)
            for i, s in enumerate(canaries)
        ]
        wrong = self._wrong(units, 0)
        if not any(wrong):
            return []
        version = int(units[0].versions[0])
        self._bad_canaries.add(version)
        kind, words = "foreign_weights", "its weights or arithmetic are not those of the version"
        if not all(wrong) and not wrong[0]:
            kind = "wrong_positions"
            words = "it agrees where there is one position only, so positions are encoded wrongly"
        for lag in (sign * size for size in range(1, len(self._retained())) for sign in (-1, 1)):
            if version + lag in self._retained() and not any(self._wrong(units, lag)):
                kind, words = "wrong_version", f"it computes with version {version + lag}"
                break
        return [
            Finding(
                "canary",
                kind,
                f"after the switch to version {version} the engine answers {sum(wrong)} of "
                f"{len(wrong)} fixed prompts otherwise than the version does: {words}",
            )
        ]

    def _wrong(self, units: Sequence[Unit], lag: int) -> list[bool]:
        """Which canaries differ from the version so much newer than the one that they name. Of a
        version that is retained no more: none for their own, all for another one. Of a noisy
        sampler one token alone says little, so the limit is the widest."""
        state = self._state(int(units[0].versions[0]) + lag)
        if state is None:
            return [lag != 0] * len(units)
        rows = [unit.segment.token_ids.astype(np.int64) for unit in units]
        places = [unit.places for unit in units]
        scores = self._rescorer.score(state, rows, places, units[0].temperature)
        exact = self._recipe.engine.dtype == "float32"
        tolerance = Tolerance() if exact else Tolerance(MAX_NOISE)
        return [
            examine(unit, Scores(*(column[i : i + 1] for column in scores)), tolerance).any
            for i, unit in enumerate(units)
        ]

    def _retained(self) -> range:
        """The versions that may be in the store."""
        latest = self._store.latest()
        newest = -1 if latest is None else latest
        return range(max(0, newest - self._recipe.max_staleness - 1), newest + 1)

    def _score(
        self, version: int, ids: IntArray, places: IntArray, temperature: float
    ) -> Scores | None:
        """Places of a sequence under a version; None where it is retained no more."""
        state = self._state(version)
        if state is None:
            return None
        return self._rescorer.score(state, [ids], [places], temperature)

    def _state(self, version: int) -> dict[str, Tensor] | None:
        retained = self._retained()
        self._states = {v: state for v, state in self._states.items() if v in retained}
        if version in self._states or version not in retained:
            return self._states.get(version)
        try:
            published = self._store.fetch(version)
        except WeightsError:  # forgotten since, or from before a resume
            return None
        state = quantized_state(published, self._rounded, self._recipe.engine.quantization)
        if len(retained) * sum(t.nbytes for t in state.values()) <= _CACHE_BYTES:
            self._states[version] = state
        return state
