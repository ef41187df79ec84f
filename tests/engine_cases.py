"""Requests for the local engine, and the ordinary forward pass that its records must agree with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from estr.engine import Request
from estr.engines.local import LocalEngine
from estr.types import RolloutId, SamplingSettings, Segment
from tiny_models import VOCAB_SIZE, tiny_model

TOLERANCE = 1e-4
State = dict[str, Tensor]


def request(
    group: int = 0,
    index: int = 0,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    tokens: int = 6,
    deadline: int = 0,
    temperature: float = 1.0,
    stop: tuple[int, ...] = (),
) -> Request:
    return Request(
        id=RolloutId(run=5, group=group, index=index),
        token_ids=np.array(prompt, dtype=np.int32),
        sampling=SamplingSettings(temperature=temperature, stop_token_ids=stop),
        max_new_tokens=tokens,
        first_position=len(prompt),
        deadline_version=deadline,
    )


def serve(engine: LocalEngine, requests: Iterable[Request]) -> dict[RolloutId, Segment]:
    for one in requests:
        engine.submit(one)
    return finish(engine)


def finish(engine: LocalEngine) -> dict[RolloutId, Segment]:
    finished: dict[RolloutId, Segment] = {}
    for _ in range(1000):
        if not engine.num_running and not engine.num_waiting:
            return finished
        finished.update(engine.step())
    raise AssertionError("the engine does not finish")


def state_of(family: str, seed: int) -> State:
    return {name: t.clone() for name, t in tiny_model(family, seed=seed).state_dict().items()}


def assert_rescored(
    model: nn.Module, states: Sequence[State], asked: Request, drawn: Segment
) -> None:
    """Every token, by an ordinary forward pass under the weights of its own version."""
    n = len(asked.token_ids)
    ids = torch.from_numpy(np.concatenate([asked.token_ids, drawn.token_ids])).long()[None]
    for version in set(drawn.versions.tolist()):
        model.load_state_dict(states[version])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, n - 1 : -1].float()
        log_probs = (logits / (asked.sampling.temperature or 1.0)).log_softmax(-1)
        probs = log_probs.exp()
        mine = drawn.versions == version
        expected = {
            "behavior_logprobs": log_probs.gather(1, ids[0, n:, None])[:, 0],
            "behavior_entropies": -(probs * log_probs).sum(-1),
            "behavior_gini": (probs * (1 - probs)).sum(-1),
        }
        for column, values in expected.items():
            np.testing.assert_allclose(
                getattr(drawn, column)[mine], values.numpy()[mine], atol=TOLERANCE, err_msg=column
            )


def random_requests(rng: np.random.Generator, count: int) -> list[Request]:
    return [
        request(
            group,
            prompt=rng.integers(0, VOCAB_SIZE, rng.integers(1, 10)).tolist(),
            tokens=int(rng.integers(1, 12)),
            deadline=int(rng.integers(0, 3)),
            temperature=float(rng.choice([0.7, 1.0, 1.3])),
            stop=(int(rng.integers(VOCAB_SIZE)),),
        )
        for group in range(count)
    ]
