"""Several ranks are one trainer: equal losses, metrics and weights; checkpoints; death of one."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from estr.batch import make_batches
from estr.cli import cli
from estr.config import recipe_from_table
from estr.errors import ConfigError, NumericsError, WorkerDied, WorkerError
from estr.ledger import find_parts
from estr.machine import check_devices
from estr.metrics import read_metrics
from estr.rank_workers import Place, RankWorkers
from estr.ranks import ALONE, Ranks, rank_device
from estr.worker import Worker
from ranks_hosts import trained
from tiny import draw_groups, tiny_model

SIZES = (1, 2, 4)
# A large adam_eps makes the update proportional to the gradient, not to its sign.
STEADY = {"lr": 0.3, "adam_eps": 1.0, "warmup_steps": 0, "token_budget": 40}
TIMES = {"trainer_s"}

Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Four processes that stay up, and what the first `size` of them make together."""
    meetings = tmp_path_factory.mktemp("meetings")
    numbers = itertools.count()
    with asyncio.Runner() as runner:
        workers = runner.run(RankWorkers.start("ranks_hosts:Process", {}, size=max(SIZES)))

        def together(size: int, table: dict[str, Any], **how: Any) -> dict[str, Any]:
            meeting = meetings / str(next(numbers))
            answers = runner.run(workers.call("train", size, meeting, table, how, timeout_s=240.0))
            first, *others = answers[:size]
            for other in others:  # every rank knows the whole step
                _same_rows(other["rows"], first["rows"], 0.0)
                assert isinstance(other["published"], int | None), "only rank 0 publishes"
            assert sum(answer["local"] for answer in answers[:size]) == first["numbers"]
            return {**first, "all_turns": [answer["turns"] for answer in answers[:size]]}

        yield together
        runner.run(workers.close())


def _same_rows(found: list[dict], wanted: list[dict], tolerance: float) -> None:
    for row, other in zip(found, wanted, strict=True):
        assert row.keys() == other.keys()
        cells = {name for name in row if name.startswith("rho_mask/advantage_")}
        # On-policy rounding alone decides the sign of a log-ratio, and so the cell of a token.
        deviation = row.get("ratio_deviation")
        on_policy = tolerance > 0 and deviation is not None and deviation < 1e-5
        for name in row.keys() - TIMES - (cells if on_policy else set()):
            expected = other[name]
            if expected is not None:
                expected = pytest.approx(expected, rel=tolerance, abs=tolerance)
            assert row[name] == expected, name


def _same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-5) -> None:
    _same_rows(found["rows"], expected["rows"], tolerance)
    assert found["published"].keys() == expected["published"].keys()
    for name, value in expected["published"].items():
        np.testing.assert_allclose(found["published"][name], value, atol=tolerance, rtol=0)
    for one, other in zip(found["consumptions"], expected["consumptions"], strict=True):
        assert one.advantage == pytest.approx(other.advantage, abs=tolerance)
        np.testing.assert_array_equal(one.kept, other.kept)
        np.testing.assert_array_equal(one.clipped, other.clipped)
        for column in ("policy_logprobs", "proximal_logprobs", "ref_logprobs"):
            here, there = getattr(one, column), getattr(other, column)
            assert (here is None) == (there is None)
            if here is not None:
                np.testing.assert_allclose(here, there, atol=tolerance)


def _moved(result: dict[str, Any]) -> float:
    start = dict(tiny_model().named_parameters())
    return max(
        float(np.abs(value - start[name].detach().numpy()).max())
        for name, value in result["published"].items()
    )


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "estr": ({}, {}),
    "whole_step_and_group_mean": (
        {"correction": {"name": "m2po", "budget": 0.002}, "loss": {"aggregation": "group"}},
        {},
    ),
    "sequences_and_price_in_reward": (
        {
            "correction": [{"name": "mis", "level": "geometric", "low": 0.9, "high": 1.1}],
            "kl": {"coefficient": 0.5, "place": "reward"},
        },
        {},
    ),
    "minibatches_and_price_in_loss": (
        {
            "correction": {"name": "decoupled"},
            "num_minibatches": 2,
            "kl": {"coefficient": 0.1, "estimator": "k3"},
            "trainer": {"gradient_checkpointing": True},
        },
        {"minibatches": 2},
    ),
    "lora": (
        {
            "lora": {"rank": 2},
            "kl": {"coefficient": 0.1},
            "trainer": {"gradient_checkpointing": True, "lr": 0.03},
        },
        {},
    ),
}


def _steady(table: dict[str, Any]) -> dict[str, Any]:
    return {**table, "trainer": {**STEADY, **table.get("trainer", {})}}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_ranks_are_one_trainer(case: str, size: int, train: Train) -> None:
    table, how = CASES[case]
    if case == "lora":
        pytest.importorskip("peft")
    alone = trained(ALONE, _steady(table), **how)
    assert _moved(alone) > 1e-3, "else equal weights would say nothing"
    _same(train(size, _steady(table), **how), alone)


