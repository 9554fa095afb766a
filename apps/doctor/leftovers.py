"""What earlier runs left behind: named, never killed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from apps.doctor.checks import Report, merged
from forge.processes import RUN_ID_ENV

_NAMED = 4


def leftovers() -> Report:
    """Processes with a run's mark that nobody looks after any more, and names in /dev/shm that nobody uses."""
    mine = {e.name for e in os.scandir("/dev/shm") if e.stat(follow_symlinks=False).st_uid == os.getuid()}
    parents, runs, used = {}, {}, set[str]()  # after the names: one that is made meanwhile is in use
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            folder, pid = Path("/proc", entry), int(entry)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            used |= {Path(line.split(maxsplit=5)[5]).name for line in _shared(folder)}
            used |= {Path(target).name for target in _open(folder)}
            for variable in (folder / "environ").read_bytes().split(b"\0"):
                if variable.startswith(f"{RUN_ID_ENV}=".encode()):
                    runs[pid] = variable.decode(errors="replace").partition("=")[2].partition("/")[0]
    return merged([processes_report(runs, parents), names_report(mine - used)])


def processes_report(runs: Mapping[int, str], parents: Mapping[int, int]) -> Report:
    """Pure. `runs` has the run of each process with a mark, `parents` the parent of every process.

    A run lives while a process that is not marked, its controller, is the parent of one that is.
    """
    alive = {run for pid, run in runs.items() if parents.get(pid, 1) > 1 and parents[pid] not in runs}
    lost = {pid: run for pid, run in runs.items() if run not in alive}
    found = f"{len(set(runs.values()) & alive)} runs under way"
    if not lost:
        return Report("ok", f"{found}, no process left behind")
    pids = " ".join(str(pid) for pid in sorted(lost))
    return Report("warning", f"{found}; {len(lost)} processes of runs without a controller", f"look, then: kill {pids}")


def names_report(names: Iterable[str]) -> Report:
    """Pure."""
    unused = sorted(names)
    if not unused:
        return Report("ok", "nothing unused in /dev/shm")
    kinds = Counter(name.partition("-")[0].partition("_")[0] for name in unused)
    told = ", ".join(unused[:_NAMED]) + (f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else "")
    listed = " ".join(f"/dev/shm/{kind}*" for kind in kinds)
    return Report("warning", f"{len(unused)} names in /dev/shm that no process has open: {told}", f"look at {listed}")


def _shared(folder: Path) -> list[str]:
    return [line for line in (folder / "maps").read_text().splitlines() if "/dev/shm/" in line]


def _open(folder: Path) -> list[str]:
    targets = []
    for link in (folder / "fd").iterdir():
        with suppress(OSError):
            targets.append(os.readlink(link))
    return [target for target in targets if target.startswith("/dev/shm/")]
