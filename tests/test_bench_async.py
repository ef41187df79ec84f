"""`estr bench async`: its ratios, when a quality counts as reached, and its quick form."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from estr.bench import async_loop, async_parts
from estr.bench.async_loop import CONFIG, KINDS, summary
from estr.bench.async_parts import Clock, Kind, Measure
from estr.bench.async_quality import Look, Quality, judged
from estr.config import Recipe
from estr.errors import ConfigError
from estr.worker import Worker

ROOT = Path(__file__).parents[1]


def a_round(**rates: float) -> dict[str, dict[str, float]]:
    """Generation at 100 tokens/s and training at 50, alone; kinds at the rates given, else 10."""
    kinds = {label: rates.get(label, 10.0) for label in KINDS}
    return {"alone": {"generation": 100.0, "training": 50.0}} | {
        label: {"tokens_per_s": rate, "step_s": 100 / rate} for label, rate in kinds.items()
    }


def test_ratios_are_taken_within_a_round_against_the_better_synchronous_kind() -> None:
    found = summary(
        [
            a_round(sync=20.0, sync_two=25.0, **{"async": 40.0}),
            a_round(sync=20.0, sync_two=10.0, one_step=50.0, **{"async": 30.0}),
            a_round(sync=25.0, sync_two=10.0, **{"async": 50.0}),
        ]
    )
    assert found["each"]["async_over_bound"] == [0.8, 0.6, 1.0]
    assert found["async_over_bound"] == 0.8
    assert found["each"]["async_over_sync"] == [1.6, 1.5, 2.0]
    assert found["each"]["speedup"] == [1.6, 2.5, 2.0]
    assert found["each"]["step_time_change"] == [-0.375, -0.333, -0.5]
    assert found["bound_over_sync"] == pytest.approx(1.5)  # 50 * (1/100 + 1/50)
    assert found["rates"] == {"generation": 100.0, "training": 50.0, "bound": 50.0}


def test_a_regime_in_which_asynchronous_training_loses_shows_it() -> None:
    found = summary([a_round(sync=10.0, sync_two=40.0, **{"async": 30.0})])
    assert found["speedup"] == 0.75
    assert found["step_time_change"] > 0


def test_rates_leave_the_warm_up_out() -> None:
    clock = Clock(warmup_steps=1)
    for step, (wall_s, tokens) in enumerate([(10.0, 7.0), (12.0, 30.0), (15.0, 20.0)], start=1):
        clock.stepped(step, step, wall_s, {"eligible_tokens": tokens})
    assert clock.rates() == {"tokens_per_s": 10.0, "step_s": 2.5}
    assert clock.warm.is_set()


def test_kinds_keep_the_work_and_change_only_how_it_is_done() -> None:
    recipe = Recipe(max_staleness=3, seed=5)
    assert Kind().of(recipe) == recipe
    one_step = KINDS["one_step"].of(recipe)
    assert (one_step.max_staleness, one_step.in_flight, one_step.seed) == (1, False, 5)
    two = KINDS["sync_two"].of(recipe)
    assert (two.max_staleness, two.engine.threads, two.trainer.threads) == (0, 2, 2)


# -- time to quality ----------------------------------------------------------------------------


def curve(*accuracies: float, step_s: float) -> list[Look]:
    return [Look(10 * i, i * step_s, 100.0 * i, a) for i, a in enumerate(accuracies)]


RISING = (0.2, 0.4, 0.6, 0.8, 0.9, 0.9)


@pytest.mark.parametrize("large", [False, True])
def test_processes_of_a_small_model_stay_up_and_of_a_large_one_make_room(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(async_parts, "_LARGE_MODEL_BYTES", 0)

    async def asked_twice() -> list[bool]:
        async with async_parts.open_pairs(Recipe()) as pair_for:
            async with pair_for(Kind(max_staleness=0)) as first:
                pass
            assert isinstance(first.engine.worker, Worker)
            alive = Path(f"/proc/{first.engine.worker.pid}").exists()
            async with pair_for(Kind()) as second:
                return [alive, first is second]

    assert asyncio.run(asked_twice()) == [not large, not large]


def test_a_quality_is_reached_at_the_first_non_inferior_evaluation() -> None:
    sync = {seed: curve(*RISING, step_s=4.0 + seed) for seed in range(5)}
    quicker = {seed: curve(0.2, 0.3, 0.5, 0.7, 0.88, 0.9, step_s=2.0) for seed in range(5)}
    never = {seed: curve(*[0.2] * 6, step_s=1.0) for seed in range(5)}
    found = judged({"sync": sync, "async": quicker, "one_step": never}, bound_tokens_per_s=50.0)
    assert found["plateau"] == pytest.approx(0.9)
    kinds = found["kinds"]
    assert (kinds["sync"]["reached_step"], kinds["sync"]["reached_s"]) == (40, 24.0)
    low, high = kinds["sync"]["interval_s"]
    assert 16.0 <= low < 24.0 < high <= 32.0
    assert (kinds["async"]["reached_step"], kinds["async"]["reached_s"]) == (40, 8.0)
    assert kinds["async"]["speedup"] == 3.0
    assert kinds["one_step"]["reached_s"] is None
    assert kinds["one_step"]["speedup"] is None
    assert kinds["one_step"]["end_minus_plateau"][2] < -0.6
    assert found["bound_s"] == 8.0  # 400 tokens at 50 a second


def test_an_uncertain_difference_is_not_yet_non_inferior() -> None:
    sync = {seed: curve(*RISING, step_s=1.0) for seed in range(5)}
    wavering = {
        seed: curve(0.2, 0.2, 0.2, 1.0 if seed % 2 else 0.8, 0.9, 0.9, step_s=1.0)
        for seed in range(5)
    }
    found = judged({"sync": sync, "async": wavering}, 1.0)
    assert found["kinds"]["async"]["reached_step"] == 40  # at 30 the mean is 0.88


def test_few_seeds_decide_nothing() -> None:
    found = judged({"sync": {0: curve(*RISING, step_s=1.0)}}, 1.0)
    assert found["too_few_seeds"]
    assert found["kinds"]["sync"]["reached_s"] is None
    assert found["bound_s"] is None


# -- configuration ------------------------------------------------------------------------------


def test_what_is_wrong_with_a_file_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="root of the repository"):
        async_loop.run(config=tmp_path / "none.toml")
    file = tmp_path / "bench.toml"
    text = (ROOT / CONFIG).read_text()
    file.write_text(text.replace("warmup_steps = 4", "warmup_steps = 11"))
    with pytest.raises(ConfigError, match="warmup_steps = 11"):
        async_loop.run(config=file)
    file.write_text(text.replace("seeds = 5", "sedes = 5"))
    with pytest.raises(ConfigError, match="sedes"):
        async_loop.run(config=file)
    file.write_text(text.replace("every = 6", "every = 60"))
    with pytest.raises(ConfigError, match="every"):
        async_loop.run(config=file)
    assert Measure(6, 2).check() is None
    assert Quality(("a",)).quick().seeds == 1


TINY = """
[measure]
steps = 12
warmup_steps = 4
repeats = 3

