"""Laws of the side door: one answer for each request, the newest request wins, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from forge.errors import WeightSyncError
from weightsync.worker.door import Doors, WorkerDoor

LIMIT_S = 30.0


class Worker:
    """Behind a door: doubles a number, fails on "fail"; "wait" lasts until something overtakes it."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.began, self.let_go = threading.Event(), threading.Event()
        self.door = WorkerDoor(self.do, self.overtake)

    def do(self, request: Any) -> Any:
        self.done.append(request)
        if request == "fail":
            raise ValueError("on purpose")
        if request == "wait":
            self.began.set()
            assert self.let_go.wait(LIMIT_S)
            raise RuntimeError("interrupted")
        return request * 2

    def overtake(self, request: Any) -> None:
        if request != "wait":
            self.let_go.set()


@pytest.fixture
def workers() -> list[Worker]:
    return [Worker(), Worker()]


def run(workers: list[Worker], scenario: Callable[[Doors], Coroutine[Any, Any, Any]]) -> Any:
    """The result of `scenario(doors)`."""

    async def connected() -> Any:
        async with asyncio.timeout(LIMIT_S):
            doors = await Doors.open([worker.door.address for worker in workers])
            try:
                return await scenario(doors)
            finally:
                for wire in doors._wires:
                    wire._link.close()
                await asyncio.sleep(0)

    return asyncio.run(connected())


def test_every_worker_does_a_request_and_the_answers_come_in_their_order(workers: list[Worker]) -> None:
    async def scenario(doors: Doors) -> list[Any]:
        return [await doors.ask(request) for request in (1, 2.5, "ab", [2**64 - 1] * 30_000)]

    assert run(workers, scenario) == [[2] * 2, [5.0] * 2, ["abab"] * 2, [[2**64 - 1] * 60_000] * 2]
    assert [len(worker.done) for worker in workers] == [4, 4]


def test_what_a_worker_raises_arrives_with_its_traceback_and_the_door_stays_open(workers: list[Worker]) -> None:
    async def scenario(doors: Doors) -> list[Any]:
        with pytest.raises(WeightSyncError, match=r"(?s)Traceback.*in do.*ValueError: on purpose"):
            await doors.ask("fail")
        return await doors.ask(1)

    assert run(workers, scenario) == [2, 2]


def test_the_first_failure_is_told_while_another_worker_is_still_at_it(workers: list[Worker]) -> None:
    async def scenario(doors: Doors) -> list[Any]:
        with pytest.raises(WeightSyncError, match="on purpose"):
            await doors.ask("wait")
        assert await asyncio.to_thread(workers[0].began.wait, LIMIT_S)
        assert workers[0].done == ["wait"]
        return await doors.ask(3)

    workers[1].door._do = lambda request: workers[1].do("fail" if request == "wait" else request)
    assert run(workers, scenario) == [6, 6]


def test_a_request_overtakes_what_is_under_way_and_what_has_not_begun(workers: list[Worker]) -> None:
    async def scenario(doors: Doors) -> list[Any]:
        older = [asyncio.ensure_future(doors.ask("wait"))]
        await asyncio.to_thread(workers[0].began.wait, LIMIT_S)
        await asyncio.to_thread(workers[1].began.wait, LIMIT_S)
        older.append(asyncio.ensure_future(doors.ask(1)))
        await asyncio.sleep(0)
        newest = asyncio.ensure_future(doors.ask(2))
        await asyncio.to_thread(both_told.wait, LIMIT_S)
        for worker in workers:
            worker.let_go.set()
        with pytest.raises(WeightSyncError, match="interrupted"):
            await older[0]
        with pytest.raises(WeightSyncError, match="overtaken by a newer request"):
            await older[1]
        return await newest

    def tell(request: Any) -> None:
        if request == 2:
            both_told.wait(LIMIT_S)

    both_told = threading.Barrier(3)
    for worker in workers:
        worker.door._overtake = tell
    assert run(workers, scenario) == [4, 4]
    assert [worker.done for worker in workers] == [["wait", 2]] * 2


def test_a_door_takes_one_connection_and_leaves_no_name_in_any_folder(workers: list[Worker]) -> None:
    async def scenario(doors: Doors) -> list[Any]:
        answers = await doors.ask(1)
        with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as other:
            other.connect(f"\0{workers[0].door.address}")
        return answers

    assert run(workers, scenario) == [2, 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_turned_away(workers: list[Worker]) -> None:
    code = (
        f"import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{workers[0].door.address}'); print(s.recv(1))"
    )
    other = subprocess.run(
        ["/usr/bin/env", "python3", "-c", code], user=65534, capture_output=True, text=True, timeout=30
    )
    assert other.stdout == "b''\n", other.stderr

    async def scenario(doors: Doors) -> list[Any]:
        return await doors.ask(1)

    assert run(workers, scenario) == [2, 2]


CHILD = """
import threading, time
from weightsync.worker.door import WorkerDoor
door = WorkerDoor(lambda request: time.sleep(1000), lambda request: None)
print(door.address, flush=True)
threading.Event().wait()
"""


def test_a_worker_that_is_killed_ends_the_wait_at_once_and_every_later_one(tmp_path: Path) -> None:
    async def killed() -> str:
        address = (await asyncio.to_thread(child.stdout.readline)).strip()  # type: ignore[union-attr]
        async with asyncio.timeout(LIMIT_S):
            doors = await Doors.open([address])
            asked = asyncio.ensure_future(doors.ask(1))
            await asyncio.sleep(0.05)
            assert not asked.done()
            os.kill(child.pid, signal.SIGKILL)
            for ask in (asked, doors.ask(2)):
                with pytest.raises(ConnectionError, match="a worker of the engine has closed its side door"):
                    await ask
        return address

    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert asyncio.run(killed()) not in Path("/proc/net/unix").read_text()
    finally:
        child.kill()
        child.communicate()
