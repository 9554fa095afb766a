"""Who scores which sample: the functions that score all, and pools that score the samples whose task names them.

    RewardPools ──► "" : RewardClient of reward.functions
                ──► "code": JudgeClient ──► JudgeActor ──► JudgePool ──► a user's judge
                ──► "format": RewardClient of the pool's functions

Each pool is an actor on a mesh of its own, with a number of samples at once and a time limit of its own. A call waits
for the pools of its own samples and for no other, so a judge that stalls delays only what it is to judge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from monarch.actor import concurrent_endpoint, endpoint

from actors.reward import RewardActor, RewardClient, RewardConfig, RewardFunction, RewardPool, Sample, Scores
from actors.reward_worker import finite
from forge.errors import ConfigError, RewardError, RewardTimeout
from forge.lasting import Beating, ask, end, set_up
from forge.mesh import within
from forge.registry import load
from forge.telemetry import span

T = TypeVar("T")
_MARGIN_S = 60.0
"""For a pool's actor to answer, on top of the limit of its samples."""

_log = logging.getLogger(__name__)


class Scorer(Protocol):
    """One pool, or its client."""

    async def score(self, samples: list[Sample]) -> Scores: ...

    async def shutdown(self) -> None: ...


class JudgePool:
    """A judge under limits: `concurrency` samples at once, each `timeout_s` at most. Belongs to one event loop."""

    def __init__(self, name: str, config: RewardPool) -> None:
        """name: of the pool, in errors and among the parts of a score."""
        self._name, self._config = name, config
        self._judge: Any = load(config.judge, f"reward.pools.{name}.judge")(**config.kwargs)
        self._places = asyncio.Semaphore(config.concurrency)

    async def score(self, samples: Sequence[Sample]) -> Scores:
        """One value a sample. Raises RewardTimeout, by policy, and RewardError where the judge fails."""
        values = await _all([self._one(sample) for sample in samples])
        late = self._config.timeout_reward
        part = [late if value is None else value for value in values]
        total = [self._config.weight * value for value in part]
        return Scores(total, {self._name: part}, values.count(None))

    async def shutdown(self) -> None:
        """Lets the judge close, if it has an async `close`."""
        if hasattr(self._judge, "close"):
            await self._judge.close()

    async def _one(self, sample: Sample) -> float | None:
        async with self._places:
            try:
                async with asyncio.timeout(self._config.timeout_s) as limit:
                    value = await self._judge.score(sample)
            except Exception as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    self._late(sample)
                    return None
                raise RewardError(f"reward pool {self._name}: {type(error).__name__}: {error}") from error
        return finite(value, f"reward pool {self._name}")

    def _late(self, sample: Sample) -> None:
        """Says so, or raises, by policy."""
        text = late(self._name, self._config, repr(sample.prompt[:200]))
        if self._config.on_timeout == "fail":
            raise RewardTimeout(text)
        _log.warning("%s", text)


def late(name: str, config: RewardPool, what: str) -> str:
    """What is said of a sample that took too long."""
    said = f"reward pool {name} took more than {config.timeout_s:g} s for {what}"
    if config.on_timeout == "value":
        return f"{said}, whose value is {config.timeout_reward:g} then; raise reward.pools.{name}.timeout_s"
    return f"{said}; raise reward.pools.{name}.timeout_s, or set its on_timeout to value"


class JudgeActor(Beating):
    """One process, one JudgePool."""

    def __init__(self, name: str, config: RewardPool) -> None:
        self._arguments = name, config
        self._pool: JudgePool | None = None

    @endpoint
    async def setup(self) -> None:
        """Makes the judge, on the loop that it works on."""
        self._pool = JudgePool(*self._arguments)

    @concurrent_endpoint
    async def score(self, samples: list[Sample]) -> Scores:
        """See `JudgePool.score`."""
        assert self._pool is not None, "setup comes first"
        with span("rewards", "judge", samples=len(samples)):
            return await self._pool.score(samples)

    @concurrent_endpoint
    async def shutdown(self) -> None:
        """See `JudgePool.shutdown`."""
        if self._pool is not None:
            await self._pool.shutdown()


class JudgeClient:
    """`JudgePool`'s calls over a mesh of one JudgeActor; its errors arrive as themselves."""

    def __init__(self, mesh: Any, name: str, config: RewardPool, *, answer_s: float) -> None:
        """answer_s: seconds after which an actor that says nothing is given up, samples of others before included."""
        self._mesh, self._name, self._config, self._answer_s = mesh, name, config, answer_s

    async def setup(self) -> None:
        """Makes the judge."""
        making = set_up(self._mesh, lambda mesh: mesh.setup.call_one())
        await within(self._answer_s, f"reward pool {self._name} to start", making)

    async def score(self, samples: list[Sample]) -> Scores:
        """See `JudgePool.score`."""
        what = f"reward pool {self._name} to score {len(samples)} samples"
        scoring: Awaitable[Scores] = ask(self._mesh, lambda mesh: mesh.score.call_one(samples))
        return await within(self._answer_s, what, scoring)

    async def shutdown(self) -> None:
        """See `JudgePool.shutdown`."""
        ending = end(self._mesh, lambda mesh: mesh.shutdown.call_one())
        await within(_MARGIN_S, f"reward pool {self._name} to end", ending)


