"""What grows in a long run: memory, threads, open files and shared segments of each role.

    python -m apps.bench.endurance                # 200 steps of the preset tiny

Each is read from /proc four times, at every quarter of the steps. By the half of them everything has been used and
allocators have settled: the goals compare the end with that. A segment is a mapping of shared memory that the project
made (forge/segment.py, the trainer's snapshots).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apps.bench.harness.result import Column, Goal, Result, rows_table, show
from apps.bench.harness.victims import Victim

GROWTH = 1.05
"""Of a role's memory in the second half, at most."""
QUARTERS = (1, 2, 3, 4)
COUNTS = ("threads", "files", "segments")
COLUMNS = (
    Column("role", "role"),
    *(Column(f"MiB at {quarter}/4", f"mib_{quarter}", ",.0f") for quarter in QUARTERS),
    Column("4/4 : 2/4", "growth", ".3f"),
    *(Column(name, name) for name in COUNTS),
)
Usage = Mapping[str, int]
Row = dict[str, Any]


def usage(pid: int) -> Usage:
    """Resident bytes, threads, open files and mapped segments of one process; nothing where it has ended."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in ("VmRSS", "Threads"):
                found["rss" if key == "VmRSS" else "threads"] = int(value.split()[0])
        found["rss"] = found.get("rss", 0) << 10
        found["files"] = len(os.listdir(f"/proc/{pid}/fd"))
        maps = Path(f"/proc/{pid}/maps").read_text()
        found["segments"] = len({line.split()[4] for line in maps.splitlines() if "/memfd:meshforge" in line})
    return found


def by_role(victim: Victim) -> dict[str, Usage]:
    """Sums over the processes of each mesh."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for pid, role in victim.processes():
        found[role].update(usage(pid))
    return dict(found)


def rows_of(found: Sequence[Mapping[str, Usage]]) -> list[Row]:
    """A row a role, from the four times; counts as those of half time and end."""
    rows = []
    for role in sorted(found[-1]):
        rss = [usages.get(role, {}).get("rss", 0) for usages in found]
        row: Row = {"role": role, **{f"mib_{q}": size / 2**20 for q, size in zip(QUARTERS, rss, strict=True)}}
        row["growth"] = rss[-1] / max(rss[1], 1)
        for name in COUNTS:
            half, end = (usages.get(role, {}).get(name, 0) for usages in (found[1], found[-1]))
            row |= {f"{name}_more": end - half, name: f"{half} {end}"}
        rows.append(row)
    return rows


def measure(steps: int, scratch: Path) -> Result:
    """One run of `steps` steps, looked at four times; a few more steps keep it alive meanwhile."""
    named, found = set(os.listdir("/dev/shm")), []
    with Victim(scratch / "run", [f"--trainer.steps={steps + 20}"], 300.0 + 20 * steps) as victim:
        for quarter in QUARTERS:
            victim.wait_for_step(steps * quarter // 4)
            found.append(by_role(victim))
        victim.stop()
    rows = rows_of(found)
    goals = [
        Goal(
            "largest growth of a role's memory in the second half", max(row["growth"] for row in rows), GROWTH, "most"
        ),
        *(
            Goal(f"{name} more at the end than at half time", sum(row[f"{name}_more"] for row in rows), 0, "most")
            for name in COUNTS
        ),
        Goal("names in /dev/shm afterwards", len(set(os.listdir("/dev/shm")) - named), 0, "most"),
    ]
    peaks = {role: usages["rss"] for role, usages in found[-1].items()}
    return Result("endurance", rows, goals, peaks, extra={"steps": steps})


def main() -> None:
    """The command line."""
    text = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m apps.bench.endurance", description=text)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    if args.steps < 8:
        parser.error("--steps must be >= 8")
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(args.steps, Path(scratch))
    show(result, rows_table(f"{args.steps} steps; counts at half time and at the end", result.rows, COLUMNS))


if __name__ == "__main__":
    main()
