"""The replay buffer: adding, sampling, handing over, saving; against TorchRL's storages, memcpy and HTTP.

    python -m apps.bench.replay [--rounds 10] [--items 10000] [--torchrl-python PY] [--atropos-python PY]

Episodes of 512 tokens in groups of 8, batches of 64, 10,000 episodes in each buffer, the same keys everywhere; one
thread a process. Every round does each work once on each system, in turns; times are medians over the rounds, of
the median of the repeats inside a round; ratios are medians of the ratios inside a round. Ours checks what is added
and keeps groups, versions and a memory budget; TorchRL's does not. Work:

    add, add_many      one group; 64 groups (TorchRL: in one call, ours one by one, as they come)
    sample             64 episodes, padded [64, 512]: what TorchRL's trainers take
    sample_packed      the same as a packed batch, rows of 4096 tokens with positions: what ours takes
    save, load         all episodes to the disk (ours: synced, by the journal's snapshot) and back; memcpy: as one
                       file, synced
    hand-over          stored groups -> packed in shared memory -> mapped by another actor, one message included
    actor              ReplayActor by messages and channel, against groups as JSON over HTTP: the server of Atropos
                       (no versions), and the least that a program can do (apps/bench/peers/http_buffer.py). The
                       limit: the same messages empty; of a sample a thread and a memcpy of the batch besides

Where there is no venv with a peer its columns are empty, and its goals not met.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from monarch.actor import shutdown_context

from apps.bench.harness import rates
from apps.bench.harness.replay_actors import (
    ATROPOS,
    EMPTY,
    HTTP,
    LIMIT,
    MEMCPY,
    SHARD,
    measure_actor,
    measure_hand_over,
)
from apps.bench.harness.replay_buffers import (
    OURS,
    PACKED,
    Memcpy,
    Ours,
    System,
    Times,
    TorchRL,
    TorchRLProcess,
    Work,
    find_python,
)
from apps.bench.harness.result import Column, Goal, Result, machine, rows_table, show
from apps.bench.peers.torchrl_replay import ADD, ADD_MANY, LOAD, SAMPLE, SAVE, STORAGES
from forge.memory import peak_rss_bytes

ROOT = Path(__file__).resolve().parents[2]
TORCHRL_SETUP = "python3 -m venv .venv-torchrl && .venv-torchrl/bin/pip install -r apps/bench/peers/torchrl.txt"
ATROPOS_SETUP = (
    "python3 -m venv .venv-atropos && .venv-atropos/bin/pip install -r apps/bench/peers/atropos.txt && "
    ".venv-atropos/bin/pip install --no-deps atroposlib==0.4.0"
)
RAGGED, COPY = "ours, ragged", "memcpy"
TENSOR_STORAGES = STORAGES[:2]
REPEATS = {ADD: 40, ADD_MANY: 2, SAMPLE: 20, PACKED: 20, SAVE: 1, LOAD: 1}


def measure_buffers(systems: Mapping[str, System], rounds: int) -> Times:
    """All rounds of what happens inside one process."""
    times: Times = {}
    names = list(systems)
    for number in range(rounds):
        for work, repeats in REPEATS.items():
            if work in (SAVE, LOAD) and number >= 3:
                continue
            for name in rates.turns(names, number):
                found = systems[name].times(work, repeats)
                if found is not None:
                    times.setdefault((work, name), []).append(statistics.median(found))
    return times


def buffer_rows(times: Times, names: Sequence[str]) -> list[dict[str, Any]]:
    """One a work: ms by system, and how often ours fits into the time of each other."""
    rows = []
    for work in REPEATS:
        row: dict[str, Any] = {"part": "buffer", "name": work}
        for name in names:
            if (work, name) in times:
                row[f"{name}, ms"] = round(1e3 * statistics.median(times[work, name]), 4)
        for name in names:
            # A packed sample replaces a sample: TorchRL has but that one.
            base = SAMPLE if work == PACKED and (work, name) not in times else work
            if name not in (OURS, RAGGED) and (base, name) in times and (work, OURS) in times:
                row[f"x {name}"] = round(rates.ratio(times[base, name], times[work, OURS]), 3)
        rows.append(row)
    return rows


def make_goals(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """What the project set itself; None where the peer did not run."""
    by_name = {(row["part"], row["name"]): row for row in rows}

    def least(work: str, names: Sequence[str]) -> float | None:
        found = [by_name["buffer", work].get(f"x {name}") for name in names]
        return None if None in found else min(x for x in found if x is not None)

    hand_over = [row for row in rows if row["part"] == "hand-over"][-1]
    _, added, sampled = (row for row in rows if row["part"] == "actor")

    def actor(work: str, row: Mapping[str, Any]) -> Goal:
        limit = row.get(f"{LIMIT} x {ATROPOS}")
        allowed = "" if limit is None else f" (its messages, empty: {limit:g})"
        return Goal(f"actor, {work}: x {ATROPOS}{allowed}", row.get(f"x {ATROPOS}"), 100.0, "least")

    return [
        Goal("add one group: x TorchRL's faster tensor storage", least(ADD, TENSOR_STORAGES), 2.0, "least"),
        Goal("sample 64: x TorchRL's best storage", least(SAMPLE, STORAGES), 1.0, "least"),
        Goal("sample 64 packed: x TorchRL's best storage", least(PACKED, STORAGES), 1.0, "least"),
        Goal(f"hand-over of {hand_over['mb']:g} MB: x memcpy", hand_over["over_memcpy"], 1.5, "most"),
        actor("add one group", added),
        actor("sample 64", sampled),
    ]


def tables(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Any]:
    """One a part."""
    parts = {part: [row for row in rows if row["part"] == part] for part in ("buffer", "hand-over", "actor")}
    work = Column("", "name")
    found = [*(Column(f"{name}, ms", f"{name}, ms", ".3f") for name in names)]
    found += [Column(f"x {name}", f"x {name}", ".2f") for name in names if name not in (OURS, RAGGED)]
    across = [Column(f"{name}, ms", f"{name}, ms", ".3f") for name in (SHARD, MEMCPY, EMPTY)]
    actor = [Column(f"{name}, ms", f"{name}, ms", ".2f") for name in (OURS, LIMIT, HTTP, ATROPOS)]
    actor += [Column(name, name, ".1f") for name in (f"x {HTTP}", f"x {ATROPOS}", f"{LIMIT} x {ATROPOS}")]
    return [
        rows_table("in one process; x: how often ours fits into the other's time", parts["buffer"], [work, *found]),
        rows_table(
            "hand-over to another process",
            parts["hand-over"],
            [work, Column("MB", "mb", ".1f"), *across, Column("x memcpy", "over_memcpy", ".2f")],
        ),
        rows_table("as an actor, against HTTP", parts["actor"], [work, *actor]),
    ]


@contextlib.contextmanager
def peers(python: str | None, work: Work) -> Iterator[TorchRLProcess | None]:
    """TorchRL's program when there is a Python for it, else None."""
    if python is None:
        yield None
        return
    with contextlib.closing(TorchRLProcess(python, work)) as process:
        yield process


