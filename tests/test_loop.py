"""The asynchronous loop over fakes: staleness, stragglers, failures, shutdown, resume."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from estr.checkpoint import Checkpoints, saved_columns
from estr.engine import Request, ScriptedEngine
from estr.environment import Reply, ScriptedEnvironment
from estr.errors import (
    EngineError,
    GraderError,
    Interrupted,
    NumericsError,
    Stalled,
    WeightsError,
)
from estr.evaluation_result import EvalResult
from estr.evaluations import Accuracy, Evaluations
from estr.group_endings import MORE_FAILURES
from estr.loop import Instruments, Loop
from estr.metrics import read_metrics
from estr.progress import SilentReporter
from estr.schedule import Schedule
from loop_parts import STOP, CoinTask, build, recipe


class Messages(SilentReporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


class StopAt(SilentReporter):
    def __init__(self, step: int) -> None:
        self.step = step
        self.loop: Loop

    def stepped(self, step: int, version: int, wall_s: float, row) -> None:
        if step == self.step:
            self.loop.stop()


async def finish(loop, timeout_s: float = 20.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await loop.run()
    finally:
        loop.writer.close()


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
async def test_every_step_is_made_within_the_bound(tmp_path: Path, max_staleness: int) -> None:
    loop, trainer = build(tmp_path, recipe(steps=12, max_staleness=max_staleness))
    await finish(loop)
    assert trainer.step == loop.step == 12
    assert len(set(trainer.consumed)) == len(trainer.consumed) == 24
    assert max(trainer.staleness) <= max_staleness
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl").records
    assert [row["step"] for row in rows] == list(range(1, 13))


async def test_synchronous_is_the_zero_staleness_case(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: [1, 2, STOP], token_s=0.001)
    loop, trainer = build(tmp_path, recipe(max_staleness=0), engine=engine, step_s=0.005)
    await finish(loop)
    assert set(trainer.staleness) == {0}
    assert set(trainer.intra) == {0}
    assert trainer.consumed == sorted(trainer.consumed)


async def test_weights_switch_in_the_middle_of_a_turn(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: [1] * 6 + [STOP], token_s=0.004)
    loop, trainer = build(tmp_path, recipe(steps=10), engine=engine, step_s=0.008)
    await finish(loop)
    assert max(trainer.intra) >= 1
    assert max(trainer.staleness) <= 2
    assert engine.loads == sorted(set(engine.loads))


async def test_a_straggler_is_waited_for_and_never_dropped(tmp_path: Path) -> None:
    def make(index: int) -> ScriptedEnvironment:
        delay = 0.3 if index == 1 else 0.0
        return ScriptedEnvironment("12", [Reply(outcome=next(coin))], delay_s=delay)

    coin = itertools.cycle([1.0, 0.0])
    loop, trainer = build(tmp_path, recipe(steps=8), task=CoinTask(make=make))
    await finish(loop)
    straggler = trainer.consumed.index(1)
    assert straggler >= 2, "others were trained on while it ran"
    assert max(trainer.staleness) == 2, "it came as late as the bound allows"
    assert len(trainer.consumed) == 16


async def test_a_stopped_trainer_stops_dispatch_at_the_capacity(tmp_path: Path) -> None:
    task = CoinTask()
    loop, trainer = build(tmp_path, recipe(steps=50), task=task)
    trainer.hang.clear()
    running = asyncio.create_task(finish(loop))
    await asyncio.sleep(0.3)
    capacity = (2 + 1) * 2
    in_training = 2
    assert len(set(task.made)) == capacity
    assert len(loop.groups) == capacity - in_training
    trainer.hang.set()
    await asyncio.wait_for(running, 20)
    assert trainer.step == 50


async def test_end_of_data_ends_the_run_check_116(tmp_path: Path) -> None:
    the_recipe = recipe(steps=100, epochs=1)
    loop, trainer = build(tmp_path, the_recipe, task=CoinTask(size=5))
    await finish(loop)
    assert sorted(trainer.consumed) == [0, 1, 2, 3, 4]
    assert trainer.step == 3, "two full steps and a last partial one"
    assert len(loop.groups) == 0


async def test_an_environment_that_raises_is_tried_again(tmp_path: Path) -> None:
    calls = itertools.count()
    coin = itertools.cycle([1.0, 0.0])

    def make(index: int) -> ScriptedEnvironment:
        broken = next(calls) % 5 == 0
        return ScriptedEnvironment(
            "12", [ValueError("tool broke") if broken else Reply(outcome=next(coin))]
        )

    loop, trainer = build(tmp_path, recipe(steps=6), task=CoinTask(make=make))
    await finish(loop)
    row = loop.totals.to_row()
    assert trainer.step == 6
    assert row["attempts/env_error"] > 0
    assert row["attempts/ok"] >= 24


async def test_every_attempt_that_ends_is_told_in_a_deterministic_run(tmp_path: Path) -> None:
    """Its engine may wait for one that a checkpoint had running, and that never asks again."""
    failing = iter([True])

    def make(index: int) -> ScriptedEnvironment:
        if next(failing, False):
            raise OSError("no sandbox")
        return ScriptedEnvironment("12", [Reply(outcome=1.0)])

    schedule, told = Schedule(deterministic=True), []
    schedule.on_rollout_end = told.append
    loop, _ = build(tmp_path, recipe(steps=3), task=CoinTask(size=6, make=make), schedule=schedule)
    await finish(loop)
    row = loop.totals.to_row()
    assert len(told) == len(set(told)) == row["attempts/ok"] + row["attempts/env_error"]
    (again,) = (rollout_id for rollout_id in told if rollout_id.attempt)
    assert replace(again, attempt=0) in told, "the attempt that never asked the engine"


async def test_failed_groups_are_issued_again_check_114(tmp_path: Path) -> None:
    tries: Counter[int] = Counter()
    coin = itertools.cycle([1.0, 0.0])

    def make(index: int) -> ScriptedEnvironment:
        tries[index] += 1
        if index == 1 and tries[index] <= 4:  # both members, both attempts
            return ScriptedEnvironment("12", [GraderError("no gold")])
        return ScriptedEnvironment("12", [Reply(outcome=next(coin))])

    messages = Messages()
    loop, trainer = build(tmp_path, recipe(steps=5), task=CoinTask(make=make), reporter=messages)
    await finish(loop)
    assert trainer.step == 5
    assert 1 not in trainer.consumed
    assert tries[1] == 6, "the problem came again, whole, in a group of its own"
    assert loop.totals.to_row()["failed_groups"] == 1
    assert messages.texts == ["group 1 (problem 1) failed: no gold"]


def test_an_evaluation_whose_rollouts_failed_says_so(tmp_path: Path) -> None:
    messages = Messages()
    loop, _ = build(tmp_path, recipe(), reporter=messages)
    fields: dict[str, Any] = dict.fromkeys(EvalResult.__dataclass_fields__)
    fields |= {"task": "coin", "num_problems": 20, "num_rollouts": 20, "avg_at_k": 0.0}
    fields |= {"avg_interval": (0.0, 0.0), "failures": {"truncated": 2, "grader_error": 18}}
    fields |= {"errors": {"grader_error": "KeyError: 'x'"}}
    with loop.writer:
        loop.evaluations.on_result(Accuracy(0, 0.0, 0.0), [EvalResult(**fields)])
    assert messages.texts == [
        "18 of 20 held-out rollouts of coin failed with grader_error, which counts as not solved: "
        "KeyError: 'x'"
    ]


async def test_groups_that_fail_alike_are_told_three_times(tmp_path: Path) -> None:
    def make(index: int) -> ScriptedEnvironment:
        return ScriptedEnvironment("12", [GraderError(f"got 1 answer for {index} replies")])

    messages = Messages()
    table = recipe(steps=5, rollout={"max_failed_groups": 9, "max_attempts": 1})
    loop, _ = build(tmp_path, table, task=CoinTask(make=make), reporter=messages)
    with pytest.raises(EngineError, match=r"groups in a row failed .*got 1 answer"):
        await finish(loop)
    told = [text for text in messages.texts if " failed: " in text]
    assert [text.endswith(MORE_FAILURES) for text in told] == [False, False, True]


async def test_a_problem_that_always_fails_is_given_up_aloud(tmp_path: Path) -> None:
    coin = itertools.cycle([1.0, 0.0])

    def make(index: int) -> ScriptedEnvironment:
        broken = index == 1
        return ScriptedEnvironment(
            "12", [GraderError("no gold") if broken else Reply(outcome=next(coin))]
        )

    messages = Messages()
    loop, trainer = build(tmp_path, recipe(steps=8), task=CoinTask(make=make), reporter=messages)
    await finish(loop)
    assert trainer.step == 8
    assert messages.texts[-1] == "problem 1 is given up: 3 groups of it failed"
    assert loop.totals.to_row()["abandoned_problems"] == 1


async def test_an_engine_that_always_fails_stops_the_run(tmp_path: Path) -> None:
    def script(request: Request) -> list[int]:
        raise EngineError("logits are NaN")

    the_recipe = recipe(rollout={"max_failed_groups": 7})
    loop, trainer = build(tmp_path, the_recipe, engine=ScriptedEngine(script))
    with pytest.raises(EngineError, match=r"7 groups in a row failed.*logits are NaN"):
        await finish(loop)
    assert trainer.step == 0


async def test_a_hanging_engine_is_a_timeout_and_the_stall_is_named(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: [STOP])
    engine.hang = True
    task = CoinTask()
    task.unfinished_outcome = None  # timeouts are then unscored, so no group can finish
    limits = {"timeout_s": 0.05, "step_timeout_s": 0.05, "max_attempts": 1}
    limits["max_failed_groups"] = 10_000
    loop, _ = build(tmp_path, recipe(rollout=limits), engine=engine, task=task)
    with pytest.raises(Stalled, match=r"no group finished within 0\.2 s"):
        await finish(loop)


async def test_rollouts_that_use_all_their_limits_are_no_stall(tmp_path: Path) -> None:
    class SlowToClose(ScriptedEnvironment):
        async def close(self) -> None:
            await asyncio.sleep(0.6)

    engine = ScriptedEngine(lambda request: [STOP])
    engine.hang = True
    limits = {"timeout_s": 0.1, "step_timeout_s": 3.0, "max_attempts": 1}
    task = CoinTask(make=lambda index: SlowToClose("12", [Reply(outcome=1.0)]))
    loop, trainer = build(tmp_path, recipe(steps=1, rollout=limits), engine=engine, task=task)
    await finish(loop)
    assert trainer.step == 1


async def test_timeouts_are_scored_by_the_rule_of_the_task(tmp_path: Path) -> None:
    coin = itertools.cycle([1.0, 0.0])

    def make(index: int) -> ScriptedEnvironment:
        return ScriptedEnvironment("12", [Reply(outcome=1.0)], delay_s=next(coin) * 30)

    loop, trainer = build(
        tmp_path, recipe(steps=1, rollout={"timeout_s": 0.2}), task=CoinTask(make=make)
    )
    await finish(loop)
    assert trainer.step == 1
    assert loop.totals.to_row()["attempts/timeout"] >= 2


async def test_a_broken_trainer_ends_the_run_with_its_error(tmp_path: Path) -> None:
    loop, trainer = build(tmp_path, recipe(steps=9))
    trainer.fail_at = 3
    with pytest.raises(RuntimeError, match="the optimizer broke"):
        await finish(loop)
    assert loop.step == 3


async def test_weights_that_cannot_be_loaded_end_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    class Corrupt(ScriptedEngine):
        async def load(self, version: int, weights, kv) -> None:
            if version == 4:
                raise WeightsError("v00000004.safetensors is not version 4 as published")
            await super().load(version, weights, kv)

    checkpoints = Checkpoints(tmp_path / "checkpoints")
    the_recipe = recipe(steps=30, checkpoint={"every_steps": 1})
    engine = Corrupt(lambda request: [1, 2, STOP])
    loop, _ = build(tmp_path, the_recipe, engine=engine, checkpoints=checkpoints)
    with pytest.raises(WeightsError, match="is not version 4 as published"):
        await finish(loop)
    _, state, torn = checkpoints.newest()
    assert torn == []
    assert state["step"] >= 1


async def test_a_loss_that_is_not_a_number_ends_the_run_with_its_error(tmp_path: Path) -> None:
    loop, trainer = build(tmp_path, recipe(steps=9))

    async def train(minibatches) -> list:
        raise NumericsError("optimizer step 0: loss nan, gradient norm nan")

    trainer.train = train  # type: ignore[method-assign]
    with pytest.raises(NumericsError, match="loss nan"):
        await finish(loop)


async def test_one_environment_a_hundred_times_slower_delays_only_its_group(
    tmp_path: Path,
) -> None:
    coin = itertools.cycle([1.0, 0.0])

    def make(index: int) -> ScriptedEnvironment:
        delay = 0.5 if index == 2 else 0.005
        return ScriptedEnvironment("12", [Reply(outcome=next(coin))], delay_s=delay)

    loop, trainer = build(tmp_path, recipe(steps=20), task=CoinTask(make=make))
    await finish(loop)
    assert len(trainer.consumed) == 40
    assert trainer.consumed.index(2) >= 4, "others were trained on meanwhile"
    assert max(trainer.staleness) <= 2


async def test_a_watcher_that_raises_ends_the_run(tmp_path: Path) -> None:
    async def watch() -> None:
        await asyncio.sleep(0.05)
        raise EngineError("the engine process ended")

    loop, trainer = build(tmp_path, recipe(steps=9), instruments=Instruments(watchers=[watch]))
    trainer.hang.clear()
    with pytest.raises(EngineError, match="the engine process ended"):
        await finish(loop)


async def test_skipped_updates_count_as_steps_not_as_versions(tmp_path: Path) -> None:
    loop, trainer = build(tmp_path, recipe(steps=8))
    trainer.skip = {2, 3, 6}
    await finish(loop)
    assert (loop.step, loop.version) == (8, 5)
    assert max(trainer.staleness) <= 2


@pytest.mark.parametrize(("num_minibatches", "publish_every"), [(2, 1), (3, 1), (1, 2), (2, 3)])
async def test_minibatches_and_rare_publishing_keep_the_bound(
    tmp_path: Path, num_minibatches: int, publish_every: int
) -> None:
    the_recipe = recipe(
        steps=12,
        max_staleness=3,
        num_minibatches=num_minibatches,
        publish_every=publish_every,
    )
    loop, trainer = build(tmp_path, the_recipe)
    await finish(loop)
    assert trainer.step == 12
    assert max(trainer.staleness) <= 3


async def test_stop_saves_a_checkpoint_and_resume_trains_each_group_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    engine = ScriptedEngine(lambda request: [1, 2, STOP], token_s=0.001)
    reporter = StopAt(step=7)
    loop, trainer = build(
        tmp_path, recipe(steps=30), engine=engine, checkpoints=checkpoints, reporter=reporter
    )
    reporter.loop = loop
    with pytest.raises(Interrupted, match="stopped after step 7 of 30"):
        await finish(loop)

    saved, state, torn = checkpoints.newest()
    assert torn == []
    again, second = build(tmp_path, recipe(steps=30), checkpoints=checkpoints)
    version = await second.restore(saved)
    second.store.publish(version, {})
    await again.engine.load(version, second.store, "recompute")
    again.restore(state, saved_columns(saved))
    await finish(again)
    consumed = trainer.consumed + second.consumed
    assert again.step == 30
    assert sorted(consumed) == list(range(60)), "each group exactly once"


class EndlessEvaluator:
    """An EvaluatorClient that is still at work when all steps are made."""

    def __init__(self) -> None:
        self.began = asyncio.Event()

    async def evaluate(self, version: int, num_problems: int) -> list[EvalResult]:
        self.began.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def export(self, folder: Path) -> None: ...


async def test_an_evaluation_that_is_left_out_is_told(tmp_path: Path) -> None:
    the_recipe = recipe(steps=7, eval={"every": 2})
    evaluations = Evaluations(the_recipe.eval, EndlessEvaluator())
    reporter = Messages()
    loop, trainer = build(tmp_path, the_recipe, evaluations=evaluations, reporter=reporter)
    running = asyncio.create_task(finish(loop))
    while trainer.step < 7:
        await asyncio.sleep(0.01)
    loop.stop()
    with pytest.raises(Interrupted):
        await running
    told = [line for line in reporter.texts if "is left out" in line]
    assert [line[:35] for line in told] == [
        "the evaluation due after step 4 is ",
        "the evaluation due after step 6 is ",
    ]


class ExportingEvaluator:
    """An EvaluatorClient that finds `accuracies`, and may be made to wait as it exports."""

    def __init__(self, *accuracies: float) -> None:
        self._accuracies = iter(accuracies)
        self.exported = 0
        self.may_export = asyncio.Event()
        self.may_export.set()

    async def evaluate(self, version: int, num_problems: int) -> list[Any]:
        accuracy = next(self._accuracies)
        interval = (accuracy - 0.05, accuracy + 0.05)
        return [SimpleNamespace(avg_at_k=accuracy, avg_interval=interval)]

    async def export(self, folder: Path) -> None:
        await self.may_export.wait()
        self.exported += 1


async def test_the_best_version_is_told_once_its_model_is_there(tmp_path: Path) -> None:
    evaluator = ExportingEvaluator(0.5)
    evaluator.may_export.clear()
    evaluations = Evaluations(recipe().eval, evaluator, tmp_path / "best")
    under_way = asyncio.create_task(evaluations.evaluate(3, 8))
    await asyncio.sleep(0.01)
    assert evaluations.found == [], "a checkpoint now must not speak of a model that is not there"
    evaluator.may_export.set()
    assert await under_way == 0.5
    assert evaluations.best == evaluations.found[0] == Accuracy(3, 0.5, 0.45)


@pytest.mark.parametrize(
    ("exported", "replaced", "best"),
    [
        (25, False, 25),
        (50, True, 60),  # of what came after the checkpoint
        (10, True, 60),  # killed before version 25 took its place
        (None, True, 60),
    ],
)
async def test_a_resume_knows_a_best_model_that_is_not_of_its_past(
    tmp_path: Path, exported: int | None, replaced: bool, best: int
) -> None:
    evaluator = ExportingEvaluator(0.7)
    evaluations = Evaluations(recipe().eval, evaluator, tmp_path / "best")
    past = [Accuracy(10, 0.6, 0.55), Accuracy(25, 0.8, 0.75), Accuracy(40, 0.5, 0.45)]
    evaluations.resume(past, exported)
    await evaluations.evaluate(60, 8)
    assert evaluator.exported == replaced
    assert evaluations.best is not None
    assert evaluations.best.version == best
    assert len(evaluations.found) == 4
    again = Evaluations(recipe().eval, evaluator, tmp_path / "best")
    again.resume(evaluations.found, best)
    assert again.best == evaluations.best


async def test_a_stop_while_the_last_evaluation_is_waited_for_saves_all_steps(
    tmp_path: Path,
) -> None:
    the_recipe = recipe(steps=4, eval={"every": 3})
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    evaluator = EndlessEvaluator()
    loop, trainer = build(
        tmp_path,
        the_recipe,
        checkpoints=checkpoints,
        evaluations=Evaluations(the_recipe.eval, evaluator),
    )
    running = asyncio.create_task(finish(loop))
    await evaluator.began.wait()
    while trainer.step < 4:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert not running.done(), "the evaluation is waited for"
    loop.stop()
    with pytest.raises(Interrupted, match="stopped after step 4 of 4"):
        await running
    _, state, _ = checkpoints.newest()
    assert state["step"] == 4


async def test_what_goes_on_after_a_resume_is_what_had_not_ended(tmp_path: Path) -> None:
    """An engine that follows a schedule waits for these; for others it would wait for ever."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    slow = CoinTask(make=lambda index: ScriptedEnvironment("12", [Reply(outcome=1.0)]))
    engine = ScriptedEngine(lambda request: [1, 2, STOP], token_s=0.001)
    reporter = StopAt(step=2)
    loop, _ = build(
        tmp_path,
        recipe(steps=30),
        engine=engine,
        task=slow,
        checkpoints=checkpoints,
        reporter=reporter,
    )
    reporter.loop = loop
    with pytest.raises(Interrupted):
        await finish(loop)
    saved, state, _ = checkpoints.newest()
    running = {g["id"] for g in state["groups"]["outstanding"] if g["state"] == "running"}

    same, _ = build(tmp_path / "same", recipe(steps=30))
    same.restore(state, saved_columns(saved))
    assert {rollout_id.group for rollout_id in same.under_way()} == running != set()
    other, _ = build(tmp_path / "other", recipe(steps=30, groups_per_step=1, max_staleness=0))
    other.restore(state, saved_columns(saved))
    assert other.under_way() == set(), "all groups are begun anew"
    for each in (same, other):
        each.writer.close()


class HardTask(CoinTask):
    """Every other problem is solved by nobody."""

    def make(self, split: str, index: int) -> ScriptedEnvironment:
        outcome = 0.0 if index % 2 else next(self._coin)
        return ScriptedEnvironment("12", [Reply(outcome=outcome)])


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_dynamic_sampling_trains_on_groups_that_teach(
    tmp_path: Path, max_staleness: int
) -> None:
    the_recipe = recipe(steps=8, max_staleness=max_staleness, rollout={"max_filtered_groups": 100})
    loop, trainer = build(tmp_path, the_recipe, task=HardTask())
    await finish(loop)
    assert trainer.step == 8
    assert len(set(trainer.consumed)) == 16
    assert all(group % 2 == 0 for group in trainer.consumed)
    assert max(trainer.staleness) <= max_staleness
    assert loop.totals.to_row()["filtered_groups"] >= 15


async def test_a_task_that_nobody_solves_ends_all_the_same_check_31(tmp_path: Path) -> None:
    class Impossible(CoinTask):
        def make(self, split: str, index: int) -> ScriptedEnvironment:
            self.made.append(index)
            return ScriptedEnvironment("12", [Reply(outcome=0.0)])

    the_recipe = recipe(steps=2, max_staleness=0, rollout={"max_filtered_groups": 3})
    loop, trainer = build(tmp_path, the_recipe, task=Impossible())
    await finish(loop)
    assert trainer.step == 2
    assert loop.totals.to_row()["filtered_groups"] <= 6


def test_a_resume_goes_on_counting_what_was_filtered(tmp_path: Path) -> None:
    loop, _ = build(tmp_path / "one", recipe(rollout={"max_filtered_groups": 3}))
    loop.buffer.num_filtered = 2
    state, columns = loop.state({})
    again, _ = build(tmp_path / "two", recipe(rollout={"max_filtered_groups": 3}))
    again.restore(json.loads(json.dumps(state)), columns)
    assert again.buffer.num_filtered == 2
    for each in (loop, again):
        each.writer.close()
