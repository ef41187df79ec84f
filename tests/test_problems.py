"""Which problem comes next: shares, epochs, pass rates, resume; several tasks in the loop."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estr.check import check_recipe
from estr.config import Recipe, load_recipe, recipe_from_table
from estr.engine import ScriptedEngine
from estr.environment import Reply, ScriptedEnvironment
from estr.environments import build_task, build_tasks
from estr.errors import ConfigError
from estr.evaluation_result import EvalResult
from estr.evaluations import mean_and_interval
from estr.options.run import CurriculumOptions
from estr.options.tasks import entries
from estr.problems import Problems, check_curriculum
from estr.rollout_state import SegmentPool
from estr.subject import find_subject, resolve_play
from estr.types import RolloutId, SamplingSettings, Segment, Trajectory
from loop_parts import STOP, CoinTask, build, recipe

TWO = {
    "task": [
        {"name": "calculator", "label": "easy", "num_terms": 2, "weight": 3},
        {"name": "calculator", "label": "hard", "num_terms": 4},
    ]
}


def played(task: str, problem: int, outcomes: list[float | None]) -> list[Trajectory]:
    return [
        Trajectory(
            id=RolloutId(0, 0, i),
            task=task,
            problem=problem,
            segments=(Segment.context([1]),),
            turns=(),
            sampling=SamplingSettings(),
            status="ok",
            dispatch_version=0,
            outcome=outcome,
            reward=outcome,
        )
        for i, outcome in enumerate(outcomes)
    ]


def take(problems: Problems, number: int) -> list[tuple[str, int] | None]:
    return [problems.next() for _ in range(number)]


# -- the order ------------------------------------------------------------------------------------


def test_one_task_gives_its_problems_in_order_for_its_epochs() -> None:
    problems = Problems({"coin": CoinTask(3)}, epochs=2)
    assert take(problems, 7) == [("coin", i) for i in (0, 1, 2, 0, 1, 2)] + [None]


def test_weights_decide_the_shares_and_each_task_keeps_its_order_check_148() -> None:
    problems = Problems({"a": CoinTask(), "b": CoinTask()}, weights={"a": 3.0, "b": 1.0})
    taken = take(problems, 8)
    assert [name for name, _ in taken] == list("aabaaaba")
    assert [i for name, i in taken if name == "a"] == list(range(6))
    assert [i for name, i in taken if name == "b"] == [0, 1]


@given(st.lists(st.floats(0.05, 20.0), min_size=2, max_size=5), st.integers(1, 120))
def test_every_task_has_its_share_at_any_time(weights: list[float], number: int) -> None:
    names = [f"t{i}" for i in range(len(weights))]
    problems = Problems(
        {name: CoinTask() for name in names}, weights=dict(zip(names, weights, strict=True))
    )
    counts = Counter(name for name, _ in take(problems, number))
    for name, weight in zip(names, weights, strict=True):
        assert abs(counts[name] - number * weight / sum(weights)) < len(weights)


def test_a_task_at_its_end_leaves_and_the_others_go_on() -> None:
    problems = Problems({"a": CoinTask(2), "b": CoinTask(4)})
    taken = take(problems, 7)
    assert taken[-1] is None
    assert Counter(name for name, _ in taken[:-1]) == {"a": 2, "b": 4}


# -- pass rates -----------------------------------------------------------------------------------


def test_a_mastered_problem_is_passed_over_so_often_and_then_tried_again() -> None:
    problems = Problems({"coin": CoinTask(3)}, epochs=5, curriculum=CurriculumOptions(skip=2))
    take(problems, 3)
    problems.record(played("coin", 1, [1.0, 1.0]))
    problems.record(played("coin", 2, [1.0, 0.0]))
    assert [p for _, p in take(problems, 7)] == [0, 2, 0, 2, 0, 1, 2]


def test_limits_are_pass_rates() -> None:
    options = CurriculumOptions(skip=1, low=0.25, high=0.75)
    problems = Problems({"coin": CoinTask(4)}, epochs=2, curriculum=options)
    take(problems, 4)
    for problem, rate in enumerate([0.25, 0.5, 0.75, 0.0]):
        outcomes = [1.0] * int(4 * rate) + [0.0] * int(4 - 4 * rate)
        problems.record(played("coin", problem, [*outcomes, None]))
    assert take(problems, 2) == [("coin", 1), None]


def test_data_that_is_all_mastered_ends_instead_of_hanging() -> None:
    problems = Problems({"coin": CoinTask(2)}, epochs=3, curriculum=CurriculumOptions(skip=9))
    take(problems, 2)
    for problem in (0, 1):
        problems.record(played("coin", problem, [1.0, 1.0]))
    assert problems.next() is None


def test_a_task_that_is_always_solved_gives_way() -> None:
    tasks = {"known": CoinTask(), "open": CoinTask()}
    problems = Problems(tasks, curriculum=CurriculumOptions(floor=0.1))
    for _ in range(300):
        name, problem = problems.next()
        problems.record(played(name, problem, [1.0, float(name == "known")]))
    counts = Counter(name for name, _ in take(problems, 110))
    assert counts["known"] == pytest.approx(10, abs=1), "a tenth of the weight of the other"
    assert problems.pass_rates()["known"] > 0.9


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 40))
def test_a_resume_goes_on_with_the_same_order(solved: list[bool], cut: int) -> None:
    def fresh() -> Problems:
        return Problems(
            {"a": CoinTask(3), "b": CoinTask()},
            weights={"a": 2.0},
            epochs=50,
            curriculum=CurriculumOptions(skip=2, floor=0.2),
        )

    straight, orders = fresh(), []
    resumed = straight
    for place, right in enumerate(solved):
        if place == cut:
            resumed = fresh()
            resumed.restore(json.loads(json.dumps(straight.state())))
        pair = straight.next(), resumed.next() if resumed is not straight else None
        orders.append(pair)
        name, problem = pair[0]
        for one in {id(straight): straight, id(resumed): resumed}.values():
            one.record(played(name, problem, [float(right), 1.0]))
    assert all(b is None or a == b for a, b in orders)


# -- recipes --------------------------------------------------------------------------------------


def test_several_tables_are_a_mix_and_come_back_from_toml(tmp_path: Path) -> None:
    mixed = recipe_from_table(TWO)
    assert [(e.label, e.weight) for e in entries(mixed.task)] == [("easy", 3.0), ("hard", 1.0)]
    file = tmp_path / "mixed.toml"
    file.write_text(mixed.to_toml())
    assert load_recipe(file) == mixed
    assert list(build_tasks(mixed.task)) == [t.name for t in build_tasks(mixed.task).values()]
    with pytest.raises(ConfigError, match="one task, not 2: easy, hard"):
        build_task(mixed.task)


def test_one_table_in_a_list_is_that_task() -> None:
    assert recipe_from_table({"task": ["lookup"]}).task == {"name": "lookup"}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"task": ["calculator", "calculator"]}, 'label = "calculator-2"'),
        ({"task": [{"name": "lookup", "weight": 0}, "countdown"]}, r"task\[0\].weight must be"),
        ({"task": [{"name": "lookup", "weight": True}, "countdown"]}, r"task\[0\].weight must be"),
        ({"task": ["lookup", {"num_terms": 3}]}, r"task\[1\] has no name"),
        ({"task": ["lookup", {"name": "countdown", "label": "a/b"}]}, "must be a text"),
        ({"task": {"name": "mix"}}, r"write several tasks as \[\[task\]\]"),
        ({"curriculum": {"low": 0.5, "high": 0.5}}, "0 <= low < high <= 1"),
        ({"curriculum": {"floor": 0.0}}, r"floor must be in \(0, 1\]"),
        ({"curriculum": {"skipp": 1}}, "curriculum.skip"),
    ],
)
def test_what_is_refused(table: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe_from_table(table)


def test_a_curriculum_that_cannot_act_is_refused() -> None:
    endless = recipe_from_table({"curriculum": {"skip": 1}})
    with pytest.raises(ConfigError, match="endless and never do"):
        check_curriculum(endless, [CoinTask()])
    alone = recipe_from_table({"curriculum": {"floor": 0.5}})
    with pytest.raises(ConfigError, match="there is one, coin"):
        check_curriculum(alone, [CoinTask(3)])
    check_curriculum(endless, [CoinTask(3)])


def test_check_looks_at_every_task(tmp_path: Path) -> None:
    file = tmp_path / "mixed.toml"
    file.write_text(recipe_from_table(TWO).to_toml())
    findings = check_recipe(file)
    assert findings.errors == []
    assert "groups are mixed by weight: easy 75%, hard 25%" in findings.notes
    assert {t.task for t in findings.shown} == {"easy", "hard"}
    broken = recipe_from_table({"task": ["calculator", {"name": "lookup", "num_hopps": 2}]})
    file.write_text(broken.to_toml())
    assert any("num_hops" in error for error in check_recipe(file).errors)


def test_one_of_the_tasks_is_chosen_by_its_label(tmp_path: Path) -> None:
    run = tmp_path / "mixed"
    run.mkdir()
    (run / "config.toml").write_text(recipe_from_table(TWO).to_toml())
    whole = find_subject(run, weights="start")
    assert len(entries(whole.recipe.task)) == 2
    with pytest.raises(ConfigError, match=r"not 2 \(easy, hard\); say --task NAME"):
        resolve_play(whole.folder, whole.recipe, temperature=1.0)
    subject = find_subject(run, task="hard", weights="start")
    assert subject.recipe.task == {"name": "calculator", "num_terms": 4}
    other = find_subject(run, task="lookup", weights="start")
    assert other.recipe.task["name"] == "lookup"


# -- in the loop ----------------------------------------------------------------------------------


class Named(CoinTask):
    """A coin of another name, whose prompt says which."""

    def __init__(self, name: str, digit: str, size: int | None = None) -> None:
        super().__init__(size)
        self.name = name
        self._digit = digit

    def make(self, split: str, index: int) -> ScriptedEnvironment:
        self.made.append(index)
        return ScriptedEnvironment(self._digit, [Reply(outcome=next(self._coin))])


def mixed_loop(tmp_path: Path, the_recipe: Recipe, name: str = "run"):
    first, second = Named("first", "3"), Named("second", "5")
    engine = ScriptedEngine(lambda request: [1, 2, STOP])
    return build(tmp_path / name, the_recipe, task=first, engine=engine, other_tasks=[second])


async def test_a_mixed_run_plays_each_group_in_its_own_task(tmp_path: Path) -> None:
    loop, trainer = mixed_loop(tmp_path, recipe())
    groups: list = []
    train = trainer.train

    async def watched(minibatches):
        groups.extend(g for m in minibatches for g in m)
        return await train(minibatches)

    trainer.train = watched
    with loop.writer:
        await loop.run()
    assert Counter(g.trajectories[0].task for g in groups) == {"first": 5, "second": 5}
    for group in groups:
        for t in group.trajectories:
            assert t.segments[0].token_ids[0] == {"first": 3, "second": 5}[t.task]
    rows = [json.loads(line) for line in loop.writer.path.read_text().splitlines()]
    assert rows[0]["task/first/outcome_mean"] == 0.5
    assert rows[0]["task/second/num_trajectories"] == 2.0
    assert "task/first/pass_rate" in rows[0]


async def test_a_resumed_mixed_run_keeps_each_cursor(tmp_path: Path) -> None:
    loop, _ = mixed_loop(tmp_path, recipe(steps=2))
    with loop.writer:
        await loop.run()
    state = json.loads(json.dumps(loop.state({})[0]))
    again, _ = mixed_loop(tmp_path, recipe(steps=4), "again")
    again.writer.close()
    again.restore(state, SegmentPool().columns())
    before = loop.problems.state()
    assert again.problems.state() == json.loads(json.dumps(before))
    assert before["first"]["cursor"] == before["second"]["cursor"] > 0


async def test_consumed_groups_are_recorded(tmp_path: Path) -> None:
    loop, _ = build(tmp_path, recipe(curriculum={"skip": 1}), task=CoinTask(4))
    with loop.writer:
        await loop.run()
    assert set(dict(loop.problems.state()["coin"]["rates"]).values()) == {0.5}


def test_accuracy_over_tasks_is_their_mean() -> None:
    def result(average: float, lower: float) -> EvalResult:
        fields = dict.fromkeys(EvalResult.__dataclass_fields__)
        return EvalResult(**{**fields, "avg_at_k": average, "avg_interval": (lower, 1.0)})

    assert mean_and_interval([result(0.5, 0.4)]) == (0.5, 0.4, 1.0)
    mean, low, high = mean_and_interval([result(0.5, 0.2), result(1.0, 0.6)])
    assert mean == 0.75
    assert low == pytest.approx(0.75 - 0.5 / 2)
    assert high == pytest.approx(0.75 + 0.5 / 2)
