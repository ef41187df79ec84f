"""Deep search: answer a question by searching a corpus several times, with citations.

    user       Are Christopher Nolan and Sathish Kalathil both film directors?
    model      <tool_call>{"name": "search", "arguments": {"query": "Sathish Kalathil"}}</tool_call>
    tool       [h0010] Sathish Kalathil
                Sathish Kalathil is an Indian film director ...
    model      Explanation: Both direct films [h0010] [h0015].
               Exact Answer: yes
               Confidence: 95%                        outcome 1.0

`search` gives the k best documents by BM25, each with a snippet; `get_document` reads one. A turn
without a call is the answer. It is judged by exact match after normalization, or by a model that
is asked (`judge = "model"`). Two small sets with their own corpora ship with estr, `hotpot` and
`musique`; a folder of one's own, such as BrowseComp-Plus, is named by its path: see
docs/deep-search.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..environment import Environment, Message, Reply
from ..errors import ConfigError, DataError
from ..evaluation_records import RolloutRecord
from ..options.corrections import require
from ..options.run import require_seconds
from ..options.tasks import JUDGE_TIMEOUT_S
from ..tools import Call, Toolbox, parse_calls, write_call
from . import check_split, stable_hash
from .browsecomp import run_record
from .conversation import Conversation, Ending, ToolRole
from .judge import Endpoint, Judge, exact_match, normalized, token_f1
from .retrieval import Cut, Document, cut_by, cut_words
from .search_data import Query, read_set
from .search_measures import SearchOutcome, search_measures

_RULES = """\
Answer the question with the help of the documents that you find. Search as often as you need, one \
call at a time, then answer in three lines:

Explanation: <why, naming the documents it rests on as [docid]>
Exact Answer: <the answer alone, as short as can be>
Confidence: <0 to 100>%"""

_EXAMPLE = (
    ("user", "Which river flows through the town where the Altmark Salt Works were founded?"),
    ("assistant", write_call("search", {"query": "Altmark Salt Works founded town"})),
    ("tool", "[x1] Altmark Salt Works\n The Altmark Salt Works were founded in Lindau in 1712."),
    ("assistant", write_call("search", {"query": "river flows through Lindau"})),
    ("tool", "[x2] Lindau\n Lindau is a market town on the river Nuthe."),
    (
        "assistant",
        "Explanation: The works were founded in Lindau [x1], which lies on the Nuthe [x2].\n"
        "Exact Answer: Nuthe\nConfidence: 90%",
    ),
)
"""Made up for the prompt; in no corpus."""

_LEAD = r"^[ \t*_#>-]*"
_ANSWER = re.compile(rf"{_LEAD}exact answer[ \t*_]*:(.*)$", re.I | re.M)
_CONFIDENCE = re.compile(
    rf"{_LEAD}confidence[ \t*_]*:[ \t*_]*([0-9]{{1,3}}(?:\.[0-9]+)?)(?![0-9])", re.I | re.M
)
_ADDRESS = re.compile(r"https?://[^\s/]+\S*", re.IGNORECASE)
_CITED = re.compile(r"[\[【]([^\[\]【】]{1,200})[\]】]")


@dataclass(frozen=True, slots=True)
class DeepSearchOptions:
    """Questions over a corpus, with a search tool, in several turns."""

    data: str = "hotpot"
    """"hotpot" or "musique", which ship with estr, or a folder with corpus.jsonl and queries.jsonl
    (.gz as well), and qrels.txt if the evidence is not in the queries."""
    password: str = ""
    """Of an encrypted queries file, such as that of BrowseComp-Plus; "": it is plain."""
    num_test: int = 40
    """Queries that are held out for testing: always the same ones, whatever the seed."""
    k: int = 5
    """Documents that a search finds, at most."""
    snippet_tokens: int = 64
    """Tokens of each that a search shows."""
    document_tokens: int = 512
    """Tokens that get_document shows; 0: there is no such tool."""
    tokenizer: str = ""
    """Folder of the tokenizer that counts these tokens; "": words and punctuation marks are
    counted."""
    max_turns: int = 6
    """Turns of a rollout, at most."""
    example: bool = True
    """Show one worked example before the question."""
    judge: Literal["exact", "model"] = "exact"
    """exact: the answer is right iff it equals a gold answer after normalization. model: another
    model is asked."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judge, up to and without /chat/completions."""
    judge_model: str = ""
    """Name of the judge's model at that endpoint."""
    judge_key_variable: str = ""
    """Environment variable that holds the key; "": none is sent."""
    judge_timeout_s: float = JUDGE_TIMEOUT_S
    """Wall time of one try of three; all of them must fit into rollout.step_timeout_s."""
    tool_role: ToolRole = "tool"
    """Role in whose name the tools answer."""
    seed: int = 0
    """Of the order of training queries."""

    def __post_init__(self) -> None:
        for key in ("num_test", "k", "snippet_tokens", "max_turns"):
            require(getattr(self, key) >= 1, f"{key} must be at least 1, not {getattr(self, key)}")
        require(
            self.document_tokens >= 0,
            f"document_tokens must be at least 0, not {self.document_tokens}",
        )
        require_seconds("judge_timeout_s", self.judge_timeout_s)
        named = bool(self.judge_url and self.judge_model)
        require(
            self.judge == "exact" or named,
            'judge = "model" needs judge_url and judge_model: where it is asked, and whom',
        )
        require(
            not self.judge_url or bool(_ADDRESS.fullmatch(self.judge_url)),
            f"judge_url must begin with http:// or https:// and a host, not {self.judge_url!r}",
        )


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """What the last turn says. confidence: in [0, 1]; None: not stated. cited: as written."""

    answer: str | None
    confidence: float | None
    cited: tuple[str, ...]


