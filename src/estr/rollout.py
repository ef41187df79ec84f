"""One rollout: a fresh environment, turn after turn, recorded as a Trajectory.

    environment --prompt--> [context] --Request--> engine --drawn tokens--> [turn]
         ^                                                                    |
         +------------------------- Action(text) <----------------------------+
         +--observation--> [context] ... until the environment ends it or a budget runs out

`run_rollout` is the one boundary where failures become data: whatever the environment, the grader
or the engine raises ends in a trajectory with a status and without a reward. Sampled ids are only
ever appended to, never encoded again; where a chat template rewrites what came before, they stay in
the segment that they were drawn in, and a new segment begins (`estr.chat`). What a checkpoint saved
of a rollout (`RolloutState`) is gone on with: its turns are played to a fresh environment, which
must answer as it did before.
Then: `buffer` -> `batch` -> `trainer` -> `losses`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .chat import Encoding, Transcript
from .engine import Engine, Request
from .environment import Action, Environment, Reply, Task, plain_reply
from .errors import ContextFull, EngineError, EnvError, GraderError, WorkerError
from .functions import told
from .options.run import RolloutOptions
from .own_loop import Watch
from .rollout_state import RolloutState, pack_reply
from .types import Float32Array, RolloutId, SamplingSettings, Segment, Status, Trajectory

_watch = Watch()
"""Tells environments that hold the event loop of all rollouts."""


@dataclass(frozen=True, slots=True)
class RolloutSetting:
    """What all rollouts of a run share. `started_at` is the monotonic time of the run's start."""

    engine: Engine
    task: Task
    codec: Encoding
    sampling: SamplingSettings
    limits: RolloutOptions
    split: str = "train"
    worker: str = ""
    started_at: float = field(default_factory=time.monotonic)


async def run_rollout(
    setting: RolloutSetting,
    rollout_id: RolloutId,
    problem: int,
    *,
    dispatch_version: int,
    deadline_version: int,
    state: RolloutState | None = None,
) -> Trajectory:
    """Play one problem once. Never raises for a failure of engine, environment or grader; only
    cancellation passes through, after the environment is closed.

    state: grows with the rollout, so that a checkpoint can save it at any await; one that comes out
    of a checkpoint is gone on with.
    """
    start_s = time.monotonic() - setting.started_at
    state = RolloutState() if state is None else state
    status, error = await _end(setting, state, rollout_id, problem, deadline_version)
    reply = state.replies[-1] if state.ended else None
    outcome, rewards, reward = _score(setting.task, status, reply)
    if reward is not None and (penalty := _overlong_penalty(setting, state)):
        rewards = {**(rewards or {"outcome": reward}), "overlong": -penalty}
        reward -= penalty
    return Trajectory(
        id=rollout_id,
        task=setting.task.name,
        problem=problem,
        segments=state.segments(),
        turns=tuple(state.turns),
        sampling=setting.sampling,
        status=status,
        dispatch_version=dispatch_version,
        outcome=outcome,
        rewards=rewards,
        reward=reward,
        worker=setting.worker,
        times_s={
            "start": start_s,
            "end": time.monotonic() - setting.started_at,
            "engine": state.engine_s,
            "environment": state.environment_s,
        },
        error=error,
    )


async def _end(
    setting: RolloutSetting,
    state: RolloutState,
    rollout_id: RolloutId,
    problem: int,
    deadline_version: int,
) -> tuple[Status, str | None]:
    """Play to the end: (status, what went wrong)."""
    ends_at = asyncio.get_running_loop().time() + setting.limits.timeout_s
    try:
        return await _run(setting, state, rollout_id, problem, deadline_version, ends_at)
    except _NotRestored:
        state.restart()
        return await _run(setting, state, rollout_id, problem, deadline_version, ends_at)


async def _run(
    setting: RolloutSetting,
    state: RolloutState,
    rollout_id: RolloutId,
    problem: int,
    deadline_version: int,
    ends_at: float,
) -> tuple[Status, str | None]:
    """The rollout in a fresh environment: (status, what went wrong). The environment is closed on
    every path, beyond the limit of the rollout: how long that takes changes nothing of an end that
    was reached in time, nor does its failure stand for an earlier one."""
    opened: list[Environment] = []

    async def play() -> Status:
        limit = asyncio.timeout_at(ends_at)
        try:
            async with limit:
                opened.append(setting.task.make(setting.split, problem))
                transcript = await _entered(setting, opened[0], state)
                return await _play(
                    setting, opened[0], transcript, state, rollout_id, deadline_version
                )
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise _OutOfTime from error

    try:
        end = await _end_of(play(), setting.limits)
    finally:
        closed = None
        if opened:
            closed = await _end_of(_limited(opened[0], "close", setting.limits), setting.limits)
    status, error = end
    if closed is not None and closed[1] is not None and status in ("ok", "truncated"):
        return closed
    return status, error


