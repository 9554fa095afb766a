"""Spawns the actors of a run on rows that are there; nothing here runs once the loops do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer

from actors.model import pick_dtype
from actors.trainer import ModelSpec
from actors.trainer_mesh import TrainerActor, TrainerMesh
from apps.grpo.models import resolve_model
from apps.grpo.spawn import start_reference, stop_ids
from apps.sft.batches import Batches, make_completer, texts_of
from apps.sft.config import OfflineConfig
from apps.sft.cursor import Cursor
from forge.checkpoints import Saver
from forge.data import PromptStream, load_task, make_encoder
from forge.mesh import Cluster
from forge.metrics import Meter
from forge.run_log import RunLog


@dataclass
class Run:
    """What the loops share."""

    cfg: OfflineConfig
    log: RunLog
    model: str
    trainer: TrainerMesh
    batches: Batches
    cursor: Cursor
    saver: Saver
    meter: Meter
    memory: dict[str, int] = field(default_factory=dict)


StartsTrainer = Callable[[OfflineConfig, Cluster, ModelSpec], Coroutine[Any, Any, TrainerMesh]]


async def start_trainer(cfg: OfflineConfig, cluster: Cluster, spec: ModelSpec) -> TrainerMesh:
    """The trainer of a language model."""
    world = cluster.procs("trainer")
    mesh = await cluster.spawn("trainer", TrainerActor, cfg.trainer, cfg.loss, spec, world=world, seed=cfg.seed)
    trainer = TrainerMesh(mesh, cfg.trainer, world, spec.dtype)
    await trainer.setup()
    return trainer


async def start_run(
    cfg: OfflineConfig, cluster: Cluster, log: RunLog, *keys: str, start: StartsTrainer = start_trainer
) -> Run:
    """Trainer, reference where the loss needs one, and the batches; in the state of the checkpoint of `log`.

    `keys` are those of a row that hold completions, which stay in one pass. `start` starts the trainer.
    """
    log.note(f"preparing model {cfg.model}")
    model = await asyncio.to_thread(resolve_model, cfg.model)
    tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, model)
    stream = await asyncio.to_thread(open_rows, cfg, tokenizer, keys)
    cursor = Cursor(log.folder.absolute / "data.json")
    if log.resumed is not None:
        stream.load_state_dict(cursor.at(log.start))
    cursor.now = stream.state_dict()
    spec = ModelSpec(model, str(pick_dtype(cfg.dtype, cluster.device)).removeprefix("torch."), cluster.device)
    log.note(f"starting the actors ({spec.dtype} on {cluster.device})")
    async with asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(start(cfg, cluster, spec))
        referring = tasks.create_task(start_reference(cfg.trainer, cluster, spec)) if cfg.loss.needs_reference else None
    trainer = starting.result()
    if log.resumed is not None:
        await trainer.load_state(str(log.resumed.path / "trainer"))
    batches = Batches(
        stream,
        make_completer(tokenizer, stop_ids(tokenizer, model)),
        size=cfg.batch.size,
        shards=trainer.num_shards,
        readers=cfg.trainer.tensor_parallel,
        row_tokens=cfg.trainer.microbatch_tokens,
        together=len(keys),
        reference=referring.result() if referring else None,
    )
    saver = Saver(log.checkpoints, trainer, cursor, cfg.run.checkpoint_every, start=log.start)
    return Run(cfg, log, model, trainer, batches, cursor, saver, Meter(elapsed_s=log.elapsed_s))


def open_rows(cfg: OfflineConfig, tokenizer: Any, keys: Sequence[str]) -> PromptStream:
    """The rows as prompts, whose answers are the texts under `keys`. Raises ConfigError where the first has none."""
    data = cfg.data
    encode, texts = make_encoder(tokenizer, data.template_args), texts_of(*keys)
    stream = PromptStream(load_task(data), encode, cfg.seed, shuffle=data.shuffle, answer_of=texts)
    stream.peek()
    return stream
