"""Data sets of reasoning-gym: problems, scores, and what their scorers must not give away."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="the extra `reasoning` is not installed")

from estr.environment import Action, Reply
from estr.environments import build_task, reasoning_gym
from estr.environments import reasoning_gym_process as process
from estr.environments.reasoning_gym import ReasoningGymTask, extract_answer
from estr.errors import ConfigError, EnvError, GraderError


def task(dataset: str = "chain_sum", **options: Any) -> ReasoningGymTask:
    made = build_task({"name": "reasoning_gym", "dataset": dataset, **options})
    assert isinstance(made, ReasoningGymTask)
    return made


def asked(dataset: str, ask: str, index: int = 0, **more: Any) -> Any:
    """What the process beside a task answers, here."""
    question = {"ask": ask, "dataset": dataset, "config": {}, "split": "train", "seed": 5}
    return process.answer({**question, "index": index, **more})


def score(dataset: str, reply: str, index: int = 0) -> float:
    return float(asked(dataset, "score", index, reply=reply))


def play(of: ReasoningGymTask, text: str, finish: Any = "stop") -> tuple[Any, Reply]:
    async def both() -> tuple[Any, Reply]:
        environment = of.make("test", 3)
        prompt = await environment.start()
        reply = await environment.step(Action(text, (), finish))
        await environment.close()
        return prompt, reply

    return asyncio.run(both())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("I put it between <answer> tags: <answer>7</answer>", "7"),
        ("<answer>6</answer> no, <answer> 7 </answer> it is </answer>", "7"),
        ("<answer>7</answer> or <answer>8", "7"),
        ("</answer>7<answer>", None),
        ("<answer>" * 100_000, None),
        ("<answer>" * 100_000 + "7</answer>", "7"),
    ],
)
def test_the_last_answer_counts_whatever_stands_before_it(text: str, said: str | None) -> None:
    assert extract_answer(text) == said


def test_a_problem_is_asked_and_its_gold_answer_is_right() -> None:
    made = task(config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    assert made.size("train") is None
    (gold,) = made.gold("test", 3)
    (prompt,), reply = play(made, f"I think {gold}")
    assert prompt["content"].startswith("State the final answer")
    assert prompt["content"].endswith("between <answer> and </answer>.")
    assert reply == Reply(outcome=1.0)
    said = extract_answer(gold)
    for wrong in (str(said), f"<answer>{said} or 7</answer>", "<answer></answer>", "<answer>"):
        assert play(made, wrong)[1] == Reply(outcome=0.0)
    assert play(made, gold, "length")[1] == Reply(outcome=0.0)
    assert play(made, f"<answer>0</answer> no, {gold}")[1] == Reply(outcome=1.0)


def test_a_problem_is_the_same_in_every_process() -> None:
    """Six data sets draw from sets of texts, whose order differs from process to process."""
    made = [task(name) for name in ("isomorphic_strings", "ransom_note", "word_ladder")]
    before = [one.problem(split, 7) for one in made for split in ("train", "test")]
    reasoning_gym._shared_pool().close()  # the next question starts another process
    assert [one.problem(split, 7) for one in made for split in ("train", "test")] == before


def test_no_question_is_in_both_splits_and_no_seed_moves_the_test() -> None:
    def questions(split: str, seed: int) -> list[str]:
        config = {"min_value": 1, "max_value": 9}
        return [
            asked("gcd", "problem", i, split=split, seed=seed, config=config)["question"]
            for i in range(60)
        ]

    tests = questions("test", 1)
    assert tests == questions("test", 2)
    assert questions("train", 1) != questions("train", 2)
    assert not set(tests) & {*questions("train", 1), *questions("train", 2)}


# -- scorers that give too much ------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset", ["countdown", "fraction_simplification", "puzzle24", "color_cube_rotation"]
)
@pytest.mark.parametrize("reply", ["", "I do not know"])
def test_nothing_said_earns_nothing(dataset: str, reply: str) -> None:
    assert score(dataset, reply) == 0.0


def test_where_any_reply_scores_in_full_only_the_answer_is_right() -> None:
    """The scorer of game_of_life_halting asks only whether a text is empty."""
    golds = [asked("game_of_life_halting", "problem", i)["gold"] for i in range(12)]
    assert set(golds) == {"True", "False"}
    for index, gold in enumerate(golds):
        other = "False" if gold == "True" else "True"
        assert score("game_of_life_halting", gold, index) == 1.0
        assert score("game_of_life_halting", gold.lower(), index) == 1.0
        assert score("game_of_life_halting", other, index) == 0.0
        assert score("game_of_life_halting", "I do not know", index) == 0.0


def test_a_prefix_of_the_answer_is_not_the_answer() -> None:
    """The scorer of coin_flip compares as many characters as the shorter text has."""
    gold = asked("coin_flip", "problem", seed=123)["gold"]
    assert gold == "0.1640625"
    for reply, worth in (("0", 0.0), ("0.1", 0.0), ("0.1640625", 1.0), ("21/128", 1.0)):
        assert asked("coin_flip", "score", seed=123, reply=reply) == worth


def test_a_lazy_reply_may_be_the_right_one() -> None:
    for index in range(6):
        gold = asked("circuit_logic", "problem", index)["gold"]
        assert score("circuit_logic", gold, index) == 1.0
        assert score("circuit_logic", str(1 - int(gold)), index) == 0.0


def test_a_scorer_may_compute_with_its_own_problem() -> None:
    """The scorer of bitwise_arithmetic evaluates the problem's expression."""
    gold = asked("bitwise_arithmetic", "problem")["gold"]
    assert score("bitwise_arithmetic", gold) == 1.0
    assert score("bitwise_arithmetic", hex(int(gold, 16) + 1)) == 0.0


