"""What weight sync costs: trainer, generator and the bytes between them.

    python -m apps.bench.weightsync [--parts bytes pause training stop adapters] [--sizes 12 270 1000] [--stop-s 10]

Random Llamas of 30 blocks whose float32 weights are so many megabytes; trainer and generator are the project's actors,
one process each with one thread, the generator's engine another.

bytes     Every transport between two processes. Stall: the trainer's snapshot, beside one memcpy of the same bytes in
          the same thread. Transfer: from the offer, known to both sides, until the image is complete in the other
          process (file: with writing it), beside a broadcast of one flat buffer by gloo between the same processes.
          In all: stall, transfer, and one copy of the image into private memory, beside a copy into shared memory and
          one out of it. Checksums are columns of their own. Memory is measured as each process's proportional share,
          more than before the connect. Every round runs everything once, in turns.
pause     Updates while 8 requests run, in every mode. Pause: what the weight sync reports. Gaps: between two tokens of
          one client as the engine stamps them, in steps: over the median gap before the update. A client whose
          request ends asks for the next at once, which counts as a gap. "before": the longest without an update;
          "staging": the median while a version is staged; "flip": the longest around the flip; "update": the longest
          from the staging's start to the flip. A drain takes as long as the requests: here they end over 32 steps.
training  Steps fed from recorded batches, with a sync every step and without, in blocks that take turns, while the
          generator idles and while it serves. CPU seconds are those of all processes of the actor.
stop      Every process of the generator's engine stopped by a signal while the trainer goes on from recorded batches,
          every version published.
adapters  LoRA of rank 8, on one size: the worker's own seconds to bring a version into its slot, and those from publish
          to applied, all messages included, while the engine idles and while it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from apps.bench.harness import llamas, processes, sync_adapters, sync_bytes, sync_pause, sync_training
from apps.bench.harness.result import Column, Goal, Result, machine, rows_table, show
from apps.bench.harness.sync_fleet import GENERATOR, MAX_LEN, TRAINER, Fleet, say
from forge import launch
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster, MeshConfig, RoleConfig, place

Row = dict[str, Any]
BYTES, PAUSE, TRAINING, STOP, ADAPTERS = "bytes", "pause", "training", "stop", "adapters"
PARTS = (BYTES, PAUSE, TRAINING, STOP, ADAPTERS)
SIZES = (12, 270, 1000)
FLIP_MB = 270
"""The size at which the flip's time has a goal."""
FEW_BYTES = 50
"""MB up to which a round takes moments, so that there are more of them."""
MANY_BYTES = 500
"""MB from which an update takes seconds, so that there are fewer of them."""
GENERATORS = 2
"""The second one serves adapters."""
CORES = 3
"""Of trainer, generator and controller, to be kept apart."""
STALL_COLUMNS = (
    Column("MB", "mb"),
    Column("transport", "name"),
    Column("stall ms", "stall_ms", ".2f"),
    Column("x memcpy", "stall_over_memcpy", ".2f"),
    Column("transfer ms", "transfer_ms", ".1f"),
    Column("GB/s", "transfer_gb_s", ".2f"),
    Column("of gloo", "over_gloo", ".2f"),
    Column("in all ms", "total_ms", ".1f"),
    Column("GB/s", "total_gb_s", ".2f"),
    Column("of shm", "over_shared", ".2f"),
    Column("rounds", "rounds"),
)
YARDSTICK_COLUMNS = (
    Column("MB", "mb"),
    Column("beside", "name"),
    Column("memcpy ms", "memcpy_ms", ".2f"),
    Column("shm write + read ms", "shared_ms", ".1f"),
    Column("gloo ms", "gloo_ms", ".1f"),
    Column("gloo GB/s", "gloo_gb_s", ".2f"),
    Column("checksums ms", "sums_ms", ".1f"),
    Column("checked ms", "check_ms", ".1f"),
)
COST_COLUMNS = (
    Column("MB", "mb"),
    Column("transport", "name"),
    Column("copies", "copies"),
    Column("kept: trainer", "trainer_models"),
    Column("receiver", "receiver_models"),
    Column("disk", "disk_models"),
    Column("measured: trainer", "trainer_measured", ".2f"),
    Column("receiver", "receiver_measured", ".2f"),
    Column("CPU s/GB: trainer", "trainer_cpu_s_per_gb", ".2f"),
    Column("receiver", "receiver_cpu_s_per_gb", ".2f"),
)
PAUSE_COLUMNS = (
    Column("MB", "mb"),
    Column("mode", "name"),
    Column("pause ms", "pause_ms", ".2f"),
    Column("worst", "pause_max_ms", ".2f"),
    Column("step ms", "step_ms", ".1f"),
    Column("before, worst", "before_steps_max", ".1f"),
    Column("staging", "staging_steps", ".1f"),
    Column("flip", "gap_steps", ".1f"),
    Column("worst", "gap_steps_max", ".1f"),
    Column("update ms", "update_gap_ms", ".0f"),
    Column("takes ms", "update_ms", ".0f"),
    Column("engine MB", "engine_mb", ",.0f"),
)
TRAINING_COLUMNS = (
    Column("MB", "mb"),
    Column("", "name"),
    Column("steps/s", "steps_per_s", ".3f"),
    Column("with sync", "sync_steps_per_s", ".3f"),
    Column("ratio", "over_none", ".3f"),
    Column("stall ms", "stall_ms", ".1f"),
    Column("by the stall alone", "stall_only", ".3f"),
    Column("CPU ms/step: trainer", "trainer_cpu_ms", ".0f"),
    Column("with sync", "sync_trainer_cpu_ms", ".0f"),
    Column("generator", "generator_cpu_ms", ".0f"),
    Column("with sync", "sync_generator_cpu_ms", ".0f"),
    Column("rounds", "rounds"),
)
STOP_COLUMNS = (
    Column("MB", "mb"),
    Column("engine", "name"),
    Column("steps/s before", "before_steps_per_s", ".3f"),
    Column("during", "during_steps_per_s", ".3f"),
    Column("ratio", "during_over_before", ".3f"),
    Column("CPU ms before", "before_cpu_ms", ".0f"),
    Column("during", "during_cpu_ms", ".0f"),
    Column("published", "published"),
    Column("skipped", "skipped"),
    Column("newest", "newest"),
    Column("applied", "applied"),
    Column("after s", "caught_up_s", ".2f"),
)
ADAPTER_COLUMNS = (
    Column("MB", "mb"),
    Column("adapter, engine", "name"),
    Column("MB", "adapter_mb", ".2f"),
    Column("stall ms", "stall_ms", ".2f"),
    Column("transfer ms", "transfer_ms", ".2f"),
    Column("worst", "transfer_max_ms", ".2f"),
    Column("applied ms", "applied_ms", ".1f"),
    Column("worst", "applied_max_ms", ".1f"),
    Column("updates", "updates"),
)


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    parts: tuple[str, ...] = PARTS
    sizes: tuple[int, ...] = SIZES
    rounds: int = 5
    updates: int = 5
    stop_s: float = 10.0
    folder: str | None = None

    def parts_of(self, mb: int) -> list[str]:
        """What is measured with a model of that size."""
        trained = mb == min(self.sizes) or mb <= sync_training.MOST_MB
        sizes = {STOP: min(self.sizes), ADAPTERS: FLIP_MB if FLIP_MB in self.sizes else min(self.sizes)}
        wanted = [part for part in self.parts if sizes.get(part, mb) == mb]
        return wanted if trained else [part for part in wanted if part != TRAINING]


