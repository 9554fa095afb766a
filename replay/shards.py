"""One batch, cut into what each data-parallel rank trains. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from forge.batch import collate
from forge.errors import ConfigError


def balance(lengths: Sequence[int], num_shards: int) -> list[list[int]]:
    """Row numbers of `lengths` (tokens) in `num_shards` lists of about equal token sums, rows ascending.

    Longest first, each to the lightest shard so far: no shard is empty, and the heaviest exceeds the
    best possible by a third at most (Graham 1969). Raises ConfigError with fewer rows than shards.
    """
    if not 1 <= num_shards <= len(lengths):
        raise ConfigError(
            f"num_shards is {num_shards}, the batch has {len(lengths)} episodes and each rank needs one; "
            "lower mesh.trainer.procs or raise grpo.batch_size"
        )
    heaps = [(0, shard) for shard in range(num_shards)]
    rows: list[list[int]] = [[] for _ in range(num_shards)]
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, shard = heapq.heappop(heaps)
        rows[shard].append(row)
        heapq.heappush(heaps, (load + lengths[row], shard))
    return [sorted(shard) for shard in rows]


def make_shards(groups: Sequence[TensorDict], num_shards: int, pad_id: int = 0) -> list[TensorDict]:
    """Groups `[G_i]` as `num_shards` Batches `[B_j, T_j]` of whole episodes, right-padded to its own longest.

    Raises ConfigError with fewer episodes than shards.
    """
    if num_shards == 1:
        return [collate(groups, pad_id)]
    batch = collate(groups, pad_id)
    rows = balance(batch["lengths"].tolist(), num_shards)
    return [collate([batch[torch.tensor(shard)]], pad_id) for shard in rows]
