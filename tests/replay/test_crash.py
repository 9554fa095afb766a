"""Invariant d: whenever a run is killed, its prompts stay one permutation and no token on the disk is made again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from crash_run import GROUPS_PER_STEP, ROWS

from forge.checkpoints import Checkpoints
from forge.data import PromptStream
from replay.events import ReplayState
from replay.recovery import recover

SCRIPT = Path(__file__).with_name("crash_run.py")
ROOT = Path(__file__).parents[2]


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), str(folder), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def kill_while_it_runs(folder: Path, after_s: float) -> None:
    run = start(folder, 10**9)
    assert run.stdout is not None
    assert run.stdout.readline() == "running\n"
    time.sleep(after_s)
    assert run.poll() is None, "the run ended by itself"
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()


def generated(folder: Path) -> list[str]:
    return (folder / "generated.log").read_text().splitlines()


def journalled(state: ReplayState) -> set[str]:
    """The tokens that the journal has, as the generator's log writes them."""
    found = set()
    for entry in state.entries.values():
        if entry.group is not None:
            lengths = [int(n) - 1 for n in entry.group["lengths"]]
        else:
            lengths = [len(entry.partials[g].tokens) if g in entry.partials else 0 for g in range(2)]
        found |= {f"{entry.seq} {place} {p}" for place, length in enumerate(lengths) for p in range(length)}
    return found


def crash(tmp_path: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    folder = tmp_path / "run"
    folder.mkdir()
    durable: set[str] = set()
    again = unfinished = 0
    for _ in range(kills):
        made_before = len(generated(folder)) if (folder / "generated.log").exists() else 0
        kill_while_it_runs(folder, rng.uniform(0.05, 0.8))
        twice = durable & set(generated(folder)[made_before:])
        assert not twice, f"made again although the journal had them: {sorted(twice)[:5]}"
        latest = Checkpoints(folder / "checkpoints").latest()
        state = recover(folder / "journal", latest.version if latest else 0).state
        durable = journalled(state)
        again += len(state.again)
        unfinished += sum(entry.group is None and bool(entry.partials) for entry in state.entries.values())
    assert again, "no kill came between a batch and its checkpoint"
    assert unfinished, "no kill interrupted an episode"
    steps = len(json.loads((Checkpoints(folder / "checkpoints").list()[-1].path / "trainer/seen.json").read_text())) + 6
    last = start(folder, steps)
    last.communicate(timeout=60)
    assert last.returncode == 0
    check_permutation(folder, steps)


def check_permutation(folder: Path, steps: int) -> None:
    """What was trained, and what is under way, is the stream of prompts from its beginning: none lost, none twice."""
    final = Checkpoints(folder / "checkpoints").latest()
    assert final is not None
    assert final.version == steps
    trained = [name for batch in json.loads((final.path / "trainer" / "seen.json").read_text()) for name in batch]
    assert len(trained) == steps * GROUPS_PER_STEP
    state = recover(folder / "journal", steps).state
    waiting = [entry.prompt.epoch * 1000 + entry.prompt.id for entry in state.entries.values()]
    stream = PromptStream([{"prompt": str(i)} for i in range(ROWS)], lambda row: (row["prompt"], [1]), seed=3)
    drawn = [stream.draw() for _ in range(state.next_seq)]
    assert sorted(trained + waiting) == sorted(prompt.epoch * 1000 + prompt.id for prompt in drawn)


def test_a_run_that_is_killed_again_and_again_trains_each_prompt_once(tmp_path: Path) -> None:
    crash(tmp_path, kills=4, seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 6))
def test_ten_random_kills(tmp_path: Path, seed: int) -> None:
    crash(tmp_path, kills=10, seed=seed)
