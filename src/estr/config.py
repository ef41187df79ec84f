"""The recipe: defaults < file < command line, validated before any compute is spent.

    load_recipe("recipes/calculator.toml", overrides=["max_staleness=0", "correction.tau=0.5"])

A recipe is TOML. Top-level keys are the fields of `Recipe`; its tables are the dataclasses of
`estr.options`. `task` and `correction` are open tables: a name (built-in, or "module:attribute"
of one's own) and that thing's own options; a plain string is short for a table with only the name.
Unknown keys are refused at every level, with the nearest known one. No torch is imported here.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .errors import ConfigError
from .options.corrections import CORRECTION_OPTIONS, require
from .options.placement import check_placement, check_weight_transfer
from .options.run import (
    CheckpointOptions,
    CurriculumOptions,
    EngineOptions,
    EvalOptions,
    KlOptions,
    LoraOptions,
    LossOptions,
    RayOptions,
    RolloutOptions,
    SamplingOptions,
    TrainerOptions,
    WandbOptions,
)
from .options.suggest import nameless, suggest
from .options.tasks import MIX, check_call_limits, entries

T = TypeVar("T")
Table = dict[str, Any]

_LONGEST_NAME = 200
"""File systems take 255 bytes; what is written aside first has a longer name."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole run. Every field is a key of the recipe file; see docs/config.md."""

    name: str = "calculator"
    """Names the run folder, runs/NAME."""
    model: str = "builtin"
    """"builtin", "smollm2-135m-instruct", "warmstart" or "warmstart:SEED" (a small decoder that has
    seen the task played, badly), or the folder of a Hugging Face causal LM."""
    task: Table = field(default_factory=lambda: {"name": "calculator"})
    """A name and its options; several (`[[task]]`) are mixed by weight, docs/several-tasks.md."""
    correction: tuple[Table, ...] = ({"name": "estr"},)
    """One correction or several: masks and weights multiply, at most one brings a surrogate."""
    seed: int = 0
    """Of every random number of the run; it also names its rollouts."""
    steps: int = 200
    """Optimizer steps."""
    epochs: int = 1000
    """How often a finite training split is gone through, at most."""
    groups_per_step: int = 16
    """Groups in one optimizer step (B)."""
    group_size: int = 8
    """Rollouts of each problem (G)."""
    num_minibatches: int = 1
    """Optimizer steps made of one batch of groups, which is so many times groups_per_step."""
    max_staleness: int = 4
    """Bound on v_target - v_first of every trained trajectory (S); 0: synchronous."""
    publish_every: int = 1
    """Optimizer steps between two versions that the engine is given."""
    in_flight: bool = True
    """Switch weights under running requests; false: requests finish under the old ones first."""
    kv: typing.Literal["recompute", "keep"] = "recompute"
    """What becomes of running requests' key-value caches at a switch."""
    deterministic: bool = False
    """Keep a schedule that a replay can follow bit for bit on the same machine."""
    ledger: bool = True
    """Record every trained token in ledger/; docs/ledger.md."""
    guard: typing.Literal["off", "warn", "stop"] = "warn"
    """What happens when a check finds that the data is not what it claims to be; docs/guard.md."""
    placement: typing.Literal["local", "ray"] = "local"
    """Where engines and trainer run. local: processes of this machine; ray: actors of a Ray
    cluster, docs/ray.md."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    kl: KlOptions = field(default_factory=KlOptions)
    curriculum: CurriculumOptions = field(default_factory=CurriculumOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    ray: RayOptions = field(default_factory=RayOptions)
    wandb: WandbOptions = field(default_factory=WandbOptions)

    def __post_init__(self) -> None:
        require(
            self.name.isprintable()
            and not set(self.name) & set("/\\")
            and self.name not in ("", ".", "..")
            and len(self.name.encode()) <= _LONGEST_NAME,
            f"name must be a plain folder name of at most {_LONGEST_NAME} bytes, not {self.name!r}",
        )
        for key in ("steps", "epochs", "groups_per_step", "num_minibatches", "publish_every"):
            value = getattr(self, key)
            require(value >= 1, f"{key} must be at least 1, not {value}")
        require(
            self.group_size >= 2,
            f"group_size must be at least 2, not {self.group_size}: "
            "advantages compare the members of a group",
        )
        require(self.max_staleness >= 0, f"max_staleness must be >= 0, not {self.max_staleness}")
        require(0 <= self.seed < 2**63, f"seed must be in [0, 2^63), not {self.seed}")
        # The oldest version that may serve the last mini-batch of a batch is this many steps behind
        # it; docs/the-loop.md, theorem 2.
        slack = self.num_minibatches + self.publish_every - 2
        require(
            slack <= self.max_staleness,
            f"max_staleness = {self.max_staleness} cannot hold with num_minibatches = "
            f"{self.num_minibatches} and publish_every = {self.publish_every}: tokens are up to "
            f"{slack} versions old by then; raise max_staleness to {slack} or lower those",
        )
        require(
            not (self.deterministic and self.kv == "keep"),
            "deterministic = true needs kv = 'recompute': a checkpoint drops the caches, and what "
            "was kept in them of older versions could not be rebuilt",
        )
        require(
            not (self.deterministic and self.engine.name != "local"),
            f"deterministic = true needs engine.name = 'local', not {self.engine.name!r}: vLLM "
            "schedules its own steps, and no recorded schedule can make it repeat them",
        )
        require(
            not (self.deterministic and self.rollout.max_filtered_groups),
            "deterministic = true needs rollout.max_filtered_groups = 0: which groups are given up "
            "depends on the order in which they finish, which a schedule does not hold",
        )
        require(
            self.sampling.max_new_tokens <= self.sampling.max_tokens,
            f"sampling.max_new_tokens = {self.sampling.max_new_tokens} exceeds "
            f"sampling.max_tokens = {self.sampling.max_tokens}",
        )
        check_weight_transfer(self.engine, self.trainer)
        check_placement(
            self.placement, self.engine, self.trainer, self.ray, deterministic=self.deterministic
        )

    def to_toml(self) -> str:
        """The resolved recipe, readable by load_recipe."""
        import tomli_w

        return tomli_w.dumps(dataclasses.asdict(self))


def load_recipe(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """Read, override and validate. Raises ConfigError naming key, value and remedy.

    overrides: "a.b=value" strings; the value is read as TOML, or as text where it is not TOML.
    """
    return recipe_from_table(read_table(path, overrides))


def read_table(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Table:
    """What a recipe file and overrides set, without the defaults and not yet validated. Raises
    ConfigError where the file cannot be read or an override is of another form."""
    table: Table = {}
    if path is not None:
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"cannot read recipe {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # syntax, encoding, endless digits, brackets
            raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _apply_override(table, override)
    return table


def recipe_from_table(table: Mapping[str, Any]) -> Recipe:
    """A validated Recipe from nested dicts. Raises ConfigError."""
    table = dict(table)
    if "task" in table:
        table["task"] = _task(table["task"])
    if "correction" in table:
        entries = table["correction"]
        entries = entries if isinstance(entries, list | tuple) else [entries]
        table["correction"] = [
            _named(entry, _correction_place(i, len(entries))) for i, entry in enumerate(entries)
        ]
        if not table["correction"]:
            raise ConfigError('correction is empty; say correction = "none" for no correction')
    recipe = read_options(Recipe, table, "")
    check_call_limits(recipe.task, recipe.rollout.step_timeout_s)
    for i, entry in enumerate(recipe.correction):
        correction_options(entry, _correction_place(i, len(recipe.correction)))
    # TOML knows no None: an option that may be None is left out.
    given = tuple({k: v for k, v in e.items() if v is not None} for e in recipe.correction)
    return dataclasses.replace(recipe, correction=given)


def _task(entry: Any) -> Table:
    """The `task` key: a name, a table, or several."""
    if isinstance(entry, list | tuple) and len(entry) == 1:
        entry = entry[0]
    if isinstance(entry, list | tuple):
        entry = {"name": MIX, "tasks": list(entry)}
    table = _named(entry, "task")
    entries(table)
    return table


def _correction_place(index: int, number: int) -> str:
    return f"correction[{index}]" if number > 1 else "correction"


def correction_options(entry: Mapping[str, Any], place: str = "correction") -> Any:
    """The typed options of one `correction` table; the raw table for "module:Class" ones, which
    `estr.corrections` reads. Raises ConfigError."""
    options = dict(entry)
    name = options.pop("name")
    if ":" in name:
        return options
    if name not in CORRECTION_OPTIONS:
        remedy = suggest(name, CORRECTION_OPTIONS, {}, "")
        raise ConfigError(f"{place}.name = {name!r} is unknown; {remedy}")
    return read_options(CORRECTION_OPTIONS[name], options, place, of=name, taken=["name"])


def read_options(
    cls: type[T],
    table: Mapping[str, Any],
    place: str,
    *,
    of: str = "",
    taken: Collection[str] = (),
) -> T:
    """A table as the dataclass `cls`: unknown keys refused at every level, types checked, the
    dataclass's own checks run. `place` is the table's path in messages, `of` the name of the thing
    whose options they are, `taken` the keys that were taken out of the table before. Raises
    ConfigError."""
    _refuse_unknown(cls, table, place, of, taken)
    try:
        return msgspec.convert(dict(table), cls)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), cls, table, place)) from error


def _refuse_unknown(
    cls: Any, table: Mapping[str, Any], place: str, of: str = "", taken: Collection[str] = ()
) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{place or 'the recipe'} must be a table, not {table!r}")
    hints = typing.get_type_hints(cls)
    at = f"{place}." if place else ""
    for key, value in table.items():
        if key not in hints:
            unknown = f"unknown key {at}{key}" + (f" of {of}" if of else "")
            raise ConfigError(f"{unknown}; {suggest(str(key), [*hints, *taken], _homes(), at)}")
        if dataclasses.is_dataclass(hints[key]):
            _refuse_unknown(hints[key], value, at + key)


def _homes() -> dict[str, list[str]]:
    """Every key of a recipe with the full paths where it is right."""
    homes: dict[str, list[str]] = {}
    for name, hint in typing.get_type_hints(Recipe).items():
        homes.setdefault(name, []).append(name)
        if dataclasses.is_dataclass(hint):
            for key in typing.get_type_hints(hint):
                homes.setdefault(key, []).append(f"{name}.{key}")
    owners: dict[str, list[str]] = {}
    for name, options in CORRECTION_OPTIONS.items():
        for key in typing.get_type_hints(options):
            owners.setdefault(key, []).append(name)
    for key, names in owners.items():
        homes.setdefault(key, []).append(f"correction.{key} (of {', '.join(names)})")
    return homes


def correction_entries(text: str) -> tuple[Table, ...]:
    """The `correction` tables that one line describes: NAME, or NAME:key=value,key=value, several
    of them joined by +, as in "estr:tau=0.5,surrogate=none + tis:level=geometric". A correction of
    one's own is "module:Class" or "module:Class:key=value". Values are read as those of --set are.

    Raises ConfigError on text of another form, unknown names, keys and values.
    """
    parts = re.split(r"\s*\+\s*(?=[A-Za-z_])", text.strip())  # not the + of 1e+3
    entries = []
    for i, part in enumerate(parts):
        name, colon, options = part.rpartition(":")
        if "=" not in options:
            name, colon, options = part, "", ""
        known, written, rest = name.partition(":")
        # A class of one's own may live in a module of such a name; its name begins as classes do.
        if written and known.strip() in CORRECTION_OPTIONS and not rest.strip()[:1].isupper():
            raise ConfigError(
                f"correction {text!r}: {rest.strip()!r} is not of the form key=value; "
                f"an option of {known.strip()} is written as {known.strip()}:key=value"
            )
        entry: Table = {"name": name.strip()}
        for option in options.split(",") if colon else ():
            key, equals, value = option.partition("=")
            if not (equals and key.strip() and name):
                raise ConfigError(
                    f"correction {text!r}: {option.strip()!r} is not of the form key=value; "
                    "write NAME:key=value,key=value, several corrections joined by +"
                )
            if key.strip() in entry:  # the name is one of them, too
                raise ConfigError(f"correction {text!r}: {key.strip()!r} is given twice")
            entry[key.strip()] = _toml_value(value)
        correction_options(entry, _correction_place(i, len(parts)))
        entries.append(entry)
    return tuple(entries)


def _toml_value(text: str) -> Any:
    """A value of the command line: TOML, or the text itself where it is not."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        return text.strip()


