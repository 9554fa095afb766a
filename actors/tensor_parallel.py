"""Tensor parallelism of a Hugging Face causal LM: the plan of its own config, as DTensor parallel styles.

    hidden, whole ─► colwise: the heads and neurons of this rank ─► rowwise, all-reduced ─► hidden, whole

A layer costs one all-reduce behind the attention and one behind the MLP, and as many in the backward pass. What the
plan leaves out (embedding, norms, head) is replicated, as a DTensor too: all parameters lie on one mesh, which
clipping, the optimizer and checkpoints rely on.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from actors.model import load_config, whole
from forge.errors import ConfigError

# Plans of families whose config has none.
_OWN_PLANS = {
    "gpt2": {
        "h.*.attn": "fused_qkv",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}
_FAMILIES = "Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2, Gemma 3, GPT-2, Phi"
"""Of those with a plan, the ones that people know."""
_CUT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""What of a model's config is divided among the ranks."""


def check_tensor_parallel(model: str, size: int) -> None:
    """Raises ConfigError when `model` cannot be cut into `size`; reads nothing but its config."""
    if size == 1:
        return
    config = load_config(model).get_text_config()
    plan_of(config)
    _check_heads(config, size, model)


def _check_heads(config: Any, size: int, model: str) -> None:
    found = {name: value for name in _CUT if isinstance(value := getattr(config, name, None), int)}
    for name, value in found.items():
        if value % size:
            common = math.gcd(*found.values())
            sizes = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise ConfigError(
                f"trainer.tensor_parallel is {size}, which does not divide the {name} of {model}, {value}; "
                f"it can be {sizes}"
            )


def plan_of(config: Any) -> dict[str, str]:
    """The plan of a model's config: names below the base model, with `*` for numbers, and their styles.

    Raises ConfigError when there is none, or when it has a style that is unknown here.
    """
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or _OWN_PLANS.get(config.model_type, {})
    plan = {name: style for name, style in plan.items() if style != _EMBEDDING}
    unknown = sorted(set(plan.values()) - {*_STYLES, _PARTIAL})
    if plan and not unknown:
        return plan
    why = f"its plan has the styles {', '.join(unknown)}, which cut experts or fused layers" if plan else "has no plan"
    raise ConfigError(
        f"trainer.tensor_parallel works for {_FAMILIES} and families with a base_model_tp_plan like theirs; "
        f"{config.model_type}: {why}; use trainer.tensor_parallel=1, which shards it by FSDP2"
    )


