"""What a switch of weights costs the requests that run.

    publish starts --> stored --> engine reads, verifies, copies --> caches --> next tokens
                                  |<------------------- pause ----------------------->|

Requests of one length run at once; a version is published from outside the engine's process and
loaded when each has drawn a number of tokens. Both policies for the caches take turns in one
engine, with new requests each time. Clocks are read inside the engine's process.

    first_token_s   from the start of the publication to the first token under the new version
    pause_s         from the last token before it to the step in which all requests draw again
    load_s          of it: weights read, verified and, by the local engine, copied
    usual_s         one step without a switch

All are medians over the rounds; names in `_cpu_s` are CPU time of the engine's process, for a
machine that does something else as well. `ratio` is the local engine's pause with recomputed caches
over that with kept ones.

With Ray each engine is measured once more as an actor whose weights come out of the object store,
and `flat_buffer` says what that way itself costs (`estr.bench.flat_buffer`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from .. import blocking
from ..engine import KVPolicy, Request
from ..engines.process import EngineProcess
from ..errors import ConfigError, DataError, EngineError
from ..models import BUILTIN, SMOLLM2, load_model, resolve_model
from ..options.run import EngineOptions
from ..types import RolloutId, SamplingSettings
from ..weights import WeightStore
from . import machine
from .switch_sides import Side, side
from .timed_host import Mark, Taken

POLICIES: tuple[KVPolicy, ...] = ("recompute", "keep")

_LIMIT_S = 900.0
_POLL_S = 0.02
_ROOM = 256
"""Tokens that a request could still draw; none is to end while it is looked at."""

Facts = dict[str, float]


class Size(NamedTuple):
    """What runs at a switch: requests, each with a prompt and tokens drawn so far, at least."""

    requests: int
    prompt: int
    drawn: int
    rounds: int


def run(quick: bool = False, vllm: Path | None = None, ray: bool = False) -> dict[str, Any]:
    """Measure 16 requests of 128 tokens and 64 drawn ones on SmolLM2 (the built-in model where that
    cannot be had), 5 rounds; quick: 4 requests of 32 and 8, one round, the built-in model.
    vllm: an interpreter that has vLLM, which is then measured on SmolLM2 as well. ray: measure each
    engine under a Ray of this machine, too, and the flat buffer.

    Raises ConfigError where there is no such interpreter or no Ray, EngineError where a switch was
    not seen.
    """
    if ray and importlib.util.find_spec("ray") is None:
        raise ConfigError("--ray needs the package ray: pip install 'estr[ray]'")
    size = Size(4, 32, 8, 1) if quick else Size(16, 128, 64, 5)
    folder, name = _model(BUILTIN if quick and vllm is None else SMOLLM2)
    local = EngineOptions(max_batch=size.requests)
    sides = {"local": side(folder, local)}
    if ray:
        sides["ray"] = side(folder, local, ray=True)
    if vllm is not None:
        options = EngineOptions(name="vllm", python=str(vllm), max_batch=size.requests)
        sides["vllm"] = side(folder, options)
        if ray:
            sides["vllm_ray"] = side(folder, options, ray=True)
    engines = {}
    for kind, its in sides.items():
        engines[kind] = blocking.run(partial(_measure, folder, its, size))
    return {
        "name": "switch",
        "ratio": engines["local"]["recompute"]["pause_s"] / engines["local"]["keep"]["pause_s"],
        "engines": engines,
        **({"flat_buffer": _flat_buffer(quick)} if ray else {}),
        "size": size._asdict(),
        "model": name,
        "quick": quick,
        "machine": machine(),
    }


def _flat_buffer(quick: bool) -> dict[str, Any]:
    from .flat_buffer import measure

    return measure(quick)


def _model(name: str) -> tuple[Path, str]:
    try:
        return resolve_model(name), name
    except DataError:
        return resolve_model(BUILTIN), BUILTIN


async def _measure(folder: Path, its: Side, size: Size) -> dict[str, Facts]:
    state: dict[str, Tensor] = load_model(folder).state_dict()
    rounds: dict[KVPolicy, list[Facts]] = {kv: [] for kv in POLICIES}
    async with its(state) as (engine, store):
        versions = itertools.count(1)
        for number in range(size.rounds + 1):
            for kv in POLICIES:
                switch = _Switch(engine, store, state, next(versions), kv)
                facts = await switch.under(_requests(size, 2 * number + (kv == "keep")))
                if number:  # the first of each warms up
                    rounds[kv].append(facts)
    return {
        kv: {key: statistics.median(facts[key] for facts in found) for key in found[0]}
        for kv, found in rounds.items()
    }


def _requests(size: Size, number: int) -> Iterator[Request]:
    """Of one round: prompts of ids that every model has, none of them twice."""
    rng = np.random.default_rng(number)
    for i in range(size.requests):
        yield Request(
            RolloutId(0, number, i),
            rng.integers(3, 20, size.prompt, np.int32),
            SamplingSettings(),
            max_new_tokens=size.drawn + _ROOM,
            first_position=size.prompt,
        )


class _Switch:
    """One switch, from its publication on."""

    def __init__(
        self,
        engine: EngineProcess,
        store: WeightStore,
        state: dict[str, Tensor],
        version: int,
        kv: KVPolicy,
    ) -> None:
        self._engine, self._store, self._state = engine, store, state
        self._version, self._kv = version, kv
        self._marks: list[Mark] = []
        self._loads: list[Taken] = []

    async def under(self, requests: Iterator[Request]) -> Facts:
        """The switch while these run, which are given up afterwards."""
        asked = list(requests)
        drawn = asked[0].max_new_tokens - _ROOM
        tasks = [asyncio.create_task(self._engine.generate(one, _LIMIT_S)) for one in asked]
        try:
            async with asyncio.timeout(_LIMIT_S):
                await self._until(lambda: sum(m.tokens for m in self._marks) >= drawn * len(asked))
                start_s = time.monotonic()
                await asyncio.to_thread(self._store.publish, self._version, self._state)
                stored_s = time.monotonic()
                await self._engine.load(self._version, self._store, self._kv)
                await self._until(lambda: self._resumed(len(asked)) is not None)
        except TimeoutError as error:
            raise EngineError(
                f"no switch to version {self._version} was seen within {_LIMIT_S:g} s"
            ) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._look()
        return {"publish_s": stored_s - start_s} | self._facts(start_s, len(asked))

    async def _until(self, reached: Any) -> None:
        while not reached():
            await asyncio.sleep(_POLL_S)
            await self._look()

    async def _look(self) -> None:
        marks, loads = await self._engine.worker.call("take_marks", timeout_s=_LIMIT_S)
        self._marks += marks
        self._loads += loads

    def _resumed(self, count: int) -> Mark | None:
        """The first step under the new version in which all of them draw."""
        new = (m for m in self._marks if m.version == self._version and m.tokens >= count)
        return next(new, None)

    def _facts(self, start_s: float, count: int) -> Facts:
        return facts_of(self._marks, self._loads[-1], self._version, count) | {
            "first_token_s": next(m for m in self._marks if m.version == self._version).wall_s
            - start_s
        }


def facts_of(marks: list[Mark], load: Taken, version: int, count: int) -> Facts:
    """What the marks of one round say about its switch to `version` under `count` requests.

    Raises EngineError where the requests ended before it, or it is not among the marks.
    """
    before = [m for m in marks if m.version < version and m.tokens == count]
    after = [m for m in marks if m.version == version and m.tokens == count]
    if len(before) < 2 or not after:
        raise EngineError(f"the switch to version {version} did not come under running requests")
    steps = list(pairwise(before))
    return {
        "pause_s": after[0].wall_s - before[-1].wall_s,
        "pause_cpu_s": after[0].cpu_s - before[-1].cpu_s,
        "load_s": load.wall_s,
        "load_cpu_s": load.cpu_s,
        "usual_s": statistics.median(b.wall_s - a.wall_s for a, b in steps),
        "usual_cpu_s": statistics.median(b.cpu_s - a.cpu_s for a, b in steps),
    }
