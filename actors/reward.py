"""Rewards: plain functions of a Sample, several and weighted, that can neither block nor kill the run.

    RewardClient ──► RewardActor ──► RewardScorer ──► RewardProcess: actors/reward_worker.py

`score` waits for a free worker, then for the slowest function; every call is under `timeout_s`. A function
that is not done in time is killed with its worker, and a new worker takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pkgutil
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from monarch.actor import concurrent_endpoint, endpoint

from actors.reward_config import RewardConfig, RewardFunction, RewardPool
from actors.reward_process import RewardProcess
from actors.reward_worker import Sample, evaluate
from forge.lasting import Beating, ask, end, set_up
from forge.mesh import within
from forge.telemetry import span

__all__ = [
    "RewardActor",
    "RewardClient",
    "RewardConfig",
    "RewardFunction",
    "RewardPool",
    "RewardScorer",
    "Sample",
    "Scores",
]

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Rewards of n samples, in their order."""

    total: list[float]
    """Weighted sum of the parts, `[n]`."""
    parts: dict[str, list[float]]
    """Value of each function before its weight, `[n]` each."""
    timeouts: int = 0
    """How many values are `timeout_reward` because the function was too slow."""


class RewardScorer:
    """Scores samples in worker processes. Belongs to one event loop; works without Monarch.

    `inline` runs the functions in the caller's thread instead, without time limit, so that a debugger works
    in them. Calls: `setup` (workers otherwise start when needed), `score` any number at once, `close`.
    """

    def __init__(self, config: RewardConfig, *, inline: bool = False) -> None:
        """Raises ConfigError, see `RewardConfig.validate`; starts no process."""
        config.validate()
        self._config = config
        self._inline = inline
        paths = [function.path for function in config.functions]
        self._workers = [] if inline else [RewardProcess(paths) for _ in range(config.workers)]
        # Last in, first out: a worker that runs is taken before one that would have to start.
        self._free: asyncio.LifoQueue[RewardProcess] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)

    async def __aenter__(self) -> RewardScorer:
        await self.setup()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def setup(self) -> None:
        """Starts every worker and has it import the functions. RewardError when one of them cannot be."""
        await asyncio.gather(*(self._start_one() for _ in self._workers))

    async def score(self, samples: Sequence[Sample]) -> Scores:
        """Rewards of `samples`, best those of one group.

        RewardError when a function raises, gives no finite number, or takes its process down; it names the
        function, and has the user's traceback.
        """
        paths = [function.path for function in self._config.functions]
        # All to their end, whatever one of them does: a cancelled call costs its worker.
        results = await asyncio.gather(*(self._call(p, list(samples)) for p in paths), return_exceptions=True)
        values: list[list[float | None]] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            values.append(result)
        late = self._config.timeout_reward
        parts = [[late if value is None else value for value in row] for row in values]
        weights = [function.weight for function in self._config.functions]
        columns = list(zip(*parts, strict=True)) or [()] * len(samples)
        total = [float(sum(w * v for w, v in zip(weights, column, strict=True))) for column in columns]
        timeouts = sum(row.count(None) for row in values)
        return Scores(total, dict(zip(self._config.names(), parts, strict=True)), timeouts)

    async def close(self) -> None:
        """Ends the workers; calls in progress raise RewardError. May be called twice."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def _call(self, path: str, samples: list[Sample]) -> list[float | None]:
        """One value a sample; None where the function alone was too slow for it."""
        if self._inline:
            return [*evaluate(path, pkgutil.resolve_name(path), samples)]
        limit = self._config.timeout_s
        try:
            async with self._worker() as worker:
                return [*await worker.call(path, samples, limit)]
        except TimeoutError:
            if len(samples) == 1:
                _log.warning("reward %s took more than %g s for prompt %r", path, limit, samples[0].prompt[:200])
                return [None]
        # One slow sample must not decide over the others.
        alone = await asyncio.gather(*(self._call(path, [sample]) for sample in samples))
        return [value for values in alone for value in values]

    async def _start_one(self) -> None:
        async with self._worker() as worker:
            await worker.start()

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[RewardProcess]:
        """Waits for a free worker; every holder is under a time limit."""
        worker = await self._free.get()
        try:
            yield worker
        finally:
            self._free.put_nowait(worker)


class RewardActor(Beating):
    """One process, one RewardScorer."""

    def __init__(self, config: RewardConfig, inline: bool = False) -> None:
        self._scorer = RewardScorer(config, inline=inline)

    @concurrent_endpoint
    async def setup(self) -> None:
        """See `RewardScorer.setup`."""
        await self._scorer.setup()

    @concurrent_endpoint
    async def score(self, samples: list[Sample]) -> Scores:
        """See `RewardScorer.score`."""
        with span("rewards", "score", samples=len(samples)):
            return await self._scorer.score(samples)

    @endpoint
    async def shutdown(self) -> None:
        """See `RewardScorer.close`."""
        await self._scorer.close()


class RewardClient:
    """`RewardScorer`'s calls over a mesh of one RewardActor; a RewardError arrives as itself."""

    def __init__(self, mesh: Any, *, answer_s: float = 1200.0) -> None:
        """`answer_s`: seconds after which an actor that says nothing is given up, busy workers included."""
        self._mesh = mesh
        self._answer_s = answer_s

    async def setup(self) -> None:
        """See `RewardScorer.setup`."""
        await self._call("start its workers", set_up(self._mesh, lambda mesh: mesh.setup.call_one()))

    async def score(self, samples: list[Sample]) -> Scores:
        """See `RewardScorer.score`."""
        scoring: Awaitable[Scores] = ask(self._mesh, lambda mesh: mesh.score.call_one(samples))
        return await self._call(f"score {len(samples)} samples", scoring)

    async def shutdown(self) -> None:
        """See `RewardScorer.close`."""
        await self._call("end its workers", end(self._mesh, lambda mesh: mesh.shutdown.call_one()))

    async def _call(self, what: str, call: Awaitable[T]) -> T:
        return await within(self._answer_s, f"the reward actor to {what}", call)
