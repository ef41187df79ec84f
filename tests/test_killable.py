"""Questions to processes that can be killed, where the system grants less than it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from estr.killable import NoAnswer, Pool

LIKE_MACOS = """
import resource
import sys
import time

from estr.killable import serve


def refuse(*limits):
    raise ValueError("current limit exceeds maximum limit")


def answer(question):
    time.sleep(question)
    return question + 1


resource.setrlimit = refuse
serve(int(sys.argv[1]), answer, warm_up=lambda: None)
"""


def test_a_system_without_a_limit_of_memory_is_no_reason_not_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "like_macos.py").write_text(LIKE_MACOS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    pool = Pool("like_macos", num_processes=1)
    try:
        assert pool.ask(0, timeout_s=60) == 1
        with pytest.raises(NoAnswer, match=r"no answer within 0\.5 s"):
            pool.ask(60, timeout_s=0.5)
        assert pool.ask(0, timeout_s=60) == 1
    finally:
        pool.close()
