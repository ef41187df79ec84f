"""Spawned processes: answers, errors, deferred calls, death, hang, shutdown."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path

import pytest

from estr.calls import Calls, Message
from estr.errors import EngineError, WorkerDied, WorkerError
from estr.evaluator_process import EvaluatorProcess
from estr.worker import Worker, last_lines, torch_settings


@pytest.fixture(autouse=True)
def _hosts_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))


async def start(host: str, log=None, **kwargs) -> Worker:
    return await Worker.start("test", f"worker_hosts:{host}", kwargs, threads=1, log=log)


async def test_calls_are_answered_in_order() -> None:
    worker = await start("Plain", start=5)
    answers = await asyncio.gather(*(worker.call("add", i, timeout_s=10) for i in (1, 2, 3)))
    assert answers == [6, 8, 11]
    for name, value in torch_settings(1).items():
        assert await worker.call("variable", name, timeout_s=10) == value
    await worker.close()


async def test_errors_keep_their_class_or_are_described() -> None:
    worker = await start("Plain")
    with pytest.raises(EngineError, match="known"):
        await worker.call("fail", True, timeout_s=10)
    with pytest.raises(WorkerError, match=r"KeyError: 'unknown' at worker_hosts.py:\d+"):
        await worker.call("fail", False, timeout_s=10)
    assert await worker.call("add", 1, timeout_s=10) == 1
    await worker.close()


async def test_a_log_that_cannot_be_written_hides_no_error() -> None:
    worker = await Worker.start("w", "worker_hosts:Plain", {}, log=Path("/dev/full"))
    try:
        with pytest.raises(WorkerError, match="KeyError: 'unknown'"):
            await worker.call("fail", False, timeout_s=30)
        assert await worker.call("add", 1, timeout_s=30) == 1
    finally:
        await worker.close()


async def test_a_worker_that_does_not_come_up_in_time_is_named() -> None:
    with pytest.raises(WorkerError, match=r"the w process \(pid \d+\) did not come up within 0.01"):
        await Worker.start("w", "worker_hosts:Plain", {}, timeout_s=0.01)


async def test_a_factory_that_fails_is_reported() -> None:
    with pytest.raises(EngineError, match="start is -1"):
        await start("Plain", start=-1)
    with pytest.raises(WorkerError, match="no_such_module"):
        await Worker.start("test", "no_such_module:X", {})


async def test_deferred_calls_overlap() -> None:
    worker = await start("Pumped")
    slow = asyncio.create_task(worker.call("work", 1_000_000_000, timeout_s=30))
    quick = await worker.call("work", 3, timeout_s=10)
    assert quick >= 3
    assert not slow.done()
    assert await worker.call("drop", timeout_s=10) == 1
    slow.cancel()
    await worker.close()


async def test_a_hanging_worker_times_out_and_can_be_closed() -> None:
    worker = await start("Plain")
    with pytest.raises(WorkerError, match=r"did not answer 'sleep' within 0.2 s"):
        await worker.call("sleep", 60, timeout_s=0.2)
    await worker.close(timeout_s=0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


async def test_a_close_that_is_interrupted_ends_the_process_no_less() -> None:
    worker = await start("Plain")
    asleep = asyncio.create_task(worker.call("sleep", 60, timeout_s=60))
    closing = asyncio.create_task(worker.close(timeout_s=60))
    await asyncio.sleep(0.05)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
    with pytest.raises(WorkerDied):
        await asleep


class Patient(Calls):
    """Answers at once, and remembers how long it could have taken."""

    place = "here"

    def __init__(self) -> None:
        super().__init__("evaluator")
        self.limits: dict[str, float | None] = {}

    async def call(self, method: str, *args: object, timeout_s: float | None) -> object:
        self.limits[method] = timeout_s
        await asyncio.sleep(1.5 if method == "evaluate" else 0)
        return []

    def _transmit(self, frame: list[Message]) -> None: ...

    async def close(self, timeout_s: float = 5.0) -> None: ...


async def test_an_evaluation_takes_as_long_as_it_takes_while_its_process_answers() -> None:
    worker = Patient()
    assert await EvaluatorProcess(worker, k=1, timeout_s=7.0).evaluate(3, 8) == []
    assert worker.limits == {"evaluate": None, "num_waiting": 7.0}


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="there are no real-time signals")
async def test_an_end_by_a_signal_without_a_name_is_told_as_any_other() -> None:
    worker = await start("Plain")
    os.kill(worker.pid, signal.SIGRTMIN + 3)
    with pytest.raises(WorkerDied, match=rf"killed by signal {signal.SIGRTMIN + 3}"):
        await worker.alive(for_s=60)
    await worker.close()


async def test_an_evaluator_that_is_killed_ends_its_evaluation_and_leaves_no_error_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = await start("Endless")
    evaluation = asyncio.create_task(EvaluatorProcess(worker, k=1, timeout_s=60).evaluate(3, 8))
    while not await worker.call("num_waiting", timeout_s=60):
        await asyncio.sleep(0.01)
    os.kill(worker.pid, signal.SIGSTOP)  # so that the call that watches is under way, too
    await asyncio.sleep(1.5)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="killed by SIGKILL"):
        await evaluation
    await worker.close()
    del evaluation
    gc.collect()
    assert not caplog.messages, "an exception that nobody took is told when it is collected"


@pytest.mark.parametrize("how", ["exit", "kill"])
async def test_death_fails_calls_and_names_how(how: str, tmp_path) -> None:
    worker = await start("Plain", log=tmp_path / "log.txt")
    if how == "exit":
        pending = worker.call("exit", 7, timeout_s=10)
        match = r"ended: exit status 7[\s\S]*last words"
    else:
        pending = worker.call("sleep", 60, timeout_s=10)
        asyncio.get_running_loop().call_later(0.1, os.kill, worker.pid, signal.SIGKILL)
        match = "killed by SIGKILL"
    with pytest.raises(WorkerDied, match=match):
        await pending
    assert worker.died.done()
    with pytest.raises(WorkerDied):
        await worker.call("add", 1, timeout_s=10)
    await worker.close()


async def test_an_answer_that_cannot_be_read_fails_all_calls_at_once() -> None:
    worker = await start("Plain")
    calls = [worker.call(method, timeout_s=20) for method in ("unreadable", "pid")]
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, WorkerDied)
        assert "answer of it cannot be read: ValueError: invalid literal for int" in str(outcome)
        assert f"the test process (pid {worker.pid}) was given up" in str(outcome)
    with pytest.raises(WorkerDied, match="was given up"):
        await worker.alive(for_s=20)
    await worker.close()


async def test_large_messages_pass_both_ways() -> None:
    worker = await start("Plain")
    big = list(range(300_000))
    with pytest.raises(WorkerError, match="TypeError"):
        await worker.call("add", big, timeout_s=20)
    await worker.close()


def test_waiting_threads_sleep_soon_unless_the_user_says_how_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert torch_settings(2)["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in torch_settings(1)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in torch_settings(2)


def test_of_a_log_only_its_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"x" * 9000 + b"\n" + b"".join(b"line %d\n" % i for i in range(8)))
    assert last_lines(log) == "\n".join(
        ["", f"last lines of {log}:", *(f"line {number}" for number in range(3, 8))]
    )
    (tmp_path / "empty").write_text("\n\n")
    assert last_lines(tmp_path / "empty") == ""
    assert last_lines(Path("/dev/zero")) == last_lines(tmp_path / "none") == last_lines(None) == ""