[quality]
regimes = ["tiny"]
recipe.trainer.lr = 5e-4

[recipe]
groups_per_step = 2
group_size = 2
max_staleness = 2
trainer.lr = 1e-9
eval.every = 0

[regime.tiny]

[regime.absent]
model = "no/such/folder"
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quick_form_measures_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two threads that spin for each other take for ever where other work has the cores.
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    file = tmp_path / "tiny.toml"
    file.write_text(TINY)
    figures = async_loop.run(quick=True, config=file)
    assert list(figures["regimes"]) == ["tiny"]
    assert "no/such/folder" in figures["left_out"]["absent"]
    tiny = figures["regimes"]["tiny"]
    assert figures["ratio"] == tiny["async_over_bound"] > 0
    for label, facts in tiny["kinds"].items():
        assert facts["tokens_per_s"] > 0 < facts["step_s"], label
        assert 0 < facts["engine_busy"] <= 1, label
        assert 0 < facts["trainer_busy"] <= 1, label
        bound = KINDS[label].max_staleness
        assert max(facts["inter_max"], facts["intra_max"]) <= (2 if bound is None else bound)
        assert -1e-9 <= facts["discarded_share"] < 1, label
    for label in ("sync", "sync_two"):
        assert tiny["kinds"][label]["inter_max"] == tiny["kinds"][label]["intra_max"] == 0
        assert tiny["kinds"][label]["recomputed_share"] == 0
    for label in ("one_step", "async_drained"):
        assert tiny["kinds"][label]["intra_max"] == 0
    quality = tiny["quality"]
    assert quality["too_few_seeds"]
    for curves in quality["curves"].values():
        assert [look["step"] for look in curves[0]] == [0, 2, 4, 6]
        assert [look["wall_s"] for look in curves[0]] == sorted(
            look["wall_s"] for look in curves[0]
        )
