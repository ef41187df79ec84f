"""The local engine: continuous batching over a transformers causal LM, one token a step.

    submit ->  waiting --(oldest deadline first)--> running, one cache row each
                                                     |
    step():    switch weights if due; admit; fill the cache rows that need it (new requests, and
               all after a switch with kv = recompute); draw one token for every running request
                                                     |
    finished <--(stop token | budget | context full)-+

Requests join and leave between steps. A cache row holds every token of its request but the last,
which the decoding pass of the step reads; so logits are computed in one place only, and a new
request, a running one and one whose cache was rebuilt go the same way.

The class is synchronous and knows no clock; `estr.engines.in_process` and `estr.engines.process`
put the Engine protocol around it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..engine import KVPolicy, Request, canary_contexts
from ..errors import EngineError
from ..types import RolloutId, Segment
from ..weights import State
from .kv_cache import PrefixStore
from .rows import Row, in_order, new_row
from .runner import ModelRunner
from .sampler import Draws, draw, uniforms

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class _Load:
    version: int
    state: State
    kv: KVPolicy


class LocalEngine:
    """Draws tokens from `model`, which it takes over, in the model's own dtype and device.

    version: the version of the weights that the model holds. max_batch: requests that run at once.
    gini: record sum p(1-p) beside the entropy. in_flight: switch weights under running requests;
    False: with a load pending, admit nothing and finish what runs, then switch. prefix_bytes: room
    for the keys and values of recent prompts (0: only requests admitted together share a prompt).
    vocab_size: number of real token ids where the output layer is padded.

    The cache takes (requests running at once) x (tokens of the longest), each rounded up to a power
    of two and kept until `close`: bound both through max_batch and the requests' own lengths.

    Log-prob, entropy and gini are float32 and of the very distribution sampled from. Temperature 0
    (evaluation) draws the argmax and records the temperature-1 distribution's.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        version: int = 0,
        max_batch: int = 128,
        gini: bool = True,
        in_flight: bool = True,
        prefix_bytes: int = 1 << 27,
        vocab_size: int | None = None,
    ) -> None:
        self._runner = ModelRunner(model, vocab_size=vocab_size)
        self._version = version
        self._max_batch = max_batch
        self._gini = gini
        self._in_flight = in_flight
        self._prefixes = PrefixStore(prefix_bytes)
        self._served: set[RolloutId] = set()
        self._waiting: dict[RolloutId, Row] = {}
        self._rows: list[Row] = []
        self._pending: _Load | None = None
        self._arrivals = itertools.count()
        self._closed = False
        self._counts = dict.fromkeys(
            ("steps", "tokens", "prefill_tokens", "recomputed_tokens", "prefix_hits"), 0
        )

    @property
    def version(self) -> int:
        """The version that the next token will be drawn under, unless a load comes in between."""
        return self._version

    @property
    def num_running(self) -> int:
        """Requests admitted and not yet finished."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Requests not yet admitted."""
        return len(self._waiting)

    def statistics(self) -> dict[str, float]:
        """Counters since the start: steps, tokens drawn, prefill_tokens computed for new requests,
        recomputed_tokens after switches, prefix_hits (prompts taken from another request)."""
        return {name: float(count) for name, count in self._counts.items()}

    def submit(self, request: Request) -> None:
        """Queue a request; it is admitted by deadline version, then by arrival.

        Raises EngineError, naming the request, for one that cannot be served.
        """
        if self._closed:
            raise EngineError(f"{request.id}: the engine is closed")
        if request.id in self._served:
            raise EngineError(f"{request.id} is already being served")
        row = new_row(
            request,
            next(self._arrivals),
            vocab_size=self._runner.vocab_size,
            max_positions=self._runner.max_positions,
        )
        self._served.add(request.id)
        self._waiting[request.id] = row

    def cancel(self, rollout_id: RolloutId) -> None:
        """Drop a request, waiting or running, with what it has drawn; unknown ids are ignored."""
        if self._waiting.pop(rollout_id, None) is not None:
            self._served.discard(rollout_id)
        elif rollout_id in self._served:
            self._remove([row.request.id for row in self._rows].index(rollout_id))

    def begin_load(self, version: int, state: State, kv: KVPolicy) -> None:
        """Switch to these weights between two tokens: at once, or (in_flight False) as soon as
        nothing runs; `version` tells when. A newer load replaces one that is still pending.

        kv "recompute": running requests are prefilled again under the new weights; "keep": they go
        on with keys and values of several versions. Raises WeightsError if the weights do not fit;
        the old ones then stay in force.
        """
        if kv not in ("recompute", "keep"):
            raise EngineError(f"kv must be 'recompute' or 'keep', not {kv!r}")
        self._runner.check(state)
        self._pending = _Load(version, state, kv)
        self._switch_if_due()

    def step(self) -> list[tuple[RolloutId, Segment]]:
        """Draw one token for every running request; returns the requests that it finished.

        Raises EngineError where logits are no distribution (NaN, infinite); nothing is drawn then,
        all requests are dropped, and the engine can be used again, say after a load.
        """
        self._switch_if_due()
        self._admit()
        if not self._rows:
            return []
        self._fill()
        logits = self._runner.decode(
            [row.last_token for row in self._rows], [row.num_filled for row in self._rows]
        )
        draws = draw(
            logits,
            [row.request.sampling.temperature for row in self._rows],
            uniforms(
                [row.stream for row in self._rows],
                [row.request.first_position + len(row.token_ids) for row in self._rows],
            ),
            vocab_size=self._runner.vocab_size,
            gini=self._gini,
        )
        if not draws.sound.all():
            self._fail(int(np.flatnonzero(~draws.sound)[0]))
        self._record(draws)
        return self._retire()

    def drop_caches(self) -> None:
        """Forget every key and value, shared prompts too: running requests are prefilled again
        before the next token, just as after a resume."""
        self._prefixes.clear()
        self._runner.cache.clear()
        for row in self._rows:
            row.filled = False

    def snapshot(self) -> dict[RolloutId, Segment]:
        """What every running or waiting request has drawn so far, the running ones first, in the
        order of their rows."""
        return {row.request.id: row.segment() for row in (*self._rows, *self._waiting.values())}

    def probe(self, temperature: float) -> list[Segment]:
        """The canaries (`estr.engine.canary_contexts`), each with the token drawn behind it in the
        middle of its distribution function. No request, cache or random number is touched."""
        contexts = canary_contexts(self._runner.vocab_size)
        logits = self._runner.plain_logits(contexts[-1])[[len(c) - 1 for c in contexts]]
        draws = draw(
            logits,
            [temperature] * len(contexts),
            np.full(len(contexts), 0.5),
            vocab_size=self._runner.vocab_size,
            gini=False,
        )
        columns = (draws.token_ids, draws.logprobs, draws.entropies)
        return [
            Segment.join(
                [
                    Segment.context(context),
                    Segment.drawn([token], [logprob], [entropy], [self._version]),
                ]
            )
            for context, token, logprob, entropy in zip(contexts, *columns, strict=True)
        ]

    def close(self) -> None:
        """Drop all requests and free the cache. May be called twice."""
        self._drop_all()
        self._closed = True

    def _switch_if_due(self) -> None:
        load = self._pending
        if load is None or (self._rows and not self._in_flight):
            return
        self._pending = None
        self._runner.load(load.state)
        self._version = load.version
        self._prefixes.clear()
        if load.kv == "recompute":
            for row in self._rows:
                row.filled = False

    def _admit(self) -> None:
        free = self._max_batch - len(self._rows)
        if self._pending is not None or not self._waiting or not free:
            return
        self._admit_these([row.request.id for row in in_order(self._waiting.values())[:free]])

    def _admit_these(self, ids: Sequence[RolloutId]) -> None:
        self._rows += [self._waiting.pop(rollout_id) for rollout_id in ids]

    def _fill(self) -> None:
        """Bring the cache rows of new and of stale requests up to date."""
        self._runner.cache.reserve(len(self._rows), max(row.num_filled for row in self._rows) + 1)
        same: dict[bytes, list[int]] = {}
        for i, row in enumerate(self._rows):
            if not row.filled and row.num_filled:
                same.setdefault(row.context().tobytes(), []).append(i)
            row.filled = True
        if same:
            self._fill_first_of_each(same)
            self._copy_to_the_others(list(same.values()))

    def _fill_first_of_each(self, same: dict[bytes, list[int]]) -> None:
        missing: dict[bytes, int] = {}
        for tokens, (first, *_) in same.items():
            held = self._prefixes.get(self._version, tokens)
            if held is None:
                missing[tokens] = first
            else:
                self._runner.cache.write(first, held)
                self._counts["prefix_hits"] += 1
        contexts = [np.frombuffer(tokens, dtype=np.int32) for tokens in missing]
        if contexts:
            self._runner.prefill(list(missing.values()), contexts)
        for tokens, first in missing.items():
            row = self._rows[first]
            self._counts["recomputed_tokens" if row.token_ids else "prefill_tokens"] += (
                row.num_filled
            )
            if not row.token_ids and self._prefixes.max_bytes:
                held = self._runner.cache.read(first, row.num_filled)
                self._prefixes.put(self._version, tokens, held)

    def _copy_to_the_others(self, same: list[list[int]]) -> None:
        pairs = [(first, other) for first, *others in same for other in others]
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            length = max(self._rows[first].num_filled for first in sources)
            self._runner.cache.copy(sources, targets, length)
            self._counts["prefix_hits"] += len(pairs)

    def _fail(self, index: int) -> None:
        row = self._rows[index]
        position = row.request.first_position + len(row.token_ids)
        count = len(self._rows) + len(self._waiting)
        self._drop_all()
        raise EngineError(
            f"{row.request.id}: the logits under version {self._version} are no distribution "
            f"(NaN or infinite) at position {position}; all {count} requests were dropped"
        )

    def _record(self, draws: Draws) -> None:
        self._counts["steps"] += 1
        self._counts["tokens"] += len(self._rows)
        columns = (draws.token_ids.tolist(), draws.logprobs.tolist(), draws.entropies.tolist())
        for row, token, logprob, entropy in zip(self._rows, *columns, strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.entropies.append(entropy)
            row.versions.append(self._version)
        if draws.gini is not None:
            for row, gini in zip(self._rows, draws.gini.tolist(), strict=True):
                row.gini.append(gini)

    def _retire(self) -> list[tuple[RolloutId, Segment]]:
        finished = [i for i, row in enumerate(self._rows) if row.finish_reason() is not None]
        results = [(self._rows[i].request.id, self._rows[i].segment()) for i in finished]
        for i in reversed(finished):
            self._remove(i)
        return results

    def _remove(self, index: int) -> None:
        """Take a row out and move the last one into its place."""
        self._served.discard(self._rows[index].request.id)
        last = self._rows.pop()
        if index < len(self._rows):
            self._rows[index] = last
            if last.filled:
                # All but its last token: that one is read, and kept, by the next step.
                self._runner.cache.copy([len(self._rows)], [index], last.num_filled)

    def _drop_all(self) -> None:
        self._served.clear()
        self._waiting.clear()
        self._rows.clear()
        self.drop_caches()
