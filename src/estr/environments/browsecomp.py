"""BrowseComp-Plus files: encrypted queries, relevance files, run files.

The benchmark's questions must never appear in plain text, so they are decrypted in memory only.
Format of https://github.com/texttron/BrowseComp-Plus: every string of a query but its query_id is
base64 of its UTF-8 bytes XOR a key, the SHA-256 of a password, repeated.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError

_PLAIN = frozenset({"query_id"})


def decrypt(text: str, password: str) -> str:
    """Raises DataError where the text is not base64 or the password is wrong."""
    try:
        data = base64.b64decode(text, validate=True)
        return _xor(data, password).decode("utf-8")
    except (binascii.Error, ValueError) as error:
        raise DataError(
            "an encrypted field cannot be read: wrong password (task.password), or the file is "
            "not encrypted at all"
        ) from error


def encrypt(text: str, password: str) -> str:
    """The inverse of `decrypt`."""
    return base64.b64encode(_xor(text.encode("utf-8"), password)).decode("ascii")


def _xor(data: bytes, password: str) -> bytes:
    key = itertools.cycle(hashlib.sha256(password.encode("utf-8")).digest())
    return bytes(byte ^ mask for byte, mask in zip(data, key, strict=False))


def decrypt_record(value: Any, password: str, key: str = "") -> Any:
    """A query record with every string in it decrypted but those of query_id."""
    if isinstance(value, str):
        return value if key in _PLAIN else decrypt(value, password)
    if isinstance(value, Mapping):
        return {name: decrypt_record(entry, password, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [decrypt_record(entry, password, key) for entry in value]
    return value


def read_qrels(path: Path) -> dict[str, frozenset[str]]:
    """query id -> its relevant documents, of a TREC file: "qid Q0 docid relevance" a line, those of
    relevance 0 left out. Raises DataError naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    relevant: dict[str, set[str]] = {}
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 4 or not fields[3].isdecimal():
            raise DataError(f"{path}, line {number}: not of the form 'qid Q0 docid relevance'")
        if int(fields[3]):
            relevant.setdefault(fields[0], set()).add(fields[2])
    return {query: frozenset(docids) for query, docids in relevant.items()}


def run_record(
    query_id: str,
    *,
    completed: bool,
    calls: Sequence[tuple[str, Mapping[str, Any], str]],
    retrieved: Sequence[str],
    answer: str,
) -> dict[str, Any]:
    """One query's run file as the benchmark's evaluator reads it.

    calls: (tool, arguments, what it answered), in order. retrieved: every document found by any
    call, in the order of first sight.
    """
    counts: dict[str, int] = {}
    for name, _, _ in calls:
        counts[name] = counts.get(name, 0) + 1
    result: list[dict[str, Any]] = [
        {"type": "tool_call", "tool_name": name, "arguments": dict(arguments), "output": output}
        for name, arguments, output in calls
    ]
    result.append({"type": "output_text", "tool_name": None, "arguments": None, "output": answer})
    return {
        "query_id": query_id,
        "tool_call_counts": counts,
        "status": "completed" if completed else "incomplete",
        "retrieved_docids": list(dict.fromkeys(retrieved)),
        "result": result,
    }
