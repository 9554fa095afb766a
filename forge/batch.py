"""The TensorDict schema that every room speaks.

Legend: G episodes of one group (one prompt), B episodes of one batch, T tokens of the longest
episode (prompt + completion), right-padded; E episodes laid end to end without padding, N their tokens.

    key                padded   packed   dtype    meaning
    tokens             [., T]   [N]      int64    prompt, then completion, then padding
    loss_mask          [., T]   [N]      bool     True where the policy itself produced the token
    behavior_logprobs  [., T]   [N]      float32  log-prob under the distribution that was sampled from; 0 elsewhere
    token_versions     [., T]   [N]      int64    policy version that sampled tokens[., t]; -1 elsewhere
    lengths            [.]      [E]      int64    prompt + completion tokens
    rewards            [.]      [E]      float32  total reward of the episode
    advantages         [.]      [E]      float32  group advantage of the episode
    group_id           [.]      [E]      int64    the reservation that made the group; equal inside a group
    ref_logprobs       [., T]   [N]      float32  optional: log-prob under the frozen reference; 0 elsewhere
    token_rewards      [., T]   [N]      float32  optional: what a token or a turn earned of `rewards`; 0 elsewhere
    values             [., T]   [N]      float32  optional: a critic's value of the state before the token; 0 elsewhere
    kept_tokens        [.,T,K]  [N, K]   int32    optional: the tokens that top-k and top-p left to sample this one
                                                  from, -1 behind them; all -1: not recorded (`forge/supports.py`)
    routed_experts     [.,T,L,k] [N,L,k] int16    optional: the experts that each layer chose for this token, prompts
                                                  included; all -1: not recorded (`forge/routes.py`)
    position_ids                [N]      int64    place of the token in its episode, from 0
    sequence_ids                [N]      int32    number of the episode, from 0
    row_offsets                 [R + 1]  int64    where the rows begin, tokens; the last is N

Two forms. A **padded** Group `[G]` or Batch `[B]` is what rollouts make and users compose: `check_batch`. A
**packed** batch, of batch size `[]`, is what the replay hands to a trainer's rank: `check_packed`. Its rows are
what a model sees at once: whole episodes, at most a budget of tokens, one slice of each key. Without the last
three keys it is the flat form, in which the replay keeps a group. `forge/packing.py` turns one into the other.

`x_logprobs[b, t]` belongs to `tokens[b, t]`: position 0 can never be trained. What stands outside `loss_mask` is
never read, but for `routed_experts`. Versions stay int64 whatever else is cast (bfloat16 turns version 257 into 256).
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from forge.errors import SchemaError
from forge.routes import check_routes, padded_routes
from forge.supports import check_supports, padded_supports

Arrays = dict[str, NDArray[Any]]

TOKEN_KEYS: dict[str, torch.dtype] = {
    "tokens": torch.int64,
    "loss_mask": torch.bool,
    "behavior_logprobs": torch.float32,
    "token_versions": torch.int64,
}
EPISODE_KEYS: dict[str, torch.dtype] = {
    "lengths": torch.int64,
    "rewards": torch.float32,
    "advantages": torch.float32,
    "group_id": torch.int64,
}
OPTIONAL_TOKEN_KEYS: dict[str, torch.dtype] = {
    "ref_logprobs": torch.float32,
    "token_rewards": torch.float32,
    "values": torch.float32,
    "kept_tokens": torch.int32,
    "routed_experts": torch.int16,
}
WIDE_KEYS: dict[str, tuple[str, ...]] = {"kept_tokens": ("K",), "routed_experts": ("L", "k")}
"""Token keys that hold more than a number a token, and the dimensions that they have behind those of `tokens`."""
INPUT_KEYS = frozenset({"routed_experts"})
"""Token keys that the model's forward pass reads, of prompts too."""
PACKED_KEYS: dict[str, torch.dtype] = {
    "position_ids": torch.int64,
    "sequence_ids": torch.int32,
    "row_offsets": torch.int64,
}
_PADDED = TOKEN_KEYS | EPISODE_KEYS | OPTIONAL_TOKEN_KEYS
_PACKED = _PADDED | PACKED_KEYS
OUTSIDE_MASK: dict[str, float] = {
    "behavior_logprobs": 0.0,
    "token_versions": -1,
    **dict.fromkeys(OPTIONAL_TOKEN_KEYS, 0.0),
    "kept_tokens": -1,
    "routed_experts": -1,
}
"""What stands where nothing is trained; of what the model itself reads, where there is no token."""
_NUMBERS = ("behavior_logprobs", *(key for key in OPTIONAL_TOKEN_KEYS if key not in WIDE_KEYS))


