"""Asynchronous against synchronous training, and against the bound that neither can pass.

For each regime of benchmarks/async.toml, with the same cores, model, task, seeds and tokens:

    generation   rollouts alone, as many at once as the bound on staleness lets in, tokens/s
    training     the trainer alone, fed with those rollouts, tokens/s
    bound        the lower of the two: what a pipeline with a core for each could reach

and every kind of training in `KINDS`. `ratio` is async over bound in the worst regime; `speedup` is
the better asynchronous kind over the better synchronous one. The time to a quality, with training
that really learns, is `estr.bench.async_quality`.
"""

from __future__ import annotations

import statistics
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from .. import blocking
from ..config import Recipe, recipe_from_table
from ..errors import ConfigError, DataError
from ..subject import model_folder
from . import machine
from .async_parts import Clock, Facts, Kind, Measure, open_pairs
from .async_quality import Quality, time_to_quality

CONFIG = Path("benchmarks/async.toml")

KINDS = {
    "sync": Kind(max_staleness=0),
    "sync_two": Kind(max_staleness=0, threads=2),
    "one_step": Kind(max_staleness=1, in_flight=False),
    "async_drained": Kind(in_flight=False),
    "async": Kind(),
    "async_two": Kind(threads=2),
}
"""sync: all rollouts of a step, then the step. one_step: one batch ahead, each rollout under one
version. async_drained: as stale as async, but a switch waits for the running requests. _two: two
threads for each process, where one at a time works (sync) or both share two cores (async)."""

SYNCHRONOUS = ("sync", "sync_two")

PAPER = {"speedup": 2.6, "step_time_change": -0.62}
"""As published (arXiv 2607.22186, DAPO-Math): 82.56 -> 214.38 tokens/s/GPU, 1,356.47 -> 514.84 s a
step."""


def run(quick: bool = False, config: Path = CONFIG) -> dict[str, Any]:
    """Measure every regime. quick: one short measurement of each kind, and of the time to quality
    one seed, which can decide nothing."""
    table = _read(config)
    try:
        measure = Measure(*(table["measure"][key] for key in ("steps", "warmup_steps")))
        repeats, quality = table["measure"]["repeats"], Quality.read(table["quality"])
        regimes = {
            name: _recipe(table["recipe"], regime, {"steps": measure.steps})
            for name, regime in table["regime"].items()
        }
    except KeyError as error:
        raise ConfigError(f"{config} has no {error.args[0]}") from error
    if quick:
        measure, repeats, quality = Measure(6, 2), 1, quality.quick()
    measure.check()
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, recipe in regimes.items():
        try:
            model_folder(recipe)
        except DataError as error:
            left_out[name] = str(error)
            continue
        found[name] = blocking.run(partial(_measure_regime, name, recipe, measure, repeats))
        if name in quality.regimes:
            learns = _recipe(
                table["recipe"], table["regime"][name], quality.recipe | {"steps": quality.steps}
            )
            kinds = _to_compare(found[name])
            rates = found[name]["rates"]
            found[name]["quality"] = blocking.run(
                partial(time_to_quality, learns, kinds, quality, rates["bound"])
            )
    return {
        "name": "async",
        "ratio": min((r["async_over_bound"] for r in found.values()), default=None),
        "regimes": found,
        "left_out": left_out,
        "paper": PAPER,
        "measure": measure._asdict() | {"repeats": repeats},
        "quick": quick,
        "machine": machine(),
    }


def _read(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {config}: {error.strerror}; run this from the root of the repository"
        ) from error


def _recipe(*tables: dict[str, Any]) -> Recipe:
    """Later tables over earlier ones; a task is taken whole."""
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            own = merged.get(key)
            both = isinstance(value, dict) and isinstance(own, dict) and key != "task"
            merged[key] = {**own, **value} if both and own is not None else value
    return recipe_from_table(merged)


def _to_compare(regime: dict[str, Any]) -> dict[str, Kind]:
    """The better synchronous kind as "sync", and every asynchronous one on single threads."""
    best = max(SYNCHRONOUS, key=lambda kind: regime["kinds"][kind]["tokens_per_s"])
    others = ("one_step", "async_drained", "async")
    return {"sync": KINDS[best]} | {kind: KINDS[kind] for kind in others}


async def _measure_regime(
    name: str, recipe: Recipe, measure: Measure, repeats: int
) -> dict[str, Any]:
    """Every kind in turn, again and again: the machine's own speed wanders, so only what was
    measured side by side is compared."""
    rounds: list[dict[str, Facts]] = []
    async with open_pairs(recipe) as pair_for:
        for number in range(1, repeats + 1):
            async with pair_for(Kind()) as pair:
                facts = {"alone": await pair.alone(measure)}
            for label, kind in KINDS.items():
                clock = Clock(measure.warmup_steps)
                async with pair_for(kind) as pair:
                    facts[label] = await pair.loop(kind.of(recipe), clock)
                facts[label] |= clock.rates()
                told = f"{label}: {facts[label]['tokens_per_s']:,.1f} tokens/s"
                print(f"{name}, round {number}, {told}", file=sys.stderr, flush=True)
            rounds.append(facts)
    return summary(rounds)


def summary(rounds: list[dict[str, Facts]]) -> dict[str, Any]:
    """Medians over the rounds; ratios are taken within each round, of which the median counts."""
    ratios: dict[str, list[float]] = {}
    for facts in rounds:
        rates = {label: facts[label]["tokens_per_s"] for label in KINDS}
        generation, training = facts["alone"]["generation"], facts["alone"]["training"]
        bound = min(generation, training)
        better = max(SYNCHRONOUS, key=rates.__getitem__)
        best = max(rates.keys() - set(SYNCHRONOUS), key=rates.__getitem__)
        found = {
            "async_over_bound": rates["async"] / bound,
            "speedup": rates[best] / rates[better],
            "async_over_sync": rates["async"] / rates[better],
            "step_time_change": facts["async"]["step_s"] / facts[better]["step_s"] - 1,
            # Of phases that take turns over phases side by side, a core for each.
            "bound_over_sync": bound * (1 / generation + 1 / training),
        }
        for key, value in found.items():
            ratios.setdefault(key, []).append(value)
    alone = _medians([facts["alone"] for facts in rounds])
    return {
        "rates": alone | {"bound": statistics.median(min(f["alone"].values()) for f in rounds)},
        "kinds": {label: _medians([facts[label] for facts in rounds]) for label in KINDS},
        **{key: statistics.median(values) for key, values in ratios.items()},
        "each": {key: [round(value, 3) for value in values] for key, values in ratios.items()},
    }


def _medians(found: list[Facts]) -> Facts:
    return {key: statistics.median(facts[key] for facts in found) for key in found[0]}
