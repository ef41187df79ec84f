"""What runs beside a `reasoning_gym` task, in a process that can be killed: problems and scores.

    {"ask": "check", ...}     None, or an error: is there such a data set, with such options?
    {"ask": "problem", ...}   {"question": ..., "gold": ...}
    {"ask": "score", ...}     0.0 to 1.0

Problems are made of names and numbers alone, and made again here for scoring, since what a scorer
needs of one is not JSON. Scorers of the package cannot be taken at their word (what was found is
in docs/reasoning-gym.md), so:

- a reply is worth what it scores beyond what a lazy one ("", "0") scores on the same problem;
- where a lazy reply scores in full, only the data set's own answer is right;
- some raise where a reply is malformed: it is worth 0, if they can read the data set's own answer;
- some evaluate the reply as Python: here it is read as a literal only, and while a scorer runs this
  process cannot write files, start programs or open connections.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from ..config import read_options
from ..errors import ConfigError
from ..killable import serve

TEST_SHARE = 0.25
"""Of all questions, chosen by their text."""
NUM_TRIES = 64
"""Entries that are tried for one problem of a split."""
TEST_SEED = 1 << 30
"""Of the entries that testing draws from, whatever the training's seed."""
LAZY = (None, "", "xyzzy", "0", "1", "True", "[]")
"""Replies that need no thought; where one of them is right, its own score says nothing."""

_FORBIDDEN = ("os.", "subprocess.", "shutil.", "socket.", "ctypes.", "pty.", "ftplib.", "smtplib.")
_HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.putenv", "os.unsetenv")
_scoring = False


def answer(question: Mapping[str, Any]) -> Any:
    """The answer to one question. Raises whatever the package raises."""
    name, config = question["dataset"], question["config"]
    if question["ask"] == "check":
        return _check(name, config)
    entry, dataset = _entry(
        name, json.dumps(config), question["split"], question["seed"], question["index"]
    )
    if question["ask"] == "problem":
        gold = entry["answer"]
        shown = (
            gold if isinstance(gold, str) and gold and score(dataset, entry, gold) == 1 else None
        )
        return {"question": str(entry["question"]), "gold": shown}
    return score(dataset, entry, question["reply"])


def _check(name: str, config: Mapping[str, Any]) -> str | None:
    try:
        _dataset(name, json.dumps(config), 0)
    except Exception as error:  # noqa: BLE001 - data sets assert, raise and divide by zero
        said = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        return said
    return None


@functools.lru_cache(maxsize=8)
def _dataset(name: str, config: str, seed: int) -> Any:
    """Raises ConfigError for a name or an option that there is not."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise ConfigError(f"there is no data set {name!r}; there are {', '.join(sorted(DATASETS))}")
    options = json.loads(config)
    taken = {"seed", "size"} & options.keys()
    if taken:
        raise ConfigError(f"{', '.join(sorted(taken))} are not for task.config: see task.seed")
    read_options(DATASETS[name][1], _specs(options), "task.config", of=name)
    # Its size is left alone: entries are made from any index, but some check the number.
    return create_dataset(name, **_specs(options), seed=seed)


def _specs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of `composite` the tables of its parts as the package wants them."""
    from reasoning_gym.composite import DatasetSpec

    parts = options.get("datasets")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return dict(options)
    named = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in parts]
    return {**options, "datasets": named}


def _made(name: str, config: str, seed: int, number: int) -> tuple[Any, Any]:
    """(entry, its data set). Most make one for any number, a few only up to their size: what goes
    beyond comes from another seed."""
    dataset = _dataset(name, config, seed)
    try:
        return dataset[number], dataset
    except IndexError:
        rounds, rest = divmod(number, len(dataset))
        dataset = _dataset(name, config, seed + rounds * len(dataset))
        return dataset[rest], dataset


@functools.lru_cache(maxsize=4096)
def _entry(name: str, config: str, split: str, seed: int, index: int) -> tuple[Any, Any]:
    """(the problem of that split, its data set). Questions are dealt to the splits by their text,
    so that none is in both, whatever the seeds."""
    first_seed = TEST_SEED if split == "test" else seed
    for number in range(index * NUM_TRIES, (index + 1) * NUM_TRIES):
        entry, dataset = _made(name, config, first_seed, number)
        digest = hashlib.sha256(str(entry["question"]).encode()).digest()
        is_test = int.from_bytes(digest[:4], "big") < TEST_SHARE * 2**32
        if is_test == (split == "test"):
            return entry, dataset
    raise ConfigError(
        f"{NUM_TRIES} entries of {name} gave no {split} question: it has too few different ones"
    )


def score(dataset: Any, entry: Mapping[str, Any], reply: str) -> float:
    """What the reply deserves, in [0, 1]."""
    with _guarded(dataset, entry):
        try:
            found = float(dataset.score_answer(reply, entry))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - data sets raise anything
            # Its own answer raises, too, where the scorer is at fault and not the reply.
            dataset.score_answer(entry["answer"], entry)
            return 0.0
        floor = max(_floor(dataset, entry, lazy) for lazy in LAZY)
    if floor >= 1:
        return float(_same(reply, str(entry["answer"])))
    return min(1.0, max(0.0, (found - floor) / (1 - floor)))


def _floor(dataset: Any, entry: Mapping[str, Any], lazy: str | None) -> float:
    try:
        return float(dataset.score_answer(lazy, entry))
    except Exception:  # noqa: BLE001 - no score is no credit
        return 0.0


def _same(reply: str, gold: str) -> bool:
    """Equal as numbers where both are one, else as texts, case and spaces aside."""
    try:
        return Fraction(reply.strip()) == Fraction(gold.strip())
    except (ValueError, ZeroDivisionError):
        return _folded(reply) == _folded(gold)


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


@contextlib.contextmanager
def _guarded(dataset: Any, entry: Mapping[str, Any]) -> Iterator[None]:
    """While a scorer runs: `eval` in its module computes what stands in the problem itself, and
    reads literals otherwise; and the guard is up."""
    global _scoring
    own = {text for text in entry["metadata"].values() if isinstance(text, str)}

    def read(text: str) -> Any:
        return eval(text, {"__builtins__": {}}) if text in own else ast.literal_eval(text)

    module = vars(sys.modules[type(dataset).__module__])
    module["eval"] = read
    _scoring = True
    try:
        yield
    finally:
        _scoring = False
        del module["eval"]


def _guard(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: refuses what no scorer needs."""
    if not _scoring:
        return
    writes = event == "open" and not _only_reads(arguments)
    if writes or (event.startswith(_FORBIDDEN) and event not in _HARMLESS):
        raise PermissionError(f"a scorer must not do {event}")


def _only_reads(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    if isinstance(mode, str):
        return not set(mode) & set("wax+")
    return not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)


def _warm_up() -> None:
    import reasoning_gym  # noqa: F401

    sys.addaudithook(_guard)


if __name__ == "__main__":
    serve(int(sys.argv[1]), answer, warm_up=_warm_up)