def test_a_reply_that_a_scorer_cannot_read_is_wrong_not_unscored() -> None:
    """The scorer of prime_factorization raises for what is no number."""
    gold = asked("prime_factorization", "problem")["gold"]
    assert score("prime_factorization", gold) == 1.0
    assert score("prime_factorization", "two times three") == 0.0


def test_data_sets_without_an_answer_have_no_gold_reply() -> None:
    assert asked("graph_color", "problem")["gold"] is None
    assert task("graph_color").gold("train", 0) == []


@pytest.mark.parametrize("dataset", ["string_insertion", "spiral_matrix", "binary_matrix"])
def test_a_reply_is_never_evaluated(dataset: str, tmp_path: Path) -> None:
    """Their scorers evaluate the reply, beside the right answer."""
    assert score(dataset, 'entry["answer"]') == 0.0
    witness = tmp_path / "witness"
    assert score(dataset, f"[open({str(witness)!r}, 'w').write('x')]") == 0.0
    assert not witness.exists()


def test_a_scorer_can_neither_write_nor_start_anything(tmp_path: Path) -> None:
    """Some let sympy parse the reply, which evaluates it as Python."""
    made = task("puzzle24")
    witness = tmp_path / "witness"
    writes = f"open({str(witness)!r}, 'w').write('24')"
    makes = f"__import__('os').mkdir({str(witness)!r})"
    for reply in (writes, makes):
        assert made.score("train", 0, reply) == 0.0
    assert not witness.exists()
    assert os.listdir(tmp_path) == []


def test_a_score_that_takes_forever_is_killed_and_is_no_wrong_answer() -> None:
    made = task("puzzle24", problem_timeout_s=1.0, score_timeout_s=1.0)
    with pytest.raises(GraderError, match="puzzle24 cannot score"):
        made.score("train", 0, "9**9**9**9")
    (gold,) = task("puzzle24").gold("train", 0)
    assert task("puzzle24").score("train", 0, str(extract_answer(gold))) == 1.0


def test_partial_credit_is_what_a_senseless_reply_does_not_get() -> None:
    full, partial = task("countdown"), task("countdown", credit="partial")
    (gold,) = full.gold("train", 0)
    right = str(extract_answer(gold))
    assert full.score("train", 0, right) == partial.score("train", 0, right) == 1.0
    for wrong in ("", "1", "2+2"):  # the scorer gives them 0.01 and 0.05
        assert full.score("train", 0, wrong) == partial.score("train", 0, wrong) == 0.0
    close = task("figlet_font", credit="partial")
    (gold,) = close.gold("train", 0)
    spoiled = str(extract_answer(gold))[:-1] + "#"
    assert 0.0 < close.score("train", 0, spoiled) < 1.0


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dataset": "chess"}, "there is no data set 'chess'; there are .*chain_sum"),
        (
            {"config": {"min_term": 2}},
            r"task\.config\.min_term of chain_sum.*min_terms",
        ),
        ({"config": {"min_terms": "two"}}, "min_terms"),
        ({"config": {"min_terms": 5, "max_terms": 2}}, "task.dataset = 'chain_sum'"),
        ({"config": {"seed": 3}}, "see task.seed"),
        ({"credit": "some"}, "credit"),
        ({"score_timeout_s": 0}, "score_timeout_s must be finite and above 0"),
        ({"problem_timeout_s": float("inf")}, "problem_timeout_s must be finite"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        task(**options)


def test_several_data_sets_may_be_mixed() -> None:
    parts = [{"name": "gcd", "weight": 1.0}, {"name": "lcm", "config": {"max_value": 20}}]
    made = task("composite", config={"datasets": parts})
    seen = {made.problem("train", i)["question"].split()[2] for i in range(12)}
    assert len(seen) > 1
    (gold,) = made.gold("train", 0)
    assert made.score("train", 0, str(extract_answer(gold))) == 1.0


def test_too_few_different_questions_are_named() -> None:
    few = {"min_value": 2, "max_value": 3, "min_numbers": 2, "max_numbers": 2}
    made = task("gcd", config=few)
    assert made.problem("train", 0)["gold"] in {"1", "2", "3"}
    with pytest.raises(EnvError, match="gave no test question: it has too few different ones"):
        made.problem("test", 0)