def parallelize(hf: Any, mesh: DeviceMesh) -> None:
    """Cuts `hf` over the ranks of `mesh` by its plan; every rank has loaded the same weights.

    Raises ConfigError when the plan does not fit the model.
    """
    plan = {f"{hf.base_model_prefix}.{name}": style for name, style in plan_of(hf.config.get_text_config()).items()}
    _check_heads(hf.config.get_text_config(), mesh.size(), type(hf).__name__)
    partials = [name for name, style in plan.items() if style == _PARTIAL]
    for name, style in _matches(hf, plan):
        if style in _STYLES:
            with warnings.catch_warnings(action="error"):  # of a name that torch does not find
                parallelize_module(hf, mesh, {name: _STYLES[style](hf.get_submodule(name))}, src_data_rank=None)
    _check_even(hf, mesh.size())
    distributed: dict[nn.Parameter, nn.Parameter] = {}  # of tied weights there stays one
    for name, module in hf.named_modules():
        if any(not isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            partial = any(_fits(name, pattern) for pattern in partials)
            Replicated(partial_gradients=partial, distributed=distributed)._apply(module, mesh)


class Replicated(ParallelStyle):
    """A module whose own parameters every rank has whole, and which sees plain tensors."""

    def __init__(self, *, partial_gradients: bool, distributed: dict[nn.Parameter, nn.Parameter]) -> None:
        super().__init__()
        self._partial, self._distributed = partial_gradients, distributed

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = {name: p for name, p in module.named_parameters(recurse=False) if not isinstance(p, DTensor)}
        for name, parameter in own.items():
            if parameter in self._distributed:
                module.register_parameter(name, self._distributed[parameter])
            else:
                self._distributed[parameter] = _distribute(module, name, device_mesh, Replicate())
        names = list(own)

        def enter(module: nn.Module, args: Any) -> None:
            stack.append([module._parameters[name] for name in names])
            for name, parameter in zip(names, stack[-1], strict=True):
                plain = whole(parameter, partial_gradients=self._partial)
                module._parameters[name] = plain  # type: ignore[assignment]  # the module reads it, nobody else does

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            module._parameters.update(zip(names, stack.pop(), strict=True))

        stack: list[list[Any]] = []
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


class Conv1DParallel(ParallelStyle):
    """What Colwise- and RowwiseParallel are to nn.Linear, for GPT-2's Conv1D, whose weight is `[in, out]`."""

    def __init__(self, weight: Shard, bias: Placement, into: Placement, out_of: Placement) -> None:
        super().__init__()
        self._weight, self._bias, self._into, self._out_of = weight, bias, into, out_of

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            _distribute(module, "weight", mesh, self._weight)
            _distribute(module, "bias", mesh, self._bias)

        def into(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, [self._into], run_check=False),)

        def out_of(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.redistribute(placements=[self._out_of]).to_local()

        return distribute_module(module, device_mesh, partition, into, out_of)


class FusedQkv(ParallelStyle):
    """GPT-2's attention: each rank computes queries, keys and values of its heads.

    They are columns here and there of one weight `[E, 3E]`, no single box that could be published or saved; so it
    stays replicated, and each rank uses its columns of it.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        fused, rank, size = module.c_attn, device_mesh.get_local_rank(), device_mesh.size()
        module.split_size //= size
        for name in ("weight", "bias"):
            _distribute(fused, name, device_mesh, Replicate())

        def columns(parameter: torch.Tensor) -> torch.Tensor:
            local = whole(parameter, partial_gradients=True)
            return local.unflatten(-1, (3, size, -1)).select(-2, rank).flatten(-2)

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            copied = DTensor.from_local(hidden, device_mesh, [Replicate()], run_check=False)
            mine = copied.to_local(grad_placements=[Partial()])
            return nn.functional.linear(mine, columns(fused.weight).T, columns(fused.bias))

        fused.forward = forward
        return module


def _colwise(module: nn.Module) -> ParallelStyle:
    if isinstance(module, nn.Linear):
        return ColwiseParallel()
    return Conv1DParallel(Shard(1), Shard(0), Replicate(), Shard(-1))


def _rowwise(module: nn.Module) -> ParallelStyle:
    if isinstance(module, nn.Linear):
        return RowwiseParallel()
    return Conv1DParallel(Shard(0), Replicate(), Shard(-1), Replicate())


# transformers' names of styles. One more only says something of gradients: the parameters are replicated, and each
# rank's gradient is of its own heads.
_STYLES: dict[str, Callable[[nn.Module], ParallelStyle]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "colwise_gather_output": lambda _: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda _: RowwiseParallel(input_layouts=Replicate()),
    "fused_qkv": lambda _: FusedQkv(),
}
_PARTIAL = "replicated_with_grad_allreduce"
# The embedding stays whole: it may be the head too, whose logits a sampler's top-k and top-p need side by side.
_EMBEDDING = "embedding_rowwise"


def _matches(hf: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Name and style of every module that the plan cuts. Raises ConfigError for an entry that fits none."""
    names = [name for name, _ in hf.named_modules()]
    for pattern, style in plan.items():
        found = [name for name in names if _fits(name, pattern)]
        if not found:
            raise ConfigError(
                f"trainer.tensor_parallel: the plan of {type(hf).__name__} cuts {pattern}, which it does not have; "
                "use trainer.tensor_parallel=1"
            )
        for name in found:
            yield from _with_adapter(hf.get_submodule(name), name, style)


def _with_adapter(module: nn.Module, name: str, style: str) -> Iterator[tuple[str, str]]:
    """The layer itself, or what PEFT has put in its place: the base, and that side of the adapter that is as wide."""
    if not hasattr(module, "base_layer"):
        yield name, style
        return
    yield f"{name}.base_layer", style
    side = "lora_B" if style.startswith("colwise") else "lora_A"
    yield f"{name}.{side}.default", style


def _fits(name: str, pattern: str) -> bool:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name) == pattern


def _check_even(hf: nn.Module, size: int) -> None:
    """Whatever is cut is cut evenly: heads would be torn otherwise."""
    for name, parameter in hf.named_parameters():
        for placement in parameter.placements if isinstance(parameter, DTensor) else ():
            if isinstance(placement, Shard) and parameter.shape[placement.dim] % size:
                raise ConfigError(
                    f"trainer.tensor_parallel is {size}, which does not divide dimension {placement.dim} of {name}, "
                    f"{parameter.shape[placement.dim]}; use a divisor of it"
                )


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    parameter = module._parameters[name]
    assert parameter is not None
    tensor = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    distributed = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    module.register_parameter(name, distributed)
    return distributed
