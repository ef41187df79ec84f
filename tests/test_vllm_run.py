"""The SmolLM2 recipe on vLLM: a short run, and gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from estr.config import load_recipe
from estr.metrics import read_metrics
from estr.run import train
from vllm_cases import MARKS, PYTHON, ROOT

pytestmark = MARKS

SHORT = [
    "engine.name=vllm",
    f"engine.python={PYTHON}",
    "engine.timeout_s=900",  # a busy machine is no hung engine
    "name=short",
    "groups_per_step=4",
    "group_size=4",
    "checkpoint.every_steps=1",
    "eval.every=0",
    "eval.problems=8",
    "eval.final_problems=8",
]


def test_the_recipe_runs_and_resumes_on_vllm(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "smollm2-arithmetic.toml"
    train(load_recipe(recipe, [*SHORT, "steps=2"]), runs=tmp_path)
    summary = train(
        load_recipe(recipe, [*SHORT, "steps=4"]),
        runs=tmp_path,
        resume=tmp_path / "short",
        accept_changes=True,
    )
    rows = [r for r in read_metrics(tmp_path / "short" / "metrics.jsonl").records if "loss" in r]
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert summary.steps == 4
    assert max(r["staleness_max"] for r in rows) <= 1
    assert set(summary.statuses) <= {"ok", "truncated"}
    # bfloat16 on both sides, but not the same kernels: near 1, and far from what a token that is
    # off by one would give.
    assert rows[0]["ratio_deviation"] == pytest.approx(0.0, abs=0.1)


def test_a_run_whose_weights_come_out_of_the_trainers_memory(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "smollm2-arithmetic.toml"
    overrides = [*SHORT, "steps=2", "engine.weight_transfer=gloo", "checkpoint.every_steps=0"]
    assert train(load_recipe(recipe, overrides), runs=tmp_path).steps == 2
    rows = [r for r in read_metrics(tmp_path / "short" / "metrics.jsonl").records if "loss" in r]
    assert rows[0]["ratio_deviation"] == pytest.approx(0.0, abs=0.1)
