"""Evaluation: pass@k, intervals, failures in the denominator, the pinned version, the host."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

import estr
from estr import warmstart
from estr.config import recipe_from_table
from estr.engine import Request, ScriptedEngine
from estr.environment import Environment, Reply, ScriptedEnvironment
from estr.environments.calculator import CalculatorTask
from estr.errors import (
    ConfigError,
    DataError,
    EngineError,
    GraderError,
    WeightsError,
    WorkerError,
)
from estr.evaluation import (
    EvaluatorHost,
    compare_models,
    evaluate_model,
    sample_rollouts,
)
from estr.evaluation_records import RolloutFile, RolloutRecord, open_rollouts, weights_digest
from estr.evaluation_result import compare
from estr.evaluation_rollouts import EVALUATION_RUNS, evaluate
from estr.evaluator_process import EvaluatorProcess
from estr.models import load_model, save_model
from estr.options.run import RolloutOptions
from estr.rollout import RolloutSetting
from estr.run_folder import RunFolder
from estr.subject import find_run, find_subject
from estr.types import SamplingSettings
from estr.weights import FileWeightStore, MemoryWeightStore
from loop_parts import IdCodec

STOP = 9


class ScriptedTask:
    """Problem p ends as results[p] say, one entry a rollout: an outcome, or an exception."""

    name = "scripted"
    stop = ("9",)
    max_turns = 2
    unfinished_outcome: float | None = 0.0

    def __init__(self, results: Sequence[Sequence[float | Exception | None]]) -> None:
        self._left = [list(entries) for entries in results]

    def size(self, split: str) -> int | None:
        return len(self._left)

    def make(self, split: str, index: int) -> Environment:
        entry = self._left[index].pop(0)
        reply = entry if isinstance(entry, Exception) else Reply(outcome=entry)
        return ScriptedEnvironment("12", [reply])

    def gold(self, split: str, index: int) -> Sequence[str]:
        return []


def setting(results, engine=None, timeout_s: float = 30.0) -> RolloutSetting:
    return RolloutSetting(
        engine or ScriptedEngine(lambda request: [1, 2, STOP], version=7),
        ScriptedTask(results),
        IdCodec(),
        SamplingSettings(max_new_tokens=8, max_tokens=64, stop_token_ids=(STOP,)),
        RolloutOptions(timeout_s=timeout_s),
        split="test",
    )


class VotingTask(ScriptedTask):
    """Problem p's rollouts answer as the engine wrote; "5" is right."""

    def make(self, split: str, index: int) -> Environment:
        return ScriptedEnvironment(f"{index}", [Reply(outcome=self._left[index].pop(0))])

    def answer(self, text: str) -> str | None:
        return None if text == "0" else text

    def example_id(self, split: str, index: int) -> str:
        return f"problem-{index}"


def run(results, k: int, **kwargs):
    what = setting(results, **kwargs)
    return asyncio.run(evaluate(what, problems=range(len(results)), k=k, seed=3))


# -- evaluate ---------------------------------------------------------------------------------


def test_avg_and_pass_at_k_of_known_rollouts() -> None:
    result = run([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], k=4)
    assert result.avg_at_k == pytest.approx(3 / 12)
    expected = {1: 0.25, 2: (0.5 + 5 / 6) / 3, 4: 2 / 3}
    assert result.pass_at_k == pytest.approx(expected)
    assert (result.version, result.num_problems, result.num_rollouts) == (7, 3, 12)
    assert (result.failures, result.unscored, result.tokens) == ({}, 0, 36)
    low, high = result.avg_interval
    assert low <= result.avg_at_k <= high


def test_k_itself_is_among_the_sizes_of_pass_at_k() -> None:
    assert sorted(run([[1] * 6], k=6).pass_at_k) == [1, 2, 4, 6]
    assert sorted(run([[1]], k=1).pass_at_k) == [1]


