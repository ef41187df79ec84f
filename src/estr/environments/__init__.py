"""The shipped tasks, and how a recipe's `task` table becomes a Task.

    build_task({"name": "calculator", "num_terms": 3})     a shipped task, by name
    build_task({"name": "my_package.my_module:MyTask"})    one's own class
    build_tasks(recipe.task)                               all tasks of a recipe, by label

A task class is built from its typed options, `cls(options)`, and names their dataclass as the
attribute `Options`. Modules are imported only when their task is asked for. `stable_hash` and
`check_split` are for the writers of tasks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..config import read_options
from ..environment import Task
from ..errors import ConfigError, DataError
from ..functions import import_object
from ..options.tasks import MIX, entries

T = TypeVar("T")

TASKS: dict[str, str] = {
    "arithmetic": "estr.environments.arithmetic:ArithmeticTask",
    "calculator": "estr.environments.calculator:CalculatorTask",
    "countdown": "estr.environments.countdown:CountdownTask",
    "data": "estr.environments.own_data:DataTask",
    "deep_search": "estr.environments.deep_search:DeepSearchTask",
    "gsm8k": "estr.environments.gsm8k:Gsm8kTask",
    "lookup": "estr.environments.lookup:LookupTask",
    "math": "estr.environments.math_problems:MathTask",
    "reasoning_gym": "estr.environments.reasoning_gym:ReasoningGymTask",
}
"""The shipped tasks: name -> "module:Class"."""


def build_task(table: Mapping[str, Any], place: str = "task") -> Task:
    """The task that a recipe's `task` table describes. place: where the recipe has the table.

    Raises ConfigError for an unknown name, a class that cannot be imported or has no options
    dataclass, and for options that are unknown, of the wrong type or out of range.
    """
    if table.get("name") == MIX:
        raise ConfigError(
            f"this takes one task, not {len(entries(table))}: "
            f"{', '.join(entry.label for entry in entries(table))}; name one"
        )
    cls, options = _read(table, place)
    task: Task = cls(options)
    return task


def build_tasks(table: Mapping[str, Any]) -> dict[str, Task]:
    """The tasks of a recipe, one or several, by label, which of several becomes the name
    of each. Raises ConfigError as build_task does."""
    found = entries(table)
    if len(found) == 1:
        task = build_task(found[0].table)
        return {task.name: task}
    tasks = {entry.label: build_task(entry.table, entry.place) for entry in found}
    for label, task in tasks.items():
        task.name = label
    return tasks


def resolved_options(table: Mapping[str, Any]) -> dict[str, Any]:
    """The task table with every option in it. Raises ConfigError as build_task does."""
    _, options = _read(table, "task")
    return {"name": table["name"], **dataclasses.asdict(options)}


def _read(table: Mapping[str, Any], place: str) -> tuple[Any, Any]:
    """(task class, its options)."""
    options = dict(table)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f'the task table {dict(table)} has no name; say name = "calculator"')
    cls = _task_class(name, place)
    own = ["name"] if place == "task" else ["name", "weight", "label"]
    return cls, read_options(cls.Options, options, place, of=name, taken=own)


def check_split(split: str) -> None:
    """Raises ValueError unless `split` is "train" or "test"."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")


def without_tested(
    train: Sequence[T], test: Sequence[T], prompt: Callable[[T], Any], *, drop: bool
) -> list[T]:
    """The training problems whose prompt no test problem has. Raises DataError where there are
    others, unless they are to be dropped and some are left."""
    tested = {json.dumps(prompt(problem), ensure_ascii=False) for problem in test}
    left = [p for p in train if json.dumps(prompt(p), ensure_ascii=False) not in tested]
    shared = len(train) - len(left)
    if shared and not (drop and left):
        raise DataError(
            f"{shared} of {len(train)} training problems have the prompt of a test problem, and "
            "what is tested must not be trained on; take them out of one of the files, or leave "
            'them out of the training with task.bad_records = "drop"'
        )
    return left


def stable_hash(*key: str | int) -> int:
    """256 uniform bits that depend on `key` alone: the same on every machine, in every process and
    under every version of anything. Tasks draw their problems and splits from it."""
    # int(): a numpy integer writes itself otherwise.
    plain = tuple(part if isinstance(part, str) else int(part) for part in key)
    return int.from_bytes(hashlib.sha256(repr(plain).encode()).digest(), "big")


def _task_class(name: str, place: str) -> Any:
    target = TASKS.get(name, name)
    if ":" not in target:
        raise ConfigError(
            f"{place}.name = {name!r} is unknown; known: {', '.join(TASKS)}, "
            'or "package.module:Class" for one of your own'
        )
    cls = import_object(target, f"{place}.name")
    if not dataclasses.is_dataclass(getattr(cls, "Options", None)):
        raise ConfigError(
            f"{place}.name = {name!r}: the class has no attribute Options, "
            "the dataclass of its options; see docs/adding-an-environment.md"
        )
    return cls
