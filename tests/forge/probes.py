"""Actors for the tests of launch and meshes, importable in actor processes as a user's module would be."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

from monarch.actor import Actor, concurrent_endpoint, context, endpoint

from forge.child import scratch_folder


class Probe(Actor):
    """Tells about its process, and fails on demand."""

    def __init__(self, error: str = "") -> None:
        self.rank = context().actor_instance.rank.rank
        if error:
            raise ValueError(error)

    @endpoint
    async def about(self) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            "group": os.getpgrp(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "extra": os.environ.get("PROBE_EXTRA"),
            "ignores_interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "path": sys.path,
            "torchrun": sorted(name for name in os.environ if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")),
            "scratch": str(scratch_folder()),
        }

    @concurrent_endpoint
    async def sleep(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @endpoint
    async def start_subprocess(self) -> int:
        """An orphan to be: its parent does not wait for it, and it does not watch its parent."""
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        return (await asyncio.to_thread(subprocess.Popen, command)).pid

    @endpoint
    async def raise_error(self, text: str) -> None:
        raise KeyError(text)

    @endpoint
    async def complain(self, text: str) -> None:
        command = ["/bin/sh", "-c", 'echo "$1" >&2', "sh", text]
        await asyncio.to_thread(subprocess.run, command, check=True)
        print(text, file=sys.stderr)

    @endpoint
    async def exit(self, code: int) -> None:
        os._exit(code)
