"""What the small token-level tasks share: demonstrations to start a model from, and sizes.

A twin is a small stand-in for a large task: same shape (tools, turns, search), few tokens, so that
a decoder of 0.1M parameters learns it in minutes. It comes with demonstrations by a player who
slips at a stated rate; `estr.warmstart` makes a model of them that is right now and then and has
far to go.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Protocol

from ..environment import Task
from . import stable_hash

ALPHABET = "0123456789+=[].!-*/ \n"
"""The characters that twins are written in; a twin's model has one token for each."""

HELD_OUT_SHARE = 8
"""One problem in this many is held out for testing, whatever the seed."""

Span = tuple[str, bool]
"""A piece of a demonstration, and whether the model is to write it."""


class Twin(Task, Protocol):
    """A task that can show how it is played.

    warm_start_steps: supervised steps after which the usual small decoder is right now and then.
    """

    warm_start_steps: int

    def demonstrate(self, index: int, rng: random.Random) -> Iterator[Span]:
        """One rollout of training problem `index` as a player with slips would have it, stop texts
        included; it goes on from whatever the environment answers."""
        ...


def is_held_out(*key: str | int) -> bool:
    """Does the problem that `key` describes belong to the test split?"""
    return stable_hash("held out", *key) % HELD_OUT_SHARE == 0


def heavy_tailed(least: int, most: int, *key: str | int) -> int:
    """A size in [least, most] drawn from `key`: P(size >= n) is about least / n, a Pareto law of
    exponent 1 cut off at `most`, so a few problems are much longer than the others."""
    if most <= least:
        return least
    uniform = (stable_hash("size", *key) % 2**52 + 0.5) / 2**52
    return math.floor(least / (1 - uniform * (1 - least / (most + 1))))


def wrong_digit(text: str, rng: random.Random) -> str:
    """The text with one of its digits replaced by another."""
    place = rng.choice([i for i, char in enumerate(text) if char.isdigit()])
    digit = rng.choice([d for d in "0123456789" if d != text[place]])
    return text[:place] + digit + text[place + 1 :]
