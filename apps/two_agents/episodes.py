"""One episode of two policies: the proposer writes a task, the solver answers it several times.

Two groups come of it, each in the replay of its own policy, with that policy's versions alone:

    a group of the proposer   G proposals for one prompt; baseline: the mean reward of the G
    a group of the solver     K answers to one proposal; baseline: the mean reward of the K, so that how hard a
                              proposal is says nothing about how good an answer is

A proposal's reward is a function of the rewards of its K answers (`Sample.answer`); a proposal that is no legal task
is answered by nobody, and its `Sample.answer` is None.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoTokenizer

from actors.reward import Sample, Scores
from actors.rollout import Generates, Rewards, Rollout, rollout_group
from apps.grpo.main import Run
from apps.grpo.spawn import open_prompts
from apps.two_agents.config import EpisodeConfig
from apps.two_agents.handover import Handover, Proposal
from forge import registry
from forge.data import Prompt, make_encoder
from forge.mesh import within


@dataclass(frozen=True)
class AnsweredFirst:
    """Stands where the proposer's rewards stand: has proposals answered before they are scored."""

    reward: Rewards
    solve: Callable[[Sample], Awaitable[list[float] | None]]

    async def score(self, samples: list[Sample]) -> Scores:
        """The scores of the proposals, with the rewards of their answers as `answer`."""
        async with asyncio.TaskGroup() as tasks:
            solved = [tasks.create_task(_plain(self.solve(sample))) for sample in samples]
        return await self.reward.score([replace(s, answer=t.result()) for s, t in zip(samples, solved, strict=True)])


class Unscored:
    """Stands where rewards stand that nobody asks for."""

    async def score(self, samples: list[Sample]) -> Scores:
        """Zeros."""
        return Scores([0.0] * len(samples), {})


class Episodes:
    """The rollouts of both runs, `propose` and `answer`, called like `actors.rollout.rollout_group`."""

    def __init__(self, cfg: EpisodeConfig, proposer: Run, solver: Run) -> None:
        self._cfg, self._proposer, self._solver = cfg, proposer, solver
        self.handover = Handover(cfg.patience_s, cfg.timeout_s)
        self._to_task = registry.load(cfg.task, "episode.task")
        self._encode = make_encoder(AutoTokenizer.from_pretrained(solver.actors.model), solver.cfg.data.template_args)
        self._prompts = open_prompts(proposer.cfg.data, proposer.actors.model, proposer.cfg.seed + 1)
        # Below zero, where no group of a replay is: neither journal takes their tokens for those of its own.
        self._alone = itertools.count(-1, -1)

    async def propose(self, prompt: Prompt, generators: Generates, reward: Rewards, **options: Any) -> Rollout:
        """A group of the proposer. Waits for the solver's answers to it, see `Handover`."""
        with self.handover.working(self.handover.proposer):
            return await rollout_group(prompt, generators, AnsweredFirst(reward, self._solve), **options)

    async def answer(self, _: Prompt, generators: Generates, reward: Rewards, **options: Any) -> Rollout:
        """A group of the solver. Waits for a proposal, see `Handover`; the ticket's own prompt is not used.

        Nor are tokens of before a crash: they answer a proposal that nobody waits for any more.
        """
        proposal = await self.handover.take() or await self._write_alone()
        try:
            with self.handover.working(self.handover.solver):
                rollout = await rollout_group(proposal.prompt, generators, reward, **{**options, "begun": None})
            proposal.tell(rollout.scores.total)
            return rollout
        finally:
            proposal.tell(None)

    async def _solve(self, sample: Sample) -> list[float] | None:
        meter = self._proposer.meter
        meter.add("extra/proposals", 1)
        if (task := self.task_of(sample)) is None:
            meter.add("extra/illegal_proposals", 1)
            return None
        return await self.handover.solve(task) or await self._answer_alone(task)

    async def _answer_alone(self, task: Prompt) -> list[float]:
        """The rewards of answers that are not trained."""
        run, grpo = self._solver, self._solver.cfg.grpo
        self._proposer.meter.add("extra/answered_untrained", 1)
        actors = run.actors
        rollout = await rollout_group(
            task,
            actors.generators,
            actors.reward,
            group_id=next(self._alone),
            group_size=grpo.group_size,
            advantage=grpo.advantage,
            decode=actors.decode,
            seed=run.cfg.seed,
            reward_model=actors.reward_model,
        )
        self._proposer.meter.add("extra/untrained_tokens", rollout.num_tokens)
        return rollout.scores.total

    async def _write_alone(self) -> Proposal:
        """A proposal that is not trained."""
        what = f"a proposal that is a legal task by {self._cfg.task}"
        return Proposal(await within(self._cfg.timeout_s, what, self._write_until_legal()))

    async def _write_until_legal(self) -> Prompt:
        run = self._proposer
        while True:
            rollout = await rollout_group(
                self._prompts.draw(),
                run.actors.generators,
                Unscored(),
                group_id=next(self._alone),
                group_size=1,
                advantage="none",
                decode=run.actors.decode,
                seed=run.cfg.seed,
            )
            self._solver.meter.add("extra/untrained_proposals", 1)
            self._solver.meter.add("extra/untrained_tokens", rollout.num_tokens)
            if (task := self.task_of(rollout.samples[0])) is not None:
                return task

    def task_of(self, sample: Sample) -> Prompt | None:
        """What the solver is asked; None for no legal task, one that was cut off, or one too long to be answered."""
        row = self._to_task(sample.completion) if sample.finished else None
        if row is None:
            return None
        text, token_ids = self._encode(row)
        if not 0 < len(token_ids) < self._solver.cfg.generator.max_model_len:
            return None
        return Prompt(0, 0, text, token_ids, row.get("answer"), dict(row.get("metadata") or {}))


async def _plain(call: Awaitable[list[float] | None]) -> list[float] | None:
    return await call
