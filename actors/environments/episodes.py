"""From a task to one Group by way of an environment: G episodes side by side, turn by turn.

    start -> [ generate -> step ] x turns -> close        one task per episode

Who waits for whom: an episode waits for a place in its environment, for the generator, for the environment, and never
for two of them at once. Only `generate` holds a place in a generator, so a turn that takes a minute costs nobody a
token. A group waits for its episodes, and for as few of them as its options say.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.environments.base import Action, Worlds
from actors.environments.templates import ChatTemplate
from actors.environments.tool_calls import Parses
from actors.environments.transcript import Transcript
from actors.reward import Sample, Scores
from actors.rollout import Generates, References, RewardModels, Rewards, Rollout, episode_seed, scored
from actors.vllm_engine import Completion
from forge.data import Prompt
from forge.episodes import EpisodeTokens, make_episodes_group
from forge.errors import ConfigError, EnvironmentFailed, QuarantinedError

_log = logging.getLogger(__name__)


@dataclass
class EpisodesConfig:
    """How episodes are played and what becomes of a group one of whose episodes fails."""

    max_turns: int = 16
    """Answers of the policy in one episode, at most."""
    turn_tokens: int = 0
    """Tokens of one answer, at most; 0: as many as generator.max_model_len leaves room for."""
    on_failure: Literal["retry", "shrink", "drop"] = "shrink"
    """What a failed episode does to its group: it is played anew up to `retries` times; or the group goes on without
    it, if at least `smallest_group` are left; or the group is dropped. Where tries run out the group shrinks."""
    retries: int = 1
    """Further tries of a failed episode, with on_failure retry."""
    smallest_group: int = 2
    """Episodes that a group needs at least; with fewer it is dropped."""
    max_dropped_in_a_row: int = 64
    """Groups that are dropped one after the other; one more ends the run."""

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit."""
        for name, least in (
            ("max_turns", 1),
            ("turn_tokens", 0),
            ("retries", 0),
            ("smallest_group", 1),
            ("max_dropped_in_a_row", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"episodes.{name} must be >= {least}, got {getattr(self, name)}")
        if self.on_failure not in ("retry", "shrink", "drop"):
            raise ConfigError(f"episodes.on_failure must be retry, shrink or drop, got {self.on_failure}")


@dataclass
class Played:
    """One episode that came to an end."""

    tokens: EpisodeTokens
    messages: list[dict[str, Any]]
    """The conversation, in OpenAI's form."""
    finish: str
    """"done" by the environment, or a limit: "turns", "tokens"."""
    turns: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    """What the environment said last."""


@dataclass(frozen=True)
class Player:
    """What an episode is played with. `max_tokens` of an episode, observations included."""

    worlds: Worlds
    generators: Generates
    template: ChatTemplate
    config: EpisodesConfig
    max_tokens: int
    parser: Parses | None = None
    """Finds tool calls in answers; None: there are none."""

    async def play(self, task: Mapping[str, Any], seed: int, *, name: str = "") -> Played:
        """One episode. Its environment is closed whatever happens.

        `name` is by what its turns find their prefix again. Raises EnvironmentFailed where the environment did not do
        what it was asked.
        """
        name = name or uuid.uuid4().hex
        episode, said = await self.worlds.start(task)
        try:
            transcript = Transcript(self.template, said.tools)
            transcript.observe(said.messages)
            played = Played(transcript.episode, transcript.messages, "turns")
            while played.turns < self.config.max_turns:
                tokens = transcript.tokens
                room = self.max_tokens - len(tokens)
                if room < 1:
                    played.finish = "tokens"
                    break
                limit = min(room, self.config.turn_tokens or room)
                turn_seed = episode_seed(seed, 0, played.turns)
                (answer,) = await self.generators.generate([tokens], [turn_seed], limit, affinity=name)
                action = self._said(transcript, answer, said.tools)
                step = await self.worlds.step(episode, action)
                played.turns += 1
                transcript.episode.reward(step.reward)
                played.info = step.info
                if step.done:
                    played.finish = "done"
                    break
                transcript.observe(step.observation.messages)
            return played
        finally:
            await self.worlds.close(episode)

    def _said(self, transcript: Transcript, answer: Completion, tools: Sequence[Mapping[str, Any]]) -> Action:
        """Appends an answer; what the environment gets to see of it."""
        transcript.sampled(answer)
        text = transcript.messages[-1]["content"]
        if self.parser is None:
            return Action(text, finish=answer.finish_reason)
        number = sum(len(message.get("tool_calls", ())) for message in transcript.messages)
        found = self.parser.parse(text, tools, number=number)
        if found.tool_calls:
            transcript.messages[-1] = {"role": "assistant", "content": found.content, "tool_calls": found.tool_calls}
        return Action(found.content, found.tool_calls, answer.finish_reason, found.error)


class EnvironmentRollout:
    """A rollout as `Run.rollout` takes one: the prompt's metadata is the task."""

    def __init__(self, player: Player, *, turn_rewards: bool) -> None:
        """`turn_rewards`: for a loss that reads rewards of turns, see `loss.token_advantages`."""
        self._player, self._turn_rewards = player, turn_rewards
        self._dropped_in_a_row = 0

    async def __call__(
        self,
        prompt: Prompt,
        generators: Generates,
        reward: Rewards | None = None,
        *,
        group_id: int,
        group_size: int,
        advantage: str,
        decode: Callable[[Sequence[int]], str],
        seed: int,
        reference: References | None = None,
        reward_model: RewardModels | None = None,
        oversample: int = 0,
        begun: Any = None,
    ) -> Rollout | None:
        """`group_size` episodes of one task, of `oversample` more that were begun the first to end; None: dropped.

        An episode that a crash interrupted begins anew, since its world is gone. Raises EnvironmentFailed when more
        than `max_dropped_in_a_row` groups were dropped.
        """
        task, config = prompt.metadata, self._player.config
        try:
            played, cut = await self._episodes(task, group_id, group_size, oversample, seed)
        except EnvironmentFailed as error:
            self._dropped_in_a_row += 1
            _log.warning("group %d is dropped: %s", group_id, error)
            if self._dropped_in_a_row > config.max_dropped_in_a_row:
                raise EnvironmentFailed(
                    f"{self._dropped_in_a_row} groups in a row were dropped, episodes.max_dropped_in_a_row is "
                    f"{config.max_dropped_in_a_row}; the last: {error}"
                ) from error
            return None
        self._dropped_in_a_row = 0
        group = make_episodes_group([p.tokens for p in played], group_id=group_id, turn_rewards=self._turn_rewards)
        samples = [_sample(p, prompt, decode) for p in played]
        totals = [p.tokens.total for p in played]
        rollout = Rollout(group, samples, Scores(totals, {"environment": totals}), cut)
        return await scored(rollout, advantage, len(played), reference=reference, reward_model=reward_model)

    async def _episodes(
        self, task: Mapping[str, Any], group_id: int, wanted: int, oversample: int, seed: int
    ) -> tuple[list[Played], int]:
        """The first `wanted` episodes to end well, and how many tokens of others were thrown away.

        Raises EnvironmentFailed when the group is to be dropped.
        """
        running = {
            asyncio.create_task(self._tried(task, f"{group_id}/{place}", episode_seed(seed, group_id, place)))
            for place in range(wanted + oversample)
        }
        ended: list[Played] = []
        failed: list[EnvironmentFailed] = []
        try:
            while running and len(ended) < wanted:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task_ in done:
                    result = task_.result()
                    if isinstance(result, Played):
                        ended.append(result)
                    else:
                        failed.append(result)
                if failed and self._player.config.on_failure == "drop":
                    raise failed[0]
        finally:
            await _cancelled(running)
        spoke = [played for played in ended if played.tokens.num_sampled]
        if len(spoke) < min(wanted, self._player.config.smallest_group):
            raise (
                failed[0]
                if failed
                else EnvironmentFailed(
                    f"{len(spoke)} of {len(ended)} episodes have a sampled token, episodes.smallest_group is "
                    f"{self._player.config.smallest_group}; shorten what the environment says, or raise "
                    "generator.max_model_len"
                )
            )
        return spoke[:wanted], sum(played.tokens.num_sampled for played in spoke[wanted:])

    async def _tried(self, task: Mapping[str, Any], name: str, seed: int) -> Played | EnvironmentFailed:
        """An episode, or why there is none."""
        tries = 1 + (self._player.config.retries if self._player.config.on_failure == "retry" else 0)
        for number in range(tries):
            try:
                return await self._player.play(task, seed, name=f"{name}/{number}/{uuid.uuid4().hex[:8]}")
            except QuarantinedError as error:
                return error  # another try would be refused as well
            except EnvironmentFailed as error:
                last = error
        return last


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancels what runs and waits until its environments are closed, each of which has a deadline."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _sample(played: Played, prompt: Prompt, decode: Callable[[Sequence[int]], str]) -> Sample:
    begin = played.tokens.mask.index(True) if True in played.tokens.mask else len(played.tokens.mask)
    return Sample(
        prompt=decode(played.tokens.tokens[:begin]),
        completion=decode(played.tokens.tokens[begin:]),
        answer=prompt.answer,
        metadata=prompt.metadata,
        num_tokens=played.tokens.num_sampled,
        finished=played.finish == "done",
    )
