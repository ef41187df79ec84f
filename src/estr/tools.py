"""Python functions as tools: their schema, the calls that a model writes, what it reads in answer.

    box = Toolbox({"add": add})               schema from signature and docstring
    box.instructions()                        goes into the system message
    parse_calls('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>')
    await box.answer(call)                    "5", or "error: ..." for the model to read

Calls are written as Hermes and Qwen models do it: a JSON object between <tool_call> tags. Nothing
that a model wrote is evaluated: arguments are JSON, checked against the signature. A bad call is
answered, never raised. Of a tool's own exceptions ValueError, ArithmeticError and LookupError are
answers too, for the model to learn from; any other is a failure of the environment (EnvError).
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from .errors import ConfigError, EnvError
from .functions import CallTimeout, call_limited, told

CutSide = Literal["left", "right", "middle"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_CALL = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|(?={OPEN})|\Z)", re.DOTALL)
_CUT_MARK = "..."

_INSTRUCTIONS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the model wrote it. error: why it cannot be read (None: it can)."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None


def parse_calls(text: str) -> list[Call]:
    """Every call in a turn, malformed ones with their error; [] if there is none."""
    return [_parse(match[1].strip()) for match in _CALL.finditer(text)]


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of a call."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"{OPEN}\n{call}\n{CLOSE}"


def _parse(body: str) -> Call:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Call("", {}, f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call("", {}, 'a call is an object with "name" and "arguments"')
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return Call(call["name"], {}, '"arguments" must be an object')
    return Call(call["name"], arguments)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function under its name, with the check of its arguments."""

    function: Callable[..., Any]
    name: str
    key: str
    arguments: type[msgspec.Struct]

    @classmethod
    def of(cls, function: Callable[..., Any], name: str, key: str) -> Tool:
        """Raises ConfigError naming what the signature lacks."""
        try:
            hints = typing.get_type_hints(function)
            fields = [_field(p, hints) for p in inspect.signature(function).parameters.values()]
            arguments = msgspec.defstruct(
                "Arguments", fields, forbid_unknown_fields=True, kw_only=True
            )
            msgspec.json.Decoder(arguments)  # refuses a type that JSON cannot fill
        except Exception as error:  # a type hint may raise anything
            raise _no_tool(name, key, error) from error
        return cls(function, name, key, arguments)

    def schema(self) -> dict[str, Any]:
        """What the model is told, as chat templates take it. Raises ConfigError naming what
        signature or docstring lack."""
        from transformers.utils import get_json_schema

        try:
            schema = get_json_schema(self.function)["function"]
        except Exception as error:  # transformers has its own
            raise _no_tool(self.name, self.key, error) from error
        schema.pop("return", None)
        return {"type": "function", "function": {**schema, "name": self.name}}


def _no_tool(name: str, key: str, error: Exception) -> ConfigError:
    said = f"{type(error).__name__}: {error}".rstrip(".")
    return ConfigError(
        f"{key}: {name} cannot be a tool: {said}. A tool has type hints and a docstring that says "
        'what it does and, under "Args:", what each argument is'
    )


def _field(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    """One argument as msgspec defines it; a default is taken as it is."""
    if parameter.default is parameter.empty:
        return parameter.name, hints[parameter.name]
    default = msgspec.field(default_factory=lambda: parameter.default)
    return parameter.name, hints[parameter.name], default


class Toolbox:
    """The tools of a task by name.

    timeout_s: of one call. max_chars: longer answers are cut, on the side that `cut` names ("left"
    drops the left part and keeps the end). key, limit_key: where a recipe has the tools and that
    limit, for errors; limit_key "" where it has none. Raises ConfigError for a function without
    type hints, and in `schemas` and `instructions` for one without a docstring.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        *,
        timeout_s: float = 10.0,
        max_chars: int = 2000,
        cut: CutSide = "right",
        key: str = "task.tools",
        limit_key: str = "task.tool_timeout_s",
    ) -> None:
        self.tools = {name: Tool.of(f, name, key) for name, f in functions.items()}
        self._limit_key = limit_key
        self._timeout_s = timeout_s
        self._max_chars = max_chars
        self._cut: CutSide = cut

    def schemas(self) -> list[Mapping[str, Any]]:
        """Of all tools, in their order."""
        return [tool.schema() for tool in self.tools.values()]

    def instructions(self) -> str:
        """What a system message says about the tools."""
        signatures = "\n".join(json.dumps(s, ensure_ascii=False) for s in self.schemas())
        return _INSTRUCTIONS.format(signatures=signatures)

    def check(self, call: Call) -> str | None:
        """What is wrong with a call, None for a well-formed one."""
        _, error = self._read(call)
        return error

    async def answer(self, call: Call) -> str:
        """What the model reads in answer. Raises EnvError where the tool itself failed."""
        arguments, error = self._read(call)
        if arguments is None:
            return self._shown(f"error: {error}")
        tool = self.tools[call.name]
        try:
            result = await call_limited(tool.function, (), arguments, timeout_s=self._timeout_s)
        except CallTimeout as error:
            where = f" ({self._limit_key})" if self._limit_key else ""
            raise EnvError(f"tool {call.name}: {error}{where}") from error
        except (ValueError, ArithmeticError, LookupError) as error:
            return self._shown(f"error: {type(error).__name__}: {error}")
        except Exception as error:
            raise EnvError(f"tool {call.name}: {told(error)}") from error
        return self._shown(result if isinstance(result, str) else _as_json(result, call.name))

    def _read(self, call: Call) -> tuple[dict[str, Any] | None, str | None]:
        if call.error is not None:
            return None, call.error
        tool = self.tools.get(call.name)
        if tool is None:
            return None, f"there is no tool {call.name!r}; tools: {', '.join(self.tools)}"
        try:
            read = msgspec.convert(dict(call.arguments), tool.arguments, strict=False)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half a character
            return None, f"wrong arguments for {call.name}: {error}"
        return {name: getattr(read, name) for name in tool.arguments.__struct_fields__}, None

    def _shown(self, text: str) -> str:
        # A model may write half a character as \ud800, which tokenizers refuse.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return cut_text(whole, self._max_chars, self._cut)


def cut_text(text: str, limit: int, side: CutSide, mark: str = _CUT_MARK) -> str:
    """At most `limit` characters of the text, and `mark` where the part named by `side` was."""
    if len(text) <= limit:
        return text
    if side == "left":
        return mark + text[len(text) - limit :]
    if side == "right":
        return text[:limit] + mark
    tail = limit // 2
    return text[: limit - tail] + mark + text[len(text) - tail :]


def _as_json(result: Any, name: str) -> str:
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvError(
            f"tool {name} returned a {type(result).__name__}, which is neither text nor JSON: "
            f"{error}"
        ) from error


def named_functions(functions: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Functions under their own names. Raises ConfigError where two have the same."""
    named = {function.__name__: function for function in functions}
    if len(named) < len(functions):
        raise ConfigError(f"two tools share a name: {[f.__name__ for f in functions]}")
    return named
