"""Which offers of weights the vLLM engine closes, and when: without vLLM, whose part here is a fake
that takes tensors and draws nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from estr.engine import Request
from estr.engines.process import EngineHost
from estr.engines.rows import new_row
from estr.engines.transfer import TransferStore
from estr.engines.transports import broadcast, gloo_group
from estr.errors import EngineError, WeightsError
from estr.models import load_model, resolve_model
from estr.options.run import EngineOptions
from estr.types import RolloutId, SamplingSettings
from estr.weights import MemoryWeightStore

LIMIT_S = 5.0


class FakeVllm:
    """What VllmEngine uses of vLLM's LLMEngine."""

    def __init__(self, config: Any) -> None:
        self.model_config = SimpleNamespace(max_model_len=64, hf_config=config)
        self.engine_core = SimpleNamespace(engine_core=self, shutdown=lambda: None)
        self.pauses = True
        self.loads = True
        self.received: dict[str, torch.Tensor] = {}
        self._group: Any = None

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        if not self.pauses:
            raise RuntimeError("it does not pause")

    def resume_scheduler(self) -> None:
        pass

    def abort_request(self, names: list[str]) -> None:
        pass

    def step(self) -> list[Any]:
        return []

    def collective_rpc(self, method: str, args: Any = (), kwargs: Any = None) -> None:
        if not self.loads:
            raise RuntimeError("it does not load")
        if method == "init_weight_transfer_engine":
            info = kwargs["init_info"]
            self._group = gloo_group(info["meeting"], 1, info["timeout_s"])
        if method == "update_weights":
            info = kwargs["update_info"]
            for name, shape in zip(info["names"], info["shapes"], strict=True):
                self.received[name] = torch.empty(shape)
                broadcast(self._group, self.received[name])


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    model = load_model(resolve_model("builtin"))
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.fixture
def store(tmp_path: Path, state: dict[str, torch.Tensor]) -> TransferStore:
    store = TransferStore(tmp_path, 4, backend="gloo", device="cpu", timeout_s=LIMIT_S)
    store.publish(1, state)
    return store


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    fake = FakeVllm(load_model(resolve_model("builtin")).config)
    monkeypatch.setattr("estr.engines.vllm.start_vllm", lambda folder, options: fake)
    return fake


@pytest.fixture
def host(vllm: FakeVllm) -> EngineHost:
    options = EngineOptions(name="vllm", weight_transfer="gloo")
    return EngineHost(resolve_model("builtin"), options, 0, False)


def run_a_request(host: EngineHost) -> None:
    """A load now has to wait for it."""
    prompt = np.array([1, 4, 5], dtype=np.int32)
    request = Request(RolloutId(0, 0, 0), prompt, SamplingSettings(), 4, 3)
    assert host._vllm is not None
    host._vllm._running["0"] = new_row(request, 0, vocab_size=8, max_positions=64)


def is_free(store: TransferStore, version: int) -> bool:
    """Does the sender serve the next one?"""
    offer = store.offer(version)
    assert offer is not None
    offer.close()
    return True


def answers(host: EngineHost) -> dict[int, Any]:
    return dict(host.pump())


def test_an_offer_is_closed_where_the_policy_is_refused(
    host: EngineHost, store: TransferStore
) -> None:
    host.load(7, 1, store, "drop")  # type: ignore[arg-type]
    refusal = answers(host)[7]
    assert isinstance(refusal, EngineError)
    assert "kv must be 'recompute' or 'keep', not 'drop'" in str(refusal)
    assert is_free(store, 1)


def test_an_offer_is_closed_where_vllm_does_not_pause(
    host: EngineHost, store: TransferStore, vllm: FakeVllm
) -> None:
    vllm.pauses = False
    host.load(7, 1, store, "keep")
    assert "it does not pause" in str(answers(host)[7])
    assert is_free(store, 1)
    vllm.pauses = True
    host.load(8, 1, store, "keep")
    assert answers(host) == {8: None}


def test_a_newer_load_replaces_one_that_is_pending(
    host: EngineHost, store: TransferStore, state: dict[str, torch.Tensor], vllm: FakeVllm
) -> None:
    run_a_request(host)
    host.load(7, 1, store, "recompute")
    assert answers(host) == {}
    newer = {name: tensor + 1 for name, tensor in state.items()}
    store.publish(2, newer)
    host.load(8, 2, store, "recompute")
    replaced = answers(host)[7]
    assert isinstance(replaced, WeightsError)
    assert "version 1 was given up for version 2" in str(replaced)
    assert host._vllm is not None
    host._vllm.cancel(RolloutId(0, 0, 0))
    assert answers(host) == {8: None}
    assert host._vllm.version == 2
    for name, tensor in newer.items():
        assert torch.equal(vllm.received[name], tensor)
    assert is_free(store, 2)
    host.close()


def test_a_pending_load_that_fails_is_an_engine_error_to_the_requests(
    host: EngineHost, state: dict[str, torch.Tensor], vllm: FakeVllm
) -> None:
    store = MemoryWeightStore()
    store.publish(1, state)
    run_a_request(host)
    host.load(7, 1, store, "recompute")
    prompt = np.array([1, 4, 5], dtype=np.int32)
    host.generate(8, Request(RolloutId(0, 0, 1), prompt, SamplingSettings(), 4, 3))
    assert answers(host) == {}
    vllm.loads = False
    assert host._vllm is not None
    host._vllm.cancel(RolloutId(0, 0, 0))
    found = answers(host)
    assert isinstance(found[7], WeightsError)
    assert isinstance(found[8], EngineError)
    assert str(found[7]) == str(found[8])
    host.close()
