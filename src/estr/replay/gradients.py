"""The exact gradients of corrections on one logged step, under the weights that it was taken at.

    replay_gradients("runs/calculator", ["icepop"])  -> Gradients

A run keeps the weights of a few versions: those it started from (version 0) and its checkpoints.
Every micro-batch is scored once; each correction then takes the gradient of its own loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint import Checkpoints, restore_trainer, verify
from ..config import Recipe
from ..errors import CheckpointError, DataError
from ..ledger import read_step, target_versions
from ..losses import policy_loss
from ..metrics import read_metrics
from ..run_folder import RunFolder
from ..subject import model_folder, torch_threads
from ..token_results import token_columns
from ..trainer import Trainer
from ..weights import MemoryWeightStore
from .corrections import Judges, Tell, build_candidates
from .judging import Cut, correction_of_step, cut_step, require_proximal
from .results import OWN, Gradient, Gradients, cosines

if TYPE_CHECKING:
    from torch import Tensor

    from ..corrections import Correction

START = "the weights that the run started from"

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""How far a policy log-prob that is scored again may lie from the logged one, by trainer.dtype;
beyond it the weights, or the tokens, are not those of the step."""


def replay_gradients(
    run_folder: str | Path,
    corrections: Sequence[str],
    *,
    step: int | None = None,
    tell: Tell = lambda done, total: None,
) -> Gradients:
    """Loss, gradient norm and cosines of the run's own correction and of these on one logged step.

    step: None takes the last one whose weights are there. The policy loss alone is looked at. The
    memory needed is the trainer's, and once more the gradient for each correction.

    Raises ConfigError on a wrong correction; DataError where the step or its weights are not there
    (naming the nearest), where the ledger lacks what a correction needs, and where the log-probs
    scored again are not the logged ones; CheckpointError on a foreign checkpoint.
    """
    run = RunFolder.open(run_folder)
    judges = Judges.of(run)
    candidates = build_candidates(corrections)
    there, passed_over = weights_there(run)
    step, version, weights = _choose(run, step, there, passed_over)
    record = read_step(run.path, step)
    recipe = judges.recipe_of(step)
    named = [(OWN, judges.own(record)), *candidates.items()]
    whole = any("sequence_ids" in correction.needs for _, correction in named)
    cut = cut_step(
        record,
        token_budget=recipe.trainer.token_budget,
        whole_trajectories=whole,
        device=recipe.trainer.device,
    )
    if not cut.batches:
        raise DataError(f"step {step} of {run.path} trained on no token; choose another step")
    for label, correction in named:
        try:
            require_proximal(correction.needs, cut, num_minibatches=recipe.num_minibatches)
        except DataError as error:
            raise DataError(f"step {step} under {label}: {error}") from error
    with torch_threads(recipe.trainer.threads):
        trainer = trainer_at(recipe, weights)
        difference, losses, sums = _accumulate(trainer, cut, [c for _, c in named], tell)
    products = _products(sums)
    recorded = _recorded(run, step)
    return Gradients(
        run=str(run.path),
        step=step,
        version=version,
        weights=START if weights is None else str(weights),
        tokens=cut.num_tokens,
        max_difference=difference,
        largest_lag=record.target_version - int(cut.recorded("versions").min()),
        gradients=tuple(
            Gradient(label, loss, math.sqrt(max(0.0, products[i][i])))
            for i, ((label, _), loss) in enumerate(zip(named, losses, strict=True))
        ),
        cosine=cosines(products),
        passed_over=passed_over,
        recorded_loss=recorded.get("loss"),
        recorded_norm=recorded.get("grad_norm"),
    )


def _choose(
    run: RunFolder, step: int | None, there: dict[int, Path | None], passed_over: tuple[str, ...]
) -> tuple[int, int, Path | None]:
    """(step, its target version, the checkpoint with that version; None: the weights of the start).

    Raises DataError naming the nearest step whose weights are there, and what was passed over.
    """
    targets = target_versions(run.path)
    possible = [number for number, version in targets.items() if version in there]
    if step is None and possible:
        step = possible[-1]
    if step in possible:
        return step, targets[step], there[targets[step]]
    if step is not None and step not in targets:
        raise DataError(f"step {step} is not in the ledger of {run.path}")
    held = ", ".join(str(version) for version in sorted(there))
    problem = f"{run.path} holds the weights of version {held}"
    if step is not None:
        problem = f"the loss of step {step} was taken at version {targets[step]}; {problem}"
    nearest = min(possible, key=lambda number: abs(number - (step or 0)), default=None)
    raise DataError(
        f"{problem}; "
        + ("no logged step has these" if nearest is None else f"the nearest step is {nearest}")
        + " (checkpoint.every_steps and checkpoint.keep say which are kept)"
        + "".join(f"; passed over: {reason}" for reason in passed_over)
    )


