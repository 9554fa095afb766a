"""Kills crash_run.py and reads what is left: which tokens the run made, and which of them a resume has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from apps.bench.harness.crash_run import Pace
from forge.checkpoints import Checkpoints
from replay.events import ReplayState
from replay.recovery import recover
from replay.segments import read_snapshot, snapshot_path

ROOT = Path(__file__).parents[3]
Token = tuple[int, int, int]
"""Group, place of the episode in it, position in the episode."""


def start(folder: Path, steps: int, pace: Pace) -> subprocess.Popen[str]:
    """Begins the run, or goes on with it. It prints "running" once its loops do."""
    command = [sys.executable, "-m", "apps.bench.harness.crash_run", str(folder), str(steps), json.dumps(asdict(pace))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def kill_while_it_runs(folder: Path, after_s: float, pace: Pace) -> None:
    """SIGKILL `after_s` seconds after its loops began."""
    run = start(folder, 10**9, pace)
    assert run.stdout is not None
    try:
        assert run.stdout.readline() == "running\n", "the run did not come up"
        time.sleep(after_s)
        assert run.poll() is None, "the run ended by itself"
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()


def generated(folder: Path) -> list[Token]:
    """Every token that was made, in order, over all incarnations."""
    path = folder / "generated.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(a), int(b), int(c)) for a, b, c in (line.split() for line in lines)]


def checkpointed(folder: Path) -> tuple[int, ReplayState]:
    """The version of the newest checkpoint, 0 where there is none, and the replay's state as it holds it."""
    latest = Checkpoints(folder / "checkpoints").latest()
    version, segment = (latest.version, int(latest.meta["segment"])) if latest else (0, 0)
    state = read_snapshot(snapshot_path(folder / "journal", segment)) if latest else ReplayState(0)
    assert state is not None, "the checkpoint's own snapshot is not whole"
    return version, state


def journalled(folder: Path) -> ReplayState:
    """What a resume would go on from."""
    return recover(folder / "journal", checkpointed(folder)[0]).state


def tokens_of(state: ReplayState) -> set[Token]:
    """The tokens that a state holds, in complete groups and unfinished episodes."""
    found: set[Token] = set()
    for entry in state.entries.values():
        if entry.group is not None:
            lengths = dict(enumerate(int(n) - 1 for n in entry.group["lengths"]))
        else:
            lengths = {place: len(part.tokens) for place, part in entry.partials.items()}
        found |= {(entry.seq, place, p) for place, length in lengths.items() for p in range(length)}
    return found
