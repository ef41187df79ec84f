"""The checks themselves: each calls the loss on small batches and compares what it gives.

A check gives (ok, detail). Whatever it raises is the loss's, and becomes part of the finding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..errors import EstrError
from .inputs import NUM_GIVEN, LossFunction, LossInputs, at_ratio, example, spoiled

_RELATIVE = 1e-5
"""Largest relative difference that counts as rounding."""

Check = Callable[[LossFunction], tuple[bool, str]]


def value_and_gradient(loss: LossFunction, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """(value, gradient to policy_logprobs), detached. A loss without a graph has gradient 0."""
    leaf = inputs.policy_logprobs.detach().clone().requires_grad_()
    value = loss(dataclasses.replace(inputs, policy_logprobs=leaf))
    if not value.requires_grad:
        return value.detach(), torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return value.detach(), torch.zeros_like(leaf) if gradient is None else gradient


def _difference(left: Tensor, right: Tensor) -> float:
    """Largest difference relative to the largest entry; inf where one side is not finite."""
    if not (bool(left.isfinite().all()) and bool(right.isfinite().all())):
        return math.inf
    scale = max(float(left.abs().max()), float(right.abs().max()), 1e-12)
    return float((left - right).abs().max()) / scale


def _same(
    loss: LossFunction, one: LossInputs, other: LossInputs, back: Callable[[Tensor], Tensor]
) -> tuple[bool, str]:
    """Whether the loss has the same value on both, and, taken back, the same gradient."""
    value, gradient = value_and_gradient(loss, one)
    moved, of_moved = value_and_gradient(loss, other)
    values, gradients = _difference(value, moved), _difference(gradient, back(of_moved))
    text = f"relative difference {values:.1e} in value, {gradients:.1e} in gradient"
    return max(values, gradients) <= _RELATIVE, text


def _micro_batches(loss: LossFunction) -> tuple[bool, str]:
    whole = example()
    value, gradient = value_and_gradient(loss, whole)
    worst = 0.0
    for sizes in ([1, 3], [3, 1], [1, 1, 1, 1]):
        rows = torch.split(torch.arange(4), sizes)
        parts = [value_and_gradient(loss, whole.changed(partial(_rows, rows=r))) for r in rows]
        total = torch.stack([part[0] for part in parts]).sum()
        joined = torch.cat([part[1] for part in parts])
        worst = max(worst, _difference(value, total), _difference(gradient, joined))
    text = f"parts differ from the whole by {worst:.1e}, relative"
    return worst <= _RELATIVE, text


def _rows(tensor: Tensor, *, rows: Tensor) -> Tensor:
    return tensor[rows]


def _weights(loss: LossFunction, inputs: LossInputs) -> Tensor:
    """Each token's share: the gradient over that of r A at r = policy / behavior."""
    _, gradient = value_and_gradient(loss, inputs)
    ratio = (inputs.policy_logprobs - inputs.behavior_logprobs).exp()
    return -gradient / (ratio * inputs.advantages)


def _denominator(loss: LossFunction) -> tuple[bool, str]:
    """Which of the usual denominators the tokens' gradients at ratio 1 show."""
    inputs = example()
    inputs = dataclasses.replace(inputs, policy_logprobs=inputs.behavior_logprobs)
    mask = inputs.loss_mask
    weights = _weights(loss, inputs)[mask]
    rows, length = mask.shape
    of_row = mask.sum(dim=1, keepdim=True).expand_as(mask)[mask].float()
    kinds = {
        "the count that was handed in": torch.full_like(of_row, NUM_GIVEN),
        "the micro-batch's own eligible tokens": torch.full_like(of_row, float(mask.sum())),
        "each row's tokens, then the rows": rows * of_row,
        "the padded size": torch.full_like(of_row, float(rows * length)),
        "the rows": torch.full_like(of_row, float(rows)),
        "nothing (a sum)": torch.ones_like(of_row),
    }
    found = [k for k, d in kinds.items() if _difference(weights * d, torch.ones_like(d)) < 1e-4]
    if not found:
        return False, f"none of the usual: weights {[round(w, 6) for w in weights.tolist()]}"
    return found[0] == "the count that was handed in", f"divides by {found[0]}"


