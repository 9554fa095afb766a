"""Asynchronous training of agents against synchronous: environments that wait, staleness bounds, and their ceilings.

    python -m apps.bench.agentic [--set waits real] [--profiles heavy none] [--arms sync "bound 4"] [--seeds 3]
    python -m apps.bench.agentic --clock virtual            # the same without what Python takes; on any machine
    python -m apps.bench.agentic --set real --folder runs/agentic      # hours; what is done is not run again

`waits`: the project's loops, replay, episodes, pool, router and weight sync around a generator, a trainer and
environments that sleep. Waits stand for compute because two cores cannot show what two devices gain: what computes
beside something else there slows it down. A generator decodes a batch's episodes at once. `sync` is staleness bound 0;
`naive` is asynchronous by whole batches, an environment's turn inside the generation call. The ceiling of an arm is
what apps/advise/simulation.py makes of the same scene, latencies and steps. Ratios are to `sync` with the same seed.

`real`: apps/worlds on `tiny` with vLLM, where only the environment's latency is a wait.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.table import Table

from apps.bench.harness import agentic_real, agentic_run
from apps.bench.harness.agentic_cases import SETS, cases_of
from apps.bench.harness.agentic_rows import COLUMNS, SCALING_COLUMNS, Found, goals_of, rows_of
from apps.bench.harness.agentic_scene import BOUND_OF, PROFILES, Case
from apps.bench.harness.result import Result, machine, rows_table, show
from forge.child import die_with_parent

REAL_PROFILES = ("none", "heavy")
"""Of the set `real`, which takes minutes for each run."""


def measured(case: Case, folder: Path, *, virtual: bool) -> Found:
    """The figures of `case`, from an earlier run where there are any."""
    place = folder / "waits" / f"{case.name}{'-virtual' if virtual else ''}.json"
    if not place.exists():
        print(place.stem, file=sys.stderr, flush=True)
        figures = agentic_run.measure(case, virtual=virtual)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(figures))
    return case, json.loads(place.read_text())


def measure_all(cases: Sequence[Case], folder: Path, side_by_side: int, *, virtual: bool) -> list[Found]:
    """All cases, each in a process that has no other at the same time; the longest first."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(side_by_side, context, die_with_parent, (os.getpid(),)) as pool:
        futures = [pool.submit(measured, case, folder, virtual=virtual) for case in cases]
        return [future.result() for future in futures]


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """One for each profile and horizon, and one of the scaling."""
    found = []
    for key in dict.fromkeys((row["set"], row["horizon"], row["profile"]) for row in rows):
        kept = [row for row in rows if (row["set"], row["horizon"], row["profile"]) == key]
        kind, horizon, profile = key
        stand_in = "" if kind == "real" else " (waits stand for compute)"
        title = f"{kind}: {horizon} turns, latency {profile}{stand_in}"
        columns = {"waits": COLUMNS, "scaling": SCALING_COLUMNS, "real": agentic_real.COLUMNS}[kind]
        found.append(rows_table(title, kept, columns))
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m apps.bench.agentic", description=description)
    parser.add_argument("--set", nargs="+", choices=SETS, default=["waits", "scaling"], dest="sets")
    parser.add_argument("--profiles", nargs="+", choices=list(PROFILES), default=list(PROFILES))
    parser.add_argument("--horizons", nargs="+", default=["1", "20", "20-50"], help="turns of an episode")
    parser.add_argument("--arms", nargs="+", choices=list(BOUND_OF), default=list(BOUND_OF))
    parser.add_argument("--seeds", type=int, default=3, help="repetitions, each with latencies of its own (3)")
    parser.add_argument("--steps", type=int, default=60, help="of a run of the set real (60)")
    parser.add_argument("--clock", choices=("real", "virtual"), default="real")
    parser.add_argument("--scale", type=float, default=1.0, help="of all times: more hides what Python takes")
    parser.add_argument("--side-by-side", type=int, default=8, help="runs at the same time; they sleep (8)")
    folder = Path("runs/agentic")
    parser.add_argument("--folder", type=Path, default=folder, help=f"where results are kept for good ({folder})")
    options = parser.parse_args(arguments)
    if options.steps <= agentic_real.LAST:
        parser.error(f"--steps must be > {agentic_real.LAST}, got {options.steps}")
    for name in ("seeds", "scale", "side_by_side"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be > 0, got {getattr(options, name)}")
    return options


def main() -> None:
    """Measures and shows."""
    options = parse()
    virtual = options.clock == "virtual"
    cases = cases_of(options.sets, options.horizons, options.profiles, options.arms, options.seeds, options.scale)
    rows = rows_of(measure_all(cases, options.folder, options.side_by_side, virtual=virtual))
    goals = goals_of(rows, options.sets)
    if "real" in options.sets:
        profiles = [profile for profile in REAL_PROFILES if profile in options.profiles]
        real = (profiles, options.arms, options.seeds, options.steps, options.folder / "real")
        rows += agentic_real.measure_real(*real)
        goals += agentic_real.goals_of(rows)
    settings = {**vars(options), "folder": str(options.folder)}
    peaks = {"largest run": agentic_run.peak_bytes()}
    result = Result("agentic", rows, goals, peaks, machine(), {"settings": settings})
    show(result, *tables(rows))


if __name__ == "__main__":
    main()
