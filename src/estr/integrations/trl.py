"""A correction of ours in TRL's `GRPOTrainer` (1.16).

    trainer = grpo_trainer()(correction=[{"name": "estr", "tau": 0.5}], model=..., args=..., ...)

Generation, rewards, advantages, logging and checkpoints are TRL's. Two of its steps are replaced:
after the rollouts the log-probs and entropies of their tokens are noted, and the loss is
`estr.losses.policy_loss`, divided by the token count of the whole optimizer step.

TRL does not record the entropy of the distribution that a token is drawn from. Without vLLM the
rollouts come from the very weights that are trained, so one forward pass right after them gives
log-probs and entropies of the sampler, up to the rounding of another batch shape. With vLLM the
recorded log-probs are mu's, but that pass only gives the entropy of the trainer's weights: another
rule where sampler and trainer differ. The metric `estr/trainer_entropy` is then 1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..corrections import Correction, TokenColumns, build_correction
from ..errors import ConfigError
from ..losses import policy_loss

_CARRIED = frozenset({"proximal_logprobs", "behavior_entropies", "sequence_ids"})

_IMAGES = frozenset(
    {
        "pixel_values",
        "image_grid_thw",
        "num_images",
        "pixel_attention_mask",
        "spatial_shapes",
        "num_tiles",
        "image_sizes",
        "token_type_ids",
        "mm_token_type_ids",
        "image_position_ids",
    }
)
"""What a batch with images has beside its tokens."""

_REFUSED: dict[str, tuple[Any, str]] = {
    "loss_type": ("dapo", "the loss is divided by the token count of the optimizer step"),
    "epsilon": (0.2, "clip bounds are options of the corrections"),
    "epsilon_high": (None, "clip bounds are options of the corrections"),
    "delta": (None, "the correction dual_clip has such a bound"),
    "beta": (0.0, "the KL term is not part of this loss"),
    "top_entropy_quantile": (1.0, "the correction alone decides what is kept"),
    "off_policy_mask_threshold": (None, "the correction alone decides what is kept"),
    "importance_sampling_level": ("token", "levels are options of the corrections"),
    "entropy_coef": (0.0, "the entropy bonus is not part of this loss"),
    "use_adaptive_entropy": (False, "the entropy bonus is not part of this loss"),
    "use_liger_kernel": (False, "its loss does not come past here"),
    "vllm_importance_sampling_correction": (False, "it would weigh with q/mu a second time"),
    "top_p": (1.0, "entropies speak of the whole distribution"),
    "top_k": (0, "entropies speak of the whole distribution"),
    "min_p": (None, "entropies speak of the whole distribution"),
    "repetition_penalty": (1.0, "entropies speak of the distribution before it"),
    "generation_kwargs": (None, "it could change the distribution that is drawn from"),
}
"""Options of GRPOConfig -> the one value that this loss stands for, and why."""


@functools.cache
def grpo_trainer() -> type:
    """`EstrGRPOTrainer`, a subclass of TRL's `GRPOTrainer` with one argument more.

    correction: entries as in a recipe (keyword; default `[{"name": "estr"}]`). With more than one
    optimizer step per batch q of corrections that read it is the policy right after the rollouts.
    Raises ConfigError on an option of GRPOConfig that this loss would silently not follow.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    class EstrGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
        def __init__(
            self,
            *args: Any,
            correction: Sequence[Mapping[str, Any]] = ({"name": "estr"},),
            **kwargs: Any,
        ) -> None:
            self.correction = _correction(correction)
            settings = kwargs.get("args", args[2] if len(args) > 2 else None)
            if settings is not None:  # before a model is loaded
                _check(settings)
            super().__init__(*args, **kwargs)
            if self.aux_loss_enabled:
                raise ConfigError("router_aux_loss_coef must be 0: this loss has no such term")

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            with torch.no_grad():
                logprobs, entropies = _scored(self, self.model, output)
            output["old_per_token_logps"] = logprobs
            output["behavior_entropies"] = entropies
            return output

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            mode = "train" if self.model.training else "eval"
            logprobs, entropies = _scored(self, model, inputs)
            columns = _columns(inputs, logprobs)
            result = policy_loss(
                columns, self.correction, denominators=_denominator(self, inputs, mode)
            )
            mask = columns.loss_mask
            shares = torch.stack(
                [
                    (~result.kept & mask).sum(),
                    result.clipped.sum(),
                    entropies[mask].sum(),
                    mask.sum(),
                ]
            )
            dropped, clipped, entropy, count = self.accelerator.reduce(shares, "sum").tolist()
            for name, total in (
                ("estr/rho_mask", dropped),
                ("clip_ratio/region_mean", clipped),
                ("entropy", entropy),
            ):
                self._metrics[mode][name].append(total / max(count, 1.0))
            from_trainer = float("sampling_per_token_logps" in inputs)
            self._metrics[mode]["estr/trainer_entropy"].append(from_trainer)
            return result.loss

    return EstrGRPOTrainer


def _correction(entries: Sequence[Mapping[str, Any]]) -> Correction:
    correction = build_correction(entries)
    missing = correction.needs - _CARRIED
    if missing:
        raise ConfigError(f"TRL's batches do not carry {', '.join(sorted(missing))}")
    return correction


def _check(args: Any) -> None:
    for name, (value, why) in _REFUSED.items():
        given = getattr(args, name, value)
        on = name != "vllm_importance_sampling_correction" or args.use_vllm
        if on and given != value and not (given is None and not value):
            raise ConfigError(f"GRPOConfig.{name} must be {value}, not {given}: {why}")
    per_generation = args.steps_per_generation or args.gradient_accumulation_steps
    if per_generation < args.gradient_accumulation_steps:
        raise ConfigError(
            f"GRPOConfig.steps_per_generation must be at least gradient_accumulation_steps "
            f"({args.gradient_accumulation_steps}), not {per_generation}: the token count of an "
            "optimizer step must be known at its first micro-batch"
        )


def _scored(trainer: Any, model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) [B, T] of the completions, the latter detached. Raises ConfigError for
    batches with images."""
    images = sorted(_IMAGES & {name for name, value in inputs.items() if value is not None})
    if images:
        raise ConfigError(f"this loss reads text only, and the batch has {', '.join(images)}")
    completions = inputs["completion_ids"]
    logprobs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        model,
        torch.cat([inputs["prompt_ids"], completions], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        completions.shape[1],
        trainer.args.per_device_train_batch_size,
        compute_entropy=True,
    )
    # In float32 whatever the model computes in: TRL fuses the output layer with the log-softmax.
    return logprobs, entropies.detach()


def _columns(inputs: Mapping[str, Any], logprobs: Tensor) -> TokenColumns:
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    advantages = inputs["advantages"]
    noted = inputs["old_per_token_logps"]
    return TokenColumns(
        policy_logprobs=logprobs,
        behavior_logprobs=inputs.get("sampling_per_token_logps", noted),
        advantages=advantages.reshape(len(advantages), -1).expand_as(logprobs),
        loss_mask=mask.bool(),
        proximal_logprobs=noted,
        behavior_entropies=inputs["behavior_entropies"],
        sequence_ids=torch.arange(len(logprobs), device=logprobs.device)[:, None].expand_as(
            logprobs
        ),
    )


def _denominator(trainer: Any, inputs: Mapping[str, Any], mode: str) -> Tensor:
    """The tokens of the optimizer step, as TRL counts them for its loss "dapo": those of all
    processes' rollouts, shared out over the steps that are taken on them."""
    tokens = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    if mode == "train":
        share = trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
        tokens = tokens * share
    denominator: Tensor = tokens
    return denominator
