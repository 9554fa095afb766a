"""Models of a few kilobytes that differ from `nano` where weight sync could care."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from apps.grpo.models import resolve_model


def make(name: str, folder: Path) -> str:
    """The folder of `nano`, or of a model that is written to `folder`: "untied", "biased", "experts"."""
    nano = str(resolve_model("nano"))
    if name == "nano":
        return nano
    model: Any = {"untied": _untied, "biased": _biased, "experts": _experts}[name](nano)
    model.save_pretrained(folder)
    return str(folder)


def _untied(nano: str) -> Any:
    """Nano with a head of its own, other than the embedding."""
    config = AutoConfig.from_pretrained(nano)
    config.tie_word_embeddings = False
    hf: Any = AutoModelForCausalLM.from_pretrained(nano, config=config)
    with torch.no_grad():
        hf.lm_head.weight.copy_(hf.get_input_embeddings().weight.roll(1, 1))
    return hf


def _biased(nano: str) -> Any:
    """Biases in front of the attention, keys and values that divide by two, and a vocabulary that does not."""
    config = Qwen2Config(
        vocab_size=101,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    hf = _random(config)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
    return hf


def _experts(nano: str) -> Any:
    """Each of two workers gets the smallest slice of an expert that vLLM takes on a CPU, 32."""
    config = Qwen3MoeConfig(
        vocab_size=AutoConfig.from_pretrained(nano).vocab_size,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    return _random(config)


def _random(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


_SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED: dict[str, Any] = {**_SHAPE, "intermediate_size": 48, "num_key_value_heads": 2}
_WIDE: dict[str, Any] = {**_GROUPED, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_GROUPED, "tie_word_embeddings": False}),
    "mistral": ("MistralConfig", _GROUPED),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", {**_WIDE, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", _WIDE),
    "gemma2": ("Gemma2Config", {**_WIDE, "final_logit_softcapping": 5.0, "sliding_window": 4}),
    "gemma3": ("Gemma3TextConfig", {**_WIDE, "sliding_window": 4}),
    "gpt2": ("GPT2Config", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "phi": ("PhiConfig", {**_SHAPE, "intermediate_size": 48}),
    "phi3": ("Phi3Config", _GROUPED),
    "starcoder2": ("Starcoder2Config", _GROUPED),
    "qwen3_moe": ("Qwen3MoeConfig", {**_GROUPED, "num_experts": 2, "num_experts_per_tok": 2}),
    "bloom": ("BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
}
"""Model families at their smallest: two layers of four heads, whose norms and biases a test must not find at rest."""


def family(name: str, folder: Path, **changes: Any) -> str:
    """The folder of a random model of `FAMILIES` with the tokenizer of nano, both written to `folder`."""
    config, options = FAMILIES[name]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = _random(getattr(transformers, config)(**{**options, **special, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(resolve_model("nano")).save_pretrained(folder)
    return str(folder)


def chosen_experts(hf: Any, tokens: Sequence[int]) -> torch.Tensor:
    """What the routers of a mixture of experts choose for `tokens`, `[tokens, layers, k]` in order of their ids."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: found.append(out[-1].sort().values))
        for layer in hf.model.layers
    ]
    with torch.no_grad():
        hf(input_ids=torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)
