"""From the padded form of the schema to the packed one and back, and how episodes are cut into rows. Pure.

    padded [B, T] --flatten--> flat [N], [B] --pack(rows)--> packed: rows of whole episodes, end to end
                  <----------------------- pad --------------------

`forge/batch.py` says what each form holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import cast

import numpy as np
import torch
from tensordict import TensorDict

from forge.batch import (
    EPISODE_KEYS,
    OPTIONAL_TOKEN_KEYS,
    OUTSIDE_MASK,
    PACKED_KEYS,
    TOKEN_KEYS,
    Arrays,
    array,
    token_keys,
)

Alloc = Callable[[TensorDict], TensorDict]
"""Makes a TensorDict like the given one, which has no memory, to be filled; `forge.channel.alloc` is one."""


def flatten(batch: TensorDict) -> TensorDict:
    """A valid Group or Batch `[B, T]` as flat episodes: token keys `[N]`, episode keys `[B]`, memory of their own.

    Takes the keys of the schema and no others, and puts in order what stands outside `loss_mask`.
    """
    return as_tensors(flat_arrays({key: array(batch[key]) for key in (*token_keys([batch]), *EPISODE_KEYS)}))


def flat_arrays(padded: Arrays) -> Arrays:
    """`flatten` for the arrays of a batch."""
    lengths, width = padded["lengths"].tolist(), padded["tokens"].shape[1]
    full = min(lengths, default=width) == width
    flat: Arrays = {}
    for key, values in padded.items():
        if full or key in EPISODE_KEYS:
            flat[key] = values.reshape(-1).copy()
        else:
            flat[key] = np.concatenate([row[:length] for row, length in zip(values, lengths, strict=True)])
    outside = ~flat["loss_mask"]
    for key, value in OUTSIDE_MASK.items():
        if key in flat:
            np.putmask(flat[key], outside, value)
    return flat


def as_tensors(flat: Arrays) -> TensorDict:
    """A flat or packed batch of these arrays, without a copy."""
    return TensorDict({key: torch.from_numpy(value) for key, value in flat.items()}, batch_size=[])


def first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The episodes of those `lengths` in rows of at most `max_tokens`, longest first, each into the first that fits.

    At most 11/9 of the fewest possible rows, and one (Dosa 2007). A longer episode gets a row of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rows: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []
    """(room, row), in the order of `rows`, without those that have no room for the shortest."""
    for index in order:
        length = lengths[index]
        place = next((p for p, (room, _) in enumerate(open_rows) if room >= length), None)
        if place is None:
            rows.append([index])
            room, row, place = max_tokens - length, rows[-1], len(open_rows)
        else:
            room, row = open_rows[place]
            row.append(index)
            room -= length
        open_rows[place : place + 1] = [(room, row)] if room >= lengths[order[-1]] else []
    return rows


def padded_cuts(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The same episodes in rectangles of at most `max_tokens`, padding included, neighbours in length together."""
    cuts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # The first of a cut is its longest: every other costs as much.
        if cuts and lengths[cuts[-1][0]] * (len(cuts[-1]) + 1) <= max_tokens:
            cuts[-1].append(index)
        else:
            cuts.append([index])
    return cuts


def padded_size(lengths: Sequence[int], max_tokens: int) -> int:
    """Tokens of `padded_cuts`, padding included."""
    return sum(lengths[cut[0]] * len(cut) for cut in padded_cuts(lengths, max_tokens))


def pack(groups: Sequence[TensorDict], rows: Sequence[Sequence[int]], alloc: Alloc | None = None) -> TensorDict:
    """A packed batch of flat (or packed) episodes, one copy into what `alloc` gives (default: private memory).

    `rows` are lists of episodes, numbered through all groups; what is in none of them is left out. Raises
    SchemaError when an optional key is in some groups only.
    """
    pieces = [piece for number, group in enumerate(groups) for piece in _pieces(number, group)]
    chosen = [pieces[episode] for episode in chain.from_iterable(rows)]
    lengths = [stop - start for _, start, stop in chosen]
    keys = token_keys(groups)
    out = _empty(keys, sum(lengths), len(chosen), len(rows), "meta" if alloc else "cpu")
    if alloc is not None:
        out = alloc(out)
    sources, filled = [_arrays(group) for group in groups], _arrays(out)
    spans = list(_merged(chosen))
    for key in keys:
        np.concatenate([sources[number][key][start:stop] for number, start, stop in spans], out=filled[key])
    order = list(chain.from_iterable(rows))
    for key in EPISODE_KEYS:
        filled[key][:] = np.concatenate([source[key] for source in sources])[order]
    _number(filled, lengths)
    ends = list(accumulate(lengths, initial=0))
    filled["row_offsets"][:] = [ends[count] for count in accumulate(map(len, rows), initial=0)]
    return out


