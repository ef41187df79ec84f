"""What other corrections would have made of the same logged tokens.

    judging      one step under one correction: kept, weights, gradient coefficients
    tally        sums and examples over steps, in memory that does not grow
    corrections  the steps of a ledger, one after the other; no model needed
    gradients    one step with its weights: exact losses, gradient norms, cosines
    results      what they answer

The other replay, of a run's schedule, is `estr train --replay-schedule`.
"""

from __future__ import annotations

from .corrections import replay_corrections
from .gradients import replay_gradients
from .judging import Cut, Judged, cut_step, judge
from .results import OWN, Cell, Check, Example, Figures, Gradient, Gradients, Replay

__all__ = [
    "OWN",
    "Cell",
    "Check",
    "Cut",
    "Example",
    "Figures",
    "Gradient",
    "Gradients",
    "Judged",
    "Replay",
    "cut_step",
    "judge",
    "replay_corrections",
    "replay_gradients",
]
