"""Log-probs and entropies from hidden states: ours, tile by tile, against plain torch and others.

Every side gives log-prob and entropy of each token, the log-prob with gradients to hidden states
and output matrix; `ours_gini` and `trl_gini` also give the collision term of the distribution.
Time and memory of a side are measured in a process of its own, which stays alive for all rounds of
a size, so that the sides take turns call by call. Peers run in their own environments, as
`conformance/install.py` makes them. Extra memory is the growth of the peak resident size over the
inputs, the returned gradients taken off.

`ratio`: the largest of ours over plain in forward and backward time, over all sizes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import machine, peer_python

SHAPES = {"576 x 49,152": (576, 49152), "2,048 x 151,936": (2048, 151936)}
"""Width and vocabulary of SmolLM2-135M and of a Qwen3-1.7B."""

TOKENS = (512, 2048, 4096, 16384)
OURS = ("ours", "ours_gini")
WHOLE = ("plain", "verl_chunked")
"""Sides that hold all logits at once."""

WHOLE_BYTES = 12 * 2**30
"""They are left out where the logits, four times over, would not fit in this."""

PEERS = {"trl": ("trl", "trl_gini"), "verl": ("verl_chunked", "verl_fused")}
"""package -> its sides (see `logprobs_sides`)."""

TIMEOUT_S = 7200.0


def run(
    quick: bool = False, peers: Path | None = None, sizes: list[tuple[str, int, int]] | None = None
) -> dict[str, Any]:
    """Measure every size on one and two threads; quick: the smaller matrix, 512 tokens, one
    thread. peers: the folder of the peers' environments. sizes: (shape, tokens, threads) instead.

    Raises ConfigError where there is no such environment.
    """
    if sizes is None:
        sizes = [(s, n, t) for s in SHAPES for n in TOKENS for t in (1, 2)]
        sizes = sizes[:1] if quick else sizes
    pythons = dict.fromkeys((*OURS, "plain"), sys.executable) | _peer_pythons(peers)
    rows = [_row(*size, pythons, rounds=2 if quick else 5) for size in sizes]
    ratios = [row["over_plain"]["step_s"] for row in rows if row["over_plain"]]
    return {
        "name": "logprobs",
        "ratio": max(ratios) if ratios else None,
        "rows": rows,
        "quick": quick,
        "machine": machine(),
    }


def _peer_pythons(folder: Path | None) -> dict[str, str]:
    """The interpreter of every peer's side."""
    if folder is None:
        return {}
    pythons: dict[str, str] = {}
    for package, sides in PEERS.items():
        pythons |= dict.fromkeys(sides, str(peer_python(folder, package)))
    return pythons


def _row(
    shape: str, tokens: int, threads: int, pythons: dict[str, str], rounds: int
) -> dict[str, Any]:
    width, vocabulary = SHAPES[shape]
    fits = 4 * 4 * tokens * vocabulary <= WHOLE_BYTES
    names = [side for side in pythons if fits or side not in WHOLE]
    with ExitStack() as stack:
        size = [str(n) for n in (width, vocabulary, tokens, threads)]
        sides = {s: stack.enter_context(_side(pythons[s], s, size)) for s in names}
        extra = {name: side.ask("memory")["extra_bytes"] for name, side in sides.items()}
        timings: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, side in sides.items():
                timings[name].append(side.ask("forward") | side.ask("step"))
    medians = {
        name: {key: statistics.median(t[key] for t in found) for key in found[0]}
        | {"extra_bytes": extra[name]}
        for name, found in timings.items()
    }
    return {
        "shape": shape,
        "tokens": tokens,
        "threads": threads,
        "rounds": rounds,
        "over_plain": _over(medians["ours"], medians.get("plain")),
        "over_peers": {
            name: _over(medians["ours_gini" if name == "trl_gini" else "ours"], medians[name])
            for name in names
            if name not in (*OURS, "plain")
        },
        "sides": medians,
    }


def _over(ours: dict[str, float], theirs: dict[str, float] | None) -> dict[str, float] | None:
    """Ours over theirs; below 1 is better."""
    return {key: ours[key] / max(theirs[key], 1e-9) for key in ours} if theirs else None


class _Side:
    """A process that answers requests with one line of JSON each."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self._process, self._name = process, name

    def ask(self, request: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        limit = threading.Timer(TIMEOUT_S, self._process.kill)
        limit.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):  # packages print what they like while they are loaded
                    answer: dict[str, float] = json.loads(line)
                    return answer
        finally:
            limit.cancel()
        raise ConfigError(f"the side {self._name} ended; what it said stands above")


@contextmanager
def _side(python: str, name: str, size: list[str]) -> Iterator[_Side]:
    source = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [python, "-m", "estr.bench.logprobs_sides", name, *size],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield _Side(process, name)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
