"""Rewards: plain functions of a Sample, several and weighted, that can neither block nor kill the run.

    RewardClient ──► RewardActor ──► RewardScorer ──► RewardProcess: actors/reward_worker.py

`score` waits for a free worker, then for the slowest function; every call is under `timeout_s`. A function
that is not done in time is killed with its worker, and a new worker takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import pkgutil
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from monarch.actor import Actor, concurrent_endpoint, endpoint

from actors.reward_process import RewardProcess
from actors.reward_worker import Sample, evaluate
from forge.errors import ConfigError
from forge.mesh import within

__all__ = [
    "RewardActor",
    "RewardClient",
    "RewardConfig",
    "RewardFunction",
    "RewardScorer",
    "Sample",
    "Scores",
]

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass
class RewardFunction:
    """One reward function and its weight."""

    path: str
    """module:function; takes a Sample, returns a finite number."""
    weight: float = 1.0
    """Factor of its value in the total reward."""


@dataclass
class RewardConfig:
    """What an episode is worth."""

    functions: list[RewardFunction] = field(default_factory=list)
    """The total reward is their weighted sum, and the reward model's."""
    model: str = ""
    """A reward model, with the policy's tokenizer: a sequence classifier with one label, in a folder or on the hub.
    Its score after the last token of an episode is added to the reward. Empty: none."""
    model_weight: float = 1.0
    """Factor of that score in the total reward."""
    model_turns: bool = False
    """Score the last token of each turn instead, as a process-reward model does: the turn's tokens get that reward,
    which loss.token_advantages must read."""
    timeout_s: float = 10.0
    """Seconds that a function may take over the samples of one group. One that takes longer is asked for each
    sample alone, under the same limit."""
    timeout_reward: float = 0.0
    """Value of a function for a sample that alone takes longer than timeout_s."""
    workers: int = 1
    """Processes that score; one runs one function at a time."""

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit; imports the functions."""
        if not self.functions and not self.model:
            raise ConfigError(
                "reward.functions is empty; give at least one, such as [{path: apps.grpo.tasks:last_number}], "
                "or a reward.model"
            )
        if not math.isfinite(self.model_weight):
            raise ConfigError(f"reward.model_weight must be finite, got {self.model_weight}")
        if self.model_turns and not self.model:
            raise ConfigError("reward.model_turns is true, reward.model empty; give the model that scores turns")
        if self.workers < 1:
            raise ConfigError(f"reward.workers must be >= 1, got {self.workers}")
        if not self.timeout_s > 0:
            raise ConfigError(f"reward.timeout_s must be > 0, got {self.timeout_s}")
        for function in self.functions:
            if not math.isfinite(function.weight):
                raise ConfigError(f"the weight of {function.path} must be finite, got {function.weight}")
        paths = [function.path for function in self.functions]
        for path in paths:
            _check_function(path)
            if paths.count(path) > 1:
                raise ConfigError(f"reward.functions names {path} {paths.count(path)} times; add up its weights")

    def names(self) -> list[str]:
        """What each function is called in `Scores.parts`: its own name if unique, else its path."""
        short = [function.path.partition(":")[2] for function in self.functions]
        return [s if short.count(s) == 1 else f.path for s, f in zip(short, self.functions, strict=True)]


def _check_function(path: str) -> None:
    remedy = "give module:function, a plain function of one Sample in an importable module"
    if path.count(":") != 1 or path.startswith("__main__:"):
        raise ConfigError(f"reward.functions has {path!r}, which a worker process cannot import; {remedy}")
    try:
        function = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"reward.functions has {path!r}, which cannot be imported ({error}); {remedy}") from error
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if callable(function) else f"a {type(function).__name__}"
        raise ConfigError(f"reward.functions has {path!r}, which is {kind}; {remedy}")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"reward.functions has {path!r}, which cannot take one Sample ({error}); {remedy}") from error
    except ValueError:
        return  # a builtin without a signature


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


class RewardActor(Actor):
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
        await self._call("start its workers", self._mesh.setup.call_one())

    async def score(self, samples: list[Sample]) -> Scores:
        """See `RewardScorer.score`."""
        return await self._call(f"score {len(samples)} samples", self._mesh.score.call_one(samples))

    async def shutdown(self) -> None:
        """See `RewardScorer.close`."""
        await self._call("end its workers", self._mesh.shutdown.call_one())

    async def _call(self, what: str, call: Awaitable[T]) -> T:
        return await within(self._answer_s, f"the reward actor to {what}", call)
