"""Partial rollouts: an episode that has sampled its tokens of a round makes room, and goes on under newer weights.

    round = Round()
    async with parking.turn(round, episode):        # may wait
        ... generate ...

With `episodes.round_tokens` r, an episode that has sampled r tokens or more since it began, or last went on, is
*parked* before its next turn. Its environment stays open, it holds no place in a generator, and its tokens keep the
versions that sampled them. It goes on, and a new round of it begins, as soon as

  a. an answer has come that newer weights sampled than those of its last token, or
  b. fewer turns are being generated than the generators decode at once: parking it would leave a place empty.

What it holds on to is its group's slot of the replay, and that is the point: the slot is what makes the bound hold
(replay/staleness.py). The age of a group counts from its oldest token and its deadline from its ticket, parked or not;
when it is due the train loop waits for it as for any other, and what is not there after `replay.straggler_timeout_s` is
dropped and counted (groups/straggled, tokens/wasted). So no parked episode can become too old to be trained.

Nothing can wait for ever: an episode is parked only while every place is taken. Those that hold them end, or are parked
themselves after r tokens, and there are as many as the replay has slots for; others begin only when a batch was
trained, whose weights are what (a) waits for, or a group dropped, of which there are `max_dropped_in_a_row`. Whoever
was parked first goes on first. With everything parked no place is taken, and (b) holds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from forge.episodes import EpisodeTokens
from forge.metrics import Number


@dataclass
class Round:
    """Of one episode."""

    begun: int = 0
    """Tokens that it had sampled when its round began."""


@dataclass(eq=False)
class _Parked:
    version: int
    """Of its last token."""
    go_on: asyncio.Future[None]


class Parking:
    """Of one run; belongs to one event loop."""

    def __init__(self, round_tokens: int = 0, places: int = 1) -> None:
        """round_tokens: of one round, 0 for no end. places: sequences that the generators decode at once, 1 or more."""
        self._round_tokens, self._places = round_tokens, places
        self._running = 0
        self._called = 0
        """Those that may go on and have not done so yet."""
        self._newest = -1
        self._parked: deque[_Parked] = deque()
        self._counts = {"parked": 0, "parked_until_newer": 0}

    @asynccontextmanager
    async def turn(self, round: Round, episode: EpisodeTokens) -> AsyncIterator[None]:
        """The body generates one turn of `episode`; before it the episode may be parked."""
        if self._round_tokens and episode.num_sampled - round.begun >= self._round_tokens:
            await self._park(episode.versions[-1])
            round.begun = episode.num_sampled
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if episode.versions:
                self._newest = max(self._newest, episode.versions[-1])
            self._wake()

    def row(self) -> dict[str, Number]:
        """Metrics since the last row: extra/episodes/parked, those of them that newer weights called
        (parked_until_newer), and how many are parked now (parked_now)."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return {f"extra/episodes/{key}": value for key, value in {**counts, "parked_now": len(self._parked)}.items()}

    async def _park(self, version: int) -> None:
        if version < self._newest or self._running + self._called < self._places:
            return
        parked = _Parked(version, asyncio.get_running_loop().create_future())
        self._parked.append(parked)
        self._counts["parked"] += 1
        try:
            await parked.go_on
        finally:
            if parked.go_on.done() and not parked.go_on.cancelled():
                self._called -= 1
            else:
                self._parked.remove(parked)
            self._wake()

    def _wake(self) -> None:
        """Calls those that may go on."""
        for parked in [parked for parked in self._parked if parked.version < self._newest]:
            self._counts["parked_until_newer"] += 1
            self._call(parked)
        while self._parked and self._running + self._called < self._places:
            self._call(self._parked[0])

    def _call(self, parked: _Parked) -> None:
        self._parked.remove(parked)
        if not parked.go_on.cancelled():
            self._called += 1
            parked.go_on.set_result(None)
