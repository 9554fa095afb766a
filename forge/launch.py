"""From a command line to Monarch hosts, and from a coroutine to an exit code.

    python app.py                                  one node
    torchrun --nproc-per-node N app.py             one node with N device slots
    torchrun --nnodes M --nproc-per-node N --rdzv-backend c10d --rdzv-endpoint HOST:PORT app.py
                                                   on each of M nodes

`bring_up()` turns local rank 0 of every node into a Monarch host; other local ranks exit 0 at once, since
torchrun's process count only says how many device slots a node has. Global rank 0 is the controller, the only
process that returns from `bring_up()`. `run()` drives the controller's coroutine, answers Ctrl-C and ends the
process.

This module is the sole reader of RANK, WORLD_SIZE and the like. Links between nodes are neither encrypted nor
authenticated (Monarch has no TLS): use a network that you trust.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from forge import nodes
from forge.controller import Controller, Stopping, exit_at_once, exit_on_signals
from forge.errors import LaunchError
from forge.nodes import Node
from forge.processes import kill_marked

if TYPE_CHECKING:
    from monarch.actor import HostMesh

_MONARCH_ENV = {
    # The default poll, every 10 s, would leave a dead actor unnoticed for as long.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",
    # A loaded machine may take longer than the default 30 s to start a process.
    "HYPERACTOR_HOST_SPAWN_READY_TIMEOUT": "120s",
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "120s",
    # Its log in the temp folder, which nobody rotates, would grow by megabytes an hour.
    "MONARCH_FILE_LOG": "error",
}
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
__all__ = [
    "INTERFACE_ENV",
    "NODE_IP_ENV",
    "Hosts",
    "Stopping",
    "bring_up",
    "configure_monarch",
    "leave_spare_ranks",
    "run",
]

NODE_IP_ENV = "MESHFORGE_NODE_IP"
"""The address by which other nodes reach this one; set in every process of several nodes, yours first."""
INTERFACE_ENV = "MESHFORGE_INTERFACE"
"""The network interface over which nodes talk, such as ib0; by default the one that leads to the first node."""
_SHUTDOWN_S = 10.0
_JOIN_S = 60.0
_SIOCGIFADDR = 0x8915  # linux/sockios.h

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
    nodes: Sequence[Node] = ()
    """The nodes but the controller's."""
    lost: dict[int, str] = field(default_factory=dict)
    """Which of them are gone, by number, and what is known of it."""
    local_worker: subprocess.Popen[bytes] | None = None
    """The controller node's own host process, where there are several nodes."""

    def parents(self) -> set[int]:
        """Pids on this node whose children the actor processes are."""
        return {os.getpid()} | ({self.local_worker.pid} if self.local_worker else set())

    def tear_down(self, code: int = 0) -> None:
        """End every process of the run, within half a minute whatever is broken; Monarch is spent then."""
        from monarch.actor import shutdown_context

        for node in self.nodes:
            # To a node that is lost it cannot be sent, and that has been said.
            with contextlib.suppress(OSError):
                node.leash.sendall(bytes([code % 256]))
        if self.lost and self.local_worker is not None:
            self.local_worker.kill()  # Monarch's way to end it would wait for the lost ones
        elif self.num_hosts > 1:
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


def leave_spare_ranks() -> tuple[int | None, int]:
    """(torchrun's --nproc-per-node or None under plain python, number of nodes); local ranks but 0 exit here.

    Call it before anything is parsed or printed, so that a node says things once.
    """
    if "RANK" not in os.environ:
        return None, 1
    if os.environ["LOCAL_RANK"] != "0":
        exit_at_once(0)
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    return local_world, int(os.environ["WORLD_SIZE"]) // local_world


