"""A world to try the adviser on: it only waits, mostly a little and now and then ten times as long."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from typing import Any

from actors.environments.base import Action, Observation, Step


class Waiting:
    """`turns` turns of log-normal length, `median_s` seconds, the 95th percentile `tail` times that."""

    def __init__(self, turns: int = 4, median_s: float = 0.05, tail: float = 10.0) -> None:
        self._left, self._median_s = turns, median_s
        self._sigma = math.log(tail) / 1.6449

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return Observation([{"role": "user", "content": "Wait."}])

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self._median_s * random.lognormvariate(0.0, self._sigma))
        self._left -= 1
        return Step(Observation([{"role": "user", "content": "Wait."}]), 0.0, done=self._left == 0)

    async def close(self) -> None:
        pass
