"""Weights out of the trainer's memory: what both sides say, in which order, and what becomes of
failures. The engine's side is this file's; with vLLM itself: test_vllm_transfer.py."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from estr.config import load_recipe
from estr.engines.transfer import Offer, TransferStore
from estr.engines.transports import (
    broadcast,
    decode_handle,
    decode_update_info,
    encode_handle,
    gloo_group,
    metadata,
)
from estr.errors import ConfigError, WeightsError
from estr.processes import weight_store
from estr.weights import FileWeightStore, bit_sum

LIMIT_S = 60.0

STATE = {
    "embed": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "norm": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
    "steps": torch.tensor(7),
}


def transfer_store(folder: Path, timeout_s: float = LIMIT_S) -> TransferStore:
    return TransferStore(folder, 4, backend="gloo", device="cpu", timeout_s=timeout_s)


@pytest.fixture
def store(tmp_path: Path) -> TransferStore:
    return transfer_store(tmp_path)


def offered(store: TransferStore, version: int) -> Offer:
    """As an engine in another process would have it."""
    offer = pickle.loads(pickle.dumps(store)).offer(version)
    assert offer is not None
    return offer


class Receiver:
    """The engine's part, without an engine."""

    def __init__(self) -> None:
        self._group = None

    def receive(self, offer: Offer) -> dict[str, torch.Tensor]:
        if self._group is None:
            with offer.during("join") as info:
                self._group = gloo_group(info["meeting"], 1, info["timeout_s"])
        with offer.during("send") as info:
            return dict(self._tensors(info))

    def _tensors(self, info: dict) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(
            info["names"], info["dtype_names"], info["shapes"], strict=True
        ):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self._group, tensor)
            yield name, tensor


def test_the_default_is_a_file_store_and_nothing_else(tmp_path: Path) -> None:
    assert type(weight_store(tmp_path, load_recipe())) is FileWeightStore
    recipe = load_recipe(overrides=["engine.name=vllm", "engine.weight_transfer=gloo"])
    assert type(weight_store(tmp_path, recipe)) is TransferStore


