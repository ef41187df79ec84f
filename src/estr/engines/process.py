"""An engine in a process of its own: the controller's end, and the host inside the process.

rollouts (asyncio) --generate--> EngineProcess ==socket==> EngineHost --submit--> an engine
                                                <--pump--           <--step--

The engine is LocalEngine, or VllmEngine in the interpreter of another virtual environment.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calls import Calls, portable
from ..engine import KVPolicy, Request
from ..errors import EngineError, EngineTimeout, WeightsError, WorkerError
from ..options.run import EngineOptions
from ..schedule import EngineSchedule, Position
from ..types import RolloutId, Segment
from ..weights import State, WeightStore
from ..worker import CpuBudget, Worker, busy_share, require_determinism
from .interpreter import vllm_process
from .transfer import TransferStore

if TYPE_CHECKING:
    from .local import LocalEngine
    from .scheduled import ScheduledEngine
    from .vllm import VllmEngine

LOAD_TIMEOUT_S = 600.0
"""A load without in-flight updates waits for running requests, so it may take as long as they."""

SNAPSHOT_TIMEOUT_S = 600.0
"""A replay takes its snapshot only at the step at which it was recorded."""

_WATCH_S = 1.0

_CANARY_SHARE = 0.002
"""Of the engine's CPU time. The guard spends about as much again on what each answer should be."""


class EngineProcess:
    """The Engine protocol over an EngineHost elsewhere: a spawned LocalEngine or VllmEngine."""

    def __init__(self, worker: Calls, version: int) -> None:
        self.worker = worker
        self._version = version
        self._seen = self._told = {"busy_s": 0.0, "wall_s": 0.0, "cpu_s": 0.0, "guard_s": 0.0}
        self._share = 0.0
        self.position: Position | None = None
        """Of a deterministic engine: where its schedule stood at the last snapshot."""

    @classmethod
    async def start(
        cls,
        folder: Path,
        options: EngineOptions,
        *,
        version: int = 0,
        in_flight: bool = True,
        log: Path | None = None,
        schedule: EngineSchedule | None = None,
    ) -> EngineProcess:
        """Spawn it on the model in `folder`, whose weights are called `version`. schedule: of a
        deterministic engine, see estr.engines.scheduled."""
        kwargs = {
            "folder": folder,
            "options": options,
            "version": version,
            "in_flight": in_flight,
            "schedule": schedule,
        }
        worker = await Worker.start(
            "engine",
            "estr.engines.process:EngineHost",
            kwargs,
            threads=options.threads,
            log=log,
            **(vllm_process(options) if options.name == "vllm" else {}),
        )
        return cls(worker, version)

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request, timeout_s: float) -> Segment:
        try:
            segment: Segment = await self.worker.call("generate", request, timeout_s=timeout_s)
        except asyncio.CancelledError:
            self.worker.notify("cancel", request.id)
            raise
        except WorkerError as error:
            if isinstance(error.__cause__, TimeoutError):
                self.worker.notify("cancel", request.id)
                raise EngineTimeout(f"{request.id}: {error}") from error
            raise EngineError(str(error)) from error
        return segment

    async def load(self, version: int, weights: WeightStore, kv: KVPolicy) -> None:
        await self.worker.call("load", version, weights, kv, timeout_s=LOAD_TIMEOUT_S)
        self._version = version

    async def snapshot(self) -> dict[RolloutId, Segment]:
        drawn: dict[RolloutId, Segment]
        self.position, drawn = await self.worker.call("snapshot", timeout_s=SNAPSHOT_TIMEOUT_S)
        return drawn

    async def probe(self, temperature: float) -> list[Segment]:
        """The canaries (`LocalEngine.probe`); none while the budget for them is used up."""
        canaries: list[Segment] = await self.worker.call(
            "probe", temperature, timeout_s=LOAD_TIMEOUT_S
        )
        return canaries

    def forget(self, rollout_id: RolloutId) -> None:
        """Of a deterministic engine: this rollout has ended, be it before it asked for anything."""
        self.worker.notify("cancel", rollout_id)

    async def begin(self, position: Position) -> None:
        """Of a deterministic engine: its schedule begins, or goes on where a checkpoint stands."""
        await self.worker.call("begin", position, timeout_s=60.0)

    async def statistics(self) -> dict[str, float]:
        """Counters since the start: busy_s (wall time inside steps), wall_s, tokens, and so on."""
        counters: dict[str, float] = await self.worker.call("statistics", timeout_s=60.0)
        return counters

    async def watch(self, timeout_s: float) -> None:
        """Runs until the process has died (WorkerDied) or has not answered for timeout_s
        (WorkerError): a hung engine is noticed even while nobody waits for one request only."""
        while True:
            self._seen = await self.worker.call("statistics", timeout_s=timeout_s)
            await self.worker.alive(for_s=_WATCH_S)

    def take_busy(self) -> float:
        """Share of wall time at work since this was last asked, as far as `watch` has seen."""
        if self._seen["wall_s"] > self._told["wall_s"]:
            before, self._told = self._told, self._seen
            self._share = busy_share(before, self._told)
        return self._share

    @property
    def seen(self) -> dict[str, float]:
        """The statistics that `watch` has seen last."""
        return self._seen

    async def close(self) -> None:
        await self.worker.close()


