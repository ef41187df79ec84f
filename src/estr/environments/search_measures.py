"""What deep-search rollouts show beside being right: retrieval, citations, calibration.

Pure functions of a list with one entry for each rollout. Means are over all rollouts: one that
failed or never searched counts 0, it does not leave the denominator. Only queries whose evidence
nobody has named cannot say anything about evidence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

CALIBRATION_BIN = 100
"""Answers in one bin of the calibration error."""


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """One rollout. confidence: in [0, 1], as stated (None: not stated); f1: of its answer."""

    solved: bool
    f1: float
    evidence: frozenset[str]
    retrieved: frozenset[str]
    cited: frozenset[str]
    num_searches: int
    confidence: float | None


def search_measures(outcomes: Sequence[SearchOutcome]) -> dict[str, float]:
    """Names as in docs/deep-search.md. Raises ValueError where there is no rollout."""
    if not outcomes:
        raise ValueError("there is no rollout to measure")
    found = {
        "f1": fmean(o.f1 for o in outcomes),
        "searches": fmean(o.num_searches for o in outcomes),
        "stated_confidence": fmean(o.confidence is not None for o in outcomes),
    }
    known = [o for o in outcomes if o.evidence]
    if known:
        found |= {
            "evidence_recall": fmean(recall(o.retrieved, o.evidence) for o in known),
            "citation_precision": fmean(precision(o.cited, o.evidence) for o in known),
            "citation_recall": fmean(recall(o.cited, o.evidence) for o in known),
        }
    stated = [(o.confidence, o.solved) for o in outcomes if o.confidence is not None]
    if stated:
        found["calibration_error"] = calibration_error(stated)
    return found


def recall(found: Collection[str], relevant: Collection[str]) -> float:
    """Share of the relevant that was found; `relevant` is not empty."""
    return len(set(found) & set(relevant)) / len(set(relevant))


def precision(found: Collection[str], relevant: Collection[str]) -> float:
    """Share of what was found that is relevant; 0 where nothing was found."""
    return len(set(found) & set(relevant)) / len(set(found)) if found else 0.0


def calibration_error(
    stated: Sequence[tuple[float, bool]], bin_size: int = CALIBRATION_BIN
) -> float:
    """Root mean square of (mean confidence - accuracy) over bins of answers with similar
    confidence, weighted by their sizes. stated: (confidence in [0, 1], right). The last bin, which
    may be smaller, is in it.

    As the evaluator of BrowseComp-Plus has it, which leaves its last bin out.
    """
    ordered = sorted(stated)
    bins = [ordered[i : i + bin_size] for i in range(0, len(ordered), bin_size)]
    squares = (
        len(part) * (fmean(c for c, _ in part) - fmean(right for _, right in part)) ** 2
        for part in bins
    )
    return math.sqrt(sum(squares) / len(ordered))


def ndcg(ranking: Sequence[str], relevant: Collection[str], k: int) -> float:
    """Normalized discounted cumulative gain of the first k, the ideal made of everything relevant,
    found or not; 0 where nothing was found. Source: Järvelin and Kekäläinen (2002)."""
    gain = sum(1 / math.log2(i + 2) for i, d in enumerate(ranking[:k]) if d in relevant)
    ideal = sum(1 / math.log2(i + 2) for i in range(min(k, len(set(relevant)))))
    return gain / ideal if ideal else 0.0


def retrieval_measures(
    rankings: Mapping[str, Sequence[str]], relevant: Mapping[str, Collection[str]], k: int
) -> dict[str, float]:
    """Mean nDCG@k and recall@k over every query of `relevant`; one without a ranking counts 0."""
    queries = list(relevant)
    return {
        f"ndcg@{k}": fmean(ndcg(rankings.get(q, ()), relevant[q], k) for q in queries),
        f"recall@{k}": fmean(recall(rankings.get(q, ())[:k], relevant[q]) for q in queries),
    }
