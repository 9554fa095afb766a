"""How much memory a process may use, and how much it and its children have held at most."""

from __future__ import annotations

import os


def peak_rss_bytes(pid: int | None = None) -> int:
    """Sum of the peak resident sizes of `pid` (default: this process) and of all its living descendants, in bytes.

    Pages that several of them map count once for each. 0 for a process that is gone.
    """
    total, todo = 0, [pid or os.getpid()]
    while todo:
        current = todo.pop()
        try:
            with open(f"/proc/{current}/status") as status:
                total += next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)
            for thread in os.listdir(f"/proc/{current}/task"):
                with open(f"/proc/{current}/task/{thread}/children") as children:
                    todo += [int(child) for child in children.read().split()]
        except OSError:
            continue
    return total


def memory_limit_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as limit:
            return min(total, int(limit.read()))
    except (OSError, ValueError):
        return total