def _rejection(loss: LossFunction) -> tuple[bool, str]:
    inputs = example()
    weights = _weights(loss, inputs)
    details, worst = [], 0.0
    for shift in (6.0, -6.0):
        policy = inputs.policy_logprobs.clone()
        policy[0, 0] += shift
        moved = dataclasses.replace(
            inputs,
            policy_logprobs=policy,
            behavior_entropies=torch.where(policy == policy[0, 0], 0.0, inputs.behavior_entropies),
        )
        after = _weights(loss, moved)
        others = inputs.loss_mask.clone()
        others[0, 0] = False
        change = after[others] / weights[others]
        worst = max(worst, _difference(change, torch.ones_like(change)))
        details.append(f"{float(change.mean()):.4f} at log-ratio {shift:+.0f}")
    text = f"one far token scales the weight of the others by {' and '.join(details)}"
    return worst <= 1e-4, text


def _masked_gradient(loss: LossFunction) -> tuple[bool, str]:
    inputs = example()
    _, gradient = value_and_gradient(loss, inputs)
    most = float(gradient[~inputs.loss_mask].abs().max())
    return most == 0.0, f"largest gradient in a masked place {most:.1e}"


_SPOILABLE = ("policy_logprobs", "behavior_logprobs", "advantages", "behavior_entropies")


def _masked_value(loss: LossFunction) -> tuple[bool, str]:
    inputs = example()
    other = inputs
    for name in _SPOILABLE:
        other = spoiled(
            other, name, 3.0 if name == "behavior_entropies" else -7.0, ~inputs.loss_mask
        )
    return _same(loss, inputs, other, lambda g: g)


def _masked_nonfinite(loss: LossFunction) -> tuple[bool, str]:
    inputs = example()
    touched = []
    for name in _SPOILABLE:
        for value in (math.nan, math.inf, -math.inf):
            other = spoiled(inputs, name, value, ~inputs.loss_mask)
            ok, _ = _same(loss, inputs, other, lambda g: g)
            touched += [] if ok else [f"{name} {value}"]
    return not touched, "no effect" if not touched else f"spoiled by {', '.join(touched)}"


def _extreme_ratio(loss: LossFunction) -> tuple[bool, str]:
    inputs = example()
    bad = []
    for shift in (100.0, -100.0):
        policy, behavior = inputs.policy_logprobs.clone(), inputs.behavior_logprobs.clone()
        advantages = inputs.advantages.clone()
        policy[0, 0], behavior[0, 0] = (0.0, -shift) if shift > 0 else (shift, 0.0)
        advantages[0, 0] = 0.0
        value, gradient = value_and_gradient(
            loss,
            dataclasses.replace(
                inputs, policy_logprobs=policy, behavior_logprobs=behavior, advantages=advantages
            ),
        )
        finite = bool(value.isfinite()) and bool(gradient.isfinite().all())
        if not finite or float(gradient[0, 0]) != 0.0:
            bad.append(f"log-ratio {shift:+.0f}: loss {float(value):.3g}")
    return not bad, "; ".join(bad) or "finite, and no gradient"


def _nan_is_visible(loss: LossFunction) -> tuple[bool, str]:
    inputs = example()
    where = torch.zeros_like(inputs.loss_mask)
    where[0, 0] = True
    hidden: list[str] = []
    seen: list[str] = []
    for name in ("policy_logprobs", "behavior_logprobs", "advantages"):
        try:
            value, _ = value_and_gradient(loss, spoiled(inputs, name, math.nan, where))
        except (ArithmeticError, EstrError, RuntimeError, ValueError) as error:
            seen.append(f"{name}: {type(error).__name__}")
            continue
        (seen if bool(value.isnan()) else hidden).append(f"{name}: loss {float(value):.3g}")
    return not hidden, f"hidden for {', '.join(hidden)}" if hidden else "; ".join(seen)


