"""Calls to generators that die: nothing is lost, nothing is sampled twice, nobody waits for the dead.

Stand-ins for engines, which die when a test says so, behind the real routing and the real weight sync.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from actors.generator import GeneratorConfig, Generators, Progress, Replica
from actors.vllm_engine import Completion
from apps.grpo.spawn import guard_replica
from forge.errors import ActorFailed, DeadlineExceeded
from forge.supervision import FailurePolicy, Guard
from weightsync.config import WeightSyncConfig
from weightsync.sync import WeightSync

DEADLINE_S = 30.0
LENGTH = 6
CONFIG = GeneratorConfig(max_new_tokens=LENGTH, max_num_seqs=4, start_timeout_s=0.1)


def token(seed: int, place: int) -> int:
    """What the stand-ins sample: a law of the seed, as an engine's tokens are."""
    return (7 * seed + place) % 101


class SupervisionError(Exception):
    """Called as Monarch's own is."""


class _Endpoint:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.call_one = call


class Engine:
    """The mesh of one replica: samples a token of each completion whenever `tick` is called."""

    def __init__(self) -> None:
        self.version, self.asked = 0, list[dict[int, int]]()
        self.running: dict[str, list[Completion]] = {}
        self.told: dict[str, list[int]] = {}
        self.ticked, self.broken = asyncio.Condition(), False
        self.generate, self.progress = _Endpoint(self._generate), _Endpoint(self._progress)
        self.connect, self.stage, self.flip = (_Endpoint(c) for c in (self._connect, self._stage, self._flip))
        self.stages = asyncio.Event()
        self.stages.set()

    async def tick(self, count: int = 1) -> None:
        for _ in range(count):
            async with self.ticked:
                self.ticked.notify_all()
            for _ in range(5):
                await asyncio.sleep(0)

    async def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        limit: int | None,
        name: str,
        begun: Mapping[int, Completion],
        wanted: int,
    ) -> list[Completion]:
        self.asked.append({place: len(part.token_ids) for place, part in begun.items()})
        whole = [begun[p].after(0) if p in begun else Completion([], [], [], "abort") for p in range(len(prompts))]
        self.running[name], self.told[name] = whole, [len(part.token_ids) for part in whole]
        async with self.ticked:
            while any(len(part.token_ids) < LENGTH for part in whole):
                await self.ticked.wait()
                if self.broken:
                    raise SupervisionError("the actor is gone")
                for part, seed in zip(whole, seeds, strict=True):
                    part.token_ids.append(token(seed, len(part.token_ids)))
                    part.logprobs.append(-1.0)
                    part.versions.append(self.version)
        return whole

    async def _progress(self) -> list[Progress]:
        parts = []
        for name, whole in self.running.items():
            for place, (part, told) in enumerate(zip(whole, self.told[name], strict=True)):
                parts.append(Progress(name, place, told, part.after(told), ""))
            self.told[name] = [len(part.token_ids) for part in whole]
        return parts

    async def _connect(self, endpoint: Any, peer: str) -> list[dict[str, Any]]:
        return [{}]

    async def _stage(self, offer: Any) -> float:
        await self.stages.wait()
        return 0.0

    async def _flip(self, version: int) -> float:
        self.version = version
        return 0.0


class Scene:
    """Replicas that can be killed, on the event loop of `run`."""

    def __init__(self, count: int) -> None:
        self.reported: list[str] = []
        self.engines = [Engine() for _ in range(count)]
        self.replicas = [self.replica(f"generator_{i}", engine) for i, engine in enumerate(self.engines)]
        self.generators = Generators(self.replicas)

    def replica(self, name: str, engine: Engine) -> Replica:
        return Replica(engine, name, CONFIG, report=self.reported.append)

    def kill(self, index: int) -> None:
        self.generators.lose(self.replicas[index], "killed by a test")

    async def ask(self, name: str = "5", seeds: Sequence[int] = (1, 2)) -> list[Completion]:
        return await self.generators.generate([[3, 4]] * len(seeds), seeds, request_id=name)


