"""Signals and exit codes of the controller, without Monarch."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from forge.controller import Controller, Stopping

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _restore_signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    asyncio.set_event_loop(None)


def drive(main: Callable[[Stopping], Awaitable[object]]) -> int:
    controller = Controller(main)
    try:
        return controller.drive()
    finally:
        controller._loop.close()


def press(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def test_a_coroutine_that_returns_exits_with_0() -> None:
    async def main(stopping: Stopping) -> None:
        assert not stopping.is_set()

    assert drive(main) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_lets_the_coroutine_finish(number: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    steps = []

    async def main(stopping: Stopping) -> None:
        press(number)
        await asyncio.wait_for(stopping.wait(), 10)
        await asyncio.sleep(0.01)
        steps.append("checkpoint")

    assert drive(main) == code
    assert steps == ["checkpoint"]
    assert "stopping after this step; press Ctrl-C again to stop now" in capsys.readouterr().err


def test_the_second_press_cancels_the_coroutine_which_may_still_clean_up() -> None:
    steps = []

    async def main(stopping: Stopping) -> None:
        press()
        await asyncio.wait_for(stopping.wait(), 10)
        try:
            threading.Timer(0.4, press).start()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            steps.append("cleaned up")

    assert drive(main) == 130
    assert steps == ["cleaned up"]


def test_one_press_that_arrives_twice_counts_once() -> None:
    steps = []

    async def main(stopping: Stopping) -> None:
        press()
        press(signal.SIGTERM)
        await asyncio.wait_for(stopping.wait(), 10)
        await asyncio.sleep(0.01)
        steps.append("finished")

    assert drive(main) == 130
    assert steps == ["finished"]


def test_during_start_up_one_press_is_enough() -> None:
    async def main(stopping: Stopping) -> None:
        with stopping.at_once():
            press()
            await asyncio.sleep(60)

    assert drive(main) == 130


def test_the_third_press_ends_a_coroutine_that_will_not_end() -> None:
    program = """
import asyncio, os, signal, time
from forge.controller import Controller

async def main(stopping):
    print("ready", flush=True)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            print("cancelled", flush=True)

Controller(main).drive()
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "cancelled\n"
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    process.stdout.close()


def test_an_error_is_printed_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(_stopping: Stopping) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_fail())

    assert drive(main) == 1
    error = capsys.readouterr().err
    assert [line for line in error.splitlines() if line.startswith("ZeroDivisionError")] == [
        "ZeroDivisionError: nothing to divide by"
    ]
    assert error.count("Traceback") == 1


async def _fail() -> None:
    raise ZeroDivisionError("nothing to divide by")


def test_an_error_after_a_signal_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(stopping: Stopping) -> None:
        press()
        await asyncio.wait_for(stopping.wait(), 10)
        await _fail()

    assert drive(main) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_an_explicit_exit_keeps_its_code() -> None:
    async def main(_stopping: Stopping) -> None:
        raise SystemExit(7)

    assert drive(main) == 7


def test_tasks_left_behind_are_cancelled_and_hung_threads_are_not_waited_for() -> None:
    steps = []
    release = threading.Event()

    async def background() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            steps.append("cancelled")

    async def main(_stopping: Stopping) -> None:
        tasks.append(asyncio.create_task(background()))
        tasks.append(asyncio.get_running_loop().run_in_executor(None, release.wait, 60))
        await asyncio.sleep(0)

    tasks: list[asyncio.Future[object]] = []
    assert drive(main) == 0
    assert steps == ["cancelled"]
    assert not release.is_set()
    release.set()
