"""What every peer script does: read the tensors, evaluate its cases, write what they gave.

    python verl_peer.py CASES.safetensors OUT.safetensors

Runs in the package's own environment. A case is a function from a set of tensors to a scalar loss,
or to a bool mask. The output holds SET/CASE/loss, SET/CASE/gradient (to the policy log-probs) or
SET/CASE/mask; its metadata the package's version, what failed, and the reports of
`estr.conformance`.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from estr.conformance import LossInputs, check_policy_loss

Case = Callable[[SimpleNamespace], Tensor]


def read_sets(path: str) -> dict[str, SimpleNamespace]:
    """The sets of tensors by name, with `count`, the number of eligible tokens."""
    sets: dict[str, dict[str, Tensor]] = {}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - a file, not a dict
            name, column = key.split("/")
            sets.setdefault(name, {})[column] = file.get_tensor(key)
    return {n: SimpleNamespace(**c, count=int(c["mask"].sum())) for n, c in sets.items()}


def evaluate(case: Case, tensors: SimpleNamespace) -> dict[str, Tensor]:
    policy = tensors.policy.clone().requires_grad_()
    result = case(SimpleNamespace(**{**vars(tensors), "policy": policy}))
    if result.dtype == torch.bool:
        return {"mask": result & tensors.mask}
    (gradient,) = torch.autograd.grad(result, policy)
    return {"loss": result.detach().reshape(1), "gradient": gradient}


def as_case(inputs: LossInputs) -> SimpleNamespace:
    """A micro-batch of `estr.conformance` under the names of the cases; q is mu."""
    return SimpleNamespace(
        policy=inputs.policy_logprobs,
        behavior=inputs.behavior_logprobs,
        proximal=inputs.behavior_logprobs,
        advantages=inputs.advantages,
        mask=inputs.loss_mask,
        entropies=inputs.behavior_entropies,
        count=inputs.num_sampled_tokens,
    )


def main(package: str, cases: dict[str, Case], checked: dict[str, Case]) -> None:
    """Evaluate `cases` on every set and check the losses `checked`; a case that raises is named."""
    sets = read_sets(sys.argv[1])
    outputs: dict[str, Tensor] = {}
    failed: dict[str, str] = {}
    for name, tensors in sets.items():
        for label, case in cases.items():
            try:
                found = evaluate(case, tensors)
            except Exception as error:  # noqa: BLE001 - another's code may raise anything
                failed[f"{name}/{label}"] = f"{type(error).__name__}: {error}"
                continue
            outputs |= {f"{name}/{label}/{kind}": t.contiguous() for kind, t in found.items()}
    reports: dict[str, Any] = {}
    for label, case in checked.items():
        report = check_policy_loss(lambda inputs, case=case: case(as_case(inputs)))
        reports[label] = {f.name: {"ok": f.ok, "detail": f.detail} for f in report.findings}
    version = importlib.metadata.version(package)
    extra = {"version": version, "failed": json.dumps(failed), "reports": json.dumps(reports)}
    save_file(outputs, sys.argv[2], metadata=extra)
