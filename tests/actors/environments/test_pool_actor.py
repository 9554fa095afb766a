"""Environments on a mesh of their own do what their pool does, and each kind has its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.environments.base import Action
from actors.environments.pool import EnvironmentPool
from actors.environments.pool_actor import EnvironmentActor, EnvironmentClient, EnvironmentConfig, Environments
from forge.errors import ConfigError, EnvironmentRaised, EnvironmentTimeout, EpisodeEnded, QuarantinedError
from forge.lasting import lasting
from forge.launch import Hosts
from forge.mesh import Cluster, Placement
from forge.processes import kill_marked
from forge.supervision import FailurePolicy, Guard

ON, DONE = Action("on"), Action("done")
PATIENCE_S = 60.0

pytestmark = pytest.mark.usefixtures("worlds")


async def until_idle(client: EnvironmentClient) -> None:
    """Until no episode has a place or waits for one."""
    while (report := await client.report()).running + report.waiting:
        pass


def test_the_actor_does_what_the_pool_does_and_a_cancelled_call_ends_its_episode_there(hosts: Hosts) -> None:
    config = EnvironmentConfig("worlds:Waiting", concurrency=2, turn_timeout_s=0.5, retries=0, quarantine_after=2)

    async def cancelled(call: Any) -> None:
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def body(client: EnvironmentClient) -> None:
        environments = Environments({"web": client})
        name, observation = await environments.start({"id": 1})
        assert observation.messages == [{"role": "user", "content": "hello"}]
        assert (await environments.step(name, DONE)).done
        await environments.close(name)
        await environments.close(name)

        name, _ = await client.start({"id": "slow"})
        with pytest.raises(EnvironmentTimeout, match="environment web, task 'slow', turn 1: took more than") as timeout:
            await client.step(name, Action("hang"))
        assert (timeout.value.kind, timeout.value.task, timeout.value.turn) == ("web", "slow", 1)
        for _ in range(2):
            with pytest.raises(EnvironmentRaised, match=r"worlds\.py"):
                await client.start({"id": "bad", "reset": "raise"})
        with pytest.raises(QuarantinedError, match="no such key"):
            await client.start({"id": "bad"})

        await until_idle(client)
        await cancelled(client.start({"reset": "hang"}))
        await until_idle(client)
        names = [(await client.start({}))[0] for _ in range(2)]
        await cancelled(client.start({}))
        await cancelled(client.step(names[0], Action("hang")))
        with pytest.raises(EpisodeEnded):
            await client.step(names[0], ON)
        await client.close(names[1])
        await until_idle(client)
        assert (await client.report()).row()["extra/env/web/quarantine"] == 1
        await client.shutdown()

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), Cluster(hosts, Placement("cpu", {})) as cluster:
            mesh = await cluster.spawn("environment", EnvironmentActor, config, "web")
            await body(EnvironmentClient(mesh, config, name="web"))

    asyncio.run(main())


@pytest.mark.soak
def test_where_it_is_respawned_a_dead_actor_ends_its_episodes_and_others_begin_in_the_next(hosts: Hosts) -> None:
    config = EnvironmentConfig("worlds:Waiting", concurrency=4)

    async def body(cluster: Cluster) -> None:
        guards, told = list[Guard](), list[str]()
        spawn = lasting(cluster.spawn, FailurePolicy(on_failure="respawn"), told.append, guards)
        client = EnvironmentClient(await spawn("environment", EnvironmentActor, config, "web"), config, name="web")
        await client.setup()
        name, _ = await client.start({"id": 1})
        idle, _ = await client.start({"id": 2})
        step = asyncio.create_task(client.step(name, Action("hang")))
        await asyncio.sleep(0.2)
        kill_marked(hosts.run_id, name="environment")
        with pytest.raises(EpisodeEnded, match="killed by SIGKILL"):
            await step
        with pytest.raises(EpisodeEnded):
            await client.step(idle, ON)
        await client.close(idle)
        name, _ = await client.start({"id": 3})
        assert (await client.step(name, DONE)).done
        assert guards[0].restarts == 1
        await client.shutdown()

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), Cluster(hosts, Placement("cpu", {})) as cluster:
            watching = asyncio.create_task(cluster.watch())
            await body(cluster)
            watching.cancel()

    asyncio.run(main())


def test_an_actor_that_does_not_answer_is_given_up_and_told_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.environments.pool_actor._MARGIN_S", 0.05)
    closed: list[str] = []

    async def note(episode: str) -> None:
        closed.append(episode)

    class Endpoint:
        def __init__(self, answer: Any) -> None:
            self.call_one = answer

    class Mesh:
        start = Endpoint(lambda task, episode: asyncio.Event().wait())
        close = Endpoint(note)
        shutdown = Endpoint(lambda: asyncio.sleep(0))

    async def main() -> None:
        config = EnvironmentConfig(place_timeout_s=0.01, reset_timeout_s=0.01, close_timeout_s=0.01, retries=0)
        client = EnvironmentClient(Mesh, config, name="web")
        with pytest.raises(TimeoutError, match=r"waited .* for the environments web to begin task '7', in vain"):
            await client.start({"id": 7}, episode="mine")
        await client.shutdown()
        assert closed == ["mine"]

    monkeypatch.setattr("actors.environments.pool_actor.START_DEADLINE_S", 0.01)
    asyncio.run(main())


def test_each_task_runs_in_its_own_kind_and_a_full_kind_holds_up_no_other() -> None:
    async def main() -> None:
        pools = {
            "slow": EnvironmentPool(EnvironmentConfig("worlds:Waiting", concurrency=1), name="slow"),
            "fast": EnvironmentPool(EnvironmentConfig("worlds:Plain", concurrency=1), name="fast"),
        }
        environments = Environments(pools)
        name, _ = await environments.start({"environment": "slow"})
        hanging = asyncio.create_task(environments.step(name, Action("hang")))
        queued = asyncio.create_task(environments.start({"environment": "slow"}))
        other, _ = await environments.start({"environment": "fast"})
        assert (await environments.step(other, DONE)).info["pid"]
        await environments.close(other)
        assert not hanging.done()
        assert not queued.done()
        assert pools["slow"].report().waiting == 1
        await environments.shutdown()
        for task in (hanging, queued):
            with pytest.raises(EpisodeEnded, match="its pool is shut down"):
                await task

    asyncio.run(main())


def test_a_task_of_no_kind_that_there_is_is_refused() -> None:
    config = EnvironmentConfig("worlds:Waiting")
    environments = Environments({name: EnvironmentPool(config, name=name) for name in ("a", "b")})
    for task in ({"id": 1}, {"id": 1, "environment": "c"}):
        with pytest.raises(ConfigError, match=r"task '1' has environment .*, which is none of a, b; name one of them"):
            environments.kind_of(task)
    assert environments.kind_of({"environment": "b"}) == "b"
    with pytest.raises(ConfigError, match="there is no environment"):
        Environments({})
    with pytest.raises(ConfigError, match="'a/b'; give it a name without a slash"):
        Environments({"a/b": EnvironmentPool(config)})
