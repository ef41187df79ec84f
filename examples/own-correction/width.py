"""A trust region of constant width in log space, one-sided: drop only what moves further out.

keep a token iff |log pi - log mu| <= width, or its gradient brings it back.
"""

from dataclasses import dataclass

from estr.corrections import TokenColumns, Verdict


@dataclass(frozen=True)
class WidthOptions:
    width: float = 0.5

    def __post_init__(self):
        if not self.width > 0:
            raise ValueError(f"width must be above 0, not {self.width}")


class Width:
    Options = WidthOptions
    needs = frozenset()  # no column beyond the log-probs

    def __init__(self, options):
        self.width = options.width

    def __call__(self, columns: TokenColumns) -> Verdict:
        log_ratio = columns.log_ratio("E").detach()  # log pi - log mu
        returning = log_ratio * columns.advantages <= 0
        return Verdict(keep=returning | (log_ratio.abs() <= self.width))
