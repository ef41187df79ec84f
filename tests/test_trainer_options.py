"""What the options of the optimizer do to a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from estr.processes import bytes_needed
from estr.trainer import Trainer
from estr.weights import MemoryWeightStore
from tiny import draw_groups, tiny_model, tiny_recipe

GROUPS = draw_groups(tiny_model())
CONSTANT = {"warmup_steps": 0, "schedule": "constant", "lr": 1e-2}


def stepped(number: int = 1, **options) -> tuple[Trainer, dict, dict]:
    """(trainer, weights before the last step, metrics of it)"""
    own = Trainer(tiny_model(), tiny_recipe(trainer={**CONSTANT, **options}), MemoryWeightStore())
    for _ in range(number):
        before = {name: t.clone() for name, t in own.master_state().items()}
        (result,) = own.train([GROUPS])
    return own, before, result.metrics.to_row()


def moved(own: Trainer, before: dict) -> torch.Tensor:
    return torch.cat([(t - before[n]).flatten() for n, t in own.master_state().items()]).double()


def test_clipping_bounds_the_step_and_not_the_norm_that_is_told() -> None:
    """A large adam_eps makes the update proportional to the gradient."""
    options = {"adam_eps": 1e3, "lr": 1.0}
    free, before, row = stepped(grad_clip=float("inf"), **options)
    clipped, _, told = stepped(grad_clip=row["grad_norm"] / 4, **options)
    assert told["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-6)
    ratio = moved(clipped, before).norm() / moved(free, before).norm()
    assert float(ratio) == pytest.approx(0.25, rel=1e-2)


def test_weight_decay_shrinks_the_weights_beside_the_update() -> None:
    plain, before, _ = stepped()
    decayed, _, _ = stepped(weight_decay=0.5)
    for name, start in before.items():
        shrunk = decayed.master_state()[name] - plain.master_state()[name]
        torch.testing.assert_close(shrunk, -1e-2 * 0.5 * start, atol=1e-6, rtol=0)


def test_without_moments_every_weight_moves_by_the_learning_rate() -> None:
    own, before, row = stepped(2, betas=(0.0, 0.0), adam_eps=1e-16)
    distances = moved(own, before).abs()
    assert row["lr"] == 1e-2
    touched = distances > 0
    assert touched.sum() > 1000
    torch.testing.assert_close(
        distances[touched], torch.full_like(distances[touched], 1e-2), atol=1e-6, rtol=0
    )
    kept, start, _ = stepped(2, betas=(0.9, 0.99))
    assert moved(kept, start).abs().std() > 1e-4


def test_steps_follow_the_warm_up_and_the_schedule() -> None:
    own = Trainer(
        tiny_model(),
        tiny_recipe(steps=4, trainer={"lr": 1.0, "warmup_steps": 2, "schedule": "linear"}),
        MemoryWeightStore(),
    )
    rates = [own.train([GROUPS])[0].metrics.to_row()["lr"] for _ in range(4)]
    assert rates == [0.5, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_room_for_versions_is_that_of_what_the_engine_takes(
    tmp_path: Path, stored: torch.dtype
) -> None:
    model = tiny_model().to(stored)
    model.save_pretrained(tmp_path)
    count = sum(p.numel() for p in model.parameters())
    recipe = tiny_recipe(max_staleness=1)
    assert bytes_needed(tmp_path, recipe) == 3 * 4 * count
    half = tiny_recipe(max_staleness=1, engine={"dtype": "bfloat16"})
    assert bytes_needed(tmp_path, half) == 3 * 2 * count