class RewardPools:
    """All that scores samples, as a rollout sees it. Without any pool every reward is 0."""

    def __init__(
        self, everywhere: Scorer | None, pools: Mapping[str, Scorer], configs: Mapping[str, RewardPool]
    ) -> None:
        """`everywhere` scores every sample; of `pools` the one that the sample's task names."""
        self._everywhere, self._pools, self._configs = everywhere, dict(pools), dict(configs)

    def pool_of(self, metadata: Mapping[str, Any]) -> str:
        """The pool of a task; "" for none. Raises ConfigError where it names one that there is not."""
        name = metadata.get("reward")
        if name is None:
            return ""
        if name not in self._pools:
            names = ", ".join(self._pools) or "none"
            raise ConfigError(f"a task's metadata has reward {name!r}; reward.pools has {names}; name one of them")
        return str(name)

    def scores_turns(self, metadata: Mapping[str, Any]) -> bool:
        """Whether the task's pool scores turns, by `score_turn`, and not whole episodes."""
        name = self.pool_of(metadata)
        return bool(name) and self._configs[name].turns

    async def score(self, samples: list[Sample]) -> Scores:
        """What functions and pools say of `samples`, best those of one group; pools of turns are left out."""
        by_pool: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            name = self.pool_of(sample.metadata)
            if name and not self._configs[name].turns:
                by_pool.setdefault(name, []).append(place)
        calls = [self._ask(name, [samples[place] for place in places]) for name, places in by_pool.items()]
        scores, *pools = await _all([self._score_all(samples), *calls])
        for pool, places in zip(pools, by_pool.values(), strict=True):
            scores = _added(scores, pool, places)
        return scores

    async def score_turn(self, sample: Sample) -> float:
        """What the task's pool says of one turn: `prompt` is all that stood before it."""
        return (await self._ask(self.pool_of(sample.metadata), [sample])).total[0]

    async def shutdown(self) -> None:
        """Ends every pool."""
        everywhere = [self._everywhere] if self._everywhere else []
        await asyncio.gather(*(pool.shutdown() for pool in (*everywhere, *self._pools.values())))

    async def _score_all(self, samples: list[Sample]) -> Scores:
        return await self._everywhere.score(samples) if self._everywhere else Scores([0.0] * len(samples), {})

    async def _ask(self, name: str, samples: list[Sample]) -> Scores:
        config, scores = self._configs[name], await self._pools[name].score(samples)
        if scores.timeouts and config.on_timeout == "fail":
            raise RewardTimeout(late(name, config, f"{scores.timeouts} of {len(samples)} samples"))
        return scores


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All answers; where a call raises, its own error, once, and the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _added(scores: Scores, pool: Scores, places: Sequence[int]) -> Scores:
    """`scores` with those of a pool for the samples at `places`; parts are 0 for the others."""
    total, parts = list(scores.total), dict(scores.parts)
    for row, place in enumerate(places):
        total[place] += pool.total[row]
    for part, values in pool.parts.items():
        column = list(parts.get(part, [0.0] * len(total)))
        for row, place in enumerate(places):
            column[place] = values[row]
        parts[part] = column
    return Scores(total, parts, scores.timeouts + pool.timeouts)


Spawn = Callable[..., Awaitable[Any]]


async def start_rewards(config: RewardConfig, spawn: Spawn, *, inline: bool = False) -> RewardPools:
    """Spawns and sets up everything that `config` names; `spawn(role, actor class, *arguments)` gives a mesh.

    inline: functions run in their actor's thread, for a debugger.
    """
    calls: list[Coroutine[Any, Any, Scorer]] = [_start_pool(*named, spawn, inline) for named in config.pools.items()]
    if config.functions:
        calls.append(_start_functions("reward", config, spawn, inline=inline))
    started = await _all(calls)
    everywhere = started.pop() if config.functions else None
    return RewardPools(everywhere, dict(zip(config.pools, started, strict=True)), config.pools)


async def _start_functions(role: str, config: RewardConfig, spawn: Spawn, *, inline: bool) -> RewardClient:
    client = RewardClient(await spawn(role, RewardActor, config, inline=inline))
    await client.setup()
    return client


async def _start_pool(name: str, pool: RewardPool, spawn: Spawn, inline: bool) -> Scorer:
    role = f"reward_{name}"
    if not pool.judge:
        weighted = [RewardFunction(f.path, f.weight * pool.weight) for f in pool.functions]
        config = RewardConfig(
            weighted, timeout_s=pool.timeout_s, timeout_reward=pool.timeout_reward, workers=pool.concurrency
        )
        return await _start_functions(role, config, spawn, inline=inline)
    client = JudgeClient(
        await spawn(role, JudgeActor, name, pool), name, pool, answer_s=20 * pool.timeout_s + _MARGIN_S
    )
    await client.setup()
    return client
