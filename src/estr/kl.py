"""Distance of the policy from a frozen reference, estimated on the tokens that were drawn.

With d = log pi(y) - log ref(y) of a drawn token y:

    k1 = d                       k3 = exp(-d) - 1 + d           (Schulman 2020)

Both have the expectation KL(pi || ref) under pi. What their gradients come to is another matter:

- k1 differentiated as it stands has the gradient grad log pi, whose expectation is 0: it would
  hold nothing back. So k1 has here the gradient d * grad log pi, which is that of KL(pi || ref).
- k3 differentiated as it stands has (1 - exp(-d)) * grad log pi, which is that of KL(ref || pi),
  the other direction; the two agree to first order in d. This is GRPO's term as it was published.
- In the reward neither is differentiated. The policy gradient of a reward -k1 is that of
  -KL(pi || ref); that of -k3 is the difference of both directions, which vanishes to first order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .corrections.surrogates import MAX_LOG_RATIO
from .errors import NumericsError
from .metrics import Metrics
from .options.run import KlEstimator


def kl_estimates(policy_logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate of KL(pi || ref) at each token, nats, of the two tensors' common shape.

    estimator: "k1" or "k3", as above. d is clamped at +-20 (without gradient there). The gradient
    reaches policy_logprobs: d for k1, 1 - exp(-d) for k3; ref_logprobs is a constant. The clamp
    comes before exp, so that k3 stays finite.

    Source: Schulman, "Approximating KL divergence" (2020); Shao et al., GRPO (arXiv 2402.03300),
    equation 4. Raises NumericsError on a value that is NaN, ValueError on an unknown estimator.
    """
    log_ratio = policy_logprobs - ref_logprobs.detach()
    if bool(log_ratio.isnan().any()):
        raise NumericsError(
            f"{int(log_ratio.isnan().sum())} log-ratios of policy and reference are NaN"
        )
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        half_square = 0.5 * bounded.square()
        return bounded.detach() + half_square - half_square.detach()
    if estimator == "k3":
        return torch.expm1(-bounded) + bounded  # exp(-d) - 1 has no digits left for a small d
    raise ValueError(f"KL estimator {estimator!r} is unknown; known: k1, k3")


def kl_loss(
    policy_logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    coefficient: float,
    estimator: KlEstimator,
    denominators: float | Tensor,
) -> Tensor:
    """coefficient * sum(estimate / denominators) of a micro-batch's eligible tokens: a scalar that
    is added to the policy loss, under the same denominators. A token counts whether or not the
    trust region keeps it, and is not weighted by pi/mu. Gradient and errors: `kl_estimates`."""
    estimates = kl_estimates(policy_logprobs, ref_logprobs, estimator)
    return coefficient * (estimates / denominators).sum()


@torch.no_grad()
def kl_diagnostics(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Metrics:
    """ref_kl_k1, ref_kl_k3: means of both estimates over a micro-batch's eligible tokens, nats."""
    metrics = Metrics()
    for estimator in ("k1", "k3"):
        values = kl_estimates(policy_logprobs, ref_logprobs, estimator).double()
        metrics.add_mean(f"ref_kl_{estimator}", float(values.sum()), values.numel())
    return metrics
