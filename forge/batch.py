"""The TensorDict schema that every room speaks.

Legend: G episodes of one group (one prompt), B episodes of one batch, T tokens of the longest
episode (prompt + completion), right-padded.

    key                shape    dtype    meaning
    tokens             [., T]   int64    prompt, then completion, then padding
    loss_mask          [., T]   bool     True where the policy itself produced the token
    behavior_logprobs  [., T]   float32  log-prob under the distribution that was sampled from; 0 elsewhere
    token_versions     [., T]   int64    policy version that sampled tokens[., t]; -1 elsewhere
    lengths            [.]      int64    prompt + completion tokens
    rewards            [.]      float32  total reward of the episode
    advantages         [.]      float32  group advantage of the episode
    group_id           [.]      int64    the reservation that made the group; equal inside a group
    ref_logprobs       [., T]   float32  optional: log-prob under the frozen reference; 0 elsewhere

`x_logprobs[b, t]` belongs to `tokens[b, t]`: position 0 can never be trained. What stands outside
`loss_mask` is never read. Versions stay int64 whatever else is cast (bfloat16 turns version 257 into 256).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from forge.errors import SchemaError

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
OPTIONAL_TOKEN_KEYS: dict[str, torch.dtype] = {"ref_logprobs": torch.float32}
_PADDING: dict[str, float] = {
    "loss_mask": False,
    "behavior_logprobs": 0.0,
    "token_versions": -1,
    "ref_logprobs": 0.0,
}


def make_group(
    prompt: Sequence[int],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    versions: Sequence[Sequence[int]],
    *,
    group_id: int,
    pad_id: int = 0,
) -> TensorDict:
    """One prompt and its G completions as a Group `[G]`, rewards and advantages zero.

    `logprobs[g]` and `versions[g]` run along `completions[g]`. Raises SchemaError when their
    lengths differ, the prompt is empty or there is no completion.
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
    return TensorDict(
        {
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
    """Raises SchemaError naming the first key that breaks the schema."""
    if len(td.batch_size) != 1:
        raise SchemaError(f"batch_size is {list(td.batch_size)}, expected one dimension [B]")
    _check_layout(td)
    mask, lengths, width = td["loss_mask"], td["lengths"], td["tokens"].shape[1]
    if bool(mask[:, 0].any()):
        raise SchemaError("loss_mask is set at position 0; the first token has no log-prob, start at 1")
    if bool((lengths > width).any()) or bool((lengths < 1).any()):
        raise SchemaError(f"lengths must lie in [1, {width}], got {lengths.tolist()}")
    beyond = torch.arange(width, device=mask.device) >= lengths[:, None]
    if bool((mask & beyond).any()):
        raise SchemaError("loss_mask is set beyond lengths; padding is never trained")
    if bool((td["token_versions"][mask] < 0).any()):
        raise SchemaError("token_versions is negative under loss_mask; a sampled token carries its version")
    for key in ("rewards", "advantages"):
        _check_finite(key, td[key])
    for key in ("behavior_logprobs", *OPTIONAL_TOKEN_KEYS):
        if key in td:
            _check_finite(f"{key} under loss_mask", td[key][mask])


def _check_layout(td: TensorDict) -> None:
    for key, dtype in {**TOKEN_KEYS, **EPISODE_KEYS, **OPTIONAL_TOKEN_KEYS}.items():
        if key not in td:
            if key in OPTIONAL_TOKEN_KEYS:
                continue
            raise SchemaError(f"{key} is missing; a batch holds {sorted(TOKEN_KEYS | EPISODE_KEYS)}")
        value = td[key]
        if value.dtype != dtype:
            raise SchemaError(f"{key} has dtype {value.dtype}, expected {dtype}; cast it before hand-over")
        shape = list(value.shape)
        if key == "tokens" and (len(shape) != 2 or shape[1] < 1):
            raise SchemaError(f"tokens has shape {shape}, expected [B, T] with T >= 1")
        wanted = list(td.batch_size if key in EPISODE_KEYS else td["tokens"].shape)
        if shape != wanted:
            raise SchemaError(f"{key} has shape {shape}, expected {wanted}")


def _check_finite(name: str, values: torch.Tensor) -> None:
    bad = values[~values.isfinite()]
    if bad.numel():
        raise SchemaError(f"{name} holds {bad[0].item()}; every number that is trained on must be finite")


def collate(groups: Sequence[TensorDict], pad_id: int = 0) -> TensorDict:
    """Groups `[G_i]` of any width to one Batch `[sum G_i, max T]`, right-padded; a copy.

    Takes the keys of the schema and no others. Raises SchemaError when there is no group, or when an
    optional key is in some groups only.
    """
    if not groups:
        raise SchemaError("collate got 0 groups; a batch needs at least one")
    width = max(int(g["lengths"].max()) for g in groups)
    out: dict[str, torch.Tensor] = {}
    for key in [*TOKEN_KEYS, *(k for k in OPTIONAL_TOKEN_KEYS if _in_all(groups, k))]:
        fill = pad_id if key == "tokens" else _PADDING[key]
        out[key] = torch.cat([_pad(g[key], width, fill) for g in groups])
    for key in EPISODE_KEYS:
        out[key] = torch.cat([g[key] for g in groups])
    return TensorDict(out, batch_size=[out["lengths"].shape[0]])


def _in_all(groups: Sequence[TensorDict], key: str) -> bool:
    count = sum(key in g for g in groups)
    if 0 < count < len(groups):
        raise SchemaError(f"{key} is in {count} of {len(groups)} groups; a batch has it in all or in none")
    return count > 0


def _pad(value: torch.Tensor, width: int, fill: float) -> torch.Tensor:
    if value.shape[1] >= width:
        return value[:, :width]
    return torch.nn.functional.pad(value, (0, width - value.shape[1]), value=fill)


def oldest_version(td: TensorDict) -> int:
    """The oldest policy version that sampled a token of `td`; -1 when no token is trained."""
    versions = td["token_versions"][td["loss_mask"]]
    return int(versions.min()) if versions.numel() else -1
