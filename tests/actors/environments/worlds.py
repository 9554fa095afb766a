"""Environments that tests run in pools and processes; what they do is in their task."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from actors.environments.base import Action, Observation, Step


def say(text: Any) -> Observation:
    return Observation([{"role": "user", "content": str(text)}])


class Plain:
    """Synchronous. `task["reset"]` and an action's text name one of the deeds below."""

    def __init__(self, greeting: str = "hello") -> None:
        self._greeting = greeting
        self._turns = 0

    def reset(self, task: Mapping[str, Any]) -> Observation:
        self._task = task
        self._do(task.get("reset", ""))
        return say(self._greeting)

    def step(self, action: Action) -> Step:
        self._turns += 1
        said = self._do(action.text)
        return Step(said or say(action.text), float(self._turns), action.text == "done", {"pid": os.getpid()})

    def close(self) -> None:
        self._do(self._task.get("close", ""))

    def _do(self, deed: str) -> Any:
        return getattr(self, f"_{deed}", lambda: None)()

    def _note(self) -> None:
        """Tells the test who is here."""
        Path(self._task["note"]).write_text(str(os.getpid()))

    def _spin(self) -> NoReturn:
        self._note()
        while True:
            pass

    def _sleep(self) -> None:
        time.sleep(2)

    def _program(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(self._task["note"]).write_text(str(child.pid))
        time.sleep(600)

    def _raise(self) -> None:
        inner: dict[str, int] = {}
        inner["no such key"]

    def _quit(self) -> NoReturn:
        sys.exit(5)

    def _exit(self) -> NoReturn:
        os._exit(3)

    def _crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def _unreadable(self) -> Any:
        return Observation([{"role": "user", "content": lambda: 0}])

    def _nothing(self) -> Any:
        return 17

    def _heavy(self) -> Observation:
        return say([name for name in ("torch", "monarch", "numpy", "transformers") if name in sys.modules])

    def _once(self) -> None:
        """Fails the first time that this note is asked for."""
        if not Path(self._task["note"]).exists():
            self._note()
            raise ValueError("the first try fails")


class Waiting:
    """Asynchronous, with the same deeds."""

    alive = 0
    closed = 0

    def __init__(self) -> None:
        cls = type(self)
        cls.alive += 1

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        self._task = task
        await self._do(task.get("reset", ""))
        return Observation(
            [{"role": "user", "content": "hello"}], [{"type": "function", "function": {"name": "search"}}]
        )

    async def step(self, action: Action) -> Step:
        await self._do(action.text)
        return Step(say(action.text), 1.0, action.text == "done")

    async def close(self) -> None:
        cls = type(self)
        cls.alive -= 1
        cls.closed += 1
        await self._do(self._task.get("close", ""))

    async def _do(self, deed: str) -> None:
        if deed == "hang":
            await asyncio.Event().wait()
        elif deed == "raise":
            raise KeyError("no such key")
        elif deed == "quit":
            sys.exit(5)
        elif deed == "stubborn":
            await stubborn(self._task["until"])
        elif deed == "time out":
            raise TimeoutError("the user's own")
        elif deed == "once" and not self._task["tried"]:
            self._task["tried"].append(True)
            raise ValueError("the first try fails")


async def stubborn(until: asyncio.Event) -> None:
    """Goes on until `until`, however often it is cancelled."""
    while not until.is_set():
        try:
            await until.wait()
        except asyncio.CancelledError:
            continue


class Mixed(Waiting):
    def close(self) -> None:  # type: ignore[override]
        """Of the other kind than the rest."""


class NoStep:
    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return say("")


class WrongArguments(Plain):
    def step(self) -> Step:  # type: ignore[override]
        raise NotImplementedError


def made_by_a_function() -> Plain:
    return Plain("made")


def silent_function():  # type: ignore[no-untyped-def]
    return Plain()


NOT_CALLABLE = 3
