"""What the tests of the Ray placement share. Without the extra `ray` they are skipped."""

from __future__ import annotations

import importlib.util

import pytest

MARKS = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    # Ray starts processes and leaves their files to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
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
    "guard=warn",
]
