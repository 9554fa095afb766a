"""Rewards of finished turns, asked for while later turns are generated: what a process-reward model is for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from actors.reward import Sample
from forge.episodes import EpisodeTokens


class RewardsTurns(Protocol):
    """`actors.reward_pools.RewardPools`, as far as turns go."""

    def scores_turns(self, metadata: Mapping[str, Any]) -> bool: ...

    async def score_turn(self, sample: Sample) -> float: ...


class TurnScores:
    """Of one episode: `ask` once a turn, then `settle`; or `give_up`."""

    def __init__(
        self, rewards: RewardsTurns | None, task: Mapping[str, Any], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """Without `rewards`, and where no pool scores the turns of `task`, it does nothing."""
        self._rewards = rewards if rewards is not None and rewards.scores_turns(task) else None
        self._task, self._decode = task, decode
        self._asked: list[tuple[int, asyncio.Task[float]]] = []

    def ask(self, episode: EpisodeTokens, prompt: Sequence[int]) -> None:
        """The last tokens of `episode`, behind `prompt`, are a turn; returns at once."""
        if self._rewards is None or not episode.num_sampled:
            return
        said = episode.tokens[len(prompt) :]
        sample = Sample(self._decode(prompt), self._decode(said), None, dict(self._task), len(said))
        self._asked.append((episode.num_sampled - 1, asyncio.create_task(self._rewards.score_turn(sample))))

    async def settle(self, episode: EpisodeTokens) -> None:
        """Waits for every answer, each under its pool's time limit: a turn's value is earned at its last token."""
        for place, asked in self._asked:
            episode.reward(await asked, at=place)

    def give_up(self) -> None:
        """Nobody needs the answers that are not there yet."""
        for _, asked in self._asked:
            asked.cancel()