def bring_up() -> Hosts:
    """Start or join the run's Monarch hosts; returns on the controller only.

    torchrun's variables are stripped, since `init_process_group` in an actor would otherwise wait for the
    ranks of torchrun. Raises LaunchError where the nodes cannot be joined.
    """
    exit_on_signals()
    if "RANK" not in os.environ:
        return _one_node(None)
    rank, local_rank, world, local_world = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    if local_rank != 0:
        exit_at_once(0)
    if world == local_world:
        _strip_torchrun_env()
        return _one_node(local_world)
    return _several_nodes(rank // local_world, world // local_world, local_world)


def _one_node(slots: int | None) -> Hosts:
    configure_monarch(_MONARCH_ENV)
    from monarch.actor import this_host

    return Hosts(this_host(), slots)


def _several_nodes(node: int, num_nodes: int, slots: int) -> Hosts:
    """Exchange addresses through torchrun's store; the controller then attaches to every node."""
    from torch.distributed.rendezvous import rendezvous

    configure_monarch(_MONARCH_ENV | _MONARCH_NODES_ENV)
    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store, _, _ = next(rendezvous("env://"))
    ip = os.environ.setdefault(NODE_IP_ENV, _ip_of_interface() or _own_ip(*master))
    address = f"tcp://{ip}:{_free_port(ip)}"
    store.set(f"meshforge/host/{node}", address)
    _strip_torchrun_env()
    if node != 0:
        leash_ip, _, leash_port = store.get("meshforge/leash").decode().rpartition(":")
        _serve_node(nodes.connect(node, (leash_ip, int(leash_port)), _JOIN_S), ip, address)
    from monarch.actor import attach_to_workers, enable_transport

    worker = _start_host_worker(ip, address)
    enable_transport(f"tcp://{ip}:0")
    try:
        others = _take_leashes(store, ip, num_nodes - 1)
        addresses = [store.get(f"meshforge/host/{index}").decode() for index in range(num_nodes)]
        mesh = attach_to_workers(ca="trust_all_connections", workers=list(addresses), name="hosts")
        mesh.initialized.get(timeout=_JOIN_S)
    except Exception as error:
        raise LaunchError(f"{num_nodes} nodes could not be joined within {_JOIN_S:g} s: {error}") from error
    return Hosts(mesh, slots, num_nodes, nodes=others, local_worker=worker)


def _take_leashes(store: Any, ip: str, count: int) -> list[Node]:
    """The other `count` nodes, which find the way through torchrun's store."""
    with socket.create_server((ip, 0)) as server:
        store.set("meshforge/leash", f"{ip}:{server.getsockname()[1]}")
        return nodes.accept(server, count, _JOIN_S)


def _serve_node(leash: socket.socket, ip: str, address: str) -> NoReturn:
    """Be a Monarch host until the controller is done or gone."""
    # A cluster that ends a job tells all nodes at once. The controller then ends its step and the run, and this node
    # with it. SIG_IGN would be inherited by the actors.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    codes: queue.Queue[int] = queue.Queue()
    threading.Thread(target=nodes.obey, args=(leash, codes), daemon=True).start()
    from monarch.actor import enable_transport, run_worker_loop_until_shutdown

    enable_transport(f"tcp://{ip}:0")
    run_worker_loop_until_shutdown(address=address, ca="trust_all_connections")
    # With the controller's code: a torchrun agent whose node succeeds waits minutes for one whose node failed.
    exit_at_once(codes.get(timeout=_SHUTDOWN_S))


def _start_host_worker(ip: str, address: str) -> subprocess.Popen[bytes]:
    """The controller node's own host; it ends when the pipe whose writer we keep is closed by our death."""
    reader, _writer = os.pipe()
    command = [sys.executable, "-c", _HOST_WORKER, ip, address, str(reader)]
    worker = subprocess.Popen(command, pass_fds=(reader,), start_new_session=True)
    os.close(reader)
    return worker


def _own_ip(peer: str, port: int) -> str:
    """The address by which this node reaches `peer`, hence the one by which peers reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, port))
        return str(probe.getsockname()[0])


def _ip_of_interface() -> str:
    """The IPv4 address of the interface that the user names, if any; NCCL and gloo then take it too."""
    name = os.environ.get(INTERFACE_ENV, "")
    if not name:
        return ""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        except OSError as error:
            there = ", ".join(other for _, other in socket.if_nameindex())
            raise LaunchError(
                f"{INTERFACE_ENV} is {name!r}, which has no IPv4 address here ({error.strerror}); there are {there}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _free_port(ip: str) -> int:
    with socket.socket() as probe:
        probe.bind((ip, 0))
        return int(probe.getsockname()[1])


def _strip_torchrun_env() -> None:
    for name in list(os.environ):
        if name in _TORCHRUN_ENV or name.startswith(("TORCHELASTIC_", "TORCH_NCCL_ASYNC")):
            del os.environ[name]


def configure_monarch(env: dict[str, str]) -> None:
    """Put `env` in force, whether or not Monarch has been imported; values that the user has set win."""
    for name, value in env.items():
        os.environ.setdefault(name, value)
    if "monarch._rust_bindings" in sys.modules:
        # Monarch reads its environment at import, and an app's imports may well be sorted before ours. There
        # is no public way to make it look again; tests/forge/test_launch.py notices if this one moves.
        from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env

        reload_config_from_env()


def run(main: Callable[[Hosts, Stopping], Awaitable[object]], hosts: Hosts) -> NoReturn:
    """Run `main(hosts, stopping)` to its end, tear the run down and exit.

    Exit codes: 0 the coroutine returned; 130 it ended because of Ctrl-C, 143 because of SIGTERM; 2 for a
    ConfigError; 1 for any other error. An error is printed once. The first signal sets `stopping`, the second
    cancels the coroutine, the third ends the process on the spot.
    """
    code = Controller(lambda stopping: main(hosts, stopping)).drive()
    hosts.tear_down(code)
    exit_at_once(code)
