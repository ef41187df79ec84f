"""Checkpoints: written aside, synced, renamed; a torn one is never mistaken for a whole one.

    checkpoints/step-00000040/
        model.safetensors       float32 master weights
        optimizer.safetensors   exp_avg, exp_avg_sq and step of every parameter
        trainer.json            step and version counters, learning-rate position
        state.json              the controller's part: problems, groups, members, evaluations
        rollouts.safetensors    tokens of finished and of growing rollouts (estr.rollout_state)
        manifest.json           size and SHA-256 of all of these; written last

An older checkpoint is deleted only after a newer one is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, DataError

if TYPE_CHECKING:
    import torch

    from .rollout_state import Columns
    from .trainer import Trainer

FORMAT = 2
"""Layout of a checkpoint; one of another layout is named and passed over."""

_MANIFEST = "manifest.json"
_ASIDE = ".writing-"
_PASSED = "superseded-"
_ROLLOUTS = "rollouts.safetensors"
_FILES = ("trainer.json", "state.json", _ROLLOUTS)
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Checkpoints:
    """The checkpoints folder of one run."""

    def __init__(self, folder: Path, keep: int = 2, *, data: str = "") -> None:
        """data: fingerprint of the training data, which every checkpoint keeps."""
        self.folder = folder
        self.keep = keep
        self._data = data

    async def write(
        self,
        step: int,
        state: dict[str, Any],
        columns: Columns,
        save_trainer: Callable[[Path], Awaitable[None]],
    ) -> Path:
        """Write one: `save_trainer(folder)` puts the trainer's files into the folder it is given.

        Raises CheckpointError; the checkpoints that were there stay as they were.
        """
        final = self.folder / f"step-{step:08d}"
        aside = self.folder / f"{_ASIDE}{final.name}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            await save_trainer(aside)
            state = state | {"data": self._data, "format": FORMAT}
            # A large model is read for minutes: no rollout's time may run out meanwhile.
            await asyncio.to_thread(_complete, aside, json.dumps(state).encode(), columns)
            if final.exists():
                shutil.rmtree(final)
            aside.rename(final)
            _sync_folder(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoint {final}: {error}; look at the space and the rights there"
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        # One of a later step is not of this lineage, and counts for nothing.
        own = [path for path in self.complete() if path.name <= final.name]
        for old in own[: -self.keep]:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
        return final

    def supersede_after(self, folder: Path) -> None:
        """A run goes on from the checkpoint in `folder`: later ones, which were passed over, are
        renamed so that nothing takes them for its own. What a kill left half written goes."""
        for torn in self.folder.glob(f"{_ASIDE}*"):
            shutil.rmtree(torn, ignore_errors=True)
        for later in self.complete():
            if later.name > folder.name:
                later.rename(_free_name(self.folder / f"{_PASSED}{later.name}"))

    def complete(self) -> list[Path]:
        """Complete-looking checkpoints, oldest first (those being written are not among them)."""
        return sorted(p for p in self.folder.glob("step-*") if p.is_dir())

    def newest(
        self, accept: Callable[[dict[str, Any]], None] = lambda state: None
    ) -> tuple[Path, dict[str, Any], list[str]]:
        """The newest whole checkpoint, its state, and a line on each torn one that was passed over.

        accept: raises DataError where a state is not of this run: then it is passed over, too.
        Raises CheckpointError when there is none.
        """
        passed: list[str] = []
        for folder in reversed(self.complete()):
            try:
                state = verify(folder)
                accept(state)
            except CheckpointError as error:
                passed.append(str(error))
            except DataError as error:
                passed.append(f"checkpoint {folder} cannot be gone on from: {error}")
            else:
                return folder, state, passed
        detail = "".join(f"\n  {line}" for line in passed)
        raise CheckpointError(f"no usable checkpoint in {self.folder}; start the run anew{detail}")


def _complete(folder: Path, state: bytes, columns: Columns) -> None:
    """Beside the trainer's files those of the controller, and the manifest of all, synced."""
    _write_synced(folder / _ROLLOUTS, safetensors_bytes(columns))
    _write_synced(folder / "state.json", state)
    manifest = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    _write_synced(folder / _MANIFEST, json.dumps(manifest, indent=1).encode())
    _sync_folder(folder)


def saved_columns(folder: Path) -> Columns:
    """The tokens that a whole checkpoint keeps."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(folder / _ROLLOUTS))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder / _ROLLOUTS} cannot be read: {error}") from error


def verify(folder: Path) -> dict[str, Any]:
    """The controller's state of a whole checkpoint. Raises CheckpointError naming what is torn."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        absent = [name for name in _FILES if name not in manifest]
        if absent:
            raise CheckpointError(f"checkpoint {folder} is torn: no {', '.join(absent)} in it")
        for name, expected in manifest.items():
            if _fingerprint(folder / name) != expected:
                raise CheckpointError(f"{folder / name} is not what its manifest says")
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
        if not isinstance(state, dict) or "step" not in state:
            raise CheckpointError(f"checkpoint {folder} is torn: state.json holds no step")
        if state.get("format") != FORMAT:
            raise CheckpointError(
                f"checkpoint {folder} has format {state.get('format')}, this estr reads {FORMAT}; "
                "go on with the version of estr that wrote it"
            )
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder} is torn: {error}") from error
    return state


def save_trainer(trainer: Trainer, folder: Path) -> None:
    """The trainer's part: weights, optimizer, counters. Of several ranks all gather, and rank 0
    writes whole tensors, so that a checkpoint does not depend on how many there were."""
    from safetensors.torch import save

    for file, tensors in (
        ("model.safetensors", trainer.master_state()),
        ("optimizer.safetensors", _moments(trainer)),
    ):
        gathered = trainer.ranks.gather(tensors)
        if trainer.ranks.rank == 0:
            kept = {name: t.cpu().contiguous() for name, t in gathered.items()}
            _write_synced(folder / file, save(kept))
    if trainer.ranks.rank != 0:
        return
    counters = {
        "step": trainer.step,
        "version": trainer.version,
        "initial_digest": trainer.initial_digest,
    }
    _write_synced(folder / "trainer.json", json.dumps(counters).encode())


def _moments(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        f"{key}.{name}": value.detach()
        for name, parameter in trainer.parameters.items()
        for key, value in trainer.optimizer.state[parameter].items()
    }


def restore_trainer(trainer: Trainer, folder: Path) -> None:
    """Put a saved state back, in every rank its own shards. Raises CheckpointError when it cannot
    be read, belongs to another model, holds what is no number, or lacks the moments of weights that
    were trained."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(folder / "model.safetensors")
        moments = load_file(folder / "optimizer.safetensors")
        counters = json.loads((folder / "trainer.json").read_text())
        step, version = int(counters["step"]), int(counters["version"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error!r}") from error
    _require_own(folder, weights, {n: t.shape for n, t in trainer.master_state().items()})
    started_from = counters.get("initial_digest")
    if trainer.initial_digest and started_from and trainer.initial_digest != started_from:
        raise CheckpointError(
            f"the model of the recipe is not the one that checkpoint {folder} started from, which "
            "its reference and its adapters stand on; put that model back"
        )
    if version and not moments:
        raise CheckpointError(f"checkpoint {folder} lacks the moments of weights that were trained")
    shapes: dict[str, torch.Size] = {}
    for name in {key.partition(".")[2] for key in moments} & trainer.parameters.keys():
        shapes |= {f"{key}.{name}": trainer.parameters[name].shape for key in _MOMENTS}
        shapes[f"step.{name}"] = torch.Size([])
    _require_own(folder, moments, shapes)
    trainer.load_master_state(weights)
    for name, parameter in trainer.parameters.items():
        state = {
            key.partition(".")[0]: _beside(parameter, value)
            for key, value in moments.items()
            if key.partition(".")[2] == name
        }
        trainer.optimizer.state.pop(parameter, None)
        if state:
            # The step count stays where AdamW keeps it for a fused update: beside the parameter.
            trainer.optimizer.state[parameter] = state
    trainer.step, trainer.version = step, version


def _beside(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A moment where AdamW keeps it: sharded as its parameter is, unless it is a step count."""
    from .ranks import placed_like

    return placed_like(parameter, value) if value.dim() else value.to(parameter.device)


def _require_own(
    folder: Path, saved: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]
) -> None:
    """Raises CheckpointError unless these tensors are there, of these shapes, and numbers."""
    foreign = set(saved.keys() ^ shapes.keys())
    foreign |= {n for n in saved.keys() & shapes.keys() if saved[n].shape != shapes[n]}
    if foreign:
        raise CheckpointError(
            f"checkpoint {folder} is of another model: {', '.join(sorted(foreign)[:4])} differ"
        )
    wrong = sorted(name for name, tensor in saved.items() if not tensor.isfinite().all())
    if wrong:
        raise CheckpointError(
            f"checkpoint {folder} holds NaN or infinity in {', '.join(wrong[:4])}; remove that "
            "folder to go on from the checkpoint before it"
        )


def safetensors_bytes(columns: Columns) -> bytes:
    """Numpy columns as the bytes of a safetensors file."""
    from safetensors.numpy import save

    data: bytes = save(columns)
    return data


def _free_name(path: Path) -> Path:
    """A name that no earlier resume has taken."""
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], names) if not name.exists())


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
