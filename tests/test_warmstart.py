"""Warm starts: what is learned from, that it repeats itself, where it is kept, how it is named."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from estr import warmstart
from estr.chat import Codec
from estr.check import check_recipe
from estr.config import recipe_from_table
from estr.environments import build_task
from estr.environments.calculator import CalculatorOptions, CalculatorTask
from estr.environments.demonstrations import ALPHABET, heavy_tailed, wrong_digit
from estr.errors import ConfigError
from estr.models import load_model, load_tokenizer
from estr.subject import find_subject, model_folder
from estr.warmstart import WarmStart, cached_folder, find_twin, make_tokenizer, parse_warm_start

TINY = WarmStart(seed=3, steps=2, batch_size=4, width=16, layers=1, num_measured=4)
TWINS = ("calculator", "countdown", "lookup")


# -- demonstrations ------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [{"name": name} for name in TWINS], ids=TWINS)
def test_demonstrations_keep_to_the_alphabet_and_fit_the_model(table: dict[str, object]) -> None:
    task = find_twin(table)
    codec = Codec(make_tokenizer())
    rng = random.Random(0)
    for index in range(300):
        spans = list(task.demonstrate(index, rng))
        text = "".join(piece for piece, _ in spans)
        assert set(text) <= set(ALPHABET)
        assert codec.decode(codec.encode_prompt(text)) == text
        assert [written for _, written in spans] == [i % 2 == 1 for i in range(len(spans))]
        assert all(piece[-1] in task.stop for piece, written in spans if written)
        assert len([1 for _, written in spans if written]) <= task.max_turns
        assert len(text) < 200


@pytest.mark.parametrize("order", ["fixed", "random"])
@pytest.mark.parametrize("name", TWINS)
async def test_a_player_without_slips_always_succeeds(name: str, order: str) -> None:
    from estr.environment import Action

    table = {"name": name, "error_rate": 0.0}
    task = find_twin(table if name == "lookup" else {**table, "order": order})
    for index in range(60):
        environment = task.make("train", index)
        prompt, *spans = task.demonstrate(index, random.Random(index))
        assert prompt == (await environment.start(), False)
        for (written, _), answered in zip(spans[::2], [*spans[1::2], None], strict=True):
            reply = await environment.step(Action(written[:-1], (), "stop"))
            assert answered is None or reply.observation == answered[0]
        assert reply.outcome == 1.0


def test_a_demonstration_without_slips_in_fixed_order_is_the_gold_answer() -> None:
    task = CalculatorTask(CalculatorOptions(error_rate=0.0))
    for index in range(50):
        spans = list(task.demonstrate(index, random.Random(index)))
        written = [text[:-1] for text, is_written in spans if is_written]
        assert written == list(task.gold("train", index))


def test_demonstrated_turns_are_wrong_at_the_stated_rate_and_carry_on() -> None:
    task = CalculatorTask(CalculatorOptions())
    rng = random.Random(0)
    num_turns, num_right, refused = 0, 0, 0
    for index in range(2000):
        spans = list(task.demonstrate(index, rng))
        calls = [(a, b) for (a, is_call), (b, _) in pairwise(spans) if is_call]
        assert [answer for _, answer in calls] == [task.call(call[:-1]) for call, _ in calls]
        refused += sum(answer == "!" for _, answer in calls)
        num_turns += len(calls) + 1
        right = int(spans[-1][0][:-1]) == sum(task.terms("train", index)) % 100
        num_right += right
    # A third of the spoilt calls is refused and done again, so four turns go well at a rate of
    # (1 - 0.22 * 2/3)^3 (1 - 0.22), and a little above, where two errors make up for each other.
    assert num_right / 2000 == pytest.approx(0.49, abs=0.04)
    assert refused / num_turns == pytest.approx(0.22 / 3 * 0.76, abs=0.015)


def test_a_wrong_digit_is_one_wrong_digit() -> None:
    rng = random.Random(0)
    for _ in range(100):
        spoilt = wrong_digit("[12+34", rng)
        assert len(spoilt) == 6
        assert sum(a != b for a, b in zip(spoilt, "[12+34", strict=True)) == 1
        assert (spoilt[0], spoilt[3]) == ("[", "+")


def test_heavy_tailed_sizes_follow_their_law() -> None:
    sizes = [heavy_tailed(4, 16, "x", i) for i in range(6000)]
    assert (min(sizes), max(sizes)) == (4, 16)
    # P(size >= n) = (4/n - 4/17) / (1 - 4/17)
    for n, share in ((5, 0.7385), (8, 0.3462), (16, 0.0192)):
        assert sum(size >= n for size in sizes) / 6000 == pytest.approx(share, abs=0.025)
    assert {heavy_tailed(4, 0, "x", i) for i in range(50)} == {4}
    assert {heavy_tailed(4, 4, "x", i) for i in range(50)} == {4}


# -- making one ----------------------------------------------------------------------------------


def test_only_written_tokens_are_learned_and_padding_is_not() -> None:
    tokenizer = make_tokenizer()
    task = CalculatorTask(CalculatorOptions())
    ids, labels = warmstart._batch(task, range(16), tokenizer, random.Random(0))
    codec = Codec(tokenizer)
    rng = random.Random(0)
    for row in range(16):
        written = "".join(text for text, own in task.demonstrate(row, rng) if own)
        learned = labels[row] != -100
        assert codec.decode(ids[row][learned].tolist()) == written
        assert torch.equal(ids[row][learned], labels[row][learned])


def test_making_a_model_repeats_itself_and_writes_a_record(tmp_path: Path) -> None:
    records = [warmstart.make(TINY, tmp_path / name) for name in ("a", "b")]
    assert records[0] == records[1] == json.loads((tmp_path / "a" / "record.json").read_text())
    first, second = (load_model(tmp_path / name).state_dict() for name in ("a", "b"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(records[0]["loss_every_20_steps"]) == 2
    assert records[0]["command"] == "estr warmstart --out FOLDER --seed 3 --steps 2"
    table = {"name": "lookup", "num_hops": 3}
    record = warmstart.make(replace(TINY, steps=300 - 299), tmp_path / "c", task=table)
    assert record["command"].endswith("--steps 1 --task lookup --set task.num_hops=3")
    assert record["task"] == table


# -- naming and keeping one ----------------------------------------------------------------------


def test_what_a_recipe_may_say() -> None:
    assert parse_warm_start("builtin") is None
    assert parse_warm_start("some/warmstart") is None
    starts = [parse_warm_start(name) for name in ("warmstart", "warmstart:0", "warmstart:7")]
    assert [start and start.seed for start in starts] == [0, 0, 7]
    for wrong in ("warmstart:", "warmstart:x", "warmstart:-1", "warmstart:٣"):
        with pytest.raises(ConfigError, match="warmstart:SEED"):
            parse_warm_start(wrong)


def test_the_place_depends_on_what_is_shown_and_on_nothing_else() -> None:
    base = {"name": "lookup"}
    place = cached_folder(base, TINY)
    assert place == cached_folder({**base, "latency_mean_s": 0.05}, TINY)
    others = [
        cached_folder({**base, "num_hops": 3}, TINY),
        cached_folder({**base, "error_rate": 0.1}, TINY),
        cached_folder({"name": "calculator"}, TINY),
        cached_folder(base, replace(TINY, seed=4)),
        cached_folder(base, replace(TINY, steps=3)),
    ]
    assert len({place, *others}) == 6


def test_a_task_without_demonstrations_has_no_warm_start() -> None:
    recipe = recipe_from_table({"model": "warmstart", "task": "arithmetic"})
    with pytest.raises(ConfigError, match="arithmetic has no demonstrations"):
        model_folder(recipe)
    (error,) = check_recipe(None, ["model=warmstart", "task=arithmetic"]).errors
    assert "arithmetic has no demonstrations" in error


def test_a_warm_start_is_made_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    overrides = ["model=warmstart:3", "task=lookup"]
    notes = check_recipe(None, overrides).notes
    assert any("is made at its first use" in note for note in notes)
    assert not list(tmp_path.rglob("*.safetensors")), "check computes nothing"

    told: list[str] = []
    folder = warmstart.warm_start({"name": "lookup"}, TINY, told.append)
    assert len(told) == 2
    assert str(folder) in told[0]
    assert folder.is_relative_to(tmp_path / "estr" / "warmstart")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert warmstart.warm_start({"name": "lookup"}, TINY, told.append) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert len(told) == 2
    assert load_tokenizer(folder).get_vocab() == make_tokenizer().get_vocab()
    (folder / "record.json").unlink()
    warmstart.warm_start({"name": "lookup"}, TINY, told.append)
    assert len(told) == 4, "one that was not finished is made anew"


def test_a_run_or_an_evaluation_may_start_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def made(table: object, setting: WarmStart, tell: object) -> Path:
        asked.append((table, setting.seed))
        return Path(build_task.__code__.co_filename).parents[1] / "builtin"

    monkeypatch.setattr(warmstart, "warm_start", made)
    subject = find_subject("warmstart:2", task="countdown", overrides=["task.num_numbers=4"])
    assert asked == [({"name": "countdown", "num_numbers": 4}, 2)]
    assert subject.recipe.model == "warmstart:2"
    with pytest.raises(ConfigError, match="'warmstart'"):
        find_subject("warmstarts")
