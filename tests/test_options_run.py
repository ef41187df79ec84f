"""The options of a trainer together, in a real run of a few steps: tasks mixed, adapters, a price
on the distance from the start, gradient checkpointing; gone on with, loaded plainly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from estr.config import recipe_from_table
from estr.ledger import open_ledger
from estr.metrics import read_metrics
from estr.models import load_model, resolve_model
from estr.run import train
from estr.runs import verify_run

RECIPE = {
    "name": "all",
    "steps": 2,
    "groups_per_step": 4,
    "group_size": 4,
    "max_staleness": 1,
    "task": [
        {"name": "calculator", "label": "first", "weight": 2.0},
        {"name": "calculator", "label": "second", "seed": 1},
    ],
    "curriculum": {"floor": 0.5},
    "lora": {"rank": 4},
    "kl": {"coefficient": 0.01, "estimator": "k3"},
    "trainer": {"lr": 1e-2, "warmup_steps": 0, "gradient_checkpointing": True},
    "eval": {"every": 0, "final_problems": 4},
}


def test_a_run_with_everything_goes_on_where_it_was(tmp_path: Path) -> None:
    recipe = recipe_from_table(RECIPE)
    train(recipe, runs=tmp_path)
    run = tmp_path / "all"
    longer = replace(recipe, steps=3)
    summary = train(longer, runs=tmp_path, resume=run, accept_changes=True)
    assert summary.steps == 3
    assert verify_run(run).faults == []
    records = read_metrics(run / "metrics.jsonl").records
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3]
    assert steps[0]["ref_kl_k3"] < 1e-5 < steps[2]["ref_kl_k3"]
    assert {r["task/first/num_trajectories"] for r in steps} <= {8.0, 12.0}
    evaluations = [r for r in records if "eval/accuracy" in r]
    assert all(
        r["eval/accuracy"] == (r["eval/first/accuracy"] + r["eval/second/accuracy"]) / 2
        for r in evaluations
    )
    (rows,) = (
        open_ledger(run)
        .query(
            "select count(ref_logprobs), count(policy_logprobs), count(distinct task) "
            "from tokens join trajectories using (step, trajectory)"
        )
        .rows
    )
    assert rows[0] == rows[1] > 0
    assert rows[2] == 2
    start, end = (load_model(f) for f in (resolve_model("builtin"), run / "model" / "last"))
    ids = torch.arange(8)[None]
    assert not torch.allclose(start(ids).logits, end(ids).logits)
