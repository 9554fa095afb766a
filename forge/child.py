"""What every actor process does before Monarch takes it over; it is started as `python -m forge.child`.

Light on purpose: it runs before anything else, and processes that an actor starts (an inference engine's
core, say) may import it for `die_with_parent` at no cost.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

RUN_ID_ENV = "MESHFORGE_RUN_ID"
"""Marks the processes of a run, and whatever they start: "<run id>/<mesh name>"."""
LOG_ENV = "MESHFORGE_LOG"
"""The file that takes what a process of the run, and those that it starts, write to stderr."""
_SCRATCH_ENV = "MESHFORGE_SCRATCH"


def scratch_folder() -> Path:
    """A folder for this process's sockets and the like, removed after its death; in debug mode /tmp."""
    return Path(os.environ.get(_SCRATCH_ENV) or tempfile.gettempdir())


def die_with_parent(parent: int | None = None) -> None:
    """Kill this process as soon as its parent is gone, however the parent ended.

    For processes that an actor starts and that run our code. A thread waits on the parent: the kernel's own
    parent-death signal would fire when the *thread* that forked us ends, which is too early under executors.
    parent: pid of the expected parent, where the caller knows it; a parent that has died already is noticed.
    """
    pid = os.getppid()
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        handle = -1
    if handle < 0 or os.getppid() != pid or parent not in (None, pid):
        os.kill(os.getpid(), signal.SIGKILL)

    def wait() -> None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()


def guard_process_group() -> None:
    """Let nothing of this process outlive it, however it ends: no process of its group, no scratch folder.

    A shell waits for the end of a pipe whose only writer is this process, then kills the group and removes
    the folder. Inference engines start subprocesses which do not watch their parent; without this, SIGKILL of
    an actor would orphan them.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    folder = tempfile.mkdtemp(prefix="meshforge-")
    os.environ[_SCRATCH_ENV] = folder
    reader, writer = os.pipe()
    script = 'read -r _; kill -s KILL -- "-$1"; rm -rf -- "$2"'
    subprocess.Popen(
        ["/bin/sh", "-c", script, "guard", str(os.getpid()), folder],
        stdin=reader,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # Without the run's mark, by which the controller finds what it has to kill.
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )
    os.close(reader)

    def forget() -> None:
        nonlocal writer
        if writer >= 0:
            os.close(writer)
            writer = -1

    # A process forked without exec would hold the pipe open and so outlive us.
    os.register_at_fork(after_in_child=forget)


def start_resource_tracker() -> None:
    """Start multiprocessing's tracker outside the group that the guard kills, and outside the run's mark.

    It outlives a SIGKILL of this process by the moment it takes to unlink the semaphores that an inference engine
    had made; killed along with the group, it would leave them in /dev/shm.
    """
    env = {name: value for name, value in os.environ.items() if name != RUN_ID_ENV}
    env["PYTHONWARNINGS"] = "ignore"  # it complains of what it is there to clean up

    def spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        return subprocess.Popen(args, executable=path, pass_fds=passfds, start_new_session=True, env=env).pid

    original, util.spawnv_passfds = util.spawnv_passfds, spawn
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = original


def write_to_log() -> None:
    """From here on stderr goes to the file of `LOG_ENV`, where there is one and this node can write it.

    Libraries log there; a user's `print` stays on the terminal.
    """
    if path := os.environ.get(LOG_ENV):
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError:
            del os.environ[LOG_ENV]
            return
        os.dup2(log, 2)
        os.close(log)


def main() -> None:
    """Guard this process, then run the module that Monarch's own bootstrap command names."""
    # Ctrl-C belongs to the controller, which ends the actors in order. Subprocesses inherit this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_to_log()
    start_resource_tracker()
    guard_process_group()
    flag, module = sys.argv[1:3]
    assert flag == "-m", f"Monarch's bootstrap command has moved: {sys.argv[1:]}"
    sys.argv = [module]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    # The actors have been told and have cleaned up. Taking the interpreter and torch apart would cost seconds.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
