"""Calls to generators that die: nothing is lost, nothing is sampled twice, nobody waits for the dead.

Stand-ins for engines, which die when a test says so, behind the real routing and the real weight sync.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.generator import GeneratorConfig, Progress
from actors.generators import Generators, Replica
from actors.vllm_engine import Completion, EngineOptions, Sampling, VllmEngine
from apps.grpo.fleet import Fleet
from forge.errors import ActorFailed, DeadlineExceeded, WeightSyncError
from forge.supervision import FailurePolicy, Guard, Supervisor
from weightsync.config import WeightSyncConfig
from weightsync.sync import WeightSync

DEADLINE_S = 30.0
POLICY = FailurePolicy(on_failure="respawn")
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
        self.said_goodbye, self.shutdown = False, _Endpoint(self._shutdown)
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

    async def _shutdown(self) -> None:
        self.said_goodbye = True

    async def _connect(self, endpoint: Any, peer: str) -> list[dict[str, Any]]:
        return [{}]

    async def _stage(self, offer: Any) -> float:
        await self.stages.wait()
        if self.broken:
            raise SupervisionError("the actor is gone")
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


class Cluster:
    """Begins and ends replicas as `forge.mesh.Cluster` does, without processes."""

    def __init__(self) -> None:
        self.buried, self.ended = list[str](), list[str]()
        self.supervisor = Supervisor(self.buried.append, lambda name, why: self.ended.append(f"{name}: {why}"))

    def bind(self, guard: Guard, name: str) -> None:
        guard.bind("generator", name, lambda mesh, reason: None)
        self.supervisor.watch(guard)

    async def begin(self, guard: Guard) -> str:
        return await self.supervisor.begin(guard)

    async def release(self, guard: Guard, goodbye: Callable[[], Awaitable[object]]) -> None:
        await self.supervisor.release(guard, goodbye)


class Scaled:
    """A run with a fleet of three places, which begins with one replica."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.cluster, self.notes = scene, Cluster(), list[str]()
        self.source, self.failing = Source(), list[Exception]()
        self.coming, self.starting = list[Engine](), asyncio.Event()
        self.starting.set()
        self.sync = WeightSync(self.source, scene.replicas, WeightSyncConfig())
        policy = FailurePolicy(heartbeat_s=0)
        self.fleet = Fleet(self.cluster, self.start, scene.generators, self.sync, policy, self.notes.append, 3)
        guard = Guard(policy)
        self.cluster.bind(guard, "generator_0")
        self.fleet.take(0, guard, scene.replicas[0])

    async def start(self, index: int, guard: Guard) -> Replica:
        self.cluster.bind(guard, f"generator_{index}")
        await self.starting.wait()
        if self.failing:
            raise self.failing.pop()
        self.scene.engines.append(self.coming.pop() if self.coming else Engine())
        return self.scene.replica(f"generator_{index}", self.scene.engines[-1])

    async def __aenter__(self) -> Scaled:
        async def on_applied(update: Any) -> None:
            pass

        await self.sync.connect()
        self.loop = asyncio.create_task(self.sync.run(on_applied))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.last_step()
        await self.cluster.supervisor.close()

    def serving(self) -> list[str]:
        return sorted(replica.name for replica in self.scene.generators.replicas)

    def kill(self, mesh: str) -> None:
        assert self.cluster.supervisor.takes(mesh, "killed by a test")

    async def last_step(self) -> None:
        self.sync.close()
        await self.loop

    async def settle(self) -> None:
        await until(lambda: not self.cluster.supervisor._tasks)


