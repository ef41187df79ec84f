"""Evaluation: pass@k, intervals, failures in the denominator, the pinned version, the host."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import estr
from estr import warmstart
from estr.config import recipe_from_table
from estr.engine import Request, ScriptedEngine
from estr.environment import Environment, Reply, ScriptedEnvironment
from estr.errors import ConfigError, DataError, EngineError, GraderError, WeightsError
from estr.evaluation import (
    EVALUATION_RUNS,
    EvaluatorHost,
    bootstrap_intervals,
    evaluate,
    evaluate_model,
    pass_at_k,
)
from estr.models import load_model, save_model
from estr.options.run import RolloutOptions
from estr.rollout import RolloutSetting
from estr.run_folder import RunFolder
from estr.subject import find_run, find_subject
from estr.types import SamplingSettings
from estr.weights import MemoryWeightStore
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


def run(results, k: int, **kwargs):
    what = setting(results, **kwargs)
    return asyncio.run(evaluate(what, problems=range(len(results)), k=k, seed=3))


# -- pass@k -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 1, 4, 1.0),
        (4, 2, 2, 0.8333333333333334),
        (4, 0, 4, 0.0),
    ],
)
def test_pass_at_k_check_135(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, c, k) == value


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
@settings(deadline=None, max_examples=60)
def test_pass_at_k_is_the_share_of_subsets_check_135(case: tuple[int, int]) -> None:
    n, c = case
    for k in range(1, n + 1):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_exact_where_binomials_are_huge() -> None:
    assert pass_at_k(20_000, 1, 5_000) == 0.25
    assert pass_at_k(20_000, 20_000, 1) == 1.0
    assert 0.0 < 1.0 - pass_at_k(1000, 10, 900) < 1e-9


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_the_impossible(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="0 <= c <= n"):
        pass_at_k(n, c, k)


# -- intervals --------------------------------------------------------------------------------


def test_bootstrap_intervals_are_those_of_a_binomial() -> None:
    half = np.repeat([0.0, 1.0], 200)[:, None]
    ((low, high),) = bootstrap_intervals(half, seed=0)
    spread = 1.959964 * np.sqrt(0.25 / 400)
    assert low == pytest.approx(0.5 - spread, abs=0.006)
    assert high == pytest.approx(0.5 + spread, abs=0.006)


def test_bootstrap_draws_whole_problems_and_repeats_itself() -> None:
    values = np.random.default_rng(0).random((30, 1))
    both = np.hstack([values, 2 * values])
    first, second = bootstrap_intervals(both, seed=5)
    assert second == pytest.approx([2 * v for v in first])
    assert bootstrap_intervals(both, seed=5) == [first, second]
    assert bootstrap_intervals(both, seed=6) != [first, second]
    assert bootstrap_intervals(np.ones((10, 1)), seed=0) == [(1.0, 1.0)]


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
        ({"seed": -1}, "seed must be"),
        ({"seed": 1 << 63}, "seed must be"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
async def test_impossible_requests_are_refused(change, match: str) -> None:
    request = {"problems": [0], "k": 1, "seed": 0, **change}
    with pytest.raises(ConfigError, match=match):
        await evaluate(setting([[1]]), **request)


def test_json_is_one_plain_object() -> None:
    table = json.loads(json.dumps(run([[1, 0], [RuntimeError("x"), 0]], k=2).to_json()))
    for key in ("task", "k", "avg_at_k", "pass_at_k", "intervals", "num_problems", "failures"):
        assert key in table
    assert table["pass_at_k"] == {"1": 0.25, "2": 0.5}
    assert set(table["intervals"]["pass_at_k"]) == {"1", "2"}
    assert table["failures"] == {"env_error": 1}


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
    before = host.evaluate(0, 6, 2)
    assert (before.version, before.num_problems, before.num_rollouts) == (0, 6, 12)
    after = host.evaluate(5, 6, 2)
    assert (after.version, after.tokens == before.tokens) == (5, False)

    host.export(tmp_path / "best")
    exported = dict(load_model(tmp_path / "best").named_parameters())
    assert all(torch.equal(exported[name], other[name]) for name in other)
    assert find_subject(tmp_path / "best").version == 5

    store.publish(6, first)
    store.publish(7, first)
    with pytest.raises(WeightsError, match="version 0"):
        host.evaluate(0, 6, 2)
    assert host.evaluate(5, 6, 2).tokens == after.tokens, "loaded once, kept"


def test_an_evaluation_repeats_itself_and_seeds_differ(folder: Path) -> None:
    def tokens(**kwargs) -> int:
        return evaluate_model(
            folder, k=2, problems=6, overrides=["engine.max_batch=5"], **kwargs
        ).tokens

    assert tokens(seed=1) == tokens(seed=1)
    assert len({tokens(seed=seed) for seed in range(4)}) > 1
    result = estr.evaluate(folder, problems=2, temperature=0.0, overrides=["task.num_terms=2"])
    assert (result.version, result.temperature, result.k) == (None, 0.0, 1)


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


def test_what_is_neither_run_nor_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere is no run .*runs/nowhere.* and no model"):
        find_subject("nowhere", runs=tmp_path / "runs")
