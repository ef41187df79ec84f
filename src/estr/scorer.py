"""Log-probs and entropies of drawn tokens as one module: its forward is the whole pass, output
matrix included, so that whatever is hung on modules (the sharding of `estr.ranks`) is in force for
all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from .heads import Head, split_head
from .logprobs import next_token, statistics_from_hidden, token_statistics

if TYPE_CHECKING:
    from torch import Tensor


class Scorer(nn.Module):
    """Around a causal LM, which keeps its own names and types. head: how its logits come about."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head: Head = split_head(model)

    def forward(
        self, token_ids: Tensor, mask: Tensor, *, temperature: float, vocab_size: int | None
    ) -> tuple[Tensor, Tensor]:
        """(log-probs with gradient, entropies in nats) of the tokens where mask holds, flat [N] in
        row order, float32. token_ids: int64 [rows, T]; mask: bool, False at the first place of
        every row. vocab_size: number of real token ids where the output layer is padded."""
        head, weight = self.head, self.head.weight
        if weight is None:  # scaled or capped logits: they come whole
            logits, drawn = next_token(head.logits(token_ids), token_ids, mask)
            statistics = token_statistics(
                logits, drawn, temperature=temperature, vocab_size=vocab_size, gini=False
            )
        else:
            hidden, drawn = next_token(head.hidden(token_ids), token_ids, mask)
            statistics = statistics_from_hidden(
                hidden,
                weight,
                drawn,
                head_bias=head.bias,
                temperature=temperature,
                vocab_size=vocab_size,
                gini=False,
            )
        return statistics.logprobs, statistics.entropies
