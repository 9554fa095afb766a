"""The trainer: one batch in, one optimizer update, one new policy version; snapshots on request.

A step waits for nothing but its own ranks. Every denominator is global (all micro-batches, all ranks), so the
gradient does not depend on how a batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from actors.checkpoint import write_checkpoint
from actors.model import Policy, check_head, freeze_except, load_hf, shard
from actors.packing import MicroBatch, empty_micro_batch, micro_batches
from actors.trainer_state import TrainerState
from forge.batch import is_packed
from forge.errors import ConfigError
from forge.losses import LossConfig, LossInput, Metrics, add_metrics, compute_loss, denominator, metric_means
from forge.memory import peak_rss_bytes
from forge.packing import flatten
from weightsync.config import WeightSyncConfig
from weightsync.offer import Endpoint
from weightsync.publisher import Publisher


@dataclass
class TrainerConfig:
    """The optimizer step."""

    steps: int = 50
    """Optimizer steps of the run; the final policy version."""
    lr: float = 1e-5
    """Learning rate of AdamW."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0; constant afterwards."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of AdamW's two moments."""
    eps: float = 1e-8
    """AdamW's denominator term."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    clip_norm: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""
    microbatch_tokens: int = 4096
    """Tokens, padding included, of one forward and backward pass of a rank."""
    packing: bool = False
    """Pack several episodes into one row with restarting positions instead of padding each to the longest."""
    trainable: list[str] = field(default_factory=list)
    """Regular expressions of parameter names to train; empty trains all."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    logprob_chunk: int = 1024
    """Tokens for which logits exist at the same time."""
    start_timeout_s: float = 600.0
    """Seconds that loading and sharding the model may take."""
    step_timeout_s: float = 1800.0
    """Seconds that one optimizer step may take."""

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit."""
        for name in ("steps", "lr", "clip_norm", "microbatch_tokens", "logprob_chunk", "step_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"trainer.{name} must be > 0, got {getattr(self, name)}")
        for name in ("warmup_steps", "weight_decay", "eps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"trainer.{name} must be >= 0, got {getattr(self, name)}")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"trainer.betas must be two numbers in [0, 1), got {self.betas}")


@dataclass(frozen=True)
class ModelSpec:
    """What the trainer loads, and the sampler whose distribution it reproduces. dtypes as text."""

    path: str
    dtype: str
    device: str = "cpu"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class StepResult:
    """One completed step of one rank. `metrics` holds the trainer's share of a row of metrics.jsonl."""

    policy_version: int
    metrics: dict[str, float | None]
    peak_rss_bytes: int


