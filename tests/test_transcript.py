"""Whole conversations through the templates of the public families: what is read, what is drawn."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_templates import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3
from estr.batch import make_batches
from estr.chat import Codec
from estr.engine import Request, ScriptedEngine
from estr.environment import Reply, ScriptedEnvironment
from estr.options.run import RolloutOptions
from estr.rollout import RolloutSetting, run_rollout
from estr.rollout_state import RolloutState, SegmentPool, pack_state, unpack_state
from estr.types import RolloutId, SamplingSettings, Trajectory
from loop_parts import CoinTask
from test_chat import make_tokenizer

TURN_END = {GEMMA: "<end_of_turn>", LLAMA3: "<|eot_id|>"}
TOKENIZERS = {
    template: make_tokenizer(template, more=tuple(filter(None, [TURN_END.get(template)])))
    for template in (CHATML, LLAMA3, MISTRAL, QWEN3, GEMMA)
}
FEW = settings(max_examples=25, deadline=None)

Message = dict[str, str]


@dataclass(frozen=True)
class Exchange:
    """What the model writes, whether it ends the turn itself, and what is then said to it."""

    text: str
    stops: bool
    answer: tuple[Message, ...]


@dataclass
class Played:
    trajectory: Trajectory
    requests: list[Request]
    drawn: list[list[int]]
    messages: list[list[Message]]
    """The conversation as it stood when each turn was asked for."""


def codec_of(template: str) -> Codec:
    return Codec(TOKENIZERS[template])


def play(
    template: str,
    prompt: list[Message],
    exchanges: list[Exchange],
    *,
    max_tokens: int = 100_000,
    state: RolloutState | None = None,
) -> Played:
    """The exchanges one after the other, the last one ending the rollout."""
    codec = codec_of(template)
    end = codec.resolve_stops(())[-1]
    drawn = [codec.encode(e.text) + [end] * e.stops for e in exchanges]
    replies = [Reply(observation=e.answer) for e in exchanges[:-1]]
    task = CoinTask(make=lambda index: ScriptedEnvironment(prompt, [*replies, Reply(outcome=1.0)]))
    task.max_turns = len(exchanges)
    requests: list[Request] = []
    done = 0 if state is None else len(state.turns)

    def script(request: Request) -> list[int]:
        requests.append(request)
        return drawn[done + len(requests) - 1]

    setting = RolloutSetting(
        ScriptedEngine(script),
        task,
        codec,
        SamplingSettings(
            max_new_tokens=10_000, max_tokens=max_tokens, stop_token_ids=codec.resolve_stops(())
        ),
        RolloutOptions(),
    )
    trajectory = asyncio.run(
        run_rollout(
            setting, RolloutId(0, 0, 0), 0, dispatch_version=0, deadline_version=9, state=state
        )
    )
    messages = [list(prompt)]
    for e in exchanges[:-1]:
        messages.append([*messages[-1], {"role": "assistant", "content": e.text}, *e.answer])
    return Played(trajectory, requests, drawn, messages)


def squeeze(text: str) -> str:
    return "".join(text.split())


def sampled_ids(trajectory: Trajectory) -> list[int]:
    return [int(t) for s in trajectory.segments for t in s.token_ids[s.sampled]]


def check(template: str, played: Played) -> None:
    """What holds whatever the template does."""
    trajectory, codec = played.trajectory, codec_of(template)
    assert trajectory.error is None
    assert sampled_ids(trajectory) == [token for ids in played.drawn for token in ids]
    assert len(trajectory.turns) == len(played.drawn) == len(played.requests)
    position = 0
    for turn, ids, request, messages in zip(
        trajectory.turns, played.drawn, played.requests, played.messages, strict=True
    ):
        segment = trajectory.segments[turn.segment]
        assert segment.token_ids[turn.start : turn.stop].tolist() == ids
        assert segment.sampled[turn.start : turn.stop].all()
        read = segment.token_ids[: turn.start].tolist()
        assert request.token_ids.tolist() == read
        assert request.first_position == turn.start + position_of(trajectory, turn.segment)
        assert request.first_position >= position
        position = request.first_position + len(ids)
        # The model reads what the template renders, up to white space that templates trim.
        assert squeeze(codec.decode(read)) == squeeze(codec.render(messages))
    (batch,) = make_batches([trajectory], [0.5], [0], aggregation="batch", token_budget=1_000_000)
    assert batch.num_sampled_tokens == int(batch.loss_mask.sum()) == len(sampled_ids(trajectory))
    assert sorted(batch.rows) == [(0, s) for s in range(len(trajectory.segments))]
    assert bool((batch.advantages == 0.5).all())
    assert bool((batch.sequence_ids == 0).all())


def position_of(trajectory: Trajectory, segment: int) -> int:
    return sum(len(s) for s in trajectory.segments[:segment])


WORDS = st.text(alphabet="ab1 +\n.", max_size=6)
PLAIN = WORDS
THINKING = st.builds("<think>\n{}\n</think>\n\n{}".format, WORDS, WORDS)


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def conversations(roles: list[str], texts: st.SearchStrategy[str], *, system: bool) -> Any:
    """(prompt, exchanges): answers are one question or, where there are tools, several results."""
    question = WORDS.map(lambda text: (said("user", text),))
    results = st.lists(WORDS.map(lambda text: said("tool", text)), min_size=1, max_size=3)
    answer = question if roles == ["user"] else st.one_of(question, results.map(tuple))
    whole = st.builds(Exchange, texts, st.just(True), answer)
    cut = st.builds(Exchange, texts.filter(bool), st.just(False), answer)
    prompt = question.map(list)
    if system:
        prompt = st.one_of(prompt, prompt.map(lambda m: [said("system", "be brief"), *m]))
    return st.tuples(prompt, st.lists(st.one_of(whole, cut), min_size=1, max_size=4))


ANY = conversations(["user", "tool"], PLAIN, system=True)
THOUGHTFUL = conversations(["user", "tool"], st.one_of(PLAIN, THINKING), system=True)


@pytest.mark.parametrize(
    ("template", "talk"),
    [(CHATML, ANY), (LLAMA3, ANY), (GEMMA, ANY)],
    ids=["chatml", "llama3", "gemma"],
)
@given(data=st.data())
@FEW
def test_templates_that_only_append_give_one_segment(template: str, talk: Any, data: Any) -> None:
    played = play(template, *data.draw(talk))
    check(template, played)
    assert len(played.trajectory.segments) == 1


@given(ANY)
@FEW
def test_nothing_but_the_template_is_added_where_nothing_is_trimmed(talk: Any) -> None:
    """To the letter: the ids read and drawn spell the template's text of the whole conversation."""
    played = play(CHATML, *talk)
    codec = codec_of(CHATML)
    for request, messages in zip(played.requests, played.messages, strict=True):
        assert codec.decode(request.token_ids.tolist()) == codec.render(messages)


