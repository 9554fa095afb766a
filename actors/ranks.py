"""What actors that train have in common: one actor a rank, a process group of all ranks, one thread that works."""

from __future__ import annotations

import asyncio
import contextvars
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from monarch.actor import context, endpoint

from actors.trainer import process_group_backend
from forge.lasting import Beating
from forge.launch import NODE_IP_ENV
from forge.mesh import within

T = TypeVar("T")


class RankActor(Beating):
    """One of `world` ranks. Work runs in a thread: the actor stays reachable."""

    def __init__(self, world: int, name: str) -> None:
        self._world = world
        # Not `current_rank()`, which is relative to the slice that a message went to.
        self._rank = context().actor_instance.rank.rank
        # One thread for good: memory that a step frees is found again by the next one.
        self._thread = ThreadPoolExecutor(1, name)

    async def _run(self, work: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> T:
        # Monarch's calls find their actor in the context.
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(thread or self._thread, lambda: context.run(work))

    @endpoint
    async def rendezvous(self) -> str:
        """Where the ranks meet: an address of this rank's node, with a free port."""
        ip = os.environ.get(NODE_IP_ENV, "127.0.0.1")
        with socket.socket() as probe:
            probe.bind((ip, 0))
            return f"tcp://{ip}:{probe.getsockname()[1]}"

    def _join(self, address: str, device: str) -> None:
        """The process group of all ranks, where there are several, and the threads that this process may use."""
        if self._world > 1:
            dist.init_process_group(
                process_group_backend(device), init_method=address, rank=self._rank, world_size=self._world
            )
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


async def set_up(mesh: Any, world: int, timeout_s: float, who: str) -> None:
    """Calls `setup` of all ranks of `mesh` with the address where they meet; `who` is what errors call them."""
    address = ""
    if world > 1:
        (_, address), *_ = await within(timeout_s, f"the {who}'s ranks to answer", mesh.rendezvous.call())
    await within(timeout_s, f"the {who} to load the model", mesh.setup.call(address))
