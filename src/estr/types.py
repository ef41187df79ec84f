"""The record of a rollout: columns, segments, turns, trajectories.

Own-token alignment: entry t of every column speaks about token_ids[t]. The causal shift (the
logits at t-1 give the probability of token t) lives in `estr.logprobs` and nowhere else.

    trajectory   one rollout, whole:  [segment] [segment] ...
    segment      tokens that share one history; a new one starts only where a chat template
                 rewrote what came before
    turn         the range of a segment that the model wrote in one go, and why it stopped
    group        the trajectories of one instance of a task

Facts are stored when they are born (log-prob, entropy and version at the draw); opinions
(ratios, scores, lags) are derived from them wherever they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

Status = Literal[
    "ok",
    "truncated",
    "timeout",
    "env_error",
    "engine_error",
    "grader_error",
    "cancelled",
    "leftover",
]
"""How a rollout ended. `ok`, `truncated` and `timeout` are scored by the task's own rule; the
others carry no reward at all, which is not the same as a reward of zero."""

SCORED_STATUSES: frozenset[Status] = frozenset({"ok", "truncated", "timeout"})

FinishReason = Literal["stop", "length", "abort"]
"""Why a turn ended: a stop token was drawn, a budget ran out, or the request was cancelled."""

NOT_SAMPLED = -1
"""The version of a token that no model drew (prompt, tool output, template separator)."""


class Column(NamedTuple):
    """One per-token column: its name, its type, what padding and unsampled places hold."""

    name: str
    dtype: type[np.generic]
    fill: float | int | bool
    optional: bool = False


COLUMNS: tuple[Column, ...] = (
    Column("token_ids", np.int32, 0),
    Column("sampled", np.bool_, False),
    Column("behavior_logprobs", np.float32, float("nan")),
    Column("behavior_entropies", np.float32, float("nan")),
    Column("behavior_gini", np.float32, float("nan"), optional=True),
    Column("versions", np.int32, NOT_SAMPLED),
)
"""The one definition of the recorded columns: Segment, Batch, ledger and report all follow it.
Places that were not sampled hold NaN, not zero: nothing was computed there."""


@dataclass(frozen=True, slots=True, order=True)
class RolloutId:
    """What names a rollout. It is also the key of the rollout's random numbers, so two runs with
    one seed draw the same uniforms for the same rollout, whatever else shares the batch."""

    run: int
    group: int
    index: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"group {self.group} member {self.index} attempt {self.attempt}"


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How tokens are drawn, as resolved and sent to the engine.

    temperature divides the logits before the softmax; 0 means argmax and is for evaluation only.
    A turn ends at a stop token, after max_new_tokens, or at max_tokens in the whole trajectory.
    """

    temperature: float = 1.0
    max_new_tokens: int = 256
    max_tokens: int = 2048
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens that share one history, with what was recorded at each draw (see COLUMNS).

    All columns have the same length. `finish_reason` is set on what an engine returns for one
    turn; it is None on context and on joined segments.

    Raises ValueError when lengths differ or a sampled token lacks its version.
    """

    token_ids: Int32Array
    sampled: BoolArray
    behavior_logprobs: Float32Array
    behavior_entropies: Float32Array
    behavior_gini: Float32Array | None
    versions: Int32Array
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        for column in COLUMNS:
            values = getattr(self, column.name)
            if values is None and column.optional:
                continue
            if values.shape != (len(self.token_ids),):
                raise ValueError(
                    f"column {column.name} has shape {values.shape}, "
                    f"token_ids has {len(self.token_ids)} entries"
                )
            if values.dtype != column.dtype:
                raise ValueError(f"column {column.name} is {values.dtype}, not {column.dtype}")
        if not np.where(self.sampled, self.versions >= 0, self.versions == NOT_SAMPLED).all():
            raise ValueError("a token has a version if and only if a model sampled it")

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def context(cls, token_ids: Sequence[int] | Int32Array) -> Segment:
        """Tokens that the model reads but did not write."""
        ids = np.asarray(token_ids, dtype=np.int32)
        nothing = np.full(len(ids), np.nan, dtype=np.float32)
        return cls(
            token_ids=ids,
            sampled=np.zeros(len(ids), dtype=np.bool_),
            behavior_logprobs=nothing,
            behavior_entropies=nothing,
            behavior_gini=nothing,
            versions=np.full(len(ids), NOT_SAMPLED, dtype=np.int32),
        )

    @classmethod
    def drawn(
        cls,
        token_ids: Sequence[int] | Int32Array,
        logprobs: Sequence[float] | Float32Array,
        entropies: Sequence[float] | Float32Array,
        versions: Sequence[int] | Int32Array,
        *,
        gini: Sequence[float] | Float32Array | None = None,
        finish_reason: FinishReason | None = None,
    ) -> Segment:
        """Tokens that a model drew in one turn; every argument has one entry per token."""
        ids = np.asarray(token_ids, dtype=np.int32)
        return cls(
            token_ids=ids,
            sampled=np.ones(len(ids), dtype=np.bool_),
            behavior_logprobs=np.asarray(logprobs, dtype=np.float32),
            behavior_entropies=np.asarray(entropies, dtype=np.float32),
            behavior_gini=None if gini is None else np.asarray(gini, dtype=np.float32),
            versions=np.asarray(versions, dtype=np.int32),
            finish_reason=finish_reason,
        )

    @classmethod
    def join(cls, parts: Sequence[Segment]) -> Segment:
        """The parts one after the other. gini is None as soon as one sampled part lacks it."""
        has_gini = all(p.behavior_gini is not None or not p.sampled.any() for p in parts)
        columns: dict[str, Any] = {}
        for column in COLUMNS:
            if column.name == "behavior_gini" and not has_gini:
                columns[column.name] = None
                continue
            arrays = [
                np.full(len(p), column.fill, dtype=column.dtype)
                if getattr(p, column.name) is None
                else getattr(p, column.name)
                for p in parts
            ]
            empty = np.zeros(0, dtype=column.dtype)
            columns[column.name] = np.concatenate(arrays) if arrays else empty
        return cls(**columns)


class Turn(NamedTuple):
    """Tokens [start, stop) of a segment, written by the model in one go."""

    segment: int
    start: int
    stop: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The whole record of one rollout.

    outcome is the raw result of the task (None: never graded); rewards holds its named
    components; reward is what is trained on (None: unscored, which leaves statistics, loss and
    counts). dispatch_version is the version that the engine had acknowledged when the group was
    dispatched. times_s holds wall-clock spans: "start", "end" (since the run began), "engine",
    "environment". error says in words what a failing status means here.
    """

    id: RolloutId
    task: str
    problem: int
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    sampling: SamplingSettings
    status: Status
    dispatch_version: int
    outcome: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward: float | None = None
    worker: str = ""
    times_s: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """All tokens, read and written."""
        return sum(len(s) for s in self.segments)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the model wrote: the only ones that any token statistic counts."""
        return sum(int(s.sampled.sum()) for s in self.segments)

    def sampled_versions(self) -> Int32Array:
        """Versions of the sampled tokens, in order; placeholders are left out."""
        parts = [s.versions[s.sampled] for s in self.segments]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    @property
    def first_version(self) -> int | None:
        """Oldest version among the sampled tokens (None: nothing was sampled)."""
        versions = self.sampled_versions()
        return int(versions.min()) if len(versions) else None

    @property
    def last_version(self) -> int | None:
        """Newest version among the sampled tokens (None: nothing was sampled)."""
        versions = self.sampled_versions()
        return int(versions.max()) if len(versions) else None

    @property
    def intra(self) -> int:
        """Intra-trajectory staleness: v_last - v_first over the sampled tokens."""
        first, last = self.first_version, self.last_version
        return 0 if first is None or last is None else last - first

    def inter(self, target_version: int) -> int:
        """Inter-trajectory staleness: v_target - v_last (0 where nothing was sampled)."""
        last = self.last_version
        return 0 if last is None else target_version - last

    @property
    def version_runs(self) -> list[tuple[int, int]]:
        """Run lengths of the sampled versions: [(version, number of tokens), ...]."""
        versions = self.sampled_versions()
        if not len(versions):
            return []
        borders = np.flatnonzero(np.diff(versions)) + 1
        parts = np.split(versions, borders)
        return [(int(part[0]), len(part)) for part in parts]


@dataclass(frozen=True, slots=True, eq=False)
class Consumption:
    """What one optimizer step made of one trajectory.

    The columns have one entry for each token of the trajectory, its segments joined, and speak of
    trained tokens only: those that a model sampled, in a trajectory with an advantage. Elsewhere
    log-probs are NaN, kept and clipped False. policy_logprobs: under the weights that the loss was
    taken at. proximal_logprobs, ref_logprobs: None where no such pass was made. kept: inside the
    trust region. clipped: kept, but without gradient, since a bound of the surrogate is active.
    advantage: None for an unscored trajectory.
    """

    advantage: float | None
    policy_logprobs: Float32Array
    kept: BoolArray
    clipped: BoolArray
    proximal_logprobs: Float32Array | None = None
    ref_logprobs: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check of the guard found. check: which one; kind: what the fault was recognized as;
    message: where, and the figures."""

    check: str
    kind: str
    message: str
