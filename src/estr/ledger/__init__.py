"""The ledger: every token of every step, with what was recorded at its draw and what the step made
of it, in Parquet files that can be queried.

    schema      what the two tables hold, and how trajectories become rows
    parts       the files: written aside, renamed, never changed; superseded ones hidden
    writer      bursts of steps, beside the training
    records     a step read again, as the trainer had it
    reader      the files as tables of DuckDB, with views.sql on top
    queries/    shipped questions, one SQL file each
"""

from __future__ import annotations

from .parts import (
    Parts,
    damaged_parts,
    find_parts,
    missing_parts,
    parts_up_to,
    supersede_after,
)
from .queries import shipped_queries
from .reader import Answer, Ledger, open_ledger
from .records import read_step, target_versions
from .writer import LedgerWriter

__all__ = [
    "Answer",
    "Ledger",
    "LedgerWriter",
    "Parts",
    "damaged_parts",
    "find_parts",
    "missing_parts",
    "open_ledger",
    "parts_up_to",
    "read_step",
    "shipped_queries",
    "supersede_after",
    "target_versions",
]
