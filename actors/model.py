"""A Hugging Face causal LM as the policy: tokens and positions in, log-probs of the trained tokens out.

The log-probs are computed inside the module's forward, so that under FSDP2 the head's weight is gathered when
it is used, and only for the positions that are trained, so that `[B, T, V]` never exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from actors.attention import LENGTHS, NAME, sequence_lengths, use_packed_attention
from actors.router_replay import RouterReplay
from forge.errors import ConfigError
from forge.logprobs import token_logprobs


class Policy(nn.Module):
    """Wraps a Hugging Face causal LM. `temperature`, `top_p`, `top_k` are the sampler's."""

    def __init__(
        self,
        hf: Any,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        chunk_size: int = 1024,
        replay_routes: bool = False,
    ) -> None:
        """`replay_routes`: for a mixture of experts whose passes are given `routes`."""
        super().__init__()
        self.hf = hf
        self._replay = RouterReplay(hf) if replay_routes else None
        self._sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self._chunk_size = chunk_size
        self._softcap = getattr(hf.config, "final_logit_softcapping", None)

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor,
        kept: torch.Tensor | None = None,
        routes: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies `[N]` (float32) of the N tokens where `mask` is True, row by row.

        `tokens`, `position_ids`, `mask` are `[R, L]`: a row is one right-padded episode, or several packed ones
        whose `position_ids` restart. No attention mask: padding lies to the right of what is causal. `kept` `[N, K]`
        are the recorded supports, which stand in for top-p and top-k; `routes` `[R, L, layers, k]` are the recorded
        experts, which stand in for the routers' choice.
        """
        if self._replay is not None:
            self._replay.use(None if routes is None else routes[:, :-1])
        # The last column predicts nothing that is trained.
        hidden = hidden_states(self.hf, tokens[:, :-1], position_ids[:, :-1])
        rows, columns = mask.nonzero(as_tuple=True)
        head = self.hf.get_output_embeddings()
        weight, bias = head.weight, getattr(head, "bias", None)
        return token_logprobs(
            hidden[rows, columns - 1],
            whole(weight),
            tokens[rows, columns],
            bias=bias if bias is None else whole(bias),
            softcap=self._softcap,
            chunk_size=self._chunk_size,
            kept=kept,
            **self._sampling,
        )


def hidden_states(hf: Any, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """The last hidden states `[R, L, D]` of rows that each hold one right-padded sequence or several packed ones."""
    lengths = sequence_lengths(position_ids) if hf.config._attn_implementation == NAME else None
    packed = {} if lengths is None else {LENGTHS: lengths}
    # With a cache, transformers' own attention would let packed sequences attend to each other in silence.
    hidden: torch.Tensor = hf.base_model(input_ids=tokens, position_ids=position_ids, use_cache=False, **packed)[0]
    return hidden


def whole(parameter: torch.Tensor, *, partial_gradients: bool = False) -> torch.Tensor:
    """A parameter that every tensor-parallel rank has whole, as a plain tensor; a plain one as it is.

    `partial_gradients` where the ranks compute different parts of its gradient, which are added up then.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial() if partial_gradients else Replicate()])


def pick_dtype(name: str, device: str) -> torch.dtype:
    """The compute dtype for "auto", "float32" or "bfloat16".

    "auto" is bfloat16 on GPUs and on CPUs with bf16 matrix units, else float32: without them a bf16 product is
    a hundred times slower.
    """
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    cpu = torch.cpu.get_capabilities()
    fast = device == "cuda" or cpu.get("avx512_bf16") or cpu.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32


def load_hf(model: str | Path, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Loads a causal LM from a folder or the hub. Raises ConfigError naming the model when that fails.

    Dropout is off: the generator samples without it, and log-probs must be those of the same distribution.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = without_dropout(load_config(model))
    with _named(model):
        hf: Any = AutoModelForCausalLM.from_pretrained(str(model), config=config, dtype=dtype)
    hf.to(device)
    use_packed_attention(hf)
    return hf


def without_dropout(config: Any) -> Any:
    """A Hugging Face config, changed in place."""
    for key, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in key or "pdrop" in key):
            setattr(config, key, 0.0)
    return config


def load_config(model: str | Path, option: str = "--model") -> Any:
    """The Hugging Face config of a folder or a hub name. Raises ConfigError naming the model when there is none."""
    from transformers import AutoConfig

    with _named(model, option):
        return AutoConfig.from_pretrained(str(model))


@contextmanager
def _named(model: str | Path, option: str = "--model") -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        why = f"is no causal language model that transformers can load: {error}"
        raise ConfigError(f"{option} {model} {why}") from error


@torch.no_grad()
def check_head(hf: Any) -> None:
    """Raises ConfigError when the model's logits are more than its head on its hidden states (and a soft cap).

    Some architectures scale their logits; log-probs that leave it out would be wrong without any other sign.
    """
    tokens = torch.arange(1, 9, device=hf.device)[None] % hf.config.vocab_size
    hf.eval()
    head = hf.get_output_embeddings()
    hidden = hf.base_model(input_ids=tokens, use_cache=False)[0]
    ours = nn.functional.linear(hidden, head.weight, getattr(head, "bias", None)).float()
    if cap := getattr(hf.config, "final_logit_softcapping", None):
        ours = cap * torch.tanh(ours / cap)
    gap = float((ours - hf(input_ids=tokens, use_cache=False).logits.float()).abs().max())
    if not gap < 0.1:
        raise ConfigError(
            f"{type(hf).__name__} computes its logits in a way that the trainer does not (they differ by {gap:.3g}); "
            "its log-probs would be wrong, use a model of another architecture"
        )


def freeze_except(hf: nn.Module, patterns: Sequence[str]) -> None:
    """Leaves gradients on for parameters whose name matches one of `patterns` (regular expressions, from the start).

    No pattern leaves all on. Raises ConfigError for a pattern that matches nothing.
    """
    if not patterns:
        return
    names = [name for name, _ in hf.named_parameters()]
    for pattern in patterns:
        if not any(re.match(pattern, name) for name in names):
            raise ConfigError(
                f"trainer.trainable: {pattern!r} matches none of {len(names)} parameters, such as {names[0]}"
            )
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(any(re.match(pattern, name) for pattern in patterns))
