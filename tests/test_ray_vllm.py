"""vLLM in a child process of an actor: a run that loses it, and gets it back."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ray_cases
import vllm_cases
from estr.config import load_recipe
from estr.ledger import open_ledger
from estr.metrics import read_metrics
from estr.progress import SilentReporter
from estr.run import train
from ray_cases import command_of, descendants, processes_of_ray_left_alone
from vllm_cases import PYTHON, ROOT

pytestmark = [*vllm_cases.MARKS, *ray_cases.MARKS]

SHORT = [
    "placement=ray",
    "engine.name=vllm",
    f"engine.python={PYTHON}",
    "engine.timeout_s=900",  # a busy machine is no hung engine
    "engine.kv_cache_gb=0.5",
    "name=short",
    "groups_per_step=2",
    "group_size=2",
    "steps=3",
    "eval.every=0",
    "eval.problems=4",
    "eval.final_problems=4",
]


def vllm_children() -> list[int]:
    """The engines' processes that live below this one."""
    start = [str(Path(PYTHON).absolute()), "-m", "estr.worker"]
    return [pid for pid in descendants(os.getpid()) if command_of(pid)[:3] == start]


class Killer(SilentReporter):
    """Kills the engine's child after the first step."""

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.messages: list[str] = []

    def stepped(self, step: int, version: int, wall_s: float, row: Mapping[str, Any]) -> None:
        if step == 1:
            self.killed = vllm_children()
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)

    def message(self, text: str) -> None:
        self.messages.append(text)


def test_a_run_on_vllm_under_ray_outlives_the_end_of_vllm(tmp_path: Path) -> None:
    """One engine at a time: what it was writing waits for its replacement."""
    reporter = Killer()
    recipe = load_recipe(ROOT / "recipes" / "smollm2-arithmetic.toml", SHORT)
    with processes_of_ray_left_alone():
        summary = train(recipe, runs=tmp_path, reporter=reporter)
    (killed,) = reporter.killed
    assert summary.steps == 3
    assert set(summary.statuses) <= {"ok", "truncated"}
    (lost,) = [line for line in reporter.messages if "is lost" in line]
    assert f"(pid {killed}) ended: killed by SIGKILL" in lost
    assert any("engine 0 has joined at version" in line for line in reporter.messages)
    assert vllm_children() == []
    rows = [r for r in read_metrics(tmp_path / "short" / "metrics.jsonl").records if "loss" in r]
    assert [r["step"] for r in rows] == [1, 2, 3]
    assert max(r["staleness_max"] for r in rows) <= recipe.max_staleness
    # bfloat16 on both sides, but not the same kernels: near 1, and far from what a wrong version
    # or a token that is off by one would give.
    assert [r["ratio_deviation"] for r in rows] == pytest.approx([0.0] * 3, abs=0.1)
    drawn = open_ledger(tmp_path / "short").query(
        "select count(distinct versions) from tokens where versions >= 0"
    )
    assert drawn.rows[0][0] > 1, "weights were switched"
