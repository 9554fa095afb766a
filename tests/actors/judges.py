"""Judges for tests; what they do is in the sample."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from actors.reward import Sample


class Judge:
    """Gives `answer`; hangs for "hang", fails for "fail"."""

    most: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def __init__(self, plus: float = 0.0) -> None:
        self._plus, self._now = plus, 0

    async def score(self, sample: Sample) -> float:
        self._now += 1
        Judge.most = max(Judge.most, self._now)
        try:
            if sample.answer == "hang":
                await asyncio.Event().wait()
            if sample.answer == "fail":
                raise KeyError("no verdict")
            await asyncio.sleep(0)
            return float(sample.answer) + self._plus
        finally:
            self._now -= 1

    async def close(self) -> None:
        Judge.closed += 1


class Plain:
    """No judge: its method is not async."""

    def score(self, sample: Sample) -> float:
        return 0.0


def one(sample: Sample) -> float:
    return 1.0
