"""Is an answer right? By exact match and token F1 here, or by a model that is asked.

    exact_match("The Beatles", ["beatles"])     1.0
    token_f1("the 1986 film", ["film"])         0.67
    await judge.ask(question, response, gold)   True, False, or GraderError

A judge is any endpoint that speaks OpenAI's chat completions. Its verdict is a line of its own,
"correct: yes" or "correct: no"; "incorrect: yes" is none. What cannot be read, and an endpoint that
fails, is the grader's failure (GraderError: the rollout stays unscored), never a wrong answer. The
key is read from the environment and appears in no message.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import string
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, GraderError
from ..functions import CallTimeout, call_limited
from ..options.tasks import JUDGE_PAUSE_S, JUDGE_TRIES

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_VERDICT = re.compile(r"^[\s*_>-]*correct[\s*_]*:[\s*_]*(yes|no)[\s*_.]*$", re.IGNORECASE)
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MAX_BYTES = 1 << 20

PROMPT = """\
Judge whether the response below answers the question correctly, by the correct answer alone.

Question: {question}

Response: {response}

Correct answer: {gold}

First name the final answer that the response gives ("None" if it gives none). Then say whether it
means the same as the correct answer: more detail is allowed, and so is a small difference between
numbers; any other difference, a missing part or a vague answer is not. Do not solve the question
yourself. Reply in exactly this form:

extracted answer: <the final answer of the response>
reasoning: <one or two sentences>
correct: <yes or no>"""


# -- here ----------------------------------------------------------------------------------------


def normalized(text: str) -> str:
    """Lower case, without articles, punctuation and surplus space, as SQuAD and HotpotQA do it."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def exact_match(answer: str | None, golds: Sequence[str]) -> float:
    """1.0 iff the normalized answer equals one of the normalized golds and is not empty."""
    said = normalized(answer or "")
    return float(bool(said) and said in {normalized(gold) for gold in golds})


def token_f1(answer: str | None, golds: Sequence[str]) -> float:
    """Best token F1 over the golds; yes, no and noanswer count only as a whole. Source: the
    evaluation scripts of SQuAD and HotpotQA."""
    said = normalized(answer or "")
    return max((_f1(said, normalized(gold)) for gold in golds), default=0.0)


def _f1(said: str, gold: str) -> float:
    if said != gold and {said, gold} & {"yes", "no", "noanswer"}:
        return 0.0
    words, wanted = said.split(), gold.split()
    shared = (Counter(words) & Counter(wanted)).total()
    if not shared:
        return 0.0
    return 2 * shared / (len(words) + len(wanted))


# -- by a model ----------------------------------------------------------------------------------


def read_verdict(reply: str) -> bool | None:
    """What the judge said on a line of its own; None: nothing, or both."""
    said = {
        match[1].lower()
        for line in reply.split("\n")
        if (match := _VERDICT.match(line)) is not None
    }
    return said == {"yes"} if len(said) == 1 else None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a judge is asked. url: up to and without /chat/completions; key_variable: the
    environment variable that holds the key ("": no key); timeout_s: of one try, everything
    included; tries: in all; pause_s: before the second try, doubled before each later one."""

    url: str
    model: str
    key_variable: str = ""
    timeout_s: float = 60.0
    tries: int = JUDGE_TRIES
    pause_s: float = JUDGE_PAUSE_S


class Judge:
    """Asks an endpoint. Raises ConfigError if the variable with the key is not set, or holds what
    no header can carry."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._headers = {"Content-Type": "application/json"}
        self._key = ""
        if endpoint.key_variable:
            self._key = os.environ.get(endpoint.key_variable, "")
            if not self._key:
                raise ConfigError(
                    f"task.judge_key_variable = {endpoint.key_variable!r}: this environment "
                    "variable is not set; put the key of the judge's endpoint there"
                )
            if not (self._key.isascii() and self._key.isprintable()):
                raise ConfigError(
                    f"task.judge_key_variable = {endpoint.key_variable!r}: what this environment "
                    "variable holds cannot be sent as a key: it has a line break, or a letter "
                    "beyond ASCII, in it; put the key alone there"
                )
            self._headers["Authorization"] = f"Bearer {self._key}"

    async def ask(self, question: str, response: str, gold: str) -> bool:
        """Is `response` right? Raises GraderError when no verdict is had within all tries."""
        prompt = PROMPT.format(question=question, response=response, gold=gold)
        failure = ""
        for attempt in range(self._endpoint.tries):
            if attempt:
                await asyncio.sleep(self._endpoint.pause_s * 2 ** (attempt - 1))
            try:
                reply = await call_limited(
                    self._post, (prompt,), timeout_s=self._endpoint.timeout_s
                )
            except (CallTimeout, _Again) as error:
                failure = str(error)
                continue
            verdict = read_verdict(reply)
            if verdict is not None:
                return verdict
            failure = f"no verdict in its reply: {reply[-200:]!r}"
        raise GraderError(self._safe(f"the judge at {self._endpoint.url} failed: {failure}"))

    def _post(self, prompt: str) -> str:
        """One request. Raises _Again for what may pass, GraderError for what will not."""
        body = {
            "model": self._endpoint.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{self._endpoint.url.rstrip('/')}/chat/completions",
            data=json.dumps(body).encode(),
            headers=self._headers,
        )
        try:
            with _OPENER.open(request, timeout=self._endpoint.timeout_s) as answer:
                data = answer.read(_MAX_BYTES)
        except urllib.error.HTTPError as error:
            message = self._safe(f"HTTP {error.code}: {_said(error)}")
            if error.code in _RETRIED:
                raise _Again(message) from None
            raise GraderError(f"the judge refused: {message}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Again(self._safe(f"{type(error).__name__}: {error}")) from None
        return _content(data)

    def _safe(self, message: str) -> str:
        """The message without the key, should an endpoint repeat it."""
        return message.replace(self._key, "***") if self._key else message


class _Again(Exception):
    """Worth another try."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key goes where the recipe says and nowhere else."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _said(error: urllib.error.HTTPError) -> str:
    """The beginning of an error's text, as far as it can be read."""
    try:
        with error:
            return error.read(500).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as cut:
        return f"{error.reason} ({type(cut).__name__} behind it)"


def _content(data: bytes) -> str:
    try:
        content = json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _Again(f"not a chat completion: {data[:200]!r}") from error
    return content if isinstance(content, str) else ""
