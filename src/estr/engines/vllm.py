"""vLLM as an engine: its scheduler, its paged cache and its kernels, our sampler's records.

    submit ->  waiting --(oldest deadline first, max_batch at once)--> vLLM's scheduler
                                                                           |
    step():    switch weights if due; admit; one step of vLLM, in which RecordingSampler draws
               a token for every running request and records log-prob, entropy, gini, version
                                                                           |
    finished <--(stop token | budget | context full)-----------------------+

A switch is pause(keep) -> reload -> resume, between two steps: running requests stay where they
are. With kv = recompute their caches are dropped and filled again under the new weights. Prompts
are shared under a key that every load changes, so that a new request never finds anything of older
weights.

This module runs in vLLM's own virtual environment, in the process that `estr.engines.process`
spawns there; it needs vllm, torch, numpy, safetensors and transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..engine import KVPolicy, Request
from ..errors import EngineError, WeightsError
from ..models import vocabulary_size
from ..options.run import EngineOptions
from ..types import RolloutId, Segment
from ..weights import State
from .rows import Row, in_order, new_row
from .sampler import uniforms
from .transfer import Offer
from .vllm_start import start_vllm

_OUTPUT_LAYERS = ("lm_head.weight", "embed_out.weight")
"""What transformers calls them."""
_NUM_FACTS = 3
"""Columns of what RecordingSampler records for a token."""
_COUNTERS = ("steps", "tokens", "prompt_tokens", "cached_tokens", "transfers")


class VllmEngine:
    """Draws tokens from the model in `folder`, whose weights are called `version`.

    It has the methods of LocalEngine and keeps the same promises; `estr.engines.process` hosts
    either. in_flight False: with a load pending, admit nothing and finish what runs, then switch.
    """

    def __init__(
        self, folder: Path, options: EngineOptions, *, version: int = 0, in_flight: bool = True
    ) -> None:
        self._vllm = start_vllm(folder, options)
        config = self._vllm.model_config
        self._max_positions = int(config.max_model_len)
        self._vocab_size = vocabulary_size(folder, SimpleNamespace(config=config.hf_config))
        self._shapes = checkpoint_shapes(
            folder, tied=bool(getattr(config.hf_config, "tie_word_embeddings", False))
        )
        self._version = version
        self._max_batch = options.max_batch
        self._dtype = options.dtype
        self._gini = options.gini
        self._in_flight = in_flight
        self._waiting: dict[RolloutId, Row] = {}
        self._running: dict[str, Row] = {}
        self._pending: tuple[int, State | Offer, KVPolicy] | None = None
        self._joined = ""
        """The sender that vLLM's worker has met."""
        self._arrivals = itertools.count()
        self._names = itertools.count()
        self._num_loads = 0
        self._closed = ""
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._vllm.collective_rpc("estr_record", args=(version, self._vocab_size))

    @property
    def version(self) -> int:
        """The version that the next token will be drawn under, unless a load comes in between."""
        return self._version

    @property
    def num_running(self) -> int:
        """Requests that vLLM has and that are not finished."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that vLLM has not been given yet."""
        return len(self._waiting)

    def statistics(self) -> dict[str, float]:
        """Counters since the start: steps, tokens drawn, prompt_tokens of requests that drew their
        first token, cached_tokens, how many of those came out of the prefix cache, and transfers,
        loads that came out of the trainer's memory."""
        return {name: float(count) for name, count in self._counts.items()}

    def submit(self, request: Request) -> None:
        """Queue a request; it is admitted by deadline version, then by arrival.

        Raises EngineError, naming the request, for one that cannot be served.
        """
        if self._closed:
            raise EngineError(f"{request.id}: {self._closed}")
        served = (row.request.id for row in self._running.values())
        if request.id in self._waiting or request.id in served:
            raise EngineError(f"{request.id} is already being served")
        self._waiting[request.id] = new_row(
            request,
            next(self._arrivals),
            vocab_size=self._vocab_size,
            max_positions=self._max_positions,
        )

    def cancel(self, rollout_id: RolloutId) -> None:
        """Drop a request, waiting or running, with what it has drawn; unknown ids are ignored."""
        self._waiting.pop(rollout_id, None)
        self._withdraw([n for n, row in self._running.items() if row.request.id == rollout_id])

    def begin_load(self, version: int, weights: State | Offer, kv: KVPolicy) -> None:
        """Switch to these weights, or those that the trainer offers, between two tokens: at once,
        or (in_flight False) as soon as nothing runs. A newer load replaces one that is pending.

        Raises WeightsError if the weights do not fit; the old ones then stay in force. An offer is
        closed as soon as it is not needed any more, whatever happens.
        """
        try:
            if kv not in ("recompute", "keep"):
                raise EngineError(f"kv must be 'recompute' or 'keep', not {kv!r}")
            if isinstance(weights, Offer):
                weights.check(self._shapes, self._dtype)
            else:
                check_state(weights, self._shapes)
        except BaseException:
            _let_go(weights)
            raise
        self.drop_load()
        self._pending = (version, weights, kv)
        self._switch_if_due()

    def drop_load(self) -> None:
        """Forget a load that is pending, if one is; the weights in force stay so."""
        load, self._pending = self._pending, None
        if load is not None:
            _let_go(load[1])

    def step(self) -> list[tuple[RolloutId, Segment]]:
        """One step of vLLM; returns the requests that it finished. A request whose prompt is long,
        or that waits for room in the cache, may draw no token in it.

        Raises EngineError where logits are no distribution (NaN, infinite); all requests are
        dropped, and the engine can be used again, say after a load. Raises WeightsError where a
        pending load fails.
        """
        if self._closed:
            self._drop_all()
            raise EngineError(self._closed)
        self._switch_if_due()
        self._admit()
        if not self._running:
            return []
        finished = []
        for output in self._vllm.step():
            row = self._running[output.request_id]
            if not row.filled:
                row.filled = True
                self._counts["prompt_tokens"] += len(output.prompt_token_ids)
                self._counts["cached_tokens"] += output.num_cached_tokens or 0
            self._record(row, output.outputs[0])
            if row.finish_reason() is not None:
                del self._running[output.request_id]
                finished.append((row.request.id, row.segment()))
            elif output.finished:
                self._fail(row, f"vLLM ended it: {output.outputs[0].finish_reason}")
        self._counts["steps"] += 1
        return finished

    def snapshot(self) -> dict[RolloutId, Segment]:
        """What every running or waiting request has drawn so far."""
        rows = (*self._running.values(), *self._waiting.values())
        return {row.request.id: row.segment() for row in rows}

    def probe(self, temperature: float) -> list[Segment]:
        """No canaries: a forward pass beside vLLM's scheduler is not to be had. The guard still
        scores trained tokens again."""
        return []

    def close(self) -> None:
        """Drop all requests and free everything. May be called twice."""
        self._drop_all()
        self.drop_load()
        self._closed = self._closed or "the engine is closed"
        self._vllm.engine_core.shutdown()

    def _switch_if_due(self) -> None:
        load = self._pending
        if load is None or (self._running and not self._in_flight):
            return
        self._pending = None
        try:
            self._switch(*load)
        finally:
            _let_go(load[1])

    def _switch(self, version: int, weights: State | Offer, kv: KVPolicy) -> None:
        # What has drawn nothing yet begins anew, under the new key.
        unread = [name for name, row in self._running.items() if not row.filled]
        self._waiting |= {(row := self._running[name]).request.id: row for name in unread}
        self._withdraw(unread)
        core = self._vllm.engine_core.engine_core
        core.pause_scheduler(mode="keep", clear_cache=kv == "recompute")
        try:
            self._put(version, weights)
        except Exception as error:
            # vLLM has overwritten some of the old weights by now: there is no way back.
            self._closed = f"loading version {version} into vLLM failed: {error}"
            raise WeightsError(self._closed) from error
        core.resume_scheduler()
        self._version = version
        self._num_loads += 1

    def _put(self, version: int, weights: State | Offer) -> None:
        """In the place of the old weights, and verified there."""
        call = self._vllm.collective_rpc
        if not isinstance(weights, Offer):
            call("estr_load", args=(version, weights))
            return
        if weights.sender != self._joined:
            with weights.during("join") as info:
                call("init_weight_transfer_engine", kwargs={"init_info": info})
            self._joined = weights.sender
        call("estr_watch")
        call("start_weight_update")
        with weights.during("send") as info:
            call("update_weights", kwargs={"update_info": info})
        call("finish_weight_update")
        call("estr_verify", args=(version, weights.digest))
        self._counts["transfers"] += 1

    def _admit(self) -> None:
        free = self._max_batch - len(self._running)
        if self._pending is not None or not self._waiting or not free:
            return
        for row in in_order(self._waiting.values())[:free]:
            del self._waiting[row.request.id]
            self._hand_over(row)

    def _hand_over(self, row: Row) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        request = row.request
        left = range(len(row.token_ids), row.budget)
        places = [request.first_position + place for place in left]
        name = str(next(self._names))
        row.filled = False
        self._running[name] = row
        self._vllm.add_request(
            name,
            TokensPrompt(
                prompt_token_ids=row.history().tolist(), cache_salt=f"load {self._num_loads}"
            ),
            SamplingParams(
                max_tokens=len(left),
                stop_token_ids=list(request.sampling.stop_token_ids),
                ignore_eos=True,
                detokenize=False,
                logprobs=_NUM_FACTS - 1,
                flat_logprobs=True,
                output_kind=RequestOutputKind.DELTA,
                extra_args={
                    "temperature": request.sampling.temperature,
                    "uniforms": uniforms([row.stream] * len(left), places).tolist(),
                },
            ),
            priority=request.deadline_version,
        )

    def _record(self, row: Row, drawn: Any) -> None:
        """Append what vLLM has drawn for a request since its last output."""
        if not drawn.token_ids:
            return
        facts = drawn.logprobs.logprobs
        logprobs, entropies, ginis = (facts[i::_NUM_FACTS] for i in range(_NUM_FACTS))
        if any(value != value for value in logprobs):
            self._fail(row, "the logits are no distribution (NaN or infinite)")
        row.token_ids += drawn.token_ids
        row.logprobs += logprobs
        row.entropies += entropies
        row.gini += ginis if self._gini else []
        row.versions += drawn.logprobs.token_ids[1::_NUM_FACTS]
        self._counts["tokens"] += len(drawn.token_ids)

    def _fail(self, row: Row, reason: str) -> None:
        position = row.request.first_position + len(row.token_ids)
        count = len(self._running) + len(self._waiting)
        self._drop_all()
        raise EngineError(
            f"{row.request.id}: {reason} at position {position} under version {self._version}; "
            f"all {count} requests were dropped"
        )

    def _withdraw(self, names: list[str]) -> None:
        for name in names:
            del self._running[name]
        self._vllm.abort_request(names)

    def _drop_all(self) -> None:
        self._withdraw(list(self._running))
        self._waiting.clear()


