"""Cuts a rank's share of a batch into forward passes of bounded size, padded or packed.

Padded: episodes sorted by length, so that neighbours need little padding. Packed: each row of a packed batch is a
pass, a slice of memory that is not copied; positions restart at each episode and keep attention inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from tensordict import TensorDict

from forge.batch import INPUT_KEYS, OPTIONAL_TOKEN_KEYS, OUTSIDE_MASK, WIDE_KEYS, is_packed
from forge.errors import ConfigError
from forge.packing import episodes_of, first_fit, flatten, pack, padded_cuts, row_episodes, runs


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: `tokens`, `position_ids`, `mask` are `[R, L]` as the model sees them, and so are
    `routed_experts` `[R, L, layers, k]`; the loss sees the episodes `[b, t]`, 0 outside `loss_mask`, whatever the
    packing; `advantages` are `[b]` or `[b, t]`.

    The trained tokens come in the same order in both views, and in `kept_tokens` `[N, K]`, their recorded supports;
    `rows` are the episodes' places in the batch.
    """

    rows: tuple[int, ...]
    tokens: torch.Tensor
    position_ids: torch.Tensor
    mask: torch.Tensor
    loss_mask: torch.Tensor
    behavior_logprobs: torch.Tensor
    token_versions: torch.Tensor
    advantages: torch.Tensor
    ref_logprobs: torch.Tensor | None = None
    token_rewards: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    proximal_logprobs: torch.Tensor | None = None
    kept_tokens: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """What `Policy` takes."""
        return self.tokens, self.position_ids, self.mask, self.kept_tokens, self.routed_experts

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """`[N]` values of the trained tokens as `[b, t]`, 0 elsewhere; differentiable."""
        out = torch.zeros(self.loss_mask.shape, dtype=values.dtype, device=values.device)
        return out.masked_scatter(self.loss_mask, values)

    def to(self, device: str) -> MicroBatch:
        if device == "cpu":
            return self
        tensors: dict[str, Any] = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **{k: v.to(device, non_blocking=True) for k, v in tensors.items()})


def micro_batches(
    batch: TensorDict, max_tokens: int, *, packing: bool, episodes: Sequence[int] | None = None, together: int = 1
) -> list[MicroBatch]:
    """The `episodes` of `batch`, all by default, in passes of at most `max_tokens` tokens, padding included.

    With `packing` the rows of a packed batch are the passes, unless one is longer than `max_tokens`: then, and
    where only some episodes are wanted, they are packed anew. Runs of `together` episodes stay beside each other in one
    pass. Raises ConfigError when one run alone is longer.
    """
    flat = batch if is_packed(batch) else flatten(batch)
    if episodes is not None and len(episodes) < flat["lengths"].shape[0]:
        return _of_some(flat, max_tokens, packing, episodes, together)
    lengths = flat["lengths"].tolist()
    longest = max(sum(run) if packing else max(run) * together for run in runs(lengths, together))
    if longest > max_tokens:
        what = "an episode has" if together == 1 else f"{together} episodes that stay together have"
        raise ConfigError(
            f"{what} {longest} tokens, trainer.microbatch_tokens is {max_tokens}; raise it to {longest} or more"
        )
    if not packing:
        return [_padded(flat, cut) for cut in padded_cuts(lengths, max_tokens, together)]
    rows = row_episodes(flat) if "row_offsets" in flat else []
    fits = all(sum(lengths[episode] for episode in row) <= max_tokens and not len(row) % together for row in rows)
    if not rows or not fits:
        rows = first_fit(lengths, max_tokens, together)
        flat = pack([flat], rows)
    firsts = accumulate(map(len, rows), initial=0)
    return [_packed(flat, first, row) for first, row in zip(firsts, rows, strict=False)]


def _of_some(
    flat: TensorDict, max_tokens: int, packing: bool, episodes: Sequence[int], together: int
) -> list[MicroBatch]:
    if not episodes:
        return []
    cuts = micro_batches(pack([flat], [episodes]), max_tokens, packing=packing, together=together)
    return [replace(cut, rows=tuple(episodes[row] for row in cut.rows)) for cut in cuts]


def empty_micro_batch(batch: TensorDict, together: int = 1) -> MicroBatch:
    """A pass that trains nothing, for a rank that has run out while others have not."""
    flat = batch if is_packed(batch) else flatten(batch)
    sizes = [max(run) for run in runs(flat["lengths"].tolist(), together)]
    micro = _padded(flat, episodes_of([[sizes.index(min(sizes))]], together)[0])
    nothing = torch.zeros_like(micro.loss_mask)
    no_supports = None if micro.kept_tokens is None else micro.kept_tokens[:0]
    return replace(micro, mask=nothing, loss_mask=nothing, kept_tokens=no_supports)


def _padded(flat: TensorDict, episodes: Sequence[int]) -> MicroBatch:
    index, inside = _places(flat, episodes)
    loss = _loss_view(flat, episodes, index, inside)
    tokens = torch.where(inside, flat["tokens"][index], 0)
    positions = torch.arange(inside.shape[1]).expand(inside.shape)
    for key in INPUT_KEYS.intersection(flat.keys()):
        loss[key] = torch.where(inside[(..., *[None] * len(WIDE_KEYS[key]))], flat[key][index], OUTSIDE_MASK[key])
    return MicroBatch(tuple(episodes), tokens, positions, mask=loss["loss_mask"], **loss)


def _packed(packed: TensorDict, first: int, row: Sequence[int]) -> MicroBatch:
    """The pass of the row whose first episode is number `first`; `row` is what its episodes were called before."""
    episodes = range(first, first + len(row))
    index, inside = _places(packed, episodes)
    span = slice(int(index[0, 0]), int(index[0, 0] + inside.sum()))
    tokens, positions, mask = (packed[key][None, span] for key in ("tokens", "position_ids", "loss_mask"))
    read = {key: packed[key][None, span] for key in INPUT_KEYS.intersection(packed.keys())}
    return MicroBatch(tuple(row), tokens, positions, mask, **read, **_loss_view(packed, episodes, index, inside))


def _places(flat: TensorDict, episodes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`[b, t]`: where the tokens of `episodes` lie in the flat keys, and whether there is one."""
    lengths = flat["lengths"]
    chosen = torch.tensor(list(episodes))
    starts = (lengths.cumsum(0) - lengths)[chosen]
    columns = torch.arange(int(lengths[chosen].max()))
    index = (starts[:, None] + columns).clamp_(max=flat["tokens"].shape[0] - 1)
    return index, columns < lengths[chosen][:, None]


def _loss_view(flat: TensorDict, episodes: Sequence[int], index: torch.Tensor, inside: torch.Tensor) -> dict[str, Any]:
    mask = flat["loss_mask"][index] & inside

    optional = (key for key in OPTIONAL_TOKEN_KEYS if key in flat and key not in INPUT_KEYS)
    keys = ("behavior_logprobs", "token_versions", *optional)
    # Whatever stands outside the mask, NaN included, must not reach arithmetic.
    trained = {key: torch.where(mask, flat[key][index], 0) for key in keys if key not in WIDE_KEYS}
    trained |= {key: flat[key][index[mask]] for key in keys if key in WIDE_KEYS}
    return {"loss_mask": mask, "advantages": flat["advantages"][torch.tensor(list(episodes))], **trained}
