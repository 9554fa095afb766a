"""Calls to one life of an actor, which may end while they run."""

from __future__ import annotations

import asyncio

import pytest

from forge.errors import ActorFailed
from forge.lasting import Life


class ActorError(Exception):
    """Stands for Monarch's around an exception that an actor raised."""

    def __init__(self, exception: Exception) -> None:
        super().__init__(str(exception))
        self.exception = exception


async def raises(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


def test_an_actor_that_says_that_it_cannot_go_on_is_dead_and_all_its_calls_fail() -> None:
    async def scenario() -> None:
        told: list[str] = []
        life = Life("generator_0", told.append)
        waiting = asyncio.ensure_future(life.ask(asyncio.get_running_loop().create_future()))
        with pytest.raises(ActorFailed, match="actor generator_0 failed: its process has ended"):
            await life.ask(raises(ActorError(ActorFailed("engine", "its process has ended"))))
        with pytest.raises(ActorFailed, match="its process has ended"):
            await waiting
        assert told == ["its process has ended"]

    asyncio.run(scenario())


def test_what_else_an_actor_raises_is_its_answer() -> None:
    async def scenario() -> None:
        told: list[str] = []
        with pytest.raises(ActorError, match="no such key"):
            await Life("reward", told.append).ask(raises(ActorError(KeyError("no such key"))))
        assert told == []

    asyncio.run(scenario())