def test_a_part_of_the_outcome_is_not_solved() -> None:
    result = run([[0.5], [1.0]], k=1)
    assert (result.avg_at_k, result.mean_outcome) == (0.5, 0.75)


def test_none_among_the_outcomes_check_140() -> None:
    result = run([[1], [None], [0]], k=1)
    assert result.avg_at_k == pytest.approx(1 / 3)
    assert (result.unscored, result.mean_outcome) == (1, 0.5)


def test_nothing_scored_at_all_check_140() -> None:
    result = run([[None], [RuntimeError("no sandbox")]], k=1)
    assert (result.avg_at_k, result.mean_outcome, result.unscored) == (0.0, None, 2)
    assert result.failures == {"env_error": 1}
    assert "no sandbox" in result.errors["env_error"]


def test_every_failure_counts_as_unsolved_and_is_named() -> None:
    def script(request: Request) -> list[int]:
        if request.id.group == 3:
            raise EngineError("the engine broke")
        return [1] * 99 if request.id.group == 4 else [1, STOP]

    results = [[1], [RuntimeError("tool")], [GraderError("grader")], [1], [0]]
    result = run(results, k=1, engine=ScriptedEngine(script))
    assert result.avg_at_k == pytest.approx(1 / 5)
    broken = {"engine_error": 1, "env_error": 1, "grader_error": 1}
    assert result.failures == {**broken, "truncated": 1}
    assert result.unscored == 3, "the truncated one was graded"
    assert set(result.errors) == set(broken)


def test_an_engine_that_answers_nothing_is_no_accuracy_of_zero() -> None:
    def script(request: Request) -> list[int]:
        raise EngineError("out of memory")

    with pytest.raises(EngineError, match="no rollout got an answer: out of memory"):
        run([[1], [1]], k=1, engine=ScriptedEngine(script))


def test_a_hanging_rollout_ends_at_its_time_limit() -> None:
    engine = ScriptedEngine(lambda request: [STOP])
    engine.hang = True
    result = run([[1], [1]], k=1, engine=engine, timeout_s=0.1)
    assert (result.failures, result.avg_at_k) == ({"timeout": 2}, 0.0)


def test_rollouts_have_names_that_no_training_run_has() -> None:
    seen = []

    def script(request: Request) -> list[int]:
        seen.append(request.id)
        return [STOP]

    run([[1, 1], [1, 1]], k=2, engine=ScriptedEngine(script))
    assert len(set(seen)) == 4
    assert {name.run for name in seen} == {EVALUATION_RUNS + 3}
    assert {(name.group, name.index) for name in seen} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert all(name.run > 2**63 - 1 for name in seen), "the largest seed of a training run"


async def test_no_more_rollouts_at_once_than_asked_for() -> None:
    running = peak = 0

    class Counting(ScriptedEngine):
        async def generate(self, request, timeout_s):
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            try:
                return await super().generate(request, timeout_s)
            finally:
                running -= 1

    what = setting([[1, 1]] * 10, engine=Counting(lambda r: [1, STOP], token_s=0.001))
    await evaluate(what, problems=range(10), k=2, seed=0, concurrency=3)
    assert peak == 3


async def test_weights_that_change_meanwhile_are_an_error() -> None:
    engine = ScriptedEngine(lambda request: [1, 2, STOP], token_s=0.01)
    store = MemoryWeightStore()
    store.publish(1, {})
    what = setting([[1]] * 4, engine=engine)
    running = asyncio.create_task(evaluate(what, problems=range(4), k=1, seed=0))
    await asyncio.sleep(0.005)
    await engine.load(1, store, "recompute")
    with pytest.raises(WeightsError, match="from version 0 to"):
        await running


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"problems": []}, "no problem"),
        ({"problems": [0, 0]}, "twice"),
        ({"k": 0}, "k must be"),
        ({"k": 1 << 17}, "k must be"),
        ({"problems": range(10_000), "k": 10_000}, "more than 10000000 rollouts"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 1 << 63}, "seed must be"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
