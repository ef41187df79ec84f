"""Problems from a file: one JSON object a line, and templates that are filled from them.

    records = read_records(Path("my.jsonl"))
    fill("{question} Answer in \\boxed{}.", records[0])      fields go in, other braces stay
    field(records[0], "reward_model.ground_truth")          a dot goes one level down

What a record says is never read as a template again. Doubled braces around a name, "{{name}}",
stand for the text "{name}".
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError, DataError

Record = Mapping[str, Any]

_NAME = re.compile(r"{{([A-Za-z_][\w.]*)}}|{([A-Za-z_][\w.]*)}")
_ROWS = re.compile(r"\[?\s*(-?\d{1,18})?\s*:\s*(-?\d{1,18})?\s*\]?")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every record of a JSONL file, in order; blank lines are skipped.

    Lines end at a line feed and nowhere else: JSON text may hold other separators of Unicode.
    Raises DataError naming file and line.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read {path.absolute()}: {error.strerror}") from error
    except ValueError as error:  # a name that no file can have
        raise DataError(f"cannot read {str(path)!r}: {error}") from error
    records = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if _HALF.search(line):
                require_whole_text(record)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number} is not JSON: {error}; one object a line") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number} is not an object with named fields: {line:.80}")
        records.append(record)
    if not records:
        raise DataError(f"{path} holds no record")
    return records


def file_digests(paths: Iterable[Path]) -> str:
    """Tells these files from others, and from themselves once they are changed."""
    return " ".join(hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths)


def require_whole_text(record: Any) -> None:
    """Raises ValueError where JSON data hold half a character ("\\ud800" alone), which no tokenizer
    reads."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{error.object[error.start]!r} is half a character; correct or drop the line"
        ) from None


def choose_rows(records: list[dict[str, Any]], rows: str) -> list[dict[str, Any]]:
    """A slice as Python writes it: "[-2:]" the last two, "100:200", "" all.

    Raises ConfigError for anything else, and where nothing is left.
    """
    if not rows.strip():
        return records
    found = _ROWS.fullmatch(rows.strip())
    if found is None:
        raise ConfigError(f'rows must be a slice such as "[-100:]" or "0:500", not {rows!r}')
    start, stop = (int(edge) if edge else None for edge in found.groups())
    chosen = records[start:stop]
    if not chosen:
        raise ConfigError(f"rows = {rows!r} leaves nothing of {len(records)} records")
    return chosen


def names_in(template: str) -> Iterator[str]:
    """The fields that a template asks for."""
    for match in _NAME.finditer(template):
        if match[2] is not None:
            yield match[2]


def fill(template: str, record: Record) -> str:
    """The template with every {field} replaced by the record's value: text as it is, anything else
    as JSON. Raises DataError for a field that the record lacks or that is null."""

    def value(match: re.Match[str]) -> str:
        if match[1] is not None:
            return f"{{{match[1]}}}"
        return as_text(known_field(record, match[2]))

    return _NAME.sub(value, template)


def field(record: Record, name: str) -> Any:
    """The value of a field; a dot in the name goes one level down. Raises DataError naming the
    nearest field where there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise DataError(f"there is no field {name!r}; {_nearest(name, record)}")
        value = value[part]
    return value


def known_field(record: Record, name: str) -> Any:
    """The value of a field that is not null. Raises DataError."""
    value = field(record, name)
    if value is None:
        raise DataError(f"the field {name!r} is null")
    return value


def as_text(value: Any) -> str:
    """A value as a prompt shows it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _nearest(name: str, record: Record) -> str:
    near = difflib.get_close_matches(name, list(record), n=1)
    return f"did you mean {near[0]!r}?" if near else f"fields here: {', '.join(record) or 'none'}"
