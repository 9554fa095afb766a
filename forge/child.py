"""What every actor process does before Monarch takes it over; the bootstrap command runs `python -m forge.child`.

Light on purpose: it runs in each process before anything else, and processes that an actor starts (an inference
engine's core, say) may import it for `die_with_parent` at no cost.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import subprocess
import sys
import threading


def die_with_parent(parent: int | None = None) -> None:
    """Kill this process as soon as its parent is gone, however the parent ended.

    For processes that an actor starts and that run our code. A thread waits on the parent: the kernel's own
    parent-death signal would fire when the *thread* that forked us ends, which is too early under executors.
    parent: pid of the expected parent, where the caller knows it; a parent that has died already is noticed.
    """
    pid = os.getppid()
    if parent is not None and pid != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        raise

    def wait() -> None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()


def guard_process_group() -> None:
    """Let no process of this one's group outlive it, whatever code that process runs and however this one ends.

    A shell waits for the end of a pipe whose only writer is this process, then kills the group. Inference engines
    start subprocesses which do not watch their parent; without this, SIGKILL of an actor would orphan them.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    reader, writer = os.pipe()
    subprocess.Popen(
        ["/bin/sh", "-c", f"read -r _; kill -KILL -- -{os.getpid()}"],
        stdin=reader,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(reader)
    # A process forked without exec would hold the pipe open and so outlive us.
    os.register_at_fork(after_in_child=lambda: os.close(writer))


def main() -> None:
    """Guard this process, then run the module that Monarch's own bootstrap command names."""
    # Ctrl-C belongs to the controller, which ends the actors in order; ignored signals stay ignored in subprocesses.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard_process_group()
    flag, module = sys.argv[1:3]
    assert flag == "-m", f"Monarch's bootstrap command has moved: {sys.argv[1:]}"
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
