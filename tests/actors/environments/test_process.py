"""A synchronous environment has a process of its own: whatever it does, the event loop lives on and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from child_processes import gone, read_pid

from actors.environments.base import Action, Observation
from actors.environments.process import EnvironmentProcess
from actors.environments.world import ProcessEnded, RaisedInside

T = TypeVar("T")
ROOT = Path(__file__).parents[3]
LONG_S = 60.0

pytestmark = pytest.mark.usefixtures("worlds")


def with_process(body: Callable[[EnvironmentProcess], Awaitable[T]]) -> T:
    async def main() -> T:
        process = EnvironmentProcess("worlds:Plain", {"greeting": "hi"})
        try:
            return await body(process)
        finally:
            await process.discard()

    before = psutil.Process().children()
    result = asyncio.run(main())
    assert psutil.Process().children() == before
    return result


def content(observation: Observation) -> str:
    return str(observation.messages[0]["content"])


def test_an_episode_says_and_takes_what_the_environment_does() -> None:
    async def body(process: EnvironmentProcess) -> None:
        assert content(await process.reset({}, LONG_S)) == "hi"
        first = await process.step(Action("go on"), LONG_S)
        assert (content(first.observation), first.reward, first.done) == ("go on", 1.0, False)
        assert first.info["pid"] != os.getpid()
        assert (await process.step(Action("done"), LONG_S)).done

    with_process(body)


def test_a_process_serves_the_next_episode_with_a_new_environment() -> None:
    async def body(process: EnvironmentProcess) -> None:
        steps = []
        for _ in range(3):
            await process.reset({}, LONG_S)
            steps.append(await process.step(Action("done"), LONG_S))
            assert await process.end(LONG_S, reuse=True) == ""
            assert process.alive
        assert [step.reward for step in steps] == [1.0, 1.0, 1.0]
        assert len({step.info["pid"] for step in steps}) == 1
        assert await process.end(LONG_S, reuse=False) == ""
        assert not process.alive

    with_process(body)


def test_a_step_over_its_time_is_killed_though_it_holds_the_interpreter(tmp_path: Path) -> None:
    async def body(process: EnvironmentProcess) -> None:
        await process.reset({"note": str(tmp_path / "pid")}, LONG_S)
        with pytest.raises(TimeoutError):
            await process.step(Action("spin"), 2.0)
        assert not process.alive
        assert await process.end(LONG_S, reuse=True) == ""

    with_process(body)
    assert gone(read_pid(tmp_path / "pid"))


def test_programs_that_the_environment_started_end_with_it(tmp_path: Path) -> None:
    async def body(process: EnvironmentProcess) -> None:
        await process.reset({"note": str(tmp_path / "pid")}, LONG_S)
        with pytest.raises(TimeoutError):
            await process.step(Action("program"), 2.0)

    with_process(body)
    assert gone(read_pid(tmp_path / "pid"))


def test_a_cancelled_step_kills_the_process(tmp_path: Path) -> None:
    async def body(process: EnvironmentProcess) -> None:
        await process.reset({"note": str(tmp_path / "pid")}, LONG_S)
        step = asyncio.create_task(process.step(Action("spin"), LONG_S))
        await asyncio.to_thread(read_pid, tmp_path / "pid")
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert not process.alive

    with_process(body)
    assert gone(read_pid(tmp_path / "pid"))


def test_an_exception_arrives_with_the_users_traceback_and_the_process_lives() -> None:
    async def body(process: EnvironmentProcess) -> str:
        await process.reset({}, LONG_S)
        with pytest.raises(RaisedInside) as caught:
            await process.step(Action("raise"), LONG_S)
        assert process.alive
        return str(caught.value)

    text = with_process(body)
    assert text.startswith("KeyError: 'no such key'\n")
    assert 'inner["no such key"]' in text
    assert "process_worker.py" not in text


@pytest.mark.parametrize(
    "deed, told",
    [("quit", "SystemExit: 5"), ("unreadable", "cannot go to another process"), ("nothing", "observation 17")],
)
def test_what_is_no_answer_is_told_as_the_environments_fault(deed: str, told: str) -> None:
    async def body(process: EnvironmentProcess) -> None:
        await process.reset({}, LONG_S)
        with pytest.raises(RaisedInside, match=told):
            await process.step(Action(deed), LONG_S)

    with_process(body)


@pytest.mark.parametrize("deed, told", [("exit", "exit code 3"), ("crash", "killed by SIGSEGV")])
def test_a_process_that_ends_is_an_error_that_says_how_and_a_new_one_takes_its_place(deed: str, told: str) -> None:
    async def body(process: EnvironmentProcess) -> None:
        await process.reset({}, LONG_S)
        with pytest.raises(ProcessEnded, match=told):
            await process.step(Action(deed), LONG_S)
        assert content(await process.reset({}, LONG_S)) == "hi"

    with_process(body)


def test_a_task_that_cannot_go_to_another_process_is_an_error() -> None:
    async def body(process: EnvironmentProcess) -> None:
        with pytest.raises(RaisedInside, match="reset was given what cannot go to another process"):
            await process.reset({"id": lambda: 0}, LONG_S)

    with_process(body)


@pytest.mark.parametrize("deed, told", [("raise", "close failed: KeyError"), ("sleep", "close took more than 0.2 s")])
def test_a_close_that_fails_ends_the_process(deed: str, told: str) -> None:
    async def body(process: EnvironmentProcess) -> None:
        await process.reset({"close": deed}, LONG_S)
        assert (await process.end(0.2 if deed == "sleep" else LONG_S, reuse=True)).startswith(told)
        assert not process.alive

    with_process(body)


def test_a_process_imports_nothing_heavy_by_itself() -> None:
    async def body(process: EnvironmentProcess) -> str:
        await process.reset({}, LONG_S)
        return content((await process.step(Action("heavy"), LONG_S)).observation)

    assert with_process(body) == "[]"


def test_a_process_ends_with_its_parent_even_while_it_holds_the_interpreter(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from actors.environments.base import Action
from actors.environments.process import EnvironmentProcess
async def main():
    process = EnvironmentProcess("worlds:Plain", {{}})
    await process.reset({{"note": {str(note)!r}}}, 300)
    await process.step(Action("spin"), 300)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    worker = read_pid(note)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=20)
    assert gone(worker)
