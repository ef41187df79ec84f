"""Tokens scored again, under the weights of their own version.

    Rescorer            the model's structure without its weights; score(state, ids, places)
    Tolerance           how far a recorded value may lie from its re-scored one
    pick(...)           the tokens of this step: Unit (of one segment, one version or two)

The structure shares no tensor with the trainer's model, takes no memory beyond its buffers, and is
given a whole published state for each pass, so that nothing that happens to the trainer's model
can make both sides wrong in the same way.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..engine import KVPolicy
from ..heads import Head, split_head
from ..logprobs import TokenStatistics, next_token, statistics_from_hidden, token_statistics
from ..types import Segment, Trajectory, Turn

FLOAT32_TOLERANCE = 1e-4
"""Nats. Two float32 computations of one log-prob or entropy differ by rounding, some 1e-6."""

NOISE_LIMIT = 12.0
"""A low-precision sampler's log-prob may lie so many times its usual noise from the exact one."""

MAX_NOISE = 0.1
"""Standard deviation of the logits, nats, that rounding to 8 bits of mantissa can explain; a
sampler that starts with more computes something else."""

MAX_TOKENS = 512
"""Length of what is scored again, at most: the head of a segment."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Scores(NamedTuple):
    """Of n tokens, float64 [n] each: log-prob, entropy (nats), gini."""

    logprobs: FloatArray
    entropies: FloatArray
    gini: FloatArray


class Rescorer:
    """Scores tokens under any state of a transformers causal LM, in float32.

    model is read once, for its structure, and not kept. vocab_size: number of real token ids.
    """

    def __init__(self, model: Any, *, vocab_size: int | None = None) -> None:
        plain = split_head(model).weight is not None
        self.structure = _structure(model)
        self._head = Head(self.structure, self.structure.get_output_embeddings() if plain else None)
        self._vocab_size = vocab_size
        self._device = next(model.parameters()).device
        self._slots = _slots(self.structure)

    @torch.no_grad()
    def score(
        self,
        state: Mapping[str, Tensor],
        rows: Sequence[IntArray],
        places: Sequence[IntArray],
        temperature: float,
    ) -> Scores:
        """The tokens at places[i] (each at least 1, rising) of the sequence rows[i], row by row,
        under `state`, a published version: every parameter and persistent buffer, of any float
        type."""
        ids = np.zeros((len(rows), max(int(p[-1]) for p in places) + 1), dtype=np.int64)
        mask = np.zeros(ids.shape, dtype=np.bool_)
        for i, (row, wanted) in enumerate(zip(rows, places, strict=True)):
            stop = int(wanted[-1]) + 1  # nothing behind the last one is read
            ids[i, :stop] = row[:stop]
            mask[i, wanted] = True
        tokens = torch.from_numpy(ids).to(self._device)
        with self._holding(state):
            scored = self._statistics(tokens, torch.from_numpy(mask).to(self._device), temperature)
        return Scores(*(c.double().cpu().numpy() for c in scored if c is not None))

    @contextlib.contextmanager
    def _holding(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """The structure with these tensors in its places, tied ones in all of theirs."""
        before = [
            (slots, name, slots[name]) for places in self._slots.values() for slots, name in places
        ]
        try:
            for key, tensor in state.items():
                if tensor.is_floating_point():
                    tensor = tensor.to(self._device, torch.float32)
                for tensors, name in self._slots[key]:
                    tensors[name] = tensor.to(self._device)
            yield
        finally:
            for tensors, name, tensor in before:
                tensors[name] = tensor

    def _statistics(self, tokens: Tensor, mask: Tensor, temperature: float) -> TokenStatistics:
        settings: dict[str, Any] = {"temperature": temperature, "vocab_size": self._vocab_size}
        weight = self._head.weight
        if weight is None:
            states, drawn = next_token(self._head.logits(tokens), tokens, mask)
            return token_statistics(states, drawn, **settings)
        states, drawn = next_token(self._head.hidden(tokens), tokens, mask)
        return statistics_from_hidden(states, weight, drawn, head_bias=self._head.bias, **settings)


Slot = tuple[dict[str, Any], str]


def _slots(model: nn.Module) -> dict[str, list[Slot]]:
    """Where each tensor of a published state stands: a dictionary of a module, and the name in it;
    a tied one stands in several."""
    of: dict[int, list[Slot]] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    of.setdefault(id(tensor), []).append((tensors, name))
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: of[id(tensor)] for name, tensor in named}


def _structure(model: Any) -> Any:
    """A copy of the model's modules and buffers, its parameters without storage."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        for p in model.parameters()
    }
    structure = copy.deepcopy(model, memo).eval()
    if "flash" in str(getattr(structure.config, "_attn_implementation", None)):
        structure.set_attn_implementation("sdpa")  # it computes in float32, which flash refuses
    return structure


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far recorded values may lie from re-scored ones.

    noise 0: FLOAT32_TOLERANCE for both. noise > 0: the standard deviation of the logits of a
    low-precision sampler, nats. Independent noise of that size moves the log-prob of a token y by
    noise * sqrt(2 (1 - p_y) - gini), with gini = sum p(1-p) (first order), so the limit is
    NOISE_LIMIT times that, and at least FLOAT32_TOLERANCE; the entropy's is
    NOISE_LIMIT * noise * (1 + H) * sqrt(gini).
    """

    noise: float = 0.0

    def of_logprobs(self, scores: Scores) -> FloatArray:
        """Limit for the log-prob of each token, nats."""
        limits: FloatArray = FLOAT32_TOLERANCE + NOISE_LIMIT * self.noise * _spread(scores)
        return limits

    def of_entropies(self, scores: Scores) -> FloatArray:
        """Limit for the entropy of each token, nats."""
        spread = (1.0 + scores.entropies) * np.sqrt(np.maximum(scores.gini, 0.0))
        limits: FloatArray = FLOAT32_TOLERANCE + NOISE_LIMIT * self.noise * spread
        return limits


def _spread(scores: Scores) -> FloatArray:
    rest = -np.expm1(np.minimum(scores.logprobs, 0.0))
    spread: FloatArray = np.sqrt(np.maximum(2.0 * rest - scores.gini, 0.0))
    return spread


def logit_noise(recorded: FloatArray, scores: Scores) -> float:
    """The standard deviation of a sampler's logits, nats, from recorded log-probs [n] and their
    exact scores: 1.4826 * median |difference| / spread, over tokens that were no foregone
    conclusion. Robust: fewer than half of the tokens, however wrong, do not decide it. 0.0 where
    there is no such token."""
    spread = _spread(scores)
    telling = spread > 0.1
    if not telling.any():
        return 0.0
    return float(1.4826 * np.median(np.abs(recorded - scores.logprobs)[telling] / spread[telling]))


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Sampled tokens of one segment to be scored again. places: indices into the segment; a token
    of a version that is no longer retained, or that no single version reproduces, is left out."""

    name: str
    segment: Segment
    places: IntArray
    temperature: float
    turns: tuple[Turn, ...] = ()

    @property
    def versions(self) -> IntArray:
        """Of each place."""
        return self.segment.versions[self.places].astype(np.int64)

    def recorded(self) -> tuple[FloatArray, FloatArray]:
        """Log-probs and entropies as they came with the tokens."""
        segment = self.segment
        logprobs = segment.behavior_logprobs[self.places].astype(np.float64)
        return logprobs, segment.behavior_entropies[self.places].astype(np.float64)


