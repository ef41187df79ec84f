"""One rollout: what is recorded, and how every failure becomes a status without a reward."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from estr.engine import Request, ScriptedEngine
from estr.engines.in_process import InProcessEngine
from estr.engines.local import LocalEngine
from estr.environment import Reply, ScriptedEnvironment
from estr.errors import EngineError, EngineTimeout, GraderError, WorkerDied
from estr.options.run import RolloutOptions
from estr.rollout import RolloutSetting, run_rollout
from estr.types import RolloutId, SamplingSettings, Segment, Trajectory
from loop_parts import STOP, CoinTask, IdCodec
from tiny_models import tiny_model

ID = RolloutId(run=1, group=2, index=3)
SAMPLING = SamplingSettings(max_new_tokens=4, max_tokens=20, stop_token_ids=(STOP,))


def setting(
    replies: Sequence[Reply | Exception],
    script: Sequence[Sequence[int]] = ((5, STOP), (6, STOP), (7, STOP), (8, STOP)),
    *,
    engine: ScriptedEngine | None = None,
    sampling: SamplingSettings = SAMPLING,
    **limits: Any,
) -> tuple[RolloutSetting, ScriptedEnvironment, list[int]]:
    closed: list[int] = []
    environment = ScriptedEnvironment(
        "12", replies, delay_s=limits.pop("delay_s", 0.0), on_close=lambda: closed.append(1)
    )
    turns = iter(script)
    return (
        RolloutSetting(
            engine or ScriptedEngine(lambda request: next(turns), version=3),
            CoinTask(make=lambda index: environment),
            IdCodec(),
            sampling,
            RolloutOptions(**{"timeout_s": 5.0, "step_timeout_s": 5.0, **limits}),
        ),
        environment,
        closed,
    )


async def play(of: RolloutSetting) -> Trajectory:
    return await run_rollout(of, ID, 11, dispatch_version=2, deadline_version=6)


async def test_turns_and_tool_output_are_recorded_in_place_check_76() -> None:
    parts, environment, closed = setting([Reply("34"), Reply(outcome=1.0)])
    trajectory = await play(parts)
    (segment,) = trajectory.segments
    assert segment.token_ids.tolist() == [1, 2, 5, STOP, 3, 4, 6, STOP]
    assert segment.sampled.tolist() == [False, False, True, True, False, False, True, True]
    assert segment.versions.tolist() == [-1, -1, 3, 3, -1, -1, 3, 3]
    assert np.isnan(segment.behavior_logprobs[~segment.sampled]).all()
    assert [tuple(t) for t in trajectory.turns] == [(0, 2, 4, "stop"), (0, 6, 8, "stop")]
    assert [a.text for a in environment.actions] == ["5", "6"]
    assert environment.actions[0].token_ids == (5, STOP)
    assert (trajectory.status, trajectory.outcome, trajectory.reward) == ("ok", 1.0, 1.0)
    assert (trajectory.problem, trajectory.dispatch_version) == (11, 2)
    assert closed == [1]


async def test_sampled_ids_are_appended_never_encoded_again_check_72() -> None:
    seen: list[list[int]] = []

    def script(request: Request) -> list[int]:
        seen.append(request.token_ids.tolist())
        return [1, 0, STOP]

    parts, _, _ = setting([Reply("4"), Reply(outcome=0.0)], engine=ScriptedEngine(script))
    await play(parts)
    assert seen == [[1, 2], [1, 2, 1, 0, STOP, 4]]


async def test_positions_count_every_token_of_the_trajectory() -> None:
    positions: list[int] = []

    def script(request: Request) -> list[int]:
        positions.append(request.first_position)
        return [5, STOP]

    parts, _, _ = setting([Reply("345"), Reply(outcome=0.0)], engine=ScriptedEngine(script))
    await play(parts)
    assert positions == [2, 7]


async def test_rewards_are_summed_and_the_outcome_kept_apart_check_139() -> None:
    parts, _, _ = setting([Reply(outcome=0.0, rewards={"answer": 1.0, "format": 0.2})])
    trajectory = await play(parts)
    assert trajectory.reward == pytest.approx(1.2)
    assert trajectory.outcome == 0.0


async def test_an_ungraded_end_is_unscored_not_zero() -> None:
    parts, _, _ = setting([Reply(outcome=None)])
    trajectory = await play(parts)
    assert (trajectory.status, trajectory.reward, trajectory.outcome) == ("ok", None, None)


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        (ValueError("tool broke"), "env_error", "ValueError: tool broke"),
        (GraderError("no gold"), "grader_error", "no gold"),
        (KeyError("x"), "env_error", "KeyError"),
        (TimeoutError("no sandbox"), "env_error", "TimeoutError: no sandbox"),
    ],
)
async def test_failures_are_statuses_without_reward(
    failure: Exception, status: str, words: str
) -> None:
    parts, _, closed = setting([Reply("3"), failure])
    trajectory = await play(parts)
    assert trajectory.status == status
    assert trajectory.reward is None
    assert trajectory.outcome is None
    assert words in (trajectory.error or "")
    assert trajectory.num_sampled_tokens == 4, "what was drawn before stays on record"
    assert closed == [1]


async def test_a_fault_in_mid_rollout_leaves_one_trace_and_no_turn_twice_check_111() -> None:
    made: list[ScriptedEnvironment] = []
    faults: list[Exception] = [OSError("gone")]

    def make(index: int) -> ScriptedEnvironment:
        third = faults.pop() if faults else Reply("2")
        made.append(ScriptedEnvironment("12", [Reply("3"), Reply("4"), third, Reply(outcome=1.0)]))
        return made[-1]

    script = [(5, STOP), (6, STOP), (7, STOP)] + [(n, STOP) for n in (5, 6, 7, 8)]
    parts, _, _ = setting([], script)
    parts = dataclasses.replace(parts, task=CoinTask(make=make))
    failed, again = await play(parts), await play(parts)
    assert (failed.status, len(failed.turns), failed.reward) == ("env_error", 3, None)
    assert (again.status, len(again.turns), again.reward) == ("ok", 4, 1.0)
    assert [[action.text for action in one.actions] for one in made] == [
        ["5", "6", "7"],
        ["5", "6", "7", "8"],
    ]


@pytest.mark.parametrize(
    "failure", [EngineError("NaN"), EngineTimeout("no answer"), WorkerDied("killed")]
)
async def test_engine_failures_are_engine_errors(failure: Exception) -> None:
    def script(request: Request) -> list[int]:
        raise failure

    parts, _, closed = setting([Reply(outcome=1.0)], engine=ScriptedEngine(script))
    trajectory = await play(parts)
    assert (trajectory.status, trajectory.reward) == ("engine_error", None)
    assert closed == [1]


class Answering(ScriptedEngine):
    """Answers every request with the same thing."""

    def __init__(self, answer: object) -> None:
        super().__init__(lambda request: [])
        self.answer = answer

    async def generate(self, request: Request, timeout_s: float) -> Segment:
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "None is no Segment"),
        (Segment.drawn([], [], [], [], finish_reason="stop"), "it is empty"),
        (Segment.context([1, 2]), "not sampled"),
        (Segment.drawn([1] * 99, [-1] * 99, [1] * 99, [0] * 99), "99 tokens, at most"),
        (Segment.drawn([1], [float("nan")], [1], [0], finish_reason="stop"), "log-prob is NaN"),
        (Segment.drawn([1], [0.5], [1], [0], finish_reason="stop"), "NaN or above 0"),
        (Segment.drawn([1], [-1], [float("nan")], [0], finish_reason="stop"), "an entropy"),
    ],
)
async def test_an_unusable_answer_of_the_engine_is_an_engine_error(
    answer: object, words: str
) -> None:
    parts, _, closed = setting([Reply(outcome=1.0)], engine=Answering(answer))
    trajectory = await play(parts)
    assert (trajectory.status, trajectory.reward) == ("engine_error", None)
    assert "the engine's answer is unusable" in (trajectory.error or "")
    assert words in (trajectory.error or "")
    assert closed == [1]


class Aborting(ScriptedEngine):
    async def generate(self, request: Request, timeout_s: float) -> Segment:
        return Segment.drawn([5, 6], [-1, -1], [1, 1], [0, 0], finish_reason="abort")


async def test_the_finish_reason_decides_check_79() -> None:
    """stop: complete. length: the environment judges it. abort: neither trained nor truncated."""
    parts, _, _ = setting([Reply(outcome=1.0)], script=[[5, 6, STOP]])
    assert (await play(parts)).turns[0].finish_reason == "stop"
    parts, environment, _ = setting([Reply(outcome=0.0)], script=[[5, 6, 7, 8, 8, 8]])
    trajectory = await play(parts)
    assert trajectory.turns[0].finish_reason == "length"
    assert (trajectory.status, trajectory.reward) == ("truncated", 0.0)
    assert environment.actions[0].finish_reason == "length"
    assert environment.actions[0].text == "5678"
    parts, _, _ = setting([], engine=Aborting(lambda request: []))
    assert (await play(parts)).status == "engine_error"


async def test_budgets_end_in_truncation_scored_by_the_task() -> None:
    endless = [Reply("3")] * 10
    parts, _, _ = setting(endless)
    by_turns = await play(parts)
    assert by_turns.status == "truncated"
    assert len(by_turns.turns) == 4
    assert by_turns.reward == 0.0
    parts, _, _ = setting(
        endless, sampling=SamplingSettings(max_new_tokens=4, max_tokens=7, stop_token_ids=(STOP,))
    )
    by_tokens = await play(parts)
    assert by_tokens.status == "truncated"
    assert by_tokens.num_tokens <= 8


async def test_a_prompt_that_fills_the_budget_is_truncated_before_any_request() -> None:
    engine = ScriptedEngine(lambda request: [STOP])
    small = SamplingSettings(max_new_tokens=1, max_tokens=2, stop_token_ids=(STOP,))
    parts, _, _ = setting([Reply(outcome=1.0)], engine=engine, sampling=small)
    trajectory = await play(parts)
    assert trajectory.status == "truncated"
    assert engine.num_requests == 0


async def test_a_slow_step_is_an_environment_error_and_a_slow_rollout_a_timeout() -> None:
    parts, _, closed = setting([Reply(outcome=1.0)], delay_s=5.0, step_timeout_s=0.05)
    trajectory = await play(parts)
    assert trajectory.status == "env_error"
    assert "rollout.step_timeout_s = 0.05" in (trajectory.error or "")
    parts, _, closed = setting([Reply("3")] * 4, delay_s=0.06, timeout_s=0.15)
    trajectory = await play(parts)
    assert trajectory.status == "timeout"
    assert trajectory.reward == 0.0
    assert closed == [1]


async def test_cancellation_passes_through_and_closes_the_environment() -> None:
    parts, _, closed = setting([Reply(outcome=1.0)], delay_s=30.0)
    task = asyncio.create_task(play(parts))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == [1]


async def test_a_timeout_of_the_environments_own_is_no_end_of_the_rollouts_time() -> None:
    """It would be scored with the outcome of an unfinished rollout, and not tried again."""

    def make(index: int) -> ScriptedEnvironment:
        raise TimeoutError("the sandbox does not answer")

    parts, _, _ = setting([Reply(outcome=1.0)])
    parts = dataclasses.replace(parts, task=CoinTask(make=make))
    trajectory = await play(parts)
    assert (trajectory.status, trajectory.reward) == ("env_error", None)
    assert "TimeoutError: the sandbox does not answer" in (trajectory.error or "")


async def test_cancellation_passes_through_where_the_environment_cannot_be_closed() -> None:
    class Unclosable(ScriptedEnvironment):
        async def close(self) -> None:
            raise OSError("the sandbox is gone")

    parts, _, _ = setting([Reply(outcome=1.0)])
    unclosable = Unclosable("12", [Reply(outcome=1.0)], delay_s=30.0)
    parts = dataclasses.replace(parts, task=CoinTask(make=lambda index: unclosable))
    task = asyncio.create_task(play(parts))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_empty_prompt_is_refused() -> None:
    parts, environment, _ = setting([Reply(outcome=1.0)])
    environment._prompt = ""
    trajectory = await play(parts)
    assert trajectory.status == "env_error"
    assert "prompt is empty" in (trajectory.error or "")


def drawn_tokens(count: int, *, ended: bool = True) -> list[list[int]]:
    return [[5] * (count - ended) + [STOP] * ended]


@pytest.mark.parametrize(
    ("count", "ended", "penalty"),
    [(4, True, 0.0), (6, True, 0.0), (7, True, 0.125), (9, True, 0.375), (10, False, 0.5)],
)
async def test_overlong_rollouts_lose_reward_little_by_little(count, ended, penalty) -> None:
    """DAPO's soft overlong punishment: budget 10, the last 4 tokens of it cost up to 0.5."""
    parts, _, _ = setting(
        [Reply(outcome=1.0)],
        drawn_tokens(count, ended=ended),
        sampling=SamplingSettings(max_new_tokens=10, max_tokens=100, stop_token_ids=(STOP,)),
        overlong_buffer=4,
        overlong_penalty=0.5,
    )
    trajectory = await play(parts)
    assert trajectory.reward == pytest.approx(1.0 - penalty)
    assert trajectory.outcome == 1.0, "the outcome is what the task says, check 25"
    shown = {"outcome": 1.0, "overlong": -penalty} if penalty else {}
    assert trajectory.rewards == pytest.approx(shown)


