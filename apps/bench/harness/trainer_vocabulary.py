"""Two random Llamas that differ in their vocabulary alone: how much memory a trainer needs for it."""

from __future__ import annotations

from pathlib import Path

VOCABULARIES = (8192, 32768)
HIDDEN = 64


def write_llama(vocabulary: int, folder: Path) -> tuple[str, int]:
    """Makes the model in `folder`; returns the folder and the number of its parameters, the tied head counted once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        dtype=torch.float32,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return str(folder), sum(parameter.numel() for parameter in model.parameters())
