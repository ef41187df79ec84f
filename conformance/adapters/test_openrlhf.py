"""The hook of docs/hooks.md beside OpenRLHF's own loss."""

from __future__ import annotations

import inspect

import torch
from hooks import load
from openrlhf_peer import PolicyLoss

from estr.corrections import build_correction


def test_it_takes_the_place_of_policy_loss() -> None:
    hooks = load()
    hooks["WITHOUT_ENTROPY"] = build_correction([{"name": "none"}])
    ours, theirs = hooks["OpenRLHFLoss"](clip_eps_low=0.2), PolicyLoss()
    assert list(inspect.signature(ours.forward).parameters) == list(
        inspect.signature(theirs.forward).parameters
    )
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.rand(2, 5, generator=generator) - 0.5
    policy = (behavior + torch.randn(2, 5, generator=generator) * 0.3).requires_grad_()
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    given = {
        "advantages": torch.tensor([[1.0], [-1.0]]).expand(2, 5),
        "action_mask": mask,
        "rollout_log_probs": behavior,
        "dp_size": 2,
        "batch_num_tokens": 8.0,
        "global_batch_size": 2.0,
    }
    results = [loss(policy, behavior, **given) for loss in (ours, theirs)]
    assert len(results[0]) == len(results[1])
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][2], results[1][2])  # ppo_kl
    gradients = [torch.autograd.grad(result[0], policy)[0] for result in results]
    torch.testing.assert_close(*gradients)
