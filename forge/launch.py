"""From a command line to Monarch hosts, and from a coroutine to an exit code.

    python app.py                                                      one node
    torchrun --nproc-per-node N app.py                                 one node with N device slots
    torchrun --nnodes M --nproc-per-node N --rdzv-backend c10d --rdzv-endpoint HOST:PORT app.py     on each of M nodes

`bring_up()` turns local rank 0 of every node into a Monarch host; other local ranks exit 0 at once, since torchrun's
process count only says how many device slots a node has. Global rank 0 is the controller, the only process that
returns from `bring_up()`. `run()` drives the controller's coroutine, answers Ctrl-C and ends the process.

This module is the sole reader of RANK, WORLD_SIZE and the like. Links between nodes are neither encrypted nor
authenticated (Monarch has no TLS): use a network that you trust.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from forge.errors import ActorFailed, ConfigError, ForgeError, LaunchError

if TYPE_CHECKING:
    from monarch.actor import HostMesh

# Monarch reads these once. Polls every 10 s would leave a dead actor unnoticed for as long.
_MONARCH_ENV = {"HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms"}
# With several nodes: give up on a lost one after 20 s instead of 69 s.
_MONARCH_NODES_ENV = {
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "20s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "20s",
    "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "20s",
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "20s",
}
_TORCHRUN_ENV = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
)
RUN_ID_ENV = "MESHFORGE_RUN_ID"
_SHUTDOWN_S = 10.0
_STORE_PREFIX = "meshforge"

_HOST_WORKER = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.SIG_IGN)
def watch(fd):
    while os.read(fd, 1): pass
    os._exit(1)
threading.Thread(target=watch, args=(int(sys.argv[3]),), daemon=True).start()
from monarch.actor import enable_transport, run_worker_loop_until_shutdown
enable_transport(f"tcp://{sys.argv[1]}:0")
run_worker_loop_until_shutdown(address=sys.argv[2], ca="trust_all_connections")
os._exit(0)
"""


@dataclass
class Hosts:
    """The nodes of a run, as the controller sees them."""

    mesh: HostMesh
    """Monarch's hosts; extent {} on one node, {hosts: num_hosts} on several."""
    slots_per_host: int | None = None
    """torchrun's --nproc-per-node; None under plain python."""
    num_hosts: int = 1
    """Number of nodes."""
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Marks every process of the run, in its environment."""
    store: Any = None
    """The rendezvous store of several nodes."""
    local_worker: subprocess.Popen[bytes] | None = None
    """The controller node's own host process, where there are several nodes."""

    def tear_down(self) -> None:
        """End every process of the run; returns within about half a minute, whatever is broken. Call it last."""
        from monarch.actor import shutdown_context

        if self.store is not None:
            _best_effort(lambda: self.store.set(f"{_STORE_PREFIX}/done", "1"))
            _best_effort(lambda: self.mesh.shutdown().get(timeout=_SHUTDOWN_S))
        if self.local_worker is not None:
            _best_effort(lambda: self.local_worker and self.local_worker.wait(_SHUTDOWN_S))
        _best_effort(lambda: shutdown_context(host_timeout=_SHUTDOWN_S / 2).get(timeout=_SHUTDOWN_S))
        kill_marked(self.run_id)


def _best_effort(step: Callable[[], object]) -> None:
    """Run one step of the tear-down; the next one must run whatever happens."""
    try:
        step()
    except Exception as error:
        print(f"while ending the run: {type(error).__name__}: {error}", file=sys.stderr)


def kill_marked(run_id: str, *, name: str = "") -> int:
    """SIGKILL the processes on this node that carry the mark of the run (and of the mesh `name`); their number."""
    mark = f"{RUN_ID_ENV}={run_id}/{name}".encode()
    mark += b"\0" if name else b""
    killed = 0
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry}/environ", "rb") as file:
                marked = mark in file.read()
            if marked:
                os.kill(int(entry), signal.SIGKILL)
                killed += 1
    return killed


