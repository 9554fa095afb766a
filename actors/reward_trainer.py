"""Trains a reward model on pairs: the score of an episode is the value after its last token (Bradley and Terry 1952).

    pairs of a rank --ends only--> passes, pairs together --ValueModel--> scores --bradley_terry--> one update

It is cut, divided and updated like a policy, by the options of section trainer; `actors.trainer_mesh.TrainerMesh` is
its client too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from monarch.actor import concurrent_endpoint, endpoint
from tensordict import TensorDict

from actors.model import freeze_except
from actors.packing import MicroBatch
from actors.ranks import RankActor
from actors.sharding import make_mesh, shard
from actors.trainer import ModelSpec, StepResult, TrainerConfig, solo_process_group
from actors.trainer_state import TrainerState
from actors.updates import RankGroup, Updates, mini_batches
from actors.value_model import load_value_model, save_value_model
from forge import channel
from forge.batch import is_packed
from forge.errors import ConfigError
from forge.memory import peak_rss_bytes
from forge.packing import flatten
from forge.preference_losses import bradley_terry


def check_options(config: TrainerConfig) -> None:
    """Raises ConfigError for options of section trainer that a reward model has not."""
    given = {"lora.rank": config.lora.rank, "tensor_parallel": config.tensor_parallel - 1, "compile": config.compile}
    for name, value in given.items():
        if value:
            raise ConfigError(f"trainer.{name} is set, which a reward model does not take; leave it out")


class RewardTrainer:
    """One rank, without Monarch. With `world` > 1 a process group must be initialised."""

    def __init__(self, config: TrainerConfig, spec: ModelSpec, *, rank: int = 0, world: int = 1, seed: int = 0) -> None:
        """`spec.path` is a causal LM, which gets a head of zeros, or a sequence classifier with one label."""
        torch.manual_seed(seed)
        self._config, self._spec, self._rank, self._world = config, spec, rank, world
        self.model = load_value_model(spec.path, torch.float32, spec.device, option="--model")
        self.model.train()
        freeze_except(self.model.hf, config.trainable)
        if config.gradient_checkpointing:
            self.model.hf.gradient_checkpointing_enable({"use_reentrant": False})
        compute = getattr(torch, spec.dtype)
        if world > 1 or compute != torch.float32:
            if not dist.is_initialized():
                solo_process_group(spec.device)
            shard(self.model, make_mesh(spec.device, world), compute)
        self._ranks = RankGroup(world)
        self._updates = Updates([p for p in self.model.parameters() if p.requires_grad], config)
        self._state: TrainerState | None = None
        self.version = 0

    def step(self, batch: TensorDict) -> StepResult:
        """Trains on this rank's pairs, rows 2i (chosen) and 2i + 1 (rejected), packed or padded; one new version.

        Raises what `actors.trainer.Trainer.step` raises.
        """
        rate = self._updates.set_learning_rate(self.version + 1)
        minis = mini_batches(ends_only(batch), self._config, self._ranks, self._spec.device, together=2)
        parts, norms, skipped = [], [], 0
        for cuts in minis * self._config.epochs:
            parts.append(self._backward(cuts))
            norms.append(self._updates.clipped_norm())
            skipped += not self._updates.apply(norms[-1], self.version + 1)
        self.version += 1
        cost, right, margin, count = self._ranks.sum(torch.stack(parts).sum(dim=0)).tolist()
        metrics: dict[str, float | None] = {
            "loss/policy": cost / count,
            "extra/pair_accuracy": right / count,
            "extra/pair_margin": margin / count,
            "grad_norm": sum(norms) / len(norms),
            "extra/lr": rate,
            "extra/skipped_updates": skipped,
        }
        return StepResult(self.version, metrics, peak_rss_bytes())

    def _backward(self, cuts: Sequence[MicroBatch]) -> torch.Tensor:
        """The passes of one update; of this rank's pairs the summed loss, how many are right, margin and number."""
        own = torch.stack([cut.mask.sum() for cut in cuts]).sum() // 2
        count = self._ranks.sum(own).clamp(min=1)  # the mean is over the pairs of all passes and ranks
        total = torch.zeros(4, dtype=torch.float64)
        for cut in cuts:
            scores = self.model(cut.tokens, cut.position_ids, cut.mask, after=True)
            losses, right = bradley_terry(scores)
            (losses.sum() / count).backward()
            margin = (scores[0::2] - scores[1::2]).detach()
            sums = [losses.detach().sum(), right.sum(), margin.sum(), torch.tensor(len(losses))]
            total += torch.stack([value.double().cpu() for value in sums])
        return total

    @property
    def state(self) -> TrainerState:
        """What saves and loads all that it goes on from; all ranks ask for it at the same time at first."""
        if self._state is None:
            self._state = TrainerState(self.model.hf, self._updates.optimizer, self._world)
        return self._state

    def load_state(self, folder: str) -> int:
        """Goes on from the state in `folder`; returns its version. Raises what `TrainerState.load` raises."""
        self.version = self.state.load(Path(folder))
        return self.version

    def save(self, folder: str, source: str) -> None:
        """Writes what AutoModelForSequenceClassification and `reward.model` load, see `save_value_model`."""
        save_value_model(self.model, Path(folder), source, getattr(torch, self._spec.dtype), rank=self._rank)
        if self._world > 1:
            dist.barrier()


def ends_only(batch: TensorDict) -> TensorDict:
    """The batch as flat episodes whose `loss_mask` is True at the last token of each, where its score is read."""
    flat = (batch if is_packed(batch) else flatten(batch)).copy()
    ends = torch.zeros_like(flat["loss_mask"])
    ends[flat["lengths"].cumsum(0) - 1] = True
    flat["loss_mask"] = ends
    return flat


class RewardTrainerActor(RankActor):
    """Monarch shell of `RewardTrainer`, one actor a rank."""

    def __init__(self, config: TrainerConfig, spec: ModelSpec, *, world: int, seed: int) -> None:
        super().__init__(world, "reward_trainer")
        self._arguments, self._seed = (config, spec), seed
        self._trainer: RewardTrainer | None = None

    @property
    def _ready(self) -> RewardTrainer:
        assert self._trainer is not None, "setup comes first"
        return self._trainer

    @endpoint
    async def setup(self, address: str) -> None:
        self._trainer = await self._run(lambda: self._build(address))

    def _build(self, address: str) -> RewardTrainer:
        self._join(address, self._arguments[1].device)
        return RewardTrainer(*self._arguments, rank=self._rank, world=self._world, seed=self._seed)

    @concurrent_endpoint
    async def step(self, shards: Sequence[Any]) -> StepResult:
        """`shards[rank]` is the handle of this rank's share of the batch."""
        return await self._run(lambda: self._ready.step(channel.open(shards[self._rank])))

    @concurrent_endpoint
    async def save(self, folder: str, source: str) -> None:
        await self._run(lambda: self._ready.save(folder, source))

    @concurrent_endpoint
    async def stage_state(self, folder: str) -> None:
        await self._run(lambda: self._ready.state.stage(Path(folder), self._ready.version))

    @concurrent_endpoint
    async def wait_state(self, timeout_s: float) -> None:
        state = self._ready.state
        await asyncio.to_thread(state.wait, timeout_s)

    @concurrent_endpoint
    async def load_state(self, folder: str) -> int:
        return await self._run(lambda: self._ready.load_state(folder))
