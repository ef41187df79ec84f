"""A request inside an engine: what was asked, what has been drawn, and whether it can be served."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..engine import Request
from ..errors import ContextFull, EngineError
from ..types import FinishReason, Int32Array, Segment
from .sampler import StreamName, stream_name


@dataclass(slots=True, eq=False)
class Row:
    """A request, waiting or running, and what it has drawn."""

    request: Request
    stream: StreamName
    budget: int
    arrival: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    gini: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    filled: bool = False
    """Does the engine hold keys and values of every token but the last?"""

    @property
    def num_filled(self) -> int:
        return len(self.request.token_ids) + len(self.token_ids) - 1

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else int(self.request.token_ids[-1])

    def history(self) -> Int32Array:
        """Every token, read and drawn."""
        drawn = np.asarray(self.token_ids, dtype=np.int32)
        return np.concatenate([self.request.token_ids, drawn]).astype(np.int32, copy=False)

    def context(self) -> Int32Array:
        """Every token but the last."""
        return self.history()[:-1]

    def finish_reason(self) -> FinishReason | None:
        if self.token_ids and self.token_ids[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.budget else None

    def go_on_from(self, drawn: Segment) -> None:
        """Take over what was drawn of this turn before a checkpoint."""
        self.token_ids = drawn.token_ids.tolist()
        self.logprobs = drawn.behavior_logprobs.tolist()
        self.entropies = drawn.behavior_entropies.tolist()
        self.gini = [] if drawn.behavior_gini is None else drawn.behavior_gini.tolist()
        self.versions = drawn.versions.tolist()

    def segment(self) -> Segment:
        return Segment.drawn(
            self.token_ids,
            self.logprobs,
            self.entropies,
            self.versions,
            gini=self.gini if len(self.gini) == len(self.token_ids) else None,
            finish_reason=self.finish_reason(),
        )


def new_row(request: Request, arrival: int, *, vocab_size: int, max_positions: int | None) -> Row:
    """The row of a request. max_positions: the longest context of the model, in tokens (None: no
    limit). Raises EngineError, naming the request, for one that cannot be served: ContextFull where
    that has no room."""
    reason = _unservable(request, vocab_size)
    if reason is not None:
        raise EngineError(f"{request.id}: {reason}")
    if max_positions is not None and len(request.token_ids) >= max_positions:
        raise ContextFull(
            f"{request.id}: {len(request.token_ids)} tokens leave no room in the model's context "
            f"of {max_positions}; lower sampling.max_tokens"
        )
    try:
        stream = stream_name(request.id)
    except ValueError as error:
        raise EngineError(str(error)) from error
    room = max_positions or math.inf
    budget = int(min(request.max_new_tokens, room - len(request.token_ids)))
    row = Row(request, stream, budget, arrival)
    if request.drawn is not None:
        row.go_on_from(request.drawn)
        if row.finish_reason() is not None:
            raise EngineError(f"{request.id}: its turn is complete, nothing is left to draw")
    return row


def _unservable(request: Request, vocab_size: int) -> str | None:
    tokens, sampling = request.token_ids, request.sampling
    if not len(tokens):
        return "the prompt is empty; a model needs at least one token to go on from"
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        return f"token id {wrong} is outside the vocabulary [0, {vocab_size})"
    if request.max_new_tokens < 1:
        return f"max_new_tokens must be at least 1, not {request.max_new_tokens}"
    if not 0 <= sampling.temperature < math.inf:
        return f"temperature must be finite and at least 0, not {sampling.temperature}"
    if not 0 <= request.first_position < 2**31:
        return f"first_position must be in [0, 2^31), not {request.first_position}"
    return None


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Oldest deadline version first, then the first to arrive."""
    return sorted(rows, key=lambda row: (row.request.deadline_version, row.arrival))
