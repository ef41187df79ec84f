"""Asynchronous reinforcement learning of language models with the Entropy-Scaled Trust Region.

    import estr

    run = estr.train("calculator")              # a recipe: file, shipped name, dict or Recipe
    print(run.before, run.after, run.folder)
    found = estr.evaluate(run, k=4)
    first, second, difference = estr.compare(run, "builtin")
    estr.export(run, "my-model")

`estr.corrections` and `estr.losses` are pure functions on tensors, for other trainers to call.
Everything is imported when it is first asked for; `import estr` itself loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import conformance, corrections, losses
    from .api import export, resume_run, train
    from .config import Recipe, load_recipe
    from .evaluation import compare_models as compare
    from .evaluation import evaluate_model as evaluate
    from .evaluation_result import EvalResult
    from .results import TrainResult, read_run
    from .scores import Comparison

    __version__: str

__all__ = [
    "Comparison",
    "EvalResult",
    "Recipe",
    "TrainResult",
    "__version__",
    "compare",
    "conformance",
    "corrections",
    "evaluate",
    "export",
    "load_recipe",
    "losses",
    "read_run",
    "resume_run",
    "train",
]

_HOMES = {
    "Comparison": ("scores", "Comparison"),
    "EvalResult": ("evaluation_result", "EvalResult"),
    "Recipe": ("config", "Recipe"),
    "TrainResult": ("results", "TrainResult"),
    "compare": ("evaluation", "compare_models"),
    "evaluate": ("evaluation", "evaluate_model"),
    "export": ("api", "export"),
    "load_recipe": ("config", "load_recipe"),
    "read_run": ("results", "read_run"),
    "resume_run": ("api", "resume_run"),
    "train": ("api", "train"),
}
_MODULES = ("conformance", "corrections", "losses")


def __getattr__(name: str) -> Any:
    import importlib
    import importlib.metadata

    if name in _HOMES:
        module, attribute = _HOMES[name]
        return getattr(importlib.import_module(f".{module}", __name__), attribute)
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name == "__version__":
        return importlib.metadata.version(__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
