"""The actors of a run: spawning them where the placement says, noticing their death, ending them.

    async with Cluster(hosts, placement) as cluster:
        trainer = await cluster.spawn("trainer", Trainer, cfg)
        generators = [await cluster.spawn("generator", Generator, cfg, replica=i) for i in range(n)]
        judge = await cluster.spawn("judge", Judge)     # a role of your own: one process on host cores
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(cluster.watch())          # raises ActorFailed when a process dies
            ...

Each replica of a role is one Monarch mesh with a name of its own. Actors must be importable: the processes
see the project root and whatever the controller's own module path starts with, never the current directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar

from forge.channel import ACROSS_NODES_ENV
from forge.child import LOG_ENV
from forge.collector import Collector
from forge.errors import ActorFailed, ConfigError, DeadlineExceeded, ForgeError, NodeLost
from forge.failure import explain, is_supervision_error, remote_exception, root_cause
from forge.launch import Hosts
from forge.nodes import Node
from forge.placement import (
    MeshConfig,
    Placement,
    ReplicaPlacement,
    RoleConfig,
    RolePlacement,
    detect_device,
    place,
    plan_placement,
)
from forge.processes import RANK_ENV, RUN_ID_ENV, DeathWatch, kill_marked
from forge.supervision import Guard, Supervisor

if TYPE_CHECKING:
    from monarch.actor import Actor, MeshFailure, Point, ProcMesh

__all__ = [
    "Cluster",
    "MeshConfig",
    "Placement",
    "ReplicaPlacement",
    "RoleConfig",
    "RolePlacement",
    "detect_device",
    "place",
    "plan_placement",
    "within",
]

T = TypeVar("T")
_ROOT = Path(__file__).resolve().parent.parent
# Each process carries a log forwarder of Monarch's under this name; its death only repeats the process's.
_MONARCH_LOGGER = "logger"


async def within(seconds: float, what: str, awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`, or DeadlineExceeded after `seconds` saying that `what` did not happen.

    A Monarch call that runs out of time is no longer waited for, but goes on in its actor. One of the project's own
    errors that an actor raised arrives as itself, with Monarch's account of it as its cause.
    """
    try:
        async with asyncio.timeout(seconds) as scope:
            return await awaitable
    except TimeoutError:
        if not scope.expired():
            raise
    except Exception as error:
        own = remote_exception(error)
        if isinstance(own, ForgeError):
            raise own from error
        raise
    raise DeadlineExceeded(f"waited {seconds:g} s for {what}, in vain")


