"""A corpus of documents and BM25 search in it, by `bm25s`.

    corpus = read_corpus(Path("corpus.jsonl"))
    corpus.search("demon of Sumerian myth", k=5)    at most 5 different documents, best first

Records with one docid are passages of one document: it is found by its best passage, once, and read
as a whole. Ties are broken by docid, so the same query always finds the same documents.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError
from ..records import require_whole_text

K1, B = 0.9, 0.4
"""As in the BM25 baseline of BrowseComp-Plus (pyserini's defaults)."""

Cut = Callable[[str, int], str]
"""(text, number of tokens) -> the text cut after so many."""

_TOKEN = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Document:
    """One document; passages are joined by a line break."""

    docid: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that a query found; score: of its best passage."""

    document: Document
    score: float


class Corpus:
    """Documents and their index, which is made here: a search has nothing to wait for.

    Raises DataError for records without docid and text, and for an empty corpus; ConfigError where
    bm25s is not installed.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]], source: str = "the corpus") -> None:
        bm25s = _bm25s()
        docids: list[str] = []
        texts: list[str] = []
        titles: dict[str, str] = {}
        passages: dict[str, list[str]] = {}
        for number, record in enumerate(records, start=1):
            docid, text = record.get("docid"), record.get("text")
            if not isinstance(docid, str | int) or not isinstance(text, str) or not str(docid):
                raise DataError(f"{source}, record {number}: a document has a docid and a text")
            title = str(record.get("title") or "")
            titles.setdefault(str(docid), title)
            passages.setdefault(str(docid), []).append(text)
            docids.append(str(docid))
            texts.append(f"{title}\n{text}")
        if not docids:
            raise DataError(f"{source} holds no document")
        self.documents = {
            docid: Document(docid, titles[docid], "\n".join(parts))
            for docid, parts in passages.items()
        }
        self._docids = docids
        places = {docid: place for place, docid in enumerate(sorted(self.documents))}
        self._places = np.array([places[docid] for docid in docids])
        self._index = bm25s.BM25(k1=K1, b=B, method="lucene")
        words = bm25s.tokenize(texts, stopwords="en", show_progress=False)
        if not words.vocab:
            raise DataError(f"{source} holds no word to search for")
        self._index.index(words, show_progress=False)

    def search(self, query: str, k: int) -> list[Hit]:
        """At most k documents, none twice, those first that score higher, then by docid. What
        shares no word with the query is not found."""
        (words,) = _bm25s().tokenize([query], stopwords="en", return_ids=False, show_progress=False)
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        found = np.flatnonzero(scores > 0)
        best: dict[str, float] = {}
        for passage in found[np.lexsort((self._places[found], -scores[found]))].tolist():
            best.setdefault(self._docids[passage], float(scores[passage]))
            if len(best) == k:
                break
        return [Hit(self.documents[docid], score) for docid, score in best.items()]


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ConfigError("searching needs bm25s; pip install 'estr[search]'") from error
    return bm25s


def cut_words(text: str, num_tokens: int) -> str:
    """The text after its first num_tokens words and punctuation marks cut off."""
    for number, token in enumerate(_TOKEN.finditer(text), start=1):
        if number == num_tokens:
            return text[: token.end()]
    return text


def cut_by(tokenizer: Any) -> Cut:
    """Cuts after so many tokens of a Hugging Face tokenizer, at the end of a whole token."""

    def cut(text: str, num_tokens: int) -> str:
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends: list[tuple[int, int]] = offsets["offset_mapping"]
        return text if len(ends) <= num_tokens else text[: ends[num_tokens - 1][1]]

    return cut


@lru_cache(maxsize=4)
def read_corpus(path: Path) -> Corpus:
    """The corpus of a file, .jsonl or .jsonl.gz; read once. Raises DataError."""
    return Corpus(read_jsonl(path), str(path))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, .jsonl or .jsonl.gz. Raises DataError naming file and line."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _record(line, f"{path}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if b"\\u" in line:
            require_whole_text(record)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: not an object")
    return record