class EngineHost:
    """What runs inside the process: an engine, pumped by estr.worker between messages."""

    deferred = ("generate", "load", "snapshot")

    def __init__(
        self,
        folder: Path,
        options: EngineOptions,
        version: int,
        in_flight: bool,
        schedule: EngineSchedule | None = None,
    ) -> None:
        self._scheduled: ScheduledEngine | None = None
        self._rounded: frozenset[str] = frozenset()
        self._quantization = options.quantization
        self._vllm: VllmEngine | None = None
        self._engine: LocalEngine | VllmEngine
        if options.name == "vllm":
            from .vllm import VllmEngine

            self._vllm = VllmEngine(folder, options, version=version, in_flight=in_flight)
            self._engine = self._vllm
        else:
            self._engine = self._local(folder, options, version, in_flight, schedule)
        self._snapshots: list[int] = []
        self._numbers: dict[RolloutId, int] = {}
        self._loading: tuple[int, int] | None = None
        self._results: list[tuple[int, Any]] = []
        self._started = time.monotonic()
        self._busy_s = 0.0
        self._budget = CpuBudget(_CANARY_SHARE)

    def _local(
        self,
        folder: Path,
        options: EngineOptions,
        version: int,
        in_flight: bool,
        schedule: EngineSchedule | None,
    ) -> LocalEngine:
        from ..models import load_model, vocabulary_size
        from ..quantization import require_inner_linear_weights
        from .local import LocalEngine
        from .scheduled import ScheduledEngine

        model = load_model(folder, dtype=options.dtype, device=options.device)
        if options.quantization != "none":
            self._rounded = require_inner_linear_weights(model, options.quantization)
            model.load_state_dict(self._as_drawn_from(model.state_dict()))
        settings: dict[str, Any] = {
            "version": version,
            "max_batch": options.max_batch,
            "gini": options.gini,
            "in_flight": in_flight,
            "vocab_size": vocabulary_size(folder, model),
        }
        if schedule is None:
            return LocalEngine(model, **settings)
        require_determinism()
        self._scheduled = ScheduledEngine(model, schedule=schedule, **settings)
        return self._scheduled

    def generate(self, number: int, request: Request) -> None:
        self._numbers[request.id] = number
        try:
            self._engine.submit(request)
        except EngineError as error:
            del self._numbers[request.id]
            self._results.append((number, portable(error)))

    def cancel(self, rollout_id: RolloutId) -> None:
        asked = self._numbers.pop(rollout_id, None) is not None
        if asked or self._scheduled is not None:
            self._engine.cancel(rollout_id)

    def load(self, number: int, version: int, weights: WeightStore, kv: KVPolicy) -> None:
        self._results += self._loaded()
        try:
            self._begin_load(version, weights, kv)
        except Exception as error:  # noqa: BLE001 - the caller of a deferred call must hear of it
            self._results.append((number, portable(error)))
        else:
            self._give_up_load(version)
            self._loading = (number, version)

    def _begin_load(self, version: int, weights: WeightStore, kv: KVPolicy) -> None:
        found: Any = None
        if self._vllm is not None and isinstance(weights, TransferStore):
            # The sender serves one connection at a time, and a pending load has it.
            self._vllm.drop_load()
            self._give_up_load(version)
            found = weights.offer(version)
        self._engine.begin_load(version, found or self._as_drawn_from(weights.fetch(version)), kv)

    def _loaded(self) -> list[tuple[int, Any]]:
        """The answer to a load whose weights are in force by now."""
        if self._loading is None or self._engine.version != self._loading[1]:
            return []
        number, self._loading = self._loading[0], None
        return [(number, None)]

    def _give_up_load(self, successor: int) -> None:
        """The caller of one that is not, and will not be, hears so."""
        if self._loading is not None:
            number, version = self._loading
            error = WeightsError(f"version {version} was given up for version {successor}")
            self._results.append((number, portable(error)))
            self._loading = None

    def _as_drawn_from(self, state: State) -> State:
        if not self._rounded:
            return state
        from ..quantization import quantized_state

        return quantized_state(state, self._rounded, self._quantization)

    def snapshot(self, number: int) -> None:
        if self._scheduled is None:
            self._results.append((number, (None, self._engine.snapshot())))
            return
        self._snapshots.append(number)
        self._scheduled.request_refill()

    def probe(self, temperature: float) -> list[Segment]:
        if not self._budget.allows():
            return []
        with self._budget.spending():
            return self._engine.probe(temperature)

    def begin(self, position: Position) -> None:
        assert self._scheduled is not None, "only a deterministic engine has a schedule"
        self._scheduled.begin(position)

    def statistics(self) -> dict[str, float]:
        return {
            "busy_s": self._busy_s,
            "wall_s": time.monotonic() - self._started,
            **self._budget.statistics(),
            **self._engine.statistics(),
        }

    def busy(self) -> bool:
        if self._results:
            return True
        if self._scheduled is not None and not self._scheduled.ready():
            return False
        work = self._engine.num_running or self._engine.num_waiting
        return bool(work or self._loading or self._snapshots)

    def pump(self) -> list[tuple[int, Any]]:
        clock = time.monotonic()
        results, self._results = self._results, []
        try:
            finished = self._engine.step()
            # A snapshot was taken before this step: it must arrive before what the step finished,
            # or the rollouts would be a turn ahead of it.
            if self._scheduled is not None:
                results += self._scheduled_results(self._scheduled)
            for rollout_id, segment in finished:
                number = self._numbers.pop(rollout_id, None)
                if number is not None:
                    results.append((number, segment))
        except (EngineError, WeightsError) as error:
            failure = error if isinstance(error, EngineError) else EngineError(str(error))
            if isinstance(error, WeightsError) and self._loading is not None:
                results.append((self._loading[0], portable(error)))
                self._loading = None
            # The step names one request; none of the others can be trusted to go on.
            results += [(number, portable(failure)) for number in self._numbers.values()]
            for rollout_id in self._numbers:
                self._engine.cancel(rollout_id)
            self._numbers.clear()
        results += self._loaded()
        self._busy_s += time.monotonic() - clock
        return results

    def _scheduled_results(self, engine: ScheduledEngine) -> list[tuple[int, Any]]:
        results: list[tuple[int, Any]] = []
        for rollout_id in engine.take_dropped():
            number = self._numbers.pop(rollout_id, None)
            if number is not None:
                error = EngineError(f"{rollout_id}: cancelled, as it was in the recorded run")
                results.append((number, portable(error)))
        if (taken := engine.take_refill()) is not None:
            results += [(number, taken) for number in self._snapshots]
            self._snapshots.clear()
        return results

    def close(self) -> None:
        self._engine.close()