class Score(Protocol):
    """Scores places of a sequence under a version; None: it is retained no more."""

    def __call__(
        self, version: int, ids: IntArray, places: IntArray, temperature: float
    ) -> Scores | None: ...


def score_unit(unit: Unit, score: Score) -> tuple[Unit, Scores]:
    """Every token under its own version, and the unit without those whose version is gone."""
    columns = np.full((3, len(unit.places)), np.nan)
    known = np.zeros(len(unit.places), dtype=np.bool_)
    ids = unit.segment.token_ids.astype(np.int64)
    for version in np.unique(unit.versions):
        own = unit.versions == version
        scores = score(int(version), ids, unit.places[own], unit.temperature)
        if scores is not None:
            columns[:, own] = scores
            known |= own
    return replace(unit, places=unit.places[known]), Scores(*columns[:, known])


def pick(
    trajectories: Sequence[Trajectory], number: int, *, kv: KVPolicy, retained: Sequence[int]
) -> Unit | None:
    """The tokens to be scored again, for the time number `number`: of three times once those on
    both sides of a switch of weights, if there is one, else those of the next trajectory in turn,
    of one version. None: nothing can be."""
    units = [(t, s) for t in trajectories for s in range(len(t.segments))]
    units = [(t, s) for t, s in units if t.sampling.temperature > 0 and t.turns]
    if not units:
        return None
    start = number * 7919 % len(units)
    order = units[start:] + units[:start]
    if number % 3 == 0:
        switched = next(((t, s) for t, s in order if _num_versions(t.segments[s]) > 1), None)
        order = [switched, *order] if switched is not None else order
    for trajectory, index in order[:4]:
        unit = unit_of(trajectory, index, number, kv=kv, retained=retained)
        if unit is not None:
            return unit
    return None


def _num_versions(segment: Segment) -> int:
    versions = segment.versions[segment.sampled]
    return 1 + int((np.diff(versions) != 0).sum()) if len(versions) else 0


def unit_of(
    trajectory: Trajectory, index: int, number: int, *, kv: KVPolicy, retained: Sequence[int]
) -> Unit | None:
    """The tokens of one segment that can be scored again, of one version or of two that meet (see
    `pick`)."""
    segment = trajectory.segments[index]
    places = _scorable(segment, kv, retained)
    if not len(places):
        return None
    versions = np.unique(segment.versions[places])
    wanted = 2 if number % 3 == 0 else 1
    first = number // 3 % max(1, len(versions) - wanted + 1)
    places = places[np.isin(segment.versions[places], versions[first : first + wanted])]
    turns = tuple(turn for turn in trajectory.turns if turn.segment == index)
    name = f"{trajectory.id}, segment {index}"
    return Unit(name, segment, places, trajectory.sampling.temperature, turns)


def widen(unit: Unit, *, kv: KVPolicy, retained: Sequence[int]) -> Unit:
    """The unit with every token of its segment that can be scored again, of all versions."""
    return replace(unit, places=_scorable(unit.segment, kv, retained))


def _scorable(segment: Segment, kv: KVPolicy, retained: Sequence[int]) -> IntArray:
    places = np.flatnonzero(segment.sampled[:MAX_TOKENS])
    places = places[places > 0]
    if kv == "keep" and len(places):  # what follows a switch is of a hybrid
        places = places[segment.versions[places] == segment.versions[places[0]]]
    return places[np.isin(segment.versions[places], list(retained))]
