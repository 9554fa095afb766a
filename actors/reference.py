"""The frozen reference policy: log-probs of tokens under the weights that the run started from, or a teacher's.

Exists where the loss reads its log-probs (`LossConfig.needs_reference`); waits for a group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import torch
from monarch.actor import concurrent_endpoint, endpoint
from tensordict import TensorDict

from actors.model import Policy, check_head, load_hf
from actors.packing import micro_batches
from actors.trainer import ModelSpec, TrainerConfig
from forge import channel
from forge.lasting import Beating, ask_of_group, set_up
from forge.mesh import within
from forge.telemetry import span


class Reference:
    """Without Monarch. The sampler's temperature, top-p, top-k and recorded supports apply here as in the trainer."""

    def __init__(self, spec: ModelSpec, *, microbatch_tokens: int) -> None:
        self._spec = spec
        self._microbatch_tokens = microbatch_tokens
        hf = load_hf(spec.path, getattr(torch, spec.dtype), spec.device).requires_grad_(False)
        check_head(hf)
        self._policy = Policy(hf, temperature=spec.temperature, top_p=spec.top_p, top_k=spec.top_k)

    @torch.no_grad()
    def logprobs(self, group: TensorDict) -> torch.Tensor:
        """`[G, T]` float32, 0 where `loss_mask` is False."""
        out = torch.zeros_like(group["behavior_logprobs"])
        for micro in micro_batches(group, self._microbatch_tokens, packing=False):
            there = micro.to(self._spec.device)
            values, _ = self._policy(there.tokens, there.position_ids, there.mask, there.kept_tokens)
            index = torch.tensor(micro.rows)
            width = micro.loss_mask.shape[1]
            out[index, :width] = out[index, :width].masked_scatter(micro.loss_mask, values.cpu())
        return out


class ReferenceActor(Beating):
    """Monarch shell of `Reference`."""

    def __init__(self, spec: ModelSpec, *, microbatch_tokens: int) -> None:
        self._arguments = {"spec": spec, "microbatch_tokens": microbatch_tokens}
        self._lock = asyncio.Lock()

    @endpoint
    async def setup(self) -> None:
        self._reference = await asyncio.to_thread(lambda: Reference(**self._arguments))  # type: ignore[arg-type]

    @concurrent_endpoint
    async def logprobs(self, group: Any) -> torch.Tensor:
        async with self._lock:
            with span("passes", "log-probs"):
                return await asyncio.to_thread(self._reference.logprobs, channel.take(group))


class ReferenceClient:
    """The reference as the controller sees it."""

    def __init__(self, mesh: Any, config: TrainerConfig) -> None:
        self._mesh = mesh
        self._config = config

    async def setup(self) -> None:
        loading = set_up(self._mesh, lambda mesh: mesh.setup.call_one())
        await within(self._config.start_timeout_s, "the reference to load the model", loading)

    async def logprobs(self, group: TensorDict) -> torch.Tensor:
        """`[G, T]` float32, 0 where `loss_mask` is False."""
        asked: Awaitable[torch.Tensor] = ask_of_group(self._mesh, group, lambda mesh, own: mesh.logprobs.call_one(own))
        return await within(self._config.step_timeout_s, "the reference's log-probs", asked)