async def test_the_budget_of_the_whole_trajectory_counts_too() -> None:
    parts, _, _ = setting(
        [Reply(outcome=1.0, rewards={"answer": 2.0})],
        drawn_tokens(6),
        sampling=SamplingSettings(max_new_tokens=100, max_tokens=10, stop_token_ids=(STOP,)),
        overlong_buffer=4,
    )
    trajectory = await play(parts)  # 2 read, 6 written: room for 2 more
    assert trajectory.rewards == {"answer": 2.0, "overlong": -0.5}
    assert trajectory.reward == 1.5


async def test_no_buffer_is_no_penalty_check_96() -> None:
    parts, _, _ = setting(
        [Reply(outcome=1.0)],
        drawn_tokens(10, ended=False),
        sampling=SamplingSettings(max_new_tokens=10, max_tokens=100, stop_token_ids=(STOP,)),
        overlong_buffer=0,
    )
    assert (await play(parts)).reward == 1.0


async def test_what_has_no_reward_gets_no_penalty() -> None:
    parts, _, _ = setting([Reply(outcome=None)], drawn_tokens(4), overlong_buffer=4)
    trajectory = await play(parts)
    assert (trajectory.reward, trajectory.rewards) == (None, {})


@pytest.mark.parametrize(
    "bad", [{"overlong_buffer": -1}, {"overlong_penalty": 0.0}, {"overlong_penalty": float("nan")}]
)
def test_bad_overlong_options_are_refused(bad) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        RolloutOptions(**bad)


