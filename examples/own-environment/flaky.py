"""A calculator that is out of order now and then: the model has to ask again.

prompt       23+45=
model        [23+45]      a call
observation  !            out of order, as it is for every second problem, at the first call
model        [23+45]
observation  68
model        68.          the answer: outcome 1.0
"""

import re
from dataclasses import dataclass

from estr.environment import Reply
from estr.environments import check_split, stable_hash
from estr.grading import exact_integer

CALL = re.compile(r"\[(\d{1,2})\+(\d{1,2})")


@dataclass(frozen=True)
class FlakyOptions:
    failures: int = 1

    def __post_init__(self):
        if not 0 <= self.failures <= 3:
            raise ValueError(f"failures must be in [0, 3], not {self.failures}")


class FlakyTask:
    Options = FlakyOptions
    name = "flaky"
    stop = ("]", ".")
    unfinished_outcome = 0.0

    def __init__(self, options):
        self.options = options
        self.max_turns = options.failures + 3

    def size(self, split):
        check_split(split)
        return None  # endless: every index is a problem

    def numbers(self, split, index):
        """Two numbers of two digits. The last digit of the first one deals them out: no seed moves
        a problem from one split to the other."""
        drawn = stable_hash("flaky", split, index)
        first, second = 10 + drawn % 90, 10 + drawn // 90 % 90
        last_digit = 9 if split == "test" else drawn // 8100 % 9
        return first - first % 10 + last_digit, second

    def failures(self, split, index):
        return self.options.failures * (stable_hash("fails", split, index) % 2)

    def make(self, split, index):
        return Flaky(*self.numbers(split, index), self.failures(split, index))

    def gold(self, split, index):
        first, second = self.numbers(split, index)
        calls = [f"[{first}+{second}"] * (self.failures(split, index) + 1)
        return [*calls, str((first + second) % 100)]


class Flaky:
    restorable = True

    def __init__(self, first, second, failures):
        self.first, self.second, self.failures_left = first, second, failures

    async def start(self):
        return f"{self.first}+{self.second}="

    async def step(self, action):
        if action.finish_reason == "length":  # half a turn is none
            return Reply(outcome=0.0)
        if not action.text.startswith("["):
            right = (self.first + self.second) % 100
            return Reply(outcome=exact_integer(action.text, right))
        call = CALL.fullmatch(action.text)
        if call is None:
            return Reply(observation="!")
        if self.failures_left:
            self.failures_left -= 1
            return Reply(observation="!")
        return Reply(observation=str((int(call[1]) + int(call[2])) % 100))

    async def close(self):
        pass
