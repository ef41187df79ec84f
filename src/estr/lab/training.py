"""One run of the laboratory: controlled rollouts, the real trainer, held-out accuracy.

    for each step:  rollouts under the imposed versions, in the sampler's arithmetic
                    --> advantages --> estr.trainer.Trainer (float32) --> next version

One process, one thread, seconds to a minute. What is random hangs on the seed alone, so two methods
with one seed meet the same problems and the same uniforms: differences between them are paired.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..advantages import group_advantages
from ..buffer import TrainingGroup
from ..config import Recipe, read_options, recipe_from_table
from ..errors import NumericsError
from ..metrics import Metrics
from ..options.corrections import require
from ..scores import pass_at_k
from ..trainer import Trainer
from ..types import RolloutId, Trajectory
from .arithmetic import ARITHMETICS, Arithmetic
from .rollouts import Play, Sampler, roll_out
from .scoring import score, split
from .staleness import Plan, Staleness, WeightHistory
from .table import Row

Table = dict[str, Any]
Outcomes = npt.NDArray[np.float64]

_EVALUATION = 2**62
"""The run number of held-out rollouts: the same uniforms for every run and version."""

_PROBLEMS_PER_SEED = 10**6

SAMPLING: dict[str, Table] = {"countdown": {"max_new_tokens": 96, "max_tokens": 128}}
"""Token budgets that a task needs; the others have those below."""
_SAMPLING: Table = {"max_new_tokens": 24, "max_tokens": 128}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that a run depends on. collapse, defined beforehand: the held-out accuracy at the
    end is below half of that at the start, or a loss or gradient was not finite (nor can it be
    where the sampler's logits are not)."""

    task: Table = field(default_factory=lambda: {"name": "calculator"})
    model: str = "builtin"
    correction: tuple[Table, ...] = ({"name": "estr"},)
    seed: int = 0
    steps: int = 120
    prompts: int = 8
    group_size: int = 8
    arithmetic: Arithmetic = "float32"
    staleness: Staleness = field(default_factory=Staleness)
    entropy_of: Literal["sampler", "trainer"] = "sampler"
    """trainer: a control; the entropies that corrections read are those of the weights now."""
    lr: float = 5e-4
    warmup_steps: int = 20
    window: int = 20
    """Steps between two records of the curves."""
    eval_problems: int = 256
    eval_k: int = 4
    """Rollouts of each held-out problem at the start and at the end; one on the way."""

    def __post_init__(self) -> None:
        require(self.arithmetic in ARITHMETICS, f"arithmetic {self.arithmetic!r} is unknown")
        for name in ("steps", "prompts", "window", "eval_problems", "eval_k"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")

    def table(self) -> Table:
        """As plain JSON data; `read` gives it back."""
        return asdict(self)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> RunConfig:
        """Raises ConfigError on unknown keys, wrong types and values out of range."""
        return read_options(cls, table, "run")


class LabRun:
    """A run that can be stepped: its trainer, its history of weights, its way of sampling."""

    def __init__(self, config: RunConfig) -> None:
        import torch

        from ..chat import Codec
        from ..environments import build_task
        from ..models import load_model, load_tokenizer
        from ..subject import model_folder
        from .decoder import Decoder

        torch.manual_seed(config.seed)
        self.config = config
        self.recipe = _recipe(config)
        folder = model_folder(self.recipe)
        model = load_model(folder)
        self.codec = Codec(load_tokenizer(folder))
        self.task = build_task(config.task)
        self.decoder = Decoder(model.config)
        self.history = WeightHistory(self.decoder, config.staleness.depth + 1)
        self.trainer = Trainer(model, self.recipe, self.history)
        self.trainer.publish()
        self._rng = np.random.default_rng((config.seed, 1))
        self._usual = (24.0, 4.0)

    def play(self, split: Literal["train", "test"]) -> Play:
        from ..types import SamplingSettings

        budgets = self.recipe.sampling
        stops = self.codec.resolve_stops(self.task.stop)
        sampling = SamplingSettings(
            budgets.temperature, budgets.max_new_tokens, budgets.max_tokens, stops
        )
        return Play(self.task, split, self.codec, sampling)

    def sampler(self, arithmetic: Arithmetic) -> Sampler:
        return Sampler(
            self.decoder,
            arithmetic,
            lambda version: self.history.weights(version, arithmetic),
            keep_kv=self.config.staleness.kv == "keep",
        )

    def roll_out(self, *, first_group: int, num_groups: int) -> list[Trajectory]:
        """Training rollouts for the weights as they are now, under the imposed versions."""
        config = self.config
        length, turns = self._usual
        rows = [
            (g, m)
            for g in range(first_group, first_group + num_groups)
            for m in range(config.group_size)
        ]
        plan = Plan(
            config.staleness,
            self.trainer.version,
            len(rows),
            length=length,
            turns=turns,
            rng=self._rng,
        )
        trajectories = roll_out(
            self.play("train"),
            self.sampler(config.arithmetic),
            plan,
            [RolloutId(config.seed, g, m) for g, m in rows],
            [config.seed * _PROBLEMS_PER_SEED + g for g, _ in rows],
        )
        self._usual = (
            float(np.mean([t.num_sampled_tokens for t in trajectories])),
            float(np.mean([len(t.turns) for t in trajectories])),
        )
        return trajectories

    def groups(self, trajectories: list[Trajectory], first_group: int) -> list[TrainingGroup]:
        """The trajectories, as many a group as there are members, with their advantages."""
        size = self.config.group_size
        groups = []
        for i in range(0, len(trajectories), size):
            members = tuple(trajectories[i : i + size])
            advantages = group_advantages(
                [t.reward for t in members],
                [t.outcome for t in members],
                kind=self.recipe.loss.advantage,
            )
            groups.append(
                TrainingGroup(
                    first_group + i // size, self.trainer.version, members, tuple(advantages)
                )
            )
        return groups

    def step(self) -> Metrics:
        """One optimizer step. Raises NumericsError before the weights are touched, or where they
        are broken already."""
        first = self.trainer.step * self.config.prompts
        trajectories = self.roll_out(first_group=first, num_groups=self.config.prompts)
        if self.config.entropy_of == "trainer":
            trajectories = self._with_own_entropies(trajectories)
        (result,) = self.trainer.train([self.groups(trajectories, first)])
        return result.metrics

    def _with_own_entropies(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        weights = self.history.weights(self.trainer.version, "float32")
        found = score(self.decoder, weights, trajectories)
        changed = []
        for trajectory, entropies in zip(
            trajectories, split(found.entropies, trajectories), strict=True
        ):
            (segment,) = trajectory.segments
            column = segment.behavior_entropies.copy()
            column[segment.sampled] = entropies.numpy()
            segment = replace(segment, behavior_entropies=column)
            changed.append(replace(trajectory, segments=(segment,)))
        return changed

    def evaluate(self, k: int) -> Outcomes:
        """Outcomes [eval_problems, k] of held-out problems: float32, the weights as they are now,
        the same problems and uniforms every time."""
        problems = [p for p in range(self.config.eval_problems) for _ in range(k)]
        ids = [
            RolloutId(_EVALUATION, p, i) for p in range(self.config.eval_problems) for i in range(k)
        ]
        plan = Plan(Staleness(), self.trainer.version, len(ids))
        found = roll_out(self.play("test"), self.sampler("float32"), plan, ids, problems)
        return np.array([t.outcome or 0.0 for t in found]).reshape(-1, k)


def train_once(table: Mapping[str, Any]) -> list[Row]:
    """One whole run: rows {"measure", "step", "value"}.

    accuracy (held out) at every window, accuracy_start, accuracy_end, pass_at_k of all rollouts of
    a problem and pass_at_1, _2, _4 ... of fewer, collapsed, nonfinite_run; and every metric of the
    trainer, reduced over each window.
    """
    config = RunConfig.read(table)
    started = time.process_time()
    run = LabRun(config)
    start = _at_the_start(run)
    rows = [_row("accuracy", 0, start.mean()), _row("accuracy_start", 0, start.mean())]
    nonfinite = False
    window = Metrics()
    for step in range(1, config.steps + 1):
        try:
            window.merge(run.step())
        except NumericsError:
            nonfinite = True
        if nonfinite or step % config.window == 0 or step == config.steps:
            rows += [_row(name, step, value) for name, value in window.to_row().items()]
            window = Metrics()
            if not nonfinite and step < config.steps:
                on_the_way, nonfinite = _outcomes(run, 1)
                rows.append(_row("accuracy", step, on_the_way.mean()))
        if nonfinite:
            break
    end, cannot_draw = _outcomes(run, config.eval_k)
    nonfinite |= cannot_draw
    reached = pass_curve(end)
    summary = {
        **{f"pass_at_{k}": value for k, value in reached.items()},
        "accuracy": end.mean(),
        "accuracy_end": end.mean(),
        "pass_at_k": reached[config.eval_k],
        "nonfinite_run": float(nonfinite),
        "collapsed": float(has_collapsed(start.mean(), end.mean(), nonfinite)),
        "cpu_s": time.process_time() - started,
    }
    return rows + [_row(name, step, value) for name, value in summary.items()]


def _outcomes(run: LabRun, k: int) -> tuple[Outcomes, bool]:
    """(outcomes, whether the weights are broken): those draw nothing, and solve nothing."""
    try:
        return run.evaluate(k), False
    except NumericsError:
        return np.zeros((run.config.eval_problems, k)), True


_STARTS: dict[str, Outcomes] = {}
"""By what they hang on: all runs of a sweep begin with the same weights."""


def _at_the_start(run: LabRun) -> Outcomes:
    """The first evaluation, taken once a process for all runs that share it."""
    config = run.config
    shared = (config.model, config.task, config.eval_problems, config.eval_k)
    key = json.dumps(shared, sort_keys=True)
    if key not in _STARTS:
        _STARTS[key] = run.evaluate(config.eval_k)
    return _STARTS[key]


def pass_curve(outcomes: Outcomes) -> dict[int, float]:
    """Mean pass@k of outcomes [problems, n] of 0 and 1, for k = 1, 2, 4 ... and n: the unbiased
    estimate of `estr.scores.pass_at_k`."""
    n = outcomes.shape[1]
    solved = outcomes.sum(axis=1).astype(int).tolist()
    ks = [*(2**i for i in range(n.bit_length()) if 2**i < n), n]
    return {k: float(np.mean([pass_at_k(n, c, k) for c in solved])) for k in ks}


def has_collapsed(start: float, end: float, nonfinite: bool) -> bool:
    """The definition, fixed before anything was run."""
    return nonfinite or not math.isfinite(end) or end < 0.5 * start


def _row(measure: str, step: int, value: float | None) -> Row:
    return {"measure": measure, "step": step, "value": None if value is None else float(value)}


def _recipe(config: RunConfig) -> Recipe:
    return recipe_from_table(
        {
            "name": "lab",
            "model": config.model,
            "task": config.task,
            "correction": list(config.correction),
            "seed": config.seed,
            "steps": config.steps,
            "groups_per_step": config.prompts,
            "group_size": config.group_size,
            "max_staleness": config.staleness.depth,
            "kv": config.staleness.kv,
            "sampling": SAMPLING.get(config.task["name"], _SAMPLING),
            "trainer": {
                "lr": config.lr,
                "warmup_steps": config.warmup_steps,
                "schedule": "constant",
                "betas": (0.9, 0.99),
                "grad_clip": 1.0,
                # Rollouts differ in length: larger micro-batches are mostly padding.
                "token_budget": 2048,
            },
        }
    )