class Trainer:
    """One rank, without Monarch. With `world` > 1 a process group must be initialised."""

    def __init__(
        self,
        config: TrainerConfig,
        loss: LossConfig,
        spec: ModelSpec,
        *,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self._config, self._loss_config, self._spec = config, loss, spec
        self.rank, self.world = rank, world
        compute = getattr(torch, spec.dtype)
        hf = load_hf(spec.path, torch.float32, spec.device)
        check_head(hf)
        hf.train()
        freeze_except(hf, config.trainable)
        if config.gradient_checkpointing:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = Policy(
            hf,
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            chunk_size=config.logprob_chunk,
        )
        if world > 1 or compute != torch.float32:
            if not dist.is_initialized():
                _solo_process_group(spec.device)
            shard(self.policy, dist.device_mesh.init_device_mesh(spec.device, (world,)), compute)
        self._parameters = [p for p in self.policy.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._publisher: Publisher | None = None
        self._state: TrainerState | None = None
        self.policy_version = 0

    def step(self, batch: TensorDict) -> StepResult:
        """One optimizer update on this rank's share of a batch, packed or padded `[b, T]`.

        Raises FloatingPointError on a non-finite gradient.
        """
        self.policy.train()
        scale = self._set_learning_rate()
        totals = self._accumulate(batch)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.clip_norm)
        norm_value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(norm_value):
            raise FloatingPointError(
                f"the gradient norm of step {self.policy_version + 1} is {norm_value}; the weights are unchanged. "
                "Lower trainer.lr or look at the batch's rewards and log-probs"
            )
        if self._publisher is not None:
            self._publisher.before_update()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.policy_version += 1
        metrics = {"loss/kl": None, **totals, "grad_norm": norm_value, "extra/lr": self._config.lr * scale}
        return StepResult(self.policy_version, metrics, peak_rss_bytes())

    def _accumulate(self, batch: TensorDict) -> dict[str, float]:
        """Forward and backward over all micro-batches; returns the step's global metrics."""
        flat = batch if is_packed(batch) else flatten(batch)
        cuts = micro_batches(flat, self._config.microbatch_tokens, packing=self._config.packing)
        local = torch.stack([denominator(cut.loss_mask, self._loss_config.aggregation) for cut in cuts]).sum()
        global_denominator = self._sum(local)
        parts: list[Metrics] = []
        for index in range(self._max(len(cuts))):
            # Every rank runs as many passes as the busiest one: FSDP2's collectives must pair up.
            micro = cuts[index] if index < len(cuts) else empty_micro_batch(flat)
            parts.append(self._pass(micro.to(self._spec.device), global_denominator))
        total = add_metrics(parts)
        names = sorted(total)
        return metric_means(dict(zip(names, self._sum(torch.stack([total[n] for n in names])), strict=True)))

    def _pass(self, micro: MicroBatch, global_denominator: torch.Tensor) -> Metrics:
        logprobs, entropy = self.policy(micro.tokens, micro.position_ids, micro.mask)
        inputs = LossInput(
            policy_logprobs=micro.unpack(logprobs),
            behavior_logprobs=micro.behavior_logprobs,
            ref_logprobs=micro.ref_logprobs,
            loss_mask=micro.loss_mask,
            advantages=micro.advantages,
            entropy=micro.unpack(entropy),
        )
        output = compute_loss(inputs, self._loss_config, global_denominator)
        output.loss.backward()
        return output.metrics

    def _set_learning_rate(self) -> float:
        scale = min(1.0, (self.policy_version + 1) / max(self._config.warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * scale
        return scale

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value, op=dist.ReduceOp.SUM)
        return value

    def _max(self, value: int) -> int:
        if self.world == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def connect(self, dtype: str, sync: WeightSyncConfig, transport: str, folder: str = "") -> Endpoint:
        """Lays out what this rank publishes, for generators of `dtype`; all ranks call it at the same time."""
        self.close()  # what an earlier connect made
        self._publisher = Publisher(
            [*self.policy.hf.named_parameters(), *_persistent_buffers(self.policy.hf)],
            getattr(torch, dtype),
            sync,
            transport=transport,
            model_type=self.policy.hf.config.model_type,
            rank=self.rank,
            gather=self._gather,
            folder=folder,
        )
        return self._publisher.endpoint

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    @property
    def publisher(self) -> Publisher:
        """What makes snapshots of this rank's weights, and sends them."""
        assert self._publisher is not None, "connect comes first"
        return self._publisher

    @property
    def state(self) -> TrainerState:
        """What saves and loads all that training goes on from; all ranks ask for it at the same time at first."""
        if self._state is None:
            self._state = TrainerState(self.policy.hf, self._optimizer, self.world)
        return self._state

    def load_state(self, folder: str) -> int:
        """Goes on from the state in `folder`; returns its policy version. Raises what `TrainerState.load` raises."""
        self.policy_version = self.state.load(Path(folder))
        return self.policy_version

    def save(self, folder: str, source: str) -> None:
        """Writes a Hugging Face checkpoint (safetensors, config, tokenizer) that appears whole or not at all.

        Config and tokenizer are those of the model `source`. Raises RunFolderError when it cannot be written.
        """
        state = self._full_state_dict()
        if self.rank == 0:
            write_checkpoint(self.policy.hf, state, Path(folder), source, getattr(torch, self._spec.dtype))
        if self.world > 1:
            dist.barrier()

    def _full_state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(self.policy.hf, options=options)
        return state

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint holds besides parameters, such as the routers' biases of some mixtures of experts."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _solo_process_group(device: str) -> None:
    """A process group of this process alone: FSDP2 wants one even when it shards over one rank."""
    store = dist.HashStore()
    dist.init_process_group(process_group_backend(device), store=store, rank=0, world_size=1)


def process_group_backend(device: str) -> str:
    """Counts and denominators live on the CPU whatever the model lives on."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
