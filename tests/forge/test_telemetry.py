"""Laws of forge/telemetry.py, forge/tally.py and forge/collector.py."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from forge.collector import Collector, RemoteClock
from forge.errors import SchemaError
from forge.tally import Tally
from forge.telemetry import Report, Telemetry, host_id
from forge.trace import Taken, Trace, read_spans

FAR_NS = 5_000_000_000


class Mesh:
    """What a Monarch mesh of a few ranks answers; `far` ones have a clock that is ahead."""

    def __init__(self, processes: list[Telemetry], far: bool = False) -> None:
        self.processes, self.far = processes, far
        self.telemetry = self

    async def call(self, spans: bool) -> list[tuple[int, Report]]:
        return [(rank, self._of(process.drain(spans))) for rank, process in enumerate(self.processes)]

    def _of(self, report: Report) -> Report:
        if not self.far:
            return report
        moved = [Taken(s.lane, s.row, s.name, s.begin_ns + FAR_NS, s.end_ns + FAR_NS, {}) for s in report.spans]
        return Report("another machine", report.now_ns + FAR_NS, moved, report.dropped, report.tallies)


async def collected(trace: Trace, meshes: dict[str, Mesh], work: Any) -> Collector:
    collector = Collector(trace)
    for name, mesh in meshes.items():
        collector.follow(name, mesh)
    await asyncio.sleep(0.01)  # spans are kept from the first question on
    with trace.span("train loop", "around"):
        work()
    await collector.finish()
    trace.close()
    return collector


def test_spans_of_every_process_lie_on_one_clock_in_lanes_of_their_own(tmp_path: Path) -> None:
    near, other, far = Telemetry(), Telemetry(), Telemetry()
    path = tmp_path / "trace.json"

    def work() -> None:
        for process in (near, other, far):
            with process.span("weights", "flip", version=3) as about:
                about["more"] = 1

    asyncio.run(collected(Trace(path), {"trainer": Mesh([near, other]), "distant": Mesh([far], far=True)}, work))
    spans = {span.lane: span for span in read_spans(path)}
    assert set(spans) == {"train loop", "trainer/0: weights", "trainer/1: weights", "distant: weights"}
    assert spans["trainer/0: weights"].arguments == {"version": 3, "more": 1}
    around = spans["train loop"]
    for span in spans.values():
        assert around.begin_s - 0.1 <= span.begin_s <= span.end_s <= around.end_s + 0.1
    labels = [e["args"]["labels"] for e in json.loads(path.read_text()) if e["name"] == "process_labels"]
    assert len(labels) == 1, "of the one lane whose clock is another"
    assert "clock +5000." in labels[0]
    assert "sure to" in labels[0]


def test_a_clock_is_read_from_the_exchange_with_the_shortest_round_trip() -> None:
    clock = RemoteClock()
    clock.exchange(1000, 1000 + 50 + 7_000, 1100)  # 100 ns round, ahead by 7000
    clock.exchange(2000, 2900 + 7_000, 3000)  # its answer took short, its question long
    assert (clock.ahead_ns, clock.sure_ns) == (7_000, 50)


def test_without_a_trace_no_span_is_kept_and_the_body_may_still_add_arguments() -> None:
    process = Telemetry()
    process.drain(spans=False)
    with process.span("weights", "flip") as about:
        about["tokens"] = 3
    assert process.drain(spans=True).spans == []
    with process.span("weights", "flip"):
        pass
    assert [taken.name for taken in process.drain(spans=True).spans] == ["flip"]


def test_a_process_that_nobody_asks_keeps_the_newest_spans_and_counts_the_others() -> None:
    process = Telemetry(most_spans=2)
    process.drain(spans=True)
    for name in "abcd":
        with process.span("lane", name):
            pass
    report = process.drain(spans=True)
    assert ([taken.name for taken in report.spans], report.dropped) == (["c", "d"], 2)
    assert process.drain(spans=True).dropped == 0


def test_metrics_of_all_processes_are_reduced_by_their_kind_in_one_row(tmp_path: Path) -> None:
    processes = [Telemetry(), Telemetry()]

    def work() -> None:
        for factor, process in enumerate(processes, start=1):
            for value in (1.0, 3.0, 8.0):
                for kind in ("sum", "mean", "max", "percentiles", "histogram"):
                    process.record(f"extra/{kind}", value * factor, kind)

    row = asyncio.run(collected(Trace(), {"a": Mesh(processes)}, work)).lap()
    assert row["extra/sum"] == 36
    assert row["extra/mean"] == 6
    assert row["extra/max"] == 16
    assert row["extra/percentiles/max"] == 16
    assert row["extra/percentiles/p50"] == pytest.approx(3, rel=0.05)
    assert {key.rpartition("/")[2]: n for key, n in row.items() if "hist/" in key} == {
        "1": 1,
        "2": 1,
        "4": 1,
        "8": 2,
        "16": 1,
    }


def test_a_lap_takes_what_came_and_starts_over(tmp_path: Path) -> None:
    process = Telemetry()
    collector = asyncio.run(collected(Trace(), {"a": Mesh([process])}, lambda: process.record("extra/n", 2, "sum")))
    assert collector.lap() == {"extra/n": 2}
    assert collector.lap() == {}


def test_a_key_of_two_kinds_or_outside_of_the_prefixes_is_an_error() -> None:
    process, other = Telemetry(), Telemetry()
    with pytest.raises(SchemaError, match="unknown metric key 'loss'"):
        process.record("loss", 1.0, "mean")
    process.record("extra/n", 1.0, "mean")
    other.record("extra/n", 1.0, "sum")
    with pytest.raises(SchemaError, match="as mean and as sum"):
        asyncio.run(collected(Trace(), {"a": Mesh([process, other])}, lambda: None)).lap()
    with pytest.raises(SchemaError, match="of kind 'median'"):
        Tally("median")  # type: ignore[arg-type]


def test_a_value_that_is_no_number_is_left_out_and_an_empty_tally_has_no_key() -> None:
    tally = Tally("mean")
    assert tally.row("extra/n") == {}
    for value in (float("nan"), float("inf"), 4.0):
        tally.add(value)
    assert tally.row("extra/n") == {"extra/n": 4.0}


def test_an_actor_that_hangs_or_dies_holds_up_nobody(tmp_path: Path) -> None:
    process = Telemetry()

    class Hangs:
        def __init__(self) -> None:
            self.telemetry = self

        async def call(self, spans: bool) -> list[tuple[int, Report]]:
            await asyncio.Event().wait()
            raise AssertionError

    class Dies(Hangs):
        async def call(self, spans: bool) -> list[tuple[int, Report]]:
            raise RuntimeError("its process was killed")

    async def run() -> Collector:
        collector = Collector(Trace())
        for name, mesh in {"hangs": Hangs(), "dies": Dies(), "lives": Mesh([process]), "old": object()}.items():
            collector.follow(name, mesh)
        process.record("extra/n", 1.0, "sum")
        await asyncio.wait_for(collector.finish(seconds=0.2), 60)
        return collector

    assert asyncio.run(run()).lap() == {"extra/n": 1.0}


def test_a_host_has_one_name() -> None:
    assert host_id() == host_id() != ""
