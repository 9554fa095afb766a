"""Adapters, on the real packages where they are installed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.environments.adapters.gymnasium import Gymnasium
from actors.environments.adapters.reasoning_gym import ReasoningGym, tasks
from actors.environments.base import Action
from actors.environments.config import EnvironmentConfig
from actors.environments.pool import EnvironmentPool
from forge.errors import ConfigError

ADAPTERS = "actors.environments.adapters"


def test_reasoning_gym_asks_and_scores_with_its_own_verifier() -> None:
    pytest.importorskip("reasoning_gym")
    world, rows = ReasoningGym("leg_counting"), tasks("leg_counting", size=3, seed=1)
    assert len(rows) == 3
    for row in rows:
        said = world.reset(row["metadata"])
        assert row["prompt"] in said.messages[0]["content"]
        right = world.step(Action(f"I count. <answer>1</answer> No: <answer> {row['answer']} </answer>"))
        assert (right.reward, right.done) == (1.0, True)
        wrong = world.step(Action("<answer>-7</answer>"))
        assert wrong.reward < 0.5
        none = world.step(Action(row["answer"]))
        assert (none.reward, none.info["answered"]) == (0.0, False)
    with pytest.raises(ConfigError, match="has no data set 'no_such'"):
        ReasoningGym("no_such")


LAKE: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "actions": ["left", "down", "right", "up"],
    "options": {"is_slippery": False},
}


def test_a_lake_is_crossed_by_naming_the_ways() -> None:
    pytest.importorskip("gymnasium")
    world = Gymnasium(**LAKE)
    said = world.reset({"seed": 1, "say": "Reach G.\n"}).messages[0]["content"]
    assert said.startswith("Reach G.")
    assert "SFFF" in said
    assert said.endswith("Answer with one of: left, down, right, up.")
    assert "\x1b" not in said
    nothing = world.step(Action("swim"))
    assert (nothing.reward, nothing.done, nothing.info) == (-0.1, False, {"invalid": True})
    ways = ["down", "Down!", "not left but right", "right", "1"]
    steps = [world.step(Action(way)) for way in ways]
    assert not any(step.done for step in steps)
    last = world.step(Action("RIGHT"))
    assert (last.reward, last.done) == (1.0, True)
    world.close()


def test_a_lake_in_a_pool_runs_in_a_process_of_its_own() -> None:
    pytest.importorskip("gymnasium")

    async def play() -> Any:
        config = EnvironmentConfig(path=f"{ADAPTERS}.gymnasium:Gymnasium", kwargs=LAKE, concurrency=2)
        async with EnvironmentPool(config, name="lake") as pool:
            episode, said = await pool.start({"seed": 1})
            step = await pool.step(episode, Action("down"))
            await pool.close(episode)
            return said, step

    said, step = asyncio.run(play())
    assert "SFFF" in said.messages[0]["content"]
    assert not step.done


def test_what_gymnasium_does_not_have_or_text_cannot_say_is_refused() -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match="gymnasium has no environment 'NoSuch-v0'"):
        Gymnasium("NoSuch-v0")
    with pytest.raises(ConfigError, match="Pendulum-v1 takes actions of Box"):
        Gymnasium("Pendulum-v1")
    with pytest.raises(ConfigError, match="has 4 actions, 2 names were given"):
        Gymnasium("FrozenLake-v1", ["left", "right"])