def weights_there(run: RunFolder) -> tuple[dict[int, Path | None], tuple[str, ...]]:
    """Where the weights of a version lie: in a checkpoint, or (None) in the model of the start; and
    a line on each torn checkpoint, which is passed over."""
    there: dict[int, Path | None] = {0: None}
    passed_over = []
    for folder in Checkpoints(run.checkpoints).complete():
        try:
            verify(folder)
            version = int(json.loads((folder / "trainer.json").read_text("utf-8"))["version"])
        except CheckpointError as error:
            passed_over.append(str(error))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            passed_over.append(f"{folder / 'trainer.json'} holds no version: {error!r}")
        else:
            there.setdefault(version, folder)
    return there, tuple(passed_over)


def trainer_at(recipe: Recipe, checkpoint: Path | None) -> Trainer:
    """The run's trainer with the weights of a checkpoint, or of the start."""
    from ..models import load_model, vocabulary_size

    folder = model_folder(recipe)
    options = recipe.trainer
    model = load_model(folder, dtype="float32", device=options.device, attn=options.attention)
    trainer = Trainer(
        model, recipe, MemoryWeightStore(keep=1), vocab_size=vocabulary_size(folder, model)
    )
    if checkpoint is not None:
        restore_trainer(trainer, checkpoint)
    return trainer


def _accumulate(
    trainer: Trainer, cut: Cut, corrections: Sequence[Correction], tell: Tell
) -> tuple[float, list[float], list[list[Tensor]]]:
    """(largest difference of log-probs, loss and gradient of each correction)."""
    parameters = list(trainer.parameters.values())
    sums = [[torch.zeros_like(p) for p in parameters] for _ in corrections]
    losses = [0.0] * len(corrections)
    of_step = [correction_of_step(correction, cut) for correction in corrections]
    proximal: Any = cut.proximal or [None] * len(cut.batches)
    tolerance = TOLERANCES[trainer.options.dtype]
    largest = 0.0
    for done, (batch, logged, q) in enumerate(zip(cut.batches, cut.policy, proximal, strict=True)):
        policy, _ = trainer.score(batch)
        difference = float((policy.detach() - logged).abs().max())
        largest = max(largest, difference)
        if not difference <= tolerance:
            raise DataError(
                f"step {cut.record.step}: policy log-probs scored again differ by up to "
                f"{difference:.3g} from the logged ones (allowed: {tolerance:g}), so these are not "
                "the weights, or not the model, that the loss was taken at"
            )
        columns = token_columns(batch, policy, q)
        for i, correction in enumerate(of_step):
            part = policy_loss(columns, correction, denominators=batch.token_denominators())
            losses[i] += float(part.loss.detach())
            found = torch.autograd.grad(
                part.loss, parameters, retain_graph=True, materialize_grads=True
            )
            for total, gradient in zip(sums[i], found, strict=True):
                total += gradient
        tell(done + 1, len(cut.batches))
    return largest, losses, sums


def _products(sums: list[list[Tensor]]) -> list[list[float]]:
    """Inner products of whole gradients, [K, K]; the sums over parameters are float64."""
    total = torch.zeros(len(sums), len(sums), dtype=torch.float64)
    for parts in zip(*sums, strict=True):
        flat = torch.stack([part.flatten() for part in parts])
        total += (flat @ flat.T).double().cpu()
    products: list[list[float]] = total.tolist()
    return products


def _recorded(run: RunFolder, step: int) -> dict[str, float]:
    """What the run's metrics say of the step."""
    path = run.path / "metrics.jsonl"
    if not path.is_file():
        return {}
    rows = [row for row in read_metrics(path).records if row.get("step") == step and "loss" in row]
    return dict(rows[-1]) if rows else {}