async def test_impossible_requests_are_refused(change, match: str) -> None:
    request = {"problems": [0], "k": 1, "seed": 0, **change}
    with pytest.raises(ConfigError, match=match):
        await evaluate(setting([[1]]), **request)


async def test_two_problems_of_one_name_are_refused() -> None:
    parts = setting([[1], [0], [1]])
    parts.task.example_id = lambda split, problem: f"{problem % 2}"
    with pytest.raises(ConfigError, match="calls its problems 0 and 2 both '0'"):
        await evaluate(parts, problems=[0, 1, 2], k=1, seed=0)


def test_json_is_one_plain_object() -> None:
    table = json.loads(json.dumps(run([[1, 0], [RuntimeError("x"), 0]], k=2).to_json()))
    for key in ("task", "k", "avg_at_k", "pass_at_k", "intervals", "num_problems", "failures"):
        assert key in table
    assert table["pass_at_k"] == {"1": 0.25, "2": 0.5}
    assert set(table["intervals"]["pass_at_k"]) == {"1", "2"}
    assert table["failures"] == {"env_error": 1}


# -- votes --------------------------------------------------------------------------------------


async def test_majority_at_k_counts_what_rollouts_answer() -> None:
    said = {0: [5, 5, 3], 1: [3, 3, 5], 2: [0, 0, 5], 3: [5, 3, 0]}

    def script(request: Request) -> list[int]:
        return [said[request.id.group][request.id.index], STOP]

    outcomes = [[float(word == 5) for word in words] for words in said.values()]
    what = replace(setting(outcomes, ScriptedEngine(script)), task=VotingTask(outcomes))
    result = await evaluate(what, problems=range(4), k=3, seed=0, concurrency=1)
    assert result.majority_at_k == pytest.approx((1 + 0 + 1 + 0.5) / 4)
    low, high = result.majority_interval or (1.0, 0.0)
    assert low <= 0.625 <= high
    assert result.to_json()["intervals"]["majority_at_k"] == [low, high]


def test_a_task_that_does_not_say_what_an_answer_is_has_no_majority() -> None:
    result = run([[1]], k=1)
    assert result.majority_at_k is None
    assert result.to_json()["intervals"]["majority_at_k"] is None


async def test_what_was_not_finished_does_not_vote() -> None:
    engine = ScriptedEngine(lambda request: [5] * 9 if request.id.index else [3, STOP])
    outcomes = [[1.0, 1.0, 1.0]]
    what = replace(setting(outcomes, engine), task=VotingTask(outcomes))
    result = await evaluate(what, problems=[0], k=3, seed=0)
    assert result.failures == {"truncated": 2}
    assert result.majority_at_k == 1.0, "one vote, of the one that ended"


class MeasuringTask(ScriptedTask):
    """Tells what it was given to measure."""

    def measures(self, records: Sequence[RolloutRecord]) -> dict[str, float]:
        written = [reply for record in records for reply in record.replies]
        assert set(written) == {"12"}
        return {"replies": len(written) / len(records)}


def test_a_task_measures_failed_rollouts_too_and_reads_replies_without_their_end() -> None:
    outcomes = [[1], [0], [RuntimeError("no sandbox")]]
    what = replace(setting(outcomes), task=MeasuringTask(outcomes))
    result = asyncio.run(evaluate(what, problems=range(3), k=1, seed=0))
    assert result.measures == {"replies": 1.0}
    assert result.to_json()["measures"] == {"replies": 1.0}
    assert run([[1]], k=1).measures == {}


# -- rollouts on disk ---------------------------------------------------------------------------


def kept_run(folder: Path, results, k: int, *, problems=None, engine=None, name: str = "a"):
    what = setting(results, engine)
    with open_rollouts(folder, {"name": name}) as kept:
        return asyncio.run(
            evaluate(what, problems=problems or range(len(results)), k=k, seed=3, kept=kept)
        ), kept


