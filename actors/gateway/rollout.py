"""From a task to one Group by way of agents: G sessions side by side, an agent in each.

    open session -> [ agent runs: chat calls, tools of its own ] -> reward -> its rows

Who waits for whom: a session waits for a place among the agents and for its agent, whose chat calls wait for a
generator. An agent that runs a tool for a minute holds no place in a generator.

A session whose conversations branch makes several rows, one for each leaf, and each row has what the session earned and
its advantage. The baseline is over sessions, not over rows: a session has one total, however often it branched. In the
loss a sampled token is trained in one row only, so that with token_mean a session weighs by its tokens, branched or
not. The seq_* aggregations count rows: there a session of three rows weighs three times as much as one of the same
length that did not branch, since a row's conversation is a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from actors.environments.base import Action, Worlds
from actors.environments.groups import GroupPolicy, Groups
from actors.environments.quarantine import task_key
from actors.gateway.agents import AgentConfig, agent_task
from actors.gateway.gateway import Gateway
from actors.gateway.sessions import Session
from actors.reward import Scores
from actors.rollout import Generates, References, Rewards, Rollout, episode_sample, episode_seed
from forge.advantages import advantages
from forge.data import Prompt
from forge.episodes import EpisodeTokens, make_episodes_group
from forge.errors import EnvironmentFailed, QuarantinedError


@dataclass(frozen=True)
class Ran:
    """One session, closed."""

    rows: list[EpisodeTokens]
    """One a leaf; see `Session.samples`."""
    total: float
    """All rewards."""
    finished: bool
    """Whether its agent came to its end."""

    @property
    def num_sampled(self) -> int:
        """Tokens that can be trained."""
        return sum(row.num_sampled for row in self.rows)


class AgentRollout:
    """A rollout as `Run.rollout` takes one: the prompt's metadata is the agent's task."""

    def __init__(
        self, gateway: Gateway, agents: Worlds, agent: AgentConfig, policy: GroupPolicy, *, turn_rewards: bool
    ) -> None:
        """agents: runs `agent`. `turn_rewards`: for a loss that reads rewards of turns, see `loss.token_advantages`."""
        self._gateway, self._agents, self._agent = gateway, agents, agent
        self._turn_rewards, self._groups = turn_rewards, Groups(policy)

    async def __call__(
        self,
        prompt: Prompt,
        generators: Generates | None = None,
        reward: Rewards | None = None,
        *,
        group_id: int,
        group_size: int,
        advantage: str,
        decode: Callable[[Sequence[int]], str],
        seed: int,
        reference: References | None = None,
        reward_model: None = None,
        oversample: int = 0,
        begun: Any = None,
    ) -> Rollout | None:
        """`group_size` sessions of one task, of `oversample` more that were begun the first to end; None: dropped.

        The gateway has the generators, the agent the reward. A session that a crash interrupted begins anew, since its
        agent is gone. Raises EnvironmentFailed when more than `max_dropped_in_a_row` groups were dropped.
        """

        async def run(place: int, attempt: int) -> Ran:
            return await self._session(prompt.metadata, episode_seed(seed, group_id, place))

        if (found := await self._groups.play(group_id, run, group_size, oversample)) is None:
            return None
        ran, cut = found
        group, owners = group_of_sessions(ran, group_id, advantage, turn_rewards=self._turn_rewards)
        if reference is not None:
            group["ref_logprobs"] = await reference.logprobs(group)
        rows = trained_rows(ran)
        samples = [episode_sample(row, prompt, decode, finished=ran[n].finished) for n, row in rows]
        totals = [ran[n].total for n in owners.tolist()]
        return Rollout(group, samples, Scores(totals, {"agent": totals}), cut)

    async def _session(self, task: Mapping[str, Any], seed: int) -> Ran:
        """One session from its opening to its end; it is forgotten whatever happens.

        Raises EnvironmentFailed where the agent failed and such sessions are dropped.
        """
        session = await self._gateway.open(seed=seed, deadline_s=self._agent.longest_s)
        finished = True
        try:
            try:
                reward = await self._run(task, session)
            except EnvironmentFailed as error:
                if self._agent.partial == "drop" or isinstance(error, QuarantinedError):
                    raise
                finished, reward = False, self._agent.partial_reward
            if reward is not None:
                await self._gateway.reward(session.id, reward)
            await self._gateway.end(session.id)
            return Ran(session.samples(), session.total, finished)
        finally:
            await self._gateway.forget(session.id)

    async def _run(self, task: Mapping[str, Any], session: Session) -> float | None:
        """The agent's reward."""
        wanted = agent_task(task_key(task), task, self._gateway.environment(session))
        episode, _ = await self._agents.start(wanted)
        try:
            step = await self._agents.step(episode, Action(""))
            return step.reward if step.info["scored"] else None
        finally:
            await self._agents.close(episode)


def trained_rows(ran: Sequence[Ran]) -> list[tuple[int, EpisodeTokens]]:
    """The rows that train a token, each with the number of its session. Pure."""
    return [(n, row) for n, one in enumerate(ran) for row in one.rows if row.num_sampled]


def group_of_sessions(
    ran: Sequence[Ran], group_id: int, advantage: str, *, turn_rewards: bool
) -> tuple[TensorDict, torch.Tensor]:
    """A Group of all rows, and the number of each row's session, `[rows]`. Pure.

    Rewards and advantages of a row are its session's; the advantages compare sessions. Raises as `advantages` and
    `make_episodes_group` do.
    """
    rows = trained_rows(ran)
    owners = torch.tensor([n for n, _ in rows], dtype=torch.int64)
    totals = torch.tensor([one.total for one in ran], dtype=torch.float32)
    group = make_episodes_group([row for _, row in rows], group_id=group_id, turn_rewards=turn_rewards)
    group["rewards"] = totals[owners]
    group["advantages"] = advantages(totals, advantage, len(ran))[owners]
    return group, owners
