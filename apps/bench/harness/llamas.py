"""Llamas of a wanted size with random weights: what `apps.bench.weightsync` publishes.

All are 30 blocks deep, as SmolLM2-135M is, whatever their size: a flip takes time for every module, and between two of
these models only the bytes differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LAYERS = 30
VOCAB = 4096
HEAD_DIM = 32
ITEMSIZE = 4
"""float32: there are CPUs on which bfloat16 is a hundred times slower."""
_HEADS = 3
"""Query heads to a key-value head; the hidden size is a multiple of `_HEADS * HEAD_DIM`."""
_MLP_STEP = 16
MIN_MB = 6


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama with tied embeddings."""

    hidden: int
    intermediate: int

    @property
    def heads(self) -> int:
        """Of queries; there is a key-value head to every three."""
        return self.hidden // HEAD_DIM

    @property
    def kv_heads(self) -> int:
        return self.heads // _HEADS

    @property
    def num_parameters(self) -> int:
        return VOCAB * self.hidden + LAYERS * (self._attention + 3 * self.hidden * self.intermediate) + self.hidden

    @property
    def _attention(self) -> int:
        """Of a block: q and o, k and v, and two norms."""
        return 2 * self.hidden**2 + 2 * self.hidden * self.kv_heads * HEAD_DIM + 2 * self.hidden

    @property
    def nbytes(self) -> int:
        """Of the published weights."""
        return self.num_parameters * ITEMSIZE

    @property
    def kv_bytes(self) -> int:
        """Of the KV cache, for one token."""
        return LAYERS * 2 * self.kv_heads * HEAD_DIM * ITEMSIZE


def shape_of(mb: float) -> Shape:
    """The shape whose weights come closest to `mb` million bytes with an MLP about 8/3 as wide as the model.

    Raises ValueError below `MIN_MB`.
    """
    if not mb >= MIN_MB:
        raise ValueError(f"a model of {mb:g} MB is too small for {LAYERS} blocks; give at least {MIN_MB}")
    found: list[tuple[float, Shape]] = []
    for hidden in range(_HEADS * HEAD_DIM, 8192, _HEADS * HEAD_DIM):
        bare = Shape(hidden, 0)
        left = mb * 1e6 / ITEMSIZE - bare.num_parameters
        intermediate = round(left / (LAYERS * 3 * hidden) / _MLP_STEP) * _MLP_STEP
        if intermediate < _MLP_STEP:
            break
        found.append((abs(intermediate / hidden - 8 / 3), Shape(hidden, intermediate)))
    return min(found, key=lambda one: one[0])[1]


def write(shape: Shape, folder: Path, max_len: int) -> str:
    """Makes the model in `folder`, for sequences of at most `max_len` tokens; returns the folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=LAYERS,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_len,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        dtype=torch.float32,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
