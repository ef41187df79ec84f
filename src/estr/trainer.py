"""The trainer: groups of trajectories in, a new version of the weights out.

    groups --make_batches--> micro-batches --model--> policy log-probs --policy_loss--> gradient
           --AdamW--> version + 1 --publish--> weight store --> engine

One optimizer step per mini-batch of B groups. The gradient of a mini-batch is the sum over its
micro-batches of terms over one global count, so its value does not depend on how it was cut. A
mini-batch without a single non-zero advantage is skipped: the step counter rises, the version does
not. The proximal pass is made only when a correction asks for it and a batch has several steps, or
when its rule reads the whole step before the first gradient (WHOLE_STEP). A reference, the weights
that the run started from, is kept and asked only where their distance has a price (`kl`).

With several ranks (`estr.ranks`) this is what each of them does: all are given the whole step, each
computes its own micro-batches, and what is found of the tokens is shared before anything is made of
it, so that losses, metrics and results are those of the step on every rank.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .adapters import add_adapters
from .batch import Batch, make_batches
from .buffer import StepResult, TrainingGroup
from .corrections import build_correction, for_step
from .corrections.base import WHOLE_STEP, Correction, concatenate
from .diagnostics import token_diagnostics, trajectory_diagnostics
from .errors import NumericsError
from .kl import kl_diagnostics, kl_loss
from .losses import policy_loss
from .metrics import Metrics
from .models import enable_gradient_checkpointing
from .options.run import TrainerOptions
from .parameters import Parameters, weights_digest
from .ranks import ALONE, Ranks, whole
from .reference import Reference, price_in_reward, with_reference
from .scorer import Scorer
from .token_results import TokenResults, consumptions_of, num_eligible, token_columns
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
    initial_digest: of the weights that the run started from, where they are needed all along.
    ranks: those that train it together; every method that computes, publishes, saves or loads is
    then called on all of them, with the same arguments, and only rank 0 publishes."""

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: Recipe,
        store: WeightStore,
        *,
        publish_dtype: torch.dtype = torch.float32,
        vocab_size: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model = model.eval()  # no dropout: policy log-probs must be those of the policy
        self.recipe = recipe
        self.options = recipe.trainer
        self.correction = build_correction(recipe.correction)
        self.store = store
        self.ranks = ranks
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
        self.scorer = Scorer(model)
        self.reference = Reference(self.scorer, has_adapters=has_adapters) if has_price else None
        if self.options.gradient_checkpointing:  # last: model.eval() would undo it
            enable_gradient_checkpointing(model)
        if ranks.mesh is not None:
            self._shard()
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

    def _shard(self) -> None:
        self.ranks.shard(self.scorer)
        if self.reference is not None and self.reference.scorer is not self.scorer:
            self.ranks.shard(self.reference.scorer)
        self.weights.look_up()

    def publish(self) -> int:
        """Put the current version into the store unless it is there; returns it."""
        if self._published != self.version:
            state = self.ranks.gather(self.state())
            if self.ranks.rank == 0:
                self._digest = self.store.publish(self.version, state)
            self._published = self.version
        return self.version

    def state(self) -> dict[str, Tensor]:
        """The weights as engines load them, floating tensors in publish_dtype; sharded where those
        are."""
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

        Raises NumericsError on a non-finite loss or gradient, before that step touches the weights;
        the steps of the mini-batches before it have been taken.
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
            ranks=self.ranks.size,
        )

    def _with_reference(
        self,
        reference: Reference,
        minibatches: Sequence[Sequence[TrainingGroup]],
        cut: list[list[Batch]],
    ) -> tuple[Sequence[Sequence[TrainingGroup]], list[list[Batch]]]:
        """The batches with the reference's log-probs; rewards and advantages follow, where the
        distance is paid for in the reward."""
        with reference.in_force():
            scored = [self._logprobs(batches, reference.scorer) for batches in cut]
        cut = [
            [with_reference(batch, column) for batch, column in zip(batches, columns, strict=True)]
            for batches, columns in zip(cut, scored, strict=True)
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
        return [[*self._logprobs(batches)] for batches in cut]

    @torch.no_grad()
    def _logprobs(self, batches: list[Batch], scorer: Scorer | None = None) -> list[Tensor]:
        """Log-probs of the eligible tokens of all micro-batches, each scored by its rank."""
        others = () if scorer is None else (scorer,)
        own = {}
        for turn in self.ranks.turns(batches):
            if turn is None:
                self._stand_in(*others)
            else:
                own[turn] = self.score(batches[turn], *others)[0]
        return self.ranks.share(own, [b.rank for b in batches], num_eligible(batches))

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
        try:
            parts = self._gradients(batches, proximal, correction)
        except BaseException:  # micro-batches before it have left their gradients
            self._forget_gradients()
            raise
        for batch, part, columns in zip(batches, parts, proximal, strict=True):
            metrics.merge(self._diagnostics(batch, part, columns, target))
        loss = sum((part.loss for part in parts), 0.0)
        priced = self.reference is not None and self.recipe.kl.place == "loss"
        trainable = any(a for g in groups for a in g.advantages) or (priced and bool(batches))
        norm = self._gradient_norm() if trainable else 0.0
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._forget_gradients()
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
        self._forget_gradients()
        self.step += 1
        metrics.add_sum("loss", loss)
        metrics.add_max("grad_norm", norm)
        metrics.add_max("lr", rate)
        metrics.add_sum("skipped_updates", 0.0 if trainable else 1.0)
        metrics.add_sum("trainer_s", time.monotonic() - clock)
        consumptions = consumptions_of(groups, batches, parts, proximal)
        return StepResult(self.step, target, self.version, metrics, consumptions=consumptions)

    def _forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.weights.forget_gradients()

    def _correction_of_step(
        self, batches: list[Batch], proximal: list[Tensor | None]
    ) -> Correction:
        scored = zip(batches, proximal, strict=True)
        columns = [token_columns(batch, q, q) for batch, q in scored if q is not None]
        return for_step(self.correction, concatenate(columns)) if columns else self.correction

    def _gradients(
        self, batches: list[Batch], proximal: list[Tensor | None], correction: Correction
    ) -> list[TokenResults]:
        """Forward and backward of this rank's micro-batches; returns the results of all."""
        own = {}
        for turn in self.ranks.turns(batches):
            if turn is None:
                torch.autograd.backward([0.0 * self._stand_in().sum()])
            else:
                own[turn] = self._accumulate(batches[turn], proximal[turn], correction)
        if self.ranks.size == 1:
            return [own[i] for i in range(len(batches))]
        packed = self.ranks.share(
            {i: part.packed() for i, part in own.items()},
            [batch.rank for batch in batches],
            [4 * number + 2 for number in num_eligible(batches)],
        )
        return [TokenResults.unpacked(part) for part in packed]

    def _accumulate(
        self, batch: Batch, proximal: Tensor | None, correction: Correction
    ) -> TokenResults:
        """Forward and backward of one micro-batch."""
        policy, entropies = self.score(batch)
        columns = token_columns(batch, policy, proximal)
        denominators = batch.token_denominators()
        result = policy_loss(columns, correction, denominators=denominators)
        loss, price = result.loss, 0.0
        if batch.ref_logprobs is not None and self.recipe.kl.place == "loss":
            term = kl_loss(
                policy,
                batch.ref_logprobs[batch.loss_mask],
                coefficient=self.recipe.kl.coefficient,
                estimator=self.recipe.kl.estimator,
                denominators=denominators,
            )
            price = float(term.detach())
            loss = loss + term
        torch.autograd.backward([loss])
        self.weights.collect_gradients()
        return TokenResults(
            policy.detach(),
            entropies.detach(),
            result.kept,
            result.clipped,
            float(loss.detach()),
            price,
        )

    def _diagnostics(
        self, batch: Batch, part: TokenResults, proximal: Tensor | None, target: int
    ) -> Metrics:
        columns = token_columns(batch, part.policy, proximal)
        metrics = token_diagnostics(
            columns, part, policy_entropies=part.entropies, target_version=target
        )
        if batch.ref_logprobs is not None:
            metrics.merge(kl_diagnostics(part.policy, batch.ref_logprobs[batch.loss_mask]))
            if self.recipe.kl.place == "loss":
                metrics.add_sum("kl_loss", part.kl_loss)
        return metrics

    def score(self, batch: Batch, scorer: Scorer | None = None) -> tuple[Tensor, Tensor]:
        """(log-probs with gradient, entropies) of the eligible tokens, flat and in row order.
        scorer: of another model than the trained one."""
        return self._pass(batch.token_ids, batch.loss_mask, scorer or self.scorer)

    def _stand_in(self, scorer: Scorer | None = None) -> Tensor:
        """The log-prob of one token, [1], for a turn in which this rank has no micro-batch: every
        pass gathers the shards of all ranks."""
        device = self.options.device
        ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
        mask = torch.tensor([[False, True]], device=device)
        return self._pass(ids, mask, scorer or self.scorer)[0]

    def _pass(self, token_ids: Tensor, mask: Tensor, scorer: Scorer) -> tuple[Tensor, Tensor]:
        with torch.autocast(
            torch.device(self.options.device).type,
            dtype=torch.bfloat16,
            enabled=self.options.dtype == "bfloat16",
        ):
            scored: tuple[Tensor, Tensor] = scorer(
                token_ids,
                mask,
                temperature=self.recipe.sampling.temperature,
                vocab_size=self._vocab_size,
            )
        return scored

    def _gradient_norm(self) -> float:
        clip = self.options.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), clip, foreach=None)
        return float(whole(norm))