async def _end_of(
    work: Coroutine[Any, Any, Status], limits: RolloutOptions
) -> tuple[Status, str | None]:
    """What it comes to, or (the status of its failure, what went wrong). Only cancellation and
    _NotRestored pass through."""
    try:
        return await work, None
    except (KeyboardInterrupt, GeneratorExit, _NotRestored):
        raise
    except BaseException as failure:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # What an environment raises as it is closed must not take the place of the end.
            raise asyncio.CancelledError from failure
        if isinstance(failure, _OutOfTime):
            return "timeout", f"no end within rollout.timeout_s = {limits.timeout_s:g} s"
        return _failed(failure)


def _failed(failure: BaseException) -> tuple[Status, str]:
    """(status, what went wrong) of a rollout that raised."""
    if isinstance(failure, (EngineError, WorkerError)):
        return "engine_error", str(failure)
    if isinstance(failure, GraderError):
        return "grader_error", str(failure)
    if isinstance(failure, asyncio.CancelledError):
        return "env_error", "the environment raised CancelledError by itself"
    return "env_error", told(failure)


class _NotRestored(Exception):
    """A fresh environment cannot be brought to where a saved rollout stands."""


class _OutOfTime(Exception):
    """rollout.timeout_s is over."""


async def _entered(
    setting: RolloutSetting, environment: Environment, state: RolloutState
) -> Transcript:
    """What the model has read and written when the rollout begins or goes on."""
    if state.parts:
        return await _restore(setting, environment, state)
    transcript = await _begin(setting, environment)
    state.add_context(transcript.ids, setting.sampling.max_tokens)
    return transcript


async def _begin(setting: RolloutSetting, environment: Environment) -> Transcript:
    prompt = await _limited(environment, "start", setting.limits)
    transcript = Transcript(setting.codec, prompt)
    if not transcript.ids:
        raise EnvError("the prompt is empty: a model needs at least one token to go on from")
    return transcript


async def _restore(
    setting: RolloutSetting, environment: Environment, state: RolloutState
) -> Transcript:
    """Play the saved turns to a fresh environment. Raises _NotRestored unless it asks the same and
    answers the same; where no turn was answered yet, the prompt alone decides."""
    if state.replies and not environment.restorable:
        raise _NotRestored
    transcript = await _begin(setting, environment)
    read = transcript.ids[: setting.sampling.max_tokens]
    if read != state.parts[0].token_ids.tolist():
        raise _NotRestored
    for drawn, saved in zip(state.written(), state.replies, strict=False):
        action = _action(setting.codec, drawn, setting.sampling)
        reply = plain_reply(await _limited(environment, "step", setting.limits, action))
        if pack_reply(reply) != pack_reply(saved):
            raise _NotRestored
        if saved.observation is not None:
            transcript.extend(action.text, action.token_ids[-1], saved.observation)
    return transcript


async def _play(
    setting: RolloutSetting,
    environment: Environment,
    transcript: Transcript,
    state: RolloutState,
    rollout_id: RolloutId,
    deadline_version: int,
) -> Status:
    """Turns until the environment ends it ("ok"; "truncated" if its last turn was cut short by a
    budget) or a budget runs out ("truncated")."""
    limits = setting.limits
    while not state.ended and len(state.replies) < setting.task.max_turns:
        try:
            room = state.answer_due or await _draw(setting, state, rollout_id, deadline_version)
        except ContextFull:
            if not state.turns:  # the prompt alone is too long: that is not the policy's doing
                raise
            room = False
        if not room:
            return "truncated"
        drawn = state.parts[-1]
        if drawn.finish_reason not in ("stop", "length"):
            raise EngineError(f"{rollout_id}: the engine aborted the request")
        clock = time.monotonic()
        action = _action(setting.codec, drawn, setting.sampling)
        reply = plain_reply(await _limited(environment, "step", limits, action))
        state.environment_s += time.monotonic() - clock
        read = None
        if reply.observation is not None:
            read = transcript.extend(action.text, action.token_ids[-1], reply.observation)
        # Reply and what is read of it together: a checkpoint sees both or neither.
        state.replies.append(reply)
        if read is not None:
            state.add_context(read.ids, setting.sampling.max_tokens, new_segment=read.rewritten)
    if not state.ended:
        return "truncated"
    return "ok" if state.turns[-1].finish_reason == "stop" else "truncated"


