"""The tokens of trajectories scored anew: under any weights, in any arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from ..logprobs import TokenStatistics, token_statistics
from ..types import Trajectory
from .arithmetic import Arithmetic, activation_dtype
from .decoder import Cache, Decoder, Weights, make_pass
from .staleness import IntArray


@torch.inference_mode()
def score(
    decoder: Decoder,
    weights: Weights,
    trajectories: Sequence[Trajectory],
    *,
    arithmetic: Arithmetic = "float32",
) -> TokenStatistics:
    """Log-prob, entropy and gini of all sampled tokens, flat, trajectory after trajectory, under
    one version of the weights; each trajectory has one segment."""
    segments = [t.segments[0] for t in trajectories]
    lengths = [len(s) for s in segments]
    tokens = torch.from_numpy(np.concatenate([s.token_ids for s in segments]).astype(np.int64))
    rows = torch.arange(len(segments)).repeat_interleave(torch.tensor(lengths))
    places = torch.cat([torch.arange(n) for n in lengths])
    same: Callable[[int], Weights] = lambda _: weights  # noqa: E731 - a constant
    step, _ = make_pass(tokens, rows, places, places, torch.zeros_like(tokens), weights_of=same)
    cache = Cache(decoder, len(segments), max(lengths), activation_dtype(arithmetic))
    logits = decoder.extend(cache, step, len(segments))
    # The logits of a token speak of the next one; the first token of a row is never sampled.
    sampled = np.flatnonzero(np.concatenate([s.sampled for s in segments]))
    return token_statistics(logits[sampled - 1], tokens[sampled])


def score_by_version(
    decoder: Decoder,
    weights_of: Callable[[int], Weights],
    trajectories: Sequence[Trajectory],
    *,
    arithmetic: Arithmetic = "float32",
) -> TokenStatistics:
    """As `score`, each token under the very version that it is recorded to be drawn by."""
    versions: IntArray = np.concatenate([t.sampled_versions() for t in trajectories]).astype(
        np.int64
    )
    columns = [np.zeros(len(versions), dtype=np.float32) for _ in range(3)]
    for version in np.unique(versions).tolist():
        found = score(decoder, weights_of(version), trajectories, arithmetic=arithmetic)
        of_version = versions == version
        for column, values in zip(columns, found, strict=True):
            if values is not None:
                column[of_version] = values.numpy()[of_version]
    logprobs, entropies, gini = (torch.from_numpy(column) for column in columns)
    return TokenStatistics(logprobs, entropies, gini)


def split(values: torch.Tensor, trajectories: Sequence[Trajectory]) -> list[torch.Tensor]:
    """Flat values of the sampled tokens as one tensor for each trajectory."""
    borders = np.cumsum([0, *(t.num_sampled_tokens for t in trajectories)]).tolist()
    return [values[begin:end] for begin, end in pairwise(borders)]
