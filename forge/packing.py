"""From the padded form of the schema to the packed one and back, and how episodes are cut into rows. Pure.

    padded [B, T] --flatten--> flat [N], [B] --pack(rows)--> packed: rows of whole episodes, end to end
                  <----------------------- pad --------------------

`forge/batch.py` says what each form holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import cast

import numpy as np
import torch
from tensordict import TensorDict

from forge.batch import (
    EPISODE_KEYS,
    INPUT_KEYS,
    OPTIONAL_TOKEN_KEYS,
    OUTSIDE_MASK,
    PACKED_KEYS,
    TOKEN_KEYS,
    WIDE_KEYS,
    Arrays,
    array,
    check_widths,
    token_keys,
)
from forge.errors import SchemaError

_DTYPES = TOKEN_KEYS | OPTIONAL_TOKEN_KEYS | EPISODE_KEYS | PACKED_KEYS
_NUMPY = {key: torch.empty(0, dtype=dtype).numpy().dtype for key, dtype in _DTYPES.items()}
Flat = TensorDict | Arrays
"""Flat episodes; as arrays (`flat_arrays`) they cost less to read."""
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
            flat[key] = values.reshape(-1, *values.shape[2:]).copy()
        else:
            flat[key] = np.concatenate([row[:length] for row, length in zip(values, lengths, strict=True)])
    outside = ~flat["loss_mask"]
    for key, value in OUTSIDE_MASK.items():
        if key in flat and key not in INPUT_KEYS:
            if key in WIDE_KEYS:
                flat[key][outside] = value
            else:
                np.putmask(flat[key], outside, value)
    return flat


def as_tensors(flat: Arrays) -> TensorDict:
    """A flat or packed batch of these arrays, without a copy."""
    return TensorDict({key: torch.from_numpy(value) for key, value in flat.items()}, batch_size=[])


def first_fit(lengths: Sequence[int], max_tokens: int, together: int = 1) -> list[list[int]]:
    """The episodes of those `lengths` in rows of at most `max_tokens`, longest first, each into the first that fits.

    At most 11/9 of the fewest possible rows, and one (Dosa 2007). A longer episode gets a row of its own. With
    `together`, runs of so many episodes stay beside each other in one row, as pairs have to.
    """
    if together > 1:
        return episodes_of(first_fit([sum(run) for run in runs(lengths, together)], max_tokens), together)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rows: list[list[int]] = []
    open_rows: list[list[int]] = []  # without those that have no room for the shortest
    rooms: list[int] = []
    shortest = min(lengths, default=0)
    for index in order:
        place = _first(rooms, lengths[index])
        if place == len(rooms):
            rows.append([])
            open_rows.append(rows[-1])
            rooms.append(max_tokens)
        open_rows[place].append(index)
        rooms[place] -= lengths[index]
        if rooms[place] < shortest:
            del open_rows[place], rooms[place]
    return rows


def _first(rooms: Sequence[int], length: int) -> int:
    for place, room in enumerate(rooms):
        if room >= length:
            return place
    return len(rooms)


def padded_cuts(lengths: Sequence[int], max_tokens: int, together: int = 1) -> list[list[int]]:
    """The same episodes in rectangles of at most `max_tokens`, padding included, neighbours in length together."""
    if together > 1:
        widths = [max(run) for run in runs(lengths, together)]
        return episodes_of(padded_cuts(widths, max_tokens // together), together)
    cuts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # The first of a cut is its longest: every other costs as much.
        if cuts and lengths[cuts[-1][0]] * (len(cuts[-1]) + 1) <= max_tokens:
            cuts[-1].append(index)
        else:
            cuts.append([index])
    return cuts


def padded_size(lengths: Sequence[int], max_tokens: int, together: int = 1) -> int:
    """Tokens of `padded_cuts`, padding included."""
    cuts = padded_cuts(lengths, max_tokens, together)
    return sum(max(lengths[episode] for episode in cut[:together]) * len(cut) for cut in cuts)


def runs(values: Sequence[int], together: int) -> list[Sequence[int]]:
    """`values` in runs of `together`. Raises SchemaError when they do not come out even."""
    if len(values) % together:
        raise SchemaError(f"{len(values)} episodes are no multiple of {together}, and so many must stay together")
    return [values[start : start + together] for start in range(0, len(values), together)]


def episodes_of(rows: Sequence[Sequence[int]], together: int) -> list[list[int]]:
    """Rows of runs as rows of the runs' episodes."""
    return [[run * together + place for run in row for place in range(together)] for row in rows]


