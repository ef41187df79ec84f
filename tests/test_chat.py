"""Texts, messages and ids: what is encoded, and what never is encoded again."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_templates import CHATML
from estr.chat import Codec
from estr.errors import ConfigError, DataError

# A run of tool messages shares one wrapper, as in many published templates.
SHARED_WRAPPER = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}"
    "<|im_start|>user\n{% endif %}"
    "<tool>{{ m['content'] }}</tool>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<unk>", "<bos>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]


def make_tokenizer(
    template: str | None = None,
    *,
    merges: tuple[tuple[str, str], ...] = (("1", "0"),),
    more: tuple[str, ...] = (),
) -> Any:
    """Characters, the merges given, `more` special tokens, and a tokenizer that puts <bos> first
    unless told not to."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL, *CHARACTERS, *("".join(pair) for pair in merges), *more]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocabulary, merges=list(merges), unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", *more],
    )
    tokenizer.chat_template = template
    return tokenizer


def rendered(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def test_text_is_encoded_as_it_stands() -> None:
    tokenizer = make_tokenizer()
    codec = Codec(tokenizer)
    assert tokenizer.encode("2")[0] == tokenizer.bos_token_id
    assert codec.encode_prompt(" 2+\n") == tokenizer.convert_tokens_to_ids([" ", "2", "+", "\n"])
    assert codec.encode_observation(" 2+\n") == codec.encode_prompt(" 2+\n")
    assert codec.encode_prompt("") == []


def test_ids_stay_as_they_are() -> None:
    codec = Codec(make_tokenizer())
    assert codec.encode_prompt([7, 3, 7]) == [7, 3, 7]
    assert codec.encode_observation((7, 3, 7)) == [7, 3, 7]
    assert codec.encode_prompt([]) == []


def test_messages_go_through_the_template_once() -> None:
    tokenizer = make_tokenizer(CHATML)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    ids = Codec(tokenizer).encode_prompt(messages)
    assert ids == rendered(tokenizer, messages)
    assert tokenizer.decode(ids).endswith("2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.bos_token_id not in ids


def test_drawn_ids_are_appended_to_and_never_encoded_again_check_72() -> None:
    tokenizer = make_tokenizer()
    codec = Codec(tokenizer)
    one, zero, ten = tokenizer.convert_tokens_to_ids(["1", "0", "10"])
    assert codec.encode_prompt("10") == [ten]
    drawn = [one, zero]
    history = [*codec.encode_prompt("="), *drawn, *codec.encode_observation("10")]
    assert history[1:] == [one, zero, ten]
    assert codec.decode(drawn) == "10"


@pytest.mark.parametrize("template", [CHATML, SHARED_WRAPPER])
@pytest.mark.parametrize("num_tools", [1, 2, 3])
def test_a_run_of_tool_messages_is_rendered_together_check_75(
    template: str, num_tools: int
) -> None:
    tokenizer = make_tokenizer(template)
    codec = Codec(tokenizer)
    prompt = [{"role": "user", "content": "what is 10+10?"}]
    turn = "call 10+10 (twice)"
    tools = [{"role": "tool", "content": f"result {i}: 20"} for i in range(num_tools)]
    drawn = [*codec.encode_prompt(turn), tokenizer.eos_token_id]
    history = [*codec.encode_prompt(prompt), *drawn, *codec.encode_observation(tools)]
    whole = [*prompt, {"role": "assistant", "content": turn}, *tools]
    assert history == rendered(tokenizer, whole)


def test_a_turn_that_ended_otherwise_is_closed_by_the_observation() -> None:
    tokenizer = make_tokenizer(CHATML)
    codec = Codec(tokenizer)
    tools = [{"role": "tool", "content": "20"}]
    closed = codec.encode_observation(tools)
    (bracket,) = tokenizer.convert_tokens_to_ids(["]"])
    assert codec.encode_observation(tools, last_id=bracket) == [tokenizer.eos_token_id, *closed]
    assert codec.encode_observation(tools, last_id=tokenizer.eos_token_id) == closed


def test_what_the_tool_says_cannot_move_the_cut() -> None:
    tokenizer = make_tokenizer(CHATML)
    ids = Codec(tokenizer).encode_observation([{"role": "tool", "content": "(assistant turn)"}])
    assert tokenizer.decode(ids) == (
        "\n<|im_start|>tool\n(assistant turn)<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "cannot render"),
        ("{{ raise_exception('only users here') }}", "only users here"),
        ("{{ messages[0]['nothing']['at all'] }}", "cannot render"),
    ],
)
def test_messages_without_a_fitting_template_are_refused(
    template: str | None, message: str
) -> None:
    codec = Codec(make_tokenizer(template))
    for encode in (codec.encode_prompt, codec.encode_observation):
        with pytest.raises(DataError, match=message):
            encode([{"role": "user", "content": "2"}])


def test_a_template_that_drops_the_assistant_is_refused() -> None:
    codec = Codec(make_tokenizer("{{ messages[-1]['content'] }}"))
    with pytest.raises(DataError, match="drops what the assistant said"):
        codec.encode_observation([{"role": "tool", "content": "20"}])


DROPS_ALL_BUT_TALK = (
    "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}"
    "{{ m['role'] }}: {{ m['content'] }}\n{% endif %}{% endfor %}assistant: "
)


def test_what_a_template_would_drop_is_said_by_the_user() -> None:
    codec = Codec(make_tokenizer(DROPS_ALL_BUT_TALK))
    told = [
        {"role": "system", "content": "tools: add"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "add"},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": "four"},
    ]
    assert codec.render(told) == (
        "user: tools: add\n\n2+2?\nassistant: add\nuser: 4\nfour\nassistant: "
    )
    assert codec.render(told[:1]) == "user: tools: add\nassistant: "
    assert codec.render([told[0], told[2]]) == "user: tools: add\nassistant: add\nassistant: "
    assert [line.partition(":")[0] for line in codec.habits()] == [
        "the chat template knows no system role",
        "the chat template knows no tool role",
    ]
    assert Codec(make_tokenizer(CHATML)).habits() == []
    assert Codec(make_tokenizer(None)).habits() == []


def test_stop_texts_become_one_id_each_and_end_of_text_comes_last() -> None:
    tokenizer = make_tokenizer()
    codec = Codec(tokenizer)
    expected = tokenizer.convert_tokens_to_ids(["]", "\n", "10", "<|im_end|>"])
    assert codec.resolve_stops(["]", "\n", "10"]) == tuple(expected)
    assert codec.resolve_stops(["<|im_end|>"]) == (tokenizer.eos_token_id,)
    assert codec.resolve_stops([]) == (tokenizer.eos_token_id,)
    tokenizer.eos_token = None
    assert codec.resolve_stops(["]"]) == tuple(tokenizer.convert_tokens_to_ids(["]"]))


@pytest.mark.parametrize("stop", ["", "]]", "é", "<|im_end|>\n", "100"])
def test_a_stop_text_that_is_not_one_token_is_named(stop: str) -> None:
    codec = Codec(make_tokenizer())
    with pytest.raises(ConfigError, match="not exactly one known token") as caught:
        codec.resolve_stops(["]", stop])
    assert repr(stop) in str(caught.value)


@given(st.text(alphabet=CHARACTERS, max_size=40))
@settings(max_examples=50, deadline=None)
def test_decode_gives_back_every_text_spaces_and_all(text: str) -> None:
    codec = Codec(_TOKENIZER)
    assert codec.decode(codec.encode_prompt(text)) == text
    assert codec.decode([*codec.encode_prompt(text), 4]) == text + "<|im_end|>"


_TOKENIZER = make_tokenizer()


def test_the_module_imports_no_transformers() -> None:
    code = "import sys, estr.chat; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