def test_rollouts_that_are_there_are_not_played_again(tmp_path: Path) -> None:
    first, kept = kept_run(tmp_path, [[1, 0], [1, 1]], k=2)
    assert (first.num_found, len(kept.path.read_bytes().split(b"\n"))) == (0, 1 + 4 + 1)
    engine = ScriptedEngine(lambda request: [1, 2, STOP], version=7)
    again, _ = kept_run(tmp_path, [[], []], k=2, engine=engine)
    assert (again.num_found, engine.num_requests) == (4, 0)
    assert replace(again, num_found=0, wall_s=first.wall_s) == first

    more, _ = kept_run(tmp_path, [[0], [1], [1, 1, 0]], k=3, engine=engine)
    assert (more.num_found, engine.num_requests) == (4, 5)
    assert more.num_solved == {0: 1, 1: 3, 2: 2}
    other, _ = kept_run(tmp_path, [[1]], k=1, name="b")
    assert other.num_found == 0
    assert len(list(tmp_path.glob("rollouts-*.jsonl"))) == 2


def test_what_failed_is_tried_again_and_what_ran_out_of_room_is_not(tmp_path: Path) -> None:
    long = ScriptedEngine(lambda request: [1] * 99 if request.id.group == 2 else [1, STOP])
    broken = [[RuntimeError("no sandbox")], [GraderError("no")], [0], [1]]
    first, _ = kept_run(tmp_path, broken, k=1, engine=long)
    assert first.failures == {"env_error": 1, "grader_error": 1, "truncated": 1}
    second, kept = kept_run(tmp_path, [[1], [0], [], []], k=1)
    assert (second.num_found, second.failures) == (2, {"truncated": 1})
    assert second.num_solved == {0: 1, 1: 0, 2: 0, 3: 1}
    text = kept.write_transcripts().read_text()
    assert text.count("== test/0, rollout 0: outcome 1\n") == 1
    assert "no sandbox" not in text, "of a rollout played twice only the later one is shown"
    assert "  read  | 12\n  wrote | 1" in text
    assert "truncated" in text


