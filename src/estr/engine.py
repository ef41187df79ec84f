"""The Engine seam: who draws the tokens.

    rollout -- Request -------> engine
    rollout <-- Segment ------- engine   drawn tokens, each with log-prob, entropy, version
    loop    -- load(version) -> engine   returns when every later token is drawn under it

An engine serves requests in the order of their deadline version, oldest first, and switches
weights between two tokens under running requests. `ScriptedEngine` is the shipped fake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from .errors import EngineTimeout
from .types import FinishReason, Int32Array, RolloutId, SamplingSettings, Segment
from .weights import WeightStore

KVPolicy = Literal["recompute", "keep"]
"""What becomes of running requests' key-value caches at a switch: `recompute` prefills them again
under the new weights (every token is then re-scorable by its own version), `keep` goes on with a
hybrid that no single version reproduces."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One turn to be written.

    token_ids: the whole history, int32 [n], n >= 1. first_position: how many tokens of the
    trajectory precede the first one to be drawn (all segments counted); the counter of the random
    numbers. deadline_version: the newest trainer version that may still consume this rollout.
    max_new_tokens: the budget of this turn, at least 1. drawn: tokens of this very turn that an
    engine drew before a checkpoint, from its snapshot; the answer begins with them, they count
    against the budget, and the next one is drawn as if nothing had happened in between.
    """

    id: RolloutId
    token_ids: Int32Array
    sampling: SamplingSettings
    max_new_tokens: int
    first_position: int
    deadline_version: int = 0
    drawn: Segment | None = None


class Engine(Protocol):
    """Draws tokens from a versioned policy. All methods are called from one event loop."""

    @property
    def version(self) -> int:
        """The version that the engine has acknowledged as loaded."""
        ...

    async def generate(self, request: Request, timeout_s: float) -> Segment:
        """Draw one turn. Every token of the result is sampled; `finish_reason` is set.

        Cancelling the calling task cancels the request inside the engine.
        Raises EngineTimeout after timeout_s, EngineError when the engine fails.
        """
        ...

    async def load(self, version: int, weights: WeightStore, kv: KVPolicy) -> None:
        """Fetch `version` from the store, verify it, switch; returns when every later token is
        drawn under it. Raises WeightsError or EngineError; the old weights then stay in force."""
        ...

    async def snapshot(self) -> dict[RolloutId, Segment]:
        """What every running or waiting request has drawn so far, at one engine step."""
        ...

    async def close(self) -> None:
        """Cancel all requests and free everything. May be called twice."""
        ...


CANARY_LENGTHS = (1, 24)


def canary_contexts(vocab_size: int) -> list[Int32Array]:
    """The fixed prompts that show whether an engine computes with the weights that it claims: one
    of a single token, where positions play no part, and one that goes on from it. An engine that
    offers `probe(temperature) -> list[Segment]` draws one token behind each, outside of all
    requests; `estr.guard` compares."""
    longest = ((np.arange(CANARY_LENGTHS[-1]) * 7919 + 5) % vocab_size).astype(np.int32)
    return [longest[:length] for length in CANARY_LENGTHS]


Script = Callable[[Request], Sequence[int]]


class ScriptedEngine:
    """The shipped fake: writes what `script(request)` says, one token each `token_s` seconds.

    Every token is recorded with log-prob `logprob`, entropy `entropy` and the version in force
    when it is drawn; loads take effect between two tokens, as in a real engine. A script that
    raises makes `generate` raise the same error; `hang` keeps every request waiting for ever.
    """

    def __init__(
        self,
        script: Script,
        *,
        version: int = 0,
        token_s: float = 0.0,
        logprob: float = -0.7,
        entropy: float = 0.6,
    ) -> None:
        self._script = script
        self._version = version
        self._token_s = token_s
        self._logprob = logprob
        self._entropy = entropy
        self._running: dict[RolloutId, tuple[list[int], list[int]]] = {}
        self.hang = False
        self.loads: list[int] = []
        self.num_requests = 0

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request, timeout_s: float) -> Segment:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._write(request)
        except TimeoutError as error:
            raise EngineTimeout(
                f"{request.id}: no answer within {timeout_s:g} s; raise rollout.timeout_s"
            ) from error

    async def _write(self, request: Request) -> Segment:
        self.num_requests += 1
        tokens: list[int] = [] if request.drawn is None else request.drawn.token_ids.tolist()
        versions: list[int] = [] if request.drawn is None else request.drawn.versions.tolist()
        self._running[request.id] = (tokens, versions)
        finish: FinishReason = "length"
        try:
            while self.hang:
                await asyncio.sleep(0.01)
            for token in list(self._script(request))[len(tokens) : request.max_new_tokens]:
                await asyncio.sleep(self._token_s)
                tokens.append(token)
                versions.append(self._version)
                if token in request.sampling.stop_token_ids:
                    finish = "stop"
                    break
        finally:
            self._running.pop(request.id, None)
        return self._segment(tokens, versions, finish)

    def _segment(
        self, tokens: list[int], versions: list[int], finish: FinishReason | None
    ) -> Segment:
        n = len(tokens)
        return Segment.drawn(
            tokens,
            np.full(n, self._logprob, dtype=np.float32),
            np.full(n, self._entropy, dtype=np.float32),
            versions,
            finish_reason=finish,
        )

    async def load(self, version: int, weights: WeightStore, kv: KVPolicy) -> None:
        weights.fetch(version)
        self._version = version
        self.loads.append(version)

    async def snapshot(self) -> dict[RolloutId, Segment]:
        return {rid: self._segment(*drawn, None) for rid, drawn in self._running.items()}

    async def close(self) -> None:
        self.hang = False
