"""How a policy lies on the trainer's ranks: tensor parallelism inside, FSDP2 around it, fp32 masters.

ranks = dp x tp; the tp ranks of a group are neighbours and see the same batch

tensor_parallel 2, four ranks:          tp 0        tp 1
                              dp 0    rank 0      rank 1     shard 0 of a batch
                              dp 1    rank 2      rank 3     shard 1
"""

from __future__ import annotations

import logging
import os
import shutil

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from actors.model import Policy
from actors.tensor_parallel import parallelize
from actors.value_model import ValueModel
from forge.errors import ConfigError


def make_mesh(device: str, world: int, tensor_parallel: int = 1) -> DeviceMesh:
    """The ranks as a mesh with the dimensions "dp" and, where there is tensor parallelism, "tp"."""
    if tensor_parallel == 1:
        return init_device_mesh(device, (world,), mesh_dim_names=("dp",))
    return init_device_mesh(device, (world // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))


def count_shards(world: int, tensor_parallel: int) -> int:
    """Into how many shares `world` ranks divide a batch. Raises ConfigError when it does not come out even."""
    if world % tensor_parallel:
        near = max(1, round(world / tensor_parallel)) * tensor_parallel
        raise ConfigError(
            f"mesh.trainer.procs is {world}, trainer.tensor_parallel {tensor_parallel}: the ranks come in groups "
            f"of {tensor_parallel} that share the layers; use {near} processes, or a divisor of {world}"
        )
    return world // tensor_parallel


def shard(policy: Policy | ValueModel, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Tensor parallelism over the mesh's "tp", if any, then FSDP2 over its "dp".

    FSDP2: each decoder layer its own unit, embeddings and head in the root; fp32 masters and reductions. Gradients are
    summed over ranks, not averaged: losses carry the global denominator already. The head of a value model is a unit of
    its own, float32 throughout.
    """
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        _quiet()
        parallelize(policy.hf, mesh["tp"])
    heads = [policy.head] if isinstance(policy, ValueModel) else []
    for module in [*heads, *decoder_layers(policy), policy]:
        dtype = torch.float32 if module in heads else compute_dtype
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fully_shard(module, mesh=mesh["dp"], mp_policy=precision)
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo has no pre-multiplied sum


def _quiet() -> None:
    """Two sums or gathers in a row, one for each dimension of the mesh, are what is meant here; torch warns of them."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def decoder_layers(policy: Policy | ValueModel) -> list[torch.nn.Module]:
    """The modules that FSDP2 gathers and lets go of one after the other."""
    block_names = set(policy.hf._no_split_modules or [])
    return [m for m in policy.hf.modules() if type(m).__name__ in block_names]


def compile_layers(policy: Policy) -> None:
    """torch.compile of each decoder layer's forward, made at the first pass of a kind; names and hooks stay.

    Lengths are dynamic from the start: every micro-batch has its own.
    """
    for layer in decoder_layers(policy):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def check_compiler() -> None:
    """Raises ConfigError when there is no C++ compiler, which torch.compile needs on CPUs and GPUs alike."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"trainer.compile is true and there is no C++ compiler {compiler}; install one, name another by the "
            "variable CXX, or use trainer.compile=false"
        )