@given(ANY)
@FEW
def test_a_system_message_that_moves_starts_segments(talk: Any) -> None:
    prompt, exchanges = talk
    played = play(MISTRAL, prompt, exchanges)
    check(MISTRAL, played)
    asked_again = sum(e.answer[0]["role"] == "user" for e in exchanges[:-1])
    moves = asked_again if prompt[0]["role"] == "system" else 0
    assert len(played.trajectory.segments) == 1 + moves


@given(THOUGHTFUL)
@FEW
def test_thinking_that_is_dropped_starts_segments(talk: Any) -> None:
    prompt, exchanges = talk
    played = play(QWEN3, prompt, exchanges)
    check(QWEN3, played)
    if not any("</think>" in e.text for e in exchanges[:-1]):
        assert len(played.trajectory.segments) == 1


THOUGHT = Exchange("<think>\n1+1\n</think>\n\n2", True, (said("user", "and 2+2?"),))
CALL = Exchange("<think>\ncall\n</think>\n\n1+1", True, (said("tool", "2"), said("tool", "3")))
LAST = Exchange("4", True, ())


def test_a_new_question_drops_old_thinking_and_nothing_is_trained_twice() -> None:
    played = play(QWEN3, [said("user", "1+1?")], [CALL, THOUGHT, LAST])
    codec = codec_of(QWEN3)
    first, second = played.trajectory.segments
    assert [turn.segment for turn in played.trajectory.turns] == [0, 0, 1]
    assert codec.decode(first.token_ids.tolist()) == (
        "<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\ncall\n</think>\n\n1+1<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>"
        "\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n1+1\n</think>\n\n2<|im_end|>"
    )
    assert codec.decode(second.token_ids.tolist()) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n1+1<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>"
        "\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nand 2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    )
    assert second.sampled.sum() == 2, "old turns are context here"
    check(QWEN3, played)


