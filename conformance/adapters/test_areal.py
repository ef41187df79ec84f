"""The hook of docs/hooks.md beside AReaL's `grpo_loss_fn`."""

from __future__ import annotations

import inspect

import areal_peer  # first: it puts empty modules in place of what AReaL imports on the way
import torch
from hooks import load

from estr.corrections import build_correction


def test_it_takes_the_place_of_grpo_loss_fn() -> None:
    from areal.trainer.ppo.actor import grpo_loss_fn

    assert areal_peer.CASES
    hooks = load()
    hooks["ESTR"] = build_correction([{"name": "none"}])
    parameters = list(inspect.signature(grpo_loss_fn).parameters)
    assert parameters[:3] == list(inspect.signature(hooks["areal_loss"]).parameters)[:3]
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.rand(9, generator=generator) - 0.5
    policy = (behavior + torch.randn(9, generator=generator) * 0.3).requires_grad_()
    batch = {
        "logprobs": behavior,
        "prox_logp": behavior,
        "advantages": torch.randn(9, generator=generator),
        "loss_mask": torch.tensor([0, 1, 1, 1, 0, 1, 1, 1, 1]).float(),
        "cu_seqlens": torch.tensor([0, 4, 9]),
    }
    entropy = torch.rand(9, generator=generator)
    ours = hooks["areal_loss"](policy, entropy, batch)
    theirs = grpo_loss_fn(
        policy, entropy, dict(batch), eps_clip=0.2, eps_clip_higher=None, c_clip=None
    )
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, policy)[0], torch.autograd.grad(theirs, policy)[0]
    )