def make_group(
    prompt: Sequence[int],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    versions: Sequence[Sequence[int]],
    *,
    group_id: int,
    pad_id: int = 0,
    kept: Sequence[torch.Tensor | None] = (),
    routes: Sequence[torch.Tensor | None] = (),
) -> TensorDict:
    """One prompt and its G completions as a Group `[G]`, rewards and advantages zero.

    `logprobs[g]` and `versions[g]` run along `completions[g]`, and so does `kept[g]` `[n, K]` where the supports were
    recorded; `routes[g]` `[m, layers, k]` run along prompt and completion, as far as they were recorded. Raises
    SchemaError when their lengths differ, the prompt is empty or there is no completion.
    """
    if not prompt:
        raise SchemaError("the prompt has 0 tokens; a completion needs at least one token before it")
    if not completions:
        raise SchemaError("the group has 0 completions; a group holds at least one episode")
    for name, rows in (("logprobs", logprobs), ("versions", versions)):
        if [len(r) for r in rows] != [len(c) for c in completions]:
            raise SchemaError(
                f"{name} has lengths {[len(r) for r in rows]}, completions {[len(c) for c in completions]}; "
                "each sampled token needs exactly one"
            )
    start, width = len(prompt), len(prompt) + max(len(c) for c in completions)
    shape = (len(completions), width)
    tokens = torch.full(shape, pad_id, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    behavior = torch.zeros(shape, dtype=torch.float32)
    token_versions = torch.full(shape, -1, dtype=torch.int64)
    lengths = torch.tensor([start + len(c) for c in completions], dtype=torch.int64)
    tokens[:, :start] = torch.tensor(prompt, dtype=torch.int64)
    for g, completion in enumerate(completions):
        span = slice(start, start + len(completion))
        tokens[g, span] = torch.tensor(completion, dtype=torch.int64)
        mask[g, span] = True
        behavior[g, span] = torch.tensor(logprobs[g], dtype=torch.float32)
        token_versions[g, span] = torch.tensor(versions[g], dtype=torch.int64)
    zeros = torch.zeros(len(completions), dtype=torch.float32)
    wide = {
        "kept_tokens": padded_supports(kept, lengths - start, start, width),
        "routed_experts": padded_routes(routes, lengths.tolist(), width) if routes else None,
    }
    return TensorDict(
        {
            **{key: value for key, value in wide.items() if value is not None},
            "tokens": tokens,
            "loss_mask": mask,
            "behavior_logprobs": behavior,
            "token_versions": token_versions,
            "lengths": lengths,
            "rewards": zeros,
            "advantages": zeros.clone(),
            "group_id": torch.full((len(completions),), group_id, dtype=torch.int64),
        },
        batch_size=[len(completions)],
    )


def check_batch(td: TensorDict) -> None:
    """Raises SchemaError naming the first key by which a Group or a padded Batch breaks the schema."""
    checked_arrays(td)


def checked_arrays(td: TensorDict) -> Arrays:
    """The keys of a Group or padded Batch without a copy. Raises SchemaError as `check_batch` does."""
    if len(td.batch_size) != 1:
        raise SchemaError(f"batch_size is {list(td.batch_size)}, expected one dimension [B]")
    values = _values(td, _PADDED)
    tokens = values["tokens"].shape
    if len(tokens) != 2 or tokens[1] < 1:
        raise SchemaError(f"tokens has shape {list(tokens)}, expected [B, T] with T >= 1")
    _check_shapes(values, tokens, td.batch_size)
    arrays = {key: array(value) for key, value in values.items()}
    mask, lengths, width = arrays["loss_mask"], arrays["lengths"].tolist(), tokens[1]
    shortest, longest = min(lengths, default=width), max(lengths, default=width)
    if np.count_nonzero(mask[:, 0]):
        raise SchemaError("loss_mask is set at position 0; the first token has no log-prob, start at 1")
    if not 1 <= shortest <= longest <= width:
        raise SchemaError(f"lengths must lie in [1, {width}], got {lengths}")
    if shortest < width and np.count_nonzero(mask & (np.arange(width) >= arrays["lengths"][:, None])):
        raise SchemaError("loss_mask is set beyond lengths; padding is never trained")
    _check_values(arrays)
    return arrays


def check_packed(td: TensorDict) -> None:
    """Raises SchemaError naming the first key by which a packed batch breaks the schema."""
    if len(td.batch_size) != 0:
        raise SchemaError(f"batch_size is {list(td.batch_size)}, a packed batch has none: []")
    values = _values(td, _PACKED)
    tokens, episodes = values["tokens"].shape, values["lengths"].shape
    if len(tokens) != 1 or len(episodes) != 1:
        raise SchemaError(f"tokens has shape {list(tokens)} and lengths {list(episodes)}, expected [N] and [E]")
    _check_shapes(values, tokens, episodes)
    arrays = {key: array(value) for key, value in values.items()}
    lengths, offsets, total = arrays["lengths"], arrays["row_offsets"], tokens[0]
    if (lengths < 1).any() or lengths.sum() != total:
        raise SchemaError(f"lengths {lengths.tolist()} must be >= 1 and add up to the {total} tokens")
    starts = lengths.cumsum() - lengths
    if arrays["loss_mask"][starts].any():
        raise SchemaError("loss_mask is set at the first token of an episode, which has no log-prob; start at 1")
    if not np.array_equal(arrays["position_ids"], np.arange(total) - np.repeat(starts, lengths)):
        raise SchemaError("position_ids must count from 0 in each episode")
    if not np.array_equal(arrays["sequence_ids"], np.repeat(np.arange(len(lengths)), lengths)):
        raise SchemaError("sequence_ids must number the episodes from 0, one number a token")
    if offsets[:1].tolist() != [0] or offsets[-1:].tolist() != [total] or (np.diff(offsets) < 1).any():
        raise SchemaError(f"row_offsets must rise from 0 to {total}, got {offsets.tolist()}")
    if not {*starts.tolist(), total}.issuperset(offsets.tolist()):
        raise SchemaError(f"row_offsets must lie between episodes, got {offsets.tolist()}; a row holds whole episodes")
    _check_values(arrays)


def is_packed(td: TensorDict) -> bool:
    """Whether `td` is of the packed or the flat form rather than padded."""
    return td.batch_dims == 0


def array(value: torch.Tensor) -> NDArray[Any]:
    """`value` as numpy sees it, on the CPU without a copy: numpy's calls cost a third of torch's on small tensors."""
    result: NDArray[Any] = value.numpy(force=True)
    return result


def _values(td: TensorDict, wanted: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = dict(td.items())
    values: dict[str, torch.Tensor] = {}
    for key, dtype in wanted.items():
        value = found.get(key)
        if value is None:
            if key in OPTIONAL_TOKEN_KEYS:
                continue
            raise SchemaError(f"{key} is missing; a batch holds {sorted(wanted.keys() - OPTIONAL_TOKEN_KEYS)}")
        if value.dtype != dtype:
            raise SchemaError(f"{key} has dtype {value.dtype}, expected {dtype}; cast it before hand-over")
        values[key] = value
    return values


def _check_shapes(values: Mapping[str, torch.Tensor], tokens: torch.Size, episodes: torch.Size) -> None:
    for key, value in values.items():
        wanted, wide = episodes if key in EPISODE_KEYS else tokens, WIDE_KEYS.get(key, ())
        shape = value.shape[: value.dim() - len(wide)]
        if shape != wanted and key != "row_offsets":
            raise SchemaError(f"{key} has shape {list(value.shape)}, expected {[*wanted, *wide]}")


def _check_values(arrays: Arrays) -> None:
    mask = arrays["loss_mask"]
    if np.count_nonzero((arrays["token_versions"] < 0) & mask):
        raise SchemaError("token_versions is negative under loss_mask; a sampled token carries its version")
    for key in ("rewards", "advantages"):
        _check_finite(key, arrays[key].tolist())
    for key in _NUMBERS:
        if key in arrays and np.count_nonzero(mask > np.isfinite(arrays[key])):
            _check_finite(f"{key} under loss_mask", arrays[key][mask].tolist())
    if "kept_tokens" in arrays:
        check_supports(arrays["kept_tokens"], arrays["tokens"], mask)
    if "routed_experts" in arrays:
        check_routes(arrays["routed_experts"])


def _check_finite(name: str, values: Sequence[float]) -> None:
    if not all(map(math.isfinite, values)):
        bad = next(value for value in values if not math.isfinite(value))
        raise SchemaError(f"{name} holds {bad}; every number that is trained on must be finite")


def collate(groups: Sequence[TensorDict], pad_id: int = 0) -> TensorDict:
    """Groups `[G_i]` of any width to one Batch `[sum G_i, max T]`, right-padded; a copy.

    Takes the keys of the schema and no others. Raises SchemaError when there is no group, when an optional key is in
    some groups only, or when they have it in several widths.
    """
    if not groups:
        raise SchemaError("collate got 0 groups; a batch needs at least one")
    width = max(int(g["lengths"].max()) for g in groups)
    out: dict[str, torch.Tensor] = {}
    for key in token_keys(groups):
        fill = pad_id if key == "tokens" else OUTSIDE_MASK.get(key, 0)
        check_widths(key, [g[key].shape[2:] for g in groups])
        out[key] = torch.cat([_pad(g[key], width, fill) for g in groups])
    for key in EPISODE_KEYS:
        out[key] = torch.cat([g[key] for g in groups])
    return TensorDict(out, batch_size=[out["lengths"].shape[0]])


def token_keys(groups: Sequence[Container[str]]) -> list[str]:
    """The per-token keys of `groups`. Raises SchemaError when an optional one is in some groups only."""
    return [*TOKEN_KEYS, *(key for key in OPTIONAL_TOKEN_KEYS if _in_all(groups, key))]


def _in_all(groups: Sequence[Container[str]], key: str) -> bool:
    count = sum(key in g for g in groups)
    if 0 < count < len(groups):
        raise SchemaError(f"{key} is in {count} of {len(groups)} groups; a batch has it in all or in none")
    return count > 0


def check_widths(key: str, shapes: Sequence[Sequence[int]]) -> None:
    """Raises SchemaError when the groups of a batch have `key` in several `shapes` of one token."""
    if key in WIDE_KEYS and len(several := {tuple(shape) for shape in shapes}) > 1:
        raise SchemaError(f"{key} has shapes {sorted(several)} of a token in one batch; all groups need the same")


def _pad(value: torch.Tensor, width: int, fill: float) -> torch.Tensor:
    if value.shape[1] >= width:
        return value[:, :width]
    behind = (0, 0) * (value.dim() - 2)
    return torch.nn.functional.pad(value, (*behind, 0, width - value.shape[1]), value=fill)


def oldest_version(td: TensorDict) -> int:
    """The oldest policy version that sampled a token of `td`; -1 when no token is trained."""
    versions = td["token_versions"][td["loss_mask"]]
    return int(versions.min()) if versions.numel() else -1
