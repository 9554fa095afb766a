"""A second instance of the generator's model, loaded beside the live one and exchanged with it.

vLLM's own loader fills it (fuses q/k/v and gate/up, repacks for the CPU's kernels), layer by layer and in the
background. `exchange` swaps the parameters of the two instances by reference, between two forward passes; what was live
is the next shadow. On GPUs captured graphs hold the addresses of the live parameters: there `copy_in_place` moves the
bytes on the device instead.

Touches vLLM internals, on purpose and here alone: `tests/weightsync/test_vllm_canary.py` fails when they move.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

Weights = Iterable[tuple[str, torch.Tensor]]

# What modules keep of a weight besides the parameter: the CPU's packed copy, inside a closure.
_DERIVED = frozenset({"cpu_linear"})
_OF_TORCH = frozenset(torch.nn.Module().__dict__)
_DEPTH = 4


class Shadow:
    """Built from the worker's configuration as the live model was; the two hold equal weights at first."""

    def __init__(self, live: torch.nn.Module, vllm_config: Any) -> None:
        self._live = live
        self._config = _own_config(vllm_config)
        self.model = _load(self._config)

    def why_not(self) -> str:
        """Empty when `exchange` moves all that a forward pass reads of the weights; else what it would miss."""
        if self._config.model_config.quantization is not None:
            return f"its weights are quantised ({self._config.model_config.quantization})"
        for (name, live), (other, shadow) in zip(self._live.named_modules(), self.model.named_modules(), strict=False):
            if (name, type(live)) != (other, type(shadow)) or live._parameters.keys() != shadow._parameters.keys():
                return f"module {name} has no counterpart in a second instance"
            if "MLA" in type(live).__name__:
                return f"module {name} ({type(live).__name__}) derives other weights from its own"
        weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        for name, module in self.model.named_modules():
            if hidden := next(_hidden(module, weights), None):
                return f"{name or 'the model'} keeps a reference to its weights in {hidden}"
        return ""

    def load(self, weights: Weights) -> None:
        """Fills the shadow. Whatever happens, it ends as a complete model and can be loaded again."""
        load_layerwise(self.model, weights, self._config)

    def exchange(self) -> None:
        """Swaps the two models' parameters, and what is derived from them, by reference."""
        for live, shadow in zip(self._live.modules(), self.model.modules(), strict=True):
            live._parameters, shadow._parameters = shadow._parameters, live._parameters
            for name in _DERIVED & live.__dict__.keys():
                live.__dict__[name], shadow.__dict__[name] = shadow.__dict__[name], live.__dict__[name]

    def copy_in_place(self) -> None:
        """Copies the shadow's parameters into the live ones' memory, on the device."""
        live, shadow = ([p.data for p in model.parameters()] for model in (self._live, self.model))
        torch._foreach_copy_(live, shadow)
        torch.cuda.synchronize()


def load_layerwise(model: torch.nn.Module, weights: Weights, config: Any) -> None:
    """Loads checkpoint weights into a model that has been loaded before; also after an error it is complete."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    any_model: Any = model
    with set_current_vllm_config(config), torch.no_grad():
        if not torch.cuda.is_available():
            _forget_packed_experts(model)
        initialize_layerwise_reload(model)
        try:
            any_model.load_weights(weights)
        finally:
            finalize_layerwise_reload(model, config.model_config)
        for module in model.modules():
            # A tied head takes its weight from the embedding and is skipped by the reload: its packed copy would
            # stay the old one.
            if isinstance(module, ParallelLMHead):
                method: Any = module.quant_method
                method.process_weights_after_loading(module)


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """vLLM packs experts for the CPU only where it finds no kernel yet: at a reload they would stay unpacked."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def _own_config(vllm_config: Any) -> Any:
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    # Attention layers register by name here; a second model needs its own register.
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    return config


def _load(config: Any) -> torch.nn.Module:
    import vllm.model_executor.layers.rotary_embedding as rotary
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    # Rotary modules are cached globally: a shared one would go to the meta device under the live model.
    cached = dict(rotary._ROPE_DICT)
    rotary._ROPE_DICT.clear()
    try:
        with set_current_vllm_config(config):
            return get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)
    finally:
        rotary._ROPE_DICT.clear()
        rotary._ROPE_DICT.update(cached)


def _hidden(module: torch.nn.Module, weights: set[int]) -> Iterator[str]:
    """Paths, from `module`'s own attributes, to something of its weights that `exchange` would not find."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    for name, value in module.__dict__.items():
        if name in _OF_TORCH or name in _DERIVED:
            continue
        if isinstance(value, torch.Tensor) and not isinstance(module, AttentionLayerBase):
            yield name
        else:
            yield from _find(value, weights, name, _DEPTH)


def _find(value: Any, weights: set[int], path: str, depth: int) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        if not value.is_meta and value.numel() and value.untyped_storage().data_ptr() in weights:
            yield path
    elif depth == 0 or isinstance(value, (torch.nn.Module, types.ModuleType, type, str, int, float)):
        return  # a module is visited on its own
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            yield from _find(_content(cell), weights, f"{path}()", depth - 1)
    elif isinstance(value, types.MethodType):
        yield from _find(value.__self__, weights, f"{path}()", depth - 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value[:64]):
            yield from _find(item, weights, f"{path}[{index}]", depth - 1)
    elif isinstance(value, dict):
        for key, item in list(value.items())[:64]:
            yield from _find(item, weights, f"{path}[{key!r}]", depth - 1)
    else:
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield from _find(item, weights, f"{path}.{name}", depth - 1)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
