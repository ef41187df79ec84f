"""Functions of jobs, for worker processes of a sweep."""

from __future__ import annotations

import os
import time
from pathlib import Path


def measured(config):
    """A job that does what its configuration says, and writes its number down in the end."""
    if config.get("fails"):
        raise ValueError("no such luck")
    if "refuses" in config:
        from estr.errors import ConfigError

        raise ConfigError(config["refuses"])
    if config.get("dies"):
        print("famous last words", flush=True)
        os._exit(7)
    time.sleep(config.get("sleep", 0))
    while not Path(config.get("until", ".")).exists():
        time.sleep(0.02)
    if "appends" in config:
        with open(config["appends"], "a") as file:
            file.write(config["text"])
    with open(config["log"], "a") as log:
        log.write(f"{config['number']}\n")
    return [{"measure": "accuracy", "step": 1, "value": config["number"] / 10}]


def odd(config):
    """Rows as a careless function returns them."""
    import numpy as np

    row = {"measure": "accuracy", "step": 1, "value": 0.5}
    return {
        "none": None,
        "empty": [],
        "no rows": [1],
        "no measure": [{"step": 1, "value": 0.5}],
        "text": [{**row, "value": "0.5"}],
        "numpy": [{**row, "value": np.float32(0.5)}],
        "numpy label": [{**row, "axis": np.int64(1)}],
        "forged": [{**row, "kind": "other", "job": "other", "axis": 1}],
    }[config["kind"]]