@dataclass
class Bench:
    """All parts for all sizes, one cluster a size."""

    options: Options
    rows: list[Row] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)

    async def __call__(self, hosts: Hosts, stopping: Stopping) -> None:
        with stopping.at_once():
            for mb in self.options.sizes:
                with tempfile.TemporaryDirectory(prefix="meshforge-bench-", dir=self.options.folder) as folder:
                    await self._measure(hosts, mb, Path(folder))
        result = make_result(self.rows, self.peaks, self.options)
        show(result, *tables(self.rows), notes=notes(self.rows))

    async def _measure(self, hosts: Hosts, mb: int, folder: Path) -> None:
        shape = llamas.shape_of(mb)
        say(f"{mb} MB: making the model and starting the trainer")
        model = await asyncio.to_thread(llamas.write, shape, folder / "model", MAX_LEN)
        mesh = MeshConfig(generator=RoleConfig(replicas=GENERATORS if ADAPTERS in self.options.parts_of(mb) else 1))
        placement = place(mesh, torchrun_slots=hosts.slots_per_host, roles=[TRAINER, GENERATOR])
        async with Cluster(hosts, placement) as cluster:
            fleet = await Fleet.start(hosts, cluster, model, mb, shape, folder)
            await self._parts(fleet)
            self._note_peaks(mb)

    def _note_peaks(self, mb: int) -> None:
        """Of what lives now."""
        peaks = processes.peaks_by_role(os.getpid(), "controller")
        processes.raise_peaks(self.peaks, {f"{role}, {mb} MB": peak for role, peak in peaks.items()})

    async def _parts(self, fleet: Fleet) -> None:
        options, small = self.options, fleet.mb <= FEW_BYTES
        parts = options.parts_of(fleet.mb)
        if BYTES in parts:
            self.rows += await sync_bytes.measure(fleet, options.rounds * (3 if small else 1))
        if {PAUSE, TRAINING, STOP} & set(parts):
            say(f"{fleet.mb} MB: starting the generator")
            replica = await fleet.generator()
            if TRAINING in parts:
                rounds = max(4, options.rounds) if small else 4
                self.rows += await sync_training.measure(fleet, replica, rounds)
            if STOP in parts:
                self.rows += await sync_training.measure_stopped(fleet, replica, options.stop_s)
            if PAUSE in parts:
                updates = options.updates if fleet.mb <= MANY_BYTES else min(options.updates, 3)
                self.rows += await sync_pause.Pauses(fleet, replica).run(updates)
            self._note_peaks(fleet.mb)
            await fleet.ask(replica.mesh.shutdown.call_one(), "the engine to end")
        if ADAPTERS in parts:
            self.rows += await sync_adapters.measure(fleet)