def bring_up() -> Hosts:
    """Start or join the run's Monarch hosts; returns on the controller only.

    Reads how it was launched from torchrun's variables and strips them, since `init_process_group` in an actor
    would otherwise wait for torchrun's ranks. Raises LaunchError where the nodes cannot be joined.
    """
    _stop_at_once_on_signals()
    if "RANK" not in os.environ:
        return _one_node(None)
    rank, local_rank, world, local_world = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    if local_rank != 0:
        _exit(0)
    if world == local_world:
        _strip_torchrun_env()
        return _one_node(local_world)
    return _several_nodes(rank // local_world, world // local_world, local_world)


def _one_node(slots: int | None) -> Hosts:
    _configure_monarch(_MONARCH_ENV)
    from monarch.actor import this_host

    return Hosts(this_host(), slots)


def _several_nodes(node: int, num_nodes: int, slots: int) -> Hosts:
    """Exchange addresses through torchrun's store; the controller then attaches to every node."""
    import torch.distributed as dist

    _configure_monarch(_MONARCH_ENV | _MONARCH_NODES_ENV)
    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store, _, _ = next(dist.rendezvous("env://"))
    ip = os.environ.get("MESHFORGE_NODE_IP") or _own_ip(*master)
    address = f"tcp://{ip}:{_free_port(ip)}"
    store.set(f"{_STORE_PREFIX}/host/{node}", address)
    _strip_torchrun_env()
    if node != 0:
        _serve_node(store, ip, address)
    from monarch.actor import attach_to_workers, enable_transport

    worker = _start_host_worker(ip, address)
    enable_transport(f"tcp://{ip}:0")
    addresses = [store.get(f"{_STORE_PREFIX}/host/{index}").decode() for index in range(num_nodes)]
    mesh = attach_to_workers(ca="trust_all_connections", workers=list(addresses), name="hosts")
    try:
        mesh.initialized.get(timeout=60)
    except Exception as error:
        raise LaunchError(f"the {num_nodes} nodes {addresses} could not be joined within 60 s: {error}") from error
    return Hosts(mesh, slots, num_nodes, store=store, local_worker=worker)


def _serve_node(store: Any, ip: str, address: str) -> NoReturn:
    """Be a Monarch host until the controller is done or gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_watch_store, args=(store.clone(),), daemon=True).start()
    from monarch.actor import enable_transport, run_worker_loop_until_shutdown

    enable_transport(f"tcp://{ip}:0")
    run_worker_loop_until_shutdown(address=address, ca="trust_all_connections")
    _exit(0)


def _watch_store(store: Any, period_s: float = 2.0, grace_s: float = 20.0) -> None:
    """End this node with the run: torchrun does not tell the other nodes that node 0 died, its store does."""
    while True:
        time.sleep(period_s)
        try:
            done = store.check([f"{_STORE_PREFIX}/done"])
        except Exception as error:
            print(f"the controller is gone ({type(error).__name__}); ending this node", file=sys.stderr, flush=True)
            os._exit(1)
        if done:
            time.sleep(grace_s)
            os._exit(0)


def _start_host_worker(ip: str, address: str) -> subprocess.Popen[bytes]:
    """The controller node's own host; it ends when the pipe whose writer we keep is closed by our death."""
    reader, _writer = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, "-c", _HOST_WORKER, ip, address, str(reader)], pass_fds=(reader,), start_new_session=True
    )
    os.close(reader)
    return worker


def _own_ip(peer: str, port: int) -> str:
    """The address by which this node reaches `peer`, hence the one by which peers reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, port))
        return str(probe.getsockname()[0])


def _free_port(ip: str) -> int:
    with socket.socket() as probe:
        probe.bind((ip, 0))
        return int(probe.getsockname()[1])


def _strip_torchrun_env() -> None:
    for name in list(os.environ):
        if name in _TORCHRUN_ENV or name.startswith(("TORCHELASTIC_", "TORCH_NCCL_ASYNC")):
            del os.environ[name]


def _configure_monarch(env: dict[str, str]) -> None:
    """Put `env` in force, whether or not Monarch has been imported; values that the user has set win."""
    for name, value in env.items():
        os.environ.setdefault(name, value)
    if "monarch._rust_bindings" in sys.modules:
        # Monarch reads its environment at import, and an app's imports may well be sorted before ours. There is no
        # public way to make it look again; tests/forge/test_mesh.py notices if this one moves.
        from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env

        reload_config_from_env()


class Stopping(asyncio.Event):
    """Set by the first Ctrl-C (or SIGTERM): finish the step, write the checkpoint, return."""

    def __init__(self) -> None:
        super().__init__()
        self.immediate = False
        """True while the first Ctrl-C cancels the run at once."""

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, the first Ctrl-C cancels the run: for start-up, where there is nothing yet worth saving."""
        self.immediate = True
        try:
            yield
        finally:
            self.immediate = False


Main = Callable[[Hosts, Stopping], Awaitable[object]]


def run(main: Main, hosts: Hosts) -> NoReturn:
    """Run `main(hosts, stopping)` to its end, tear the run down and exit.

    Exit codes: 0 the coroutine returned; 130 after Ctrl-C and 143 after SIGTERM, however it then ended; 2 for a
    ConfigError; 1 for any other error, which is printed once. The first signal sets `stopping`, the second cancels
    the coroutine, the third ends the process on the spot.
    """
    code = _Run(main, hosts).drive()
    hosts.tear_down()
    _exit(code)


