"""The routes of tokens through a mixture of experts, as the generator recorded them, for a trainer to replay.

A token's routes are the ids of the k experts that each layer's router chose when the token was the model's input:
`[layers, k]`, int16. Unlike most of the schema they are read of prompts too, since what follows attends to them. The
last sampled token was no input yet and has none. -1 throughout a layer says that nothing was recorded: a trainer's
router chooses for itself there. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from forge.errors import SchemaError

NOT_ROUTED = -1


def continued(first: torch.Tensor | None, later: torch.Tensor | None) -> torch.Tensor | None:
    """The routes of a completion from its first token on, `first` `[n, layers, k]` of them before an interruption.

    A request that goes on computes what came before anew, `later` `[m, layers, k]`; what was sampled then was sampled
    by the first routes.
    """
    if first is None or later is None:
        return later if first is None else first
    return torch.cat([first, later[len(first) :]])


def padded_routes(routes: Sequence[torch.Tensor | None], lengths: Sequence[int], width: int) -> torch.Tensor | None:
    """Of episodes of `lengths` tokens, prompts included, as `[G, width, layers, k]`; None if none has any.

    Raises SchemaError when an episode has routes of more tokens than it has, or others than its neighbours.
    """
    shapes = {tuple(one.shape[1:]) for one in routes if one is not None}
    if not shapes:
        return None
    counts = [0 if one is None else len(one) for one in routes]
    if len(shapes) > 1 or any(count > length for count, length in zip(counts, lengths, strict=True)):
        raise SchemaError(
            f"routes of {counts} tokens in shapes {sorted(shapes)}, the episodes have {list(lengths)} tokens; at most "
            "one [layers, k] a token, the same everywhere"
        )
    out = torch.full((len(counts), width, *shapes.pop()), NOT_ROUTED, dtype=torch.int16)
    for row, one, count in zip(out, routes, counts, strict=True):
        if one is not None:
            row[:count] = one
    return out


def check_routes(routes: NDArray[Any]) -> None:
    """Raises SchemaError when a layer's choice `[..., k]` is recorded in part."""
    missing = routes < 0
    broken = missing.any(axis=-1) != missing.all(axis=-1)
    if broken.any():
        raise SchemaError(
            f"routed_experts holds {routes[broken][0].tolist()} for one token and layer; it is k experts, or -1 "
            "throughout where nothing was recorded"
        )
