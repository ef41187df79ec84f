"""All versions of one run, so that any of them can draw for any later one.

    train synchronously, float32 --versions--> Archive --draw(staleness, arithmetic)--> rollouts
                                                  `----log_distributions(version)--> log p, whole

What stands between sampler and trainer is chosen after the training, so every source of mismatch is
measured at the same weights and on the same problems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..logprobs import log_distribution
from ..types import RolloutId, Trajectory
from .arithmetic import Arithmetic, activation_dtype
from .decoder import Cache, Weights, make_pass
from .rollouts import Sampler, roll_out
from .staleness import Plan, Staleness, WeightHistory
from .training import LabRun, RunConfig

FloatArray = npt.NDArray[np.float64]

_PROBLEMS_PER_SEED = 10**6
_FIRST_PROBLEM = 500_000
"""Of a seed's problems: what is measured on was never trained on."""


class Archive:
    """A run that has been trained, and its last `keep` versions, renumbered 0 to keep - 1.

    stride: training versions between two kept ones; a switch then jumps so many optimizer steps.
    """

    def __init__(self, config: RunConfig, *, keep: int, stride: int = 1) -> None:
        needed = (keep - 1) * stride
        if config.steps < needed:
            raise ValueError(f"{keep} versions, {stride} apart, need {needed} steps")
        self.run = LabRun(replace(config, staleness=Staleness(), arithmetic="float32"))
        self.history = WeightHistory(self.run.decoder, keep)
        first = config.steps - needed
        for step in range(config.steps + 1):
            if step >= first and (step - first) % stride == 0:
                version = self.run.trainer.version
                self.history.publish((step - first) // stride, self.run.history.fetch(version))
            if step < config.steps:
                self.run.step()
        self.newest = keep - 1
        self._usual = (24.0, 4.0)
        drawn = self.draw(Staleness(), "float32", config.prompts)
        self._usual = (
            float(np.mean([t.num_sampled_tokens for t in drawn])),
            float(np.mean([len(t.turns) for t in drawn])),
        )

    def draw(
        self,
        staleness: Staleness,
        arithmetic: Arithmetic,
        num_groups: int,
        *,
        target: int | None = None,
        first_group: int = 0,
        size: int | None = None,
    ) -> list[Trajectory]:
        """Rollouts for the weights `target` (the newest), `size` of each problem (the run's group
        size), of problems that training did not meet; the same problems and uniforms for the same
        groups."""
        size, seed = size or self.run.config.group_size, self.run.config.seed
        target = self.newest if target is None else target
        groups = np.repeat(np.arange(first_group, first_group + num_groups), size)
        sampler = Sampler(
            self.run.decoder,
            arithmetic,
            lambda version: self.history.weights(version, arithmetic),
            keep_kv=staleness.kv == "keep",
        )
        length, turns = self._usual
        plan = Plan(
            staleness,
            target,
            len(groups),
            length=length,
            turns=turns,
            rng=np.random.default_rng((seed, 2)),
        )
        return roll_out(
            self.run.play("train"),
            sampler,
            plan,
            [
                RolloutId(seed, _FIRST_PROBLEM + int(g), i % size)
                for i, g in enumerate(groups.tolist())
            ],
            [seed * _PROBLEMS_PER_SEED + _FIRST_PROBLEM + g for g in groups.tolist()],
        )

    @torch.inference_mode()
    def log_distributions(
        self,
        version: int,
        trajectories: Sequence[Trajectory],
        *,
        arithmetic: Arithmetic = "float32",
    ) -> Tensor:
        """log p of the whole vocabulary [n, V] at each sampled token, flat, trajectory after
        trajectory, under one version; each trajectory has one segment."""
        weights = self.history.weights(version, arithmetic)
        segments = [t.segments[0] for t in trajectories]
        lengths = [len(s) for s in segments]
        tokens = torch.from_numpy(np.concatenate([s.token_ids for s in segments]).astype(np.int64))
        rows = torch.arange(len(segments)).repeat_interleave(torch.tensor(lengths))
        places = torch.cat([torch.arange(n) for n in lengths])
        same: Callable[[int], Weights] = lambda _: weights  # noqa: E731 - a constant
        step, _ = make_pass(tokens, rows, places, places, torch.zeros_like(tokens), weights_of=same)
        decoder = self.run.decoder
        cache = Cache(decoder, len(segments), max(lengths), activation_dtype(arithmetic))
        logits = decoder.extend(cache, step, len(segments))
        # The logits of a token speak of the next one; the first token of a row is never sampled.
        sampled = np.flatnonzero(np.concatenate([s.sampled for s in segments]))
        temperature = trajectories[0].sampling.temperature
        return log_distribution(logits[sampled - 1], temperature=temperature)


def sampled_column(trajectories: Sequence[Trajectory], name: str) -> FloatArray:
    """A recorded column (behavior_logprobs, versions, token_ids ...) of all sampled tokens, flat,
    trajectory after trajectory."""
    segments = [t.segments[0] for t in trajectories]
    return np.concatenate([getattr(s, name)[s.sampled] for s in segments]).astype(np.float64)


def policy_logprobs(log_distributions: Tensor, trajectories: Sequence[Trajectory]) -> FloatArray:
    """log p of the tokens that were drawn [n], from `Archive.log_distributions`."""
    tokens = torch.from_numpy(sampled_column(trajectories, "token_ids").astype(np.int64))
    return log_distributions.gather(1, tokens[:, None])[:, 0].double().numpy()
