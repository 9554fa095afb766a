"""From episodes to a group: who plays side by side, what a failed one does to the others, when to give up.

    groups = Groups(config)
    await groups.play(group_id, play, wanted, oversample)     play(place, attempt) is one episode; None: it is dropped

It knows nothing of what an episode is, besides how many tokens its policy sampled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from forge.errors import ConfigError, EnvironmentFailed, QuarantinedError

_log = logging.getLogger(__name__)


@dataclass
class GroupPolicy:
    """What becomes of a group one of whose episodes fails."""

    on_failure: Literal["retry", "shrink", "drop"] = "shrink"
    """What a failed episode does to its group: it is played anew up to `retries` times; or the group goes on without
    it, if at least `smallest_group` are left; or the group is dropped. Where tries run out the group shrinks."""
    retries: int = 1
    """Further tries of a failed episode, with on_failure retry."""
    smallest_group: int = 2
    """Episodes that a group needs at least; with fewer it is dropped."""
    max_dropped_in_a_row: int = 64
    """Groups that are dropped one after the other; one more ends the run."""

    def validate(self, section: str = "episodes") -> None:
        """Raises ConfigError naming the field, its value and its limit. section: configuration key of this object."""
        self._at_least(section, retries=0, smallest_group=1, max_dropped_in_a_row=1)
        if self.on_failure not in ("retry", "shrink", "drop"):
            raise ConfigError(f"{section}.on_failure must be retry, shrink or drop, got {self.on_failure}")

    def _at_least(self, section: str, **limits: int) -> None:
        for name, least in limits.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{section}.{name} must be >= {least}, got {getattr(self, name)}")


class Sampled(Protocol):
    """An episode that came to an end."""

    @property
    def num_sampled(self) -> int:
        """Tokens that can be trained."""
        ...


E = TypeVar("E", bound=Sampled)


async def episodes_of_group(
    play: Callable[[int, int], Awaitable[E]], wanted: int, oversample: int, config: GroupPolicy
) -> tuple[list[E], int]:
    """The first `wanted` of `wanted + oversample` episodes to end well, and how many tokens of others were thrown away.

    `play(place, attempt)` is one episode, attempt 0 its first try; its failure is an EnvironmentFailed. Raises
    EnvironmentFailed when the group is to be dropped. Those that still run then, or are not needed any more, are
    cancelled, and waited for: each has deadlines of its own.
    """
    running = {asyncio.create_task(_tried(play, place, config)) for place in range(wanted + oversample)}
    ended: list[E] = []
    failed: list[EnvironmentFailed] = []
    try:
        while running and len(ended) < wanted:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                result = task.result()
                if isinstance(result, EnvironmentFailed):
                    failed.append(result)
                else:
                    ended.append(result)
            if failed and config.on_failure == "drop":
                raise failed[0]
    finally:
        await _cancelled(running)
    spoke = [episode for episode in ended if episode.num_sampled]
    if len(spoke) < min(wanted, config.smallest_group):
        raise failed[0] if failed else _silent(len(spoke), len(ended), config)
    return spoke[:wanted], sum(episode.num_sampled for episode in spoke[wanted:])


async def _tried(play: Callable[[int, int], Awaitable[E]], place: int, config: GroupPolicy) -> E | EnvironmentFailed:
    """An episode, or why there is none."""
    for attempt in range(1 + (config.retries if config.on_failure == "retry" else 0)):
        try:
            return await play(place, attempt)
        except QuarantinedError as error:
            return error  # another try would be refused as well
        except EnvironmentFailed as error:
            last = error
    return last


def _silent(spoke: int, ended: int, config: GroupPolicy) -> EnvironmentFailed:
    return EnvironmentFailed(
        f"{spoke} of {ended} episodes have a sampled token, episodes.smallest_group is {config.smallest_group}; "
        "shorten what the environment says, or raise generator.max_model_len"
    )


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancels what runs and waits until its environments are closed, each of which has a deadline."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


class Groups:
    """The groups of a run, which ends where too many of them are dropped one after the other."""

    def __init__(self, config: GroupPolicy) -> None:
        self._config = config
        self._dropped_in_a_row = 0

    async def play(
        self, group_id: int, play: Callable[[int, int], Awaitable[E]], wanted: int, oversample: int
    ) -> tuple[list[E], int] | None:
        """See `episodes_of_group`; None: the group is dropped.

        Raises EnvironmentFailed when `max_dropped_in_a_row` were dropped before it.
        """
        try:
            found = await episodes_of_group(play, wanted, oversample, self._config)
        except EnvironmentFailed as error:
            self._drop(group_id, error)
            return None
        self._dropped_in_a_row = 0
        return found

    def _drop(self, group_id: int, error: EnvironmentFailed) -> None:
        self._dropped_in_a_row += 1
        _log.warning("group %d is dropped: %s", group_id, error)
        if self._dropped_in_a_row > self._config.max_dropped_in_a_row:
            raise EnvironmentFailed(
                f"{self._dropped_in_a_row} groups in a row were dropped, episodes.max_dropped_in_a_row is "
                f"{self._config.max_dropped_in_a_row}; the last: {error}"
            ) from error
