"""A small world for tests: guess a number; what goes wrong is in the task."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from actors.environments.base import Action, Observation, Step


class Guessing:
    """Says higher or lower. `task`: `number`; `slow_s` of a turn, a turn to `fail_at`, `fail_first` resets."""

    tries: ClassVar[dict[str, int]] = {}
    open = 0

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        self._task, self._turn = task, 0
        Guessing.open += 1
        name = str(task.get("id"))
        Guessing.tries[name] = Guessing.tries.get(name, 0) + 1
        if Guessing.tries[name] <= task.get("fail_first", 0):
            raise RuntimeError(f"reset {Guessing.tries[name]} of {name} fails")
        return Observation([{"role": "user", "content": "guess"}])

    async def step(self, action: Action) -> Step:
        self._turn += 1
        await asyncio.sleep(self._task.get("slow_s", 0.0))
        if self._turn == self._task.get("fail_at"):
            raise RuntimeError("the world broke")
        said = int(action.text) if action.text.isdigit() else -1
        number = self._task["number"]
        if said == number:
            return Step(Observation([]), 1.0, done=True, info={"turns": self._turn})
        hint = "higher" if said < number else "lower"
        return Step(Observation([{"role": "user", "content": hint}]), -0.1, done=False)

    async def close(self) -> None:
        Guessing.open -= 1


class Calling:
    """Wants two tool calls, one after the other, and tells what came of each."""

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        self._ids: list[str] = []
        return Observation(
            [{"role": "user", "content": "use it"}], tools=[{"type": "function", "function": {"name": "f"}}]
        )

    async def step(self, action: Action) -> Step:
        if action.error or not action.tool_calls:
            return Step(Observation([{"role": "user", "content": f"no call: {action.error}"}]), -1.0, done=False)
        self._ids.append(action.tool_calls[0]["id"])
        result = {"role": "tool", "content": "5", "tool_call_id": self._ids[-1]}
        return Step(Observation([result]), 0.5, done=len(self._ids) == 2, info={"ids": self._ids})

    async def close(self) -> None:
        pass
