"""Problems from a file, and templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.errors import ConfigError, DataError
from estr.records import choose_rows, field, fill, names_in, read_records


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_lines_end_at_a_line_feed_and_nowhere_else_check_127(tmp_path: Path) -> None:
    texts = ["a\u2028b", "c\u0085d", "e\x0cf\rg"]
    lines = [json.dumps({"q": text}, ensure_ascii=False) for text in texts]
    path = write(tmp_path / "r.jsonl", "\ufeff" + "\n".join(lines) + "\r\n\n")
    assert [record["q"] for record in read_records(path)] == texts


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"a": 1}\n{"a": \n', r"r\.jsonl:2 is not JSON"),
        ('{"a": 1}\n\n[1]\n', r"r\.jsonl:3 is not an object"),
        ("\n \n", "holds no record"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        read_records(write(tmp_path / "r.jsonl", text))


def test_what_is_no_file_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: No such file"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not UTF-8"):
        read_records(tmp_path / "b")


def test_rows_are_a_slice_as_python_writes_it_check_154() -> None:
    records = [{"i": i} for i in range(5)]
    assert choose_rows(records, "[-2:]") == records[-2:]
    assert choose_rows(records, "1:-1") == records[1:-1]
    assert choose_rows(records, "[:2]") == records[:2]
    assert choose_rows(records, "") == choose_rows(records, ":") == records
    for wrong in ("2", "[::2]", "-:", "a:b"):
        with pytest.raises(ConfigError, match="must be a slice"):
            choose_rows(records, wrong)
    with pytest.raises(ConfigError, match="leaves nothing of 5"):
        choose_rows(records, "[5:]")


def test_fields_go_in_and_other_braces_stay() -> None:
    record = {"q": "{a} {{a}}", "a": 3, "deep": {"er": ["x", "é"]}, "dotted.name": "d"}
    template = r"{q} \boxed{} \frac{1}{2} {{q}} {deep.er} {dotted.name} { q }"
    assert fill(template, record) == (r'{a} {{a}} \boxed{} \frac{1}{2} {q} ["x", "é"] d { q }')
    assert list(names_in(template)) == ["q", "deep.er", "dotted.name"]


@given(st.text(max_size=30), st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_what_a_record_says_is_no_template(one: str, two: str) -> None:
    assert fill("{a}|{b}", {"a": one, "b": two}) == f"{one}|{two}"


def test_an_absent_field_is_named_with_the_nearest() -> None:
    record = {"question": "?", "meta": {"gold": 1}}
    with pytest.raises(DataError, match="no field 'questoin'; did you mean 'question'"):
        fill("{questoin}", record)
    with pytest.raises(DataError, match=r"no field 'meta\.answer'"):
        field(record, "meta.answer")
    with pytest.raises(DataError, match="fields here: none"):
        field({}, "x")
