"""What every bench prints: tables, goals, and as the last line of stdout one JSON object.

{"bench": ..., "machine": {...}, "rows": [{...}], "peak_rss_bytes": {role: bytes}, "goals": [{...}], ...}
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

WIDTH = 126


@dataclass(frozen=True)
class Goal:
    """A figure and what it should be at `at` "most" or "least". None: not measured, and so not met."""

    name: str
    value: float | None
    target: float
    at: Literal["most", "least"]

    @property
    def met(self) -> bool:
        """Whether the target is reached; the target itself is."""
        if self.value is None:
            return False
        return self.value <= self.target if self.at == "most" else self.value >= self.target

    def plain(self) -> dict[str, Any]:
        """As it stands in the JSON object."""
        return {"name": self.name, "value": self.value, "target": self.target, "met": self.met}

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:g}"
        return f"{self.name}: {value} (at {self.at} {self.target:g}) {'met' if self.met else 'NOT met'}"


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, the key of the rows and the format of the values."""

    title: str
    key: str
    spec: str = ""


def machine(**versions: str | None) -> dict[str, Any]:
    """Where it ran: cores, memory, kernel, load, Python and torch, and the `versions` of whatever else took part."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "arch": platform.machine(),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **versions,
    }


def _cpu_model() -> str | None:
    with open("/proc/cpuinfo") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), None)


@dataclass
class Result:
    """What a bench found. `peaks` is peak memory in bytes by role, `extra` is more for the JSON object."""

    bench: str
    rows: list[dict[str, Any]]
    goals: list[Goal]
    peaks: dict[str, int]
    machine: dict[str, Any] = field(default_factory=machine)
    extra: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The JSON object in one line. Raises ValueError for NaN and infinity, which JSON does not have."""
        found = {
            "bench": self.bench,
            "machine": self.machine,
            "rows": self.rows,
            "peak_rss_bytes": self.peaks,
            **self.extra,
            "goals": [goal.plain() for goal in self.goals],
        }
        return json.dumps(found, allow_nan=False)


def rows_table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> Table:
    """One line a row; the first column to the left, numbers to the right, "-" for what a row does not have."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column.title, justify="right" if index else "left", no_wrap=index == 0)
    for row in rows:
        values = ((row.get(column.key), column.spec) for column in columns)
        table.add_row(*("-" if value is None else format(value, spec) for value, spec in values))
    return table


def memory_table(peaks: Mapping[str, int]) -> Table:
    """Peak memory by role, `peaks` in bytes. Pages that several processes map count once for each."""
    rows = [{"role": role, "mib": peak / 2**20} for role, peak in peaks.items()]
    return rows_table("peak memory", rows, (Column("role", "role"), Column("MiB", "mib", ",.0f")))


def show(result: Result, *tables: Table, notes: Sequence[str] = (), console: Console | None = None) -> None:
    """Prints the tables, the memory, the goals, the notes, and last the JSON line."""
    console = console or Console(width=WIDTH)
    for table in (*tables, memory_table(result.peaks)):
        console.print(table)
    for line in (*map(str, result.goals), *notes):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    print(result.line(), file=console.file, flush=True)