def pad(groups: Sequence[TensorDict], pad_id: int = 0) -> TensorDict:
    """The episodes of flat or packed batches as one padded Batch `[E, T]`, in their order; a copy.

    Raises SchemaError as `pack` does.
    """
    sources = [_arrays(group) for group in groups]
    lengths = [source["lengths"].tolist() for source in sources]
    width, count = max(map(max, lengths)), sum(map(len, lengths))
    out: Arrays = {}
    for key in token_keys(groups):
        fill = pad_id if key == "tokens" else OUTSIDE_MASK.get(key, 0)
        rows, row = np.full((count, width), fill, sources[0][key].dtype), 0
        for source, group_lengths in zip(sources, lengths, strict=True):
            start = 0
            for length in group_lengths:
                rows[row, :length] = source[key][start : start + length]
                row, start = row + 1, start + length
        out[key] = rows
    for key in EPISODE_KEYS:
        out[key] = np.concatenate([source[key] for source in sources])
    return TensorDict({key: torch.from_numpy(value) for key, value in out.items()}, batch_size=[count])


def row_episodes(packed: TensorDict) -> list[list[int]]:
    """The episodes of each row of a packed batch."""
    episode_at = {start: number for number, start in enumerate(accumulate(packed["lengths"].tolist(), initial=0))}
    bounds = [episode_at[offset] for offset in packed["row_offsets"].tolist()]
    return [list(range(start, stop)) for start, stop in pairwise(bounds)]


def _pieces(number: int, group: TensorDict) -> Iterable[tuple[int, int, int]]:
    """(group, first token, behind the last) of each episode."""
    start = 0
    for length in group["lengths"].tolist():
        yield number, start, start + length
        start += length


def _merged(pieces: Iterable[tuple[int, int, int]]) -> Iterable[tuple[int, int, int]]:
    """Neighbours in memory as one piece: fewer and longer copies."""
    last: tuple[int, int, int] | None = None
    for piece in pieces:
        if last is not None and last[0] == piece[0] and last[2] == piece[1]:
            last = (last[0], last[1], piece[2])
        else:
            if last is not None:
                yield last
            last = piece
    if last is not None:
        yield last


def _number(out: Arrays, lengths: Sequence[int]) -> None:
    """Fills `position_ids` and `sequence_ids`."""
    count = np.arange(max(lengths))
    np.concatenate([count[:length] for length in lengths], out=out["position_ids"])
    sequences, start = out["sequence_ids"], 0
    for number, length in enumerate(lengths):
        sequences[start : start + length] = number
        start += length


def _arrays(td: TensorDict) -> Arrays:
    """The values of `td` as numpy sees them, without a copy."""
    return {key: array(cast(torch.Tensor, value)) for key, value in td.items()}


def _empty(keys: Sequence[str], num_tokens: int, num_episodes: int, num_rows: int, device: str) -> TensorDict:
    """A packed batch to be filled."""
    dtypes = TOKEN_KEYS | OPTIONAL_TOKEN_KEYS | EPISODE_KEYS | PACKED_KEYS
    sizes = dict.fromkeys(keys, num_tokens) | dict.fromkeys(EPISODE_KEYS, num_episodes)
    sizes |= {"position_ids": num_tokens, "sequence_ids": num_tokens, "row_offsets": num_rows + 1}
    empty = {key: torch.empty(size, dtype=dtypes[key], device=device) for key, size in sizes.items()}
    return TensorDict(empty, batch_size=[])
