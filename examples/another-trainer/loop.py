"""Somebody else's training loop, with estr's corrections and denominators: no engine, no recipe.

A softmax policy over 32 arms learns which one pays. Its actions are drawn from weights that are
`LAG` updates old, as an asynchronous trainer's would be.
"""

import argparse
from collections import deque

import torch

from estr import corrections, losses
from estr.advantages import group_advantages

NUM_ARMS, GROUPS, GROUP_SIZE, LAG = 32, 8, 8, 8


def train(correction, *, steps, seed=0):
    """(probability of the right arm at the end, share of actions outside the trust region)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(NUM_ARMS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.3)
    history = deque([logits.detach().clone()] * (LAG + 1), maxlen=LAG + 1)
    dropped = total = 0
    for _ in range(steps):
        behavior = torch.log_softmax(history[0], dim=-1)  # what drew the actions
        actions = torch.multinomial(
            behavior.exp(), GROUPS * GROUP_SIZE, replacement=True, generator=generator
        )
        outcomes = (actions == 7).float().view(GROUPS, GROUP_SIZE)
        advantages = [group_advantages(row.tolist(), row.tolist(), kind="grpo") for row in outcomes]
        entropy = -(behavior.exp() * behavior).sum()

        columns = corrections.TokenColumns(
            policy_logprobs=torch.log_softmax(logits, dim=-1)[actions],  # with the gradient
            behavior_logprobs=behavior[actions],
            behavior_entropies=entropy.expand(len(actions)),
            advantages=torch.tensor(advantages).flatten(),
            loss_mask=torch.ones(len(actions), dtype=torch.bool),
        )
        # The denominator is always explicit: ALL actions of the step, dropped ones included.
        result = losses.policy_loss(columns, correction, denominators=len(actions))
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()

        history.append(logits.detach().clone())
        dropped += int((~result.kept).sum())
        total += len(actions)
    return torch.softmax(logits, dim=-1)[7].item(), dropped / total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    for table in ({"name": "none"}, {"name": "estr", "tau": 0.5}, {"name": "icepop"}):
        right, share = train(corrections.build_correction([table]), steps=steps)
        print(f"{table['name']:8} right arm {right:.3f}, outside the region {share:.3f}")
