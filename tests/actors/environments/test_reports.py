"""Laws of actors/environments/reports.py: what pools say reaches the run's rows and its last tables."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from actors.environments.base import Action
from actors.environments.config import EnvironmentConfig
from actors.environments.ledger import PoolReport
from actors.environments.pool import EnvironmentPool
from actors.environments.reports import Reports
from forge.data import Prompt
from forge.errors import EnvironmentFailed, QuarantinedError
from forge.metrics import Meter


class Pool(EnvironmentPool):
    """As its client: `report` is awaited."""

    async def report(self) -> PoolReport:  # type: ignore[override]
        return super().report()


def kind_of(task: Mapping[str, Any]) -> str:
    return str(task["environment"])


async def play(pool: EnvironmentPool, task: Mapping[str, Any], turns: int = 1) -> None:
    episode, _ = await pool.start(task)
    for _ in range(turns):
        await pool.step(episode, Action("3"))
    await pool.close(episode)


def pools() -> dict[str, Pool]:
    config = EnvironmentConfig(path="guessing:Guessing", retries=0, quarantine_after=1)
    return {name: Pool(config, name=name) for name in ("quick", "slow")}


def test_counts_times_and_quarantined_tasks_reach_rows_tables_and_file(tmp_path: Path) -> None:
    async def run() -> tuple[Reports, list[dict[str, Any]]]:
        each = pools()
        reports = Reports(each, kind_of)
        meter = Meter()
        meter.include(reports.row)
        await play(each["quick"], {"id": "good", "number": 7}, turns=2)
        with pytest.raises(EnvironmentFailed):
            await play(each["slow"], {"id": "task-13", "number": 7, "fail_at": 1})
        await reports.gather()
        rows = [meter.lap()]
        with pytest.raises(QuarantinedError):
            await play(each["slow"], {"id": "task-13", "number": 7})
        async with reports.gathering(every_s=3600):
            pass
        rows.append(meter.lap())
        for pool in each.values():
            await pool.shutdown()
        return reports, rows

    reports, (first, second) = asyncio.run(run())
    assert first["extra/env/quick/steps"] == 2
    assert first["extra/env/quick/turn2/count"] == 1
    assert first["extra/env/quick/turn1/queue_p95_s"] == 0
    assert {f"extra/env/quick/service_p{p}_s" for p in (50, 95, 99)} <= {*first}
    assert (first["extra/env/slow/failures"], first["extra/env/slow/quarantine"]) == (1, 1)
    assert (second["extra/env/quick/steps"], second["extra/env/slow/refused"]) == (0, 1), "since the last row"
    console = Console(file=io.StringIO(), width=80)
    for table in reports.tables():
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 task in quarantine" in text
    assert "task-13: 1 failed tries" in text
    assert "the world broke" in text
    assert max(map(len, text.splitlines())) <= 80
    reports.write(tmp_path / "environments.json")
    kinds = json.loads((tmp_path / "environments.json").read_text())
    assert kinds["quick"]["counts"]["steps"] == 2
    assert "the world broke" in kinds["slow"]["quarantine"]["task-13"]["last_error"]
    assert {(line["turn"], line["part"]) for line in kinds["quick"]["times"]} >= {
        ("all", "queue"),
        ("turn2", "service"),
    }


def test_groups_are_counted_by_their_kind_and_as_shares() -> None:
    async def run() -> tuple[Any, Any]:
        each = pools()
        reports = Reports(each, kind_of)
        go_on = asyncio.Event()

        async def rollout(prompt: Prompt) -> Any:
            if prompt.answer == "wait":
                await go_on.wait()
            return None if prompt.answer == "drop" else prompt

        counted = reports.counting(rollout)
        waiting = asyncio.ensure_future(counted(Prompt(0, 0, "", [1], "wait", {"environment": "slow"})))
        await asyncio.sleep(0)  # it begins
        for answer in ("good", "good", "good", "drop"):
            await counted(Prompt(0, 0, "", [1], answer, {"environment": "quick"}))
        before = reports.row()
        go_on.set()
        await waiting
        return before, reports.row()

    before, after = asyncio.run(run())
    assert (before["extra/env/quick/groups"], before["extra/env/quick/groups_dropped"]) == (3, 1)
    assert (before["extra/env/quick/groups_share"], before["extra/env/slow/groups_share"]) == (1, 0)
    assert (before["extra/env/slow/groups_running"], after["extra/env/slow/groups_running"]) == (1, 0)
    assert (after["extra/env/slow/groups"], after["extra/env/slow/groups_share"]) == (1, 1)


def test_a_pool_that_does_not_answer_disturbs_nobody_while_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Silent:
        def __init__(self) -> None:
            self.asked = asyncio.Semaphore(0)

        async def report(self) -> PoolReport:
            self.asked.release()
            raise TimeoutError("no answer")

    async def run() -> None:
        silent = Silent()
        reports = Reports({"quick": silent}, kind_of)
        async with reports.gathering(every_s=0.001):
            await silent.asked.acquire()
            await silent.asked.acquire()
            assert reports.row()["extra/env/quick/steps"] == 0

    with pytest.raises(TimeoutError, match="no answer"):  # behind the run it is told
        asyncio.run(asyncio.wait_for(run(), 60))
    assert "no answer" in caplog.messages[0]
