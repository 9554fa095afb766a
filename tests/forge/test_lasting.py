"""Calls to one life of an actor, which may end while they run."""

from __future__ import annotations

import asyncio

import pytest

from forge.errors import ActorFailed, RunFolderError
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


def test_what_one_of_several_ranks_raises_waits_for_the_news_that_another_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forge.lasting.NOTICE_S", 0.2)

    async def scenario() -> None:
        life = Life("trainer", print, ranks=2)
        asyncio.get_running_loop().call_later(0.02, life.lose, "rank 1 of 2: its process was killed by SIGKILL")
        with pytest.raises(ActorFailed, match="actor trainer failed: rank 1 of 2: its process was killed"):
            await life.ask(raises(ActorError(RuntimeError("Connection closed by peer"))))

    asyncio.run(scenario())


def test_what_one_of_several_ranks_raises_is_its_answer_when_no_news_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.lasting.NOTICE_S", 0.05)

    async def scenario() -> None:
        life = Life("trainer", print, ranks=2)
        with pytest.raises(ActorError, match="no such key"):
            await life.ask(raises(ActorError(KeyError("no such key"))))
        assert not life.lost

    asyncio.run(scenario())


@pytest.mark.parametrize(("ranks", "error"), [(1, KeyError("no space")), (2, RunFolderError("no space"))])
def test_what_a_single_rank_raises_and_the_projects_own_errors_wait_for_no_news(ranks: int, error: Exception) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(0.3):
            with pytest.raises(ActorError, match="no space"):
                await Life("trainer", print, ranks=ranks).ask(raises(ActorError(error)))

    asyncio.run(scenario())
