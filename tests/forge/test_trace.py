"""Laws of forge/trace.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.errors import RunFolderError
from forge.trace import Trace, read_spans


def test_spans_that_overlap_lie_in_rows_and_a_free_row_is_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    with trace.span("generate", "a"):
        with trace.span("generate", "b", turn=2):
            pass
        with trace.span("generate", "c"), trace.span("world", "d"):
            pass
    trace.close()
    trace.close()
    spans = {span.name: span for span in read_spans(path)}
    assert [(spans[n].lane, spans[n].row) for n in "abcd"] == [
        ("generate", 0),
        ("generate", 1),
        ("generate", 1),
        ("world", 0),
    ]
    assert spans["a"].begin_s <= spans["b"].begin_s <= spans["b"].end_s <= spans["c"].begin_s <= spans["a"].end_s
    assert spans["b"].arguments == {"turn": 2}
    events = json.loads(path.read_text())
    assert {event["ph"] for event in events} == {"X", "M"}, "whole JSON, as other tools read it"


def test_a_span_ends_when_its_body_raises(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    with pytest.raises(KeyError), trace.span("generate", "a"):
        raise KeyError
    trace.close()
    assert [span.name for span in read_spans(tmp_path / "trace.json")] == ["a"]


def test_of_a_killed_run_all_whole_spans_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    for name in "ab":
        with trace.span("generate", name):
            pass
    trace.close()
    path.write_text(path.read_text()[:-20])
    assert [span.name for span in read_spans(path)] == ["a"]


def test_without_a_path_nothing_is_written_and_a_bad_one_is_named(tmp_path: Path) -> None:
    trace = Trace()
    with trace.span("generate", "a"):
        pass
    trace.close()
    with pytest.raises(RunFolderError, match=r"nowhere/trace.json cannot be written"):
        Trace(tmp_path / "nowhere" / "trace.json")
