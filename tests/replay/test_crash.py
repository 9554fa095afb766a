"""Invariant d: whenever a run is killed, its prompts stay one permutation and no token on the disk is made again."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from apps.bench.harness import crashes
from apps.bench.harness.crash_run import GROUPS_PER_STEP, Pace, make_prompts
from forge.checkpoints import Checkpoints
from replay.recovery import recover

PACE = Pace()


def crash(folder: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    durable: set[crashes.Token] = set()
    again = unfinished = 0
    for _ in range(kills):
        made_before = len(crashes.generated(folder))
        crashes.kill_while_it_runs(folder, rng.uniform(0.05, 0.8), PACE)
        twice = durable & set(crashes.generated(folder)[made_before:])
        assert not twice, f"made again although the journal had them: {sorted(twice)[:5]}"
        state = crashes.journalled(folder)
        durable = crashes.tokens_of(state)
        again += len(state.again)
        unfinished += sum(entry.group is None and bool(entry.partials) for entry in state.entries.values())
    assert again, "no kill came between a batch and its checkpoint"
    assert unfinished, "no kill interrupted an episode"
    steps = crashes.checkpointed(folder)[0] + 6
    last = crashes.start(folder, steps, PACE)
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
    stream = make_prompts()
    drawn = [stream.draw() for _ in range(state.next_seq)]
    assert sorted(trained + waiting) == sorted(prompt.epoch * 1000 + prompt.id for prompt in drawn)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
def test_ten_random_kills(tmp_path: Path, seed: int) -> None:
    crash(tmp_path, kills=10, seed=seed)
