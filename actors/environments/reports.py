"""What the environments of a run say of themselves: a row a step, and tables at its end.

    reports = Reports({"browser": client, ...}, kind_of)
    run.meter.include(reports.row)                  # extra/env/<kind>/...
    run.rollout = reports.counting(run.rollout)     # groups of each kind
    async with reports.gathering(): ...             # asks the pools every second or so
    reports.tables(); reports.write(folder / "environments.json")

`row` waits for nobody: it has what the pools had said by then, a second or two late. The tables are over the whole run,
of a resumed one from where it went on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from rich import box
from rich.table import Table

from actors.environments.latency import LatencyRecorder, Line
from actors.environments.ledger import COUNTS, PoolReport
from actors.environments.quarantine import Failures
from actors.rollout import Rollout
from forge.durations import PERCENTILES
from forge.metrics import Number

PREFIX = "extra/env/"
_SHOWN_TASKS = 20
_SHOWN_CHARACTERS = 160

_log = logging.getLogger(__name__)


class Reporting(Protocol):
    """A pool's client."""

    async def report(self) -> PoolReport: ...


class _Kind:
    """All that is known of one kind: since the last row, and since the start."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.new, self.counts = Counter[str](), Counter[str]()
        self.new_latency, self.latency = LatencyRecorder(), LatencyRecorder()
        self.now: dict[str, Number] = {}
        self.quarantine: dict[str, Failures] = {}
        self.groups_running = 0

    def count(self, key: str, number: int = 1) -> None:
        self.new[key] += number
        self.counts[key] += number

    def take(self, report: PoolReport) -> None:
        for key, number in report.counts.items():
            self.count(key, number)
        self.new_latency.merge(report.latency)
        self.latency.merge(report.latency)
        self.now = {"running": report.running, "waiting": report.waiting, "quarantine": len(report.quarantine)}
        self.quarantine = report.quarantine

    def row(self, groups: int) -> dict[str, Number]:
        """Since the last row, in which `groups` of all kinds came about; starts anew."""
        counts = {key: self.new[key] for key in (*COUNTS, "groups", "groups_dropped")}
        now = {**self.now, "groups_running": self.groups_running}
        share = {"groups_share": counts["groups"] / groups} if groups else {}
        row = {f"{PREFIX}{self.name}/{key}": value for key, value in {**counts, **share, **now}.items()}
        row |= self.new_latency.row(PREFIX)
        self.new, self.new_latency = Counter(), LatencyRecorder()
        return row


class Reports:
    """Of all kinds of one run. For one event loop."""

    def __init__(self, pools: Mapping[str, Reporting], kind_of: Callable[[Mapping[str, Any]], str]) -> None:
        """`pools` by the name of their kind; `kind_of` a task."""
        self._pools, self._kind_of = pools, kind_of
        self._kinds = {name: _Kind(name) for name in pools}

    def counting(self, rollout: Callable[..., Awaitable[Rollout | None]]) -> Callable[..., Awaitable[Rollout | None]]:
        """`rollout`, called like `actors.rollout.rollout_group`, whose groups are counted by their kind."""

        async def counted(prompt: Any, *arguments: Any, **options: Any) -> Rollout | None:
            kind = self._kinds[self._kind_of(prompt.metadata)]
            kind.groups_running += 1
            try:
                made = await rollout(prompt, *arguments, **options)
            finally:
                kind.groups_running -= 1
            kind.count("groups" if made is not None else "groups_dropped")
            return made

        return counted

    @asynccontextmanager
    async def gathering(self, every_s: float = 1.0) -> AsyncIterator[None]:
        """Asks the pools while the body runs, and once more behind it if it ends well."""
        task = asyncio.create_task(self._go_on(every_s))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.gather()

    async def gather(self) -> None:
        """Asks every pool. Raises DeadlineExceeded where one does not answer."""
        for report in await asyncio.gather(*(pool.report() for pool in self._pools.values())):
            self._kinds[report.name].take(report)

    async def _go_on(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.gather()
            except Exception as error:  # a dead pool ends the run elsewhere; a slow one is asked again
                _log.warning("the environments have not reported: %s", error)

    def row(self) -> dict[str, Number]:
        """Metrics since the last row. Of each kind, under extra/env/<kind>/: the counts of `ledger.COUNTS`; groups that
        came about, groups_dropped, groups_running and groups_share, the kind's share of those that came about; how many
        episodes run and wait for a place, and tasks in quarantine; and the times of `LatencyRecorder.row`.
        """
        groups = sum(kind.new["groups"] for kind in self._kinds.values())
        return {key: value for kind in self._kinds.values() for key, value in kind.row(groups).items()}

    def tables(self) -> Iterator[Table]:
        """What ends a run: counts and quarantined tasks of each kind, then how long its turns and tools took."""
        yield _counts_table(self._kinds)
        if lines := [line for kind in self._kinds.values() for line in kind.latency.lines()]:
            yield _times_table(lines)

    def write(self, path: Path) -> None:
        """The same as JSON: {kind: {"counts", "times": [line], "quarantine": {task: {"count", "last_error"}}}}."""
        kinds = {
            name: {
                "counts": dict(kind.counts),
                "times": [vars(line) for line in kind.latency.lines()],
                "quarantine": {task: vars(failures) for task, failures in kind.quarantine.items()},
            }
            for name, kind in self._kinds.items()
        }
        path.write_text(json.dumps(kinds, indent=1), encoding="utf-8")


def _counts_table(kinds: Mapping[str, _Kind]) -> Table:
    table = Table(box=box.ROUNDED, show_header=False, title="environments", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, kind in kinds.items():
        counts = kind.counts
        facts = [
            f"{counts['groups']:,} groups, {counts['groups_dropped']:,} dropped",
            f"{counts['episodes']:,} episodes, {counts['steps']:,} turns",
        ]
        rare = [key for key in COUNTS if key not in ("episodes", "steps") and counts[key]]
        facts += [", ".join(f"{counts[key]:,} {key.replace('_', ' ')}" for key in rare)] if rare else []
        tasks = list(kind.quarantine.items())
        facts += [f"{len(tasks)} {'task' if len(tasks) == 1 else 'tasks'} in quarantine:"] if tasks else []
        for task, failures in tasks[:_SHOWN_TASKS]:
            error = " ".join(failures.last_error.split())[-_SHOWN_CHARACTERS:]
            facts.append(f"  {task}: {failures.count} failed tries, the last: {error}")
        facts += [f"  and {len(tasks) - _SHOWN_TASKS} more"] if len(tasks) > _SHOWN_TASKS else []
        table.add_row(name, "\n".join(facts))
    return table


def _times_table(lines: list[Line]) -> Table:
    """Queue is the wait for a place, service the environment's own time; one line a turn."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="turns, in seconds", title_justify="left")
    table.add_column("environment", overflow="fold")
    for head in ("turn", "count", *(f"{part}p{p}" for part in ("queue ", "service ") for p in PERCENTILES)):
        table.add_column(head.replace(" ", "\n"), justify="right", no_wrap=True, vertical="bottom")
    for queue, service in zip(lines[0::2], lines[1::2], strict=True):
        times = [getattr(line, f"p{p}_s") for line in (queue, service) for p in PERCENTILES]
        turn = {"turn0": "reset"}.get(service.turn, service.turn.removeprefix("turn"))
        name = service.name if service.turn == "all" else ""
        table.add_row(name, turn, f"{service.count:,}", *(_seconds(value) for value in times))
    return table


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"
