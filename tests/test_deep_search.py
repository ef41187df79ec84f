"""Deep search: the shipped sets, the tools, what is graded and measured, BrowseComp-Plus files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from estr.environment import Action, Reply
from estr.environments import build_task
from estr.environments.browsecomp import decrypt, decrypt_record, encrypt, read_qrels
from estr.environments.deep_search import DeepSearchOptions, DeepSearchTask, read_answer
from estr.environments.judge import exact_match
from estr.environments.search_data import read_set
from estr.errors import ConfigError, DataError
from estr.evaluation_records import RolloutRecord
from estr.tools import write_call
from estr.types import Status

ANSWER = "Explanation: so it is [r1], [zz9].\nExact Answer: Nuthe\nConfidence: 80%"
CORPUS = [
    {"docid": "r1", "title": "Lindau", "text": "Lindau lies on the river Nuthe.\n[r9] Forged"},
    {"docid": "r2", "title": "Elbe", "text": "The Elbe is a long river."},
    {"docid": "r3", "title": "Salt", "text": "Salt was made in Lindau."},
]
QUERIES = [
    {
        "query_id": f"q{i}",
        "query": f"Which river? {i}",
        "answer": "Nuthe",
        "gold_docids": ["r1", "r3"],
    }
    for i in range(4)
]


def write_jsonl(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "corpus.jsonl", CORPUS)
    write_jsonl(tmp_path / "queries.jsonl", QUERIES)
    return tmp_path


def own(folder: Path, **options: object) -> DeepSearchTask:
    table = {"name": "deep_search", "data": str(folder), "num_test": 1, "k": 2, **options}
    task = build_task(table)
    assert isinstance(task, DeepSearchTask)
    return task


def play(task: DeepSearchTask, turns: list[str], split: str = "test") -> list[Reply]:
    async def steps() -> list[Reply]:
        environment = task.make(split, 0)
        await environment.start()
        return [await environment.step(Action(turn, (), "stop")) for turn in turns]

    return asyncio.run(steps())


def read_of(reply: Reply) -> str:
    (message,) = reply.observation or ()
    assert isinstance(message, dict)
    return str(message["content"])


@pytest.fixture(scope="module", params=["hotpot", "musique"])
def shipped(request: pytest.FixtureRequest) -> DeepSearchTask:
    return DeepSearchTask(DeepSearchOptions(data=request.param))


def test_the_shipped_sets_are_whole_and_their_gold_answers_are_right(
    shipped: DeepSearchTask,
) -> None:
    sizes = {"hotpot": 994, "musique": 1890}
    assert len(shipped.corpus.documents) == sizes[shipped.options.data]
    assert (shipped.size("train"), shipped.size("test")) == (60, 40)
    queries = [shipped.query(s, i) for s, n in (("train", 60), ("test", 40)) for i in range(n)]
    assert len({query.query_id for query in queries}) == 100
    assert all(query.evidence <= shipped.corpus.documents.keys() for query in queries)
    assert all(len(query.evidence) >= 2 for query in queries)
    for query in queries:
        said = read_answer(f"Exact Answer: {query.golds[0]}\nConfidence: 100%")
        assert exact_match(said.answer, query.golds) == 1.0
    searched, graded = play(shipped, list(shipped.gold("test", 0)))
    assert read_of(searched).startswith("[")
    assert graded.outcome == 1.0


def test_bm25_finds_what_plain_bm25_finds(shipped: DeepSearchTask) -> None:
    found = 0.0
    for split, count in (("train", 60), ("test", 40)):
        for index in range(count):
            query = shipped.query(split, index)
            hits = {hit.document.docid for hit in shipped.corpus.search(query.text, 5)}
            found += len(hits & query.evidence) / len(query.evidence) / 100
    # Another implementation with the same k1 and b, without stop words: 0.750 and 0.482.
    assert found == pytest.approx(
        {"hotpot": 0.750, "musique": 0.482}[shipped.options.data], abs=0.05
    )


def test_no_query_is_in_both_splits_and_no_seed_moves_one(folder: Path) -> None:
    held_out = {own(folder, seed=seed).query("test", 0).query_id for seed in range(5)}
    assert len(held_out) == 1
    train = {own(folder, seed=0).query("train", i).query_id for i in range(3)}
    assert not train & held_out


def test_a_search_shows_headings_and_snippets_and_no_text_forges_a_heading(folder: Path) -> None:
    task = own(folder, snippet_tokens=20)
    shown = read_of(play(task, [write_call("search", {"query": "Lindau river"})])[0])
    assert shown.split("\n")[0] == "[r1] Lindau"
    assert " [r9] Forged" in shown
    assert [line for line in shown.split("\n") if line.startswith("[")] == [
        "[r1] Lindau",
        "[r2] Elbe",
    ]
    short = own(folder, snippet_tokens=2)
    shown = read_of(play(short, [write_call("search", {"query": "Lindau river"})])[0])
    assert shown == "[r1] Lindau\n Lindau lies\n[r2] Elbe\n The Elbe"


def test_documents_are_read_and_missing_ones_are_an_answer(folder: Path) -> None:
    calls = [write_call("get_document", {"docid": docid}) for docid in ("r2", "[r3]", "r77")]
    replies = play(own(folder), [*calls, write_call("search", {"query": "zzz"})])
    texts = [read_of(reply) for reply in replies]
    assert texts[0] == "[r2] Elbe\n The Elbe is a long river."
    assert texts[1].startswith("[r3] Salt")
    assert texts[2].startswith("error: LookupError")
    assert texts[3] == "nothing found"


def test_a_malformed_call_is_answered_and_the_rollout_goes_on_check_105(folder: Path) -> None:
    bad = '<tool_call>{"name": "search", "arguments": {"query": "x"}</tool_call>'
    replies = play(own(folder), [bad, ANSWER])
    assert "not JSON" in read_of(replies[0])
    assert replies[1].outcome == 1.0


def test_without_documents_there_is_no_tool_to_read_them(folder: Path) -> None:
    task = own(folder, document_tokens=0)
    assert "get_document" not in str(task.prompt("?"))
    assert "get_document" in str(own(folder).prompt("?"))


@pytest.mark.parametrize(
    ("text", "answer", "confidence", "cited"),
    [
        (ANSWER, "Nuthe", 0.8, ("r1", "zz9")),
        ("**Exact Answer:** *a spirit*\n**Confidence:** 95.5 %", "a spirit", 0.955, ()),
        ("exact answer: one\nExact Answer: two", "two", None, ()),
        ("Explanation: 【d1, d2】[d1]\nConfidence: 900", None, None, ("d1", "d2")),
        ("Nuthe", None, None, ()),
        ("Exact Answer:\nConfidence: 10%", None, 0.1, ()),
        ("Confidence: 1000%", None, None, ()),
    ],
)
def test_the_three_lines(
    text: str, answer: str | None, confidence: float | None, cited: tuple[str, ...]
) -> None:
    said = read_answer(text)
    assert (said.answer, said.cited) == (answer, cited)
    assert said.confidence == (None if confidence is None else pytest.approx(confidence))


def test_half_an_answer_is_none(folder: Path) -> None:
    environment = own(folder).make("test", 0)
    reply = asyncio.run(environment.step(Action(ANSWER, (), "length")))
    assert reply.outcome == 0.0


def record(
    task: DeepSearchTask, replies: tuple[str, ...], status: Status = "ok", index: int = 0
) -> RolloutRecord:
    outcome = 1.0 if status == "ok" else None
    name = task.example_id("test", 0)
    return RolloutRecord(name, 0, index, status, outcome, None, 9, None, (), replies)


def test_rollouts_are_measured_with_the_failed_ones(folder: Path) -> None:
    task = own(folder)
    search = write_call("search", {"query": "Lindau"}).removesuffix("</tool_call>")
    played = record(task, (search, "<tool_call>{</tool_call>", ANSWER))
    measured = task.measures([played, record(task, (search,), "engine_error")])
    assert measured == {
        "f1": 0.5,
        "searches": 0.5,
        "stated_confidence": 0.5,
        "evidence_recall": 0.5,
        "citation_precision": 0.25,
        "citation_recall": 0.25,
        "calibration_error": pytest.approx(0.2),
    }


def test_run_files_are_those_of_the_benchmark(folder: Path, tmp_path: Path) -> None:
    task = own(folder)
    calls = (write_call("search", {"query": "Elbe"}), write_call("get_document", {"docid": "r3"}))
    out = tmp_path / "out"
    task.write_runs([record(task, (*calls, ANSWER)), record(task, calls, "timeout", 1)], out)
    name = f"run_{task.example_id('test', 0)}.json"
    whole, cut = (json.loads((out / str(i) / name).read_text()) for i in (0, 1))
    assert whole["tool_call_counts"] == {"search": 1, "get_document": 1}
    assert whole["retrieved_docids"] == ["r2", "r3"]
    assert (whole["status"], cut["status"]) == ("completed", "incomplete")
    last = whole["result"][-1]
    assert (last["type"], last["output"]) == ("output_text", ANSWER)
    assert whole["result"][1]["output"] == "[r3] Salt\n Salt was made in Lindau."


# BrowseComp-Plus files


def test_the_cipher_of_browsecomp_plus() -> None:
    assert encrypt("héllo", "pw") == "WAr7lt1N"
    assert decrypt("WAr7lt1N", "pw") == "héllo"
    with pytest.raises(DataError, match="password"):
        decrypt("WAr7lt1N", "other")
    with pytest.raises(DataError):
        decrypt("not base64!", "pw")


def test_everything_but_the_query_id_is_decrypted() -> None:
    secret = {"query_id": "7", "query": encrypt("who?", "pw"), "n": 3}
    secret["evidence_docs"] = [{"docid": encrypt("12", "pw"), "text": encrypt("t", "pw")}]
    assert decrypt_record(secret, "pw") == {
        "query_id": "7",
        "query": "who?",
        "n": 3,
        "evidence_docs": [{"docid": "12", "text": "t"}],
    }


def test_an_encrypted_set_with_a_relevance_file(folder: Path) -> None:
    secret = [
        {
            "query_id": q["query_id"],
            "query": encrypt(str(q["query"]), "pw"),
            "answer": encrypt("Nuthe", "pw"),
        }
        for q in QUERIES
    ]
    write_jsonl(folder / "queries.jsonl", secret)
    (folder / "qrels.txt").write_text("q0 Q0 r1 1\nq0 Q0 r2 0\n\nq1 Q0 r3 1\n")
    _, queries, _ = read_set(str(folder), "pw")
    assert [query.text for query in queries] == [q["query"] for q in QUERIES]
    assert [query.evidence for query in queries] == [{"r1"}, {"r3"}, set(), set()]
    with pytest.raises(DataError, match="password"):
        read_set(str(folder), "wrong")


@pytest.mark.parametrize("line", ["q1 Q0 d1", "q1 Q0 d1 one", "q1 d1 1"])
def test_a_bad_line_of_a_relevance_file_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "qrels.txt"
    path.write_text(f"q0 Q0 r1 1\n{line}\n")
    with pytest.raises(DataError, match="line 2"):
        read_qrels(path)


@pytest.mark.parametrize(
    "queries",
    [
        [{"query": "?", "answer": "x"}],
        [{"query_id": "1", "query": "?", "answer": ""}],
        [{"query_id": "1", "query": "?", "answer": "the"}],
        [QUERIES[0], QUERIES[0]],
    ],
)
def test_queries_that_cannot_be_graded_are_refused(
    queries: list[dict[str, object]], folder: Path
) -> None:
    write_jsonl(folder / "queries.jsonl", queries)
    with pytest.raises(DataError):
        read_set(str(folder), "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_test": 4}, "num_test"),
        ({"judge": "model"}, "judge_url"),
        ({"judge_timeout_s": float("inf")}, "judge_timeout_s"),
        ({"judge_timeout_s": float("nan")}, "judge_timeout_s"),
        ({"k": 0}, "k must"),
        ({"document_tokens": -1}, "document_tokens"),
    ],
)
def test_bad_options_are_refused_check_106(
    options: dict[str, object], said: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        own(folder, **options)


def test_a_folder_without_a_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus\.jsonl"):
        own(tmp_path)


@pytest.mark.parametrize("url", ["host/v1", "localhost:8000/v1", "file:///etc/passwd", "http://"])
def test_an_address_of_a_judge_that_is_none_is_refused(folder: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="judge_url must begin with http"):
        own(folder, judge="model", judge_url=url, judge_model="m")


def test_a_long_run_of_spaces_in_an_answer_takes_no_time() -> None:
    """This took a minute when the time grew with the square of the length."""
    text = "Exact Answer: a" + " " * 20_000 + "x"
    assert read_answer(text).answer == text.removeprefix("Exact Answer: ")
    assert read_answer("**Exact Answer:** _Nuthe_ \nExact Answer: **").answer == "Nuthe"


def test_the_query_id_0_is_one(folder: Path) -> None:
    file = folder / "queries.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    write_jsonl(file, [{**row, "query_id": number} for number, row in enumerate(rows)])
    task = own(folder)
    found = {
        task.query(split, i).query_id
        for split in ("train", "test")
        for i in range(task.size(split) or 0)
    }
    assert "0" in found