class DeepSearchTask:
    """The queries of one set, dealt into two splits by a hash of their ids."""

    Options = DeepSearchOptions
    name = "deep_search"
    stop: tuple[str, ...] = ()
    unfinished_outcome: float | None = 0.0
    eval_settings: Mapping[str, Any] = {
        "sampling.max_new_tokens": 256,
        "sampling.max_tokens": 6144,
    }

    def __init__(self, options: DeepSearchOptions) -> None:
        self.options = options
        self.max_turns = options.max_turns
        self.corpus, queries, self.fingerprint = read_set(options.data, options.password)
        if not options.num_test < len(queries):
            raise ConfigError(
                f"task.num_test = {options.num_test} leaves nothing to train on: there are "
                f"{len(queries)} queries"
            )
        dealt = sorted(queries, key=lambda query: stable_hash("held out", query.query_id))
        train = sorted(
            dealt[options.num_test :],
            key=lambda query: stable_hash(options.seed, "train", query.query_id),
        )
        self._queries = {"train": train, "test": dealt[: options.num_test]}
        self._by_id = {query.query_id: query for query in queries}
        self._cut = _cut(options.tokenizer)
        tools = [self.search] + ([self.get_document] if options.document_tokens else [])
        # The texts are cut by tokens already.
        self._toolbox = Toolbox({f.__name__: f for f in tools}, max_chars=1 << 24, limit_key="")
        self._judge = _judge(options)

    def size(self, split: str) -> int | None:
        check_split(split)
        return len(self._queries[split])

    def query(self, split: str, index: int) -> Query:
        """Raises DataError beyond the end of the split."""
        check_split(split)
        queries = self._queries[split]
        if not 0 <= index < len(queries):
            raise DataError(f"deep_search has {len(queries)} {split} queries, there is no {index}")
        return queries[index]

    def make(self, split: str, index: int) -> Environment:
        query = self.query(split, index)
        return Conversation(
            self.prompt(query.text),
            partial(self._grade, query),
            toolbox=self._toolbox,
            max_turns=self.max_turns,
            tool_role=self.options.tool_role,
        )

    def gold(self, split: str, index: int) -> Sequence[str]:
        """One search, then the answer. Empty where another model is the judge."""
        if self._judge is not None:
            return []
        query = self.query(split, index)
        cited = " ".join(f"[{docid}]" for docid in sorted(query.evidence))
        answer = f"Explanation: {cited}\nExact Answer: {query.golds[0]}\nConfidence: 100%"
        search = write_call("search", {"query": query.text})
        return [search, answer] if self.max_turns > 1 else [answer]

    def prompt(self, question: str) -> list[Message]:
        """The messages before the first turn."""
        rules = f"{_RULES}\n\n{self._toolbox.instructions()}"
        messages: list[Message] = [{"role": "system", "content": rules}]
        if self.options.example:
            roles = {"tool": self.options.tool_role}
            messages += [{"role": roles.get(r, r), "content": text} for r, text in _EXAMPLE]
        return [*messages, {"role": "user", "content": question}]

    # The docstrings of the two tools are what the model is told.

    def search(self, query: str) -> str:
        """Search the documents. Returns the best ones, each with its docid and beginning.

        Args:
            query: What to look for, in a few words.
        """
        hits = self.corpus.search(query, self.options.k)
        shown = [self._shown(hit.document, self.options.snippet_tokens) for hit in hits]
        return "\n".join(shown) or "nothing found"

    def get_document(self, docid: str) -> str:
        """Read a document that a search has found.

        Args:
            docid: The docid of the document.
        """
        document = self._document(docid)
        if document is None:
            raise LookupError(f"there is no document {docid!r}")
        return self._shown(document, self.options.document_tokens)

    def _document(self, docid: str) -> Document | None:
        return self.corpus.documents.get(docid.strip().strip("[]"))

    def _shown(self, document: Document, num_tokens: int) -> str:
        """Only headings begin at the edge, so no text can pass for another document."""
        text = self._cut(document.text, num_tokens).replace("\n", "\n ")
        return f"[{document.docid}] {' '.join(document.title.split())}\n {text}"

    async def _grade(self, query: Query, ending: Ending) -> Reply:
        if ending.finish_reason != "stop":
            return Reply(outcome=0.0)
        if self._judge is not None:
            right = await self._judge.ask(query.text, ending.reply, query.golds[0])
            return Reply(outcome=float(right))
        return Reply(outcome=exact_match(read_answer(ending.reply).answer, query.golds))

    # -- evaluation ------------------------------------------------------------------------------

    def answer(self, text: str) -> str | None:
        return normalized(read_answer(text).answer or "") or None

    def example_id(self, split: str, index: int) -> str:
        return self.query(split, index).query_id

    def measures(self, records: Sequence[RolloutRecord]) -> dict[str, float]:
        """Of the rollouts of an evaluation, beside being right."""
        return search_measures([self._outcome(record) for record in records])

    def _outcome(self, record: RolloutRecord) -> SearchOutcome:
        query = self._by_id[record.example]
        said = read_answer(_last_reply(record))
        return SearchOutcome(
            solved=record.outcome == 1.0,
            f1=token_f1(said.answer, query.golds),
            evidence=query.evidence,
            retrieved=frozenset(self._retrieved(record)),
            cited=frozenset(filter(self._is_citation, said.cited)),
            num_searches=sum(call.name == "search" for call in self._calls(record)),
            confidence=said.confidence,
        )

    def _is_citation(self, mark: str) -> bool:
        """Does [mark] name a document, be it one that does not exist? "[sic]" does not."""
        return mark in self.corpus.documents or any(c.isdecimal() for c in mark)

    def _calls(self, record: RolloutRecord) -> list[Call]:
        """The well-formed calls that were answered: those of all turns but the last one."""
        calls = [call for reply in record.replies[:-1] for call in parse_calls(reply)]
        return [call for call in calls if self._toolbox.check(call) is None]

    def _found(self, call: Call) -> list[Document]:
        """The documents that a call showed. The same call always finds the same ones."""
        if call.name == "get_document":
            document = self._document(str(call.arguments["docid"]))
            return [] if document is None else [document]
        hits = self.corpus.search(str(call.arguments["query"]), self.options.k)
        return [hit.document for hit in hits]

    def _retrieved(self, record: RolloutRecord) -> list[str]:
        """Ids of the documents that any call showed, in the order of first sight."""
        found = [d.docid for call in self._calls(record) for d in self._found(call)]
        return list(dict.fromkeys(found))

    def write_runs(self, records: Sequence[RolloutRecord], folder: Path) -> None:
        """Run files as the evaluator of BrowseComp-Plus reads them, a folder for each of the k
        rollouts of every query. A rollout that did not end by itself is incomplete."""
        for record in records:
            run = run_record(
                record.example,
                completed=record.status == "ok",
                calls=[
                    (call.name, call.arguments, self._output(call)) for call in self._calls(record)
                ],
                retrieved=self._retrieved(record),
                answer=_last_reply(record),
            )
            name = re.sub(r"[^\w.-]", "_", f"run_{record.example}.json")
            path = folder / str(record.index) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")

    def _output(self, call: Call) -> str:
        tokens = (
            self.options.snippet_tokens if call.name == "search" else self.options.document_tokens
        )
        return "\n".join(self._shown(document, tokens) for document in self._found(call))


def _last_reply(record: RolloutRecord) -> str:
    """The answer of a rollout that ended by itself; "" where it did not."""
    return record.replies[-1] if record.status == "ok" and record.replies else ""


def read_answer(text: str) -> FinalAnswer:
    """The three lines; of each the last one counts, and a missing one is None."""
    answers = [said for line in _ANSWER.findall(text) if (said := line.strip(" \t*_"))]
    stated = [float(number) for number in _CONFIDENCE.findall(text)]
    cited = [docid for found in _CITED.findall(text) for docid in re.split(r"[,;\s]+", found)]
    return FinalAnswer(
        answer=answers[-1] if answers else None,
        confidence=stated[-1] / 100 if stated and stated[-1] <= 100 else None,
        cited=tuple(dict.fromkeys(docid for docid in cited if docid)),
    )


def _cut(tokenizer: str) -> Cut:
    if not tokenizer:
        return cut_words
    from ..models import load_tokenizer

    return cut_by(load_tokenizer(tokenizer))


def _judge(options: DeepSearchOptions) -> Judge | None:
    if options.judge == "exact":
        return None
    return Judge(
        Endpoint(
            options.judge_url,
            options.judge_model,
            options.judge_key_variable,
            options.judge_timeout_s,
        )
    )