async def slow_close() -> None:
    await asyncio.sleep(0.5)


async def broken_close() -> None:
    raise OSError("the sandbox is gone")


@pytest.mark.parametrize(
    ("replies", "delay_s", "close", "expected"),
    [
        ([Reply(outcome=1.0)], 0.0, slow_close, ("ok", 1.0)),
        ([GraderError("no gold")], 0.0, slow_close, ("grader_error", None)),
        ([EngineError("gone")], 0.0, broken_close, ("engine_error", None)),
        ([Reply(outcome=1.0)], 30.0, broken_close, ("timeout", 0.0)),
        ([Reply(outcome=1.0)], 30.0, slow_close, ("timeout", 0.0)),
        ([Reply(outcome=1.0)], 0.0, broken_close, ("env_error", None)),
    ],
)
async def test_closing_the_environment_changes_no_end_that_was_reached(
    replies: Sequence[Reply | Exception], delay_s: float, close: Any, expected: tuple[str, Any]
) -> None:
    parts, environment, _ = setting(replies, delay_s=delay_s, timeout_s=0.2)
    environment.close = close
    trajectory = await play(parts)
    assert (trajectory.status, trajectory.reward) == expected


async def test_a_cancelled_rollout_closes_its_environment_first() -> None:
    parts, environment, closed = setting([Reply(outcome=1.0)], delay_s=30.0)
    under_way = asyncio.create_task(play(parts))
    while not environment.actions:
        await asyncio.sleep(0.01)
    under_way.cancel()
    with pytest.raises(asyncio.CancelledError):
        await under_way
    assert closed == [1]


