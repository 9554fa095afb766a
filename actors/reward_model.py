"""A reward model as a role: scores finished episodes, or each of their turns, by the token ids of the policy.

Exists where `reward.model` is set; a rollout waits for the scores of its group, which add to those of the functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import torch
from monarch.actor import concurrent_endpoint, endpoint
from tensordict import TensorDict

from actors.packing import micro_batches
from actors.reward import RewardConfig, Scores
from actors.trainer import ModelSpec, TrainerConfig
from actors.value_model import load_value_model
from forge import channel
from forge.lasting import Beating, ask_of_group, set_up
from forge.mesh import within
from forge.telemetry import span
from forge.token_advantages import turn_rewards

PART = "reward_model"
"""What its scores are called among the parts of a reward."""


class RewardModel:
    """Without Monarch. A score is the value after the last token of an episode, or of a turn."""

    def __init__(self, spec: ModelSpec, *, microbatch_tokens: int, turns: bool) -> None:
        """`spec.path` is a sequence classifier with one label; its sampling does not matter. Raises ConfigError."""
        dtype = getattr(torch, spec.dtype)
        self._model = load_value_model(spec.path, dtype, spec.device, option="reward.model", fresh_head=False)
        self._model.requires_grad_(False)
        self._device, self._microbatch_tokens, self._turns = spec.device, microbatch_tokens, turns

    @torch.no_grad()
    def score(self, group: TensorDict) -> torch.Tensor:
        """`[G, K]` float32: the score of each episode (K is 1), or of each of its turns, then zeros."""
        mask = group["loss_mask"]
        ends = (
            turn_ends(mask) if self._turns else torch.zeros_like(mask).scatter(1, group["lengths"][:, None] - 1, True)
        )
        out = torch.zeros(len(mask), int(ends.sum(dim=1).max()))
        asked = group.copy()
        asked["loss_mask"] = ends
        for micro in micro_batches(asked, self._microbatch_tokens, packing=False):
            passed = (x.to(self._device) for x in (micro.tokens, micro.position_ids, micro.mask))
            values = self._model(*passed, after=True).cpu()
            rows, _ = micro.mask.nonzero(as_tuple=True)
            number = micro.mask.cumsum(dim=1)[micro.mask] - 1
            out[torch.tensor(micro.rows)[rows], number] = values
        return out


def turn_ends(loss_mask: torch.Tensor) -> torch.Tensor:
    """bool `[B, T]`: the last token of each run of policy tokens."""
    after = torch.nn.functional.pad(loss_mask, (0, 1))[:, 1:]
    return loss_mask & ~after


class RewardModelActor(Beating):
    """Monarch shell of `RewardModel`."""

    def __init__(self, spec: ModelSpec, *, microbatch_tokens: int, turns: bool) -> None:
        self._arguments: dict[str, Any] = {"spec": spec, "microbatch_tokens": microbatch_tokens, "turns": turns}
        self._lock = asyncio.Lock()

    @endpoint
    async def setup(self) -> None:
        self._model = await asyncio.to_thread(lambda: RewardModel(**self._arguments))

    @concurrent_endpoint
    async def score(self, group: Any) -> torch.Tensor:
        async with self._lock:
            with span("rewards", "score"):
                return await asyncio.to_thread(self._model.score, channel.take(group))


class RewardModelClient:
    """The reward model as a rollout sees it."""

    def __init__(self, mesh: Any, config: RewardConfig, trainer: TrainerConfig) -> None:
        self._mesh, self._config, self._trainer = mesh, config, trainer

    async def setup(self) -> None:
        loading = set_up(self._mesh, lambda mesh: mesh.setup.call_one())
        await within(self._trainer.start_timeout_s, "the reward model to load", loading)

    async def add_to(self, scores: Scores, group: TensorDict) -> Scores:
        """`scores` with the model's added; with `reward.model_turns`, `group` gets `token_rewards` of its turns."""
        asked: Awaitable[torch.Tensor] = ask_of_group(self._mesh, group, lambda mesh, own: mesh.score.call_one(own))
        values = await within(self._trainer.step_timeout_s, "the reward model's scores", asked)
        weight = self._config.model_weight
        if self._config.model_turns:
            group["token_rewards"] = turn_rewards(weight * values, group["loss_mask"])
        each = values.sum(dim=1).tolist()
        total = [old + weight * new for old, new in zip(scores.total, each, strict=True)]
        return replace(scores, total=total, parts={**scores.parts, PART: each})