class _Run:
    """One controller coroutine under signal handling."""

    def __init__(self, main: Main, hosts: Hosts) -> None:
        self._main = main
        self._hosts = hosts
        self._presses = 0
        self._last_press_s = float("-inf")
        self._signal: int | None = None
        self._loop = asyncio.new_event_loop()

    def drive(self) -> int:
        """The exit code; errors have been printed."""
        asyncio.set_event_loop(self._loop)
        self._stopping = Stopping()
        self._task = self._loop.create_task(self._call_main(), name="main")
        # Handlers of the signal module run even while synchronous code holds the loop; the loop's own would not.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            self._loop.run_until_complete(self._task)
            code = 0
        except (asyncio.CancelledError, KeyboardInterrupt):
            code = 1 if self._signal is None else 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException as error:
            code = print_failure(error)
            return code
        self._cancel_leftovers()
        return code if self._signal is None else 128 + self._signal

    async def _call_main(self) -> None:
        await self._main(self._hosts, self._stopping)

    def _on_signal(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        # A terminal and torchrun's agent may both deliver one press.
        if now - self._last_press_s < 0.3:
            return
        self._last_press_s = now
        self._presses += 1
        self._signal = self._signal or number
        if self._presses >= 3 or self._task.done():
            _exit(128 + self._signal)
        self._loop.call_soon_threadsafe(self._on_press, self._presses)

    def _on_press(self, presses: int) -> None:
        immediate = presses > 1 or self._stopping.immediate
        self._stopping.set()
        if immediate:
            print("\nstopping now", file=sys.stderr, flush=True)
            self._task.cancel()
        else:
            print("\nstopping after this step; press Ctrl-C again to stop now", file=sys.stderr, flush=True)

    def _cancel_leftovers(self, timeout_s: float = 2.0) -> None:
        """Cancel what the coroutine left running. Executor threads are not waited for: the process exits anyway."""
        leftovers = asyncio.all_tasks(self._loop)
        for task in leftovers:
            task.cancel()
        if leftovers:
            self._loop.run_until_complete(asyncio.wait(leftovers, timeout=timeout_s))


def _stop_at_once_on_signals() -> None:
    """Until `run` takes over, a signal ends the process; Monarch ends its children."""

    def stop(number: int, _frame: object) -> None:
        print("\nstopped before the run began", file=sys.stderr, flush=True)
        _exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _exit(code: int) -> NoReturn:
    """Leave without interpreter finalisation, in which Monarch's runtime now and then aborts."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def print_failure(error: BaseException) -> int:
    """Print the root cause of `error` once, and give the exit code."""
    root = root_cause(error)
    print(describe(root), file=sys.stderr, flush=True)
    for other in _leaves(error):
        if isinstance(other, ActorFailed) and other is not root:
            print(f"at the same time: {str(other).splitlines()[0]}", file=sys.stderr, flush=True)
    return 2 if isinstance(root, ConfigError) else 1


def describe(error: BaseException) -> str:
    """What a user needs to see of `error`: a typed error's text, an actor's own traceback, else the traceback."""
    remote = _remote_exception(error)
    if remote is not None:
        if isinstance(remote, ForgeError):
            return f"{type(remote).__name__}: {remote}\n(raised in an actor: {_first_line(error)})"
        return str(error).rstrip()
    if isinstance(error, ForgeError):
        return f"{type(error).__name__}: {error}"
    # Chained local noise (the group that carried the error) stays out.
    return "".join(traceback.format_exception(type(error), error, error.__traceback__, chain=True)).rstrip()


def root_cause(error: BaseException) -> BaseException:
    """The one exception behind `error`, which may be a TaskGroup's.

    An exception of user code comes before an ActorFailed, which names the dead actor, and that before the
    SupervisionErrors with which calls to that actor fail as a consequence.
    """
    return min(_leaves(error), key=_rank)


def _rank(error: BaseException) -> int:
    if isinstance(error, asyncio.CancelledError):
        return 3
    if is_supervision_error(error):
        return 2
    return 1 if isinstance(error, ActorFailed) else 0


def _leaves(error: BaseException) -> list[BaseException]:
    """The exceptions of a group in order, depth first; the exception itself where it is no group."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in _leaves(member)]
    return [error]


def is_supervision_error(error: BaseException) -> bool:
    """Whether a call failed because the actor is dead (Monarch's SupervisionError, which has no public name)."""
    return type(error).__name__ == "SupervisionError"


def _remote_exception(error: BaseException) -> BaseException | None:
    """The exception that an actor raised, where `error` is Monarch's ActorError around it."""
    if type(error).__name__ != "ActorError":
        return None
    inner = getattr(error, "exception", None)
    if isinstance(inner, BaseException):
        return _remote_exception(inner) or inner
    return None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
