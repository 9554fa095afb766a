"""Replicas that die are replaced: the budget, the order of events, and real processes that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import monarch.actor
import pytest
from probes import Probe

from forge.errors import ActorFailed, ConfigError
from forge.failure import root_cause
from forge.lasting import Life, ask, end, lasting, set_up
from forge.launch import Hosts
from forge.mesh import Cluster, MeshConfig, RoleConfig, plan_placement, within
from forge.supervision import Budget, FailurePolicy, Guard, Supervisor

NOTICE_S = 60.0
"""Far above the second that a restart of a bare actor takes."""
RESPAWN = FailurePolicy(on_failure="respawn")


def test_a_budget_counts_within_its_window_only() -> None:
    now = 0.0
    budget = Budget(FailurePolicy(max_restarts=2, restart_window_s=10.0), clock=lambda: now)
    for now in (0.0, 6.0, 11.0, 17.0):
        assert budget.spend(f"death at {now:g}")
        budget.served()
    now = 18.0
    assert not budget.spend("death at 18")
    assert budget.account().splitlines() == [
        "death at 11",
        "it was restarted 2 times within 10 s (max_restarts), and at last: death at 18",
    ]


def test_restarts_that_come_to_nothing_count_however_long_they_take() -> None:
    now = 0.0
    budget = Budget(FailurePolicy(max_restarts=2, restart_window_s=10.0), clock=lambda: now)
    for now in (0.0, 20.0):
        assert budget.spend(f"failure at {now:g}")
    now = 40.0
    assert not budget.spend("failure at 40")
    assert "it was restarted 2 times in a row (max_restarts)" in budget.account()


def test_a_policy_without_a_restart_or_a_window_is_refused() -> None:
    for options in ({"max_restarts": 0}, {"restart_window_s": 0.0}):
        with pytest.raises(ConfigError, match=r"mesh\.generator\.max_restarts is"):
            FailurePolicy(**options).check("mesh.generator")


def placement(cfg: MeshConfig, roles: tuple[str, ...] = ("trainer", "generator")) -> None:
    plan_placement(cfg, device="cpu", slots=2, torchrun_slots=None, roles=roles)


def test_roles_whose_state_dies_with_them_cannot_be_respawned() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.critic\.on_failure is respawn.* --resume"):
        placement(MeshConfig(critic=RoleConfig(procs=1, on_failure="respawn")), roles=("trainer", "critic"))
    again = RoleConfig(on_failure="respawn")
    for role, cfg in (("trainer", MeshConfig(trainer=again)), ("generator", MeshConfig(generator=again))):
        with pytest.raises(ConfigError, match=rf"mesh\.colocate is true, mesh\.{role}\.on_failure respawn"):
            placement(replace(cfg, colocate=True))
    placement(MeshConfig(generator=RoleConfig(on_failure="respawn")))


class Ward:
    """A guarded replica without processes; `lives` are what its attempts do."""

    def __init__(self, policy: FailurePolicy, *lives: Callable[[], Awaitable[None]]) -> None:
        self.events: list[str] = []
        self._lives, self.spawned = iter(lives), asyncio.Event()
        self.supervisor = Supervisor(
            lambda mesh: self.events.append(f"bury {mesh}"), lambda name, why: self.events.append(f"end {name}: {why}")
        )
        self.guard = Guard(policy, lambda line: self.events.append(line.partition(",")[0]))
        self._bind()
        self.guard.arm(lambda reason: self.events.append(f"lost: {reason}"), self._revive)

    def _bind(self) -> None:
        self.guard.bind("generator", "generator_0", lambda mesh, reason: None)
        self.supervisor.watch(self.guard)

    async def _revive(self) -> None:
        self._bind()
        self.events.append(f"spawn {self.guard.mesh}")
        self.spawned.set()
        await next(self._lives)()

    async def settle(self) -> None:
        async with asyncio.timeout(NOTICE_S):
            while tasks := self.supervisor._tasks:
                await asyncio.wait(tasks)


async def well() -> None:
    """A life that begins as it should."""


async def ill() -> None:
    raise ValueError("no such model")


async def for_ever() -> None:
    await asyncio.sleep(600)


def test_callers_hear_of_a_death_before_anything_else_and_news_count_once() -> None:
    async def main() -> None:
        ward = Ward(RESPAWN, well)
        assert not ward.supervisor.takes("replay", "killed")
        assert ward.supervisor.takes("generator_0", "killed")
        assert ward.supervisor.takes("generator_0", "Monarch knows it too")
        await ward.settle()
        assert ward.supervisor.takes("generator_0", "Monarch has known it for long")
        await ward.settle()
        assert ward.events == [
            "lost: killed",
            "bury generator_0",
            "generator_0 failed: killed; it is being restarted",
            "spawn generator_0_life1",
            "generator_0 serves again",
        ]
        assert ward.guard.restarts == 1

    asyncio.run(main())


def test_meshes_that_live_together_die_together_and_the_reason_names_the_one_that_died() -> None:
    async def main() -> None:
        ward = Ward(RESPAWN, well)
        assert ward.guard.bind("critic", "critic_0", lambda mesh, reason: None) == "critic_0"
        ward.supervisor.watch(ward.guard)
        assert ward.supervisor.takes("critic_0", "killed")
        assert ward.supervisor.takes("generator_0", "its processes have ended")
        await ward.settle()
        assert ward.events[:4] == [
            "lost: its critic_0 failed: killed",
            "bury generator_0",
            "bury critic_0",
            "generator_0 failed: its critic_0 failed: killed; it is being restarted",
        ]
        assert ward.guard.meshes == ["generator_0_life1"]
        assert ward.guard.bind("critic", "critic_0", lambda mesh, reason: None) == "critic_0_life1"

    asyncio.run(main())


def test_a_death_during_a_restart_counts_and_a_crash_loop_ends_the_run_with_the_first_cause() -> None:
    async def main() -> None:
        ward = Ward(FailurePolicy(on_failure="respawn", max_restarts=2), for_ever, ill)
        ward.supervisor.takes("generator_0", "out of memory")
        await ward.spawned.wait()
        ward.supervisor.takes("generator_0_life1", "out of memory again")
        await ward.settle()
        assert ward.events[-2:] == [
            "bury generator_0_life2",
            "end generator_0: out of memory\nit was restarted 2 times in a row (max_restarts), and at last: "
            "its restart failed: ValueError: no such model",
        ]
        assert ward.guard.restarts == 0

    asyncio.run(main())


def test_what_is_not_armed_or_has_the_policy_end_is_not_taken() -> None:
    async def main() -> None:
        ward = Ward(FailurePolicy(on_failure="end"))
        assert not ward.supervisor.takes("generator_0", "killed")
        assert ward.guard.reporter() is None
        for begun in (False, True):
            ward = Ward(RESPAWN, for_ever)
            ward.supervisor.takes("generator_0", "killed")
            if begun:
                await ward.spawned.wait()
            ward.guard.disarm()
            await ward.settle()
            assert ward.guard.restarts == 0
            assert not ward.supervisor.takes("generator_0_life1", "killed"), "the run is over: its end is the run's"

    asyncio.run(main())


class Start:
    """A guard at the start of a run; `begin` binds a mesh, then does what the next of `lives` does."""

    def __init__(self, policy: FailurePolicy, *lives: Callable[[], Awaitable[Any]]) -> None:
        self.told, self.lost, self.restarted, self.ended = list[str](), list[str](), list[str](), list[str]()
        self.supervisor = Supervisor(lambda mesh: None, lambda name, why: self.ended.append(f"{name}: {why}"))
        self.guard, self.spawned = Guard(policy, self.told.append), asyncio.Event()
        self._lives = iter(lives)

    async def begin(self) -> str:
        mesh = self.guard.bind("trainer", "trainer_0", lambda mesh, reason: None)
        self.supervisor.watch(self.guard)
        self.spawned.set()
        await next(self._lives)()
        return mesh

    async def revive(self) -> None:
        self.restarted.append(self.guard.bind("trainer", "trainer_0", lambda mesh, reason: None))


def test_a_death_while_the_run_starts_is_made_up_for_within_the_budget() -> None:
    async def main() -> None:
        start = Start(FailurePolicy(on_failure="respawn", max_restarts=1), for_ever, well)
        starting = asyncio.create_task(start.guard.start(start.begin))
        await start.spawned.wait()
        assert start.supervisor.takes("trainer_0", "killed")
        assert await starting == "trainer_0_life1"
        assert start.told == ["trainer_0 failed while the run started: killed; it is started again"]
        assert start.supervisor.takes("trainer_0_life1", "killed again")
        assert start.ended == [
            "trainer_0: killed\nit was restarted 1 times in a row (max_restarts), and at last: killed again"
        ]

    asyncio.run(main())


def test_one_that_dies_between_its_start_and_the_loops_is_restarted_as_these_begin_or_started_again_before() -> None:
    async def main() -> None:
        for armed_at_once in (True, False):
            start = Start(FailurePolicy(on_failure="respawn", max_restarts=1), well, well)
            await start.guard.start(start.begin)
            assert start.supervisor.takes("trainer_0", "killed")
            assert start.guard.died == "killed"
            if not armed_at_once:
                assert await start.guard.start(start.begin) == "trainer_0_life1"
            start.guard.arm(start.lost.append, start.revive)
            if armed_at_once:
                await asyncio.wait(start.supervisor._tasks)
            assert start.lost == (["killed"] if armed_at_once else [])
            assert start.restarted == (["trainer_0_life1"] if armed_at_once else [])
            await start.supervisor.close()

    asyncio.run(main())


def test_who_waits_for_a_mesh_hears_of_its_death_before_the_guard_is_armed() -> None:
    async def main() -> None:
        start = Start(RESPAWN, well, well)
        await start.guard.start(start.begin)
        life = Life("trainer", start.guard.reporter())
        start.guard.lose = life.lose
        asking = asyncio.ensure_future(life.ask(for_ever()))
        await asyncio.sleep(0)
        assert start.supervisor.takes("trainer_0", "killed")
        async with asyncio.timeout(0.2):
            with pytest.raises(ActorFailed, match="trainer failed: killed"):
                await asking
        assert await start.guard.start(start.begin) == "trainer_0_life1"
        assert start.guard.lose != life.lose, "which was of the mesh before"

    asyncio.run(main())


def test_what_a_start_raises_is_raised_at_once_and_with_the_policy_end_a_death_is_the_runs() -> None:
    async def main() -> None:
        start = Start(RESPAWN, ill)
        with pytest.raises(ValueError, match="no such model"):
            await start.guard.start(start.begin)
        start = Start(FailurePolicy(on_failure="end"), well)
        assert await start.guard.start(start.begin) == "trainer_0"
        assert not start.supervisor.takes("trainer_0", "killed")

    asyncio.run(main())


def test_a_replica_that_misses_some_heartbeats_is_busy_and_one_that_misses_all_is_dead() -> None:
    async def main() -> None:
        hung, asked = set[int](), 0

        async def beat() -> None:
            nonlocal asked
            asked += 1
            if asked == 5:
                raise ValueError("an answer of its kind")
            await asyncio.sleep(600 if asked in hung else 0)

        ward = Ward(FailurePolicy(on_failure="respawn", heartbeat_s=0.02), well)
        hung |= {1, 2, 3, 6, 7, 8, 10, 11, 12, 13}
        ward.guard.arm(ward.guard.lost, ward.guard.revive, beat)
        await ward.spawned.wait()
        assert asked == 13
        assert ward.events[:2] == ["lost: it did not answer for 0 s (4 heartbeats)", "bury generator_0"]
        await ward.supervisor.close()

    asyncio.run(main())


def run(hosts: Hosts, body: Callable[[Cluster], Awaitable[None]]) -> None:
    cfg = MeshConfig(generator=RoleConfig(replicas=2))
    plan = plan_placement(cfg, device="cpu", slots=2, torchrun_slots=None, roles=("trainer", "generator"))

    async def main() -> None:
        async with Cluster(hosts, plan) as cluster:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(cluster.watch())
                await within(NOTICE_S, "the test's body", body(cluster))
                watching.cancel()

    asyncio.run(main())


def test_a_call_that_a_life_cannot_answer_goes_to_the_next_which_is_set_up_first(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        guards, told = list[Guard](), list[str]()
        assert lasting(cluster.spawn, FailurePolicy(on_failure="end"), told.append, guards) == cluster.spawn
        mesh = await lasting(cluster.spawn, RESPAWN, told.append, guards)("judge", Probe)
        pids = list[int]()

        async def setting_up(probe: Any) -> None:
            pids.append((await probe.about.call_one())["pid"])

        await set_up(mesh, setting_up)
        first = asyncio.create_task(ask(mesh, lambda probe: probe.sleep.call_one(0.3 if len(pids) > 1 else 600)))
        await asyncio.sleep(0.2)
        os.kill(pids[0], signal.SIGKILL)
        assert await first == 0.3
        assert len(pids) == 2
        with pytest.raises(monarch.actor.ActorError, match="KeyError: 'mine'"):
            await ask(mesh, lambda probe: probe.raise_error.call_one("mine"))
        assert (guards[0].name, guards[0].life, guards[0].role) == ("judge", 1, "judge")
        await end(mesh, lambda probe: probe.sleep.call_one(0))

    run(hosts, body)


def test_a_process_that_is_killed_as_it_starts_is_started_again(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        guard = Guard(FailurePolicy(on_failure="respawn", max_restarts=1), lambda line: None)
        pids = list[int]()

        async def begin() -> Any:
            probe = await cluster.spawn("generator", Probe, replica=1, guard=guard)
            pids.append((await probe.about.call_one())["pid"])
            if len(pids) == 1:
                os.kill(pids[0], signal.SIGKILL)
            return await probe.sleep.call_one(0), probe

        _, probe = await guard.start(begin)
        assert (len(pids), guard.mesh) == (2, "generator_1_life1")
        assert not is_alive(pids[0])
        os.kill(pids[1], signal.SIGKILL)
        await probe.sleep.call_one(NOTICE_S)

    with pytest.raises((ActorFailed, BaseExceptionGroup)) as caught:
        run(hosts, body)
    failed = root_cause(caught.value)
    assert isinstance(failed, ActorFailed)
    assert failed.name == "generator_1"
    assert failed.reason.endswith("it was restarted 1 times in a row (max_restarts)")


class Kept:
    """A Probe that is respawned, as its users see it."""

    def __init__(self, cluster: Cluster, policy: FailurePolicy = RESPAWN) -> None:
        self._cluster, self.told, self.reasons = cluster, list[str](), list[str]()
        self.guard = Guard(policy, self.told.append)
        self.back = asyncio.Event()

    async def start(self) -> Kept:
        self.probe = await self._cluster.spawn("generator", Probe, replica=1, guard=self.guard)
        self.pid = (await self.probe.about.call_one())["pid"]
        return self

    async def _revive(self) -> None:
        await self.start()
        self.back.set()

    async def arm(self) -> Kept:
        await self.start()
        self.guard.arm(self.reasons.append, self._revive, lambda: self.probe.sleep.call_one(0))
        return self


def test_a_killed_process_is_replaced_while_others_go_on_and_a_crash_loop_ends_the_run(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        other = await cluster.spawn("generator", Probe)
        kept = await Kept(cluster, FailurePolicy(on_failure="respawn", max_restarts=1)).arm()
        orphan, pid = await kept.probe.start_subprocess.call_one(), kept.pid
        os.kill(pid, signal.SIGKILL)
        await kept.back.wait()
        assert kept.guard.mesh == "generator_1_life1"
        assert len(kept.reasons) == 1
        assert kept.pid != pid
        assert not is_alive(orphan), "what it had started went with it"
        assert await asyncio.gather(kept.probe.sleep.call_one(0), other.sleep.call_one(0)) == [0, 0]
        assert "killed by SIGKILL" in kept.told[0]
        kept.probe.exit.broadcast(3)
        await asyncio.sleep(NOTICE_S)

    with pytest.raises((ActorFailed, BaseExceptionGroup)) as caught:
        run(hosts, body)
    failed = root_cause(caught.value)
    assert isinstance(failed, ActorFailed)
    assert failed.name == "generator_1"
    first, second = failed.reason.splitlines()
    assert first.startswith("its process was killed by SIGKILL")
    assert second == (
        "it was restarted 1 times within 600 s (max_restarts), and at last: its process exited with code 3"
    )


@pytest.mark.soak
@pytest.mark.parametrize(("heartbeat_s", "noticed"), [(1.0, "did not answer for"), (0.0, "does not answer")])
def test_a_stopped_process_is_noticed_by_its_silence_and_replaced(
    hosts: Hosts, heartbeat_s: float, noticed: str
) -> None:
    """By heartbeats; without them by Monarch, after its 30 s."""

    async def body(cluster: Cluster) -> None:
        kept = await Kept(cluster, FailurePolicy(on_failure="respawn", heartbeat_s=heartbeat_s)).arm()
        pid = kept.pid
        os.kill(pid, signal.SIGSTOP)
        await kept.back.wait()
        assert noticed in kept.reasons[0]
        assert not is_alive(pid)
        assert await kept.probe.sleep.call_one(0) == 0

    run(hosts, body)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
