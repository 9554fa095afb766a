"""Laws of actors/environments/parking.py: who waits, until when, and that somebody always goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from actors.environments.parking import Parking, Round
from forge.episodes import EpisodeTokens

LIMIT_S = 30


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work

    asyncio.run(limited())


class Episode:
    """Says `tokens` a turn under the weights of `Weights.now`; its turns end when `go_on` is set."""

    def __init__(self, parking: Parking, name: str, log: list[str], weights: list[int], tokens: int = 4) -> None:
        self.parking, self.name, self.log, self.weights, self.tokens = parking, name, log, weights, tokens
        self.episode, self.round = EpisodeTokens(), Round()
        self.episode.given([1])

    async def turn(self, go_on: asyncio.Event | None = None) -> None:
        async with self.parking.turn(self.round, self.episode):
            self.log.append(self.name)
            if go_on is not None:
                await go_on.wait()
            self.episode.sampled([7] * self.tokens, [-0.5] * self.tokens, [self.weights[0]] * self.tokens)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_an_episode_over_its_tokens_waits_while_every_place_is_taken_and_goes_on_when_one_is_free() -> None:
    async def work() -> None:
        parking, log, weights = Parking(4, places=1), list[str](), [0]
        long, other, end = (Episode(parking, name, log, weights) for name in ("long", "other", "end"))
        await long.turn()
        busy = asyncio.Event()
        holding = asyncio.create_task(other.turn(busy))
        await settle()
        parked = asyncio.create_task(long.turn())
        await settle()
        assert log == ["long", "other"]
        assert parking.row()["extra/episodes/parked_now"] == 1
        busy.set()
        await asyncio.gather(holding, parked)
        assert log == ["long", "other", "long"]
        assert long.episode.versions == [0] * 8
        await end.turn()

    run(work())


def test_it_goes_on_when_newer_weights_have_come_and_its_tokens_keep_their_versions() -> None:
    async def work() -> None:
        parking, log, weights = Parking(4, places=1), list[str](), [3]
        long, first, second = (Episode(parking, name, log, weights) for name in ("long", "first", "second"))
        await long.turn()
        hold = [asyncio.Event(), asyncio.Event()]
        holding = [asyncio.create_task(e.turn(h)) for e, h in zip((first, second), hold, strict=True)]
        await settle()
        parked = asyncio.create_task(long.turn())
        await settle()
        weights[0] = 4
        hold[0].set()
        await asyncio.gather(holding[0], parked)
        assert log == ["long", "first", "second", "long"], "though the one place is taken still"
        assert long.episode.versions == [3] * 4 + [4] * 4
        assert parking.row()["extra/episodes/parked_until_newer"] == 1
        hold[1].set()
        await holding[1]

    run(work())


def test_with_every_episode_over_its_tokens_all_come_to_their_end_without_newer_weights() -> None:
    async def work() -> None:
        parking, log, weights = Parking(1, places=2), list[str](), [0]

        async def play(name: str) -> None:
            episode = Episode(parking, name, log, weights)
            for _ in range(5):
                await episode.turn()

        await asyncio.gather(*(play(str(number)) for number in range(9)))
        assert len(log) == 45
        assert parking.row()["extra/episodes/parked_now"] == 0

    run(work())


def test_one_that_is_cancelled_takes_nobody_s_turn_with_it() -> None:
    async def work() -> None:
        parking, log, weights = Parking(4, places=1), list[str](), [0]
        first, second, other = (Episode(parking, name, log, weights) for name in ("first", "second", "other"))
        await first.turn()
        await second.turn()
        async with parking.turn(other.round, other.episode):
            parked = [asyncio.create_task(episode.turn()) for episode in (first, second)]
            await settle()
            assert parking.row()["extra/episodes/parked_now"] == 2
        parked[0].cancel()  # it has been called, and has not gone on yet
        with pytest.raises(asyncio.CancelledError):
            await parked[0]
        await parked[1]
        assert log[-1] == "second"

    run(work())


def test_without_round_tokens_nobody_waits() -> None:
    async def work() -> None:
        parking, log, weights = Parking(0, places=1), list[str](), [0]
        long, other = Episode(parking, "long", log, weights), Episode(parking, "other", log, weights)
        await long.turn()
        busy = asyncio.Event()
        holding = asyncio.create_task(other.turn(busy))
        await settle()
        await long.turn()
        busy.set()
        await holding

    run(work())
