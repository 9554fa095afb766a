"""How long an environment takes: its own turns, measured by playing episodes for a while."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.environments.base import Action, Observation, Worlds
from forge.errors import ForgeError

_END_S = 60.0
"""How long environments may take to close at the end, seconds."""
Act = Callable[[Observation], Action]
"""What stands in for the policy."""


@dataclass
class Measured:
    """Seconds of each reset, and of each turn by episode."""

    resets_s: list[float] = field(default_factory=list)
    turns_s: list[list[float]] = field(default_factory=list)
    """Of all episodes that took a turn. One that the end of the time has cut counts as it is: to leave it out would
    leave out the slow ones."""
    cut: int = 0
    """Episodes that were under way at the end."""
    failed: Counter[str] = field(default_factory=Counter)
    """How often each error ended an episode, by its first line."""


async def measure(
    pool: Worlds, tasks: Iterator[Mapping[str, Any]], act: Act, *, at_once: int, seconds: float, max_turns: int
) -> Measured:
    """Plays episodes of `tasks`, `at_once` of them side by side and of `max_turns` turns at most, for `seconds`.

    An error of the environment ends its episode and is counted; any other is raised.
    """
    found = Measured()
    players = [asyncio.create_task(_play(pool, tasks, act, found, max_turns)) for _ in range(at_once)]
    try:
        await asyncio.wait(players, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for player in players:
            player.cancel()
        done, late = await asyncio.wait(players, timeout=_END_S)
    for player in done:
        if not player.cancelled():
            player.result()
    if late:
        raise TimeoutError(f"{len(late)} environments did not close within {_END_S:g} s after the measurement")
    return found


async def _play(pool: Worlds, tasks: Iterator[Mapping[str, Any]], act: Act, found: Measured, max_turns: int) -> None:
    """Episode after episode, until it is cancelled or the tasks are over."""
    for task in tasks:
        episode, turns, begin = "", list[float](), time.perf_counter()
        try:
            episode, said = await pool.start(task)
            found.resets_s.append(time.perf_counter() - begin)
            for _ in range(max_turns):
                begin = time.perf_counter()
                step = await pool.step(episode, act(said))
                turns.append(time.perf_counter() - begin)
                if step.done:
                    break
                said = step.observation
        except asyncio.CancelledError:
            (turns if episode else found.resets_s).append(time.perf_counter() - begin)
            found.cut += 1
            raise
        except ForgeError as error:
            found.failed[str(error).partition("\n")[0]] += 1
        finally:
            if turns:
                found.turns_s.append(turns)
            if episode:
                await pool.close(episode)