async def _draw(
    setting: RolloutSetting, state: RolloutState, rollout_id: RolloutId, deadline_version: int
) -> bool:
    """One turn from the engine; False where the token budget has no room for one."""
    sampling = setting.sampling
    budget = min(sampling.max_new_tokens, sampling.max_tokens - state.num_tokens)
    if budget < 1:
        return False
    request = Request(
        id=rollout_id,
        token_ids=state.history(),
        sampling=sampling,
        max_new_tokens=budget,
        first_position=state.num_tokens,
        deadline_version=deadline_version,
        drawn=state.drawn,
    )
    clock = time.monotonic()
    drawn = await setting.engine.generate(request, setting.limits.timeout_s)
    state.engine_s += time.monotonic() - clock
    _check_drawn(drawn, request)
    state.add_turn(drawn)
    return True


def _check_drawn(drawn: object, request: Request) -> None:
    """Raise EngineError for what cannot be the turn that was asked for. A log-prob of -inf is
    left to the loss, which rejects and counts it."""
    wrong = None
    if not isinstance(drawn, Segment):
        wrong = f"{drawn!r:.80} is no Segment"
    elif not drawn.sampled.all():
        wrong = "it holds tokens that were not sampled"
    elif len(drawn) > request.max_new_tokens:
        wrong = f"{len(drawn)} tokens, at most {request.max_new_tokens} were asked for"
    elif not len(drawn) and drawn.finish_reason != "abort":
        wrong = "it is empty"
    elif np.isnan(drawn.behavior_logprobs).any() or (drawn.behavior_logprobs > 1e-3).any():
        wrong = "a log-prob is NaN or above 0"
    elif not _are_uncertainties(drawn.behavior_entropies):
        wrong = "an entropy is not finite, or below 0"
    elif drawn.behavior_gini is not None and not _are_uncertainties(drawn.behavior_gini):
        wrong = "a gini is not finite, or below 0"
    if wrong is not None:
        raise EngineError(f"{request.id}: the engine's answer is unusable: {wrong}")


def _are_uncertainties(values: Float32Array) -> bool:
    return bool(np.isfinite(values).all() and (values >= -1e-3).all())  # rounding may pass 0


def _action(codec: Encoding, drawn: Segment, sampling: SamplingSettings) -> Action:
    ids = [int(token) for token in drawn.token_ids]
    shown = ids[:-1] if ids and ids[-1] in sampling.stop_token_ids else ids
    reason = drawn.finish_reason or "abort"
    return Action(text=codec.decode(shown), token_ids=tuple(ids), finish_reason=reason)


async def _limited(environment: Environment, what: str, limits: RolloutOptions, *args: Any) -> Any:
    """What that method of the environment comes to in time. Raises EnvError where it does not."""
    timeout_s = limits.step_timeout_s
    limit = asyncio.timeout(timeout_s)
    made = getattr(environment, what)(*args)
    try:
        async with limit:
            return await _watch.run(made, f"{type(environment).__qualname__}.{what}")
    except TimeoutError as error:
        if not limit.expired():  # the environment's own
            raise
        raise EnvError(
            f"environment.{what}() did not answer within rollout.step_timeout_s = {timeout_s:g} s"
        ) from error


def _score(
    task: Task, status: Status, reply: Reply | None
) -> tuple[float | None, Mapping[str, float], float | None]:
    """(outcome, rewards, reward): by the environment where it ended the rollout, by the task's rule
    for unfinished ones, nothing at all for failures."""
    if status in ("ok", "truncated") and reply is not None:
        rewards = dict(reply.rewards)
        reward = sum(rewards.values()) if rewards else reply.outcome
        return reply.outcome, rewards, reward if reply.outcome is not None else None
    if status in ("truncated", "timeout"):
        return task.unfinished_outcome, {}, task.unfinished_outcome
    return None, {}, None


def _overlong_penalty(setting: RolloutSetting, state: RolloutState) -> float:
    """What a rollout loses for coming near the end of its budget: nothing while more than
    rollout.overlong_buffer tokens could still have been drawn, everything where none could.

    DAPO (arXiv 2503.14476), equation 13, on the budget of the last turn and of the trajectory,
    whichever ends first.
    """
    limits, sampling = setting.limits, setting.sampling
    if not limits.overlong_buffer or not state.turns:
        return 0.0
    _, start, stop, _ = state.turns[-1]
    left = min(sampling.max_new_tokens - (stop - start), sampling.max_tokens - state.num_tokens)
    used = 1.0 - max(0, left) / limits.overlong_buffer
    return limits.overlong_penalty * max(0.0, used)
