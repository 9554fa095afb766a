"""One way of training on one ragged batch, in a process of its own: how long a step takes, how much memory it needs.

    python -m apps.bench.harness.trainer_run SETTINGS.json

`bare` is forward, cross entropy on the trained tokens and backward of the Hugging Face model and nothing else, the
limit of any trainer; the other ways are `actors.trainer.Trainer.step`. Every way trains on the same episodes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from actors.attention import LENGTHS, sequence_lengths
from actors.model import load_hf
from actors.packing import MicroBatch, micro_batches
from actors.trainer import ModelSpec, Trainer, TrainerConfig
from forge.batch import collate, make_group
from forge.losses import LossConfig
from forge.memory import peak_rss_bytes
from forge.packing import flatten
from replay.shards import balance

WHOLE = 1 << 30
"""A chunk that is never full: all logits of a pass at once."""


@dataclass(frozen=True)
class Settings:
    """What is trained and how; sizes in tokens."""

    model: str
    out: str
    way: str
    """bare, bare_masked (sequences kept apart as transformers does), bare_longest (every episode padded to the
    longest), or ours."""
    packing: bool = True
    chunk: int = 1024
    ranks: int = 1
    episodes: int = 64
    longest: int = 512
    microbatch_tokens: int = 2048
    steps: int = 5
    vocabulary: int = 0
    """Token ids are below it; 0: the model's."""

    def write(self, path: Path) -> None:
        """As the program reads it."""
        path.write_text(json.dumps(asdict(self)))


def lengths(episodes: int, longest: int) -> list[int]:
    """Ragged: half of the episodes are shorter than a third of the longest. Evenly spread quantiles, no chance."""
    third = 1.584962500721156  # u^log2(3) is 1/3 at u = 1/2
    return [max(8, round(longest * ((n + 1) / episodes) ** third)) for n in range(episodes)]


def ragged_batch(episodes: int, longest: int, vocabulary: int) -> TensorDict:
    """A Batch `[B, T]` of random tokens, a quarter of each episode its prompt, in a fixed random order."""
    draw = torch.Generator().manual_seed(0)
    sizes = lengths(episodes, longest)
    groups = []
    for number in torch.randperm(episodes, generator=draw).tolist():
        tokens = torch.randint(3, vocabulary, (sizes[number],), generator=draw).tolist()
        start = max(1, sizes[number] // 4)
        completion = tokens[start:]
        group = make_group(
            tokens[:start], [completion], [[-3.0] * len(completion)], [[0] * len(completion)], group_id=number
        )
        group["advantages"] = torch.randn(1, generator=draw)
        groups.append(group)
    return collate(groups)


def episodes_of(settings: Settings) -> list[tuple[list[int], int, float]]:
    """The tokens of each episode of the batch, where its completion begins, and its advantage."""
    from transformers import AutoConfig

    vocabulary = settings.vocabulary or AutoConfig.from_pretrained(settings.model).vocab_size
    batch = ragged_batch(settings.episodes, settings.longest, vocabulary)
    rows = zip(
        batch["tokens"], batch["lengths"].tolist(), batch["loss_mask"], batch["advantages"].tolist(), strict=True
    )
    return [(tokens[:n].tolist(), int(mask.int().argmax()), advantage) for tokens, n, mask, advantage in rows]


def bare(settings: Settings) -> Callable[[], None]:
    """Forward and backward of the plain model over the rows that the trainer would see."""
    hf = load_hf(settings.model, torch.float32)
    hf.train()
    if settings.way == "bare_masked":
        hf.set_attn_implementation("sdpa")
    batch = ragged_batch(settings.episodes, settings.longest, settings.vocabulary or hf.config.vocab_size)
    if settings.way == "bare_longest":
        passes = _padded_to_the_longest(batch, settings.microbatch_tokens)
    else:
        passes = micro_batches(flatten(batch), settings.microbatch_tokens, packing=settings.packing)
    total = sum(int(one.loss_mask.sum()) for one in passes)

    def step() -> None:
        for one in passes:
            lengths = {} if settings.way == "bare_masked" else {LENGTHS: sequence_lengths(one.position_ids)}
            logits = hf(input_ids=one.tokens, position_ids=one.position_ids, use_cache=False, **lengths).logits
            rows, columns = one.mask.nonzero(as_tuple=True)
            chosen = logits[rows, columns - 1].float()
            loss = torch.nn.functional.cross_entropy(chosen, one.tokens[rows, columns], reduction="sum") / total
            loss.backward()
        hf.zero_grad(set_to_none=True)

    return step


def _padded_to_the_longest(batch: TensorDict, max_tokens: int) -> list[MicroBatch]:
    """What a trainer does that neither packs nor sorts: rectangles as wide as the batch."""
    width = batch["tokens"].shape[1]
    positions = torch.arange(width)
    parts = batch.split(max(1, max_tokens // width))
    return [
        MicroBatch(
            rows=(),
            tokens=part["tokens"],
            position_ids=positions.expand(part["tokens"].shape),
            mask=part["loss_mask"],
            loss_mask=part["loss_mask"],
            behavior_logprobs=part["behavior_logprobs"],
            token_versions=part["token_versions"],
            advantages=part["advantages"],
        )
        for part in parts
    ]


def ours(settings: Settings, rank: int = 0) -> Callable[[], None]:
    """`Trainer.step` on this rank's share of the batch."""
    config = TrainerConfig(
        microbatch_tokens=settings.microbatch_tokens, packing=settings.packing, logprob_chunk=settings.chunk
    )
    trainer = Trainer(config, LossConfig(), ModelSpec(settings.model, "float32"), rank=rank, world=settings.ranks)
    vocabulary = settings.vocabulary or trainer.policy.hf.config.vocab_size
    batch = ragged_batch(settings.episodes, settings.longest, vocabulary)
    share = flatten(batch[torch.tensor(balance(batch["lengths"].tolist(), settings.ranks)[rank])])

    def step() -> None:
        trainer.step(share)

    return step


def timed(step: Callable[[], None], steps: int) -> list[float]:
    """Seconds of each of `steps`, after one that warms up."""
    step()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def run(rank: int, settings: Settings, folder: str) -> None:
    """One rank; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    if settings.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=settings.ranks)
    step = ours(settings, rank) if settings.way == "ours" else bare(settings)
    seconds = timed(step, settings.steps)
    if rank == 0:
        sizes = lengths(settings.episodes, settings.longest)
        found: dict[str, Any] = {
            "step_s": statistics.median(seconds),
            "tokens": sum(sizes),
            "peak_rss_bytes": peak_rss_bytes(),
        }
        Path(settings.out).write_text(json.dumps(found))
    if settings.ranks > 1:
        dist.barrier()
        os._exit(0)  # FSDP keeps the gloo group past its destruction, and a gloo thread aborts a finalizing interpreter


def main() -> None:
    """The command line."""
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    store = f"{settings.out}.store"
    if settings.ranks == 1:
        run(0, settings, store)
    else:
        torch.multiprocessing.spawn(run, args=(settings, store), nprocs=settings.ranks)


if __name__ == "__main__":
    main()
