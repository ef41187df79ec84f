"""`estr.integrations.verl` in the real package; `make conformance` runs it in its environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.utils import losses

from estr.errors import ConfigError, DataError
from estr.integrations.verl import COLUMN, VerlLoss, install
from estr.losses import estr_loss

PROMPT, LENGTHS = 2, (3, 1, 2)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def rows(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) * scale for n in LENGTHS]


BEHAVIOR = [-row.abs() - 0.1 for row in rows(0)]
POLICY = [b + d for b, d in zip(BEHAVIOR, rows(1, 0.6), strict=True)]
ENTROPIES = [row.abs() * 0.1 for row in rows(2)]
ADVANTAGES = [torch.full((n,), a) for n, a in zip(LENGTHS, (1.0, -0.5, 2.0), strict=True)]


def batch(which: list[int], **columns: object) -> TensorDict:
    """A micro-batch as verl's engine hands it to its loss: no padding."""
    data = TensorDict(
        {
            "prompts": nested([torch.ones(PROMPT, dtype=torch.long) for _ in which]),
            "responses": nested([torch.ones(LENGTHS[i], dtype=torch.long) for i in which]),
            "response_mask": nested([torch.ones(LENGTHS[i]) for i in which]),
            "old_log_probs": nested([BEHAVIOR[i] for i in which]),
            "advantages": nested([ADVANTAGES[i] for i in which]),
            **{
                name: column for name, column in columns.items() if isinstance(column, torch.Tensor)
            },
        },
        batch_size=[len(which)],
    )
    for name, column in columns.items():
        if not isinstance(column, torch.Tensor):
            tu.assign_non_tensor_stack(data, name, column)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=6, global_batch_size=3)
    return data


def output(which: list[int], policy: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What verl's model gives: a value for every token, one place ahead of the token."""

    def whole(column: list[torch.Tensor]) -> torch.Tensor:
        filled = [torch.cat([torch.zeros(PROMPT - 1), column[i], torch.zeros(1)]) for i in which]
        return nested(filled)

    return {"log_probs": whole(policy), "entropy": whole(ENTROPIES)}


def actor(**options: object) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss={"loss_mode": "estr"},
        **options,
    )


def through_verl(
    parts: list[list[int]], **columns: object
) -> tuple[float, list[torch.Tensor], list[dict]]:
    policy = [row.clone().requires_grad_() for row in POLICY]
    total, metrics = 0.0, []
    for which in parts:
        of_part = {
            name: [column[i] for i in which] if isinstance(column, list) else column
            for name, column in columns.items()
        }
        loss, found = losses.ppo_loss(actor(), output(which, policy), batch(which, **of_part))
        loss.backward()
        total += float(loss.detach())
        metrics.append({k: v.aggregate() for k, v in found.items() if hasattr(v, "aggregate")})
    return total, [row.grad for row in policy], metrics


def expected() -> tuple[float, list[torch.Tensor], torch.Tensor]:
    policy = [row.clone().requires_grad_() for row in POLICY]
    loss, keep = estr_loss(
        torch.cat(policy),
        torch.cat(BEHAVIOR),
        torch.cat(ENTROPIES),
        torch.cat(ADVANTAGES),
        torch.ones(6, dtype=torch.bool),
        tau=1.0,
        eps=0.01,
        num_sampled_tokens=6,
    )
    loss.backward()
    return float(loss.detach()), [row.grad for row in policy], keep


@pytest.fixture(autouse=True)
def installed() -> VerlLoss:
    return install([{"name": "estr"}], "auto")


