"""Attention inside each sequence of a row, and never across: what packing is for.

    row:  [ a a a a | b b | c c c ]     work: 4² + 2² + 3² instead of 9²

transformers' own way to keep packed sequences apart is a mask over the whole row, which computes what it then throws
away. Here each sequence is a call of its own, without a mask, so the kernels for causal attention serve it; on GPUs in
half precision all sequences are one call of flash attention for ragged rows. Registered with transformers under NAME.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

NAME = "forge_packed"
LENGTHS = "sequence_lengths"
"""The keyword by which a model's forward passes the lengths of a row's sequences to its attention layers."""


def sequence_lengths(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Lengths `[n]` of the sequences of a packed row, `[1, L]` positions that restart; None for rows of one sequence.

    int64 on the CPU, and no tuple: compiled layers would be made anew for each number of sequences.
    """
    if position_ids.shape[0] != 1:
        return None
    starts = (position_ids[0] == 0).nonzero()[:, 0].cpu()
    if len(starts) < 2:
        return None
    return torch.diff(starts, append=torch.tensor([position_ids.shape[1]]))


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention: `query` `[R, H, L, D]`, `key` and `value` `[R, H / groups, L, D]` -> `[R, L, H, D]`.

    `others` holds `sequence_lengths` for a packed row; padding lies to the right of what is causal and needs no mask.
    """
    if (lengths := others.get(LENGTHS)) is None:
        out = _causal(query, key, value, scaling, sliding_window, softcap).transpose(1, 2)
    else:
        out = _packed(query, key, value, lengths, scaling, sliding_window, softcap)
    return out.contiguous(), None


@torch.compiler.disable
def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Not compiled with the layer around it: a graph would hold as many calls as the row has sequences."""
    if _has_ragged_kernel(query, softcap):
        return _ragged(query, key, value, lengths, scaling, window)
    parts = zip(*(x.split(lengths.tolist(), dim=2) for x in (query, key, value)), strict=True)
    return torch.cat([_causal(q, k, v, scaling, window, softcap) for q, k, v in parts], dim=2).transpose(1, 2)


def _causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    if softcap is not None:
        return _softcapped(query, key, value, scaling, window, softcap)
    if window is None or query.shape[2] <= window:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    mask = _band(query.shape[2], window, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def _softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float,
) -> torch.Tensor:
    """Written out: no kernel of torch bounds scores by `softcap * tanh(score / softcap)`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    allowed = _band(query.shape[2], window or query.shape[2], query.device)
    weights = scores.float().masked_fill(~allowed, -torch.inf).softmax(dim=-1)
    return weights.to(value.dtype) @ value


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """bool `[L, L]`: a token sees itself and the `window - 1` before it."""
    full = torch.ones((length, length), dtype=torch.bool, device=device)
    return full.tril() & full.triu(1 - window)


def _has_ragged_kernel(query: torch.Tensor, softcap: float | None) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and softcap is None


def _ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    bounds = F.pad(lengths.cumsum(0), (1, 0)).to(query.device, torch.int32, non_blocking=True)
    longest = int(lengths.max())
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out: Any = varlen_attn(
        *(q, k, v, bounds, bounds, longest, longest),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[None]


AttentionInterface.register(NAME, attention)


def use_packed_attention(hf: Any) -> bool:
    """Has `hf` use the attention above; False, and no change, where it computes something else for this model.

    Compared on two short sequences, packed against each alone by the model's own attention. Attention in chunks is
    told by its configuration, since short sequences do not show it.
    """
    own = hf.config._attn_implementation
    if getattr(hf.config, "attention_chunk_size", None) is not None:
        return False
    with torch.no_grad():
        alone = [_hidden(hf, tokens) for tokens in _probes(hf)]
        hf.set_attn_implementation(NAME)
        try:
            packed = _hidden(hf, torch.cat(_probes(hf), dim=1), [probe.shape[1] for probe in _probes(hf)])
        except (TypeError, ValueError, KeyError, RuntimeError):  # a layer that does not take what it is given
            packed = torch.full_like(torch.cat(alone, dim=1), torch.inf)
    expected = torch.cat(alone, dim=1)
    if float((packed - expected).abs().max()) < 1e-2 * float(expected.abs().max()):
        return True
    hf.set_attn_implementation(own)
    return False


def _probes(hf: Any) -> list[torch.Tensor]:
    return [
        torch.arange(start, start + n, device=hf.device)[None] % hf.config.vocab_size for start, n in ((1, 9), (3, 5))
    ]


def _hidden(hf: Any, tokens: torch.Tensor, lengths: list[int] | None = None) -> torch.Tensor:
    sizes = lengths or [tokens.shape[1]]
    positions = torch.cat([torch.arange(n, device=tokens.device) for n in sizes])[None]
    extra = {LENGTHS: torch.tensor(sizes)} if lengths else {}
    hidden: torch.Tensor = hf.base_model(input_ids=tokens, position_ids=positions, use_cache=False, **extra)[0]
    return hidden.float()
