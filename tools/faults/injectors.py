"""The faults: each one changes what passes through one seam, from `arm` on, and marks whom it hit.

request   what the engine is asked        answer   what it gives back
load      what weights it takes           batch    what the trainer is given
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from estr.buffer import TrainingGroup
from estr.engine import KVPolicy, Request
from estr.types import RolloutId, Segment, Trajectory

Minibatches = list[list[TrainingGroup]]
State = dict[str, torch.Tensor]


class Fault:
    """A clean run; the faults below override one method each. hit: rollouts that it touched.
    expected: (check, kind) pairs, any of which names it rightly."""

    name = "clean"
    expected: tuple[tuple[str, str], ...] = ()

    def __init__(self) -> None:
        self.armed = False
        self.hit: set[RolloutId] = set()
        self.batches_hit = 0
        self.history: list[State] = []

    def request(self, request: Request) -> Request:
        return request

    def answer(self, request: Request, segment: Segment) -> Segment:
        return segment

    def state(self, state: State) -> State:
        return state

    def kv(self, kv: KVPolicy) -> KVPolicy:
        return kv

    def loaded(self, model: Any, running: set[RolloutId]) -> None:
        """After a load."""

    def batch(self, minibatches: Minibatches) -> Minibatches:
        return minibatches


class StaleLayer(Fault):
    name = "stale layer"
    expected = (("canary", "foreign_weights"), ("rescore", "foreign_weights"))

    def state(self, state: State) -> State:
        old = self.history[0]
        return {n: old[n] if ".layers.1." in n else t for n, t in state.items()}

    def answer(self, request: Request, segment: Segment) -> Segment:
        self.hit.add(request.id)
        return segment


class WrongRotary(Fault):
    name = "wrong rotary state"
    expected = (("canary", "wrong_positions"), ("rescore", "foreign_weights"))
    done = False

    def loaded(self, model: Any, running: set[RolloutId]) -> None:
        if self.done:
            return
        self.done = True
        for module in model.modules():
            if hasattr(module, "inv_freq"):
                module.inv_freq.mul_(0.9)

    def answer(self, request: Request, segment: Segment) -> Segment:
        if self.done:
            self.hit.add(request.id)
        return segment


class ShiftedLogprobs(Fault):
    name = "shifted log-probs"
    expected = (("rescore", "shifted_logprobs"),)

    def answer(self, request: Request, segment: Segment) -> Segment:
        self.hit.add(request.id)
        return dataclasses.replace(segment, behavior_logprobs=np.roll(segment.behavior_logprobs, 1))


class DoubledTemperature(Fault):
    name = "doubled temperature"
    expected = (("rescore", "wrong_temperature"),)

    def request(self, request: Request) -> Request:
        self.hit.add(request.id)
        doubled = dataclasses.replace(
            request.sampling, temperature=2.0 * request.sampling.temperature
        )
        return dataclasses.replace(request, sampling=doubled)


class SwappedGroups(Fault):
    name = "swapped groups"
    expected = (("labels", "swapped_groups"),)

    def batch(self, minibatches: Minibatches) -> Minibatches:
        first, second, *others = minibatches[0]
        self.batches_hit += 1
        swapped = [
            dataclasses.replace(first, trajectories=second.trajectories),
            dataclasses.replace(second, trajectories=first.trajectories),
        ]
        return [[*swapped, *others], *minibatches[1:]]


class WrongVersion(Fault):
    name = "wrong version"
    expected = (("canary", "wrong_version"), ("rescore", "wrong_version"))

    def state(self, state: State) -> State:
        return self.history[-2]

    def answer(self, request: Request, segment: Segment) -> Segment:
        self.hit.add(request.id)
        return segment


class KeptCache(Fault):
    name = "cache kept across a switch"
    expected = (("rescore", "kept_cache"),)

    def kv(self, kv: KVPolicy) -> KVPolicy:
        return "keep"

    def loaded(self, model: Any, running: set[RolloutId]) -> None:
        self.hit |= running


class DroppedSeparator(Fault):
    name = "dropped separator"
    expected = (("rescore", "dropped_context"),)

    def request(self, request: Request) -> Request:
        self.hit.add(request.id)
        return dataclasses.replace(request, token_ids=request.token_ids[:-1])


class SurprisalAsEntropy(Fault):
    name = "entropy replaced by surprisal"
    expected = (("rescore", "surprisal_as_entropy"),)

    def answer(self, request: Request, segment: Segment) -> Segment:
        self.hit.add(request.id)
        return dataclasses.replace(segment, behavior_entropies=-segment.behavior_logprobs)


class ShuffledAdvantages(Fault):
    name = "shuffled advantages"
    expected = (("advantages", "shuffled_advantages"),)

    def batch(self, minibatches: Minibatches) -> Minibatches:
        rolled = [
            dataclasses.replace(g, advantages=(*g.advantages[1:], g.advantages[0]))
            for g in minibatches[0]
        ]
        changed = any(
            a.advantages != b.advantages for a, b in zip(rolled, minibatches[0], strict=True)
        )
        self.batches_hit += changed
        return [rolled, *minibatches[1:]]


class ShiftedEntropies(Fault):
    name = "shifted entropies"
    expected = (("rescore", "shifted_entropies"),)

    def answer(self, request: Request, segment: Segment) -> Segment:
        self.hit.add(request.id)
        return dataclasses.replace(
            segment, behavior_entropies=np.roll(segment.behavior_entropies, 1)
        )


class ShiftedVersions(Fault):
    name = "shifted versions"
    expected = (("rescore", "shifted_versions"),)

    def answer(self, request: Request, segment: Segment) -> Segment:
        versions = np.concatenate([segment.versions[:1], segment.versions[:-1]])
        if (versions != segment.versions).any():
            self.hit.add(request.id)
        return dataclasses.replace(segment, versions=versions)


class ShiftedMask(Fault):
    name = "shifted mask"
    expected = (("alignment", "shifted_mask"),)

    def batch(self, minibatches: Minibatches) -> Minibatches:
        self.batches_hit += 1
        return [[self._shift(group) for group in minibatches[0]], *minibatches[1:]]

    def _shift(self, group: TrainingGroup) -> TrainingGroup:
        return dataclasses.replace(
            group, trajectories=tuple(self._shifted(t) for t in group.trajectories)
        )

    def _shifted(self, trajectory: Trajectory) -> Trajectory:
        moved = [
            dataclasses.replace(
                s,
                sampled=np.roll(s.sampled, 1),
                versions=np.roll(s.versions, 1),
                behavior_logprobs=np.roll(s.behavior_logprobs, 1),
                behavior_entropies=np.roll(s.behavior_entropies, 1),
            )
            # The last token wraps around: no row may begin with a sampled one.
            if not s.sampled[-1]
            else dataclasses.replace(s, **_dropped_last(s))
            for s in trajectory.segments
        ]
        return dataclasses.replace(trajectory, segments=tuple(moved))


def _dropped_last(segment: Segment) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, nothing in (
        ("sampled", False),
        ("versions", -1),
        ("behavior_logprobs", np.nan),
        ("behavior_entropies", np.nan),
    ):
        column = np.roll(getattr(segment, name), 1)
        column[0] = nothing
        columns[name] = column
    return columns


class CrossedAnswers(Fault):
    """A request gets the newest answer to another group's that is not too old for it."""

    name = "crossed answers"
    expected = (("rescore", "foreign_weights"),)

    def __init__(self, max_staleness: int = 4) -> None:
        super().__init__()
        self._max_staleness = max_staleness
        self._last: dict[int, Segment] = {}

    def answer(self, request: Request, segment: Segment) -> Segment:
        oldest = request.deadline_version - self._max_staleness
        others = [
            answer
            for group, answer in self._last.items()
            if group != request.id.group and answer.versions.min() >= oldest
        ]
        self._last.pop(request.id.group, None)
        self._last[request.id.group] = segment
        if not others:
            return segment
        self.hit.add(request.id)
        return others[-1]


