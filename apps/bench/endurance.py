"""What grows in a long run: memory, threads, open files and shared segments of each role.

    python -m apps.bench.endurance                # 200 steps of the preset tiny

Each is read from /proc at a quarter of the steps, when everything has been used once, and at the last step. A segment
is a mapping of shared memory that the project made (forge/segment.py, the trainer's snapshots).
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
"""Of a role's memory, at most: allocators settle for longer than a quarter of such a run."""
COUNTS = ("threads", "files", "segments")
COLUMNS = (
    Column("role", "role"),
    Column("MiB early", "early_mib", ",.0f"),
    Column("late", "late_mib", ",.0f"),
    Column("ratio", "growth", ".3f"),
    *(Column(f"{name} {when}", f"{when}_{name}") for name in COUNTS for when in ("early", "late")),
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


def rows_of(early: Mapping[str, Usage], late: Mapping[str, Usage]) -> list[Row]:
    """A row a role."""
    rows = []
    for role in sorted(late):
        before, after = early.get(role, {}), late[role]
        row: Row = {"role": role, "early_mib": before.get("rss", 0) / 2**20, "late_mib": after["rss"] / 2**20}
        row["growth"] = after["rss"] / max(before.get("rss", 0), 1)
        for name in COUNTS:
            row |= {f"early_{name}": before.get(name, 0), f"late_{name}": after.get(name, 0)}
        rows.append(row)
    return rows


def _more(rows: Sequence[Row], name: str) -> int:
    return sum(row[f"late_{name}"] - row[f"early_{name}"] for row in rows)


def measure(steps: int, scratch: Path) -> Result:
    """One run of `steps` steps, looked at twice; a few more steps keep it alive meanwhile."""
    named = set(os.listdir("/dev/shm"))
    with Victim(scratch / "run", [f"--trainer.steps={steps + 20}"], 300.0 + 20 * steps) as victim:
        victim.wait_for_step(steps // 4)
        early = by_role(victim)
        victim.wait_for_step(steps)
        late = by_role(victim)
        in_between = len(set(os.listdir("/dev/shm")) - named)
        victim.stop()
    rows = rows_of(early, late)
    goals = [
        Goal("largest growth of a role's memory", max(row["growth"] for row in rows), GROWTH, "most"),
        *(Goal(f"{name} more at the end", _more(rows, name), 0, "most") for name in COUNTS),
        Goal("names in /dev/shm during the run", in_between, 0, "most"),
        Goal("names in /dev/shm afterwards", len(set(os.listdir("/dev/shm")) - named), 0, "most"),
    ]
    peaks = {role: found["rss"] for role, found in late.items()}
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
    show(result, rows_table(f"at step {args.steps // 4} and at step {args.steps}", result.rows, COLUMNS))


if __name__ == "__main__":
    main()