def test_a_rank_without_tokens_joins_in(train: Train) -> None:
    how = {"num_groups": 1, "members": 2}
    together = train(4, _steady({}), **how)
    assert together["all_turns"] == [[[0]] * 3, [[1]] * 3, [[None]] * 3, [[None]] * 3]
    _same(together, trained(ALONE, _steady({}), **how))


def test_a_step_in_which_nothing_is_scored_is_skipped_by_all(train: Train) -> None:
    how = {"unscored": True, "steps": 1}
    together = train(2, _steady({}), **how)
    assert together["rows"][0]["skipped_updates"] == 1
    _same(together, trained(ALONE, _steady({}), **how))


def test_bfloat16_arithmetic(train: Train) -> None:
    table = _steady({"trainer": {"dtype": "bfloat16"}})
    alone = trained(ALONE, table)
    together = train(2, table)
    for name in ("loss", "grad_norm", "policy_entropy"):
        for one, other in zip(together["rows"], alone["rows"], strict=True):
            assert one[name] == pytest.approx(other[name], rel=5e-2, abs=2e-2), name


def test_the_clip_is_of_the_global_norm(train: Train) -> None:
    table = _steady({"trainer": {"grad_clip": 0.05}})
    alone = trained(ALONE, table)
    assert min(row["grad_norm"] for row in alone["rows"]) > 0.1
    _same(train(4, table), alone)


@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_goes_on_with_any_number_of_ranks(
    lora: bool, train: Train, tmp_path: Path
) -> None:
    if lora:
        pytest.importorskip("peft")
    table = _steady({"lora": {"rank": 2}} if lora else {})
    straight = trained(ALONE, table, steps=4)
    rest = {**straight, "rows": straight["rows"][2:], "consumptions": straight["consumptions"][24:]}
    for saved in (1, 2):
        folder = tmp_path / str(saved)
        folder.mkdir()
        train(saved, table, steps=2, save=folder)
        assert sorted(path.name for path in folder.iterdir()) == [
            "model.safetensors",
            "optimizer.safetensors",
            "trainer.json",
        ]
        _same(trained(ALONE, table, steps=2, restore=folder), rest)
        for size in (2, 4):
            _same(train(size, table, steps=2, restore=folder), rest)


def test_two_runs_of_two_ranks_are_equal_to_the_bit(train: Train) -> None:
    first, second = (train(2, _steady({})) for _ in range(2))
    _same(first, second, tolerance=0.0)


def test_trajectories_are_dealt_by_tokens() -> None:
    groups = draw_groups(tiny_model(), num_groups=4)
    trajectories = [t for g in groups for t in g.trajectories]
    advantages = [a for g in groups for a in g.advantages]
    ids = [g.id for g in groups for _ in g.trajectories]
    cut = {
        ranks: make_batches(
            trajectories, advantages, ids, aggregation="group", token_budget=60, ranks=ranks
        )
        for ranks in (1, 3)
    }
    owners = {row.trajectory: b.rank for b in cut[3] for row in b.rows}
    assert owners.keys() == set(range(16))
    tokens = [0, 0, 0]
    for trajectory, rank in owners.items():
        tokens[rank] += trajectories[trajectory].num_tokens
    assert max(tokens) - min(tokens) <= max(t.num_tokens for t in trajectories)
    assert {b.num_sampled_tokens for b in cut[3]} == {b.num_sampled_tokens for b in cut[1]}
    terms = [
        sum(float((b.loss_mask / b.denominators).sum()) for b in batches)
        for batches in cut.values()
    ]
    assert terms == pytest.approx([1.0, 1.0])


def test_turns_are_equally_many() -> None:
    (batch,) = make_batches(
        draw_groups(tiny_model(), num_groups=1)[0].trajectories,
        [0.0] * 4,
        [0] * 4,
        aggregation="batch",
        token_budget=4096,
    )
    batches = [replace(batch, rank=rank) for rank in (0, 2, 0, 0)]
    turns = [Ranks(rank, 3).turns(batches) for rank in range(3)]
    assert turns == [[0, 2, 3], [None, None, None], [1, None, None]]
    assert Ranks(1, 3).turns([]) == []


# -- whole runs -----------------------------------------------------------------------------------

SHORT = ["steps=2", "groups_per_step=2", "group_size=2", "eval.every=0", "eval.final_problems=4"]