def as_override(key: str, value: Any) -> str:
    """The "key=value" that load_recipe reads back as this value."""
    return f"{key}={_toml(value)}"


def _toml(value: Any) -> str:
    """In one line, as `_toml_value` reads it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value)


def _explain(error: str, cls: Any, table: Mapping[str, Any], place: str) -> str:
    """msgspec's message with the full path of the key, its value and what it may be."""
    text, _, path = error.partition(" - at `$")
    hint: Any = cls
    value: Any = table
    where = place
    for part in path.rstrip("`").replace("[", ".[").split(".")[1:]:
        if part.startswith("["):
            if not isinstance(value, list | tuple):  # "[...]": some value of an open table
                break
            hint, value = None, value[int(part.strip("[]"))]
            where += part
        else:
            hint, value = typing.get_type_hints(hint)[part], value[part]
            where += f".{part}" if where else part
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        # A check of the dataclass itself speaks of one of its keys first.
        names_key = text.partition(" ")[0] in typing.get_type_hints(hint)
        joint = "" if not where else "." if names_key else ": "
        return f"{where}{joint}{text}"
    if typing.get_origin(hint) is typing.Literal:
        text = "must be one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    return f"{where} = {value!r}: {text.replace('`', '')}"


def _named(entry: Any, place: str) -> Table:
    if isinstance(entry, str):
        return {"name": entry}
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{place} must be a name or a table with a name, not {entry!r}")
    if place == "task" and "path" in entry:
        entry = {"name": "data", **entry}  # a file of one's own needs no more than its path
    if not isinstance(entry.get("name"), str):
        raise ConfigError(nameless(place, entry))
    return dict(entry)


def _apply_override(table: Table, override: str) -> None:
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"--set {override!r} is not of the form key=value")
    value = _toml_value(text)
    defaults = Recipe()
    open_defaults: Table = {"task": defaults.task, "correction": defaults.correction[0]}
    node = table
    for part in path[:-1]:
        child = node.get(part, open_defaults.get(part, {}) if node is table else {})
        if isinstance(child, str):
            child = {"name": child}
        if isinstance(child, list | tuple) and len(child) == 1:
            child = _named(child[0], part)
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {part} is {child!r}, not a table")
        node[part] = child = dict(child)
        node = child
    node[path[-1]] = value