def test_roles_that_a_template_does_not_know_are_spoken_by_the_user() -> None:
    prompt = [said("system", "be brief"), said("user", "1+1?")]
    played = play(GEMMA, prompt, [CALL, LAST])
    (segment,) = played.trajectory.segments
    read = codec_of(GEMMA).decode(segment.token_ids.tolist())
    assert read == (
        "<bos><start_of_turn>user\nbe brief\n\n1+1?<end_of_turn>\n<start_of_turn>model\n"
        "<think>\ncall\n</think>\n\n1+1<end_of_turn>\n"
        "<start_of_turn>user\n2\n3<end_of_turn>\n<start_of_turn>model\n4<end_of_turn>"
    )
    check(GEMMA, played)


def test_a_model_may_end_turns_in_another_token_than_its_end_of_text() -> None:
    codec = codec_of(GEMMA)
    (end_of_turn,) = codec.encode("<end_of_turn>")
    assert codec.resolve_stops(()) == (TOKENIZERS[GEMMA].eos_token_id, end_of_turn)
    played = play(GEMMA, [said("user", "?")], [Exchange("2", True, (said("user", "+"),)), LAST])
    text = codec.decode(played.requests[1].token_ids.tolist())
    assert text.count("<end_of_turn>") == 3
    assert [turn.finish_reason for turn in played.trajectory.turns] == ["stop", "stop"]


def test_a_turn_that_was_cut_is_closed_by_context_not_by_the_model_check_79() -> None:
    cut = Exchange("2", False, (said("tool", "3"),))
    (segment,) = play(CHATML, [said("user", "?")], [cut, LAST]).trajectory.segments
    start = int(np.flatnonzero(segment.sampled)[0])
    end = TOKENIZERS[CHATML].eos_token_id
    assert segment.token_ids[start + 1] == end
    assert segment.sampled[start : start + 2].tolist() == [True, False]


def test_a_template_that_cannot_go_on_is_an_environment_error() -> None:
    twice = (said("user", "3"), said("user", "4"))
    played = play(GEMMA, [said("user", "?")], [Exchange("2", True, twice), LAST])
    assert played.trajectory.status == "env_error"
    assert "roles must alternate" in (played.trajectory.error or "")
    assert played.trajectory.reward is None


@given(THOUGHTFUL, st.integers(2, 400))
@FEW
def test_no_trajectory_is_longer_than_its_budget(talk: Any, max_tokens: int) -> None:
    prompt, exchanges = talk
    played = play(QWEN3, prompt, exchanges, max_tokens=max_tokens)
    trajectory = played.trajectory
    assert trajectory.num_tokens <= max_tokens
    whole = [token for ids in played.drawn for token in ids]
    assert sampled_ids(trajectory) == whole[: trajectory.num_sampled_tokens]
    if trajectory.num_sampled_tokens < len(whole):
        assert trajectory.status == "truncated"
    assert trajectory.error is None


def test_an_overlong_answer_is_a_budget_stop() -> None:
    long = Exchange("2", True, (said("user", "9" * 500),))
    played = play(CHATML, [said("user", "?")], [long, LAST], max_tokens=100)
    assert played.trajectory.status == "truncated"
    assert (len(played.requests), played.trajectory.num_tokens) == (1, 100)


@pytest.mark.parametrize("num_turns", [1, 2])
def test_a_rollout_of_several_segments_goes_on_after_a_checkpoint(num_turns: int) -> None:
    exchanges = [THOUGHT, THOUGHT, LAST]
    prompt = [said("user", "1+1?")]
    whole = play(QWEN3, prompt, exchanges).trajectory
    assert len(whole.segments) == 3
    state = RolloutState()
    play(QWEN3, prompt, exchanges, state=state)
    # As it stood when num_turns turns were answered.
    state.turns, state.replies = state.turns[:num_turns], state.replies[:num_turns]
    state.starts = state.starts[: num_turns + 1]
    state.parts = state.parts[: state.starts[-1] + 1]
    pool = SegmentPool()
    data = json.loads(json.dumps(pack_state(state, None, pool)))
    restored = unpack_state(data, SegmentPool(pool.columns()))
    played = play(QWEN3, prompt, exchanges, state=restored)
    assert restored.num_restarts == 0
    assert len(played.requests) == 3 - num_turns
    assert played.trajectory.turns == whole.turns
    for a, b in zip(played.trajectory.segments, whole.segments, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.sampled.tolist() == b.sampled.tolist()
