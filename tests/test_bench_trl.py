"""`estr bench trl`: the task that both sides play, and the quick form where TRL is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from estr.bench import trl
from estr.bench.trl_task import GradedOptions, GradedTask, grade
from estr.config import recipe_from_table
from estr.environment import Action
from estr.environments import build_task
from estr.errors import ConfigError

PEERS = Path(__file__).parents[1] / "conformance" / ".venvs"


def test_answers_are_graded_with_or_without_their_line_break() -> None:
    assert grade("73\n", "73", "sum") == grade("73", "73", "sum") == 1.0
    assert grade("74", "73", "sum") == grade("", "73", "sum") == 0.0
    assert grade("ab\n", "73", "parity") == grade("", "73", "parity") == 1.0
    assert grade("abc", "73", "parity") == 0.0


async def test_the_environment_grades_as_the_reward_function_does() -> None:
    task = GradedTask(GradedOptions())
    environment = task.make("train", 3)
    prompt = await environment.start()
    (gold,) = task.gold("train", 3)
    assert prompt == await task.prompt("train", 3)
    assert prompt.endswith("=")
    reply = await environment.step(Action(gold, (), "stop"))
    assert reply.outcome == await task.outcome(3, gold + "\n", gold) == 1.0


def test_both_regimes_are_recipes() -> None:
    for regimes in (trl.REGIMES, trl.quick_regimes()):
        for regime in regimes.values():
            recipe = trl._recipe(Path("model"), regime)
            assert recipe_from_table({"task": recipe.task}).task == recipe.task
            assert isinstance(build_task(recipe.task), GradedTask)
            assert 1 <= regime.warmup_steps <= regime.steps - 2


def test_without_trl_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--peers"):
        trl.run(quick=True)
    with pytest.raises(ConfigError, match=r"conformance/install.py trl"):
        trl.run(quick=True, peers=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not (PEERS / "trl").is_dir(), reason="no TRL; python conformance/install.py trl makes it"
)
def test_the_quick_form_has_both_sides_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two threads that spin for each other take for ever where other work has the cores.
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    figures = trl.run(quick=True, peers=PEERS)
    assert figures["ratio"] > 0
    for regime in figures["regimes"].values():
        assert set(regime["sides"]) | set(regime["left_out"]) == {"estr", *trl.FORMS}
        assert {"estr", "trl"} <= set(regime["sides"])
        for side in regime["sides"].values():
            assert side["samples_per_s"] > 0 < side["step_cpu_s"]
            assert 1 <= side["length"] <= regime["regime"]["max_new_tokens"]
            assert 0 <= side["outcome"] <= 1
