"""The nodes of a run and the connection, its leash, by which each of them and the controller notice each other's end.

A node's processes that end close it, which the other side sees at once. A machine without power and a cut cable say
nothing: then the kernel's questions stay unanswered, and the connection breaks after SILENCE_S seconds. Nothing is
sent over it but the node's number when it is made and the run's exit code when that is known.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import time
from dataclasses import dataclass

from forge.controller import exit_at_once

# Below the 20 s after which Monarch gives up on a node, since Monarch does not say which it was.
_IDLE_S, _INTERVAL_S, _QUESTIONS = 4, 3, 4
SILENCE_S = _IDLE_S + _INTERVAL_S * _QUESTIONS
"""Seconds until a node that says nothing any more is lost."""


@dataclass(frozen=True)
class Node:
    """Another node of the run, as the controller sees it."""

    index: int
    """Its torchrun group rank; the controller's is 0."""
    ip: str
    leash: socket.socket

    def __str__(self) -> str:
        return f"node {self.index} ({self.ip})"

    def why_lost(self) -> str:
        """What ended the leash, which is readable for no other reason."""
        try:
            self.leash.recv(1)
        except OSError as error:
            silent = f"nothing was heard from it for {SILENCE_S} s: it is down, or the network between is cut"
            return (
                silent if isinstance(error, TimeoutError) else f"its connection broke: {os.strerror(error.errno or 0)}"
            )
        return "the process that torchrun had started there has ended; its own output says why"


def accept(server: socket.socket, count: int, deadline_s: float) -> list[Node]:
    """The other `count` nodes, in order; whatever else connects is sent away.

    Raises TimeoutError naming the nodes that are missing.
    """
    nodes: dict[int, Node] = {}
    deadline = time.monotonic() + deadline_s
    while missing := [index for index in range(1, count + 1) if index not in nodes]:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            leash, address = server.accept()
        except TimeoutError:
            for node in nodes.values():
                node.leash.close()
            raise TimeoutError(f"node(s) {', '.join(map(str, missing))} did not connect") from None
        index = _number(leash)
        if index in missing:
            _ask_when_idle(leash)
            nodes[index] = Node(index, address[0], leash)
        else:
            leash.close()
    return [nodes[index] for index in sorted(nodes)]


def _number(leash: socket.socket) -> int:
    """What a node says first; -1 where it is none."""
    leash.settimeout(5.0)
    try:
        return int.from_bytes(leash.recv(4, socket.MSG_WAITALL), "big")
    except OSError:
        return -1


def connect(index: int, address: tuple[str, int], deadline_s: float) -> socket.socket:
    """The leash of node `index`, held by the controller at `address`. Raises OSError."""
    leash = socket.create_connection(address, timeout=deadline_s)
    leash.sendall(index.to_bytes(4, "big"))
    _ask_when_idle(leash)
    return leash


def obey(leash: socket.socket, codes: queue.Queue[int], grace_s: float = 20.0) -> None:
    """End this node with the controller, of whose death torchrun does not tell the other nodes."""
    try:
        message = leash.recv(1)
    except OSError:
        message = b""
    if not message:
        print("the controller is gone, or the network to it; this node ends", file=sys.stderr, flush=True)
        exit_at_once(1)
    codes.put(message[0])
    # Shutting down Monarch's host ends this process before that.
    time.sleep(grace_s)
    exit_at_once(message[0])


def _ask_when_idle(leash: socket.socket) -> None:
    leash.settimeout(None)
    leash.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {socket.TCP_KEEPIDLE: _IDLE_S, socket.TCP_KEEPINTVL: _INTERVAL_S, socket.TCP_KEEPCNT: _QUESTIONS}
    for option, value in options.items():
        leash.setsockopt(socket.IPPROTO_TCP, option, value)
