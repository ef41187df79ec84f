"""Are two mathematical answers equal? Told by `math-verify`, in processes that can be killed.

    verifier = shared_verifier(timeout_s=5.0)
    verifier.equal("0.5", "\\frac{1}{2}")      True; from any thread

Comparing can take forever (9^{9^9}) or all memory, so it is done elsewhere, under a limit of time
and of memory (`estr.killable`). Running into one of them, or any exception there, is the grader's
failure (GraderError: the rollout stays unscored and is counted), never a wrong answer.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import lru_cache
from typing import Any

from .errors import ConfigError, GraderError
from .grading import without_full_stop
from .killable import NoAnswer, Pool, serve

_THOUSANDS = re.compile(r"(?<=[0-9])\\[,;:! ](?=[0-9]{3}(?![0-9]))")


class MathVerifier:
    """At most num_processes of them, started when they are needed. timeout_s: of one comparison.

    Raises ConfigError where math-verify is not installed.
    """

    def __init__(self, timeout_s: float = 5.0, num_processes: int = 2) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("grading mathematics needs math-verify; pip install 'estr[math]'")
        self._timeout_s = timeout_s
        self._pool = Pool("estr.math_grading", num_processes)

    def equal(self, answer: str, gold: str) -> bool:
        """Does `answer` say the same as `gold`? Both as they would stand in a \\boxed{}.

        Raises GraderError when that cannot be told in time.
        """
        try:
            return bool(self._pool.ask([answer, gold], self._timeout_s))
        except NoAnswer as error:
            raise GraderError(
                f"math-verify cannot compare {answer[:80]!r} with {gold[:80]!r}: {error}"
            ) from error

    def close(self) -> None:
        """End the processes; a later question starts them anew."""
        self._pool.close()


@lru_cache(maxsize=8)
def shared_verifier(timeout_s: float) -> MathVerifier:
    """One for all tasks of this process."""
    return MathVerifier(timeout_s)


# -- in the process ------------------------------------------------------------------------------


def compare(answer: str, gold: str) -> bool:
    """math-verify's verdict, without any limit."""
    from math_verify import parse, verify

    read = [
        parse(f"\\boxed{{{_readable(text)}}}", parsing_timeout=None, raise_on_error=True)
        for text in (gold, answer)
    ]
    return bool(verify(*read, timeout_seconds=None, raise_on_error=True))


def _readable(text: str) -> str:
    """Without what math-verify stumbles over: a full stop at the end, and thin spaces between
    thousands ("10\\,000")."""
    return _THOUSANDS.sub("", without_full_stop(text.strip()))


def _answer(question: Any) -> bool:
    return compare(*question)


if __name__ == "__main__":
    serve(int(sys.argv[1]), _answer, warm_up=lambda: compare("1", "1"))