def measure(
    work: Work, rounds: int, python: str | None, atropos: str | None, say: Callable[[str], None]
) -> tuple[Result, list[str]]:
    """Everything; the names of the systems that took part."""
    torch.set_num_threads(1)
    peaks: dict[str, int] = {}
    versions: dict[str, str] = {}
    with peers(python, work) as process:
        say("buffers")
        systems: dict[str, System] = {OURS: Ours(work), RAGGED: Ours(work, ragged=True), COPY: Memcpy(work)}
        if process is not None:
            versions = process.versions
            systems |= {name: TorchRL(process, name) for name in STORAGES}
        rows = buffer_rows(measure_buffers(systems, rounds), list(systems))
        if process is not None:
            peaks["TorchRL, all storages"] = process.peak_bytes()
    names = list(systems)
    systems.clear()
    say("hand-over")
    rows += asyncio.run(measure_hand_over(work, rounds, peaks))
    say("actor")
    rows += asyncio.run(measure_actor(work, rounds, atropos, peaks))
    peaks["bench and its children"] = peak_rss_bytes()
    settings = {**vars(work), "rounds": rounds}
    return Result("replay", rows, make_goals(rows), peaks, machine(**versions), {"settings": settings}), names


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m apps.bench.replay", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="rounds; each does every work once on every system")
    parser.add_argument("--items", type=int, default=10_000, help="episodes in each buffer, a multiple of 64")
    parser.add_argument(
        "--torchrl-python", help=f"Python of a venv with TorchRL (default .venv-torchrl): {TORCHRL_SETUP}"
    )
    parser.add_argument(
        "--atropos-python", help=f"Python of a venv with Atropos (default .venv-atropos): {ATROPOS_SETUP}"
    )
    args = parser.parse_args()
    if args.rounds < 1 or args.items < 64 * 8:
        parser.error(f"--rounds must be >= 1 and --items >= 512, got {args.rounds} and {args.items}")
    python = find_python(ROOT, "torchrl", args.torchrl_python, TORCHRL_SETUP)
    atropos = find_python(ROOT, "atropos", args.atropos_python, ATROPOS_SETUP)
    work = Work(items=args.items // 64 * 64)
    found, names = measure(work, args.rounds, python, atropos, lambda text: print(text, file=sys.stderr, flush=True))
    notes = [] if python else [f"TorchRL did not run; make its environment with: {TORCHRL_SETUP}"]
    notes += [] if atropos else [f"Atropos did not run; make its environment with: {ATROPOS_SETUP}"]
    show(found, *tables(found.rows, names), notes=notes)
    shutdown_context().get()
    sys.stdout.flush()
    os._exit(0)  # see apps/bench/channel.py


if __name__ == "__main__":
    # See apps/bench/channel.py: actors are to come from a module that their processes can import.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    from apps.bench import replay

    replay.main()
