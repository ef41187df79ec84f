"""The trainer: groups of trajectories in, a new version of the weights out.

    groups --make_batches--> micro-batches --model--> policy log-probs --policy_loss--> gradient
           --AdamW--> version + 1 --publish--> weight store --> engine

One optimizer step per mini-batch of B groups. The gradient of a mini-batch is the sum over its
micro-batches of terms over one global count, so its value does not depend on how it was cut. A
mini-batch without a single non-zero advantage is skipped: the step counter rises, the version does
not. The proximal pass is made only when a correction asks for it and a batch has several steps, or
when its rule reads the whole step before the first gradient (WHOLE_STEP). A reference, the weights
that the run started from, is kept and asked only where their distance has a price (`kl`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .adapters import add_adapters
from .batch import Batch, make_batches, scatter_back, token_places, turn_ids
from .buffer import StepResult, TrainingGroup
from .corrections import build_correction, for_step
from .corrections.base import WHOLE_STEP, Correction, TokenColumns, concatenate
from .diagnostics import token_diagnostics, trajectory_diagnostics
from .errors import NumericsError
from .heads import Head, split_head
from .kl import kl_diagnostics, kl_loss
from .logprobs import next_token, statistics_from_hidden, token_statistics
from .losses import PolicyLoss, policy_loss
from .metrics import Metrics
from .models import enable_gradient_checkpointing
from .options.run import TrainerOptions
from .parameters import Parameters, weights_digest
from .reference import Reference, price_in_reward, with_reference
from .types import Consumption
from .weights import WeightStore

if TYPE_CHECKING:
    from torch import Tensor

    from .config import Recipe


def learning_rate(step: int, total_steps: int, options: TrainerOptions) -> float:
    """The learning rate of 0-based optimizer step `step`: linear warm-up, then the schedule, which
    reaches 0 after the last step."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    span = max(1, total_steps - options.warmup_steps)
    done = min(1.0, (step - options.warmup_steps) / span)
    if options.schedule == "linear":
        return options.lr * (1.0 - done)
    return options.lr * 0.5 * (1.0 + math.cos(math.pi * done))


