"""What the tests of vLLM share: SmolLM2-135M in float32 under several versions, requests, and the
ordinary forward pass that the records must agree with. `make test-vllm` runs them.

The interpreter is $ESTR_VLLM_PYTHON, or that of `make vllm`; without one they are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from estr.engine import Request
from estr.engines.sampler import stream_name, uniforms
from estr.logprobs import log_distribution, token_statistics
from estr.models import SMOLLM2, cache_folder, load_model
from estr.options.run import EngineOptions
from estr.types import RolloutId, SamplingSettings, Segment

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("ESTR_VLLM_PYTHON") or str(ROOT / EngineOptions().python)
FOLDER = cache_folder() / SMOLLM2
LIMIT_S = 600.0
TOLERANCE = 1e-4
VOCAB_SIZE = 49152


MARKS = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not os.access(PYTHON, os.X_OK), reason=f"no vLLM at {PYTHON}; `make vllm` installs it"
    ),
    pytest.mark.skipif(
        not (FOLDER / "config.json").is_file(), reason=f"no {FOLDER}; `make smollm2` makes it"
    ),
]


class Versions:
    """The model under one version after another: 0 as it is, the others with noise on every
    weight, enough to move the log-probs far beyond the tolerance."""

    def __init__(self, count: int) -> None:
        self.model = load_model(FOLDER)
        self.states = [{name: t.clone() for name, t in self.model.state_dict().items()}]
        for seed in range(1, count):
            self.states.append(self._noisy(seed))

    def _noisy(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        state: dict[str, torch.Tensor] = {}
        for name, tensor in self.states[0].items():
            noise = torch.randn(tensor.shape, generator=generator)
            state[name] = tensor + 0.1 * tensor.std() * noise
        # Tied: the output layer is the embedding.
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        return state

    def use(self, version: int) -> torch.nn.Module:
        self.model.load_state_dict(self.states[version])
        return self.model

    @torch.inference_mode()
    def log_probs(self, asked: Request, drawn: Segment, version: int) -> torch.Tensor:
        """The distribution that each token should have been drawn from, by an ordinary forward
        pass with nothing cached: [tokens, vocabulary]."""
        n = len(asked.token_ids)
        ids = torch.from_numpy(np.concatenate([asked.token_ids, drawn.token_ids])).long()[None]
        logits = self.use(version)(input_ids=ids).logits[0, n - 1 : -1]
        return log_distribution(logits, temperature=asked.sampling.temperature or 1.0)

    def errors(self, asked: Request, drawn: Segment, version: int) -> dict[str, np.ndarray]:
        """How far what was recorded lies from the forward pass under `version`, for each token;
        and "uniform": how far the token's uniform lies outside the token's part of [0, 1)."""
        log_probs = self.log_probs(asked, drawn, version)
        tokens = torch.tensor(drawn.token_ids).long()
        own = token_statistics(log_probs, tokens)
        errors = {
            "behavior_logprobs": own.logprobs.numpy() - drawn.behavior_logprobs,
            "behavior_entropies": own.entropies.numpy() - drawn.behavior_entropies,
            "behavior_gini": own.gini.numpy() - drawn.behavior_gini,
        }
        if asked.sampling.temperature > 0:
            places = asked.first_position + np.arange(len(tokens))
            uniform = uniforms([stream_name(asked.id)] * len(tokens), places.tolist())
            ends = log_probs.double().exp().cumsum(-1).gather(1, tokens[:, None])[:, 0].numpy()
            starts = ends - own.logprobs.double().exp().numpy()
            errors["uniform"] = np.maximum(np.maximum(starts - uniform, uniform - ends), 0.0)
        return {name: np.abs(error) for name, error in errors.items()}

    def assert_rescored(self, asked: Request, drawn: Segment) -> None:
        """Every token is what its uniform names, and was recorded, under its own version."""
        for version in sorted(set(drawn.versions.tolist())):
            for column, error in self.errors(asked, drawn, version).items():
                worst = float(error[drawn.versions == version].max())
                assert worst < TOLERANCE, f"{asked.id}: {column} of version {version}: {worst:.2e}"


def request(
    group: int,
    *,
    prompt: Sequence[int] | np.ndarray | None = None,
    length: int = 20,
    tokens: int = 12,
    temperature: float = 1.0,
    deadline: int = 0,
    drawn: Segment | None = None,
) -> Request:
    """A request of `length` random tokens, unless a prompt is given."""
    if prompt is None:
        prompt = np.random.default_rng(group).integers(0, VOCAB_SIZE, length)
    return Request(
        RolloutId(7, group, 0),
        np.asarray(prompt, dtype=np.int32),
        SamplingSettings(temperature=temperature),
        max_new_tokens=tokens,
        first_position=len(prompt),
        deadline_version=deadline,
        drawn=drawn,
    )
