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

_NEEDED = ("vllm", "torch", "numpy", "safetensors", "transformers")
_FOUND = "found"
_QUESTION = f"""
import sys
from importlib.util import find_spec
print({_FOUND!r}, *(name for name in sys.argv[1:] if find_spec(name) is None))
"""
_QUESTION_TIMEOUT_S = 60.0

_PACKAGE = Path(__file__).resolve().parents[1]


def require_interpreter(options: EngineOptions) -> None:
    """Raise ConfigError where `engine.python` is asked for and is no Python that has vLLM and what
    estr needs beside it."""
    if options.name != "vllm":
        return
    _require_program(options.python)
    lacks = _lacks(options.python)
    if lacks:
        raise _refusal(options.python, lacks)


def _require_program(python: str) -> None:
    if not (os.path.isfile(python) and os.access(python, os.X_OK)):
        raise _refusal(python, "is no interpreter")


def _refusal(python: str, why: str) -> ConfigError:
    return ConfigError(
        f"engine.python = {python!r} {why}; `make vllm` makes a virtual environment with vLLM for "
        "the CPU, docs/vllm.md says how to use one's own"
    )


def _lacks(python: str) -> str:
    """What is wrong with an interpreter, which is asked itself; "": nothing."""
    try:
        said = subprocess.run(
            [Path(python).absolute(), "-c", _QUESTION, *_NEEDED],
            env=os.environ | {"PYTHONPATH": ""},  # of ours nothing is found there
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_QUESTION_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"is no interpreter: it says nothing for {_QUESTION_TIMEOUT_S:g} s"
    except OSError as error:
        return f"is no interpreter: {error.strerror}"
    found, *absent = said.stdout.decode(errors="replace").split() or [""]
    if said.returncode or found != _FOUND:
        words = said.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return " ".join([f"is no interpreter: exit status {said.returncode}", *words])
    return f"has no {', '.join(absent)}" if absent else ""


def vllm_process(options: EngineOptions) -> dict[str, Any]:
    """What `Worker.start` needs to bring up vLLM in its own interpreter. Raises ConfigError."""
    _require_program(options.python)
    kind, colon, index = options.device.partition(":")
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
    if kind == "cuda" and colon:
        env["CUDA_VISIBLE_DEVICES"] = _visible_device(options.device, index)
    # Not resolved: the link in a virtual environment is what tells Python which one it is.
    return {
        "python": str(Path(options.python).absolute()),
        "env": env,
        "timeout_s": START_TIMEOUT_S,
    }


def _visible_device(device: str, number: str) -> str:
    """The name of the device that is so numbered among those that this process may see. Raises
    ConfigError where there are fewer, or it is no number."""
    if not (number.isascii() and number.isdecimal()):
        raise ConfigError(f'engine.device = {device!r} names no device; say "cuda:0", or "cpu"')
    index = int(number)
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
