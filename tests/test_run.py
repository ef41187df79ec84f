"""Whole runs of the built-in model with real processes, short ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import estr
from estr.checkpoint import Checkpoints
from estr.config import load_recipe
from estr.errors import CheckpointError, DataError
from estr.ledger import find_parts, open_ledger, parts_up_to
from estr.metrics import read_metrics
from estr.models import load_model, load_tokenizer, resolve_model, save_model
from estr.results import read_run
from estr.run import train
from estr.run_folder import RunFolder
from estr.subject import stamped_version
from tiny import tiny_model

SMALL = [
    "steps=8",
    "groups_per_step=4",
    "group_size=4",
    "eval.every=4",
    "eval.problems=16",
    "eval.final_problems=32",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One asynchronous run, shared by the tests that only look."""
    runs = tmp_path_factory.mktemp("runs")
    summary = train(load_recipe(overrides=[*SMALL, "name=small"]), runs=runs)
    assert summary.name == "small"
    return runs / "small"


def test_a_run_leaves_what_the_readme_says(finished: Path) -> None:
    names = {p.name for p in finished.iterdir()}
    assert {
        "config.toml",
        "summary.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "model",
        "log.txt",
    } <= names
    assert load_recipe(finished / "config.toml").steps == 8
    for which in ("best", "last"):
        folder = finished / "model" / which
        load_model(folder)
        assert load_tokenizer(folder).vocab_size == 24


def test_the_summary_has_every_field_and_they_agree_with_the_metrics(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    records = read_metrics(finished / "metrics.jsonl").records
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 9))
    assert summary["steps"] == 8
    assert summary["trained_tokens"] == sum(r["eligible_tokens"] for r in steps)
    assert summary["intra_max"] == max(r["intra_max"] for r in steps)
    assert summary["inter_max"] == max(r["inter_max"] for r in steps)
    assert max(r["staleness_max"] for r in steps) <= 4
    assert summary["inter_max"] > 0, "an asynchronous run trains on older versions"
    evaluations = [r["eval/accuracy"] for r in records if "eval/accuracy" in r]
    assert summary["start_accuracy"] == evaluations[0]
    assert summary["final_accuracy"] == evaluations[-1]
    assert 0 < summary["trainer_busy"] <= 1
    assert 0 < summary["engine_busy"] <= 1
    assert sum(summary["statuses"].values()) >= 8 * 4 * 4
    assert summary["findings"] == {}
    assert sum(r["guard_rescored_tokens"] for r in steps if "guard_rescored_tokens" in r) > 0
    assert max(r.get("guard_gap") or 0.0 for r in steps) < 1e-4
    for field in (
        "wall_s",
        "guard_share",
        "tokens_per_s",
        "rho_mask",
        "dropped_groups",
        "seed",
        "intra_mean",
    ):
        assert field in summary


def test_the_ledger_says_what_the_metrics_say(finished: Path) -> None:
    """Every trained token, its loss and its verdict, step by step; a checkpoint lists the parts."""
    records = [r for r in read_metrics(finished / "metrics.jsonl").records if "loss" in r]
    ledger = open_ledger(finished)
    assert ledger.torn == []
    rows = ledger.query(
        "select step, count(*), sum(loss_term), avg((not kept)::int), max(lag), "
        "avg(log_ratio * log_ratio) from loss_terms group by step order by step"
    ).rows
    assert [row[0] for row in rows] == [r["step"] for r in records]
    assert [row[1] for row in rows] == [r["eligible_tokens"] for r in records]
    assert [row[2] for row in rows] == pytest.approx([r["loss"] for r in records], abs=1e-6)
    assert [row[3] for row in rows] == pytest.approx([r["rho_mask"] for r in records])
    assert [row[4] for row in rows] == [r["lag_max"] for r in records]
    again = "select group_id from trajectories group by 1 having count(distinct step) > 1"
    assert ledger.query(again).rows == []
    _, state, _ = Checkpoints(finished / "checkpoints").newest()
    assert state["ledger_parts"] == parts_up_to(finished, 8)
    parts = find_parts(finished)
    assert parts.steps == list(range(1, 9))
    assert len(state["ledger_parts"]) == 2 * len(parts.whole) < 16


