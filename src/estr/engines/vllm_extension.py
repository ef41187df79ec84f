"""What runs inside vLLM: draws and records at the sampler, takes new weights and verifies them.

    EstrWorker         mixed into vLLM's worker (`worker_extension_cls`), called by collective_rpc
    RecordingSampler   stands in the place of vLLM's sampler

vLLM loads this file by its name, possibly in processes of its own, so it imports nothing but vllm,
torch and numpy. Everything recorded is of the whole distribution that the token is drawn from,
temperature applied, padding of the vocabulary left out, float32, natural logarithm. It leaves vLLM
with the token, as the columns of its "log-probs":

    logprobs           log-prob   entropy   gini
    logprob_token_ids  token      version   0
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from ..weights import bit_sum

# They warn at each load, once for each tensor, that its type is converted, and that layers without
# weights of their own got none. Either is meant, and every load is verified afterwards.
for _name in ("models.utils", "model_loader.reload.layerwise"):
    logging.getLogger(f"vllm.model_executor.{_name}").setLevel(logging.ERROR)


class RecordingSampler(Sampler):  # type: ignore[misc] # vllm is not there when types are checked
    """Draws from softmax(logits / temperature) by the inverse of its distribution function.

    A request brings {"temperature": float, "uniforms": [float, ...]} as `extra_args`, one uniform
    in [0, 1) for each token that it may draw; temperature 0 takes the argmax and records the
    temperature-1 distribution. Where logits are no distribution the log-prob is NaN.
    """

    def __init__(self, runner: Any, *, version: int, vocab_size: int) -> None:
        super().__init__()
        self.runner = runner
        self.version = version
        self.vocab_size = vocab_size

    def forward(self, logits: Tensor, *_: Any, **__: Any) -> SamplerOutput:
        # One row of logits for each request of the batch, in its order; those whose prompt is not
        # read to its end yet are drawn for as well, and vLLM drops their tokens.
        requests = [self.runner.requests[name] for name in self.runner.input_batch.req_ids]
        asked = [request.sampling_params.extra_args for request in requests]
        places = [len(request.output_token_ids) for request in requests]
        temperatures = np.array([args["temperature"] for args in asked], dtype=np.float32)
        uniforms = np.array(
            [args["uniforms"][place] for args, place in zip(asked, places, strict=True)]
        )
        device = logits.device
        divisors = torch.from_numpy(np.where(temperatures == 0, 1, temperatures)).to(device)
        log_probs = (logits[:, : self.vocab_size].float() / divisors[:, None]).log_softmax(-1)
        probs = log_probs.exp()
        tokens = torch.where(
            torch.from_numpy(temperatures == 0).to(device),
            log_probs.argmax(-1),
            inverse_cdf(probs, torch.from_numpy(uniforms).to(device)),
        )
        facts = torch.stack(
            [
                log_probs.gather(-1, tokens[:, None])[:, 0],
                torch.special.entr(probs).sum(-1).clamp(min=0.0),
                gini(probs),
            ],
            dim=-1,
        )
        facts[(probs.sum(-1) - 1).abs().nan_to_num(nan=1.0) > 1e-3] = torch.nan
        ids = torch.zeros_like(facts, dtype=torch.int32)
        ids[:, 0], ids[:, 1] = tokens, self.version
        return SamplerOutput(
            sampled_token_ids=tokens.to(torch.int32)[:, None],
            logprobs_tensors=LogprobsTensors(ids, facts, torch.zeros_like(ids[:, 0])),
        )


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the distribution function first exceeds `uniform`, never one of
    probability 0. probs: [n, vocabulary] float32. uniform: [n] float64 in [0, 1). int64 [n]."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    ends = cumulative[:, -1:].contiguous()
    above = torch.searchsorted(cumulative, uniform[:, None] * ends, right=True)
    last = torch.searchsorted(cumulative, ends)
    return torch.minimum(above, last)[:, 0].clamp(max=probs.shape[-1] - 1)


def gini(probs: Tensor) -> Tensor:
    """sum p(1-p) of probabilities [n, vocabulary]: with m the largest, (1 - p_m)(1 + p_m) less the
    squares of the others. It keeps the digits that 1 - sum p^2 loses where one p is next to 1."""
    top, at = probs.max(-1, keepdim=True)
    others = probs.scatter(-1, at, 0.0)
    return others.sum(-1) * (1 + top[:, 0]) - others.square().sum(-1)


class EstrWorker:
    """The methods that estr adds to a vLLM worker."""

    model_runner: Any
    estr_received: _Received

    def estr_record(self, version: int, vocab_size: int) -> None:
        """From now on this worker's tokens are drawn and recorded by RecordingSampler.

        version: of the weights that it holds. vocab_size: number of real token ids.
        """
        self.model_runner.sampler = RecordingSampler(
            self.model_runner, version=version, vocab_size=vocab_size
        )

    def estr_load(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Put the weights of `version` in place of the old ones; later tokens carry it.

        state: every tensor of the checkpoint under its name there. Raises RuntimeError where what
        stands in vLLM's layers afterwards is not what was given; the weights are undefined then.
        """
        self.estr_watch()
        given = _Given(state, self.model_runner)
        with torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=iter(given))
        self.estr_verify(version, given.digest)

    def estr_watch(self) -> None:
        """Before weights are loaded: look at all that arrive."""
        self.estr_received = _Received(self.model_runner.get_model())

    def estr_verify(self, version: int, given: int) -> None:
        """After it: later tokens carry `version`, if what has arrived has the digest `given`, which
        is `bit_sum` over all tensors; else RuntimeError, and the weights are undefined."""
        self.estr_received.stop_watching()
        with torch.no_grad():
            digest = self.estr_received.digest()
        if digest != given:
            raise RuntimeError(
                f"version {version}: the weights in vLLM's layers have digest {digest:#x}, "
                f"those that were given {given:#x}"
            )
        self.model_runner.sampler.version = version


