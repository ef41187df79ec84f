"""A conversation in which the model may call tools, graded by what it says last.

    prompt -> turn with calls  -> one answer for each call, all in one observation
           -> turn with calls  -> ...
           -> turn without     -> graded: the end

A turn that was cut short and the last turn that is allowed are graded as they stand, whatever they
hold. A call that cannot be read is answered with what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..environment import Action, Message, Prompt, Reply
from ..tools import Toolbox, parse_calls
from ..types import FinishReason

ToolRole = Literal["tool", "user"]


@dataclass(frozen=True, slots=True)
class Ending:
    """The conversation when it is graded. reply: text of the last turn; num_calls: calls in all
    turns; num_well_formed: those of them that named a tool and fitted its signature."""

    reply: str
    finish_reason: FinishReason
    messages: Sequence[Message]
    num_calls: int
    num_well_formed: int


class Conversation:
    """One problem. grade: what the ending is worth. tool_role: the role in whose name tools answer,
    for templates that know no "tool"."""

    def __init__(
        self,
        prompt: Prompt,
        grade: Callable[[Ending], Awaitable[Reply]],
        *,
        toolbox: Toolbox | None = None,
        max_turns: int = 1,
        tool_role: ToolRole = "tool",
        restorable: bool = True,
    ) -> None:
        self.restorable = restorable
        self._prompt = prompt
        self._grade = grade
        self._toolbox = toolbox
        self._turns_left = max_turns
        self._tool_role = tool_role
        self._num_calls = 0
        self._num_well_formed = 0
        self._messages: list[Message] = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [message for message in prompt if not isinstance(message, int)]
        )

    async def start(self) -> Prompt:
        return self._prompt

    async def step(self, action: Action) -> Reply:
        self._turns_left -= 1
        self._messages.append({"role": "assistant", "content": action.text})
        toolbox = self._toolbox
        calls = parse_calls(action.text) if toolbox and action.finish_reason == "stop" else []
        if toolbox is not None:
            self._num_calls += len(calls)
            self._num_well_formed += sum(toolbox.check(call) is None for call in calls)
        if toolbox is None or not calls or self._turns_left < 1:
            return await self._grade(
                Ending(
                    action.text,
                    action.finish_reason,
                    tuple(self._messages),
                    self._num_calls,
                    self._num_well_formed,
                )
            )
        answers = [
            {"role": self._tool_role, "content": await toolbox.answer(call)} for call in calls
        ]
        if self._tool_role == "user":  # such templates want the roles to alternate
            answers = [{"role": "user", "content": "\n".join(a["content"] for a in answers)}]
        self._messages += answers
        return Reply(observation=answers)

    async def close(self) -> None:
        pass
