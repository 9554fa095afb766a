"""From a task to one Group by way of an environment: G episodes side by side, turn by turn.

    start -> [ generate -> step ] x turns -> close        one task per episode

Who waits for whom: an episode waits for a place in its environment, for the generator, for the environment, and never
for two of them at once. Only `generate` holds a place in a generator, so a turn that takes a minute costs nobody a
token. A group waits for its episodes, and for as few of them as its options say.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.environments.base import Action, Worlds
from actors.environments.groups import GroupPolicy, Groups
from actors.environments.parking import Parking, Round
from actors.environments.templates import ChatTemplate
from actors.environments.tool_calls import Parses
from actors.environments.transcript import Transcript
from actors.environments.turn_scores import RewardsTurns, TurnScores
from actors.reward import Sample, Scores
from actors.rollout import (
    Generates,
    References,
    RewardModels,
    Rewards,
    Rollout,
    episode_sample,
    episode_seed,
    scored,
)
from actors.vllm_engine import Completion
from forge.data import Prompt
from forge.episodes import EpisodeTokens, make_episodes_group
from forge.trace import GENERATE, Trace


@dataclass
class EpisodesConfig(GroupPolicy):
    """How episodes are played and what becomes of a group one of whose episodes fails."""

    max_turns: int = 16
    """Answers of the policy in one episode, at most."""
    turn_tokens: int = 0
    """Tokens of one answer, at most; 0: as many as generator.max_model_len leaves room for."""
    round_tokens: int = 0
    """Sampled tokens after which an episode makes room for others and goes on under newer weights, or where nobody
    needs its place, see actors/environments/parking.py; 0: it never does."""

    def validate(self, section: str = "episodes") -> None:
        """See `GroupPolicy.validate`."""
        super().validate(section)
        self._at_least(section, max_turns=1, turn_tokens=0, round_tokens=0)


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

    @property
    def num_sampled(self) -> int:
        """Tokens that can be trained."""
        return self.tokens.num_sampled


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
    trace: Trace = field(default_factory=Trace)
    """Gets a span for each wait of an episode, in the lane of what it waits for."""
    kind_of: Callable[[Mapping[str, Any]], str] = lambda task: "environment"
    """The kind of environment that a task is for, which names its lane."""
    parking: Parking = field(default_factory=Parking)
    """Where episodes wait that have sampled their tokens of a round."""
    rewards: RewardsTurns | None = None
    """Scores turns while later ones are generated, of tasks that ask for it."""

    async def play(self, task: Mapping[str, Any], seed: int, *, name: str = "") -> Played:
        """One episode. Its environment is closed whatever happens.

        `name` is by what its turns find their prefix again. Raises EnvironmentFailed where the environment did not do
        what it was asked.
        """
        name = name or uuid.uuid4().hex
        kind = self.kind_of(task)
        with self.trace.span(kind, name, turn=0):
            episode, said = await self.worlds.start(task)
        scores, round = TurnScores(self.rewards, task, self.template.decode), Round()
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
                played.turns += 1
                async with self.parking.turn(round, transcript.episode):
                    with self.trace.span(GENERATE, name, turn=played.turns):
                        (answer,) = await self.generators.generate([tokens], [turn_seed], limit, affinity=name)
                    action = self._said(transcript, answer, said.tools)
                scores.ask(transcript.episode, tokens)
                with self.trace.span(kind, name, turn=played.turns):
                    step = await self.worlds.step(episode, action)
                transcript.episode.reward(step.reward)
                played.info = step.info
                if step.done:
                    played.finish = "done"
                    break
                transcript.observe(step.observation.messages)
            await scores.settle(played.tokens)
            return played
        finally:
            scores.give_up()
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
        self._groups = Groups(player.config)

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

        async def play(place: int, attempt: int) -> Played:
            name = f"{group_id}/{place}/{attempt}/{uuid.uuid4().hex[:8]}"
            return await self._player.play(prompt.metadata, episode_seed(seed, group_id, place), name=name)

        if (found := await self._groups.play(group_id, play, group_size, oversample)) is None:
            return None
        played, cut = found
        group = make_episodes_group([p.tokens for p in played], group_id=group_id, turn_rewards=self._turn_rewards)
        samples = [episode_sample(p.tokens, prompt, decode, finished=p.finish == "done") for p in played]
        scores = await self._scores(played, samples, reward)
        rollout = Rollout(group, samples, scores, cut)
        return await scored(rollout, advantage, len(played), reference=reference, reward_model=reward_model)

    async def _scores(self, played: Sequence[Played], samples: list[Sample], reward: Rewards | None) -> Scores:
        """What the environment gave, and what `reward` adds for whole episodes."""
        own = [p.tokens.total for p in played]
        added = await reward.score(samples) if reward is not None else Scores([0.0] * len(own), {})
        total = [sum(pair) for pair in zip(own, added.total, strict=True)]
        return Scores(total, {"environment": own, **added.parts}, added.timeouts)