def pack(groups: Sequence[Flat], rows: Sequence[Sequence[int]], alloc: Alloc | None = None) -> TensorDict:
    """A packed batch of flat (or packed) episodes, one copy into what `alloc` gives (default: private memory).

    `rows` are lists of episodes, numbered through all groups; what is in none of them is left out. Raises
    SchemaError when an optional key is in some groups only.
    """
    sources = [_arrays(group) for group in groups]
    keys, order = token_keys(sources), list(chain.from_iterable(rows))
    pieces = _pieces([source["lengths"].tolist() for source in sources])
    chosen = [pieces[episode] for episode in order]
    lengths = [stop - start for _, start, stop in chosen]
    sizes = _sizes(keys, sum(lengths), len(order), len(rows), _widths(keys, sources))
    if alloc is None:
        filled: Arrays = {key: np.empty(size, _NUMPY[key]) for key, size in sizes.items()}
        out = as_tensors(filled)
    else:
        out = alloc(_without_memory(sizes))
        filled = _arrays(out)
    spans = _merged(chosen)
    for key in keys:
        np.concatenate([sources[number][key][start:stop] for number, start, stop in spans], out=filled[key])
    numbers = np.array(order)
    for key in EPISODE_KEYS:
        filled[key][:] = np.concatenate([source[key] for source in sources])[numbers]
    _number(filled, lengths)
    ends = list(accumulate(lengths, initial=0))
    filled["row_offsets"][:] = [ends[count] for count in accumulate(map(len, rows), initial=0)]
    return out


def pad(groups: Sequence[Flat], pad_id: int = 0) -> TensorDict:
    """The episodes of flat or packed batches as one padded Batch `[E, T]`, in their order; a copy.

    Raises SchemaError as `pack` does.
    """
    sources = [_arrays(group) for group in groups]
    lengths = [source["lengths"].tolist() for source in sources]
    width, count = max(map(max, lengths)), sum(map(len, lengths))
    full = [min(of_group) == width for of_group in lengths]
    out: Arrays = {}
    keys = token_keys(sources)
    wide = _widths(keys, sources)
    for key in keys:
        fill = pad_id if key == "tokens" else OUTSIDE_MASK.get(key, 0)
        shape, dtype = (count, width, *wide.get(key, ())), _NUMPY[key]
        rows, row = np.empty(shape, dtype) if all(full) else np.full(shape, fill, dtype), 0
        for values, of_group, has_no_padding in zip(sources, lengths, full, strict=True):
            source, start = values[key], 0
            if has_no_padding:
                rows[row : row + len(of_group)].reshape(source.shape)[:] = source
                row += len(of_group)
                continue
            for length in of_group:
                rows[row, :length] = source[start : start + length]
                row, start = row + 1, start + length
        out[key] = rows
    out |= {key: np.concatenate([source[key] for source in sources]) for key in EPISODE_KEYS}
    return TensorDict({key: torch.from_numpy(value) for key, value in out.items()}, batch_size=[count])


def row_episodes(packed: TensorDict) -> list[list[int]]:
    """The episodes of each row of a packed batch."""
    episode_at = {start: number for number, start in enumerate(accumulate(packed["lengths"].tolist(), initial=0))}
    bounds = [episode_at[offset] for offset in packed["row_offsets"].tolist()]
    return [list(range(start, stop)) for start, stop in pairwise(bounds)]


def _pieces(lengths: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Of each episode of all groups: number of its group, its first token there, and where the next begins."""
    pieces = []
    for number, of_group in enumerate(lengths):
        start = 0
        for length in of_group:
            pieces.append((number, start, start + length))
            start += length
    return pieces


def _merged(pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours in memory as one piece: fewer and longer copies."""
    merged = [pieces[0]]
    for piece in pieces[1:]:
        number, start, stop = merged[-1]
        if piece[0] == number and piece[1] == stop:
            merged[-1] = (number, start, piece[2])
        else:
            merged.append(piece)
    return merged


def _number(out: Arrays, lengths: Sequence[int]) -> None:
    """Fills `position_ids` and `sequence_ids`."""
    count = np.arange(max(lengths))
    np.concatenate([count[:length] for length in lengths], out=out["position_ids"])
    out["sequence_ids"][:] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def _arrays(flat: Flat) -> Arrays:
    """The keys of the schema as numpy sees them, without a copy."""
    if isinstance(flat, dict):
        return flat
    return {key: array(cast(torch.Tensor, value)) for key, value in flat.items() if key in _DTYPES}


def _widths(keys: Sequence[str], sources: Sequence[Arrays]) -> dict[str, tuple[int, ...]]:
    """What one token has of the keys that hold more than a number."""
    widths = {}
    for key in WIDE_KEYS:
        if key in keys:
            check_widths(key, [source[key].shape[1:] for source in sources])
            widths[key] = sources[0][key].shape[1:]
    return widths


def _sizes(
    keys: Sequence[str], num_tokens: int, num_episodes: int, num_rows: int, wide: dict[str, tuple[int, ...]]
) -> dict[str, int | tuple[int, ...]]:
    """Of a packed batch."""
    sizes: dict[str, int | tuple[int, ...]] = {**dict.fromkeys(keys, num_tokens)}
    sizes |= dict.fromkeys(EPISODE_KEYS, num_episodes)
    sizes |= {key: (num_tokens, *shape) for key, shape in wide.items()}
    return sizes | {"position_ids": num_tokens, "sequence_ids": num_tokens, "row_offsets": num_rows + 1}


def _without_memory(sizes: dict[str, int | tuple[int, ...]]) -> TensorDict:
    """What `alloc` is to make."""
    empty = {key: torch.empty(size, dtype=_DTYPES[key], device="meta") for key, size in sizes.items()}
    return TensorDict(empty, batch_size=[])
