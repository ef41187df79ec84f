"""All rollouts of a step at once, in this process: a batched pass a token, tasks answered in turn.

    prompts --> [pending tokens] --extend--> logits --draw--> token, log-prob, entropy, version
                     ^                                          |
                     +-- observation <-- environment <-- stop --+     until all have ended

One pass extends every running rollout by what it has pending: the token it drew last, an
observation, or everything from the beginning where another version takes over and keys and values
are computed anew. What is drawn, with which uniform, and how a rollout is scored is as in
`estr.rollout`; environments must answer at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..chat import Codec
from ..engines.sampler import draw, stream_name, uniforms
from ..environment import Action, Environment, Prompt, Reply, Task
from ..errors import EnvError, NumericsError
from ..types import FinishReason, RolloutId, SamplingSettings, Segment, Status, Trajectory, Turn
from .arithmetic import Arithmetic, activation_dtype
from .decoder import Cache, Decoder, Weights, make_pass
from .staleness import IntArray, Plan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Play:
    """What is played: a task of one split under fixed sampling settings."""

    task: Task
    split: str
    codec: Codec
    sampling: SamplingSettings


@dataclass(frozen=True, slots=True)
class Sampler:
    """Who draws: the decoder, its arithmetic, the weights of a version, and what a switch of
    version does to keys and values."""

    decoder: Decoder
    arithmetic: Arithmetic
    weights: Callable[[int], Weights]
    keep_kv: bool = False


def roll_out(
    play: Play, sampler: Sampler, plan: Plan, ids: Sequence[RolloutId], problems: Sequence[int]
) -> list[Trajectory]:
    """One rollout for each (id, problem), in order. Raises NumericsError where logits are no
    distribution, EnvError for a task that the laboratory cannot play."""
    rows = _Rows(play, ids, problems)
    capacity = rows.capacity
    random = _uniforms(ids, capacity)
    cache = Cache(sampler.decoder, len(ids), capacity, activation_dtype(sampler.arithmetic))
    held = np.arange(len(ids))  # held[i]: whose keys and values are in row i of the cache
    while len(active := rows.active()):
        if 2 * len(active) <= len(held):
            cache.select(torch.from_numpy(np.searchsorted(held, active)))
            held = active
        versions = plan.versions(active, rows.num_drawn[active], rows.num_turns[active])
        if not sampler.keep_kv:
            rows.filled[active[versions != rows.served_by[active]]] = 0
        rows.served_by[active] = versions
        # Rows that have ended since the cache was cut last: nothing is read from them any more.
        places = np.searchsorted(held, active)
        logits = _extend(sampler, cache, rows, active, places, versions)
        draws = draw(
            logits,
            [play.sampling.temperature] * len(active),
            random[active, rows.length[active]],
            vocab_size=None,
        )
        if not draws.sound.all():
            raise NumericsError("the sampler's logits are no distribution (NaN or infinite)")
        rows.record(active, draws.token_ids, draws, versions)
    return rows.trajectories()


def _uniforms(ids: Sequence[RolloutId], capacity: int) -> npt.NDArray[np.float64]:
    """The uniform of every position [len(ids), capacity], as arrays: tuples would take longer than
    the numbers themselves."""
    names: Any = np.repeat([stream_name(rollout_id) for rollout_id in ids], capacity, axis=0)
    positions: Any = np.tile(np.arange(capacity), len(ids))
    return uniforms(names, positions).reshape(len(ids), capacity)


def _extend(
    sampler: Sampler,
    cache: Cache,
    rows: _Rows,
    active: IntArray,
    places: IntArray,
    versions: IntArray,
) -> torch.Tensor:
    """Logits [len(active), vocabulary] of the next token of each active row."""
    counts = rows.length[active] - rows.filled[active]
    ends = counts.cumsum()
    which = np.repeat(np.arange(len(active)), counts)
    offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    positions = rows.filled[active][which] + offsets
    columns = (rows.ids[active[which], positions], places[which], positions, offsets)
    tokens, cache_rows, at, chunk, by = (
        torch.from_numpy(np.ascontiguousarray(column, dtype=np.int64))
        for column in (*columns, versions[which])
    )
    step, order = make_pass(tokens, cache_rows, at, chunk, by, weights_of=sampler.weights)
    logits = sampler.decoder.extend(cache, step, int(places.max()) + 1)
    rows.filled[active] = rows.length[active]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return logits[back[torch.from_numpy(ends - 1)]]


class _Rows:
    """The state of all rollouts, columns [rows, capacity]."""

    def __init__(self, play: Play, ids: Sequence[RolloutId], problems: Sequence[int]) -> None:
        self._play, self._names, self._problems = play, ids, problems
        n = len(ids)
        self.capacity = play.sampling.max_tokens
        shape = (n, self.capacity)
        self.ids = np.zeros(shape, dtype=np.int32)
        self._sampled = np.zeros(shape, dtype=np.bool_)
        self._columns = {
            name: np.full(shape, np.nan, dtype=np.float32)
            for name in ("logprobs", "entropies", "gini")
        }
        self._versions = np.full(shape, -1, dtype=np.int32)
        self.length = np.zeros(n, dtype=np.int64)
        self.filled = np.zeros(n, dtype=np.int64)
        self.served_by = np.full(n, -1, dtype=np.int64)
        self.num_drawn = np.zeros(n, dtype=np.int64)
        self.num_turns = np.zeros(n, dtype=np.int64)
        self._turn_start = np.zeros(n, dtype=np.int64)
        self._turns: list[list[Turn]] = [[] for _ in range(n)]
        self._replies: list[Reply | None] = [None] * n
        self._status: list[Status | None] = [None] * n
        # A twin says the same few things again and again; a tokenizer takes longer than a pass.
        self._decode = functools.cache(play.codec.decode)
        self._encode = functools.cache(play.codec.encode)
        self._stops = np.array(play.sampling.stop_token_ids)
        self._environments: list[Environment] = [play.task.make(play.split, p) for p in problems]
        for row, environment in enumerate(self._environments):
            self._append(row, self._read(_now(environment.start())))

    def active(self) -> IntArray:
        """The rollouts that go on."""
        return np.flatnonzero([status is None for status in self._status])

    def record(self, active: IntArray, tokens: IntArray, draws: Any, versions: IntArray) -> None:
        """Take in one drawn token of each active row, and let ended turns be answered."""
        at = self.length[active]
        self.ids[active, at] = tokens
        self._sampled[active, at] = True
        for name, values in self._columns.items():
            values[active, at] = getattr(draws, name)
        self._versions[active, at] = versions
        self.length[active] += 1
        self.num_drawn[active] += 1
        sampling = self._play.sampling
        stopped = np.isin(tokens, self._stops)
        spent = self.length[active] - self._turn_start[active] >= sampling.max_new_tokens
        full = self.length[active] >= sampling.max_tokens
        for k in np.flatnonzero(stopped | spent | full):
            self._end_turn(int(active[k]), "stop" if stopped[k] else "length")

    def _end_turn(self, row: int, reason: FinishReason) -> None:
        start, stop = int(self._turn_start[row]), int(self.length[row])
        self._turns[row].append(Turn(0, start, stop, reason))
        self.num_turns[row] += 1
        drawn = self.ids[row, start:stop].tolist()
        shown = drawn[:-1] if reason == "stop" else drawn
        action = Action(self._decode(tuple(shown)), tuple(drawn), reason)
        reply = _now(self._environments[row].step(action))
        if reply.observation is None:
            self._replies[row] = reply
            self._status[row] = "ok" if reason == "stop" else "truncated"
            return
        self._append(row, self._read(reply.observation))
        no_room = self.length[row] >= self._play.sampling.max_tokens
        if no_room or self.num_turns[row] >= self._play.task.max_turns:
            self._status[row] = "truncated"

    def _read(self, text: Prompt) -> list[int]:
        if not isinstance(text, str):
            raise EnvError("the laboratory's rollouts read plain text, not chat messages")
        return self._encode(text)

    def _append(self, row: int, ids: Sequence[int]) -> None:
        begin = int(self.length[row])
        ids = ids[: self.capacity - begin]
        self.ids[row, begin : begin + len(ids)] = ids
        self.length[row] = self._turn_start[row] = begin + len(ids)

    def trajectories(self) -> list[Trajectory]:
        return [self._trajectory(row) for row in range(len(self._names))]

    def _trajectory(self, row: int) -> Trajectory:
        _now(self._environments[row].close())
        n = int(self.length[row])
        segment = Segment(
            self.ids[row, :n],
            self._sampled[row, :n],
            self._columns["logprobs"][row, :n],
            self._columns["entropies"][row, :n],
            self._columns["gini"][row, :n],
            self._versions[row, :n],
        )
        reply = self._replies[row]
        outcome = self._play.task.unfinished_outcome if reply is None else reply.outcome
        rewards = {} if reply is None else dict(reply.rewards)
        first = self._versions[row, :n][self._sampled[row, :n]]
        return Trajectory(
            id=self._names[row],
            task=self._play.task.name,
            problem=self._problems[row],
            segments=(segment,),
            turns=tuple(self._turns[row]),
            sampling=self._play.sampling,
            status=self._status[row] or "truncated",
            dispatch_version=int(first[0]) if len(first) else 0,
            outcome=outcome,
            rewards=rewards,
            reward=sum(rewards.values()) if rewards and outcome is not None else outcome,
        )


def _now(answer: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits. Raises EnvError for one that does."""
    try:
        answer.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    except RuntimeError as error:  # what asyncio's own waits raise outside of a loop
        if "no running event loop" not in str(error):
            raise
    answer.close()
    raise EnvError(
        "this environment waits (for a tool, a process or a clock); the laboratory plays only "
        "those that answer at once, such as the twins without a latency"
    )
