"""An evaluator in a low-priority process of its own: the controller's end of
`estr.evaluation.EvaluatorHost`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from .calls import Calls
from .config import Recipe
from .weights import WeightStore
from .worker import Worker

if TYPE_CHECKING:
    from .evaluation import EvalResult

_NICE = 10
_FILE_TIMEOUT_S = 600.0
_WATCH_S = 1.0


class EvaluatorProcess:
    """Evaluates retained versions beside the training, from which it takes only idle time."""

    def __init__(self, worker: Calls, *, k: int, timeout_s: float) -> None:
        self.worker = worker
        self._k = k
        self._timeout_s = timeout_s

    @classmethod
    async def start(
        cls, folder: Path, recipe: Recipe, store: WeightStore, *, log: Path | None = None
    ) -> EvaluatorProcess:
        """Spawn it on the model in `folder`."""
        worker = await Worker.start(
            "evaluator",
            "estr.evaluation:EvaluatorHost",
            {"folder": folder, "recipe": recipe, "store": store},
            threads=1,
            nice=_NICE,
            log=log,
        )
        return cls(worker, k=recipe.eval.k, timeout_s=recipe.eval.timeout_s)

    async def evaluate(self, version: int, num_problems: int) -> list[EvalResult]:
        """What each task says of a version that the store still has. Raises WeightsError if not;
        WorkerError where the process has not answered for eval.timeout_s meanwhile."""
        # However long it takes: its rollouts have limits of their own.
        asked = asyncio.ensure_future(
            self.worker.call("evaluate", version, num_problems, self._k, timeout_s=None)
        )
        try:
            while not (await asyncio.wait([asked], timeout=_WATCH_S))[0]:
                await self.worker.call("num_waiting", timeout_s=self._timeout_s)
            results: list[EvalResult] = asked.result()
            return results
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def export(self, folder: Path) -> None:
        """The weights evaluated last as a Hugging Face folder."""
        await self.worker.call("export", folder.absolute(), timeout_s=_FILE_TIMEOUT_S)

    async def close(self) -> None:
        """End it. May be called twice."""
        await self.worker.close()