def run(count: int, body: Callable[[Scene], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await body(Scene(count))

    asyncio.run(main())


def check(completions: Sequence[Completion], seeds: Sequence[int] = (1, 2)) -> None:
    assert [c.token_ids for c in completions] == [[token(seed, i) for i in range(LENGTH)] for seed in seeds]


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - the condition is anything
        await asyncio.sleep(0.05)


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


def test_an_engine_that_is_gone_while_a_version_is_staged_is_a_death_and_no_failed_update() -> None:
    class Doors:
        async def ask(self, request: Any) -> list[Any]:
            raise ConnectionResetError("a worker of the engine has closed its side door: its process has ended")

    async def body(scene: Scene) -> None:
        options = EngineOptions("tiny", torch.float32, 64, 4, 0, enforce_eager=True, tensor_parallel=1, seed=0)
        engine = VllmEngine(options)
        engine._doors = Doors()  # type: ignore[assignment]
        with pytest.raises(ActorFailed, match="actor engine failed: a worker of the engine has closed its side door"):
            await engine.stage(await Source().offer(1, 0, -1))

    run(1, body)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_that_dies_in_a_flip_is_dead_for_the_update_and_for_the_next_request(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Core:
        """vLLM's side of an engine that dies as it is asked to flip: that call never ends."""

        errored, dead_error = False, "EngineCore encountered an issue"

        def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> asyncio.Future[Any]:
            self.errored = True
            return asyncio.get_running_loop().create_future()

        async def pause_generation(self, **_: Any) -> None: ...

        async def resume_generation(self) -> None:
            raise RuntimeError("there is no engine")

        def generate(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("there is no engine")

    async def body(scene: Scene) -> None:
        options = EngineOptions("tiny", torch.float32, 64, 4, 0, enforce_eager=True, tensor_parallel=workers, seed=0)
        engine = VllmEngine(options)
        engine._engine, engine.why_no_shadow = Core(), ""
        with pytest.raises(ActorFailed, match="its process has ended: EngineCore encountered an issue"):
            await engine.flip(1)
        with pytest.raises(ActorFailed, match="its process has ended: EngineCore encountered an issue"):
            await engine.generate([1, 2], Sampling(1.0, 1.0, 0, 0), max_tokens=2, seed=0, stop_ids=[])

    monkeypatch.setattr("actors.vllm_engine._HEALTH_S", 0.02)
    kinds = SimpleNamespace(FINAL_ONLY=0)
    vllm: Any = SimpleNamespace(SamplingParams=dict, RequestOutputKind=kinds, WeightTransferUpdateRequest=dict)
    for name in ("vllm", "vllm.sampling_params", "vllm.distributed.weight_transfer.base"):
        monkeypatch.setitem(sys.modules, name, vllm)  # it takes seconds to import
    run(1, body)


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

    async def remove_peer(self, peer: str) -> None: ...

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

        async def start(index: int, guard: Guard) -> Replica:
            return scene.replica("generator_0", second)

        guard = Guard(POLICY)
        guard.bind("generator", "generator_0", lambda mesh, reason: None)
        Fleet(Cluster(), start, scene.generators, sync, POLICY, print, 2).take(0, guard, scene.replicas[0])
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
        with pytest.raises(WeightSyncError, match="the weight loop has ended"):
            await guard.revive()

    run(2, body)


def test_replicas_come_at_the_newest_version_and_one_that_leaves_ends_its_requests_first() -> None:
    async def body(scene: Scene) -> None:
        async with Scaled(scene) as run:
            await run.sync.publish(3)
            await run.fleet.scale(5)  # of three places
            assert run.serving() == ["generator_0", "generator_1", "generator_2"]
            assert [engine.version for engine in scene.engines] == [3, 3, 3]
            asking = [asyncio.create_task(scene.ask(name)) for name in "567"]
            await asyncio.sleep(0.01)
            leaving = asyncio.create_task(run.fleet.scale(1))
            await asyncio.sleep(0.01)
            assert run.serving() == ["generator_0", "generator_1"], "one after the other, the last one first"
            await run.sync.publish(4)
            await asyncio.sleep(0.01)
            assert scene.engines[2].version == 4, "its requests see new weights as long as they run"
            for engine in scene.engines:
                await engine.tick(LENGTH)
            for call in asking:
                check(await call)
            await leaving
            assert run.serving() == ["generator_0"]
            assert run.cluster.buried == ["generator_2", "generator_1"]
            assert all(engine.said_goodbye for engine in scene.engines[1:])
            assert run.cluster.supervisor.takes("generator_2", "its processes have ended"), "which is no failure"
            await run.fleet.scale(2)  # under another name for its mesh
            assert run.fleet.guards[-1].mesh == "generator_1_life1"
            await run.sync.publish(5)
            await asyncio.sleep(0.01)
            assert [scene.engines[i].version for i in (0, 3)] == [5, 5]
            assert not run.cluster.ended

    run(1, body)


def test_one_that_cannot_start_or_dies_while_it_starts_is_told_of_and_ends_nothing() -> None:
    async def body(scene: Scene) -> None:
        async with Scaled(scene) as run:
            run.failing.append(ValueError("no memory for an engine"))
            await run.fleet.scale(3)
            assert run.serving() == ["generator_0"]
            assert run.fleet.size == 1
            assert "generator_1 could not start" in run.notes[-1]
            assert "no memory for an engine" in run.notes[-1]
            assert run.cluster.buried == ["generator_1"]
            assert run.cluster.supervisor.takes("generator_1", "its processes have ended")
            await run.fleet.scale(2)
            assert run.serving() == ["generator_0", "generator_1"]
            assert not run.cluster.ended

    run(1, body)


def test_one_that_dies_while_it_leaves_is_gone_and_its_requests_are_answered_elsewhere() -> None:
    async def body(scene: Scene) -> None:
        async with Scaled(scene) as run:
            await run.fleet.scale(2)
            asking = [asyncio.create_task(scene.ask(name)) for name in "56"]
            await asyncio.sleep(0.01)
            leaving = asyncio.create_task(run.fleet.scale(1))
            await asyncio.sleep(0.01)
            assert run.cluster.supervisor.takes("generator_1", "killed")
            await asyncio.sleep(0.01)
            await scene.engines[0].tick(LENGTH)
            for call in asking:
                check(await call)
            await leaving
            assert run.serving() == ["generator_0"]
            assert run.fleet.size == 1
            assert not run.cluster.ended

    run(1, body)


@pytest.mark.parametrize("before", ["could not start", "was replaced and left"])
def test_a_generator_comes_again_under_a_name_of_its_own_and_its_death_is_noticed(before: str) -> None:
    async def body(scene: Scene) -> None:
        async with Scaled(scene) as run:
            if before == "could not start":
                run.failing.append(ValueError("no memory for an engine"))
                await run.fleet.scale(2)
            else:
                await run.fleet.scale(2)
                run.kill("generator_1")
                await until(lambda: len(run.serving()) == 2)
                await run.fleet.scale(1)
            assert run.serving() == ["generator_0"]
            await run.fleet.scale(2)
            assert run.serving() == ["generator_0", "generator_1"]
            mesh = run.fleet.guards[-1].mesh
            run.kill(mesh)
            assert run.serving() == ["generator_0"], "it is taken for a life that has ended long ago"
            await until(lambda: len(run.serving()) == 2)
            assert run.cluster.buried.count(mesh) == 1
            assert not run.cluster.ended

    run(1, body)


def test_one_that_leaves_and_dies_in_the_update_that_runs_is_no_failure_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.lasting.NOTICE_S", 0.05)

    async def body(scene: Scene) -> None:
        async with Scaled(scene) as run:
            await run.fleet.scale(2)
            scene.engines[1].stages.clear()
            await run.sync.publish(1)
            leaving = asyncio.create_task(run.fleet.scale(1))
            await asyncio.sleep(0.01)
            run.kill("generator_1")
            scene.engines[1].broken = True
            scene.engines[1].stages.set()
            await leaving
            assert not run.loop.done()
            await run.sync.publish(2)
            await until(lambda: scene.engines[0].version == 2)
            assert run.serving() == ["generator_0"]
            assert not run.cluster.ended

    run(1, body)


def test_one_that_dies_as_it_joins_is_waited_for_by_nobody() -> None:
    async def body(scene: Scene) -> None:
        async with Scaled(scene) as run:
            await run.sync.publish(1)
            run.coming.append(Engine())
            run.coming[0].stages.clear()
            scaling = asyncio.create_task(run.fleet.scale(2))
            await asyncio.sleep(0.01)
            run.kill("generator_1")
            await scaling
            assert "generator_1 could not start" in run.notes[-1]
            complete = asyncio.create_task(scene.generators.complete())
            await asyncio.sleep(0)
            assert complete.done(), "nobody is to come in its place"

    run(1, body)


def test_a_start_that_is_cancelled_half_way_leaves_nobody_who_would_start_it_again() -> None:
    async def body(scene: Scene) -> None:
        async with Scaled(scene) as run:
            run.starting.clear()
            scaling = asyncio.create_task(run.fleet.scale(2))
            await asyncio.sleep(0.01)
            scaling.cancel()
            await asyncio.wait([scaling])
            assert run.cluster.buried == ["generator_1"]
            run.kill("generator_1")
            await asyncio.sleep(0)
            assert not run.cluster.supervisor._tasks
            assert not run.notes

    run(1, body)


@pytest.mark.parametrize("when", ["before the last step", "behind the last step"])
def test_a_generator_that_is_dead_when_the_last_step_is_done_is_missed_by_nobody(when: str) -> None:
    async def body(scene: Scene) -> None:
        async with Scaled(scene) as run:
            await run.fleet.scale(2)
            run.starting.clear()
            if when == "before the last step":
                run.kill("generator_1")
                await asyncio.sleep(0.01)
            await run.last_step()
            if when == "behind the last step":
                run.kill("generator_1")
            run.starting.set()
            await run.settle()
            assert not run.cluster.ended
            assert run.serving() == ["generator_0"]
            assert run.cluster.buried == ["generator_1", "generator_1_life1"][: 2 if when.startswith("before") else 1]

    run(1, body)


def test_with_its_budget_spent_it_is_missed_by_nobody_either() -> None:
    async def body(scene: Scene) -> None:
        async with Scaled(scene) as run:
            run.fleet._policy = FailurePolicy(on_failure="respawn", max_restarts=1, heartbeat_s=0)
            await run.fleet.scale(2)
            run.kill("generator_1")
            await until(lambda: len(run.serving()) == 2)
            await run.last_step()
            run.kill("generator_1_life1")
            await run.settle()
            assert not run.cluster.ended

    run(1, body)


def test_what_is_wished_for_in_the_run_folder_is_done_once(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        async with Scaled(scene) as run:
            wish = tmp_path / "scale.json"
            following = asyncio.create_task(run.fleet.follow(wish))
            wish.write_text("three, please")
            await until(lambda: run.notes)
            assert "is not understood" in run.notes[-1]
            wish.write_text('{"generators": 2}')
            await until(lambda: len(run.serving()) == 2)
            following.cancel()

    run(1, body)


def test_while_nobody_is_alive_versions_are_released_and_a_death_during_the_join_ends_it() -> None:
    async def body(scene: Scene) -> None:
        sync, applied = WeightSync(Source(), scene.replicas, WeightSyncConfig()), list[int]()

        async def on_applied(update: Any) -> None:
            applied.append(update.version)

        second, third = Engine(), Engine()
        second.stages.clear()
        lives = iter((second, third))

        async def start(index: int, guard: Guard) -> Replica:
            return scene.replica("generator_0", next(lives))

        guard = Guard(POLICY)
        guard.bind("generator", "generator_0", lambda mesh, reason: None)
        Fleet(Cluster(), start, scene.generators, sync, POLICY, print, 2).take(0, guard, scene.replicas[0])
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
