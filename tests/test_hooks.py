"""docs/hooks.md: every hook, given what its trainer would give it, is our loss."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from estr.corrections import TokenColumns, build_correction
from estr.losses import policy_loss

PAGE = Path(__file__).parents[1] / "docs" / "hooks.md"


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "hooks"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(block, names)
    return names


class Case:
    """Three trajectories, padded; the last token of the second is not sampled."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.behavior = -torch.rand(3, 4, generator=generator) - 0.1
        change = torch.randn(3, 4, generator=generator) * 0.6
        self.policy = (self.behavior + change).requires_grad_()
        self.entropies = torch.rand(3, 4, generator=generator) * 0.5
        self.advantages = torch.tensor([[1.0], [-0.5], [2.0]]).expand(3, 4)
        self.mask = torch.ones(3, 4, dtype=torch.bool)
        self.mask[1, 3:] = False
        self.mask[2, 2:] = False
        self.count = int(self.mask.sum())

    def expected(self, name: str, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, gradient) of a token mean under the correction `name`."""
        columns = TokenColumns(
            self.policy, self.behavior, self.advantages, self.mask,
            behavior_entropies=self.entropies,
        )  # fmt: skip
        correction = build_correction([{"name": name}])
        result = policy_loss(columns, correction, denominators=self.count / scale)
        assert 0 < int(result.kept.sum()) < self.count
        return result.loss, torch.autograd.grad(result.loss, self.policy)[0]


def check(case: Case, loss: torch.Tensor, name: str, scale: float = 1.0) -> None:
    expected, gradient = case.expected(name, scale)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, case.policy)[0], gradient)


@pytest.mark.parametrize("recorded", [True, False])
def test_areal(hooks: dict[str, Any], recorded: bool) -> None:
    case = Case()
    batch = {
        "logprobs": case.behavior,
        "advantages": case.advantages,
        "loss_mask": case.mask.float(),
    }
    entropy = case.entropies
    if recorded:
        batch["behavior_entropies"], entropy = entropy, torch.full_like(entropy, torch.nan)
    loss = hooks["areal_loss"](
        case.policy, entropy, batch, vocab_min_logits=None, vocab_max_logits=None
    )
    check(case, loss, "estr")


def test_skyrl(hooks: dict[str, Any]) -> None:
    case = Case()
    loss, metrics = hooks["skyrl_loss"](
        log_probs=case.policy,
        old_log_probs=case.policy.detach(),
        advantages=case.advantages / case.count,
        config=None,
        loss_mask=case.mask.float(),
        rollout_logprobs=case.behavior,
    )
    check(case, loss, "dppo")
    assert 0.0 <= metrics["clip_ratio"] <= 1.0


def test_prime_rl(hooks: dict[str, Any]) -> None:
    case = Case()
    losses = []
    for row in range(3):
        inputs = SimpleNamespace(
            trainer_logprobs=case.policy[row],
            inference_logprobs=case.behavior[row],
            advantages=case.advantages[row] / 2,
            loss_mask=case.mask[row],
            loss_weights=torch.full((4,), 2.0),
        )
        losses.append(hooks["prime_rl_terms"](inputs)[0])
    check(case, torch.stack(losses).sum() / case.count, "dppo")


def test_slime(hooks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()

    def scored(logits: torch.Tensor, **given: Any) -> tuple[None, dict[str, Any]]:
        assert given["with_entropy"]
        return None, {"log_probs": list(case.policy), "entropy": list(case.entropies)}

    loss_module = ModuleType("slime.backends.megatron_utils.loss")
    loss_module.get_log_probs_and_entropy = scored  # type: ignore[attr-defined]
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, loss_module.__name__, loss_module)
    batch = {
        "unconcat_tokens": None,
        "total_lengths": None,
        "response_lengths": [4, 4, 4],
        "loss_masks": list(case.mask.int()),
        "rollout_log_probs": list(case.behavior),
        "advantages": list(case.advantages),
    }
    args = SimpleNamespace(calculate_per_token_loss=True)
    loss, metrics = hooks["slime_loss"](args, batch, torch.zeros(1), lambda x: x.sum())
    check(case, loss / case.count, "estr")
    assert 0 < metrics["dropped"] < case.count
    args.calculate_per_token_loss = False
    with pytest.raises(ValueError, match="calculate-per-token-loss"):
        hooks["slime_loss"](args, batch, torch.zeros(1), lambda x: x.sum())


def test_openrlhf(hooks: dict[str, Any]) -> None:
    case = Case()
    loss, *rest = hooks["OpenRLHFLoss"](clip_eps_low=0.2)(
        case.policy,
        case.policy.detach(),
        case.advantages,
        action_mask=case.mask,
        rollout_log_probs=case.behavior,
        dp_size=2,
        batch_num_tokens=float(case.count),
        global_batch_size=3.0,
    )
    check(case, loss, "dppo", scale=2.0)
    assert len(rest) == 4


def test_tinker(hooks: dict[str, Any]) -> None:
    case = Case()
    names = ("behavior_logprobs", "advantages", "mask", "behavior_entropies")
    columns = (case.behavior, case.advantages, case.mask.float(), case.entropies)
    data = [
        SimpleNamespace(
            loss_fn_inputs={
                name: SimpleNamespace(to_torch=lambda value=column[row]: value)
                for name, column in zip(names, columns, strict=True)
            }
        )
        for row in range(3)
    ]
    loss, metrics = hooks["tinker_loss"](case.count)(data, list(case.policy))
    check(case, loss, "estr")
    assert 0 < metrics["kept"] < case.count


def test_the_bound_from_the_top_k_is_below_the_entropy(hooks: dict[str, Any]) -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)) * 3
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    bound = hooks["entropy_bound"](log_probs.topk(5).values)
    assert bool((bound <= entropy + 1e-6).all())
    assert float(hooks["entropy_bound"](torch.tensor([[0.5, 0.25]]).log())[0]) == pytest.approx(
        1.0397, abs=1e-4
    )
