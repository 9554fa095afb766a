"""Laws of actors/attention.py: packed sequences are as if each were alone, for every kind of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from actors.attention import LENGTHS, NAME, attention, sequence_lengths, use_packed_attention

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "mistral, a window of 6": MistralConfig(**SMALL, sliding_window=6),
    "gemma2, a window and a soft cap": Gemma2Config(
        **SMALL, head_dim=16, sliding_window=6, attn_logit_softcapping=5.0, query_pre_attn_scalar=64
    ),
    "gemma3, a window": Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=6),
    "gpt2": GPT2Config(
        vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=1,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    ),
    "qwen3 experts": Qwen3MoeConfig(**SMALL, **EXPERTS),
}  # fmt: skip


def make(config: Any) -> Any:
    torch.manual_seed(0)
    hf: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    return hf


def sequences() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 64, (1, length), generator=draw) for length in (20, 1, 7, 13)]


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_sequences_have_the_hidden_states_and_gradients_of_each_alone(name: str) -> None:
    hf = make(CONFIGS[name])
    weights = torch.randn((1, 41, 64), generator=torch.Generator().manual_seed(1))
    alone = torch.cat([hf.base_model(input_ids=s, use_cache=False)[0] for s in sequences()], dim=1)
    (alone * weights).sum().backward()
    expected = {n: p.grad.clone() for n, p in hf.named_parameters() if p.grad is not None}
    hf.zero_grad()
    assert use_packed_attention(hf)
    assert hf.config._attn_implementation == NAME
    positions = torch.cat([torch.arange(s.shape[1]) for s in sequences()])[None]
    row = {"input_ids": torch.cat(sequences(), dim=1), "position_ids": positions, "use_cache": False}
    packed = hf.base_model(**row, **{LENGTHS: sequence_lengths(positions)})[0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    (packed * weights).sum().backward()
    for parameter, gradient in expected.items():
        ours = dict(hf.named_parameters())[parameter].grad
        torch.testing.assert_close(ours, gradient, rtol=1e-3, atol=1e-4, msg=parameter)
    mixed = hf.base_model(**row)[0]  # without the lengths it is one sequence
    assert float((mixed - alone).detach().abs().max()) > 0.1


def test_right_padding_needs_no_mask() -> None:
    hf = make(CONFIGS["gemma2, a window and a soft cap"])
    long, _, short, _ = sequences()
    padded = torch.cat([long, torch.nn.functional.pad(short, (0, 13), value=63)])
    alone = [hf.base_model(input_ids=s, use_cache=False)[0] for s in (long, short)]
    assert use_packed_attention(hf)
    positions = torch.arange(20).expand(2, 20)
    assert sequence_lengths(positions) is None
    both = hf.base_model(input_ids=padded, position_ids=positions, use_cache=False)[0]
    torch.testing.assert_close(both[0], alone[0][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both[1, :7], alone[1][0], rtol=1e-4, atol=1e-5)


def test_a_model_whose_attention_is_another_keeps_its_own() -> None:
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    hf = make(GptOssConfig(**SMALL, **experts, layer_types=["full_attention"] * 2))  # attends to a sink too
    assert not use_packed_attention(hf)
    assert hf.config._attn_implementation == "eager"
    chunked = make(CONFIGS["llama"])
    chunked.config.attention_chunk_size = 4
    assert not use_packed_attention(chunked)


def test_lengths_are_read_off_positions_that_restart() -> None:
    lengths = sequence_lengths(torch.tensor([[0, 1, 2, 0, 0, 1]]))
    assert lengths is not None
    assert lengths.tolist() == [3, 1, 2]
    assert sequence_lengths(torch.tensor([[0, 1, 2]])) is None
    assert sequence_lengths(torch.tensor([[0, 1], [0, 1]])) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 50])
def test_the_ragged_kernel_is_the_loop(window: int | None) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([100, 7, 61])
    shapes = ((1, 4, 168, 64), (1, 2, 168, 64), (1, 2, 168, 64))
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    module = torch.nn.Module()
    (q, k, v), (q64, k64, v64) = leaves, exact
    fast, _ = attention(module, q, k, v, None, sliding_window=window, sequence_lengths=lengths)
    slow, _ = attention(module, q64, k64, v64, None, sliding_window=window, sequence_lengths=lengths)
    torch.testing.assert_close(fast.double(), slow, rtol=2e-2, atol=2e-2)
    fast.float().square().sum().backward()
    slow.square().sum().backward()
    for ours, reference in zip(leaves, exact, strict=True):
        assert ours.grad is not None
        assert reference.grad is not None
        torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=5e-2, atol=2e-1)
