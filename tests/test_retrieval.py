"""BM25 search, and what it is measured by."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from estr.environments.retrieval import Corpus, cut_words, read_corpus
from estr.environments.search_measures import (
    SearchOutcome,
    calibration_error,
    precision,
    recall,
    retrieval_measures,
    search_measures,
)
from estr.errors import DataError


def found(corpus: Corpus, query: str, k: int) -> list[str]:
    return [hit.document.docid for hit in corpus.search(query, k)]


def test_the_better_document_comes_first_and_foreign_words_find_nothing() -> None:
    corpus = Corpus(
        [
            {"docid": "a", "title": "Rivers", "text": "The Nuthe is a river in Germany"},
            {"docid": "b", "title": "Nuthe", "text": "Nuthe: the Nuthe rises in Fläming"},
            {"docid": "c", "title": "Cheese", "text": "Cheese is made of milk"},
        ]
    )
    assert found(corpus, "Nuthe", 5) == ["b", "a"]
    assert found(corpus, "xylophone", 5) == []
    assert found(corpus, "the", 5) == []
    assert found(corpus, "", 5) == []


def test_passages_of_one_document_take_one_place_check_112() -> None:
    texts = [("d1", "gold gold gold"), ("d1", "gold gold iron"), ("d2", "gold iron iron")]
    corpus = Corpus([{"docid": docid, "text": text} for docid, text in texts])
    assert found(corpus, "gold", 2) == ["d1", "d2"]
    assert corpus.documents["d1"].text == "gold gold gold\ngold gold iron"


@pytest.mark.parametrize("order", [["x2", "x10", "x1"], ["x1", "x2", "x10"]])
def test_ties_are_broken_by_docid(order: list[str]) -> None:
    corpus = Corpus([{"docid": docid, "text": "silver spoon"} for docid in order])
    assert found(corpus, "spoon", 2) == ["x1", "x10"]
    scores = [hit.score for hit in corpus.search("spoon", 3)]
    assert len(set(scores)) == 1


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"text": "no id"}],
        [{"docid": "a"}],
        [{"docid": "", "text": "x"}],
        [{"docid": 1, "text": ""}],
    ],
)
def test_a_corpus_that_cannot_be_searched_is_refused(records: list[dict[str, object]]) -> None:
    with pytest.raises(DataError):
        Corpus(records)


def test_a_bad_line_is_named_and_unicode_line_separators_are_text(tmp_path: Path) -> None:
    good = json.dumps({"docid": "a", "text": "one\u2028two"}, ensure_ascii=False)
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(f"{good}\n\n".encode()))
    assert read_corpus(path).documents["a"].text == "one\u2028two"
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"{good}\n[1]\n")
    with pytest.raises(DataError, match="line 2"):
        read_corpus(bad)
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DataError, match="torn"):
        read_corpus(torn)


@pytest.mark.parametrize(
    ("count", "cut"), [(1, "One"), (3, "One, two"), (4, "One, two."), (9, "One, two.")]
)
def test_texts_are_cut_after_whole_words(count: int, cut: str) -> None:
    assert cut_words("One, two.", count) == cut


# Measures


def test_the_ideal_ranking_is_made_of_everything_relevant_check_109() -> None:
    relevant = {"q1": {"d1", "d2"}, "q2": {"d3"}}
    measured = retrieval_measures({"q1": ["d1", "x"]}, relevant, k=2)
    assert measured["ndcg@2"] == pytest.approx(0.306574, abs=1e-6)
    assert measured["recall@2"] == 0.25
    alone = retrieval_measures({"q1": ["d1", "x"]}, {"q1": {"d1", "d2"}}, k=2)
    assert alone["ndcg@2"] == pytest.approx(0.613147, abs=1e-6)


def test_recall_and_precision() -> None:
    assert (recall(["a", "b"], ["b", "c"]), precision(["a", "b", "d"], ["b"])) == (0.5, 1 / 3)
    assert (precision([], ["a"]), recall([], ["a"])) == (0.0, 0.0)


def test_the_last_bin_counts_in_the_calibration_error() -> None:
    assert calibration_error([(0.9, False)] * 3) == pytest.approx(0.9)
    sure = [(1.0, True)] * 100
    assert calibration_error([(0.5, False)] * 50 + sure) == pytest.approx(
        math.sqrt((100 * (0.75 - 0.5) ** 2) / 150)
    )


def outcome(**values: object) -> SearchOutcome:
    whole: dict[str, object] = {
        "solved": True,
        "f1": 1.0,
        "evidence": frozenset({"a", "b"}),
        "retrieved": frozenset({"a", "x"}),
        "cited": frozenset({"a"}),
        "num_searches": 2,
        "confidence": 0.75,
    }
    return SearchOutcome(**{**whole, **values})  # type: ignore[arg-type]


def test_a_rollout_that_did_nothing_stays_in_every_denominator() -> None:
    nothing = outcome(
        solved=False,
        f1=0.0,
        retrieved=frozenset(),
        cited=frozenset(),
        num_searches=0,
        confidence=None,
    )
    assert search_measures([outcome(), nothing]) == {
        "f1": 0.5,
        "searches": 1.0,
        "stated_confidence": 0.5,
        "evidence_recall": 0.25,
        "citation_precision": 0.5,
        "citation_recall": 0.25,
        "calibration_error": 0.25,
    }


def test_queries_without_evidence_say_nothing_about_it() -> None:
    unknown = outcome(evidence=frozenset())
    assert search_measures([outcome(), unknown])["evidence_recall"] == 0.5
    assert "evidence_recall" not in search_measures([unknown])
