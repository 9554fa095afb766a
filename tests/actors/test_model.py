"""Any Hugging Face causal LM as the policy: its log-probs are the model's own, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from actors.model import Policy, check_head, load_hf, pick_dtype
from forge.errors import ConfigError

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA_LIKE: dict[str, Any] = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, untied": ("LlamaConfig", {**LLAMA_LIKE, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", LLAMA_LIKE),
    "qwen3, tied": ("Qwen3Config", {**LLAMA_LIKE, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2, soft cap": ("Gemma2Config", {**LLAMA_LIKE, "head_dim": 16, "final_logit_softcapping": 5.0}),
    "gpt2, dropout": ("GPT2Config", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.5}),
    "phi, biased head": ("PhiConfig", {**SMALL, "intermediate_size": 48}),
}


def saved(folder: Path, family: str) -> str:
    """A random model of that family as a folder."""
    torch.manual_seed(0)
    name, options = FAMILIES[family]
    config = getattr(transformers, name)(**options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_policys_log_probs_are_the_models_own(tmp_path: Path, family: str) -> None:
    hf = load_hf(saved(tmp_path, family), torch.float32)
    check_head(hf)
    hf.train()
    tokens = torch.randint(1, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) >= torch.tensor([[3], [1], [8]])
    logprobs, _ = Policy(hf)(tokens, torch.arange(9).expand(3, 9), mask)
    with torch.no_grad():
        own = hf.eval()(input_ids=tokens).logits.log_softmax(-1)
    rows, columns = mask.nonzero(as_tuple=True)
    torch.testing.assert_close(logprobs, own[rows, columns - 1, tokens[rows, columns]], atol=1e-5, rtol=0)


def test_packed_episodes_do_not_see_each_other(tmp_path: Path) -> None:
    hf = load_hf(saved(tmp_path, "llama, untied"), torch.float32).eval()
    first, second = torch.randint(1, 64, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(6) >= 2
    positions = torch.arange(6)
    policy = Policy(hf)
    with torch.no_grad():
        alone, _ = policy(torch.stack([first, second]), positions.expand(2, 6), mask.expand(2, 6))
        packed, _ = policy(
            torch.cat([first, second])[None], torch.cat([positions, positions])[None], torch.cat([mask, mask])[None]
        )
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GraniteConfig(**LLAMA_LIKE, logits_scaling=8.0, initializer_range=1.0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="GraniteForCausalLM computes its logits in a way that the trainer does not"):
        check_head(load_hf(str(tmp_path), torch.float32))


def test_a_folder_that_holds_no_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"--model {tmp_path} is no causal language model"):
        load_hf(str(tmp_path), torch.float32)


def test_a_named_dtype_is_taken_and_auto_is_fast_on_gpus() -> None:
    assert pick_dtype("bfloat16", "cpu") == torch.bfloat16
    assert pick_dtype("float32", "cuda") == torch.float32
    assert pick_dtype("auto", "cuda") == torch.bfloat16