class TrainedTwice(Fault):
    name = "a group trained twice"
    expected = (("twice", "trained_twice"),)

    def __init__(self) -> None:
        super().__init__()
        self._before: TrainingGroup | None = None

    def batch(self, minibatches: Minibatches) -> Minibatches:
        before, self._before = self._before, minibatches[0][0]
        if before is None:
            return minibatches
        self.batches_hit += 1
        return [[*minibatches[0][:-1], before], *minibatches[1:]]


class ColdDraws(Fault):
    """The sampler's random numbers are all one half; what it records is right."""

    name = "draws colder than recorded"
    expected = (("temperature", "drawn_colder"),)

    def request(self, request: Request) -> Request:
        self.hit.add(request.id)
        return request

    def uniforms(self, drawn: np.ndarray) -> np.ndarray:
        return np.full_like(drawn, 0.5) if self.armed else drawn


TEN: tuple[type[Fault], ...] = (
    StaleLayer,
    WrongRotary,
    ShiftedLogprobs,
    DoubledTemperature,
    SwappedGroups,
    WrongVersion,
    KeptCache,
    DroppedSeparator,
    SurprisalAsEntropy,
    ShuffledAdvantages,
)
MORE: tuple[type[Fault], ...] = (
    ShiftedEntropies,
    ShiftedVersions,
    ShiftedMask,
    CrossedAnswers,
    TrainedTwice,
    ColdDraws,
)
