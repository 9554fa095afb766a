"""Real Monarch meshes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

# Before the launch, on purpose: its settings must come into force all the same.
import monarch.actor
import pytest
from probes import Probe

from forge.errors import ActorFailed, ConfigError, DeadlineExceeded
from forge.failure import is_supervision_error, root_cause
from forge.launch import Hosts
from forge.mesh import Cluster, MeshConfig, RoleConfig, plan_placement, within

# Far above the milliseconds that it takes, far below the 30 s after which Monarch gives up on a poll.
NOTICE_S = 10.0


def run(
    hosts: Hosts, body: Callable[[Cluster], Awaitable[None]], cfg: MeshConfig | None = None, **options: Any
) -> None:
    cfg = cfg or MeshConfig(trainer=RoleConfig(procs=2, threads=3), generator=RoleConfig(replicas=2))
    placement = plan_placement(
        cfg, device="cpu", slots=2, torchrun_slots=None, roles=("trainer", "generator"), num_hosts=1
    )

    async def main() -> None:
        async with Cluster(hosts, placement, debug=cfg.debug, **options) as cluster:
            await body(cluster)

    asyncio.run(main())


def test_what_actors_write_to_stderr_goes_to_a_file_each_which_the_error_of_their_end_names(
    hosts: Hosts, tmp_path: Path
) -> None:
    async def body(cluster: Cluster) -> None:
        trainer, judge = await asyncio.gather(cluster.spawn("trainer", Probe), cluster.spawn("judge", Probe))
        await trainer.complain.call("of the trainer")
        await judge.complain.call("of the judge")
        await judge.exit.call(3)

    logs = tmp_path / "run" / "logs"
    with pytest.raises(ActorFailed) as failed:
        run(hosts, body, logs=logs)
    assert str(failed.value).endswith(f"its process exited with code 3\nmore in {logs}/judge.log")
    assert (logs / "judge.log").read_text() == 2 * "of the judge\n"
    for rank in (0, 1):
        assert (logs / f"trainer_0-rank{rank}.log").read_text() == 2 * "of the trainer\n"


def test_a_process_that_ends_before_it_is_up_is_told_of_with_its_log(
    hosts: Hosts, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.spawn("judge", Probe, env={"PYTHONHOME": str(tmp_path)})

    with pytest.raises(ActorFailed) as failed:
        run(hosts, body, logs=tmp_path / "logs")
    assert str(failed.value) == "actor judge failed: its process exited with code 1"
    assert "did not stop" not in capfd.readouterr().err


async def about(mesh: Any) -> list[dict[str, Any]]:
    return list((await mesh.about.call()).values())


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited 20 s until {what}"
        time.sleep(0.02)


def test_every_replica_has_processes_of_its_own_with_the_planned_environment(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        trainer, first, second, judge = await asyncio.gather(
            cluster.spawn("trainer", Probe),
            cluster.spawn("generator", Probe),
            cluster.spawn("generator", Probe, replica=1, env={"PROBE_EXTRA": "here"}),
            cluster.spawn("judge", Probe),
        )
        ranks = await about(trainer)
        others = [(await about(mesh))[0] for mesh in (first, second, judge)]
        assert [rank["rank"] for rank in ranks] == [0, 1]
        assert [rank["threads"] for rank in ranks] == ["3", "3"]
        assert [other["extra"] for other in others] == [None, "here", None]
        everybody = ranks + others
        assert len({process["pid"] for process in everybody} | {os.getpid()}) == 6
        for process in everybody:
            assert process["group"] == process["pid"]
            assert process["ignores_interrupt"]
            assert process["path"][0] == str(Path(__file__).parents[2])
            assert os.getcwd() not in process["path"][1:] or os.getcwd() in sys.path
        assert (cluster.device, cluster.procs("trainer"), cluster.replicas("generator")) == ("cpu", 2, 2)
        assert (cluster.procs("judge"), cluster.replicas("judge")) == (1, 1)

    run(hosts, body)


def test_a_mesh_name_is_used_once(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.spawn("judge", Probe)
        with pytest.raises(ConfigError, match="mesh judge exists already"):
            await cluster.spawn("judge", Probe)
        for name in ("my judge", "logger", ""):
            with pytest.raises(ConfigError, match="cannot name a mesh"):
                await cluster.spawn(name, Probe)

    run(hosts, body)


def test_a_killed_actor_is_named_and_calls_to_it_fail_while_others_go_on(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        trainer = await cluster.spawn("trainer", Probe)
        judge = await cluster.spawn("judge", Probe)
        pid = (await about(trainer))[1]["pid"]
        # Calls fail at Monarch's own poll, which now and then takes half a minute.
        pending = asyncio.create_task(within(60, "the answer", trainer.sleep.call(600)))
        watching = asyncio.create_task(within(NOTICE_S, "news of the death", cluster.watch()))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorFailed, match=r"trainer_0 failed: rank 1 of 2: .* killed by SIGKILL"):
            await watching
        with pytest.raises(Exception, match="sleep") as error:
            await pending
        assert is_supervision_error(error.value)
        assert (await about(judge))[0]["rank"] == 0

    with pytest.raises(ActorFailed):
        run(hosts, body)


def test_a_death_cancels_everything_in_a_task_group_with_the_watch(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        judge = await cluster.spawn("judge", Probe)
        bystander = await cluster.spawn("bystander", Probe)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(cluster.watch())
            tasks.create_task(within(60, "ever", bystander.sleep.call_one(600)))
            tasks.create_task(within(60, "its exit", judge.exit.call_one(7)))

    with pytest.raises((ActorFailed, BaseExceptionGroup)) as caught:
        run(hosts, body)
    failed = root_cause(caught.value)
    assert isinstance(failed, ActorFailed)
    assert (failed.name, failed.reason) == ("judge", "its process exited with code 7")


def test_without_a_watcher_a_failure_ends_the_body_with_the_actors_own_traceback(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.spawn("judge", Probe, "cannot judge")
        await asyncio.sleep(60)

    with pytest.raises(ActorFailed, match="judge failed") as failed:
        run(hosts, body)
    assert "ValueError: cannot judge" in failed.value.reason
    assert "probes.py" in failed.value.reason


def test_a_call_to_a_dead_actor_is_reported_as_the_death(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        judge = await cluster.spawn("judge", Probe)
        await judge.exit.call_one(3)

    with pytest.raises(ActorFailed, match="judge failed: its process exited with code 3"):
        run(hosts, body)


def test_an_exception_in_an_endpoint_goes_to_its_caller_and_the_actor_lives(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        judge = await cluster.spawn("judge", Probe)
        with pytest.raises(monarch.actor.ActorError, match="KeyError: 'mine'"):
            await judge.raise_error.call_one("mine")
        assert await judge.sleep.call_one(0) == 0

    run(hosts, body)


def test_a_wait_ends_at_its_deadline_and_the_actor_still_answers(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        judge = await cluster.spawn("judge", Probe)
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s for the judge's verdict"):
            await within(0.1, "the judge's verdict", judge.sleep.call_one(30))
        with pytest.raises(TimeoutError, match="its own"):
            await within(10, "a wait that times out by itself", _own_timeout())
        answers = await asyncio.gather(*(judge.sleep.call_one(0.01) for _ in range(20)))
        assert answers == [0.01] * 20

    run(hosts, body)


async def _own_timeout() -> None:
    raise TimeoutError("its own")


def test_subprocesses_of_an_actor_and_its_scratch_folder_go_with_it(hosts: Hosts) -> None:
    orphans: list[int] = []
    folders: list[Path] = []

    async def body(cluster: Cluster) -> None:
        killed = await cluster.spawn("killed", Probe)
        stopped = await cluster.spawn("stopped", Probe)
        for mesh in (killed, stopped):
            orphans.append(await mesh.start_subprocess.call_one())
            folders.append(Path((await about(mesh))[0]["scratch"]))
        assert all(alive(pid) for pid in orphans)
        assert all(folder.is_dir() for folder in folders)
        os.kill((await about(killed))[0]["pid"], signal.SIGKILL)
        wait_until(lambda: not alive(orphans[0]), "the killed actor's subprocess is gone")
        assert alive(orphans[1])
        await within(NOTICE_S, "news of the death", cluster.watch())

    with pytest.raises(ActorFailed, match="killed failed"):
        run(hosts, body)
    wait_until(lambda: not alive(orphans[1]), "the stopped actor's subprocess is gone")
    wait_until(lambda: not any(folder.exists() for folder in folders), "the scratch folders are gone")


def test_an_actor_that_does_not_stop_is_killed_at_the_deadline(hosts: Hosts, capfd: pytest.CaptureFixture[str]) -> None:
    pids: list[int] = []

    async def body(cluster: Cluster) -> None:
        frozen = await cluster.spawn("frozen", Probe)
        other = await cluster.spawn("other", Probe)
        pids.extend([(await about(mesh))[0]["pid"] for mesh in (frozen, other)])
        os.kill(pids[0], signal.SIGSTOP)

    run(hosts, body, stop_timeout_s=1.5)
    wait_until(lambda: not any(alive(pid) for pid in pids), "both processes are gone")
    assert "mesh frozen did not stop (TimeoutError); killed " in capfd.readouterr().err


def test_in_debug_mode_every_actor_lives_in_this_process(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        trainer = await cluster.spawn("trainer", Probe)
        judge = await cluster.spawn("judge", Probe)
        for mesh in (trainer, judge):
            assert [process["pid"] for process in await about(mesh)] == [os.getpid()]
        with pytest.raises(monarch.actor.ActorError, match="KeyError: 'mine'"):
            await judge.raise_error.call_one("mine")

    run(hosts, body, MeshConfig(debug=True))


def test_two_clusters_at_once_are_refused(hosts: Hosts) -> None:
    async def body(cluster: Cluster) -> None:
        with pytest.raises(RuntimeError, match="open in this process already"):
            async with cluster:
                pass

    run(hosts, body)


def test_late_news_of_an_ended_mesh_does_not_touch_the_next_one_of_that_name(hosts: Hosts) -> None:
    async def first(cluster: Cluster) -> None:
        judge = await cluster.spawn("judge", Probe)
        pids.append((await about(judge))[0]["pid"])
        os.kill(pids[0], signal.SIGSTOP)

    async def second(cluster: Cluster) -> None:
        judge = await cluster.spawn("judge", Probe)
        # Monarch polls the first judge twice a second, and finds it dead.
        await asyncio.sleep(1.5)
        assert (await about(judge))[0]["pid"] != pids[0]

    pids: list[int] = []
    run(hosts, first, stop_timeout_s=0.2)
    run(hosts, second)
