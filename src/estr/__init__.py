"""Asynchronous reinforcement learning of language models with the Entropy-Scaled Trust Region.

    import estr

    summary = estr.train(estr.load_recipe("recipes/calculator.toml"))
    result = estr.evaluate("calculator", k=4)

`estr.corrections` and `estr.losses` are pure functions on tensors, for other trainers to call.
Everything is imported when it is first asked for; `import estr` itself loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import conformance, corrections, losses
    from .config import Recipe, load_recipe
    from .evaluation import evaluate_model as evaluate
    from .run import train

    __version__: str

__all__ = [
    "Recipe",
    "__version__",
    "conformance",
    "corrections",
    "evaluate",
    "load_recipe",
    "losses",
    "train",
]

_HOMES = {
    "Recipe": ("config", "Recipe"),
    "evaluate": ("evaluation", "evaluate_model"),
    "load_recipe": ("config", "load_recipe"),
    "train": ("run", "train"),
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
