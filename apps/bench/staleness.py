"""What a bound on staleness costs, by how it is kept: by pacing, with and without a window, by dropping, or not at all.

    python -m apps.bench.staleness [--steps 400] [--bounds 0 1 2 4] [--seed 0]

No model: a run in virtual time (apps/bench/harness/pacing.py), in which every queue sees the same groups with the same
latencies. Strict and windowed FIFO are the project's ReplayBuffer: strict waits for the oldest groups, windowed takes
complete ones first, and w is `replay.window`, the share of the bound that is kept for groups that run long by admitting
fewer. "drop-stale" starts groups at will, trains them in the order of completion and throws away what has become older
than the bound; "unbounded" does the same and throws nothing away.

A step takes 1 s and a batch 16 groups; weights reach the generators 0.25 s after a step; a group takes 0.8 s on
average and 16 times that at most. Generation is measured twice: a quarter faster than the trainer (16 groups at once)
and a fifth slower (10). Slow are the groups in the longest quarter of the latencies, quick those in the shortest.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Sequence
from typing import Any, Literal

from rich.table import Table

from apps.bench.harness.pacing import (
    LATENCIES,
    MODERATE,
    QUEUES,
    STRICT,
    UNBOUNDED,
    WINDOWED,
    Plant,
    Simulation,
    draw_latencies,
    figures,
)
from apps.bench.harness.result import Column, Goal, Result, machine, rows_table, show

Row = dict[str, Any]
BOUNDS = (0, 1, 2, 4)
WORKERS = (16, 10)
GOAL_BOUND, GOAL_WINDOW = 4, 0.5
"""The bound and the window at which throughput and mean staleness have goals."""
COLUMNS = (
    Column("queue", "name"),
    Column("bound", "bound"),
    Column("steps/s", "steps_per_s", ".3f"),
    Column("of unbounded", "over_unbounded", ".3f"),
    Column("busy", "busy_share", ".0%"),
    Column("stale mean", "staleness_mean", ".2f"),
    Column("max", "staleness_max"),
    Column("wasted", "wasted_share", ".1%"),
    Column("drops quick", "quick_drops", ".1%"),
    Column("slow", "slow_drops", ".1%"),
    Column("bias", "discard_bias", ",.1f"),
    Column("slow trained", "slow_share", ".2f"),
)
"""busy: the trainer; drops: share of what ended; bias: drop rate of slow over quick groups; slow trained: their share
among the trained groups over that among the started ones."""


def measure(plant: Plant, bounds: Sequence[int], seed: int) -> list[Row]:
    """A row for each latency, bound and queue; the unbounded queue once for each latency."""
    rows = []
    for shape in LATENCIES:
        latencies = draw_latencies(shape, plant.groups_per_step * plant.steps * 2, plant.mean_latency_s, seed)
        key = {"latency": shape, "workers": plant.workers}
        free = figures(Simulation(plant, QUEUES[UNBOUNDED](0, plant.groups_per_step), latencies).run())
        for bound in bounds:
            for name, queue in QUEUES.items():
                if name != UNBOUNDED:
                    found = figures(Simulation(plant, queue(bound, plant.groups_per_step), latencies).run())
                    over = found["steps_per_s"] / free["steps_per_s"]
                    rows.append({**key, "name": name, "bound": bound, **found, "over_unbounded": over})
        rows.append({**key, "name": UNBOUNDED, "bound": None, **free, "over_unbounded": 1.0})
    return rows


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """What windowed FIFO promises whatever the window, and what a window does; the worst case of all that was measured.

    Ratios are rounded to a thousandth, the most that the ends of a run are worth.
    """
    strict = {_case(row): row for row in rows if row["name"] == STRICT}
    ours = [row for row in rows if row["name"] in WINDOWED.values()]
    best: dict[object, float] = {}
    for row in ours:
        best[_case(row)] = max(best.get(_case(row), 0.0), row["steps_per_s"] / strict[_case(row)]["steps_per_s"])
    goals = [
        Goal("windowed: versions above the bound", max(row["staleness_max"] - row["bound"] for row in ours), 0, "most"),
        Goal("windowed: share wasted", max(row["wasted_share"] for row in ours), 0, "most"),
        Goal("windowed: slow groups trained over started", min(row["slow_share"] for row in ours), 0.99, "least"),
        Goal("best window over strict FIFO, steps/s", round(min(best.values()), 3), 1.0, "least"),
    ]
    ample = max(row["workers"] for row in ours)
    half = [
        row for row in ours if (row["name"], row["bound"], row["workers"]) == (WINDOWED[GOAL_WINDOW], GOAL_BOUND, ample)
    ]
    moderate = [row for row in half if row["latency"] in MODERATE]
    fresher = [row["staleness_mean"] / strict[_case(row)]["staleness_mean"] for row in moderate]
    lower = [strict.get((row["latency"], row["workers"], GOAL_BOUND // 2)) for row in half]
    faster = [row["steps_per_s"] / other["steps_per_s"] for row, other in zip(half, lower, strict=True) if other]
    where = f"w {GOAL_WINDOW:g}, bound {GOAL_BOUND}, {ample} groups at once"
    return [
        *goals,
        _goal(
            f"{where}, moderate tails: over unbounded, steps/s", [r["over_unbounded"] for r in moderate], 0.95, "least"
        ),
        _goal(f"{where}, moderate tails: over strict FIFO, mean staleness", fresher, 0.6, "most"),
        _goal(f"{where}: over strict FIFO at bound {GOAL_BOUND // 2}, steps/s", faster, 1.0, "least"),
    ]


def _goal(name: str, values: Sequence[float], target: float, at: Literal["least", "most"]) -> Goal:
    worst = min if at == "least" else max
    return Goal(name, round(worst(values), 3) if values else None, target, at)


def _case(row: Row) -> tuple[object, ...]:
    return row["latency"], row["workers"], row["bound"]


def make_result(rows: Sequence[Row], settings: dict[str, Any]) -> Result:
    """Rows and goals as every bench prints them."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Result("staleness", list(rows), goals_of(rows), {"simulation": peak}, machine(), {"settings": settings})


def tables(rows: Sequence[Row], plants: Sequence[Plant]) -> list[Table]:
    """One for each latency and speed of generation."""
    return [
        rows_table(
            f"latency {shape}; generation makes {plant.supply:.2f} batches a step",
            [row for row in rows if (row["latency"], row["workers"]) == (shape, plant.workers)],
            COLUMNS,
        )
        for shape in LATENCIES
        for plant in plants
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m apps.bench.staleness", description=(__doc__ or "").split("\n\n")[0]
    )
    default = Plant(WORKERS[0])
    parser.add_argument("--steps", type=int, default=default.steps, help="steps of each run")
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS, help="policy versions")
    parser.add_argument("--seed", type=int, default=0, help="of the latencies")
    args = parser.parse_args()
    if args.steps <= default.warm_up or min(args.bounds) < 0:
        parser.error(f"--steps must be > {default.warm_up}, --bounds >= 0")
    plants = [Plant(workers, steps=args.steps) for workers in WORKERS]
    rows = [row for plant in plants for row in measure(plant, args.bounds, args.seed)]
    show(make_result(rows, vars(args)), *tables(rows, plants))


if __name__ == "__main__":
    main()
