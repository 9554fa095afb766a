"""The trainer: one batch in, one optimizer update, one new policy version; snapshots on request.

A step waits for nothing but its own ranks. Every denominator is global (all micro-batches, all ranks), so the
gradient does not depend on how a batch was cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.utils._pytree import tree_leaves

from actors.checkpoint import write_checkpoint
from actors.credit import token_advantages
from actors.critic import Critic, CriticConfig, beside
from actors.lora import LoraConfig, add_lora
from actors.model import Policy, check_head, freeze_except, load_hf
from actors.offload import Offload
from actors.optimizer import OPTIMIZERS
from actors.packing import MicroBatch
from actors.sharding import check_compiler, compile_layers, make_mesh, shard
from actors.tensor_parallel import check_tensor_parallel
from actors.trainer_state import TrainerState
from actors.updates import RankGroup, Updates, mini_batches
from forge.batch import is_packed
from forge.errors import ConfigError
from forge.losses import LossConfig, LossInput, Metrics, add_metrics, compute_loss, denominator, metric_means
from forge.memory import peak_rss_bytes
from forge.packing import flatten
from forge.registry import lookup
from forge.telemetry import span
from forge.trace import STEP
from weightsync.config import WeightSyncConfig
from weightsync.offer import Endpoint
from weightsync.publisher import Publisher

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


@dataclass
class TrainerConfig:
    """The optimizer step."""

    steps: int = 50
    """Steps of the run, one batch each; the final policy version."""
    updates: int = 1
    """Optimizer updates that a batch is cut into, by whole groups; more than 1 is what PPO calls mini-batches."""
    epochs: int = 1
    """How often a step goes through its batch."""
    optimizer: str = "adamw"
    """adamw, sgd, or module:function of your own: (parameters, this section) -> a torch optimizer."""
    lr: float = 1e-5
    """Learning rate."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    schedule: Schedule = "constant"
    """How the learning rate goes on from there until the last step."""
    min_lr_share: float = 0.0
    """Share of the learning rate that linear and cosine end with."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of AdamW's two moments; the first is the momentum of sgd."""
    eps: float = 1e-8
    """AdamW's denominator term."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    clip_norm: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""
    max_skipped: int = 3
    """Updates in a row that are skipped and counted because the gradient is not finite; one more ends the run."""
    microbatch_tokens: int = 4096
    """Tokens, padding included, of one forward and backward pass of a rank."""
    packing: bool = False
    """Pack several episodes into one row with restarting positions instead of padding each to the longest."""
    trainable: list[str] = field(default_factory=list)
    """Regular expressions of parameter names to train; empty trains all. With LoRA: of weights to adapt."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters in place of training all weights."""
    tensor_parallel: int = 1
    """Ranks that share each layer of the model and one part of the batch; divides mesh.trainer.procs."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile each decoder layer by torch.compile at the first passes; needs a C++ compiler."""
    logprob_chunk: int = 1024
    """Tokens for which logits exist at the same time."""
    start_timeout_s: float = 600.0
    """Seconds that loading and sharding the model may take."""
    step_timeout_s: float = 1800.0
    """Seconds that one optimizer step may take."""

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit."""
        for name in (
            "steps",
            "lr",
            "clip_norm",
            "microbatch_tokens",
            "logprob_chunk",
            "step_timeout_s",
            "updates",
            "epochs",
            "tensor_parallel",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"trainer.{name} must be > 0, got {getattr(self, name)}")
        for name in ("warmup_steps", "weight_decay", "eps", "max_skipped"):
            if getattr(self, name) < 0:
                raise ConfigError(f"trainer.{name} must be >= 0, got {getattr(self, name)}")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"trainer.betas must be two numbers in [0, 1), got {self.betas}")
        if not 0 <= self.min_lr_share <= 1:
            raise ConfigError(f"trainer.min_lr_share must lie in [0, 1], got {self.min_lr_share}; 0 ends at no rate")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"trainer.schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule}")
        if self.compile:
            check_compiler()
            if self.tensor_parallel > 1:
                raise ConfigError(
                    f"trainer.compile is true and trainer.tensor_parallel {self.tensor_parallel}: torch cannot compile "
                    "layers for any length whose weights are cut; use one of the two"
                )
        lookup(self.optimizer, OPTIMIZERS, "trainer.optimizer")
        self.lora.validate()


@dataclass(frozen=True)
class ModelSpec:
    """What the trainer loads, and the sampler whose distribution it reproduces. dtypes as text."""

    path: str
    dtype: str
    device: str = "cpu"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    keep_routes: bool = False
    """The sampler records the experts that it routes tokens to."""


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
        critic: CriticConfig | None = None,
        critic_inside: bool = True,
        offload: bool = False,
    ) -> None:
        """`critic` is the one whose values GAE reads: trained here, or elsewhere so that batches bring values.

        With `offload` all lies in host memory, and on the device inside of `here` only.
        """
        torch.manual_seed(seed)
        self._config, self._loss_config, self._spec = config, loss, spec
        self.rank, self.world = rank, world
        self.dp_rank, self.dp_size = rank // config.tensor_parallel, world // config.tensor_parallel
        check_tensor_parallel(spec.path, config.tensor_parallel)
        compute = getattr(torch, spec.dtype)
        # Frozen weights need no float32 masters: they are held as the passes read them.
        hf = load_hf(spec.path, compute if config.lora.rank else torch.float32, spec.device)
        check_head(hf)
        hf.train()
        freeze_except(hf, config.trainable)
        self._lora = add_lora(hf, config.lora, seed) if config.lora.rank else None
        if config.gradient_checkpointing:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = Policy(
            hf,
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            chunk_size=config.logprob_chunk,
            replay_routes=spec.keep_routes,
        )
        if config.compile:
            compile_layers(self.policy)
        mesh = None
        if world > 1 or compute != torch.float32:
            if not dist.is_initialized():
                solo_process_group(spec.device)
            mesh = make_mesh(spec.device, world, config.tensor_parallel)
            shard(self.policy, mesh, compute)
        # Ranks that share the layers see the same episodes: those count once.
        self._ranks = RankGroup(self.dp_size, mesh.get_group("dp") if mesh is not None and self.dp_size > 1 else None)
        self._updates = Updates([p for p in self.policy.parameters() if p.requires_grad], config)
        self._parameters, self._optimizer = self._updates.parameters, self._updates.optimizer
        self._held_steps = critic.alone_steps if critic else 0
        self._critic: Critic | None = None
        if critic and critic_inside:
            self._critic = Critic(critic, config, loss, spec, ranks=self._ranks, mesh=mesh, rank=rank, seed=seed)
        self._publisher: Publisher | None = None
        self._state: TrainerState | None = None
        self.policy_version = 0
        self._offload = Offload(self._tensors, spec.device) if offload else None
        if self._offload:
            self._offload.away()

    def here(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the trainer is on its device, where all but `connect` and snapshots need it."""
        return self._offload.here() if self._offload else contextlib.nullcontext()

    def _tensors(self) -> Iterator[torch.Tensor]:
        """All that it holds between two steps."""
        pairs: list[tuple[torch.nn.Module, torch.optim.Optimizer]] = [(self.policy, self._optimizer)]
        if self._critic is not None:
            pairs.append((self._critic.model, self._critic.state.optimizer))
        for model, optimizer in pairs:
            leaves = tree_leaves(list(optimizer.state.values()))
            yield from (*model.parameters(), *model.buffers(), *(x for x in leaves if isinstance(x, torch.Tensor)))

    def step(self, batch: TensorDict) -> StepResult:
        """Trains on this rank's share of a batch, packed or padded `[b, T]`; one new policy version.

        An update whose gradient is not finite leaves the weights as they are and is counted. Raises FloatingPointError
        after `max_skipped` of them in a row, ConfigError when the batch has fewer groups than `updates`.
        """
        self.policy.train()
        rate = self._updates.set_learning_rate(self.policy_version + 1)
        with span(STEP, "prepare", step=self.policy_version + 1):
            minis = self._prepare(batch if is_packed(batch) else flatten(batch))
        parts: list[Metrics] = []
        norms: list[float] = []
        skipped = 0
        held = self.policy_version < self._held_steps
        for cuts in minis * self._config.epochs:
            with span(STEP, "forward and backward", passes=len(cuts)):
                parts += self._backward(cuts, first=not norms)
            with span(STEP, "optimizer"):
                norms.append(self._updates.clipped_norm())
                if held:
                    self._updates.drop()
                else:
                    skipped += not self._updates.apply(norms[-1], self.policy_version + 1, before=self._before_update)
        self.policy_version += 1
        metrics: dict[str, float | None] = {"loss/kl": None, **self._means(parts)}
        if self._critic:
            with span(STEP, "critic"):
                metrics |= self._critic.train(minis)
        metrics |= {"grad_norm": sum(norms) / len(norms), "extra/lr": rate}
        return StepResult(self.policy_version, metrics | {"extra/skipped_updates": skipped}, peak_rss_bytes())

    def _prepare(self, flat: TensorDict) -> list[list[MicroBatch]]:
        """The passes of each optimizer update, as many on every rank, with all that their losses read."""
        together = self._loss_config.needs.together
        minis = mini_batches(flat, self._config, self._ranks, self._spec.device, together)
        if self._critic is not None:
            minis = self._critic.with_values(minis)
        cuts = token_advantages([cut for mini in minis for cut in mini], self._loss_config, self._ranks.gather_tensors)
        if self._loss_config.needs_proximal and len(minis) * self._config.epochs > 1:
            cuts = [self._with_proximal(cut) for cut in cuts]
        prepared = iter(cuts)
        return [[next(prepared) for _ in mini] for mini in minis]

    @torch.no_grad()
    def _with_proximal(self, cut: MicroBatch) -> MicroBatch:
        logprobs, _ = self.policy(*cut.inputs)
        return replace(cut, proximal_logprobs=cut.unpack(logprobs))

    def _backward(self, cuts: list[MicroBatch], *, first: bool) -> list[Metrics]:
        """Forward and backward over the passes of one update, the `first` of a step or a later one."""
        counts = [denominator(cut.loss_mask, self._loss_config.aggregation) for cut in cuts]
        global_denominator = self._ranks.sum(torch.stack(counts).sum())
        return [self._pass(cut, global_denominator, first) for cut in cuts]

    def _pass(self, cut: MicroBatch, global_denominator: torch.Tensor, first: bool) -> Metrics:
        logprobs, entropy = self.policy(*cut.inputs)
        policy, proximal = cut.unpack(logprobs), cut.proximal_logprobs
        if proximal is None and self._loss_config.needs_proximal:
            proximal = policy.detach()  # the only update of the step: its weights are those of the start
        known = first or proximal is not None
        inputs = LossInput(
            policy_logprobs=policy,
            behavior_logprobs=cut.behavior_logprobs,
            proximal_logprobs=proximal,
            ref_logprobs=cut.ref_logprobs,
            loss_mask=cut.loss_mask,
            advantages=cut.advantages,
            entropy=cut.unpack(entropy),
            token_versions=cut.token_versions,
            policy_version=self.policy_version if known else None,
        )
        output = compute_loss(inputs, self._loss_config, global_denominator)
        output.loss.backward()
        return output.metrics

    def _before_update(self) -> None:
        if self._publisher is not None:
            self._publisher.before_update()

    def _means(self, parts: list[Metrics]) -> dict[str, float]:
        """The metrics of all passes on all ranks."""
        total = add_metrics(parts)
        names = sorted(total)
        return metric_means(dict(zip(names, self._ranks.sum(torch.stack([total[n] for n in names])), strict=True)))

    def connect(self, dtype: str, sync: WeightSyncConfig, transport: str, folder: str = "") -> Endpoint:
        """Lays out what this rank publishes, for generators of `dtype`; all ranks call it at the same time."""
        self.close()  # what an earlier connect made
        parameters, adapter = [*self.policy.hf.named_parameters(), *_persistent_buffers(self.policy.hf)], None
        if self._lora:
            parameters, adapter = self._lora.published(self.policy.hf)
        self._publisher = Publisher(
            parameters,
            getattr(torch, dtype),
            sync,
            transport=transport,
            adapter=adapter,
            model_type=self.policy.hf.config.model_type,
            rank=self.rank,
            gather=RankGroup(self.world).gather,
            folder=folder,
            at_home=self._offload.at_home if self._offload else None,
        )
        return self._publisher.endpoint

    @property
    def publisher(self) -> Publisher:
        """What makes snapshots of this rank's weights, and sends them."""
        assert self._publisher is not None, "connect comes first"
        return self._publisher

    @property
    def state(self) -> TrainerState:
        """What saves and loads all that training goes on from; all ranks ask for it at the same time at first."""
        if self._state is None:
            self._state = TrainerState(
                self.policy.hf, self._optimizer, self.world, adapters_only=self._lora is not None
            )
        return self._state

    def stage_state(self, folder: str) -> None:
        """Copies the state, which is on its way to `folder` then, and the critic's beside it; see `TrainerState`."""
        self.state.stage(Path(folder), self.policy_version)
        if self._critic is not None:
            self._critic.state.stage(beside(folder), self._critic.version)

    def wait_state(self, timeout_s: float) -> None:
        """Until what was staged is on the disk. Raises what `TrainerState.wait` raises."""
        self.state.wait(timeout_s)
        if self._critic is not None:
            self._critic.state.wait(timeout_s)

    def load_state(self, folder: str) -> int:
        """Goes on from the state in `folder`; returns its policy version. Raises what `TrainerState.load` raises."""
        self.policy_version = self.state.load(Path(folder))
        if self._critic is not None:
            self._critic.load_state(str(beside(folder)))
        return self.policy_version

    def save(self, folder: str, source: str) -> None:
        """Writes a Hugging Face checkpoint (safetensors, config, tokenizer) that appears whole or not at all.

        Config and tokenizer are those of the model `source`. With LoRA the weights are merged, and the adapter lies
        beside them; a critic goes into a folder beside this one. Raises RunFolderError when it cannot be written.
        """
        state = self._full_state_dict()
        if self.rank == 0:
            dtype = getattr(torch, self._spec.dtype)
            write_checkpoint(self.policy.hf, state, Path(folder), source, dtype, lora=self._lora)
        if self._critic is not None:
            self._critic.save(str(beside(folder)))
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


def solo_process_group(device: str) -> None:
    """A process group of this process alone: FSDP2 wants one even when it shards over one rank."""
    store = dist.HashStore()
    dist.init_process_group(process_group_backend(device), store=store, rank=0, world_size=1)


def process_group_backend(device: str) -> str:
    """Counts and denominators live on the CPU whatever the model lives on."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