CONTEXT = 16


def context_engine() -> InProcessEngine:
    model = tiny_model(max_position_embeddings=CONTEXT)
    return InProcessEngine(LocalEngine(model, vocab_size=10, max_batch=2))


async def test_a_rollout_that_fills_the_context_is_truncated_not_an_error() -> None:
    sampling = SamplingSettings(max_new_tokens=8, max_tokens=64)
    parts, _, closed = setting([Reply("34")] * 4, engine=context_engine(), sampling=sampling)
    trajectory = await play(parts)
    assert (trajectory.status, trajectory.reward) == ("truncated", 0.0), trajectory.error
    assert trajectory.num_tokens >= CONTEXT
    assert closed == [1]


async def test_a_prompt_that_fills_the_context_is_an_error_that_says_so() -> None:
    class LongPrompt(ScriptedEnvironment):
        async def start(self) -> str:
            return "1" * CONTEXT

    sampling = SamplingSettings(max_new_tokens=8, max_tokens=64)
    parts, _, _ = setting([], engine=context_engine(), sampling=sampling)
    task = CoinTask(make=lambda index: LongPrompt("", []))
    trajectory = await play(dataclasses.replace(parts, task=task))
    assert (trajectory.status, trajectory.reward) == ("engine_error", None)
    assert "16 tokens leave no room in the model's context of 16" in (trajectory.error or "")


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("behavior_gini", float("nan"), "a gini is not finite, or below 0"),
        ("behavior_gini", -1.0, "a gini is not finite, or below 0"),
        ("behavior_entropies", -1.0, "an entropy is not finite, or below 0"),
    ],
)
async def test_statistics_that_cannot_be_are_the_engines_failure(
    column: str, value: float, words: str
) -> None:
    class Nonsense(ScriptedEngine):
        async def generate(self, request: Request, timeout_s: float) -> Segment:
            drawn = await super().generate(request, timeout_s)
            wrong = np.full(len(drawn), value, dtype=np.float32)
            return dataclasses.replace(drawn, **{column: wrong})

    parts, _, _ = setting([Reply(outcome=1.0)], engine=Nonsense(lambda request: [5, STOP]))
    trajectory = await play(parts)
    assert (trajectory.status, trajectory.reward) == ("engine_error", None)
    assert words in (trajectory.error or "")