def test_a_run_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    sets = [
        word for setting in [*SHORT, "trainer.ranks=2", "name=two"] for word in ("--set", setting)
    ]
    where = ["--runs", str(tmp_path)]
    done = CliRunner().invoke(cli, ["train", *where, *sets], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "two"
    assert (folder / "model" / "last" / "model.safetensors").is_file()
    again = ["--set", "steps=3", "--set", "trainer.ranks=1", "--accept-changes"]
    done = CliRunner().invoke(
        cli, ["train", "--resume", str(folder), *again], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    records = read_metrics(folder / "metrics.jsonl").records
    rows = [record for record in records if "loss" in record]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["ratio_deviation"] < 1e-3 for row in rows if row["staleness_max"] == 0)
    assert find_parts(folder).steps == [1, 2, 3]


# -- failures -------------------------------------------------------------------------------------


def test_a_rank_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = tmp_path / "processes.log"
        workers = await RankWorkers.start("ranks_hosts:Fragile", {}, size=2, log=log)
        try:
            watch = asyncio.create_task(workers.alive())
            answers = await workers.call("share", "", timeout_s=240.0)
            assert answers == [[0.0, 1.0, 1.0]] * 2
            assert not watch.done()
            named = r"trainer rank 1 process \(pid \d+\) ended: killed by SIGKILL\n"
            with pytest.raises(WorkerDied, match=named) as caught:
                await workers.call("share", "dies", timeout_s=240.0)
            assert "last words of a rank" in str(caught.value)
            assert "processes-rank-1.log" in str(caught.value)
            with pytest.raises(WorkerDied, match="trainer rank 1"):
                await asyncio.wait_for(watch, 10.0)
        finally:
            await workers.close()

    asyncio.run(scenario())


def test_an_error_of_one_rank_is_told_while_the_others_wait_for_it() -> None:
    async def scenario() -> None:
        workers = await RankWorkers.start("ranks_hosts:Fragile", {}, size=2)
        try:
            with pytest.raises(NumericsError, match="a token of rank 1"):
                await workers.call("share", "raises", timeout_s=240.0)
        finally:
            await workers.close()

    asyncio.run(scenario())


def test_of_a_rank_that_hangs_no_other_is_blamed_alone() -> None:
    async def scenario() -> None:
        workers = await RankWorkers.start("ranks_hosts:Fragile", {}, size=2)
        try:
            both = (
                r"trainer rank 0 .* and the trainer rank 1 .* did not answer 'share' within 1 s; wh"
            )
            with pytest.raises(WorkerError, match=both):
                await workers.call("share", "hangs", timeout_s=1.0)
        finally:
            await workers.close()

    asyncio.run(scenario())


def test_a_rank_that_meets_nobody_names_the_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        alone = {"place": Place(0, 2, tmp_path / "store"), "timeout_s": 1.0}
        with pytest.raises(WorkerError, match=r"rank 0 did not meet .* trainer.timeout_s = 1 s: "):
            await Worker.start("trainer", "ranks_hosts:Fragile", alone)

    asyncio.run(scenario())


def test_the_meeting_of_a_killed_run_is_removed_by_the_next(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60.0)
    own = os.stat("/proc/self/ns/pid").st_ino
    for pid in (ended.pid, os.getppid()):
        (tmp_path / f"estr-ranks-{own}-{pid}-x").mkdir()
    found: list[str] = []

    async def start_rank(place: Place | None) -> Worker:
        found.extend(path.name for path in tmp_path.iterdir())
        raise WorkerError("does not come up")

    with pytest.raises(WorkerError, match="does not come up"):
        asyncio.run(RankWorkers.bring_up(2, start_rank, shared=tmp_path))
    living = f"estr-ranks-{own}-{os.getppid()}-x"
    assert living in found
    assert f"estr-ranks-{own}-{ended.pid}-x" not in found
    assert [path.name for path in tmp_path.iterdir()] == [living]


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"ranks": 0}, "trainer.ranks must be at least 1"),
        (
            {"ranks": 2, "dtype": "bfloat16", "param_dtype": "bfloat16"},
            "trainer.ranks = 2 needs param_dtype = 'float32', not 'bfloat16'",
        ),
    ],
)
def test_what_is_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe_from_table({"trainer": table})


def test_no_more_processes_are_started_than_a_machine_can_bear() -> None:
    with pytest.raises(ConfigError, match=r"trainer.ranks = 1000 and engine.count = 1 are 1001 pr"):
        check_devices(recipe_from_table({"trainer": {"ranks": 1000}}))
    engines = {"placement": "ray", "engine": {"count": 1000}}
    with pytest.raises(ConfigError, match=r"engine.count = 1000 .* join a cluster by ray.address"):
        check_devices(recipe_from_table(engines))
    check_devices(recipe_from_table(engines | {"ray": {"address": "auto"}}))


def test_every_rank_needs_a_device_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"trainer.device = 'cuda:0' with trainer.ranks = 64"):
        check_devices(recipe_from_table({"trainer": {"ranks": 64, "device": "cuda:0"}}))
    assert [rank_device("cuda:1", rank) for rank in range(3)] == ["cuda:1", "cuda:2", "cuda:3"]
    assert rank_device("cpu", 3) == "cpu"
