"""A twin of deep search: follow a chain of links by asking sources, some of which do not know.

    prompt       37/4/1=          from 37 follow link 4, then link 1: where does it lead?
    model        [2*37/4]         asks source 2 where link 4 of 37 leads; "]" ends the turn
    observation  -                source 2 does not know
    model        [0*37/4]
    observation  82
    model        [3*82/1]
    observation  06
    model        06.              the answer; "." ends the turn: outcome 1.0

Where a link leads is drawn anew for every problem, so nothing can be learned by heart: the answer
has to be looked up. Which source to ask is a real choice, about log(num_sources) nats; each knows
a link or not, at random but for good, and at least one knows it. A call that cannot be read is
answered by "!". Sources answer about any number, so a wrong step leads astray without a word, as
a wrong query does. A turn cut short by its token budget ends the rollout with outcome 0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..environment import Action, Environment, Reply
from ..grading import exact_integer
from ..options.corrections import require
from . import check_split, stable_hash
from .demonstrations import Span, heavy_tailed, is_held_out, wrong_digit
from .latency import Latency, LatencyOptions

CALL_ERROR = "!"
"""What is answered to a call that cannot be read."""
UNKNOWN = "-"
"""What a source answers that does not know the link."""


@dataclass(frozen=True, slots=True)
class LookupOptions(LatencyOptions):
    """Size of the problems, how much is to be searched for, and how it is demonstrated."""

    num_hops: int = 2
    """Links to follow; with max_hops the least."""
    max_hops: int = 0
    """Links in the longest problems: P(hops >= n) is about num_hops / n up to there. 0: all
    problems have num_hops."""
    digits: int = 2
    """Digits of the numbers that links lead between."""
    num_sources: int = 4
    """Sources that may be asked; 1 leaves nothing to choose."""
    missing: float = 0.25
    """Share of the sources that do not know a link; the nearer to 1, the longer the search."""
    error_rate: float = 0.22
    """Share of demonstrated turns that are wrong."""
    seed: int = 0
    """Which problems the indices stand for. What is held out for testing does not depend on it."""

    def __post_init__(self) -> None:
        require(1 <= self.num_hops <= 9, f"num_hops must be in [1, 9], not {self.num_hops}")
        require(
            self.max_hops == 0 or self.num_hops <= self.max_hops <= 9,
            f"max_hops must be 0 or in [num_hops, 9], not {self.max_hops}",
        )
        require(1 <= self.digits <= 4, f"digits must be in [1, 4], not {self.digits}")
        require(
            1 <= self.num_sources <= 10, f"num_sources must be in [1, 10], not {self.num_sources}"
        )
        require(0 <= self.missing < 1, f"missing must be in [0, 1), not {self.missing}")
        require(0 <= self.error_rate < 1, f"error_rate must be in [0, 1), not {self.error_rate}")
        self.check_latency()


@dataclass(frozen=True, slots=True)
class Chain:
    """One problem: the number to start from and the links to follow."""

    start: int
    links: tuple[int, ...]


class LookupTask:
    """Endless problems in both splits, drawn from the index; no chain is in both."""

    Options = LookupOptions
    name = "lookup"
    stop: tuple[str, ...] = ("]", ".")
    unfinished_outcome: float | None = 0.0
    warm_start_steps = 300

    def __init__(self, options: LookupOptions) -> None:
        self.options = options
        # Enough to ask every source about every link once, and as often in vain.
        hops = max(options.num_hops, options.max_hops)
        self.max_turns = hops * 2 * options.num_sources + 1
        self._latency = Latency(options)

    def size(self, split: str) -> int | None:
        check_split(split)
        return None

    def chain(self, split: str, index: int) -> Chain:
        """One problem. What is held out is decided by start and links alone."""
        check_split(split)
        options = self.options
        hops = heavy_tailed(options.num_hops, options.max_hops, options.seed, split, index)
        tries = 0
        while True:
            drawn = stable_hash("chain", options.seed, split, index, tries)
            drawn, start = divmod(drawn, 10**options.digits)
            links = []
            for _ in range(hops):
                drawn, link = divmod(drawn, 10)
                links.append(link)
            if is_held_out(start, *links) == (split == "test"):
                return Chain(start, tuple(links))
            tries += 1

    def make(self, split: str, index: int) -> Environment:
        return LookupEnvironment(self, split, index)

    def gold(self, split: str, index: int) -> Sequence[str]:
        chain = self.chain(split, index)
        turns, here = [], self.written(chain.start)
        for link in chain.links:
            answer = UNKNOWN
            for source in range(self.options.num_sources):
                turns.append(f"[{source}*{here}/{link}")
                answer = self.call(split, index, turns[-1])
                if answer != UNKNOWN:
                    break
            here = answer
        return [*turns, here]

    def answer(self, text: str) -> str | None:
        return None if text.startswith("[") else text.strip().lstrip("0") or "0"

    def demonstrate(self, index: int, rng: random.Random) -> Iterator[Span]:
        """A player who asks the sources in a random order and, at a rate of error_rate a turn,
        copies a digit wrongly, follows another link of the chain or forgets a sign (and then tries
        again)."""
        num_sources = self.options.num_sources
        chain = self.chain("train", index)
        yield self.prompt(chain), False
        here = self.written(chain.start)
        for link in chain.links:
            answer = UNKNOWN
            left: list[int] = []
            while answer in (UNKNOWN, CALL_ERROR):
                left = left or rng.sample(range(num_sources), num_sources)
                call = f"[{left.pop()}*{here}/{link}"
                if rng.random() < self.options.error_rate:
                    call = _spoilt(call, chain, rng)
                answer = self.call("train", index, call)
                yield call + "]", True
                yield answer, False
            here = answer
        spoilt = rng.random() < self.options.error_rate
        yield (wrong_digit(here, rng) if spoilt else here) + ".", True

    def prompt(self, chain: Chain) -> str:
        return "/".join([self.written(chain.start), *map(str, chain.links)]) + "="

    def target(self, split: str, index: int) -> int:
        """Where the chain ends."""
        chain = self.chain(split, index)
        here = chain.start
        for link in chain.links:
            here = self._leads(split, index, here, link)
        return here

    def call(self, split: str, index: int, text: str) -> str:
        """What is answered to the call `text` ("[2*37/4", without its stop token)."""
        found = re.fullmatch(rf"\[([0-9])\*([0-9]{{{self.options.digits}}})/([0-9])", text)
        if found is None or int(found[1]) >= self.options.num_sources:
            return CALL_ERROR
        source, number, link = map(int, found.groups())
        if not self._knows(split, index, source, number, link):
            return UNKNOWN
        return self.written(self._leads(split, index, number, link))

    def _leads(self, split: str, index: int, number: int, link: int) -> int:
        key = (self.options.seed, split, index, number, link)
        numbers: int = 10**self.options.digits
        return stable_hash("leads", *key) % numbers

    def _knows(self, split: str, index: int, source: int, number: int, link: int) -> bool:
        key = (self.options.seed, split, index, number, link)
        if stable_hash("knower", *key) % self.options.num_sources == source:
            return True
        return stable_hash("knows", source, *key) % 2**52 >= self.options.missing * 2**52

    def written(self, number: int) -> str:
        """A number with all its digits."""
        return f"{number:0{self.options.digits}d}"

    async def wait(self, split: str, index: int, call: int) -> None:
        """The time that call number `call` of this problem takes."""
        await self._latency.wait(self.options.seed, split, index, call)


class LookupEnvironment:
    """One chain of links."""

    restorable = True

    def __init__(self, task: LookupTask, split: str, index: int) -> None:
        self._task = task
        self._problem = (split, index)
        self._num_calls = 0

    async def start(self) -> str:
        return self._task.prompt(self._task.chain(*self._problem))

    async def step(self, action: Action) -> Reply:
        if action.finish_reason != "stop":
            return Reply(outcome=0.0)
        if not action.text.startswith("["):
            return Reply(outcome=exact_integer(action.text, self._task.target(*self._problem)))
        result = self._task.call(*self._problem, action.text)
        if result != CALL_ERROR:
            self._num_calls += 1
            await self._task.wait(*self._problem, self._num_calls)
        return Reply(observation=result)

    async def close(self) -> None:
        pass


def _spoilt(call: str, chain: Chain, rng: random.Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return call.replace(rng.choice("*/"), "")
    if kind == 1:
        link = int(call[-1])
        return call[:-1] + str(rng.choice([n for n in chain.links if n != link] or [link]))
    source, star, rest = call.partition("*")
    return source + star + wrong_digit(rest, rng)