def test_a_line_cut_off_by_a_kill_is_played_again(tmp_path: Path) -> None:
    _, kept = kept_run(tmp_path, [[1], [1]], k=1)
    whole = kept.path.read_bytes()
    kept.path.write_bytes(whole[:-20])
    again, _ = kept_run(tmp_path, [[0], [0]], k=1)
    assert again.num_found == 1
    assert again.avg_at_k == 0.5
    kept.path.write_bytes(b'{"forma')
    assert kept_run(tmp_path, [[1], [1]], k=1)[0].num_found == 0


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    _, kept = kept_run(tmp_path, [[1]], k=1)
    head, *_ = kept.path.read_bytes().split(b"\n")
    kept.path.write_bytes(head + b'\n{"example": 3}\n')
    with pytest.raises(DataError, match="cannot be read"):
        kept_run(tmp_path, [[1]], k=1)
    kept.path.write_bytes(b'{"other": 1}\n')
    with pytest.raises(DataError, match="another evaluation"):
        kept_run(tmp_path, [[1]], k=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot keep rollouts"):
        kept_run(tmp_path / "file", [[1]], k=1)


def test_line_separators_in_a_text_are_no_line_ends_check_127(tmp_path: Path) -> None:
    separators = "a\u2028b\u0085c\rd\x1e"
    broken = [[RuntimeError(separators)], [1]]
    kept_run(tmp_path, broken, k=1)
    with open_rollouts(tmp_path, {"name": "a"}) as kept:
        text = kept.write_transcripts().read_text()
    assert text.count("\n") == len(text.splitlines()), "nothing but line breaks breaks a line"
    assert "a\\u2028b\\x85c\\rd\\x1e" in text


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with open_rollouts(tmp_path, {}), pytest.raises(DataError, match="in use"):
        open_rollouts(tmp_path, {}).__enter__()


async def test_a_full_disk_is_told_as_itself() -> None:
    path = Path("/dev/full")
    with path.open("ab", buffering=0) as file:
        kept = RolloutFile(path, file, [])
        with pytest.raises(OSError, match="No space left"):
            await evaluate(setting([[1.0], [1.0]]), problems=range(2), k=1, seed=0, kept=kept)


def test_only_the_same_problems_can_be_compared() -> None:
    one, other = run([[1, 0], [1, 1]], k=2), run([[0, 0], [1, 0]], k=2)
    found = compare(one, other)
    assert (found.difference, found.better, found.worse) == (0.5, 2, 0)
    for wrong in (run([[1, 1]], k=2), run([[1], [1]], k=1)):
        with pytest.raises(ConfigError, match="same problems"):
            compare(one, wrong)


# -- real models ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained decoder that speaks the calculator's alphabet."""
    place = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    tokenizer = warmstart.make_tokenizer()
    save_model(
        warmstart.make_model(warmstart.WarmStart(layers=1, width=16), tokenizer), tokenizer, place
    )
    return place


def test_the_host_evaluates_the_version_it_is_asked_for(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_from_table({"model": str(folder), "engine": {"max_batch": 8}})
    store = MemoryWeightStore(keep=2)
    first = dict(load_model(folder).named_parameters())
    other = {name: torch.randn_like(tensor) for name, tensor in first.items()}
    store.publish(0, first)
    store.publish(5, other)
    host = EvaluatorHost(folder, recipe, store)

    def evaluate(version: int) -> list:
        host.evaluate(17, version, 6, 2)
        while not (done := host.pump()):
            assert (host.busy(), host.num_waiting()) == (True, 1)
        ((number, found),) = done
        assert (number, host.busy()) == (17, False)
        if isinstance(found, Exception):
            raise found
        return found

    (before,) = evaluate(0)
    assert (before.version, before.num_problems, before.num_rollouts) == (0, 6, 12)
    (after,) = evaluate(5)
    assert (after.version, after.tokens == before.tokens) == (5, False)

    host.export(tmp_path / "best")
    exported = dict(load_model(tmp_path / "best").named_parameters())
    assert all(torch.equal(exported[name], other[name]) for name in other)
    assert find_subject(tmp_path / "best").version == 5

    store.publish(6, first)
    store.publish(7, first)
    with pytest.raises(WeightsError, match="version 0"):
        evaluate(0)
    assert evaluate(5)[0].tokens == after.tokens, "loaded once, kept"
    host.evaluate(18, 5, 6, 2)
    host.close()


async def test_an_evaluator_that_stands_still_is_noticed_and_a_slow_one_is_not(
    folder: Path, tmp_path: Path
) -> None:
    """The first evaluation answers between its slices; then the process is stopped."""
    recipe = recipe_from_table({"model": str(folder), "eval": {"timeout_s": 60.0}})
    store = FileWeightStore(tmp_path, keep=1)
    store.publish(0, dict(load_model(folder).named_parameters()))
    evaluator = await EvaluatorProcess.start(folder, recipe, store)
    try:
        (found,) = await evaluator.evaluate(0, 4)
        assert found.num_problems == 4
        hung = EvaluatorProcess(evaluator.worker, k=1, timeout_s=0.2)
        os.kill(evaluator.worker.pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"evaluator process .* did not answer 'num_waiting'"):
            await hung.evaluate(0, 4)
    finally:
        os.kill(evaluator.worker.pid, signal.SIGCONT)
        await evaluator.close()


def test_an_evaluation_repeats_itself_and_seeds_differ(folder: Path) -> None:
    def tokens(**kwargs) -> int:
        return evaluate_model(
            folder, k=2, problems=6, overrides=["engine.max_batch=5"], **kwargs
        ).tokens

    assert tokens(seed=1) == tokens(seed=1)
    assert len({tokens(seed=seed) for seed in range(4)}) > 1
    result = estr.evaluate(folder, problems=2, temperature=0.0, overrides=["task.num_terms=2"])
    assert (result.version, result.temperature, result.k) == (None, 0.0, 1)


def test_an_evaluation_goes_on_from_its_folder(folder: Path, tmp_path: Path) -> None:
    request = {"task": "calculator", "k": 2, "overrides": ["task.num_terms=2"], "out": tmp_path}
    first = evaluate_model(folder, problems=3, **request)
    more = evaluate_model(folder, problems=5, **request)
    plain = evaluate_model(folder, problems=5, **{**request, "out": None})
    assert (first.num_found, more.num_found, plain.num_found) == (0, 6, 0)
    assert more.num_solved == plain.num_solved
    assert more.tokens == plain.tokens
    assert len(list(tmp_path.glob("transcripts-*.txt"))) == 1
    other = evaluate_model(folder, problems=3, seed=1, **request)
    assert other.num_found == 0
    slower = evaluate_model(
        folder, problems=3, **{**request, "overrides": ["task.num_terms=2", "engine.max_batch=4"]}
    )
    assert slower.num_found == 6, "how it is run makes no difference"


def test_the_digest_is_that_of_what_writes(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert weights_digest(copy) == weights_digest(folder)
    (copy / "record.json").write_text("{}")
    assert weights_digest(copy) == weights_digest(folder)
    (copy / "tokenizer.json").write_text("{}")
    assert weights_digest(copy) != weights_digest(folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "merges.txt", "tokenizer.model"])
def test_the_digest_knows_templates_and_vocabularies(tmp_path: Path, name: str) -> None:
    before = weights_digest(tmp_path)
    (tmp_path / name).write_text("one")
    one = weights_digest(tmp_path)
    (tmp_path / name).write_text("two")
    assert len({before, one, weights_digest(tmp_path)}) == 3


def test_two_models_are_compared_on_the_task_of_the_first(folder: Path, tmp_path: Path) -> None:
    table = {"name": "r", "model": str(folder), "seed": 4, "eval": {"problems": 6, "k": 2}}
    task = {"name": "calculator", "num_terms": 2, "digits": 1}
    run_folder = RunFolder.create(recipe_from_table({**table, "task": task}), tmp_path)
    save_model(load_model(folder), warmstart.make_tokenizer(), run_folder.model_best)
    first, second, found = compare_models("r", "builtin", runs=tmp_path)
    assert (first.num_problems, first.k, first.seed) == (6, 2, 4)
    assert (second.num_problems, second.k, second.seed) == (6, 2, 4)
    assert found.difference == pytest.approx(first.avg_at_k - second.avg_at_k)
    alone = evaluate_model(
        "builtin", k=2, problems=6, seed=4, overrides=["task.num_terms=2", "task.digits=1"]
    )
    assert second.num_solved == alone.num_solved
    same = compare_models("r", folder, runs=tmp_path)[2]
    assert (same.difference, same.p_value) == (0.0, 1.0), "the same weights, the same draws"


class DemandingTask(CalculatorTask):
    eval_settings = MappingProxyType({"eval.k": 3, "sampling.max_new_tokens": 99})


def test_what_a_task_asks_for_stands_above_defaults_and_below_requests(
    folder: Path, tmp_path: Path
) -> None:
    name = f"{__name__}:DemandingTask"

    def settings_of(source: str | Path = folder, **request) -> tuple[int, int]:
        recipe = find_subject(source, weights="last", runs=tmp_path, **request).recipe
        return recipe.eval.k, recipe.sampling.max_new_tokens

    assert settings_of() == (1, 64)
    assert settings_of(task=name) == (3, 99)
    assert settings_of(overrides=[f"task={name}"]) == (3, 99)
    assert settings_of(task=name, overrides=["eval.k=2"]) == (2, 99)
    table = {"name": "r", "model": str(folder), "eval": {"k": 5}}
    for number, task in enumerate((name, "calculator")):
        run_folder = RunFolder.create(
            recipe_from_table({**table, "name": f"r{number}", "task": task}), tmp_path
        )
        shutil.copytree(folder, run_folder.model_last)
    assert settings_of("r0") == (5, 64), "the run's own task: as the run had it"
    assert settings_of("r1", task=name) == (3, 99)


def test_a_run_brings_its_recipe_and_its_weights(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_from_table(
        {"name": "r", "model": str(folder), "seed": 4, "task": {"name": "calculator", "digits": 1}}
    )
    run_folder = RunFolder.create(recipe, tmp_path)
    with pytest.raises(DataError, match="model/best"):
        find_subject("r", runs=tmp_path)
    tokenizer = warmstart.make_tokenizer()
    save_model(load_model(folder), tokenizer, run_folder.model_last)
    for source in ("r", run_folder.path):
        subject = find_subject(source, weights="last", runs=tmp_path)
        assert subject.folder == run_folder.model_last
        assert subject.recipe == recipe
    start = find_subject("r", weights="start", runs=tmp_path)
    assert (start.folder, start.version) == (folder, 0)
    same = find_subject("r", task="calculator", weights="last", runs=tmp_path)
    assert same.recipe.task["digits"] == 1, "the run's own task keeps its options"
    other = find_subject("r", task="arithmetic", weights="last", runs=tmp_path)
    assert other.recipe.task == {"name": "arithmetic"}
    changed = find_subject("r", overrides=["task.digits=2"], weights="last", runs=tmp_path)
    assert changed.recipe.task["digits"] == 2
    assert find_run("absent", tmp_path) is None


def test_a_label_that_a_run_of_several_tasks_does_not_have_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    tasks = [{"name": "calculator", "label": label} for label in ("easy", "hard")]
    recipe = recipe_from_table({"name": "r", "model": str(folder), "task": tasks})
    RunFolder.create(recipe, tmp_path)
    with pytest.raises(ConfigError, match=r"'esay' is neither a task of r \(easy, hard\) nor"):
        find_subject("r", task="esay", weights="start", runs=tmp_path)
    start = find_subject("r", task="countdown", weights="start", runs=tmp_path)
    assert start.recipe.task == {"name": "countdown"}


def test_one_of_several_tasks_is_reported_by_its_label(folder: Path, tmp_path: Path) -> None:
    tasks = [{"name": "calculator", "label": n, "digits": d} for n, d in (("easy", 1), ("hard", 2))]
    recipe = recipe_from_table({"name": "r", "model": str(folder), "task": tasks})
    RunFolder.create(recipe, tmp_path)
    for label in ("easy", "hard"):
        found = evaluate_model("r", task=label, problems=2, weights="start", runs=tmp_path)
        assert (found.task, found.to_json()["task"]) == (label, label)
    (shown,), _ = sample_rollouts(find_subject("r", task="hard", weights="start", runs=tmp_path), 1)
    assert shown.task == "hard"
    first, second, difference = compare_models(
        "r", folder, task="hard", problems=2, weights="start", runs=tmp_path
    )
    assert (first.task, second.task, difference.difference) == ("hard", "hard", 0.0)
    shipped = evaluate_model("r", task="calculator", problems=2, weights="start", runs=tmp_path)
    assert shipped.task == "calculator"


def test_a_run_started_from_the_warm_start_of_its_own_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = {"name": "calculator", "digits": 1}
    setting = warmstart.parse_warm_start("warmstart")
    assert setting is not None
    made = warmstart.cached_folder(own, setting)
    made.mkdir(parents=True)
    (made / "record.json").write_text("{}")
    RunFolder.create(recipe_from_table({"name": "r", "model": "warmstart", "task": own}), tmp_path)
    start = find_subject("r", task="lookup", weights="start", runs=tmp_path)
    assert start.folder == made, "and none is made of the task that is played"
    assert start.recipe.task == {"name": "lookup"}


def test_what_is_neither_run_nor_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is no run .*runs/nowhere.* and no model"):
        find_subject("nowhere", runs=tmp_path / "runs")
