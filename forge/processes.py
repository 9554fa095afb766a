"""The processes of a run on this node: finding them, killing them, and noticing their death at once.

Monarch notices a death at its next poll, within half a second; but a poll that was under way when the process died
waits for its answer for 30 s. Where the processes are this machine's, the kernel tells us without delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from forge.child import RUN_ID_ENV
from forge.failure import describe_exit

__all__ = ["RANK_ENV", "RUN_ID_ENV", "DeathWatch", "MarkedProcess", "kill_marked", "marked_processes"]

RANK_ENV = "MESHFORGE_RANK"
"""Rank of a process in its mesh."""
# linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info), whose first word is a mask and whose last the status of wait(2).
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3


@dataclass(frozen=True)
class MarkedProcess:
    """A live process that carries a run's mark."""

    pid: int
    parent: int
    rank: int


def marked_processes(run_id: str, *, name: str = "") -> Iterator[MarkedProcess]:
    """This node's processes that carry the mark of the run (and of its mesh `name`), this one excepted."""
    mark = f"{RUN_ID_ENV}={run_id}/{name}".encode() + (b"\0" if name else b"")
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry}/environ", "rb") as file:
                environ = b"\0" + file.read()
            if b"\0" + mark not in environ:
                continue
            with open(f"/proc/{entry}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            _, _, rank = environ.partition(f"\0{RANK_ENV}=".encode())
            yield MarkedProcess(int(entry), parent, int(rank.partition(b"\0")[0] or 0))


def kill_marked(run_id: str, *, name: str = "") -> int:
    """SIGKILL this node's processes that carry the mark of the run (and of its mesh `name`); their number."""
    killed = 0
    for process in marked_processes(run_id, name=name):
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
    return killed


class DeathWatch:
    """Calls `on_death(name, reason)` on the running loop when a watched process ends."""

    # Time for Monarch's report, which knows the exit status, where Monarch reaped the process before we looked and
    # the kernel does not remember.
    grace_s = 2.0

    def __init__(self, on_death: Callable[[str, str], None]) -> None:
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._handles: set[int] = set()

    def watch(self, name: str, run_id: str, num_ranks: int, parents: set[int]) -> None:
        """Watch the processes of mesh `name` that `parents` have started on this node."""
        for process in marked_processes(run_id, name=name):
            if process.parent not in parents:
                continue
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(process.pid)
                self._handles.add(handle)
                rank = f"rank {process.rank} of {num_ranks}: " if num_ranks > 1 else ""
                self._loop.add_reader(handle, self._ended, handle, name, rank)

    def close(self) -> None:
        """Stop watching."""
        for handle in list(self._handles):
            self._forget(handle)

    def _ended(self, handle: int, name: str, rank: str) -> None:
        reason = ""
        with contextlib.suppress(ChildProcessError):
            # WNOWAIT leaves the process to Monarch, whose child it is.
            status = os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                reason = describe_exit(status.si_status, killed=status.si_code != os.CLD_EXITED)
        reason = reason or _remembered_exit(handle)
        self._forget(handle)
        if reason:
            self._on_death(name, rank + reason)
        else:
            self._loop.call_later(self.grace_s, self._on_death, name, f"{rank}its process ended")

    def _forget(self, handle: int) -> None:
        self._loop.remove_reader(handle)
        self._handles.discard(handle)
        os.close(handle)


def _remembered_exit(handle: int) -> str:
    """How the process behind a pidfd ended, though somebody has reaped it; "" before Linux 6.15, which forgets."""
    info = bytearray(struct.pack("=Q56x", _PIDFD_INFO_EXIT))
    try:
        fcntl.ioctl(handle, _PIDFD_GET_INFO, info)
    except OSError:
        return ""
    mask, status = struct.unpack("=Q52xi", info)
    if not mask & _PIDFD_INFO_EXIT:
        return ""
    killed = os.WIFSIGNALED(status)
    return describe_exit(os.WTERMSIG(status) if killed else os.WEXITSTATUS(status), killed=killed)
