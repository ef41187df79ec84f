"""Judging answers, here and by a local endpoint that stands for a model."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from estr.environments.judge import Endpoint, Judge, exact_match, read_verdict, token_f1
from estr.errors import ConfigError, GraderError

KEY = "sk-never-shown"


@pytest.mark.parametrize(
    ("answer", "golds", "matches", "f1"),
    [
        ("The Beatles", ["beatles"], 1.0, 1.0),
        ("a spirit.", ["A Spirit"], 1.0, 1.0),
        ("the 1986 film", ["film"], 0.0, 2 / 3),
        ("NYC", ["New York", "N.Y.C."], 1.0, 1.0),
        ("yes indeed", ["yes"], 0.0, 0.0),
        ("no", ["yes"], 0.0, 0.0),
        ("cat cat", ["cat"], 0.0, 2 / 3),
        (None, ["x"], 0.0, 0.0),
        ("the", ["an"], 0.0, 0.0),
    ],
)
def test_exact_match_and_f1(
    answer: str | None, golds: list[str], matches: float, f1: float
) -> None:
    assert exact_match(answer, golds) == matches
    assert token_f1(answer, golds) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("reasoning: same.\ncorrect: yes", True),
        ("**Correct:** No.", False),
        ("incorrect: yes", None),
        ("it is correct: yes", None),
        ("correct: yes\ncorrect: no", None),
        ("correct: yes and no", None),
        ("correct:", None),
        ("", None),
    ],
)
def test_the_verdict_is_a_line_of_its_own(reply: str, verdict: bool | None) -> None:
    assert read_verdict(reply) is verdict


Answer = tuple[int, str] | float
"""(HTTP status, what the model says or the body of an error), or seconds of silence."""


CUT = "an error whose text breaks off"


@contextmanager
def endpoint(*answers: Answer) -> Iterator[tuple[str, list[tuple[str, dict[str, object]]]]]:
    """(url, what it was asked: (Authorization, body)); its answers one by one, the last forever."""
    asked: list[tuple[str, dict[str, object]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = answers[min(len(asked), len(answers) - 1)]
            asked.append((self.headers.get("Authorization", ""), {"path": self.path, **body}))
            if isinstance(answer, float):
                time.sleep(answer)
                answer = (200, "correct: yes")
            status, said = answer
            message = {"choices": [{"message": {"content": said}}]}
            data = json.dumps(message).encode() if status == 200 else said.encode()
            self.send_response(status)
            if status == 302:
                self.send_header("Location", said)
            if said == CUT:  # a chunk of 255 bytes is promised
                self.send_header("Transfer-Encoding", "chunked")
                data = b"ff\r\n" + data
            else:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", asked
        finally:
            server.shutdown()
            thread.join()


def ask(url: str, *, key_variable: str = "", timeout_s: float = 20.0) -> bool:
    judge = Judge(Endpoint(url, "judge", key_variable, timeout_s, pause_s=0.01))
    return asyncio.run(judge.ask("Who?", "Exact Answer: Ann {x}", "Ann"))


def test_a_judge_is_asked_with_the_key_and_its_verdict_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with endpoint((200, "correct: yes")) as (url, asked):
        assert ask(url, key_variable="JUDGE_KEY") is True
    ((authorization, body),) = asked
    assert authorization == f"Bearer {KEY}"
    assert (body["path"], body["model"]) == ("/v1/chat/completions", "judge")
    assert "Exact Answer: Ann {x}" in str(body["messages"])


@pytest.mark.parametrize(
    "first", [(503, "busy"), (503, CUT), (429, "slow down"), (200, "incorrect: yes")]
)
def test_what_may_pass_is_tried_again(first: Answer) -> None:
    with endpoint(first, (200, "correct: no")) as (url, asked):
        assert ask(url) is False
    assert len(asked) == 2


def test_a_silent_judge_is_given_up_in_time() -> None:
    with endpoint(30.0) as (url, asked):
        clock = time.monotonic()
        with pytest.raises(GraderError, match="within"):
            ask(url, timeout_s=0.2)
    assert time.monotonic() - clock < 10
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("answer", "tries"),
    [
        ((401, f"bad key {KEY}"), 1),
        ((503, f"bad key {KEY}"), 3),
        ((200, "well, who knows"), 3),
        ((302, "http://127.0.0.1:9/elsewhere"), 1),
    ],
)
def test_a_failing_judge_is_a_grader_error_that_does_not_show_the_key(
    answer: Answer,
    tries: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    with endpoint(answer) as (url, asked), pytest.raises(GraderError) as raised:
        ask(url, key_variable="JUDGE_KEY")
    assert len(asked) == tries
    assert KEY not in str(raised.value) + caplog.text


def test_nobody_at_the_address_is_a_grader_error() -> None:
    with endpoint((200, "")) as (url, _):
        pass
    with pytest.raises(GraderError):
        ask(url)


def test_a_key_that_is_not_set_is_found_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="JUDGE_KEY_MISSING"):
        Judge(Endpoint("http://x", "judge", "JUDGE_KEY_MISSING"))


@pytest.mark.parametrize("key", ["sk-secret\n", "sk-secret\r\n", "sk-s\u00e9cret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(ConfigError, match="cannot be sent as a key") as refused:
        Judge(Endpoint("http://127.0.0.1:9/v1", "m", "JUDGE_KEY"))
    assert "sk-s" not in str(refused.value)
