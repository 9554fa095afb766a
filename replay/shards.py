"""One batch, cut into what each data-parallel rank trains, and handed over."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

from tensordict import TensorDict

from forge.errors import ConfigError
from forge.packing import Alloc, Flat, episodes_of, first_fit, pack, padded_size, runs

Plan = list[list[list[int]]]
"""Of each rank the rows, of each row the episodes."""


class Channel(Protocol):
    """The part of `forge.channel` that a hand-over uses."""

    def alloc(self, like: TensorDict) -> TensorDict: ...

    def put(self, td: TensorDict, readers: int = 1) -> Any: ...


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
    if num_shards == 1:
        return [list(range(len(lengths)))]
    heaps = [(0, shard) for shard in range(num_shards)]
    rows: list[list[int]] = [[] for _ in range(num_shards)]
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, shard = heapq.heappop(heaps)
        rows[shard].append(row)
        heapq.heappush(heaps, (load + lengths[row], shard))
    return [sorted(shard) for shard in rows]


def plan_shards(lengths: Sequence[int], num_shards: int, row_tokens: int, together: int = 1) -> Plan:
    """Which rank gets which episodes in which rows: balanced over ranks, packed first-fit into `row_tokens`.

    Runs of `together` episodes go as one, as pairs have to. Raises ConfigError with fewer of them than shards.
    """
    if together > 1:
        plan = plan_shards([sum(run) for run in runs(lengths, together)], num_shards, row_tokens)
        return [episodes_of(rows, together) for rows in plan]
    plans = []
    for shard in balance(lengths, num_shards):
        rows = first_fit([lengths[episode] for episode in shard], row_tokens)
        plans.append([[shard[number] for number in row] for row in rows])
    return plans


def waste(lengths: Sequence[int], plan: Plan, row_tokens: int, together: int = 1) -> dict[str, float]:
    """Shares of a batch that are not tokens, over all ranks.

    pack/waste: what stays empty of the rows' budget; a packing trainer computes nothing for it. pack/padded_waste:
    padding among the tokens that a trainer computes which pads its passes instead.
    """
    shards = [[lengths[episode] for episode in chain.from_iterable(rows)] for rows in plan]
    budget = row_tokens * sum(len(rows) for rows in plan)
    return {
        "pack/waste": max(0.0, 1 - sum(lengths) / budget),
        "pack/padded_waste": 1 - sum(lengths) / sum(padded_size(shard, row_tokens, together) for shard in shards),
    }


def make_shards(groups: Sequence[Flat], plan: Plan, alloc: Alloc | None = None) -> list[TensorDict]:
    """Flat groups as one packed batch a rank, of whole episodes; one copy, into what `alloc` gives."""
    return [pack(groups, rows, alloc) for rows in plan]


def send(groups: Sequence[Flat], plan: Plan, channel: Channel, readers: int = 1) -> list[Any]:
    """`make_shards` in the channel's memory: one handle a shard, and no other copy on the way to it.

    Each handle can be opened by `readers` processes: ranks that share the layers of a model share its shard of the
    batch. Raises ChannelError when the channel has no memory.
    """
    return [channel.put(shard, readers) for shard in make_shards(groups, plan, channel.alloc)]


def hand_over(
    groups: Sequence[Flat], num_shards: int, row_tokens: int, channel: Channel, together: int = 1, readers: int = 1
) -> list[Any]:
    """Plans and sends. Raises ConfigError with fewer episodes than shards, and what `send` raises."""
    lengths = list(chain.from_iterable(group["lengths"].tolist() for group in groups))
    return send(groups, plan_shards(lengths, num_shards, row_tokens, together), channel, readers)
