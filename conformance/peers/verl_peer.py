"""verl: `core_algos` policy losses and the rollout-correction helper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from common import main
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig


def config(count: int | None, **options: Any) -> ActorConfig:
    """The actor's options; count: its explicit divisor, None: the mask that the loss is given."""
    settings = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    made = ActorConfig(**settings, **options)
    if count is not None:
        made.global_batch_info.update(dp_size=1, batch_num_tokens=count)
    return made


def loss(name: str, old: str, **options: Any):
    def case(t: SimpleNamespace) -> Tensor:
        return get_policy_loss_fn(name)(
            getattr(t, old),
            t.policy,
            t.advantages,
            t.mask,
            "token-mean",
            config(t.count, **options),
        )[0]

    return case


def weighed(level: str, threshold: float | str):
    """The weight of the helper under the vanilla loss on pi/q."""

    def case(t: SimpleNamespace) -> Tensor:
        weights, _ = compute_rollout_correction_weights(
            t.proximal - t.behavior, t.mask, level, threshold
        )
        vanilla = get_policy_loss_fn("vanilla")
        return vanilla(
            t.proximal, t.policy, t.advantages, t.mask, "token-mean", config(t.count), weights
        )[0]

    return case


def rejection(option: str, threshold: str):
    def case(t: SimpleNamespace) -> Tensor:
        log_ratio = (t.proximal - t.behavior).float()
        return compute_rollout_rejection_mask(log_ratio, t.mask, option, threshold)[0].bool()

    return case


def token_k2(t: SimpleNamespace) -> Tensor:
    """The rejected tokens leave the mask that the vanilla loss is given, and its count."""
    mask, _ = compute_rollout_rejection_mask(
        (t.policy - t.behavior).detach(), t.mask, "token_k2", "0.25"
    )
    return get_policy_loss_fn("vanilla")(
        t.behavior, t.policy, t.advantages, mask, "token-mean", config(None)
    )[0]


DPPO = {"clip_ratio_c": 20.0}
CASES = {
    "vanilla": loss("vanilla", "behavior"),
    "dppo_tv": loss("dppo_tv", "behavior", clip_ratio_low=0.15, clip_ratio_high=0.15, **DPPO),
    "dppo_kl": loss("dppo_kl", "behavior", clip_ratio_low=0.05, clip_ratio_high=0.05, **DPPO),
    "tis_token": weighed("token", 2.0),
    "tis_sequence": weighed("sequence", 2.0),
    "icepop": weighed("token", "0.5_5.0"),
    "token_k1_mask": rejection("token_k1", "0.5_2.0"),
    "seq_sum_k1_mask": rejection("seq_sum_k1", "0.5_2.0"),
    "seq_mean_k1_mask": rejection("seq_mean_k1", "0.5_2.0"),
    "token_k2": token_k2,
}

if __name__ == "__main__":
    main("verl", CASES, {n: CASES[n] for n in ("vanilla", "dppo_tv", "token_k2")})
