"""Log-probs and entropies from hidden states: ours, in chunks, against plain torch.

plain: logits = hidden @ weight.T, log-softmax, gather, entropy from the same log-softmax, and
autograd's backward. Both give log-prob and entropy of every token, the log-prob with gradients to
hidden and weight; ours also with gini, which the engine records, in a line of its own. Time and
memory of a side are measured in a process of its own, alternating with the other's. Extra memory
is the growth of the peak resident size over the inputs, the returned gradients taken off.

`ratio`: the largest of ours over plain in forward and backward time, over all sizes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..logprobs import statistics_from_hidden
from . import machine

SHAPES = {"576 x 49,152": (576, 49152), "2,048 x 151,936": (2048, 151936)}
"""Width and vocabulary of SmolLM2-135M and of a Qwen3-1.7B."""

TOKENS = (512, 2048, 4096, 16384)
PLAIN_BYTES = 12 * 2**30
"""Plain torch is left out where its logits, four times over, would not fit in this."""

TIMEOUT_S = 1800.0


def run(quick: bool = False) -> dict[str, Any]:
    """Measure every size on one and two threads; quick: the smaller matrix, 512 tokens, one
    thread."""
    rows = []
    for name in list(SHAPES)[: 1 if quick else None]:
        for tokens in TOKENS[: 1 if quick else None]:
            for threads in (1,) if quick else (1, 2):
                rows.append(_row(name, tokens, threads, repeats=3 if quick else 5))
    ratios = [row["step_ratio"] for row in rows if row["step_ratio"] is not None]
    return {
        "name": "logprobs",
        "ratio": max(ratios),
        "rows": rows,
        "quick": quick,
        "machine": machine(),
    }


def _row(name: str, tokens: int, threads: int, repeats: int) -> dict[str, Any]:
    width, vocabulary = SHAPES[name]
    sides = ["ours", "ours_gini", "plain"]
    if 4 * 4 * tokens * vocabulary > PLAIN_BYTES:
        sides.remove("plain")
    measured = {
        side: _in_process(side, width, vocabulary, tokens, threads, repeats) for side in sides
    }
    ours, plain = measured["ours"], measured.get("plain")

    def over(key: str) -> float | None:
        return ours[key] / plain[key] if plain else None

    return {
        "shape": name,
        "tokens": tokens,
        "threads": threads,
        "forward_ratio": over("forward_s"),
        "step_ratio": over("step_s"),
        "forward_cpu_ratio": over("forward_cpu_s"),
        "step_cpu_ratio": over("step_cpu_s"),
        "memory_ratio": over("extra_bytes"),
        "sides": measured,
    }


def _in_process(
    side: str, width: int, vocabulary: int, tokens: int, threads: int, repeats: int
) -> dict[str, float]:
    command = [sys.executable, "-m", __name__, side]
    command += [str(n) for n in (width, vocabulary, tokens, threads, repeats)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


# In the measured process -------------------------------------------------------------------------


def plain(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies), as a trainer writes them down."""
    log_probs = (hidden @ weight.T).log_softmax(-1)
    with torch.no_grad():
        entropies = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, token_ids[:, None])[:, 0], entropies


def ours(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    found = statistics_from_hidden(hidden, weight, token_ids, gini=False)
    return found.logprobs, found.entropies


def ours_gini(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    found = statistics_from_hidden(hidden, weight, token_ids, gini=True)
    return found.logprobs, found.entropies


SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "plain": plain,
    "ours": ours,
    "ours_gini": ours_gini,
}


def measure(
    side: str, width: int, vocabulary: int, tokens: int, threads: int, repeats: int
) -> dict[str, float]:
    """Median seconds of a forward pass without gradient and of a step, and the step's extra bytes.

    A step is forward and backward of the mean of the log-probs."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) * width**-0.5).requires_grad_()
    token_ids = torch.randint(vocabulary, (tokens,))
    function = SIDES[side]

    def step() -> None:
        torch.autograd.backward([function(hidden, weight, token_ids)[0].mean()])
        hidden.grad = weight.grad = None

    start = _peak_bytes(reset=True)
    step()
    gradients = 4 * (hidden.numel() + weight.numel())
    extra = _peak_bytes() - start - gradients
    with torch.no_grad():
        forward_s, forward_cpu_s = _median_s(lambda: function(hidden, weight, token_ids), repeats)
    step_s, step_cpu_s = _median_s(step, repeats)
    return {
        "forward_s": forward_s,
        "forward_cpu_s": forward_cpu_s,
        "step_s": step_s,
        "step_cpu_s": step_cpu_s,
        "extra_bytes": float(max(extra, 0)),
    }


def _median_s(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(wall, CPU) seconds of one call. On one thread CPU time is the firmer figure where other
    work shares the cores."""
    work()
    wall, cpu = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    return statistics.median(wall), statistics.median(cpu)


def _peak_bytes(*, reset: bool = False) -> int:
    """Largest resident size of this process since the last reset (Linux)."""
    if reset:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], *map(int, sys.argv[2:]))))
