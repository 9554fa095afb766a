"""What `apps.bench.agentic` plays: latency profiles, arms, environments, and the simulation of the same scene.

All times are multiples of what the policy takes for one turn, `decode_s`. Every arm sees the same latencies, since the
i-th episode of a group draws from a generator of its own, as in `apps/advise/simulation.py`: that simulation of the
same scene, seed and steps is the ceiling of an arm.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from actors.environments.base import Action, Observation, Step
from apps.advise.simulation import Outcome, Scene, simulate
from apps.worlds.reversals import Reversals

SIGMA = math.log(10) / 1.6449
"""Of a log-normal distribution whose 95th percentile is ten times its median."""
Latency = Callable[[random.Random], float]
"""Of one environment turn, in policy turns; the median is 1 but for `none`."""
PROFILES: dict[str, Latency] = {
    "none": lambda rng: 0.0,
    "uniform": lambda rng: rng.uniform(0.0, 2.0),
    "heavy": lambda rng: rng.lognormvariate(0.0, SIGMA),
    "slow": lambda rng: 20.0 if rng.random() < 0.05 else 1.0,
}
"""uniform: up to two policy turns; heavy: log-normal; slow: one in twenty takes twenty times as long."""
SYNC, NAIVE = "sync", "naive"
BOUND_OF = {SYNC: 0, "bound 1": 1, "bound 2": 2, "bound 4": 4, NAIVE: 1}
"""Arms and their staleness bounds."""
HORIZONS: dict[str, tuple[int, int]] = {"1": (1, 1), "20": (20, 20), "20-50": (20, 50)}
"""Turns of an episode, drawn evenly."""
GROUP_SIZE, GROUPS = 4, 8
_MESSAGE = [{"role": "user", "content": "7"}]


@dataclass(frozen=True)
class Case:
    """One run: where, which arm, which draws. `steps` of which `warm_up` do not count; `decode_s` in seconds."""

    profile: str
    horizon: str
    arm: str
    seed: int
    steps: int
    warm_up: int
    decode_s: float
    replicas: int = 1
    places: int = GROUP_SIZE * GROUPS
    """Of one replica."""

    @property
    def bound(self) -> int:
        """Staleness, at most."""
        return BOUND_OF[self.arm]

    @property
    def name(self) -> str:
        """For files and progress."""
        return (
            f"{self.profile}-{self.horizon}-{self.arm.replace(' ', '')}-{self.replicas}x{self.places}"
            f"-{self.steps}x{self.decode_s:g}s-seed{self.seed}"
        )

    def scene(self) -> Scene:
        """What is simulated and what is played; seconds. The batch's episodes fill the places of one replica.

        Environments are as many as the largest bound can use, in every arm. A step takes 0.4 times as long as it
        takes to decode an episode, weights half a policy turn.
        """
        least, most = HORIZONS[self.horizon]
        latency, decode_s = PROFILES[self.profile], self.decode_s
        return Scene(
            turns=least if least == most else lambda rng: rng.randint(least, most),
            latency_s=lambda rng: decode_s * latency(rng),
            decode_s=lambda rng: decode_s,
            step_s=0.4 * decode_s * (least + most) / 2,
            sync_s=0.5 * decode_s,
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS,
            environments=GROUP_SIZE * GROUPS * (max(BOUND_OF.values()) + 1),
            places=self.replicas * self.places,
        )

    def ceiling(self) -> Outcome:
        """What this arm would reach if nothing but decoding, latency, steps and weight sync took time."""
        options: dict[str, Any] = {"steps": self.steps, "warm_up": self.warm_up, "seed": self.seed}
        return simulate(self.scene(), self.bound, **options, barrier=self.arm == NAIVE)


@dataclass
class Waits:
    """The latencies of a run, in the order in which the simulation draws them."""

    scene: Scene
    seed: int
    begun: Counter[int] = field(default_factory=Counter)
    """Episodes of each group so far."""

    def episode(self, group: int) -> tuple[float, list[float]]:
        """Seconds of the reset and of each turn of the group's next episode."""
        scene, place = self.scene, self.begun[group]
        self.begun[group] += 1
        rng = random.Random(f"{self.seed}/{group}/{place}")
        reset_s, turns = scene.reset_s(rng), scene.turns
        latencies = []
        for _ in range(turns if isinstance(turns, int) else turns(rng)):
            scene.decode_s(rng)
            latencies.append(scene.latency_s(rng))
        return reset_s, latencies


class Waiting:
    """An environment that only waits; `task["group"]` is the number of its group."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """Draws the episode."""
        reset_s, self._left = self._waits.episode(task["group"])
        await asyncio.sleep(reset_s)
        return Observation(_MESSAGE)

    async def step(self, action: Action) -> Step:
        """One turn."""
        await asyncio.sleep(self._left.pop(0))
        return Step(Observation(_MESSAGE), 0.0, done=not self._left)

    async def close(self) -> None:
        """Nothing is held."""


class SlowReversals(Reversals):
    """The world that `tiny` learns in, each answer of which takes as long as `profile` says; `unit_s` are seconds.

    Equal seeds give the n-th episode of a task the same latencies in every run.
    """

    _begun: ClassVar[Counter[str]] = Counter()

    def __init__(self, profile: str = "heavy", unit_s: float = 0.1, seed: int = 0) -> None:
        self._latency, self._unit_s, self._seed = PROFILES[profile], unit_s, seed

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """See `Reversals.reset`."""
        name = str(task["id"])
        self._rng = random.Random(f"{self._seed}/{name}/{self._begun[name]}")
        self._begun[name] += 1
        return await super().reset(task)

    async def step(self, action: Action) -> Step:
        """See `Reversals.step`."""
        await asyncio.sleep(self._unit_s * self._latency(self._rng))
        return await super().step(action)
