"""The one place where texts and messages become token ids and back.

    prompt ------ Transcript ---------> ids        the rollout's first context
    drawn ids --- Codec.decode -------> text       what the environment is shown
    observation - Transcript.extend --> ids        appended behind the drawn ids, or, where the
                                                   template rewrote them, a new segment's context

Drawn ids are only ever appended to, never encoded again: a tokenizer need not give back the ids
that a model drew, and log-probs belong to ids. Where a chat template renders what came before in
another way once more messages follow (it drops old thinking, it moves the system message), nothing
can be appended: a new segment starts with the whole conversation as context, so that no drawn token
stands in two segments as drawn. Not every template knows every role: a system message then opens
the first question, and tools answer in the name of the user. `Codec` works on any Hugging Face
tokenizer; this module itself imports none of it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol, cast

from .environment import Message, Prompt
from .errors import ConfigError, DataError

_MARK = "\N{LEFT CEILING}turn%d\N{RIGHT CEILING}"
"""Ends what the model wrote while a template renders it; numbered so that no message holds it."""

_ASKED: Message = {"role": "user", "content": "?"}


class Codec:
    """Encodes for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Text as it stands, no special token added; messages through the chat template, up to
        where the assistant speaks; ids as they are. Raises DataError if there is no template."""
        if _is_messages(prompt):
            return self.encode(self.render(cast("Sequence[Message]", prompt)))
        return self._ids(prompt)

    def can_render(self, prompt: Prompt) -> bool:
        """Text and ids always; messages if the tokenizer has a chat template."""
        return not _is_messages(prompt) or bool(self._tokenizer.chat_template)

    def encode_observation(self, observation: Prompt, last_id: int | None = None) -> list[int]:
        """What goes behind a turn: text and ids as in a prompt; messages as the template renders
        all of them behind an assistant turn, the turn's own end and the opening of the next one
        included.

        last_id: the last id of the turn (None: the tokenizer's end of text). If the template ends
        a turn in this very token, it is not repeated. Raises DataError if there is no template, or
        it does not show what an assistant said.
        """
        if not _is_messages(observation):
            return self._ids(observation)
        _, behind = self.render_around([_ASKED], "", cast("Sequence[Message]", observation))
        return self.encode_behind(behind, last_id)

    def render_around(
        self, messages: Sequence[Message], text: str, observation: Sequence[Message]
    ) -> tuple[str, str]:
        """(all up to the end of the turn `text`, all behind it) as the template renders the
        messages, that turn and the observation. Raises DataError if the turn does not show."""
        contents = str([text, *messages, *observation])
        mark = next(m for m in (_MARK % i for i in range(len(contents) + 1)) if m not in contents)
        turn = {"role": "assistant", "content": text + mark}
        before, there, behind = self.render([*messages, turn, *observation]).partition(mark)
        if not there:
            raise DataError("the chat template drops what the assistant said; it cannot be used")
        return before, behind

    def encode_behind(self, behind: str, last_id: int | None = None) -> list[int]:
        """Ids of what is rendered behind a turn; without the turn's own last id, where the template
        ends turns in it (None: in the tokenizer's end of text)."""
        ids = self.encode(behind)
        last_id = self._tokenizer.eos_token_id if last_id is None else last_id
        return ids[1:] if ids[:1] == [last_id] else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens spelled out, spaces left alone."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def resolve_stops(self, stop: Sequence[str]) -> tuple[int, ...]:
        """Ids that end a turn: one for each text of `stop`, then the tokenizer's end of text, then
        the special token in which the chat template ends a turn (some models have another there).

        Raises ConfigError naming a text that is not exactly one token of this tokenizer.
        """
        found: list[int] = []
        for text in stop:
            ids = self.encode(text)
            if len(ids) != 1 or ids[0] == self._tokenizer.unk_token_id:
                raise ConfigError(
                    f"the task's stop text {text!r} is {len(ids)} tokens of this model ({ids}), "
                    "not exactly one known token; choose another stop text or another model"
                )
            found += ids
        if self._tokenizer.eos_token_id is not None:
            found.append(self._tokenizer.eos_token_id)
        return tuple(dict.fromkeys([*found, *self._turn_end()]))

    def _turn_end(self) -> list[int]:
        """The special token that the chat template puts behind a turn, if there is one."""
        try:
            _, behind = self.render_around([_ASKED], "", [_ASKED])
        except DataError:
            return []
        ids = self.encode(behind)[:1]
        known = self._tokenizer.added_tokens_decoder
        return [i for i in ids if i in known and known[i].special]

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        try:
            return [operator.index(token) for token in cast("Sequence[int]", prompt)]
        except TypeError as error:
            raise DataError(
                f"a prompt is text, token ids or chat messages, not {prompt!r:.80}"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text, no special token added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def habits(self) -> list[str]:
        """What becomes of roles that the chat template does not know, for people."""
        if not self._tokenizer.chat_template:
            return []
        return [
            f"the chat template knows no {role} role: {instead}"
            for role, known, instead in (
                ("system", self._knows_system, "a system message opens the first question"),
                ("tool", self._knows_tools, "tools answer in the name of the user"),
            )
            if not known
        ]

    @cached_property
    def _knows_system(self) -> bool:
        return self._shows({"role": "system", "content": _MARK % 0}, _ASKED)

    @cached_property
    def _knows_tools(self) -> bool:
        said: Message = {"role": "assistant", "content": "?"}
        return self._shows(_ASKED, said, {"role": "tool", "content": _MARK % 0})

    def _shows(self, *messages: Message) -> bool:
        """Does the template render the mark in one of them? Some drop a role that they do not know,
        some raise."""
        try:
            return _MARK % 0 in self._rendered(messages)
        except DataError:
            return False

    def render(self, messages: Sequence[Message]) -> str:
        """The messages up to where the assistant speaks, in roles that the template knows. Raises
        DataError."""
        roles = {message.get("role") for message in messages}
        if "system" in roles and not self._knows_system:
            messages = _opened_by_system(messages)
        if "tool" in roles and not self._knows_tools:
            messages = _answered_by_user(messages)
        return self._rendered(messages)

    def _rendered(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise DataError(
                f"the model's chat template cannot render these messages: {error}; "
                "a task for models without a chat template gives text or token ids"
            ) from error
        return text


class Encoding(Protocol):
    """What a rollout asks of a codec; the last four only where a prompt is messages."""

    def encode_prompt(self, prompt: Prompt) -> list[int]: ...

    def encode_observation(self, observation: Prompt, last_id: int | None) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_behind(self, behind: str, last_id: int | None) -> list[int]: ...

    def render(self, messages: Sequence[Message]) -> str: ...

    def render_around(
        self, messages: Sequence[Message], text: str, observation: Sequence[Message]
    ) -> tuple[str, str]: ...


@dataclass(frozen=True, slots=True)
class Extension:
    """Context behind a turn. rewritten: it is the whole conversation, and starts a segment."""

    ids: list[int]
    rewritten: bool = False


class Transcript:
    """The conversation of one rollout; `ids` is its first context.

    It is a pure function of prompt, turns and observations, so a resumed rollout makes it again by
    playing them. An observation of another kind than the prompt (text behind messages) is appended
    as it stands, and so is all that follows.
    """

    def __init__(self, codec: Encoding, prompt: Prompt) -> None:
        self._codec = codec
        self._messages: list[Message] | None = None
        self._rendered = ""
        if _is_messages(prompt):
            self._messages = list(cast("Sequence[Message]", prompt))
            self._rendered = codec.render(self._messages)
            self.ids = codec.encode(self._rendered)
        else:
            self.ids = codec.encode_prompt(prompt)

    def extend(self, text: str, last_id: int, observation: Prompt) -> Extension:
        """What the model reads after the turn `text`, whose last id is last_id. Raises DataError if
        the template cannot render it."""
        if self._messages is None or not _is_messages(observation):
            self._messages = None
            return Extension(self._codec.encode_observation(observation, last_id))
        observed = cast("Sequence[Message]", observation)
        before, behind = self._codec.render_around(self._messages, text, observed)
        written = self._rendered + text
        self._messages += [{"role": "assistant", "content": text}, *observed]
        self._rendered = self._codec.render(self._messages)
        # Templates trim and pad what was said; that alone is no other history.
        if _without_spaces(before) == _without_spaces(written):
            return Extension(self._codec.encode_behind(behind, last_id))
        return Extension(self._codec.encode(self._rendered), rewritten=True)


def _opened_by_system(messages: Sequence[Message]) -> list[Message]:
    """A system message at the start, as the beginning of the first question."""
    first, *others = messages
    if first.get("role") != "system":
        return list(messages)
    text = str(first["content"])
    if others and others[0].get("role") == "user":
        text = "\n\n".join(part for part in (text, str(others.pop(0)["content"])) if part)
    return [{"role": "user", "content": text}, *others]


def _answered_by_user(messages: Sequence[Message]) -> list[Message]:
    """Every run of tool messages as one message of the user, since roles may have to alternate."""
    told: list[Message] = []
    for is_tool, run in groupby(messages, key=lambda message: message.get("role") == "tool"):
        if is_tool:
            told.append({"role": "user", "content": "\n".join(str(m["content"]) for m in run)})
        else:
            told += run
    return told


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _is_messages(prompt: Prompt) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )
