"""The experiments by name. Each module has TITLE and run(lab) -> Report; a new one is a file here
and a line below."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from ...errors import ConfigError

EXPERIMENTS: dict[str, str] = {
    "compare": "every method, in every regime, against synchronous training",
    "staleness": "the paper's grid of intra and inter staleness",
    "sensitivity": "tau and eps of estr",
    "controls": "what the gain of estr hangs on",
    "scaling": "how the log-ratio scatters with the entropy, by source and lag",
    "switches": "entropy and log-ratio around switches of version",
    "fidelity": "gradients of the rules against the on-policy gradient",
    "selector": "does the gradient foretell which rule trains well?",
    "diversity": "pass@k with high-entropy tokens kept or dropped",
    "collapse": "which indicators preceded collapses, how early, how often for nothing",
    "rules": "a rule space written down beforehand: is there a better rule?",
    "paper": "every claim, beside the published figures",
}
"""name -> what it measures; estr.lab.experiments.NAME is the module."""


def find_experiment(name: str) -> Any:
    """The module of an experiment. Raises ConfigError naming those that there are."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        known = ", ".join(EXPERIMENTS)
        raise ConfigError(f"there is no experiment {name!r}; {meant}known: {known}")
    return importlib.import_module(f"{__name__}.{name}")