CUDA = ["engine.name=vllm", "engine.device=cuda:0"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.weight_transfer=gloo"], r"needs engine.name = 'vllm', not 'local'.*'file'"),
        (["engine.weight_transfer=rdma", *CUDA], r"weight_transfer.*'rdma'"),
        (["engine.weight_transfer=nccl", "engine.name=vllm"], r"needs CUDA devices.*'gloo'"),
        (["engine.weight_transfer=ipc", *CUDA], r"trainer.device = 'cpu'; set both"),
        (
            ["engine.weight_transfer=ipc", "trainer.device=cuda:1", *CUDA],
            r"one GPU for both, not .*'cuda:1'; say 'nccl'",
        ),
        (
            ["engine.weight_transfer=nccl", "trainer.device=cuda", *CUDA],
            r"two GPUs, not .*'cuda'; say 'ipc'",
        ),
        (
            ["engine.weight_transfer=nccl", "trainer.device=cuda:1", "trainer.ranks=2", *CUDA],
            r"needs trainer.ranks = 1, not 2",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(overrides=overrides)


@pytest.mark.parametrize(("way", "device"), [("nccl", "cuda:1"), ("ipc", "cuda")])
def test_what_can_work_is_taken(way: str, device: str) -> None:
    overrides = [f"engine.weight_transfer={way}", f"trainer.device={device}", *CUDA]
    assert load_recipe(overrides=overrides).engine.weight_transfer == way


def test_metadata_in_the_order_of_the_state() -> None:
    assert metadata(STATE) == {
        "names": ["embed", "norm", "steps"],
        "dtype_names": ["float32", "bfloat16", "int64"],
        "shapes": [[2, 3], [2], []],
    }


def test_the_digest_is_of_bits_wherever_they_stand() -> None:
    assert bit_sum(torch.tensor([1, -1, 3], dtype=torch.int64)) == 3
    assert bit_sum(torch.tensor([1.0, 0.0], dtype=torch.bfloat16)) == 0x3F80
    both = torch.randn(4, 6)
    assert (bit_sum(both[:1]) + bit_sum(both[1:])) % 2**64 == bit_sum(both.T)


def test_tensors_arrive_bit_for_bit_version_after_version(store: TransferStore) -> None:
    receiver = Receiver()
    for version in (3, 4):
        state = {name: tensor + version for name, tensor in STATE.items()}
        store.publish(version, state)
        offer = offered(store, version)
        received = receiver.receive(offer)
        offer.close()
        assert list(received) == list(state)
        for name, tensor in state.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor)
        assert offer.digest == sum(map(bit_sum, received.values())) % 2**64
        assert torch.equal(store.fetch(version)["embed"], state["embed"])  # the file, for others


def test_the_tensors_cross_the_loopback_interface_whatever_gloo_would_take(
    store: TransferStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    store.publish(1, STATE)
    offer = offered(store, 1)
    assert torch.equal(Receiver().receive(offer)["embed"], STATE["embed"])
    offer.close()


def test_the_version_that_is_asked_for_is_the_one_that_is_sent(store: TransferStore) -> None:
    """The trainer goes on: its tensors change in place, and newer versions are published."""
    own = {name: tensor.clone() for name, tensor in STATE.items()}
    store.publish(1, own)
    offer = offered(store, 1)
    own["embed"].zero_()
    store.publish(2, own)
    assert torch.equal(Receiver().receive(offer)["embed"], STATE["embed"])
    offer.close()
    assert store.offer(1) is None
    assert torch.equal(store.fetch(1)["embed"], STATE["embed"])


class Asking(dict):
    """A state that asks something as soon as it is read."""

    def __init__(self, state: dict[str, torch.Tensor], ask: Callable[[], object]) -> None:
        super().__init__(state)
        self._ask = ask
        self.answers: list[object] = []

    def items(self):
        self.answers.append(self._ask())
        return super().items()


def test_the_version_before_is_gone_before_the_next_is_copied(store: TransferStore) -> None:
    store.publish(1, STATE)
    assert store._sender is not None
    assert store._sender._held is not None
    older = weakref.ref(store._sender._held.tensors["embed"])
    state = Asking(STATE, lambda: (older(), store.offer(1), store.fetch(1)["embed"].tolist()))
    store._sender.hold(2, state)
    assert state.answers == [(None, None, STATE["embed"].tolist())]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed": None}, r"1 missing \['embed'\]"),
        ({"other": torch.zeros(1)}, r"1 unknown \['other'\]"),
        ({"embed": torch.zeros(3, 2)}, r"weight embed has shape \(3, 2\)"),
        ({"embed": torch.zeros(2, 3, dtype=torch.bfloat16)}, "dtype bfloat16.*and float32"),
        ({"embed": torch.full((2, 3), torch.inf)}, "weight embed holds NaN or infinity"),
    ],
)
def test_what_does_not_fit_is_found_before_it_is_sent(
    store: TransferStore, change: dict, message: str
) -> None:
    wanted = {"embed": (2, 3), "steps": ()}
    state = {"embed": STATE["embed"], "steps": STATE["steps"]} | change
    store.publish(1, {name: tensor for name, tensor in state.items() if tensor is not None})
    offer = offered(store, 1)
    with pytest.raises(WeightsError, match=message):
        offer.check(wanted, "float32")
    offer.close()
    store.publish(2, {name: STATE[name] for name in wanted})
    fitting = offered(store, 2)
    fitting.check(wanted, "float32")
    fitting.close()


def test_an_engine_that_goes_away_leaves_the_sender_to_the_next(store: TransferStore) -> None:
    store.publish(1, STATE)
    offered(store, 1).close()
    left = offered(store, 1)
    with pytest.raises(WeightsError, match="out of memory"), left.during("send"):
        raise RuntimeError("out of memory")
    left.close()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(store.folder / "sender"))
        stranger.sendall(b"no JSON\n")
    offer = offered(store, 1)
    assert list(Receiver().receive(offer)) == list(STATE)
    offer.close()