@pytest.mark.parametrize(
    ("parts", "column"),
    [
        ([[0, 1, 2]], [e.tolist() for e in ENTROPIES]),
        ([[0], [1, 2]], [e.tolist() for e in ENTROPIES]),
        ([[0, 1, 2]], nested(ENTROPIES)),
        ([[0], [1, 2]], None),
    ],
    ids=["lists", "lists, two micro-batches", "nested", "extra fields"],
)
def test_value_and_gradient_are_ours_however_the_batch_is_cut(
    parts: list[list[int]], column: object
) -> None:
    extras = [{COLUMN: e.tolist(), "more": 1} for e in ENTROPIES]
    found = through_verl(
        parts, **({"extra_fields": extras} if column is None else {COLUMN: column})
    )
    loss, gradients, keep = expected()
    assert 0 < int(keep.sum()) < 6
    assert found[0] == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(torch.cat(found[1]), torch.cat(gradients))
    assert {m["estr/trainer_entropy"] for m in found[2]} == {0.0}
    if len(parts) == 1:
        assert found[2][0]["estr/rho_mask"] == pytest.approx(1 - int(keep.sum()) / 6)


def test_the_trainers_entropy_stands_in_and_says_so() -> None:
    loss, _, metrics = through_verl([[0, 1, 2]])
    assert loss == pytest.approx(expected()[0], rel=1e-6)
    assert metrics[0]["estr/trainer_entropy"] == 1.0


def test_without_any_entropy_it_is_an_error() -> None:
    install([{"name": "estr"}], "sampler")
    with pytest.raises(DataError, match="carries no rollout_entropies"):
        through_verl([[0, 1, 2]])


def test_rows_without_an_entropy_beside_others_are_named() -> None:
    extras = [{COLUMN: ENTROPIES[0].tolist()}, {}, {COLUMN: ENTROPIES[2].tolist()}]
    with pytest.raises(DataError, match=r"rows \[1\] of 3 carry no rollout_entropies"):
        through_verl([[0, 1, 2]], extra_fields=extras)


def test_a_correction_without_entropy_asks_for_none() -> None:
    install([{"name": "none"}], "sampler")
    assert through_verl([[0, 1, 2]])[2][0]["estr/rho_mask"] == 0.0


def test_recomputed_old_log_probs_are_refused() -> None:
    with pytest.raises(ConfigError, match="bypass_mode=true"):
        through_verl([[0, 1, 2]], rollout_log_probs=nested(POLICY))


def test_what_would_divide_or_weigh_otherwise_is_refused() -> None:
    loss = get_policy_loss_fn("estr")
    column = torch.zeros(1, 2)
    names = ("old_log_prob", "log_prob", "advantages", "response_mask")
    given = dict.fromkeys(names, column)
    with pytest.raises(ConfigError, match="token-mean"):
        loss(**given, loss_agg_mode="seq-mean-token-mean", config=actor())
    with pytest.raises(ConfigError, match="batch_num_tokens"):
        loss(**given, config=actor())
    config = actor()
    config.global_batch_info.update(dp_size=1, batch_num_tokens=2)
    with pytest.raises(ConfigError, match="rollout_is"):
        loss(**given, config=config, rollout_is_weights=column)
    with pytest.raises(ConfigError, match="do not carry proximal_logprobs"):
        install([{"name": "decoupled"}])


def test_data_parallel_ranks_are_averaged_by_verl() -> None:
    install([{"name": "none"}])
    config = actor()
    config.global_batch_info.update(dp_size=2, batch_num_tokens=8)
    column = torch.zeros(1, 4)
    loss, _ = get_policy_loss_fn("estr")(
        column, column, column + 1.0, column + 1, "token-mean", config
    )
    assert float(loss) == pytest.approx(-4 / (8 / 2))


def test_verl_imports_it_by_itself() -> None:
    code = (
        "from verl.trainer.ppo.core_algos import get_policy_loss_fn\n"
        "from verl.workers.utils.losses import ppo_loss\n"
        "print(get_policy_loss_fn('estr').__self__._source, hasattr(ppo_loss, 'estr_inner'))"
    )
    environment = {
        **os.environ,
        "VERL_USE_EXTERNAL_MODULES": "estr.integrations.verl_plugin",
        "ESTR_VERL": '{"entropy": "sampler"}',
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["sampler", "True"]