def test_weights_move_and_memory_is_given_back(finished: Path) -> None:
    start = load_model(resolve_model("builtin")).state_dict()
    last = load_model(finished / "model" / "last").state_dict()
    assert any(not start[name].equal(last[name]) for name in start)
    memory = Path("/dev/shm")
    assert not memory.is_dir() or not list(memory.glob(f"estr-weights-*-{os.getpid()}-*"))


def test_a_run_goes_on_from_its_checkpoint(finished: Path, tmp_path: Path) -> None:
    recipe = load_recipe(finished / "config.toml", ["steps=10"])
    _, state, _ = Checkpoints(finished / "checkpoints").newest()
    assert state["step"] == 8
    before = read_metrics(finished / "metrics.jsonl").records
    best = read_run(finished).best
    summary = train(recipe, resume=finished, accept_changes=True)
    after = read_metrics(finished / "metrics.jsonl").records
    assert summary.steps == 10
    assert after[: len(before)] == before
    # The best model is kept, though evaluated after the checkpoint, unless a better one came.
    now = read_run(finished).best
    assert best is not None
    assert now is not None
    assert now.interval[0] >= best.interval[0]  # type: ignore[index]
    assert now.version == stamped_version(finished / "model" / "best")
    assert summary.best_accuracy == now.accuracy
    assert [r["step"] for r in after if "loss" in r] == list(range(1, 11))
    assert find_parts(finished).steps == list(range(1, 11))
    assert summary.trained_tokens == sum(r["eligible_tokens"] for r in after if "loss" in r)


def test_synchronous_runs_have_no_staleness(tmp_path: Path) -> None:
    summary = train(
        load_recipe(
            overrides=[*SMALL, "steps=3", "eval.every=0", "max_staleness=0", "ledger=false"]
        ),
        runs=tmp_path,
    )
    assert not list(tmp_path.glob("*/ledger"))
    assert (summary.intra_max, summary.inter_max) == (0, 0)
    assert summary.rho_mask == 0.0, "on-policy tokens are never masked"


@pytest.mark.parametrize("correction", ["none", "icepop", "kpop"])
def test_every_method_trains_without_in_flight_updates(correction: str, tmp_path: Path) -> None:
    overrides = ["steps=3", "eval.every=0", "eval.final_problems=8", "in_flight=false"]
    recipe = load_recipe(overrides=[*SMALL, *overrides, f"correction={correction}"])
    summary = train(recipe, runs=tmp_path)
    assert summary.steps == 3
    assert summary.intra_max == 0, "with the feature off no trajectory spans an update"


def test_any_causal_lm_folder_is_taken(tmp_path: Path) -> None:
    save_model(
        tiny_model(max_position_embeddings=256),
        load_tokenizer(resolve_model("builtin")),
        tmp_path / "mine",
    )
    overrides = ["steps=2", "eval.every=0", "eval.final_problems=4", f"model={tmp_path / 'mine'}"]
    summary = estr.train(load_recipe(overrides=[*SMALL, *overrides]), runs=tmp_path)
    assert summary.steps == 2


def test_a_second_run_never_writes_over_the_first_check_65(tmp_path: Path) -> None:
    recipe = load_recipe(overrides=["name=same"])
    first, second = (RunFolder.create(recipe, tmp_path) for _ in range(2))
    assert (first.path.name, second.path.name) == ("same", "same-2")


def test_resuming_what_is_not_there_is_an_error_check_129(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nonexistent"):
        train(load_recipe(), resume=tmp_path / "nonexistent")
    empty = RunFolder.create(load_recipe(), tmp_path)
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        train(load_recipe(), resume=empty.path)
