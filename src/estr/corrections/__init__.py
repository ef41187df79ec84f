"""Off-policy corrections by name, and how several compose.

    correction = build_correction([{"name": "estr", "tau": 0.5}])
    verdict = correction(columns)

One file each; `base` has the types. A correction of one's own is named "module:Class"; the class
carries its options dataclass as the attribute `Options` and is called with an instance of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..config import correction_options, read_options
from ..errors import ConfigError
from ..functions import import_object
from .base import (
    OPTIONAL_COLUMNS,
    WHOLE_STEP,
    Correction,
    StepCorrection,
    TokenColumns,
    Verdict,
)
from .decoupled import Decoupled
from .dppo import Dppo
from .dual_clip import DualClip
from .estr import Estr
from .icepop import Icepop
from .kpop import Kpop
from .m2po import M2po
from .mis import Mis
from .none import NoCorrection
from .surrogates import ClippedSurrogate, DualClippedSurrogate, ImportanceSurrogate, Surrogate
from .tis import Tis

__all__ = [
    "CORRECTIONS",
    "ClippedSurrogate",
    "Composition",
    "Correction",
    "DualClippedSurrogate",
    "ImportanceSurrogate",
    "StepCorrection",
    "Surrogate",
    "TokenColumns",
    "Verdict",
    "build_correction",
    "for_step",
]

CORRECTIONS: dict[str, Callable[[Any], Correction]] = {
    "none": NoCorrection,
    "estr": Estr,
    "icepop": Icepop,
    "kpop": Kpop,
    "tis": Tis,
    "mis": Mis,
    "dppo": Dppo,
    "m2po": M2po,
    "dual_clip": DualClip,
    "decoupled": Decoupled,
}
"""The registered names; their options stand in `estr.options.corrections` under the same names."""


class Composition:
    """Several corrections as one: a token is kept iff all keep it, weights multiply, and the one
    surrogate among them is used. `needs` is the union."""

    def __init__(self, parts: Sequence[Correction]) -> None:
        self._parts = tuple(parts)
        self.needs = frozenset().union(*(part.needs for part in self._parts))

    def __call__(self, columns: TokenColumns) -> Verdict:
        keep = columns.loss_mask
        weight: Tensor | None = None
        verdicts = [part(columns) for part in self._parts]
        for verdict in verdicts:
            keep = keep & verdict.keep
            if verdict.weight is not None:
                weight = verdict.weight if weight is None else weight * verdict.weight
        surrogate = next((v.surrogate for v in verdicts if v.surrogate is not None), None)
        edge = next((v.weight_edge for v in verdicts if v.weight_edge is not None), None)
        return Verdict(keep, weight, surrogate, edge)

    def for_step(self, columns: TokenColumns) -> Composition:
        return Composition([for_step(part, columns) for part in self._parts])


def for_step(correction: Correction, columns: TokenColumns) -> Correction:
    """The correction of one optimizer step whose eligible tokens are `columns`, flat [N]; itself
    where it does not need the whole step (`StepCorrection`)."""
    if WHOLE_STEP not in correction.needs:
        return correction
    return cast("StepCorrection", correction).for_step(columns)


def build_correction(entries: Sequence[Mapping[str, Any]]) -> Correction:
    """The correction that a recipe's `correction` tables describe, composed if there are several.

    Each entry: a name and that correction's options. Every correction is called once here, on one
    made-up token, so that a faulty one is found before any compute is spent.

    Raises ConfigError on an unknown name or key, a module or class that is not there or does not
    follow `Correction`, on more than one surrogate, and where q/mu would count twice. If none
    brings a surrogate, `estr.losses.policy_loss` chooses.
    """
    if not entries:
        raise ConfigError('no correction is given; name "none" for no correction')
    lone = len(entries) == 1
    places = ["correction" if lone else f"correction[{i}]" for i in range(len(entries))]
    parts = [_build(entry, place) for entry, place in zip(entries, places, strict=True)]
    names = [entry["name"] for entry in entries]
    _check_together([(n, _trial(n, part)) for n, part in zip(names, parts, strict=True)])
    return parts[0] if lone else Composition(parts)


def _check_together(verdicts: Sequence[tuple[str, Verdict]]) -> None:
    brought = [(name, v.surrogate) for name, v in verdicts if v.surrogate is not None]
    if len(brought) > 1:
        both = " and ".join(name for name, _ in brought)
        raise ConfigError(
            f"correction: {both} each bring a surrogate, but a loss has only one; "
            "keep one of them, and beside it corrections that only mask or weigh"
        )
    weighing = [name for name, verdict in verdicts if verdict.weight_edge == "B"]
    if len(weighing) > 1:
        raise ConfigError(
            f"correction: {' and '.join(weighing)} each weigh with q/mu, which would count twice; "
            "keep one of them"
        )
    if weighing and brought and brought[0][1].edge == "E":
        raise ConfigError(
            f"correction: {weighing[0]} weighs with q/mu and the surrogate of {brought[0][0]} "
            "reads pi/mu, so q/mu would count twice; let the surrogate read pi/q "
            '(edge = "U" of none and dual_clip, surrogate = "none" of estr)'
        )


def _build(entry: Mapping[str, Any], place: str) -> Correction:
    name = entry["name"]
    options = correction_options(entry, place)
    if name in CORRECTIONS:
        return CORRECTIONS[name](options)
    cls = _import(name, place)
    options_class = getattr(cls, "Options", None)
    if not (isinstance(options_class, type) and dataclasses.is_dataclass(options_class)):
        raise ConfigError(
            f"{place}.name = {name!r}: give the class an attribute Options, the dataclass of "
            "its options (one without fields if it has none)"
        )
    given = read_options(options_class, options, place, of=name, taken=["name"])
    try:
        correction: Correction = cls(given)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's correction may raise anything
        raise ConfigError(
            f"{place}.name = {name!r} cannot be made of its options: "
            f"{type(error).__name__}: {error}"
        ) from error
    return correction


def _import(name: str, place: str) -> Any:
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ConfigError(f"{place}.name = {name!r} must read package.module:Class")
    return import_object(name, f"{place}.name")


def _trial(name: str, correction: Correction) -> Verdict:
    """The correction's verdict on one token of ratio 1."""
    needs = getattr(correction, "needs", None)
    known = OPTIONAL_COLUMNS | {WHOLE_STEP}
    if not (isinstance(needs, frozenset) and needs <= known):
        raise ConfigError(
            f"correction {name}: needs must be a frozenset within {sorted(known)}, not {needs!r}"
        )
    if WHOLE_STEP in needs and not hasattr(correction, "for_step"):
        raise ConfigError(f"correction {name} needs {WHOLE_STEP} but has no method for_step")
    value, index = torch.full((1,), -0.5), torch.zeros(1, dtype=torch.int64)
    columns = TokenColumns(
        policy_logprobs=value,
        behavior_logprobs=value,
        advantages=-value,
        loss_mask=torch.ones(1, dtype=torch.bool),
        proximal_logprobs=value,
        behavior_entropies=-value,
        behavior_gini=-value,
        versions=index,
        sequence_ids=index,
        turn_ids=index,
    )
    try:
        verdict = correction(columns)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's correction may raise anything
        raise ConfigError(
            f"correction {name} fails on one made-up token: {type(error).__name__}: {error}"
        ) from error
    if not (
        isinstance(verdict, Verdict)
        and isinstance(verdict.keep, torch.Tensor)
        and verdict.keep.dtype == torch.bool
        and verdict.keep.shape == value.shape
    ):
        raise ConfigError(
            f"correction {name} must return a Verdict whose keep is a bool tensor of the columns' "
            f"shape, not {verdict!r}"
        )
    if not columns.loss_mask.all():
        raise ConfigError(f"correction {name} changes the columns that it is given; clone them")
    weight = None if verdict.weight is None else verdict.weight[verdict.keep]
    if weight is not None and not bool((weight >= 0).all() and weight.isfinite().all()):
        raise ConfigError(
            f"correction {name} gives a made-up token the weight {weight}; weights must be finite "
            "and at least 0, or the loss would lead away from what is rewarded"
        )
    return verdict
