"""Laws of apps/worlds/slots.py: what a trace says of the generators' slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.worlds.slots import Use, in_flight, longest, main, use
from forge.errors import ConfigError
from forge.trace import Span


def span(lane: str, begin_s: float, end_s: float, turn: int = 1) -> Span:
    return Span(lane, 0, "episode", begin_s, end_s, {"turn": turn})


def test_use_is_the_mean_of_what_is_in_flight_cut_at_the_slots() -> None:
    steps = in_flight([span("generate", 0, 4), span("generate", 1, 3), span("generate", 2, 3), span("generate", 4, 5)])
    assert steps == [(0, 1), (1, 2), (2, 3), (3, 1), (4, 1), (5, 0)]
    assert use(steps, 0, 4, slots=2) == Use(4, 1.5, 0.5)
    assert use(steps, 4, 8, slots=1) == Use(4, 0.25, 0.25)
    assert use(steps, 3, 3, slots=1) == Use(0, 0, 0)


def test_the_longest_steps_are_those_beside_the_longest_and_no_reset() -> None:
    spans = [
        span("world", 0, 60),
        span("world", 5, 60),
        span("world", 61, 100),
        span("world", 1, 2),
        span("world", 0, 90, turn=0),
        span("train loop", 0, 99),
        span("generate", 0, 99),
    ]
    assert longest(spans) == spans[:2]
    with pytest.raises(ConfigError, match="no step of an environment"):
        longest(spans[4:])


def test_the_numbers_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        '{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "generate"}}',
        '{"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "slow"}}',
        '{"ph": "X", "pid": 1, "tid": 0, "name": "a", "ts": 0, "dur": 4e6, "args": {"turn": 1}}',
        '{"ph": "X", "pid": 2, "tid": 0, "name": "a", "ts": 1e6, "dur": 2e6, "args": {"turn": 1}}',
    ]
    path = tmp_path / "trace.json"
    path.write_text("[\n" + ",\n".join(events) + "\n]\n")
    main([str(path), "--slots=1"])
    said = capsys.readouterr().out
    assert "1 steps of slow took up to 2.0 s" in said
    assert said.count("1.00 of 1 slots in use, all 100.0% of it, ") == 3