def _sign(loss: LossFunction) -> tuple[bool, str]:
    wrong, shown = [], []
    for ratio in (0.5, 1.0, 1.5):
        for advantage in (1.0, -1.0):
            value, gradient = value_and_gradient(loss, at_ratio(ratio, advantage))
            shown.append(f"({ratio:g}, {advantage:+g}): {float(value):.4g}")
            if float(gradient) * advantage > 0 or (ratio == 1.0 and float(gradient) == 0.0):
                wrong.append(f"({ratio:g}, {advantage:+g}): gradient {float(gradient):.4g}")
    text = f"loss at (r, A) {', '.join(shown)}"
    return not wrong, f"wrong at {', '.join(wrong)}; {text}" if wrong else text


def _restoring(loss: LossFunction) -> tuple[bool, str]:
    gradients = {
        (ratio, advantage): float(value_and_gradient(loss, at_ratio(ratio, advantage))[1])
        for ratio, advantage in ((0.5, 1.0), (1.5, -1.0))
    }
    text = ", ".join(f"({r:g}, {a:+g}): {g:.4g}" for (r, a), g in gradients.items())
    return all(g * a < 0 for (_, a), g in gradients.items()), f"gradient at (r, A) {text}"


def _dtype(loss: LossFunction) -> tuple[bool, str]:
    inputs = example()
    value, gradient = value_and_gradient(loss, inputs)
    double = inputs.changed(lambda t: t.double() if t.is_floating_point() else t)
    precise, _ = value_and_gradient(loss, double)
    apart = _difference(value.double(), precise.double())
    half = inputs.changed(lambda t: t.bfloat16() if t.is_floating_point() else t)
    try:
        value_and_gradient(loss, half)
        accepted = "bfloat16 log-probs are accepted"
    except (EstrError, RuntimeError, TypeError, ValueError) as error:
        accepted = f"bfloat16 log-probs: {type(error).__name__}"
    deep = dataclasses.replace(
        at_ratio(1.0, 1.0),
        policy_logprobs=torch.full((1, 1), -17.31),
        behavior_logprobs=torch.full((1, 1), -17.31),
    )
    (_, at_deep), (_, at_three) = (value_and_gradient(loss, x) for x in (deep, at_ratio(1.0, 1.0)))
    rounding = _difference(at_deep, at_three)
    text = (
        f"float32 gives {value.dtype}, {apart:.1e} from float64; ratio 1 at log-prob -17.31 is off "
        f"by {rounding:.1e}; {accepted}"
    )
    kept = value.dtype == gradient.dtype == torch.float32
    return kept and max(apart, rounding) <= _RELATIVE, text


def _permutation(loss: LossFunction) -> tuple[bool, str]:
    order = torch.tensor([2, 0, 3, 1])
    return _same(
        loss, example(), example().changed(lambda t: t[order]), lambda g: g[order.argsort()]
    )


def _padding(loss: LossFunction) -> tuple[bool, str]:
    def padded(tensor: Tensor) -> Tensor:
        wide = torch.nn.functional.pad(tensor.float(), (0, 3, 0, 2))
        return wide.to(tensor.dtype)

    return _same(loss, example(), example().changed(padded), lambda g: g[:4, :6])


def _purity(loss: LossFunction) -> tuple[bool, str]:
    inputs = example()
    copy = inputs.changed(torch.clone)
    first, second = (value_and_gradient(loss, inputs)[0] for _ in range(2))
    changed = [
        f.name
        for f in dataclasses.fields(inputs)
        if isinstance(old := getattr(copy, f.name), Tensor)
        and not torch.equal(old, getattr(inputs, f.name))
    ]
    if changed:
        return False, f"changes {', '.join(changed)} in place"
    return bool(torch.equal(first, second)), f"two calls: {float(first):.6g}, {float(second):.6g}"


CHECKS: dict[str, Check] = {
    "micro_batches": _micro_batches,
    "denominator": _denominator,
    "rejection": _rejection,
    "masked_gradient": _masked_gradient,
    "masked_value": _masked_value,
    "masked_nonfinite": _masked_nonfinite,
    "extreme_ratio": _extreme_ratio,
    "nan_is_visible": _nan_is_visible,
    "sign": _sign,
    "restoring": _restoring,
    "dtype": _dtype,
    "permutation": _permutation,
    "padding": _padding,
    "purity": _purity,
}
