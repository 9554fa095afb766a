"""Cuts a rank's shard of a batch into forward passes of bounded size, padded or packed.

Padded: rows sorted by length, so that neighbours need little padding. Packed: episodes laid first-fit into rows
of `max_tokens`, positions restarting at each; attention keeps them apart by those positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict

from forge.errors import ConfigError


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: `tokens`, `position_ids`, `mask` are `[R, L]` as the model sees them; the loss sees the
    episodes `[b, t]` (`loss_mask`, `behavior_logprobs`, `ref_logprobs`, `advantages` `[b]`) whatever the packing.

    The trained tokens come in the same order in both views; `rows` are the episodes' places in the batch.
    """

    rows: tuple[int, ...]
    tokens: torch.Tensor
    position_ids: torch.Tensor
    mask: torch.Tensor
    loss_mask: torch.Tensor
    behavior_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """`[N]` values of the trained tokens as `[b, t]`, 0 elsewhere; differentiable."""
        out = torch.zeros(self.loss_mask.shape, dtype=values.dtype, device=values.device)
        return out.masked_scatter(self.loss_mask, values)

    def to(self, device: str) -> MicroBatch:
        if device == "cpu":
            return self
        tensors: dict[str, Any] = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **{k: v.to(device, non_blocking=True) for k, v in tensors.items()})


def micro_batches(batch: TensorDict, max_tokens: int, *, packing: bool) -> list[MicroBatch]:
    """All episodes of `batch` `[b, T]` in passes of at most `max_tokens` tokens, padding included.

    Raises ConfigError when one episode alone is longer.
    """
    lengths = batch["lengths"].tolist()
    longest = max(lengths)
    if longest > max_tokens:
        raise ConfigError(
            f"an episode has {longest} tokens, trainer.microbatch_tokens is {max_tokens}; raise it to {longest} or more"
        )
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if packing:
        return [_packed(batch, rows) for rows in _first_fit(order, lengths, max_tokens)]
    cuts: list[list[int]] = []
    for index in order:
        # The first of a cut is its longest: every row costs as much.
        if cuts and lengths[cuts[-1][0]] * (len(cuts[-1]) + 1) <= max_tokens:
            cuts[-1].append(index)
        else:
            cuts.append([index])
    return [_padded(batch, rows) for rows in cuts]


def empty_micro_batch(batch: TensorDict) -> MicroBatch:
    """A pass that trains nothing, for a rank that has run out while others have not."""
    micro = _padded(batch, [int(batch["lengths"].argmin())])
    nothing = torch.zeros_like(micro.loss_mask)
    return replace(micro, mask=nothing, loss_mask=nothing)


def _first_fit(order: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[int] = []
    for index in order:
        slot = next((r for r, room in enumerate(free) if room >= lengths[index]), None)
        if slot is None:
            rows.append([index])
            free.append(max_tokens - lengths[index])
        else:
            rows[slot].append(index)
            free[slot] -= lengths[index]
    return rows


def _episodes(batch: TensorDict, rows: list[int]) -> dict[str, torch.Tensor | None]:
    width = int(batch["lengths"][rows].max())
    index = torch.tensor(rows)
    mask = batch["loss_mask"][index, :width]

    def clean(key: str) -> torch.Tensor:
        # Whatever padding holds, NaN included, must not reach arithmetic.
        values = batch[key][index, :width]
        return torch.where(mask, values, torch.zeros((), dtype=values.dtype))

    return {
        "loss_mask": mask,
        "behavior_logprobs": clean("behavior_logprobs"),
        "ref_logprobs": None if batch.get("ref_logprobs", None) is None else clean("ref_logprobs"),
        "advantages": batch["advantages"][index],
    }


def _padded(batch: TensorDict, rows: list[int]) -> MicroBatch:
    episodes = _episodes(batch, rows)
    mask = episodes["loss_mask"]
    assert mask is not None
    width = mask.shape[1]
    tokens = batch["tokens"][torch.tensor(rows), :width]
    positions = torch.arange(width).expand(len(rows), width)
    return MicroBatch(tuple(rows), tokens, positions, mask, **episodes)  # type: ignore[arg-type]


def _packed(batch: TensorDict, rows: list[int]) -> MicroBatch:
    lengths = batch["lengths"][rows].tolist()
    pieces = [(row, slice(0, length)) for row, length in zip(rows, lengths, strict=True)]
    tokens = torch.cat([batch["tokens"][row, span] for row, span in pieces])
    mask = torch.cat([batch["loss_mask"][row, span] for row, span in pieces])
    positions = torch.cat([torch.arange(length) for length in lengths])
    return MicroBatch(
        tuple(rows),
        tokens[None],
        positions[None],
        mask[None],
        **_episodes(batch, rows),  # type: ignore[arg-type]
    )
