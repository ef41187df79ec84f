"""The one place where texts and messages become token ids and back.

    prompt ------ encode_prompt ------> ids            the rollout's first context
    drawn ids --- decode -------------> text           what the environment is shown
    observation - encode_observation -> ids            appended behind the drawn ids

Drawn ids are only ever appended to, never encoded again: a tokenizer need not give back the ids
that a model drew, and log-probs belong to ids. `Codec` works on any Hugging Face tokenizer; this
module itself imports none of it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from .environment import Message, Prompt
from .errors import ConfigError, DataError

_STAND_IN = "(assistant turn)"
"""Stands for what the model wrote when a template renders the messages that follow it."""


class Codec:
    """Encodes for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Text as it stands, no special token added; messages through the chat template, up to
        where the assistant speaks; ids as they are. Raises DataError if there is no template."""
        if _is_messages(prompt):
            return self._encode(self._render(cast("Sequence[Message]", prompt)))
        return self._ids(prompt)

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
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _STAND_IN}]
        text = self._render([*turn, *cast("Sequence[Message]", observation)])
        _, there, behind = text.partition(_STAND_IN)
        if not there:
            raise DataError("the chat template drops what the assistant said; it cannot be used")
        ids = self._encode(behind)
        last_id = self._tokenizer.eos_token_id if last_id is None else last_id
        return ids[1:] if ids[:1] == [last_id] else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens spelled out, spaces left alone."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def resolve_stops(self, stop: Sequence[str]) -> tuple[int, ...]:
        """Ids that end a turn: one for each text of `stop`, then the tokenizer's end of text.

        Raises ConfigError naming a text that is not exactly one token of this tokenizer.
        """
        found: list[int] = []
        for text in stop:
            ids = self._encode(text)
            if len(ids) != 1 or ids[0] == self._tokenizer.unk_token_id:
                raise ConfigError(
                    f"the task's stop text {text!r} is {len(ids)} tokens of this model ({ids}), "
                    "not exactly one known token; choose another stop text or another model"
                )
            found += ids
        if self._tokenizer.eos_token_id is not None:
            found.append(self._tokenizer.eos_token_id)
        return tuple(dict.fromkeys(found))

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._encode(prompt)
        try:
            return [operator.index(token) for token in cast("Sequence[int]", prompt)]
        except TypeError as error:
            raise DataError(
                f"a prompt is text, token ids or chat messages, not {prompt!r:.80}"
            ) from error

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _render(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, ValueError) as error:
            raise DataError(
                f"the model's chat template cannot render these messages: {error}; "
                "a task for models without a chat template gives text or token ids"
            ) from error
        return text


def _is_messages(prompt: Prompt) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )
