"""Random SIGKILL and SIGSTOP on every role of a run: what it costs, and whether anything is lost.

    python -m apps.bench.chaos                        # 100 faults on the preset tiny, then an undisturbed run as long
    python -m apps.bench.chaos --faults 10 --roles trainer generator

Every role is respawned (`mesh.<role>.on_failure`); a controller that was killed is resumed (`--resume`). One in five
faults strikes while the run has not got over the one before. "kill" is SIGKILL, "stop" SIGSTOP, which only heartbeats
notice (every 5 s here, four in a row), "pause" a SIGSTOP of the controller that ends after some seconds.

A recovery is over when the role serves again and one more step is done. In the end the journal says which prompts were
trained, and the last steps' reward is compared with that of an undisturbed run of as many steps.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apps.bench.grpo import ENV, PRESET, ROOT
from apps.bench.harness import processes
from apps.bench.harness.result import Column, Goal, Result, rows_table, show
from apps.bench.harness.victims import CONTROLLER, Fault, Victim
from forge.metrics import Row, read_rows
from replay.recording import Recording
from replay.recovery import recover

ROLES = ("trainer", "generator", "replay", "reward", CONTROLLER)
LAST = 20
"""Steps whose mean reward is compared."""
OPTIONS = (
    "--run.checkpoint_every=10",
    "--replay.record",
    *(f"--mesh.{role}.max_restarts=1000" for role in ROLES[:-1]),
    *(f"--mesh.{role}.heartbeat_s=5" for role in ROLES[:-1]),
)
COLUMNS = (
    Column("role", "role"),
    Column("fault", "what"),
    Column("times", "times"),
    Column("recovery s: median", "median_s", ".1f"),
    Column("p95", "p95_s", ".1f"),
    Column("longest", "longest_s", ".1f"),
)


def torment(victim: Victim, faults: int, roles: Sequence[str], seed: int) -> list[Fault]:
    """Strikes `faults` times; returns what it took each time."""
    rng, found, overlapping = random.Random(seed), [], False
    victim.recover(CONTROLLER, -1, waits=True)
    for number in range(faults):
        time.sleep(rng.uniform(0.0, 3.0))
        role = rng.choice(roles)
        what = rng.choice(("kill", "pause") if role == CONTROLLER else ("kill", "kill", "stop"))
        before, resumes, begin = victim.served_again(role), victim.resumes, time.monotonic()
        waits = victim.strike(role, what, rng)
        if number + 1 < faults and rng.random() < 0.2:
            overlapping = True  # the next one strikes in the middle of it
            continue
        victim.recover(role, before, waits=waits, resumes=resumes)
        found.append(Fault(role, what, time.monotonic() - begin, overlapping))
        overlapping = False
        print(f"{number + 1}/{faults}: {found[-1]}", file=sys.stderr, flush=True)
    return found


def rows_of(faults: Sequence[Fault]) -> list[Row]:
    """A row a role and kind of fault; overlapping ones are rows of their own."""
    rows: list[Any] = []
    for role, what in sorted({fault.kind for fault in faults}):
        seconds = sorted(fault.recovery_s for fault in faults if fault.kind == (role, what))
        p95 = seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]
        median = statistics.median(seconds)
        rows.append(
            {
                "role": role,
                "what": what,
                "times": len(seconds),
                "median_s": median,
                "p95_s": p95,
                "longest_s": seconds[-1],
            }
        )
    return rows


def prompts_of(folder: Path, steps: int) -> tuple[int, int]:
    """Prompts that were lost, and that were trained twice, according to the journal."""
    recording = Recording(folder / "journal")
    trained = [seq for version in recording.versions for seq in recording.batch(version).seqs]
    waiting = list(recover(folder / "journal", steps).state.entries)
    seen = trained + waiting
    return len(set(range(max(seen) + 1)) - set(seen)), len(seen) - len(set(seen))


def undisturbed(folder: Path, steps: int) -> tuple[list[Row], dict[str, int]]:
    """Rows and peak memory of the same run, which nobody disturbs."""
    command = [sys.executable, "apps/grpo/main.py", "--config", str(PRESET), f"--run.dir={folder}"]
    command += [f"--trainer.steps={steps}", "--run.checkpoint_every=10"]
    env = ENV | {"OMP_NUM_THREADS": "1"}
    log, deadline_s = folder.with_suffix(".log"), 300.0 + 20 * steps
    done = processes.run(command, role=CONTROLLER, cwd=ROOT, env=env, deadline_s=deadline_s, log=log)
    return read_rows(folder / "metrics.jsonl"), done.peaks


def mean_reward(rows: Sequence[Row]) -> float:
    """Of the last steps that have one."""
    values = [float(value) for row in rows if (value := row["reward/mean"]) is not None]
    return statistics.fmean(values[-LAST:])


def measure(faults: int, roles: Sequence[str], seed: int, deadline_s: float, scratch: Path) -> Result:
    """Both runs, and what was found."""
    before = set(os.listdir("/dev/shm"))
    with Victim(scratch / "chaos", ["--trainer.steps=1000000", f"--seed={seed}", *OPTIONS], deadline_s) as victim:
        found = torment(victim, faults, roles, seed)
        victim.stop()
    rows = victim.rows()
    lost, twice = prompts_of(victim.folder, len(rows))
    dropped = sum(int(row["episodes/dropped"] or 0) for row in rows)
    stale = max(float(row["staleness/max"] or 0.0) for row in rows)
    segments = len(set(os.listdir("/dev/shm")) - before)
    calm, peaks = undisturbed(scratch / "calm", len(rows))
    seconds = sorted(fault.recovery_s for fault in found)
    goals = [
        Goal("prompts lost", lost, 0, "most"),
        Goal("prompts trained twice", twice, 0, "most"),
        Goal("episodes dropped", dropped, 0, "most"),
        Goal("times that the run ended by itself once it trained", victim.ended, 0, "most"),
        Goal("processes left behind", victim.left, 0, "most"),
        Goal("segments left behind", segments, 0, "most"),
        Goal("largest staleness, bound 1", stale, 1, "most"),
        Goal("reward behind the undisturbed run's", mean_reward(calm) - mean_reward(rows), 0.05, "most"),
    ]
    extra = {
        "faults": faults,
        "resumes": victim.resumes,
        "ended_early": victim.ended_early,
        "steps": len(rows),
        "reward": mean_reward(rows),
        "reward_undisturbed": mean_reward(calm),
        "recovery_s": {"median": statistics.median(seconds), "p95": seconds[int(0.95 * (len(seconds) - 1))]},
    }
    return Result("chaos", rows_of(found), goals, peaks, extra=extra)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m apps.bench.chaos", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline-s", type=float, default=300.0, help="within which the run gets over a fault")
    args = parser.parse_args()
    if args.faults < 1 or args.deadline_s <= 0:
        parser.error("--faults must be >= 1, --deadline-s > 0")
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(args.faults, args.roles, args.seed, args.deadline_s, Path(scratch))
    told = result.extra
    notes = [
        f"{told['faults']} faults, {told['steps']} steps, {told['resumes']} resumes, {told['ended_early']} of them"
        f" after a fault while the actors started; reward of the last {LAST} steps {told['reward']:.3f}, undisturbed "
        f"{told['reward_undisturbed']:.3f}"
    ]
    show(result, rows_table("how long the run took to get over a fault", result.rows, COLUMNS), notes=notes)


if __name__ == "__main__":
    main()
