"""Laws of apps/advise: what is measured is what the environment takes, and the advice follows from it."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest

from actors.environments.base import Action, Observation, Step
from apps.advise.__main__ import main
from apps.advise.advice import Costs, best, choices, percentile, scene_of
from apps.advise.measure import Measured, measure
from forge.errors import RewardError

COSTS = Costs(decode_s=1.0, step_s=2.0, sync_s=0.1, group_size=4, groups_per_step=4, places=1024)


class Played:
    """A pool whose turns take as long as the task says, in thousandths of a second; 0 raises."""

    def __init__(self) -> None:
        self.open: dict[str, Mapping[str, Any]] = {}
        self.count = itertools.count()
        self.said: list[str] = []

    async def start(self, task: Mapping[str, Any]) -> tuple[str, Observation]:
        name = str(next(self.count))
        self.open[name] = task
        return name, Observation([{"role": "user", "content": "go"}])

    async def step(self, episode: str, action: Action) -> Step:
        self.said.append(action.text)
        if not self.open[episode]["ms"]:
            raise RewardError("it broke\nwith a traceback")
        await asyncio.sleep(self.open[episode]["ms"] / 1000)
        return Step(Observation([]), 0.0, done=True)

    async def close(self, episode: str) -> None:
        del self.open[episode]


def played(tasks: list[dict[str, Any]], seconds: float) -> tuple[Measured, Played]:
    pool = Played()
    found = asyncio.run(
        measure(pool, itertools.cycle(tasks), lambda _: Action("hello"), at_once=3, seconds=seconds, max_turns=5)
    )
    return found, pool


def test_it_measures_turns_and_leaves_no_environment_open() -> None:
    found, pool = played([{"ms": 20}], 0.5)
    turns = [seconds for episode in found.turns_s for seconds in episode]
    assert len(found.turns_s) >= 6
    assert percentile(turns, 0.5) >= 0.02
    assert len(found.resets_s) == len(found.turns_s)
    assert pool.open == {}
    assert set(pool.said) == {"hello"}


def test_a_turn_that_the_end_cuts_counts_as_long_as_it_was() -> None:
    found, pool = played([{"ms": 60_000}], 0.3)
    assert found.cut == 3
    assert [len(episode) for episode in found.turns_s] == [1, 1, 1]
    assert all(seconds >= 0.2 for (seconds,) in found.turns_s)
    assert pool.open == {}


def test_errors_of_the_environment_are_counted_and_others_raised() -> None:
    found, _ = played([{"ms": 0}, {"ms": 1}], 0.2)
    assert found.failed["it broke"] > 0
    assert found.turns_s
    with pytest.raises(KeyError):
        played([{}], 5.0)


def measured(turns: list[float], episode: int = 4) -> Measured:
    return Measured(resets_s=[0.1], turns_s=[turns[i : i + episode] for i in range(0, len(turns), episode)])


def test_without_latency_the_advice_is_what_overlaps_training_alone() -> None:
    quick = choices(scene_of(measured([0.001] * 40), Costs(1.0, 5.0, 0.1, 4, 4, 16)), steps=60)
    assert best(quick).bound == 1, "generation and training overlap, more than one version ahead brings nothing"
    alone = choices(scene_of(measured([0.001] * 40), Costs(1.0, 0.01, 0.01, 4, 4, 16)), steps=60)
    assert best(alone).bound == 0, "there is nothing to overlap with"


def test_heavy_tails_call_for_a_larger_bound_and_more_environments() -> None:
    rng = random.Random(0)
    heavy = [rng.lognormvariate(0.0, 1.4) for _ in range(400)]
    chosen = best(choices(scene_of(measured(heavy), COSTS), steps=60))
    assert chosen.bound >= 2
    assert chosen.environments > 16
    assert chosen.gain > 1.8
    assert chosen.outcome.staleness_max <= chosen.bound


def test_the_command_measures_an_environment_and_ends_with_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ["--env", "apps.advise.example:Waiting", "--env-args", '{"median_s": 0.01, "turns": 2}']
    costs = ["--decode-s", "0.02", "--step-s", "0.1", "--sync-s", "0.01", "--seconds", "1"]
    monkeypatch.setattr("sys.argv", ["advise", *world, *costs])
    main()
    said = capsys.readouterr().out
    assert re.search(r"turn +\d+ measured  p50 0\.0\d+ s", said), said
    assert said.strip().splitlines()[-1].startswith("Run "), said
    monkeypatch.setattr("sys.argv", ["advise", "--env", "apps.advise.example:Nothing", *costs])
    with pytest.raises(SystemExit, match=r"apps\.advise: .*Nothing"):
        main()


def test_percentiles_are_of_what_is_there() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.99) == 2.0
