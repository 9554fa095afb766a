"""The supports of sampled tokens: which tokens top-k and top-p left to sample from, as the generator recorded them.

One token's support is a row of K ids, int32, the likeliest first, and -1 behind them. A row of -1 alone says that
it was not recorded, since it has more than K tokens or the engine before kept none: a trainer computes it anew then.
A row that was recorded is whole, and has the sampled token. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forge.errors import SchemaError

NOT_KEPT = -1


def whole_supports(ids: NDArray[Any], logprobs: NDArray[Any]) -> torch.Tensor:
    """Supports `[n, K]` of tokens whose K + 1 likeliest `ids` have these `logprobs`, descending, -inf outside.

    Of a support that fills all of them nobody knows where it ends: that row is left out.
    """
    inside = np.isfinite(logprobs)
    inside &= ~inside[:, -1:]
    return torch.from_numpy(np.where(inside, ids, NOT_KEPT)[:, :-1].astype(np.int32))


def fitted(kept: torch.Tensor | None, count: int, size: int) -> torch.Tensor:
    """The supports of `count` tokens as `[count, size]`: what was not recorded, or is larger, is left out."""
    if kept is None:
        return torch.full((count, size), NOT_KEPT, dtype=torch.int32)
    if kept.shape[1] > size:
        return torch.where(kept[:, size : size + 1] == NOT_KEPT, kept[:, :size], NOT_KEPT)
    return torch.nn.functional.pad(kept, (0, size - kept.shape[1]), value=NOT_KEPT)


def joined(parts: Sequence[tuple[torch.Tensor | None, int]]) -> torch.Tensor | None:
    """The supports of parts of a completion, each with its number of tokens, one behind the other.

    In the width of the widest; None where none of them has any.
    """
    widths = [kept.shape[1] for kept, _ in parts if kept is not None]
    if not widths:
        return None
    return torch.cat([fitted(kept, count, max(widths)) for kept, count in parts])


def padded_supports(
    kept: Sequence[torch.Tensor | None], counts: torch.Tensor, start: int, width: int
) -> torch.Tensor | None:
    """Of `counts` completion tokens each, behind prompts of `start` tokens, as `[G, width, K]`; None if of none.

    Raises SchemaError when a completion and its supports differ in length.
    """
    widths = [one.shape[1] for one in kept if one is not None]
    if not widths:
        return None
    lengths = [count if one is None else one.shape[0] for one, count in zip(kept, counts.tolist(), strict=False)]
    if lengths != counts.tolist():
        raise SchemaError(f"kept has lengths {lengths}, completions {counts.tolist()}; one row a sampled token")
    out = torch.full((len(lengths), width, max(widths)), NOT_KEPT, dtype=torch.int32)
    for row, one, count in zip(out, kept, lengths, strict=True):
        row[start : start + count] = fitted(one, count, max(widths))
    return out


def check_supports(kept: NDArray[Any], tokens: NDArray[Any], mask: NDArray[Any]) -> None:
    """Raises SchemaError when a support `[..., K]` that was recorded lacks the token that was sampled from it."""
    rows, sampled = kept[mask], tokens[mask]
    lacking = (rows != NOT_KEPT).any(axis=-1) & ~(rows == sampled[:, None]).any(axis=-1)
    if lacking.any():
        first = int(lacking.argmax())
        raise SchemaError(
            f"kept_tokens of a trained token {sampled[first]} are {rows[first].tolist()}, without it; a support holds "
            "the token that was sampled from it, or is -1 throughout"
        )
