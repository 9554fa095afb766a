"""One worker process of the rewards, as its parent sees it; `actors/reward_worker.py` is the other side."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence

from actors.reward_worker import Sample
from actors.worker_process import START_DEADLINE_S, WorkerGone, WorkerProcess
from forge.errors import RewardError


class _Killed(RewardError):
    """The process was ended by a signal."""


class RewardProcess:
    """Runs one function at a time. Starts when first asked, anew after a time-out, a crash, a cancelled call."""

    def __init__(self, paths: Sequence[str]) -> None:
        """`paths` of the functions that it imports when it starts, module:function each."""
        self._paths = list(paths)
        self._worker = WorkerProcess("actors.reward_worker")
        self._started = False

    async def start(self) -> None:
        """Starts the process and has it import its functions, so that no call pays for that.

        RewardError when it cannot, or takes longer than `START_DEADLINE_S` over one of them.
        """
        if self._worker.closed:
            raise RewardError("the rewards are closed; score before shutdown")
        if self._started:
            return
        try:
            await self._worker.start()
        except WorkerGone as error:
            raise RewardError("the rewards are closed; score before shutdown") from error
        self._started = True
        for path in self._paths:
            try:
                await self._ask(path, [], START_DEADLINE_S)
            except TimeoutError as error:
                raise RewardError(
                    f"{path} was not imported within {START_DEADLINE_S:g} s of its worker's start"
                ) from error

    async def call(self, path: str, samples: list[Sample], timeout_s: float) -> list[float]:
        """Values of the function at `path`, one a sample.

        TimeoutError after `timeout_s`; RewardError with the user's traceback when the function raised, or
        with the exit code when it took its process down, twice where that was by a signal.
        """
        await self.start()
        try:
            return await self._ask(path, samples, timeout_s)
        except _Killed:
            await self.start()  # it may have been anybody, and for any reason: once more
            return await self._ask(path, samples, timeout_s)

    async def _ask(self, path: str, samples: list[Sample], timeout_s: float) -> list[float]:
        try:
            request = pickle.dumps((path, samples))
        except Exception as error:
            raise RewardError(f"the samples for {path} cannot go to another process: {error}") from error
        try:
            answer = json.loads(await self._worker.ask(request, timeout_s))
        except WorkerGone as error:
            self._started = False
            if self._worker.closed:
                raise RewardError(f"the rewards were closed while {path} ran") from error
            prompt = f"\n  prompt {samples[0].prompt[:200]!r}" if samples else ""
            kind = _Killed if error.killed else RewardError
            raise kind(f"{path} ended its worker process ({error.status}){prompt}") from error
        except BaseException:
            self._started = False
            raise
        if "error" in answer:
            raise RewardError(answer["error"])
        return [float(value) for value in answer["values"]]

    async def close(self) -> None:
        """Ends the process; a call in progress raises RewardError. May be called twice."""
        await self._worker.close()
