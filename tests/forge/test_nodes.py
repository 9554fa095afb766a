"""Several nodes: who runs where, and how they and the controller notice each other's end."""

from __future__ import annotations

import asyncio
import queue
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from forge import nodes
from forge.errors import NodeLost
from forge.placement import MeshConfig, RoleConfig, plan_placement
from forge.supervision import FailurePolicy, Guard, Supervisor

HOLD = """
import sys, socket, time
from forge import nodes
leash = nodes.connect(int(sys.argv[1]), ("127.0.0.1", int(sys.argv[2])), 10.0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_nodes_are_known_by_their_numbers_in_whatever_order_they_come_and_strangers_are_sent_away(
    server: socket.socket,
) -> None:
    address = server.getsockname()
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        held = [nodes.connect(index, address, 10.0) for index in (2, 1)]
        found = nodes.accept(server, 2, 10.0)
    assert [str(node) for node in found] == ["node 1 (127.0.0.1)", "node 2 (127.0.0.1)"]
    assert found[0].leash.getpeername() == held[1].getsockname()
    for one in (*held, *(node.leash for node in found)):
        one.close()


def test_a_node_that_does_not_come_is_named(server: socket.socket) -> None:
    with nodes.connect(1, server.getsockname(), 10.0), pytest.raises(TimeoutError) as caught:
        nodes.accept(server, 3, 0.2)
    assert str(caught.value) == "node(s) 2, 3 did not connect"


def test_a_killed_node_is_noticed_by_its_leash(server: socket.socket) -> None:
    command = [sys.executable, "-c", HOLD, "1", str(server.getsockname()[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        (node,) = nodes.accept(server, 1, 60.0)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
    assert "has ended" in node.why_lost()  # waits for the end
    node.leash.close()


def test_the_kernel_asks_a_silent_node_and_gives_up_before_monarch_does(server: socket.socket) -> None:
    held = nodes.connect(1, server.getsockname(), 10.0)
    (node,) = nodes.accept(server, 1, 10.0)
    for leash in (held, node.leash):
        assert leash.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, questions = (
            leash.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * questions == nodes.SILENCE_S < 20
        leash.close()


def test_a_node_ends_with_the_controllers_code_or_with_1_when_it_is_gone(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sent, code in ((b"\x03", 3), (b"", 1)):
        held = nodes.connect(1, server.getsockname(), 10.0)
        (node,) = nodes.accept(server, 1, 10.0)
        monkeypatch.setattr(nodes, "exit_at_once", sys.exit)
        node.leash.sendall(sent)
        node.leash.close()
        told: queue.Queue[int] = queue.Queue()
        with pytest.raises(SystemExit) as left:
            nodes.obey(held, told, 0.0)
        assert left.value.code == code
        assert list(told.queue) == ([code] if sent else [])
        held.close()


def test_a_role_on_host_cores_runs_on_the_nodes_of_its_pool() -> None:
    cfg = MeshConfig(
        pools={"train": 2, "rollout": 4},
        trainer=RoleConfig(pool="train"),
        generator=RoleConfig(pool="rollout", replicas=3),
    )
    roles = ("trainer", "generator")
    plan = plan_placement(cfg, device="cpu", slots=2, torchrun_slots=2, roles=roles, num_hosts=3)
    assert [replica.first_host for replica in plan.replicas("generator")] == [1, 2, 1]
    assert (plan.replicas("trainer")[0].first_host, plan.replicas("trainer")[0].num_hosts) == (0, 1)
    assert not plan.batches_leave_the_first_node()
    cfg.pools = {"rollout": 4, "train": 2}
    assert plan_placement(
        cfg, device="cpu", slots=2, torchrun_slots=2, roles=roles, num_hosts=3
    ).batches_leave_the_first_node()


def test_a_replica_whose_node_is_lost_is_given_up_and_the_last_of_its_role_ends_the_run() -> None:
    async def main() -> list[str]:
        events: list[str] = []
        supervisor = Supervisor(lambda mesh: None, lambda name, why: events.append(f"end {name}: {why}"))

        async def revive() -> None:
            raise NodeLost("node 1 is lost")

        for index in (0, 1):
            guard = Guard(FailurePolicy(on_failure="respawn", heartbeat_s=0), events.append)
            guard.bind("generator", f"generator_{index}", lambda mesh, reason: None)
            supervisor.watch(guard)
            guard.arm(lambda reason: None, revive)
        for index in (1, 0):
            assert supervisor.takes(f"generator_{index}", "node 1 is lost")
            async with asyncio.timeout(60):
                while tasks := supervisor._tasks:
                    await asyncio.wait(tasks)
        return [line for line in events if "being restarted" not in line]

    assert asyncio.run(main()) == [
        "node 1 is lost; the run goes on with generator_0",
        "end generator_0: node 1 is lost",
    ]