def test_an_engine_that_does_not_join_is_not_waited_for_without_end(tmp_path: Path) -> None:
    store = transfer_store(tmp_path, timeout_s=0.5)
    store.publish(1, STATE)
    offer = offered(store, 1)
    with pytest.raises(WeightsError, match="the trainer's sender"), offer.during("join"):
        pass  # where the engine would join
    offer.close()
    with pytest.raises(RuntimeError):
        gloo_group(str(tmp_path / "nobody"), 1, 0.2)


def test_no_sender_and_a_silent_one(tmp_path: Path) -> None:
    store = transfer_store(tmp_path, timeout_s=0.2)
    with pytest.raises(WeightsError, match=r"version 5: .*sender.* does not answer"):
        store.offer(5)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "sender"))
        silent.listen()
        with pytest.raises(WeightsError, match=r"does not answer within 0.2 s: timed out"):
            store.offer(5)


PUBLISHER = """
import sys, time, torch
from estr.engines.transfer import TransferStore
store = TransferStore(sys.argv[1], 4, backend="gloo", device="cpu", timeout_s=60.0)
store.publish(1, {f"weight {i}": torch.zeros(2**20) for i in range(4)})
print("published", flush=True)
time.sleep(600)
"""


def receive_from_the_dead(trainer: subprocess.Popen[str], group: object) -> None:
    trainer.kill()
    trainer.wait()
    for _ in range(4):
        broadcast(group, torch.empty(2**20))


@pytest.mark.parametrize("moment", ["before", "while"])
def test_a_trainer_that_dies_ends_the_transfer_with_an_error(tmp_path: Path, moment: str) -> None:
    store = transfer_store(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "published\n"
        offer = offered(store, 1)
        with offer.during("join") as info:
            group = gloo_group(info["meeting"], 1, info["timeout_s"])
        if moment == "before":
            trainer.kill()
            trainer.wait()
            with pytest.raises(WeightsError, match="sender has gone"), offer.during("send"):
                raise AssertionError("nothing to receive")
        else:
            with pytest.raises(WeightsError, match="sender has gone"), offer.during("send"):
                receive_from_the_dead(trainer, group)
        offer.close()
    # What it published is still there for a resumed run.
    assert len(store.fetch(1)) == 4


HANDLE = (
    torch.Tensor,
    torch.Size([2, 3]),
    (3, 1),
    4,
    torch.storage.TypedStorage,
    torch.bfloat16,
    0,
    b"\x00\xff" * 32,
    48,
    512,
    False,
    b"/torch_1_2",
    1,
    b"\x01" * 64,
    True,
)
"""As torch's reduce_tensor makes it of a tensor on a GPU: one value for each parameter below."""


def test_a_cuda_handle_travels_as_json() -> None:
    assert len(HANDLE) == rebuild_cuda_tensor.__code__.co_argcount
    said = {**metadata({"w": STATE["embed"]}), "ipc_handles": [{"GPU-1": encode_handle(HANDLE)}]}
    heard = decode_update_info(json.loads(json.dumps(said)))
    assert heard["names"] == ["w"]
    assert heard["ipc_handles"] == [{"GPU-1": HANDLE}]
    assert [type(part) for part in heard["ipc_handles"][0]["GPU-1"][7:9]] == [bytes, int]
    assert decode_update_info(metadata(STATE)) == metadata(STATE)


@pytest.mark.parametrize(
    "part", ["text", 1.5, {"class": "Popen"}, {"dtype": "nn"}, {"size": ["2"]}, {"other": 1}, []]
)
def test_a_handle_can_name_nothing_else(part: object) -> None:
    with pytest.raises(WeightsError, match="unknown kind"):
        decode_handle([part])


def test_a_handle_of_another_torch_is_refused() -> None:
    with pytest.raises(WeightsError, match="unknown kind: <object"):
        encode_handle((*HANDLE, object()))
