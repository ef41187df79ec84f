"""Our side of every case, and why a case is known to differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from estr.corrections import TokenColumns, build_correction
from estr.losses import policy_loss

AGREEMENT = 1e-5
"""Largest relative difference of values, and of gradients against the largest gradient."""

NONE, NONE_U = {"name": "none"}, {"name": "none", "edge": "U"}
DUAL, DUAL_U = {"name": "dual_clip"}, {"name": "dual_clip", "edge": "U"}

CASES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "verl": {
        "vanilla": [DUAL],
        "dppo_tv": [{"name": "dppo"}],
        "dppo_kl": [{"name": "dppo", "divergence": "kl"}],
        "tis_token": [{"name": "tis"}, DUAL_U],
        "tis_sequence": [{"name": "tis", "level": "sequence"}, DUAL_U],
        "icepop": [{"name": "mis", "high": 5.0}, DUAL_U],
        "token_k1_mask": [{"name": "mis"}],
        "seq_sum_k1_mask": [{"name": "mis", "level": "sequence"}],
        "seq_mean_k1_mask": [{"name": "mis", "level": "geometric"}],
        # H = 0.99 everywhere, so H + eps = 1 and tau = 0.5 is a threshold of tau / 2 on k2.
        "token_k2": [{"name": "estr", "tau": 0.5, "surrogate": "none"}, DUAL],
    },
    "trl": {
        "dapo": [NONE],
        "dapo_delta": [DUAL],
        "bnpo": [NONE],
        "grpo": [NONE],
        "dapo_tis": [{"name": "tis"}, NONE_U],
    },
    "openrlhf": {
        "ppo": [NONE],
        "dual_clip": [DUAL],
        "icepop": [{"name": "icepop", "edge": "B"}],
        "tis": [{"name": "tis"}, NONE_U],
        "binary_kl": [{"name": "kpop", "edge": "B", "phi": 0.05}],
    },
    "areal": {
        "ppo": [NONE],
        "dual_clip": [DUAL],
        "decoupled": [{"name": "decoupled"}],
        "mis_token": [{"name": "mis"}, NONE_U],
        "mis_sequence": [{"name": "mis", "level": "geometric"}, NONE_U],
        "m2po_mask": [{"name": "m2po", "tokens": "all"}],
    },
}
"""package -> its case -> the list of corrections that should be the same."""

DIFFERENCES: dict[tuple[str, str], str] = {
    ("verl", "dppo_tv"): (
        "verl's value is A * min(r, c) * log pi, a score-function form; ours is A * min(r, c). The "
        "gradients are the same up to log-ratios of 20, beyond which ours has none."
    ),
    ("verl", "dppo_kl"): (
        "As dppo_tv. Near probability 1 the guards differ: verl adds 1e-8 to 1 - p in float32, "
        "ours takes 1 - p as -expm1(log p), at least 2^-24, so a token at the border may be judged "
        "differently."
    ),
    ("verl", "token_k2"): (
        "The masks are the same (a constant H + eps = C makes estr the bound tau * C / 2 on k2). "
        "verl hands the reduced mask to the loss, whose own count then leaves the rejected tokens "
        "out: with the loss's divisor not given, each kept token weighs sampled / kept times ours."
    ),
    ("trl", "grpo"): "TRL's loss_type grpo is a mean over rows of each row's token mean.",
    ("openrlhf", "binary_kl"): (
        "OpenRLHF drops a token iff D(m, q) exceeds the bound; no correction of ours is that rule. "
        "kpop asks for both directions, so it drops more."
    ),
}
"""Why a case differs; shown on the page. A case that agrees must not stand here."""


def ours(sets: dict[str, Tensor], name: str, entries: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Our loss, gradient and mask on the set `name`."""
    columns = {c: sets[f"{name}/{c}"] for c in ("behavior", "advantages", "mask", "entropies")}
    policy = sets[f"{name}/policy"].clone().requires_grad_()
    correction = build_correction(entries)
    given = TokenColumns(
        policy_logprobs=policy,
        behavior_logprobs=columns["behavior"],
        advantages=columns["advantages"],
        loss_mask=columns["mask"],
        proximal_logprobs=sets[f"{name}/proximal"],
        behavior_entropies=columns["entropies"],
        sequence_ids=torch.arange(len(policy))[:, None].expand_as(policy),
    )
    result = policy_loss(given, correction, denominators=int(columns["mask"].sum()))
    (gradient,) = torch.autograd.grad(result.loss, policy)
    return {"loss": result.loss.detach().reshape(1), "gradient": gradient, "mask": result.kept}


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest entry; for masks the share of unequal entries."""
    if theirs.dtype == torch.bool:
        return float((ours != theirs).float().mean())
    scale = float(torch.maximum(ours.abs().max(), theirs.abs().max()).clamp(min=1e-12))
    return float((ours - theirs).abs().max()) / scale


def compare(
    package: str, sets: dict[str, Tensor], outputs: dict[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Per case: the differences on each set and a verdict: agrees, documented, differs, or failed
    where the package gave nothing."""
    results: dict[str, dict[str, Any]] = {}
    for case, entries in CASES[package].items():
        measured: dict[str, dict[str, float]] = {}
        for name in sorted({key.split("/")[0] for key in sets}):
            mine = ours(sets, name, entries)
            theirs = {k: outputs.get(f"{name}/{case}/{k}") for k in ("loss", "gradient", "mask")}
            found = {k: difference(mine[k], t) for k, t in theirs.items() if t is not None}
            if theirs["gradient"] is not None:
                scale = _scale(mine["gradient"], theirs["gradient"])
                found["scale"] = scale
                found["rescaled"] = difference(scale * mine["gradient"], theirs["gradient"])
                found["kept"] = float(mine["mask"].sum() / sets[f"{name}/mask"].sum())
            measured[name] = found
        worst = max(
            (m[k] for m in measured.values() for k in ("loss", "gradient", "mask") if k in m),
            default=None,
        )
        verdict = "failed" if worst is None else "agrees" if worst <= AGREEMENT else "differs"
        if verdict == "differs" and (package, case) in DIFFERENCES:
            verdict = "documented"
        results[case] = {"ours": entries, "verdict": verdict, "measured": measured}
    return results


def _scale(mine: Tensor, theirs: Tensor) -> float:
    """The factor that takes our gradient to theirs, where both have one (median)."""
    both = (mine != 0) & (theirs != 0)
    return float((theirs[both] / mine[both]).median()) if bool(both.any()) else float("nan")
