"""A Hugging Face causal LM as the policy: tokens and positions in, log-probs of the trained tokens out.

The log-probs are computed inside the module's forward, so that under FSDP2 the head's weight is gathered when
it is used, and only for the positions that are trained, so that `[B, T, V]` never exists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forge.errors import ConfigError
from forge.logprobs import token_logprobs


class Policy(nn.Module):
    """Wraps a Hugging Face causal LM. `temperature`, `top_p`, `top_k` are the sampler's."""

    def __init__(
        self, hf: Any, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, chunk_size: int = 1024
    ) -> None:
        super().__init__()
        self.hf = hf
        self._sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self._chunk_size = chunk_size
        self._softcap = getattr(hf.config, "final_logit_softcapping", None)

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies `[N]` (float32) of the N tokens where `mask` is True, row by row.

        `tokens`, `position_ids`, `mask` are `[R, L]`: a row is one right-padded episode, or several packed ones
        whose `position_ids` restart. No attention mask: padding lies to the right of what is causal.
        """
        # The last column predicts nothing that is trained. With a cache, transformers would let packed sequences
        # attend to each other in silence.
        hidden = self.hf.base_model(input_ids=tokens[:, :-1], position_ids=position_ids[:, :-1], use_cache=False)[0]
        rows, columns = mask.nonzero(as_tuple=True)
        head = self.hf.get_output_embeddings()
        return token_logprobs(
            hidden[rows, columns - 1],
            head.weight,
            tokens[rows, columns],
            bias=getattr(head, "bias", None),
            softcap=self._softcap,
            chunk_size=self._chunk_size,
            **self._sampling,
        )


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
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(str(model))
        for key, value in vars(config).items():
            if isinstance(value, float) and ("dropout" in key or "pdrop" in key):
                setattr(config, key, 0.0)
        hf: Any = AutoModelForCausalLM.from_pretrained(str(model), config=config, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {model} is no causal language model that transformers can load: {error}") from error
    return hf.to(device)


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


def shard(policy: Policy, mesh: Any, compute_dtype: torch.dtype) -> None:
    """FSDP2: each decoder layer its own unit, embeddings and head in the root; fp32 masters and reductions.

    Gradients are summed over ranks, not averaged: losses carry the global denominator already.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    block_names = set(policy.hf._no_split_modules or [])
    units = [m for m in policy.hf.modules() if type(m).__name__ in block_names]
    for module in [*units, policy]:
        fully_shard(module, mesh=mesh, mp_policy=precision)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
