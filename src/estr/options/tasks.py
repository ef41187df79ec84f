"""A recipe's `task` key: one table, or several (`[[task]]`) that a run mixes by weight.

    entries({"name": "calculator", "num_terms": 3})          one entry, the table as it stands
    entries({"name": "mix", "tasks": [{...}, {...}]})        what `[[task]]` is read as

The tables of a mix may have two keys of their own beside those of their task: `weight` and `label`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .suggest import nameless

MIX = "mix"
REWARD_TIMEOUT_S = 30.0
TOOL_TIMEOUT_S = 10.0
JUDGE_TIMEOUT_S = 18.0
JUDGE_TRIES = 3
JUDGE_PAUSE_S = 1.0
"""Before the second try; doubled before each later one."""
PROBLEM_TIMEOUT_S = 30.0
SCORE_TIMEOUT_S = 10.0
_LARGEST = 1e9
"""Weight of a task: sums of weights stay finite, and no part rounds to nothing."""


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """One task of a run. label: what its groups, metrics and evaluations are called by. weight: its
    part in the groups that are dispatched, relative to the others. table: its name and options.
    place: where the recipe has it, such as "task[1]"."""

    label: str
    weight: float
    table: dict[str, Any]
    place: str = "task"


def entries(task: Mapping[str, Any]) -> tuple[TaskEntry, ...]:
    """The tasks of a recipe's `task` table. Raises ConfigError naming place, value and remedy."""
    if task["name"] != MIX:
        return (TaskEntry(task["name"], 1.0, dict(task)),)
    tables = task.get("tasks")
    if set(task) != {"name", "tasks"} or not isinstance(tables, Sequence) or not tables:
        raise ConfigError(f'write several tasks as [[task]] tables, not as name = "{MIX}"')
    found = tuple(_entry(table, f"task[{place}]") for place, table in enumerate(tables))
    labels = [entry.label for entry in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(
                f'two tasks are called {label!r}; give each a label of its own: label = "{label}-2"'
            )
    return found


def check_call_limits(task: Mapping[str, Any], step_timeout_s: float) -> None:
    """Raises ConfigError where a call of a reward function, tool, judge or scorer may take as long
    as the whole answer of the environment (`rollout.step_timeout_s`) in which it is made: the
    rollout would end before the call is given up, and be told as an environment that does not
    answer."""
    for entry in entries(task):
        for call in _calls(entry.table):
            if not isinstance(call.value, int | float):
                continue  # refused where the options are read
            if call.value >= (step_timeout_s - call.beside_s) / call.times:
                shown = str(call.value).removesuffix(".0")  # an integer may be beyond all floats
                raise ConfigError(
                    f"{entry.place}.{call.key} = {shown}{call.how} must be below "
                    f"rollout.step_timeout_s = {step_timeout_s:g}, the limit of the whole answer; "
                    f"raise rollout.step_timeout_s or lower {entry.place}.{call.key}"
                )


@dataclass(frozen=True, slots=True)
class _Call:
    """A limit of time in a task's table. One answer may wait `times` as long, and beside_s."""

    key: str
    value: Any
    how: str = ""
    times: int = 1
    beside_s: float = 0.0


def _calls(table: Mapping[str, Any]) -> Iterator[_Call]:
    name = table["name"]
    if name == "data" and ":" in str(table.get("reward", "")):
        yield _Call("reward_timeout_s", table.get("reward_timeout_s", REWARD_TIMEOUT_S))
    if name == "data" and table.get("tools"):
        yield _Call("tool_timeout_s", table.get("tool_timeout_s", TOOL_TIMEOUT_S))
    if name == "deep_search" and table.get("judge") == "model":
        pauses_s = JUDGE_PAUSE_S * (2 ** (JUDGE_TRIES - 1) - 1)
        how = f", {JUDGE_TRIES} times with {pauses_s:g} s of pauses between,"
        value = table.get("judge_timeout_s", JUDGE_TIMEOUT_S)
        yield _Call("judge_timeout_s", value, how, JUDGE_TRIES, pauses_s)
    if name == "reasoning_gym":
        making = table.get("problem_timeout_s", PROBLEM_TIMEOUT_S)
        yield _Call("problem_timeout_s", making)
        if isinstance(making, int | float):  # in a new process the problem is made again first
            how = f", after problem_timeout_s = {str(making).removesuffix('.0')},"
            value = table.get("score_timeout_s", SCORE_TIMEOUT_S)
            yield _Call("score_timeout_s", value, how, beside_s=making)


def title(task: Mapping[str, Any]) -> str:
    """What a run trains on, for people: the labels."""
    return " + ".join(entry.label for entry in entries(task))


def _entry(table: Any, place: str) -> TaskEntry:
    if isinstance(table, str):
        table = {"name": table}
    if not isinstance(table, Mapping):
        raise ConfigError(f"{place} must be a name or a table with a name, not {table!r}")
    options = dict(table)
    if "path" in options:
        options = {"name": "data", **options}
    name = options.get("name")
    if not isinstance(name, str) or name == MIX:
        raise ConfigError(nameless(place, options))
    weight, label = options.pop("weight", 1.0), options.pop("label", name)
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not 1 / _LARGEST <= weight <= _LARGEST:
        raise ConfigError(
            f"{place}.weight must be finite and above 0, from {1 / _LARGEST:g} to {_LARGEST:g}, "
            f"not {weight!r:.40}"
        )
    if not isinstance(label, str) or not label or set(label) & set("/\n"):
        raise ConfigError(f"{place}.label must be a text without '/', not {label!r}")
    return TaskEntry(label, float(weight), options, place)
