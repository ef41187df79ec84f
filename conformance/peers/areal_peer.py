"""AReaL: `ppo_actor_loss_fn` and the mask of M2PO. Logging and serving packages, which they do not
use, are replaced by empty modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stubs import stub

stub("openai pybase64 tabulate swanlab tensorboardX trackio wandb")

from areal.api.cli_args import RejectionSamplingConfig  # noqa: E402
from areal.utils.functional.functional import ppo_actor_loss_fn  # noqa: E402
from common import main  # noqa: E402
from torch import Tensor  # noqa: E402


def loss(proximal: str, rejection: dict[str, Any] | None = None, **options: Any):
    def case(t: SimpleNamespace) -> Tensor:
        return ppo_actor_loss_fn(
            t.policy,
            getattr(t, proximal),
            t.behavior,
            t.advantages,
            0.2,
            t.mask,
            rejection_sampling=RejectionSamplingConfig(**rejection) if rejection else None,
            **options,
        )[0]

    return case


def m2po_mask(t: SimpleNamespace) -> Tensor:
    from areal.trainer.ppo.actor import _apply_m2po_masking

    return _apply_m2po_masking(t.behavior, t.proximal, t.mask, 0.04)


def ratio(action: str, level: str, **bounds: float) -> dict[str, Any]:
    return {"metric": "ratio", "action": action, "level": level, **bounds}


CASES = {
    "ppo": loss("behavior"),
    "dual_clip": loss("behavior", c_clip=3.0),
    "decoupled": loss("proximal", ratio("clamp", "token", upper=5.0)),
    "mis_token": loss("proximal", ratio("mask", "token", lower=0.5, upper=2.0)),
    "mis_sequence": loss(
        "proximal", {**ratio("mask", "sequence", lower=0.5, upper=2.0), "agg": "mean"}
    ),
    "m2po_mask": m2po_mask,
}

if __name__ == "__main__":
    main("areal", CASES, {name: CASES[name] for name in ("ppo", "mis_token")})
