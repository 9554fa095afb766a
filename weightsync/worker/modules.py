"""vLLM's modules in the plain words of `weightsync.plan.ModulePart`: how each divides its parameters over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightsync.plan import ModulePart

WHOLE = ModulePart("whole")
# Models whose loader cuts the published weights and changes nothing else. Others transpose or permute on the way (GPT-2
# does, and its shapes do not tell): of them every worker reads everything, which is always right.
PLAIN_LOADERS = frozenset(
    f"{family}ForCausalLM"
    for family in (
        *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Olmo2", "Olmo3", "SmolLM3"),
        *("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe"),
    )
)


def module_parts(model: torch.nn.Module) -> dict[str, ModulePart]:
    """All modules of `model` that divide something, by path. What is not understood is left out, and read whole."""
    if type(model).__name__ not in PLAIN_LOADERS:
        # Which published names go into a stack of experts has to be known of every model.
        return {path: part for path, part in _parts(model).items() if part.kind == "moe"}
    return _parts(model)


def _parts(model: torch.nn.Module) -> dict[str, ModulePart]:
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, ModulePart] = {}
    for path, module in model.named_modules():
        part = _part(module, tuple(packed.get(path.rpartition(".")[2], ())))
        if part is not None:
            found[path.removesuffix(".routed_experts")] = part
    return found


def _part(module: Any, parts: tuple[str, ...]) -> ModulePart | None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, RoutedExperts):
        return _experts(module)
    if getattr(module, "disable_tp", False) or getattr(module, "tp_size", 0) == 1:
        return WHOLE
    if isinstance(module, VocabParallelEmbedding):
        own = module.shard_indices
        rows = own.padded_org_vocab_end_index - own.padded_org_vocab_start_index
        return ModulePart("vocab", sizes=(module.org_vocab_size,), rows=rows)
    # By exact type: a subclass may cut in a way of its own.
    if type(module) is QKVParallelLinear and len(parts) == 3:
        return ModulePart(
            "qkv",
            parts,
            heads=module.total_num_heads,
            kv_heads=module.total_num_kv_heads,
            head_dim=module.head_size,
            v_head_dim=module.v_head_size,
        )
    if type(module) is MergedColumnParallelLinear and len(parts) == len(module.output_sizes):
        return ModulePart("merged", parts, tuple(module.output_sizes))
    if type(module) is ColumnParallelLinear and not parts:
        return ModulePart("column", sizes=(module.output_size,))
    if type(module) is RowParallelLinear:
        return ModulePart("row", sizes=(module.input_size,))
    return None


def _experts(module: Any) -> ModulePart | None:
    config = module.moe_config
    parallel, count = config.moe_parallel_config, config.num_logical_experts
    parts = (module.ckpt_gate_proj_name, module.ckpt_down_proj_name, module.ckpt_up_proj_name)
    if None in parts:
        return None
    if parallel.use_ep or parallel.dp_size > 1:
        # Experts may move between ranks while the engine runs: each reads all of them.
        return ModulePart("moe", parts, count=count, experts=(tuple(range(count)),) * parallel.tp_size)
    rows = config.intermediate_size_per_partition if getattr(config, "tp_shard_with_padding", False) else 0
    return ModulePart("moe", parts, (config.intermediate_size,), rows=rows, count=count)