def _let_go(weights: State | Offer) -> None:
    if isinstance(weights, Offer):
        weights.close()


def check_state(state: State, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise WeightsError unless `state` is a checkpoint of the model with these shapes: every
    tensor, all finite, and beside them only copies of tied ones."""
    missing = sorted(set(shapes) - set(state))
    surplus = [name for name in state if name not in shapes and not _is_copy(name, state, shapes)]
    if missing or surplus:
        raise WeightsError(
            f"the weights do not fit the engine's model: {len(missing)} missing {missing[:3]}, "
            f"{len(surplus)} unknown {sorted(surplus)[:3]}"
        )
    for name, tensor in state.items():
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise WeightsError(
                f"weight {name} has shape {tuple(tensor.shape)}, the engine's model wants "
                f"{shapes[name]}"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise WeightsError(f"weight {name} holds NaN or infinity")


def _is_copy(name: str, state: State, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    tensor = state[name]
    return any(
        other in state and tuple(tensor.shape) == shape and tensor.equal(state[other])
        for other, shape in shapes.items()
    )


def checkpoint_shapes(folder: Path, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a model folder. tied: the output layer is the embedding,
    published once, so a second copy that a folder may store is not asked for."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.offset_keys():
                shapes[name] = tuple(file.get_slice(name).get_shape())
    for name in _OUTPUT_LAYERS if tied else ():
        if name in shapes and list(shapes.values()).count(shapes[name]) > 1:
            del shapes[name]
    return shapes