class _Given:
    """The tensors on their way to vLLM, in the model's dtype and on its device."""

    def __init__(self, state: Mapping[str, Tensor], runner: Any) -> None:
        self._state = state
        self._dtype, self._device = runner.model_config.dtype, runner.device
        self.digest = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._state.items():
            tensor = tensor.to(self._device, self._dtype if tensor.is_floating_point() else None)
            self.digest = (self.digest + bit_sum(tensor)) % 2**64
            yield name, tensor


class _Received:
    """What arrives in the layers. vLLM may repack a layer's weights once they are complete, and
    drop the plain ones, so they are looked at right before that; those of layers that are left as
    they are, at the end."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sum = 0
        self._seen: set[nn.Module] = set()
        self._watched: dict[int, Any] = {}
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                self._watched[id(method)] = method
        for method in self._watched.values():
            method.process_weights_after_loading = self._watching(
                method.process_weights_after_loading
            )

    def _watching(self, process: Any) -> Any:
        def look_then_process(layer: nn.Module) -> None:
            self._seen.add(layer)
            self._sum += sum(bit_sum(p) for p in layer.parameters(recurse=False))
            process(layer)

        return look_then_process

    def stop_watching(self) -> None:
        for method in self._watched.values():
            del method.process_weights_after_loading  # the class's own is visible again

    def digest(self) -> int:
        """After the load: the sum over all that arrived, each stored tensor once."""
        arrived = {id(p) for layer in self._seen for p in layer.parameters(recurse=False)}
        for layer in self._model.modules():
            if layer in self._seen:
                continue
            own = list(layer.parameters(recurse=False))
            left = [p for p in own if id(p) not in arrived]
            self._sum += sum(bit_sum(p) for p in left)
            arrived.update(map(id, left))
            method: Any = getattr(layer, "quant_method", None)
            if own and not left and id(method) in self._watched:
                # An output layer tied to the embedding, without a name of its own in the
                # checkpoint: whatever was packed from the old weights must be packed anew.
                method.process_weights_after_loading(layer)
        return self._sum % 2**64