# --- from rows to tables and goals


def rows_of(rows: Sequence[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def make_result(rows: Sequence[Row], peaks: dict[str, int], options: Options) -> Result:
    """The goals are those of the parts that were asked for; what was not measured is not met."""
    made = {
        BYTES: bytes_goals,
        PAUSE: pause_goals,
        TRAINING: training_goals,
        STOP: stop_goals,
        ADAPTERS: adapter_goals,
    }
    goals = [goal for part in options.parts for goal in made[part](rows_of(rows, part))]
    settings = {"sizes": options.sizes, "rounds": options.rounds, "updates": options.updates, "stop_s": options.stop_s}
    return Result("weightsync", list(rows), goals, peaks, machine(), {"settings": settings})


def bytes_goals(rows: Sequence[Row]) -> list[Goal]:
    goals = []
    for mb in _sizes(rows):
        by_name = {row["name"]: row for row in rows if row["mb"] == mb}
        worst = max(row["stall_over_memcpy"] for row in by_name.values())
        goals += [
            Goal(f"{mb} MB: stall over one memcpy, any transport", worst, 1.5, "most"),
            Goal(f"{mb} MB: memory over shared-memory write + read", by_name["memory"]["over_shared"], 0.8, "least"),
            Goal(f"{mb} MB: collective over bare gloo", by_name["collective"]["over_gloo"], 0.9, "least"),
        ]
    return goals


def pause_goals(rows: Sequence[Row]) -> list[Goal]:
    flips = {row["mb"]: row for row in rows if row["name"] == sync_pause.KEEP}
    few, many = min(flips, default=0), max(flips, default=0)
    growth = round(_per_module(flips[many]) / _per_module(flips[few]), 3) if few != many else None
    goals = [
        Goal(f"{FLIP_MB} MB: flip, ms", flips[FLIP_MB]["pause_ms"] if FLIP_MB in flips else None, 5.0, "most"),
        Goal("flip for each module, largest model over smallest", growth, 2.0, "most"),
    ]
    for mb, row in flips.items():
        goals += [
            Goal(f"{mb} MB: longest gap around a flip, steps, median of the updates", row["gap_steps"], 2.0, "most"),
            Goal(f"{mb} MB: longest gap around a flip, steps, worst update", row["gap_steps_max"], 2.0, "most"),
        ]
    return goals


def _per_module(row: Row) -> float:
    return float(row["pause_ms"] / row["modules"])


def training_goals(rows: Sequence[Row]) -> list[Goal]:
    return [Goal(f"{r['mb']} MB: steps/s with a sync, {r['name']}", r["over_none"], 0.97, "least") for r in rows]


def stop_goals(rows: Sequence[Row]) -> list[Goal]:
    goals = []
    for row in rows:
        kept_up = float(row["applied"] == row["newest"] and row["skipped"] > 0 and row["stopped"] == row["processes"])
        goals += [
            Goal(f"{row['mb']} MB: steps/s with the receiver stopped", row["during_over_before"], 0.97, "least"),
            Goal(f"{row['mb']} MB: versions skipped, the newest applied after it", kept_up, 1.0, "least"),
        ]
    return goals


def adapter_goals(rows: Sequence[Row]) -> list[Goal]:
    goals = []
    for row in rows:
        goals += [
            Goal(f"adapter on {row['name']}: transfer, ms", row["transfer_ms"], 1.0, "most"),
            Goal(f"adapter on {row['name']}: applied, ms", row["applied_ms"], 5.0, "most"),
        ]
    return goals


def _sizes(rows: Sequence[Row]) -> list[int]:
    return list(dict.fromkeys(row["mb"] for row in rows))


def tables(rows: Sequence[Row]) -> list[Table]:
    made = []
    if found := rows_of(rows, BYTES):
        made += [
            rows_table("bytes: the trainer's stall, and the way to another process", found, STALL_COLUMNS),
            rows_table("bytes: what they are measured against, in the same rounds", found, YARDSTICK_COLUMNS),
            rows_table("bytes: copies of each, memory kept in models, CPU seconds", found, COST_COLUMNS),
        ]
    if found := rows_of(rows, PAUSE):
        counts = ", ".join(f"{n} at {mb} MB" for mb, n in {row["mb"]: row["updates"] for row in found}.items())
        title = f"pause: gaps between tokens, in median decode steps; updates of each mode: {counts}"
        made.append(rows_table(title, found, PAUSE_COLUMNS))
    if found := rows_of(rows, TRAINING):
        made.append(rows_table("training with a sync every step", found, TRAINING_COLUMNS))
    if found := rows_of(rows, STOP):
        made.append(rows_table("the generator's engine stopped", found, STOP_COLUMNS))
    if found := rows_of(rows, ADAPTERS):
        made.append(rows_table("adapter-only sync", found, ADAPTER_COLUMNS))
    return made


def notes(rows: Sequence[Row]) -> list[str]:
    """What the tables do not say."""
    said = [f"{name}: {how}" for name, how in dict.fromkeys((r["name"], r["copied_by"]) for r in rows_of(rows, BYTES))]
    said += [f"{name}: {how}" for name, how in dict.fromkeys((r["name"], r["how"]) for r in rows_of(rows, PAUSE))]
    if said:
        said.append("peak memory counts the yardsticks' buffers and the shared pages of each process")
    modules = {row["mb"]: row["modules"] for row in rows_of(rows, PAUSE)}
    if modules:
        said.append("modules that a flip visits: " + ", ".join(f"{n} at {mb} MB" for mb, n in modules.items()))
    cores = len(os.sched_getaffinity(0))
    if rows_of(rows, TRAINING) and cores < CORES:
        said.append(
            f"{cores} cores for a trainer, a generator and a controller: staging takes CPU time from training, as the "
            'CPU columns show; "by the stall alone" is what is left where the generator has cores of its own'
        )
    return said


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m apps.bench.weightsync", description=(__doc__ or "").split("\n\n")[0]
    )
    default = Options()
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=default.parts, help="what is measured")
    parser.add_argument("--sizes", type=int, nargs="+", default=default.sizes, help="MB of float32 weights")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="rounds of bytes and training")
    parser.add_argument("--updates", type=int, default=default.updates, help="updates of each mode")
    parser.add_argument("--stop-s", type=float, default=default.stop_s, help="seconds that the engine is stopped")
    parser.add_argument("--folder", help="where models and versions are written; a temporary folder if left out")
    args = parser.parse_args()
    if min(args.sizes) < llamas.MIN_MB or args.rounds < 1 or args.updates < 1 or not args.stop_s > 0:
        parser.error(f"--sizes must be >= {llamas.MIN_MB}, --rounds and --updates >= 1, --stop-s > 0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = Options(tuple(args.parts), tuple(args.sizes), args.rounds, args.updates, args.stop_s, args.folder)
    launch.run(Bench(options), launch.bring_up())


if __name__ == "__main__":
    main()
