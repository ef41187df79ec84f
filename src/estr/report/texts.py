"""What single tokens say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import Recipe
from ..errors import DataError
from ..models import BUILTIN, load_tokenizer, resolve_model
from ..run_folder import RunFolder

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Texts of the tokens of one tokenizer. tokenizer: None where there is none, so that tokens
    are shown by their number; note says so then."""

    def __init__(self, tokenizer: Any, note: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.note = note

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each. A token that holds a part of a character only is shown as the
        tokenizer's own name for it."""
        if self._tokenizer is None:
            return [f"[{token_id}]" for token_id in token_ids]
        # Some tokenizers drop the space before the first token, so each is decoded behind another.
        anchor = self._tokenizer.encode("a", add_special_tokens=False) or list(token_ids[:1])
        before = self._decode(anchor)
        return [self._text(token_id, anchor, before) for token_id in token_ids]

    def _text(self, token_id: int, anchor: list[int], before: str) -> str:
        if not 0 <= token_id < len(self._tokenizer):
            return f"[{token_id}]"
        behind = self._decode([*anchor, token_id])
        alone = behind.startswith(before)
        text = behind.removeprefix(before) if alone else self._decode([token_id])
        if text and _INCOMPLETE not in text:
            return text
        return str(self._tokenizer.convert_ids_to_tokens(token_id))

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def texts_of_run(folder: RunFolder, recipe: Recipe) -> TokenTexts:
    """With the tokenizer that the run saved, or that of the model it started from, if it lies
    ready."""
    places = [folder.model_last, folder.model_best]
    if recipe.model == BUILTIN:
        places.append(resolve_model(recipe.model))
    elif Path(recipe.model).is_dir():
        places.append(Path(recipe.model))
    problem = "no model is saved"
    for place in places:
        if not place.is_dir():
            continue
        try:
            return TokenTexts(load_tokenizer(place))
        except DataError as error:
            problem = str(error)
    return TokenTexts(None, f"Tokens are shown as numbers, for the run has no tokenizer: {problem}")
