"""The virtual environment of an engine that cannot share ours.

The process that `Worker.start` spawns there speaks the protocol of `estr.worker`, so it must find
estr, and of our environment nothing else: a folder that holds a link to the package is its only
PYTHONPATH. estr need not be installed there, and is never of another version than the controller.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..models import cache_folder
from ..options.run import EngineOptions

START_TIMEOUT_S = 600.0
"""Importing vLLM, loading the model and setting up the cache; half a minute on an idle machine."""

_LOOK_TIMEOUT_S = 60.0

_PACKAGE = Path(__file__).resolve().parents[1]


def require_interpreter(options: EngineOptions) -> None:
    """Raise ConfigError where `engine.python` is asked for and is not there."""
    if options.name == "vllm" and not os.access(options.python, os.X_OK):
        raise ConfigError(
            f"engine.python = {options.python!r} is no interpreter; `make vllm` makes a virtual "
            "environment with vLLM for the CPU, docs/vllm.md says how to use one's own"
        )


def require_vllm(options: EngineOptions) -> None:
    """Raise ConfigError where `engine.python` is asked for, and is not there or finds no vLLM. Its
    import would take long, so it is only looked for."""
    require_interpreter(options)
    if options.name != "vllm":
        return
    look = "import importlib.util as u; raise SystemExit(u.find_spec('vllm') is None)"
    own = {**os.environ, "PYTHONPATH": ""}
    command = [str(Path(options.python).absolute()), "-c", look]
    try:
        found = subprocess.run(
            command,
            check=False,
            env=own,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LOOK_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python = {options.python!r} cannot be run: {error}") from error
    if found.returncode:
        raise ConfigError(
            f"engine.python = {options.python!r} has no package vllm; name the interpreter of an "
            "environment that has it, or make one for the CPU with `make vllm` (docs/vllm.md)"
        )


def vllm_process(options: EngineOptions) -> dict[str, Any]:
    """What `Worker.start` needs to bring up vLLM in its own interpreter. Raises ConfigError."""
    require_interpreter(options)
    kind, _, index = options.device.partition(":")
    env = {
        "PYTHONPATH": str(_folder_with_only_estr()),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # The core in the process that we step, and the runner whose sampler we replace.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # engine.threads says how many; cores are not ours to bind.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if kind == "cuda" and index:
        env["CUDA_VISIBLE_DEVICES"] = _visible_device(options.device, int(index))
    # Not resolved: the link in a virtual environment is what tells Python which one it is.
    return {
        "python": str(Path(options.python).absolute()),
        "env": env,
        "timeout_s": START_TIMEOUT_S,
    }


def _visible_device(device: str, index: int) -> str:
    """The name of the device that is number `index` of those that this process may see. Raises
    ConfigError where there are fewer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if index >= len(names):
        raise ConfigError(
            f"engine.device = {device!r}, but CUDA_VISIBLE_DEVICES = {visible!r} leaves "
            f"{len(names)} devices to this process; they are counted from cuda:0"
        )
    return names[index]


def _folder_with_only_estr() -> Path:
    """A folder whose one entry is a link to this very package."""
    name = hashlib.sha256(str(_PACKAGE).encode()).hexdigest()[:16]
    folder = cache_folder() / "package" / name
    link = folder / "estr"
    if not link.is_symlink():
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{os.getpid()}"
        aside.symlink_to(_PACKAGE, target_is_directory=True)
        aside.replace(link)  # two runs that start at once make the same one
    return folder
