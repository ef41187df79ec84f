"""TRL: `GRPOTrainer._compute_loss`, called on a stand-in for the trainer that returns the given
log-probs instead of running a model."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch
from common import main
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer


def trainer(loss_type: str, policy: Tensor, delta: float | None, use_vllm: bool) -> SimpleNamespace:
    identity = SimpleNamespace(
        num_processes=1, gather=lambda t: t, reduce=lambda t, reduction: t, sync_gradients=True
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (policy, torch.zeros_like(policy), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.2,
        args=SimpleNamespace(delta=delta, steps_per_generation=1, use_bias_correction_kl=False),
        use_vllm=use_vllm,
        vllm_importance_sampling_correction=use_vllm,
        model=SimpleNamespace(training=True),
        accelerator=identity,
        current_gradient_accumulation_steps=1,
        max_completion_length=policy.shape[1],
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )


def loss(loss_type: str, *, delta: float | None = None, weighed: bool = False):
    def case(t: SimpleNamespace) -> Tensor:
        ids = torch.zeros_like(t.policy, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": t.mask.int(),
            "advantages": t.advantages,
            "old_per_token_logps": t.proximal if weighed else t.behavior,
            "num_items_in_batch": torch.tensor(float(t.count)),
        }
        if weighed:
            weights = (t.proximal - t.behavior).exp().clamp(max=2.0)
            inputs["importance_sampling_ratio"] = weights
        return GRPOTrainer._compute_loss(trainer(loss_type, t.policy, delta, weighed), None, inputs)

    return case


CASES = {
    "dapo": loss("dapo"),
    "dapo_delta": loss("dapo", delta=3.0),
    "bnpo": loss("bnpo"),
    "grpo": loss("grpo"),
    "dapo_tis": loss("dapo", weighed=True),
}

if __name__ == "__main__":
    main("trl", CASES, {name: CASES[name] for name in ("dapo", "bnpo", "grpo")})
