"""The questions and the corpus of deep search: two sets that ship with estr, or a folder.

    corpus, queries, digest = read_set("hotpot", password="")

A folder holds corpus.jsonl (docid, title, text), queries.jsonl (query_id, query, answer and perhaps
answer_aliases) and, unless the queries name their evidence, qrels.txt. Those of BrowseComp-Plus are
of this form; its queries are encrypted, and decrypted in memory only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError
from .browsecomp import decrypt_record, read_qrels
from .judge import normalized
from .retrieval import Corpus, read_corpus, read_jsonl

SHIPPED = {"hotpot": "hotpot100", "musique": "musique100"}
"""The sets that ship with estr: name -> stem of its files."""

_SLICES = Path(__file__).parents[1] / "data" / "multihop"


@dataclass(frozen=True, slots=True)
class Query:
    """One question. golds: the answer and its aliases; evidence: ids of the documents it rests
    on."""

    query_id: str
    text: str
    golds: tuple[str, ...]
    evidence: frozenset[str]


def read_set(data: str, password: str) -> tuple[Corpus, list[Query], str]:
    """(corpus, queries, digest of the files). Raises DataError naming the file and the remedy."""
    if data in SHIPPED:
        stem = SHIPPED[data]
        corpus, queries = (_SLICES / f"{stem}.{kind}.jsonl.gz" for kind in ("corpus", "queries"))
        qrels = None
    else:
        folder = Path(data)
        corpus, queries = (_found(folder, kind) for kind in ("corpus", "queries"))
        qrels = folder / "qrels.txt" if (folder / "qrels.txt").is_file() else None
    evidence = {} if qrels is None else read_qrels(qrels)
    records = read_jsonl(queries)
    if password:
        records = (decrypt_record(record, password) for record in records)
    found = [_query(record, evidence, queries) for record in records]
    if len({query.query_id for query in found}) < len(found):
        raise DataError(f"{queries} names a query_id twice")
    digest = hashlib.sha256()
    for path in (corpus, queries, *([] if qrels is None else [qrels])):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return read_corpus(corpus), found, digest.hexdigest()[:16]


def _found(folder: Path, kind: str) -> Path:
    for name in (f"{kind}.jsonl", f"{kind}.jsonl.gz"):
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"task.data = {str(folder)!r} is neither one of {', '.join(SHIPPED)} nor a folder with "
        f"{kind}.jsonl"
    )


def _query(record: Mapping[str, Any], evidence: Mapping[str, Any], path: Path) -> Query:
    named = record.get("query_id")
    query_id = "" if named is None else str(named)
    text, answer = record.get("query"), record.get("answer")
    if not (query_id and isinstance(text, str) and text and isinstance(answer, str)):
        raise DataError(f"{path}: a query has query_id, query and answer as text: {query_id!r}")
    place = f"{path}: query {query_id}"
    golds = (answer, *map(str, _listed(record, "answer_aliases", (str, int, float), place)))
    if not normalized(answer):
        raise DataError(f"{path}: query {query_id} has an empty answer; correct or drop it")
    documents = _listed(record, "evidence_docs", (dict,), place) or _listed(
        record, "gold_docs", (dict,), place
    )
    docids = _listed(record, "gold_docids", (str, int), place) or [
        document.get("docid") for document in documents
    ]
    return Query(query_id, text, golds, evidence.get(query_id, frozenset(map(str, docids))))


def _listed(
    record: Mapping[str, Any], key: str, kinds: tuple[type, ...], place: str
) -> Sequence[Any]:
    """A field that may be absent. Raises DataError where it is no list of these kinds: the letters
    of a single text would be taken for its entries."""
    value = record.get(key) or []
    if not isinstance(value, list) or not all(isinstance(entry, kinds) for entry in value):
        said = " or ".join(kind.__name__ for kind in kinds)
        raise DataError(f"{place}: {key} must be a list of {said}, not {value!r:.60}")
    return value
