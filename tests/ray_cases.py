"""What the tests of the Ray placement share. Without the extra `ray` they are skipped."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import warnings
from collections.abc import Iterator

import pytest

MARKS = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed; `make test-ray` installs it",
    ),
]

SMALL = [
    "placement=ray",
    "groups_per_step=2",
    "group_size=2",
    "eval.every=0",
    "eval.final_problems=4",
    "checkpoint.every_steps=2",
]


@contextlib.contextmanager
def processes_of_ray_left_alone() -> Iterator[None]:
    """Ray forgets the Popen of each process that it has started, whether it has ended or not, and
    Python warns when it collects one. After the block they are collected."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
