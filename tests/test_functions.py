"""Functions that a user wrote: found, called, given up."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from estr import functions
from estr.errors import ConfigError
from estr.functions import CallTimeout, call_limited, import_object, told


def test_a_function_is_found_by_name_here_and_in_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lies_here_only.py").write_text("class A:\n    value = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    assert import_object("lies_here_only:A.value", "task.reward") == 7
    assert import_object("json:dumps", "task.reward")({}) == "{}"


@pytest.mark.parametrize("target", ["json", ":dumps", "json:", "no.such:f", "json:nothing"])
def test_what_is_not_there_is_named_with_its_key(target: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.tools = .* cannot be imported"):
        import_object(target, "task.tools")


def test_the_line_of_the_users_own_code_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text(
        "import json\n\ndef score(reply):\n    return json.loads(reply)\n"
    )
    (tmp_path / "broken.py").write_text("\nimport no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    score = import_object("faulty:score", "task.reward")
    with pytest.raises(ValueError, match="Expecting value") as found:
        score("no JSON")
    assert told(found.value).endswith(" (faulty.py, line 4)"), "and not the line in json"
    with pytest.raises(ConfigError, match=r"named 'no_such_package' \(broken\.py, line 2\); the"):
        import_object("broken:score", "task.reward")
    assert told(ValueError("raised nowhere")) == "ValueError: raised nowhere"


async def test_ordinary_functions_coroutines_and_what_they_raise() -> None:
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    assert await call_limited(double, (3,), timeout_s=5) == 6
    assert await call_limited(lambda x: double(x + 1), (3,), timeout_s=5) == 8
    assert await call_limited(int, (), {}, timeout_s=5) == 0
    assert await call_limited(dict, (), {"a": 1}, timeout_s=5) == {"a": 1}
    with pytest.raises(ValueError, match="invalid literal"):
        await call_limited(int, ("x",), timeout_s=5)


@pytest.mark.parametrize("error", [StopIteration, SystemExit, KeyboardInterrupt])
async def test_nothing_a_function_raises_ends_the_loop(error: type[BaseException]) -> None:
    def leave() -> None:
        raise error("now")

    with pytest.raises(RuntimeError, match=error.__name__):
        await call_limited(leave, timeout_s=5)


async def test_a_function_that_raises_a_timeout_of_its_own_is_not_called_late() -> None:
    def refused() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await call_limited(refused, timeout_s=5)


async def test_a_call_that_hangs_is_given_up_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(functions, "MAX_HUNG_CALLS", 2)
    monkeypatch.setattr(functions, "_hung", set())
    released = threading.Event()

    async def hang() -> None:
        await asyncio.sleep(60)

    with pytest.raises(CallTimeout, match=r"within 0\.01 s"):
        await call_limited(hang, timeout_s=0.01)
    for _ in range(2):
        with pytest.raises(CallTimeout, match=r"within 0\.01 s"):
            await call_limited(released.wait, timeout_s=0.01)
    with pytest.raises(CallTimeout, match="2 earlier calls"):
        await call_limited(int, timeout_s=5)
    released.set()
    deadline = time.monotonic() + 10
    while any(thread.is_alive() for thread in functions._hung) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert await call_limited(int, timeout_s=5) == 0


async def test_calls_in_threads_do_not_wait_for_each_other() -> None:
    both = threading.Barrier(2)
    calls = (call_limited(both.wait, timeout_s=10) for _ in range(2))
    assert sorted(await asyncio.gather(*calls)) == [0, 1]
