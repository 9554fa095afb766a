"""What stands for compute in `apps.bench.agentic`: a generator, a trainer and its weights that only sleep.

Everything around them is the project's own: `Generators` and its router, `WeightSync`, `Replay`, the pool, the loops.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import forge.channel
from actors.environments.base import Action, Observation, Step, Worlds
from actors.environments.episodes import EnvironmentRollout
from actors.environments.places import Places
from actors.generator import GeneratorConfig
from actors.generators import Replica
from actors.rollout import Rollout
from actors.trainer import StepResult
from actors.vllm_engine import Completion
from forge.data import Prompt
from weightsync.layout import make_layout
from weightsync.offer import Endpoint, Offer

TOKENS = 8
"""Of one answer."""
TOKEN = 1
"""Which the policy always says."""
_DEADLINE_S = 1e6
_METRICS = dict.fromkeys(("loss/policy", "loss/kl", "grad_norm", "ratio/mean", "ratio/clip_fraction"))


class _Called:
    """An endpoint of a mesh, without one."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self.call_one = call


class SleepingEngine:
    """The mesh of one replica: `places` sequences at once, each token `step_s` seconds, weights `sync_s` to arrive.

    With `holds` a sequence keeps its place until `let_go`, as an environment's turn inside the generation call does.
    """

    def __init__(self, places: int, step_s: float, sync_s: float, *, holds: bool = False) -> None:
        self.version = 0
        self.decoded_s = 0.0
        """By all places together."""
        self.tokens = 0
        self._places, self._step_s, self._sync_s = Places(places), step_s, sync_s
        self._held: set[asyncio.Task[Any] | None] | None = set() if holds else None
        self.generate, self.stage, self.flip = _Called(self._generate), _Called(self._stage), _Called(self._flip)
        self.connect, self.peak_memory, self.shutdown = _Called(self._nothing), _Called(self._zero), _Called(self._zero)

    def replica(self, name: str, places: int) -> Replica:
        """As the controller sees it."""
        return Replica(self, name, GeneratorConfig(max_num_seqs=places, request_timeout_s=_DEADLINE_S))

    def let_go(self) -> None:
        """The caller's task needs its place no longer."""
        if self._held is not None and asyncio.current_task() in self._held:
            self._held.remove(asyncio.current_task())
            self._places.give_back()

    async def _generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], limit: int, *_: Any
    ) -> list[Completion]:
        await self._places.take(_DEADLINE_S)
        version = self.version  # of the first token, the oldest that the answer has
        try:
            await asyncio.sleep(limit * self._step_s)
        finally:
            if self._held is None:
                self._places.give_back()
            else:
                self._held.add(asyncio.current_task())
        self.decoded_s += limit * self._step_s
        self.tokens += limit
        return [Completion([TOKEN] * limit, [-1.0] * limit, [version] * limit, "length")]

    async def _stage(self, offer: Offer) -> float:
        await asyncio.sleep(self._sync_s)
        return self._sync_s

    async def _flip(self, version: int) -> float:
        self.version = version
        return 0.0

    async def _nothing(self, *_: Any) -> list[Any]:
        return []

    async def _zero(self) -> int:
        return 0


class SleepingTrainer:
    """A `TrainerMesh`, and the source of its weights. `on_step` is called at the end of each step."""

    num_shards = 1

    def __init__(self, step_s: float, on_step: Callable[[], None]) -> None:
        self.version = 0
        self.trained_s = 0.0
        self._step_s, self._on_step = step_s, on_step

    async def step(self, handles: Sequence[Any]) -> StepResult:
        """Takes the batch and sleeps."""
        for handle in handles:
            forge.channel.take(handle)
        await asyncio.sleep(self._step_s)
        self.version += 1
        self.trained_s += self._step_s
        self._on_step()
        return StepResult(self.version, dict(_METRICS), 0)

    async def connect(self) -> Endpoint:
        """There are no weights."""
        return Endpoint("memory", make_layout([]), [], [], _DEADLINE_S)

    async def add_peer(self, peer: str, needed: Any) -> None:
        """Any."""

    async def remove_peer(self, peer: str) -> None:
        """Any."""

    async def snapshot(self, version: int, buffer: int) -> float:
        """Takes no time."""
        return 0.0

    async def offer(self, version: int, buffer: int, base: int) -> Offer:
        """Nothing but the version."""
        return Offer(version, buffer, "full", base, [0], [[0]])

    async def send(self, peer: str, offer: Offer) -> None:
        """Nothing."""

    async def stage_state(self, folder: str) -> None:
        """No checkpoint is due."""
        raise AssertionError("a run without checkpoints was asked for one")

    async def wait_state(self) -> None:
        """See `stage_state`."""


class Numbered:
    """Prompts whose task is the number of their group."""

    def __init__(self) -> None:
        self._next = 0

    def draw(self) -> Prompt:
        """The next one."""
        number, self._next = self._next, self._next + 1
        return Prompt(number, 0, "", [TOKEN], None, {"id": str(number), "group": number})

    def state_dict(self) -> Mapping[str, Any]:
        """Never asked for: there is no journal."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `state_dict`."""
        self._next = state["next"]


class HoldingWorlds:
    """Environments inside the generation call: a place in the generator is free when the environment has answered."""

    def __init__(self, worlds: Worlds, engine: SleepingEngine) -> None:
        self._worlds, self._engine = worlds, engine

    async def start(self, task: Mapping[str, Any]) -> tuple[str, Observation]:
        """See `Worlds.start`."""
        return await self._worlds.start(task)

    async def step(self, episode: str, action: Action) -> Step:
        """See `Worlds.step`."""
        try:
            return await self._worlds.step(episode, action)
        finally:
            self._engine.let_go()

    async def close(self, episode: str) -> None:
        """See `Worlds.close`."""
        await self._worlds.close(episode)


class WholeBatches:
    """A rollout that generates batch after batch: the groups of one begin when all of the one before have ended."""

    def __init__(self, rollout: EnvironmentRollout, groups_per_step: int) -> None:
        self._rollout, self._count = rollout, groups_per_step
        self._ended: defaultdict[int, int] = defaultdict(int)
        self._whole: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def __call__(self, *args: Any, group_id: int, **kwargs: Any) -> Rollout | None:
        """See `EnvironmentRollout`."""
        batch = group_id // self._count
        if batch:
            await self._whole[batch - 1].wait()
        found = await self._rollout(*args, group_id=group_id, **kwargs)
        self._ended[batch] += 1
        if self._ended[batch] == self._count:
            self._whole[batch].set()
        await self._whole[batch].wait()
        return found
