"""OpenRLHF: `PolicyLoss`. Its package imports flash-attn, deepspeed and more when it is loaded,
none of which the loss uses: they are replaced by empty modules here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stubs import stub

stub("bitsandbytes deepspeed flash_attn jsonlines loralib optimum pylatexenc ray ring_flash_attn")
stub("torchmetrics transformers_stream_generator vllm wandb")

from common import main  # noqa: E402
from openrlhf.models.loss import PolicyLoss  # noqa: E402
from torch import Tensor  # noqa: E402


def loss(old: str, **options: Any):
    def case(t: SimpleNamespace) -> Tensor:
        return PolicyLoss(**options)(
            t.policy,
            getattr(t, old),
            t.advantages,
            t.mask,
            rollout_log_probs=t.behavior,
            batch_num_tokens=t.count,
        )[0]

    return case


def corrected(mode: str, gating: str, threshold: list[float]):
    return loss(
        "proximal",
        is_correction_level="token",
        is_correction_mode=mode,
        is_correction_gating=gating,
        is_correction_threshold=threshold,
    )


CASES = {
    "ppo": loss("behavior"),
    "dual_clip": loss("behavior", dual_clip=3.0),
    "icepop": corrected("mask", "ratio", [0.5, 5.0]),
    "tis": corrected("clip", "ratio", [0.0, 2.0]),
    "binary_kl": corrected("mask", "binary_kl", [0.0, 0.05]),
}

if __name__ == "__main__":
    main("openrlhf", CASES, {name: CASES[name] for name in ("ppo", "icepop")})