class Cluster:
    """The meshes of one run; an async context manager that leaves no process behind.

    While nobody watches (`watch`), a failure cancels the body of the `async with` block, which then raises
    the ActorFailed; so start-up is covered too. One cluster at a time in a process.
    """

    _current: Cluster | None = None
    _ended: ClassVar[set[str]] = set()

    def __init__(
        self,
        hosts: Hosts,
        placement: Placement,
        *,
        debug: bool = False,
        logs: Path | None = None,
        spawn_timeout_s: float = 120.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        """debug: actors are threads of this process. logs: the folder that takes their stderr, a file a process; None
        leaves it on the terminal. spawn_timeout_s: until a replica's processes are up. stop_timeout_s: until a mesh
        that will not end is killed."""
        self._hosts = hosts
        self._placement = placement
        self._debug = debug
        self._logs = logs
        self._spawn_timeout_s = spawn_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._meshes: dict[str, Any] = {}
        self._names: set[str] = set()
        self._spans: dict[str, range] = {}
        if placement.batches_leave_the_first_node():
            os.environ[ACROSS_NODES_ENV] = "1"
        self._leaving = False
        self._ending = False
        self._watchers = 0
        self._cancelled_body = False
        self._supervisor = Supervisor(self._bury, self._end)
        self._burials: set[asyncio.Task[None]] = set()
        self.failure: ActorFailed | None = None

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What the roles with device slots run on."""
        return self._placement.device

    def procs(self, role: str) -> int:
        """Ranks of one replica of `role`: the trainer's world size, a generator's tensor-parallel size."""
        placed = self._placement.roles.get(role)
        return placed.procs if placed else 1

    def replicas(self, role: str) -> int:
        """Number of replicas of `role`."""
        return len(self._placement.replicas(role))

    def same_host(self, *roles: str) -> bool:
        """Whether all processes of these roles run on one node."""
        placed = [replica for role in roles for replica in self._placement.replicas(role)]
        return len({node for replica in placed for node in _nodes_of(replica)}) == 1

    async def spawn(
        self,
        role: str,
        actor_class: type[Actor],
        *args: Any,
        replica: int = 0,
        env: Mapping[str, str] | None = None,
        guard: Guard | None = None,
        **kwargs: Any,
    ) -> Any:
        """The Monarch mesh of `actor_class(*args, **kwargs)` on the processes of one replica of `role`.

        Returns when the processes are up; the class is imported and constructed there afterwards, and a
        failure of that shows as ActorFailed. A role that the placement does not list is one process on host
        cores. env: more environment for the processes (in debug mode for this process). guard: what their death
        leads to, see `forge.supervision`; without one it ends the run, and so it does in debug mode.
        Raises ConfigError for a name that is taken or cannot name a mesh.
        """
        place = self._placement.replica(role, replica)
        if not place.name.isidentifier() or place.name == _MONARCH_LOGGER:
            raise ConfigError(
                f"role {role!r} cannot name a mesh; use letters, digits and underscores, and not {_MONARCH_LOGGER!r}"
            )
        if guard is not None and not self._debug:
            place = replace(place, name=guard.bind(role, place.name, self.fail))
            self._supervisor.watch(guard)
        if place.name in self._meshes:
            raise ConfigError(f"mesh {place.name} exists already; use another role name or replica number")
        if gone := [text for node, text in self._hosts.lost.items() if node in _nodes_of(place)]:
            raise NodeLost(f"{place.name} cannot start: {gone[0]}")
        procs = self._this_process(env or {}) if self._debug else self._start_processes(place, env or {})
        if not self._debug:
            self._meshes[place.name], self._spans[place.name] = procs, _nodes_of(place)
            await self._processes_up(place.name, procs)
            self._deaths.watch(place.name, self._hosts.run_id, len(place.envs), self._hosts.parents())
        actor = procs.spawn(place.name, actor_class, *args, **kwargs)
        if self._debug:
            self._meshes[place.name] = actor
        await within(self._spawn_timeout_s, f"the actors of {place.name}", actor.initialized)
        # Private, but the only way to tell this mesh's failures from those of an earlier one of the same name.
        self._names.add(await actor._name)
        if Collector.current is not None and not self._debug:
            Collector.current.follow(place.name, actor)
        return actor

    async def _processes_up(self, name: str, procs: ProcMesh) -> None:
        """Waits for the processes of a new mesh. Raises ActorFailed when one dies or hangs before it is up."""
        try:
            await within(self._spawn_timeout_s, f"the processes of {name}", procs.initialized)
        except Exception as error:  # of what kind is Monarch's affair
            reason = str(error) if isinstance(error, DeadlineExceeded) else explain(str(error))
            if self._ending or not self._supervisor.takes(name, reason):
                self._bury(name)
            raise ActorFailed(name, reason + self._where_it_logged(name)) from error

    async def begin(self, guard: Guard) -> str:
        """See `forge.supervision.Supervisor.begin`."""
        return await self._supervisor.begin(guard)

    async def release(self, guard: Guard, goodbye: Callable[[], Awaitable[object]]) -> None:
        """See `forge.supervision.Supervisor.release`."""
        await self._supervisor.release(guard, goodbye)

    def _this_process(self, env: Mapping[str, str]) -> ProcMesh:
        """Debug mode: actors are threads of this process, so that a debugger reaches the terminal."""
        from monarch.actor import this_proc

        # The mark is for subprocesses of the actors, which end with the run here too.
        os.environ.update({**env, RUN_ID_ENV: f"{self._hosts.run_id}/debug"})
        return this_proc()

    def _start_processes(self, place: ReplicaPlacement, env: Mapping[str, str]) -> ProcMesh:
        """Start the processes of a replica, each with its own environment."""
        from monarch.actor import default_bootstrap_cmd

        command = default_bootstrap_cmd()
        # -P keeps the current directory off the module path: a package there could pass for one of ours.
        command.args = ["-P", "-m", "forge.child", *command.args]
        across = {key: os.environ[key] for key in (ACROSS_NODES_ENV,) if key in os.environ}
        common = {**env, **across, "PYTHONPATH": _module_path(), RUN_ID_ENV: f"{self._hosts.run_id}/{place.name}"}

        def bootstrap(point: Point) -> Any:
            own = {RANK_ENV: str(point.rank)}
            if self._logs is not None:
                rank = f"-rank{point.rank}" if len(place.envs) > 1 else ""
                own[LOG_ENV] = str(self._logs.absolute() / f"{place.name}{rank}.log")
            return command.with_env({**place.envs[point.rank], **common, **own})

        mesh = self._hosts.mesh
        if self._hosts.num_hosts > 1:
            mesh = mesh.slice(hosts=slice(place.first_host, place.first_host + place.num_hosts))
        return mesh.spawn_procs(
            per_host={"procs": place.processes_per_host}, name=place.name, bootstrap_command=bootstrap
        )

    async def watch(self) -> NoReturn:
        """Run until an actor fails, then raise ActorFailed, within about a second of the death."""
        self._watchers += 1
        try:
            await self._failed.wait()
        finally:
            self._watchers -= 1
        assert self.failure is not None
        raise self.failure

    def fail(self, name: str, reason: str) -> None:
        """Declare the mesh `name` dead; the first declaration counts. Call it on the cluster's own loop."""
        if self._ending or self.failure is not None or self._supervisor.takes(name, reason):
            return
        self._end(name, reason)

    def _lose(self, node: Node) -> None:
        """The node's leash says that it is gone: what ran there is dead, whatever Monarch finds out later."""
        self._loop.remove_reader(node.leash)
        lost = self._hosts.lost
        lost[node.index] = f"{node} is lost: {node.why_lost()}"
        for name in list(self._meshes):
            if node.index in self._spans.get(name, ()):
                self.fail(name, lost[node.index])

    def _end(self, name: str, reason: str) -> None:
        """The run cannot go on without the actor `name`."""
        if self._ending or self.failure is not None:
            return
        self.failure = ActorFailed(name, reason + self._where_it_logged(name))
        self._failed.set()
        if self._watchers == 0 and not self._leaving:
            self._cancelled_body = True
            self._body.cancel()

    def _where_it_logged(self, name: str) -> str:
        """Another line for the reason of the end of `name`, where it left more than that."""
        logs = sorted(self._logs.glob(f"{name}*.log")) if self._logs is not None else []
        told = [str(path) for path in logs if path.stat().st_size]
        return f"\nmore in {', '.join(told)}" if told else ""

    def _bury(self, name: str) -> None:
        """Ends what is left of a dead mesh; nobody waits for it. Processes of other nodes end with their mesh."""
        if Collector.current is not None:
            Collector.current.forget(name)
        kill_marked(self._hosts.run_id, name=name)
        if (mesh := self._meshes.pop(name, None)) is not None:
            burial = asyncio.create_task(self._stop(name, mesh, quiet=True))
            self._burials.add(burial)
            burial.add_done_callback(self._burials.discard)

    async def __aenter__(self) -> Cluster:
        import monarch.actor

        if Cluster._current is not None:
            raise RuntimeError("a Cluster is open in this process already; close it first")
        body = asyncio.current_task()
        assert body is not None
        self._body = body
        self._cancelling = body.cancelling()
        self._failed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._deaths = DeathWatch(self.fail)
        for node in self._hosts.nodes:
            self._loop.add_reader(node.leash, self._lose, node)
        Cluster._current = self
        # Stays for good: late failures of meshes that have been stopped must not end the process either.
        monarch.actor.unhandled_fault_hook = _on_fault
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._leaving = True
        dead_actor = error is not None and is_supervision_error(root_cause(error))
        try:
            if dead_actor:
                # A call failed because its actor is dead; who died, and of what, arrives by another way.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._failed.wait(), timeout=DeathWatch.grace_s + 1.0)
        finally:
            self._ending = True
            try:
                await self._stop_all()
            except asyncio.CancelledError:
                if not self._cancelled_body:
                    raise
            finally:
                self._deaths.close()
                for node in self._hosts.nodes:
                    self._loop.remove_reader(node.leash)
                Cluster._ended |= self._names
                Cluster._current = None
        if self.failure is None:
            return
        cancelled_by_us = self._cancelled_body and self._body.uncancel() <= self._cancelling
        if error is None or dead_actor or (cancelled_by_us and isinstance(error, asyncio.CancelledError)):
            raise self.failure from None

    async def _stop_all(self) -> None:
        """Stop every mesh at once. Cancelling does not cut this short: it ends by itself at its deadline."""
        stops = asyncio.ensure_future(self._stop_meshes())
        try:
            await asyncio.shield(stops)
        except asyncio.CancelledError:
            await stops
            raise

    async def _stop_meshes(self) -> None:
        await self._supervisor.close()
        if Collector.current is not None:
            await Collector.current.finish()
        meshes, self._meshes = self._meshes, {}
        await asyncio.gather(*(self._stop(name, mesh) for name, mesh in meshes.items()), *self._burials)

    async def _stop(self, name: str, mesh: Any, *, quiet: bool = False) -> None:
        """Stop one mesh; processes that outlive the deadline are killed."""
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await mesh.stop()
        except Exception as error:
            killed = kill_marked(self._hosts.run_id, name=name)
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            if quiet or not self._hosts.lost.keys().isdisjoint(self._spans.get(name, ())):
                return  # its processes were dead, or have been killed before, or their node is gone
            print(f"mesh {name} did not stop ({reason}); killed {killed} process(es)", file=sys.stderr)


def _nodes_of(place: ReplicaPlacement) -> range:
    return range(place.first_host, place.first_host + place.num_hosts)


def _on_fault(failure: MeshFailure) -> None:
    """Monarch's hook for failures that no actor handled; runs on a thread of Monarch's."""
    cluster = Cluster._current
    # mesh_name is the name given at spawn, a dash and a unique suffix.
    name = failure.mesh_name.rpartition("-")[0] or failure.mesh_name
    if cluster is None or name == _MONARCH_LOGGER or failure.mesh_name in Cluster._ended:
        return
    # In this thread's context Monarch takes a caller for the actor that failed, and would spawn nothing.
    context = cluster._context.copy()
    cluster._loop.call_soon_threadsafe(cluster.fail, name, explain(failure.report()), context=context)


def _module_path() -> str:
    """PYTHONPATH of the actor processes: the project root, then what precedes the standard library here."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    entries = [str(_ROOT)]
    for entry in sys.path:
        path = Path(entry or os.getcwd()).absolute()
        if path == stdlib or (path.suffix == ".zip" and path.parent == stdlib.parent):
            break
        entries.append(str(path))
    return os.pathsep.join(dict.fromkeys(entries))
