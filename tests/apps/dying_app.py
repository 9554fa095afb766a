"""apps/grpo/main.py whose process is killed at a certain point: DEATH is "module:Class.method when count".

`when` is before or after the call, or during it: some milliseconds after it has begun. `count` is the first call that
counts, in this process.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import itertools
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, when: str, count: int) -> None:
    """Puts the death into the method or function that `point` names."""
    module, _, path = point.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    wrapped, calls = getattr(owner, name), itertools.count(1)

    def on_entry() -> bool:
        now = next(calls) >= count
        if now and when == "before":
            die()
        if now and when == "during":
            threading.Timer(0.01, die).start()
        return now

    @functools.wraps(wrapped)
    async def dying_coroutine(*args: Any, **kwargs: Any) -> Any:
        now = on_entry()
        result = await wrapped(*args, **kwargs)
        if now:
            if when == "during":
                await asyncio.sleep(1.0)
            die()
        return result

    @functools.wraps(wrapped)
    def dying_function(*args: Any, **kwargs: Any) -> Any:
        now = on_entry()
        result = wrapped(*args, **kwargs)
        if now:
            die()
        return result

    setattr(owner, name, dying_coroutine if inspect.iscoroutinefunction(wrapped) else dying_function)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    point, when, count = os.environ["DEATH"].split()
    arm(point, when, int(count))
    runpy.run_path(str(ROOT / "apps" / "grpo" / "main.py"), run_name="__main__")