def run(count: int, body: Callable[[Scene], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await body(Scene(count))

    asyncio.run(main())


def check(completions: Sequence[Completion], seeds: Sequence[int] = (1, 2)) -> None:
    assert [c.token_ids for c in completions] == [[token(seed, i) for i in range(LENGTH)] for seed in seeds]


async def begin(scene: Scene) -> asyncio.Task[list[Completion]]:
    asking = asyncio.create_task(scene.ask())
    await asyncio.sleep(0.01)
    return asking


def test_a_call_goes_to_another_replica_from_the_tokens_that_had_come() -> None:
    async def body(scene: Scene) -> None:
        asking = await begin(scene)
        await scene.engines[0].tick(2)
        assert len(await scene.generators.progress()) == 2
        await scene.engines[0].tick(1)  # of which nobody has heard
        scene.kill(0)
        await asyncio.sleep(0.01)
        assert scene.engines[1].asked == [{0: 2, 1: 2}]
        parts = await scene.generators.progress()
        assert [part.offset for part in parts] == [2, 2], "the journal goes on where it was"
        await scene.engines[1].tick(LENGTH)
        check(await asking)
        assert [replica.running for replica in scene.replicas] == [0, 0]
        assert not scene.reported

    run(2, body)


def test_with_no_replica_alive_a_call_waits_for_the_next_and_then_its_deadline_names_the_dead() -> None:
    async def body(scene: Scene) -> None:
        asking = await begin(scene)
        scene.kill(0)
        late = asyncio.create_task(scene.ask("6", (9,)))
        await asyncio.sleep(0.01)
        assert await scene.generators.progress() == []
        second = Engine()
        scene.generators.add(scene.replica("generator_0", second))
        await asyncio.sleep(0.01)
        assert second.asked == [{}, {}]
        await second.tick(LENGTH)
        check(await asking)
        check(await late, (9,))
        scene.generators.lose(scene.generators.replicas[0], "killed again")
        scene.generators._patience_s = 0.05
        with pytest.raises(DeadlineExceeded, match=r"a generator to serve again after generator_0 \(killed again\)"):
            await scene.ask()

    run(1, body)


def test_a_failed_call_is_news_of_a_death_and_other_errors_are_none() -> None:
    async def body(scene: Scene) -> None:
        asking = await begin(scene)
        scene.engines[0].broken = True
        await scene.engines[0].tick()
        await asyncio.sleep(0)
        scene.kill(0)  # the reason comes a little later than the error
        await asyncio.sleep(0.01)
        await scene.engines[1].tick(LENGTH)
        check(await asking)

        async def raises(*_: Any) -> None:
            raise ValueError("a prompt of no tokens")

        scene.engines[1].generate = _Endpoint(raises)
        with pytest.raises(ValueError, match="no tokens"):
            await scene.ask()
        assert not scene.replicas[1].lost

    run(2, body)


def test_who_wants_all_replicas_waits_for_the_successor_of_a_dead_one_or_for_its_end() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.generators.complete()
        for back in (True, False):
            scene.kill(1)
            waiting = asyncio.create_task(scene.generators.complete())
            await asyncio.sleep(0)
            assert not waiting.done()
            if back:
                scene.replicas[1] = scene.replica("generator_1", Engine())
                scene.generators.add(scene.replicas[1])
            else:
                scene.generators.give_up("generator_1")
            await waiting

    run(2, scenario)


def test_a_call_that_every_replica_dies_under_is_given_up() -> None:
    async def body(scene: Scene) -> None:
        asking = await begin(scene)
        for number in range(5):
            scene.generators.lose(scene.generators.replicas[0], f"death {number}")
            await asyncio.sleep(0.01)
            scene.generators.add(scene.replica("generator_0", Engine()))
            await asyncio.sleep(0.01)
        with pytest.raises(ActorFailed, match="generator_0 failed: death 0\n5 have died under the call 5"):
            await asking

    run(1, body)


class Source:
    """A trainer that publishes nothing but version numbers."""

    async def connect(self) -> Any:
        return Layout

    async def add_peer(self, peer: str, needed: Any) -> None: ...

    async def snapshot(self, version: int, buffer: int) -> float:
        return 0.0

    async def offer(self, version: int, buffer: int, base: int) -> Any:
        from weightsync.offer import FULL, Offer

        return Offer(version, buffer, FULL, -1, [1], [])

    async def send(self, peer: str, offer: Any) -> None: ...


class Layout:
    """What an endpoint says of itself."""

    nbytes, transport = 1, "memory"


Layout.layout = Layout  # type: ignore[attr-defined]


def test_a_dead_replica_holds_no_update_up_and_comes_back_at_the_newest_version_before_it_takes_calls() -> None:
    async def body(scene: Scene) -> None:
        sync, applied = WeightSync(Source(), scene.replicas, WeightSyncConfig(max_failures=1)), list[int]()
        news = asyncio.Event()

        async def on_applied(update: Any) -> None:
            applied.append(update.version)
            news.set()

        async def serves(version: int) -> None:
            while not applied or applied[-1] < version:
                news.clear()
                await news.wait()

        second = Engine()

        async def start() -> Replica:
            return scene.replica("generator_0", second)

        guard = Guard(FailurePolicy(on_failure="respawn"))
        guard.bind("generator", "generator_0", lambda mesh, reason: None)
        guard_replica(guard, scene.replicas[0], start, scene.generators, sync)
        await sync.connect()
        loop = asyncio.create_task(sync.run(on_applied))
        scene.engines[0].stages.clear()
        await sync.publish(1)
        await asyncio.sleep(0.01)
        assert applied == []
        guard.lost("killed by a test")  # in the middle of its update
        await serves(1)
        await sync.publish(2)
        await serves(2)
        second.stages.clear()
        reviving = asyncio.ensure_future(guard.revive())
        await asyncio.sleep(0.01)
        assert [r.name for r in scene.generators.replicas] == ["generator_1"], "it does not hold a version yet"
        second.stages.set()
        await reviving
        assert second.version == 2
        assert [r.name for r in scene.generators.replicas] == ["generator_1", "generator_0"]
        await sync.publish(3)
        await serves(3)
        assert (second.version, scene.engines[1].version, scene.engines[0].version) == (3, 3, 0)
        sync.close()
        await loop
        with pytest.raises(Exception, match="the weight loop has ended"):
            await guard.revive()

    run(2, body)


def test_while_nobody_is_alive_versions_are_released_and_a_death_during_the_join_ends_it() -> None:
    async def body(scene: Scene) -> None:
        sync, applied = WeightSync(Source(), scene.replicas, WeightSyncConfig()), list[int]()

        async def on_applied(update: Any) -> None:
            applied.append(update.version)

        second, third = Engine(), Engine()
        second.stages.clear()
        lives = iter((second, third))

        async def start() -> Replica:
            return scene.replica("generator_0", next(lives))

        guard = Guard(FailurePolicy(on_failure="respawn"))
        guard.bind("generator", "generator_0", lambda mesh, reason: None)
        guard_replica(guard, scene.replicas[0], start, scene.generators, sync)
        await sync.connect()
        loop = asyncio.create_task(sync.run(on_applied))
        guard.lost("killed by a test")
        for version in (1, 2, 3):
            await sync.publish(version)
            await asyncio.sleep(0.01)
        assert applied == [1, 2, 3], "slots come back: the trainer is not held up"
        reviving = asyncio.ensure_future(guard.revive())
        await asyncio.sleep(0.01)
        guard.lost("killed while it joined")
        with pytest.raises(ActorFailed, match="killed while it joined"):
            await reviving
        await guard.revive()
        assert third.version == 3
        sync.close()
        await loop

    run(1, body)