class Trainer:
    """Owns the float32 master weights and the optimizer. Synchronous; hosted by a worker process
    or used in place. model: the weights that the run started from, in float32. publish_dtype: of
    the published weights. vocab_size: number of real token ids where the output layer is padded.
    initial_digest: of the weights that the run started from, where they are needed all along."""

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: Recipe,
        store: WeightStore,
        *,
        publish_dtype: torch.dtype = torch.float32,
        vocab_size: int | None = None,
    ) -> None:
        self.model = model.eval()  # no dropout: policy log-probs must be those of the policy
        self.recipe = recipe
        self.options = recipe.trainer
        self.correction = build_correction(recipe.correction)
        self.store = store
        self.step = 0
        self.version = 0
        self._published = -1
        self._digest = ""
        self._publish_dtype = publish_dtype
        self._vocab_size = vocab_size
        has_adapters, has_price = recipe.lora.rank > 0, recipe.kl.coefficient > 0
        self.initial_digest = weights_digest(model) if has_adapters or has_price else None
        if has_adapters:
            add_adapters(model, recipe.lora, seed=recipe.seed)
        self.weights = Parameters(
            model, dtype=getattr(torch, self.options.param_dtype), has_adapters=has_adapters
        )
        self.reference = Reference(model, has_adapters=has_adapters) if has_price else None
        self._head = split_head(model)
        if self.options.gradient_checkpointing:  # last: model.eval() would undo it
            enable_gradient_checkpointing(model)
        self.parameters = self.weights.masters
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=self.options.lr,
            betas=self.options.betas,
            eps=self.options.adam_eps,
            weight_decay=self.options.weight_decay,
            fused=True,
        )
        self._busy_s = 0.0
        self._started = time.monotonic()

    def publish(self) -> int:
        """Put the current version into the store unless it is there; returns it."""
        if self._published != self.version:
            self._digest = self.store.publish(self.version, self.state())
            self._published = self.version
        return self.version

    def state(self) -> dict[str, Tensor]:
        """The weights as engines load them: floating tensors in publish_dtype."""
        return {
            name: t.to(self._publish_dtype) if t.is_floating_point() else t
            for name, t in self.weights.published().items()
        }

    def master_state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of the weights, as it is; see `Parameters.saved`."""
        return self.weights.saved()

    def load_master_state(self, state: dict[str, Tensor]) -> None:
        """Put back tensors named as in master_state()."""
        self.weights.load(state)

    def train(self, minibatches: Sequence[Sequence[TrainingGroup]]) -> list[StepResult]:
        """One optimizer step per mini-batch, then publish if it is due.

        Raises NumericsError on a non-finite loss or gradient, before the weights are touched.
        """
        clock = time.monotonic()
        cut = [self._cut(groups) for groups in minibatches]
        if self.reference is not None:
            minibatches, cut = self._with_reference(self.reference, minibatches, cut)
        proximal = self._proximal_passes(cut)
        results = [
            self._step(groups, batches, columns)
            for groups, batches, columns in zip(minibatches, cut, proximal, strict=True)
        ]
        if self.version - self._published >= self.recipe.publish_every:
            self.publish()
            results[-1] = dataclasses.replace(results[-1], digest=self._digest)
        self._busy_s += time.monotonic() - clock
        return results

    def statistics(self) -> dict[str, float]:
        """busy_s (wall time inside steps) and wall_s since the start."""
        return {"busy_s": self._busy_s, "wall_s": time.monotonic() - self._started}

    def _cut(self, groups: Sequence[TrainingGroup]) -> list[Batch]:
        trajectories = [t for g in groups for t in g.trajectories]
        return make_batches(
            trajectories,
            [a for g in groups for a in g.advantages],
            [g.id for g in groups for _ in g.trajectories],
            aggregation=self.recipe.loss.aggregation,
            token_budget=self.options.token_budget,
            whole_trajectories="sequence_ids" in self.correction.needs,
            device=self.options.device,
        )

    def _with_reference(
        self,
        reference: Reference,
        minibatches: Sequence[Sequence[TrainingGroup]],
        cut: list[list[Batch]],
    ) -> tuple[Sequence[Sequence[TrainingGroup]], list[list[Batch]]]:
        """The batches with the reference's log-probs; rewards and advantages follow, where the
        distance is paid for in the reward."""
        with torch.no_grad(), reference.in_force():
            cut = [
                [with_reference(b, self.score(b, reference.head)[0]) for b in batches]
                for batches in cut
            ]
        if self.recipe.kl.place == "loss":
            return minibatches, cut
        priced = [
            price_in_reward(groups, batches, self.recipe)
            for groups, batches in zip(minibatches, cut, strict=True)
        ]
        return [groups for groups, _ in priced], [batches for _, batches in priced]

    def _proximal_passes(self, cut: list[list[Batch]]) -> list[list[Tensor | None]]:
        """Policy log-probs at the start of the batch, where they differ from the current ones."""
        needs = self.correction.needs
        if "proximal_logprobs" not in needs or (len(cut) == 1 and WHOLE_STEP not in needs):
            return [[None] * len(batches) for batches in cut]
        with torch.no_grad():
            return [[self.score(batch)[0].detach() for batch in batches] for batches in cut]

    def _step(
        self,
        groups: Sequence[TrainingGroup],
        batches: list[Batch],
        proximal: list[Tensor | None],
    ) -> StepResult:
        clock = time.monotonic()
        target = self.version
        metrics = trajectory_diagnostics(
            [t for g in groups for t in g.trajectories],
            target_version=target,
            max_staleness=self.recipe.max_staleness,
        )
        rate = learning_rate(self.step, self.recipe.steps, self.options)
        correction = self._correction_of_step(batches, proximal)
        parts = [
            self._accumulate(batch, columns, correction, target, metrics)
            for batch, columns in zip(batches, proximal, strict=True)
        ]
        loss = sum((float(part.loss.detach()) for _, part in parts), 0.0)
        priced = self.reference is not None and self.recipe.kl.place == "loss"
        trainable = any(a for g in groups for a in g.advantages) or (priced and bool(batches))
        norm = self._gradient_norm() if trainable else 0.0
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise NumericsError(
                f"optimizer step {self.step}: loss {loss}, gradient norm {norm}; "
                "the weights were left as they were. Lower trainer.lr and go on from the last "
                "checkpoint"
            )
        if trainable:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.weights.write_back()
            self.version += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        metrics.add_sum("loss", loss)
        metrics.add_max("grad_norm", norm)
        metrics.add_max("lr", rate)
        metrics.add_sum("skipped_updates", 0.0 if trainable else 1.0)
        metrics.add_sum("trainer_s", time.monotonic() - clock)
        consumptions = consumptions_of(groups, batches, parts, proximal)
        return StepResult(self.step, target, self.version, metrics, consumptions=consumptions)

    def _correction_of_step(
        self, batches: list[Batch], proximal: list[Tensor | None]
    ) -> Correction:
        scored = zip(batches, proximal, strict=True)
        columns = [token_columns(batch, q, q) for batch, q in scored if q is not None]
        return for_step(self.correction, concatenate(columns)) if columns else self.correction

    def _accumulate(
        self,
        batch: Batch,
        proximal: Tensor | None,
        correction: Correction,
        target: int,
        metrics: Metrics,
    ) -> tuple[Tensor, PolicyLoss]:
        """Forward and backward of one micro-batch; returns the policy log-probs of its eligible
        tokens and its part of the loss."""
        policy, entropies = self.score(batch)
        columns = token_columns(batch, policy, proximal)
        denominators = batch.token_denominators()
        result = policy_loss(columns, correction, denominators=denominators)
        metrics.merge(
            token_diagnostics(columns, result, policy_entropies=entropies, target_version=target)
        )
        if batch.ref_logprobs is not None:
            ref = batch.ref_logprobs[batch.loss_mask]
            metrics.merge(kl_diagnostics(policy.detach(), ref))
            if self.recipe.kl.place == "loss":
                term = kl_loss(
                    policy,
                    ref,
                    coefficient=self.recipe.kl.coefficient,
                    estimator=self.recipe.kl.estimator,
                    denominators=denominators,
                )
                metrics.add_sum("kl_loss", float(term.detach()))
                result = dataclasses.replace(result, loss=result.loss + term)
        torch.autograd.backward([result.loss])
        self.weights.collect_gradients()
        return policy.detach(), result

    def score(self, batch: Batch, head: Head | None = None) -> tuple[Tensor, Tensor]:
        """(log-probs with gradient, entropies) of the eligible tokens, flat and in row order. head:
        of another model than the trained one."""
        head = head or self._head
        autocast = torch.autocast(
            torch.device(self.options.device).type,
            dtype=torch.bfloat16,
            enabled=self.options.dtype == "bfloat16",
        )
        weight = head.weight
        drawn: dict[str, Any] = {
            "temperature": self.recipe.sampling.temperature,
            "vocab_size": self._vocab_size,
            "gini": False,
        }
        with autocast:
            if weight is None:  # scaled or capped logits: they come whole
                states = head.logits(batch.token_ids)
                logits, token_ids = next_token(states, batch.token_ids, batch.loss_mask)
                statistics = token_statistics(logits, token_ids, **drawn)
            else:
                states = head.hidden(batch.token_ids)
                hidden, token_ids = next_token(states, batch.token_ids, batch.loss_mask)
                statistics = statistics_from_hidden(
                    hidden, weight, token_ids, head_bias=head.bias, **drawn
                )
        return statistics.logprobs, statistics.entropies

    def _gradient_norm(self) -> float:
        clip = self.options.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), clip, foreach=None)
        return float(norm)


def token_columns(batch: Batch, policy_logprobs: Tensor, proximal: Tensor | None) -> TokenColumns:
    """The eligible tokens of a micro-batch as flat columns [N], in row order."""
    mask = batch.loss_mask
    gini = batch.behavior_gini
    return TokenColumns(
        policy_logprobs=policy_logprobs,
        behavior_logprobs=batch.behavior_logprobs[mask],
        advantages=batch.advantages[mask],
        loss_mask=torch.ones_like(policy_logprobs, dtype=torch.bool),
        proximal_logprobs=proximal,
        behavior_entropies=batch.behavior_entropies[mask],
        behavior_gini=None if gini is None else gini[mask],
        versions=batch.versions[mask],
        sequence_ids=batch.sequence_ids[mask],
        turn_ids=turn_ids(mask)[mask],
    )


def consumptions_of(
    groups: Sequence[TrainingGroup],
    batches: Sequence[Batch],
    parts: Sequence[tuple[Tensor, PolicyLoss]],
    proximal: Sequence[Tensor | None],
) -> tuple[Consumption, ...]:
    """What a step made of each trajectory. parts[b]: (policy log-probs, loss) of batches[b]'s
    eligible tokens; proximal[b]: their proximal log-probs, None for all where no pass was made."""
    trajectories = [t for g in groups for t in g.trajectories]
    places = token_places(batches, trajectories)

    def columns(tensors: Sequence[Tensor], nothing: Any) -> Sequence[Any]:
        if not tensors:  # nothing to learn: there are no batches
            return [np.full(t.num_tokens, nothing) for t in trajectories]
        return scatter_back(batches, tensors, trajectories, places=places)

    passes = [tensor for tensor in proximal if tensor is not None]
    references = [b.ref_logprobs for b in batches if b.ref_logprobs is not None]
    return tuple(
        Consumption(*values)
        for values in zip(
            [a for g in groups for a in g.advantages],
            columns([policy for policy, _ in parts], np.float32(math.nan)),
            columns([part.kept for _, part in parts], False),
            columns([part.clipped for _, part in parts], False),
            columns(passes, None) if passes else [None] * len(trajectories),
            columns(references, None) if references else [None] * len(trajectories),
            strict=True,
        )
    )
