"""All processes of a sandboxed program: what they use together, and their end.

For the first process of a sandbox (`actors/environments/sandbox_child.py`): in a namespace all others are the
program's; elsewhere its descendants are, since orphans become its children.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from typing import NamedTuple

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_KILL_DEADLINE_S = 60.0


class Usage(NamedTuple):
    """Of all processes together."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    peak_bytes: int = 0
    processes: int = 0
    """Threads, as the kernel counts them for RLIMIT_NPROC."""


class Process(NamedTuple):
    """One line of /proc/<pid>/stat."""

    pid: int
    parent: int
    group: int
    state: str
    cpu_ticks: int
    """Its own and those of its children that it waited for."""
    threads: int
    resident_pages: int


def read_process(pid: int) -> Process | None:
    """None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name before this may hold any character.
    fields = text[text.rindex(b")") + 2 :].split()
    ticks = sum(int(field) for field in fields[11:15])
    return Process(pid, int(fields[1]), int(fields[2]), fields[0].decode(), ticks, int(fields[17]), int(fields[21]))


def members(namespaces: bool) -> list[Process]:
    """The program's processes, zombies included."""
    if namespaces:
        return [process for process in _all() if process.pid != os.getpid()]
    found, known = [], {os.getpid()}
    rest = list(_all())
    # A parent's number may be higher than its child's: until a pass finds no more.
    while new := [process for process in rest if process.parent in known]:
        found += new
        known |= {process.pid for process in new}
        rest = [process for process in rest if process.pid not in known]
    return found


def _all() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := read_process(int(name))) is not None:
            yield process


def measure(namespaces: bool, limit_bytes: int, before: Usage) -> Usage:
    """What they use now. Memory shared among them is counted once where that decides over `limit_bytes`."""
    processes = members(namespaces)
    memory = sum(process.resident_pages for process in processes) * _PAGE_BYTES
    if memory > limit_bytes:
        memory = sum(_proportional_bytes(process) for process in processes)
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = sum(process.cpu_ticks for process in processes) * _TICK_S + waited.ru_utime + waited.ru_stime
    threads = sum(process.threads for process in processes)
    return Usage(max(cpu_s, before.cpu_s), memory, max(memory, before.peak_bytes), threads)


def _proportional_bytes(process: Process) -> int:
    with contextlib.suppress(OSError):
        with open(f"/proc/{process.pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    return process.resident_pages * _PAGE_BYTES


def kill_all(namespaces: bool, user: int | None) -> None:
    """Ends every process of the program and returns when they are gone, or raises TimeoutError.

    user: the user that is this run's alone, if there is one.
    """
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while time.monotonic() < deadline:
        if namespaces:
            # From process 1 this reaches all others of the namespace, at once.
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            if user is not None:
                _kill_user(user)
            _stop_and_kill()
        if _reaped_all():
            return
        time.sleep(0.001)
    raise TimeoutError(f"processes of the program are still there {_KILL_DEADLINE_S:g} s after they were killed")


def _kill_user(user: int) -> None:
    """Everything that runs as `user`, at once, so that nothing is forked meanwhile."""
    helper = os.fork()
    if helper == 0:
        with contextlib.suppress(OSError):
            os.setresuid(user, user, user)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(helper, 0)


def _stop_and_kill() -> None:
    """Every descendant. Whole groups first, which the kernel reaches at once, then each that is still there: stopped,
    until no running one is found, so that none of them forks during the walk."""
    for group in {process.group for process in members(False)} - {os.getpgrp()}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    while running := [process for process in members(False) if process.state not in "TZX"]:
        for process in running:
            _signal(process.pid, signal.SIGSTOP)
        _reaped_all()
    for process in members(False):
        _signal(process.pid, signal.SIGKILL)


def threads_of_user() -> int:
    """As RLIMIT_NPROC counts them, for the real user of this process; those that hide their user are missing."""
    total, user = 0, os.getuid()
    for process in _all():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{process.pid}").st_uid == user:
                total += process.threads
    return total


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _reaped_all() -> bool:
    """Takes the ends there are; True when no child is left, and so no descendant: orphans come here."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False
