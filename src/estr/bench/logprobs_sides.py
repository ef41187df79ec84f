"""One side of `estr bench logprobs`, measured in this process.

python -m estr.bench.logprobs_sides SIDE WIDTH VOCABULARY TOKENS THREADS

Reads requests from stdin, answers each with a line of JSON: `memory` (one step: the extra bytes of
its peak), `forward`, `step` (seconds of one call, wall and CPU). Where other work shares the cores
CPU time is the firmer figure, on one thread.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..logprobs import statistics_from_hidden

Side = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(hidden [N, D], weight [V, D], token_ids [N]) -> (log-probs [N], entropies [N])"""


def plain() -> Side:
    def side(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = (hidden @ weight.T).log_softmax(-1)
        with torch.no_grad():
            entropies = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, token_ids[:, None])[:, 0], entropies

    return side


def ours(gini: bool) -> Callable[[], Side]:
    def side(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        found = statistics_from_hidden(hidden, weight, token_ids, gini=gini)
        return found.logprobs, found.entropies

    return lambda: side


def trl(*outputs: str) -> Callable[[], Side]:
    """TRL's `ChunkedLogProbFunction` as its trainer calls it; plain torch on a CPU, Triton on a
    GPU."""

    def load() -> Side:
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK

        def side(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
            found = ChunkedLogProbFunction.apply(
                hidden, weight, None, token_ids, 1.0, CHUNK, None, 1.0, outputs
            )
            return found[0], found[1]

        return side

    return load


def verl_fused() -> Side:
    """verl's `FusedLinearForPPO`. Its other fused form, `linear_cross_entropy`, is Triton on CUDA
    tensors only."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    side: Side = FusedLinearForPPO()
    return side


def verl_chunked() -> Side:
    """verl's log-probs and chunked entropy of logits that its model holds whole."""
    from verl.utils.torch_functional import (
        entropy_from_logits_with_chunking,
        logprobs_from_logits,
    )

    def side(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.T
        with torch.no_grad():
            entropies = entropy_from_logits_with_chunking(logits)
        return logprobs_from_logits(logits, token_ids), entropies

    return side


SIDES: dict[str, Callable[[], Side]] = {
    "ours": ours(gini=False),
    "ours_gini": ours(gini=True),
    "plain": plain,
    "trl": trl("entropy"),
    "trl_gini": trl("entropy", "log_sum_sq_probs"),
    "verl_fused": verl_fused,
    "verl_chunked": verl_chunked,
}


class Measured:
    """A side on random inputs of one size."""

    def __init__(self, side: str, width: int, vocabulary: int, tokens: int, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.function = SIDES[side]()
        self.hidden = torch.randn(tokens, width, requires_grad=True)
        self.weight = (torch.randn(vocabulary, width) * width**-0.5).requires_grad_()
        self.token_ids = torch.randint(vocabulary, (tokens,))

    def memory(self) -> dict[str, float]:
        start = _peak_bytes(reset=True)
        self._step()
        gradients = 4 * (self.hidden.numel() + self.weight.numel())
        return {"extra_bytes": float(max(_peak_bytes() - start - gradients, 0))}

    def forward(self) -> dict[str, float]:
        return _timed("forward", self._forward)

    def step(self) -> dict[str, float]:
        return _timed("step", self._step)

    def _forward(self) -> None:
        with torch.no_grad():
            self.function(self.hidden, self.weight, self.token_ids)

    def _step(self) -> None:
        """Forward and backward of the mean of the log-probs."""
        logprobs = self.function(self.hidden, self.weight, self.token_ids)[0]
        torch.autograd.backward([logprobs.mean()])
        self.hidden.grad = self.weight.grad = None


def _timed(name: str, work: Callable[[], Any]) -> dict[str, float]:
    start = time.perf_counter(), time.process_time()
    work()
    return {
        f"{name}_s": time.perf_counter() - start[0],
        f"{name}_cpu_s": time.process_time() - start[1],
    }


def _peak_bytes(*, reset: bool = False) -> int:
    """Largest resident size of this process since the last reset (Linux)."""
    if reset:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def answers(measured: Measured, requests: Iterator[str]) -> Iterator[dict[str, float]]:
    work = {
        "memory": measured.memory,
        "forward": measured.forward,
        "step": measured.step,
    }
    for request in requests:
        yield work[request.strip()]()


if __name__ == "__main__":
    for answer in answers(Measured(sys.argv[1], *map(int, sys.argv[2:])), sys.stdin):
        print(json.dumps(answer), flush=True)
