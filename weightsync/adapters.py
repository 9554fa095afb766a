"""LoRA adapters as weights that travel alone: which tensors, under which names, and which versions an engine holds.

The base model stays where it is; a version is a few megabytes. An engine holds several versions at once, each under
an id of its own, and a request keeps the one that it began with. An old version is given up when the last request
that uses it has ended.

Pure: knows neither PEFT nor vLLM, only the names that both give to things.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forge.errors import ConfigError, WeightSyncError
from weightsync.layout import clean_name

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM makes room for; an adapter of another rank is padded with zeros up to the next one."""

# PEFT: base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.(?P<adapter>[^.]+)\.weight")
# The policy reads the head's weight itself, and a tied embedding is that same weight: an adapter on either would act
# in the engine and not in the trainer, or the other way round.
_UNSERVED = ("embed_tokens", "lm_head", "wte", "wpe", "embed_out")
# Fields of PEFT's LoraConfig that change what an adapter means, and the one value of each that vLLM computes too.
_PLAIN_LORA: Mapping[str, Any] = {
    "use_dora": False,
    "lora_bias": False,
    "use_qalora": False,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "alora_invocation_tokens": None,
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "bias": "none",
    "lora_dropout": 0.0,
}
# Ways of starting that leave the base weights alone.
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class AdapterSpec:
    """What all versions of one adapter have in common.

    `targets` are the last parts of the adapted modules' names, sorted. `tensors` are names and shapes in publishing
    order: `<module>.A` `[rank, in]` and `<module>.B` `[out, rank]`. The adapted layer computes
    `base(x) + scaling * B(A(x))`.
    """

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def plain(self) -> dict[str, Any]:
        """What an engine is told besides the layout, in the words of PEFT's `adapter_config.json`."""
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rslora,
            "target_modules": list(self.targets),
            "scaling": self.scaling,
        }


def adapter_parameters(
    named: Iterable[tuple[str, torch.Tensor]], adapter: str = "default"
) -> list[tuple[str, torch.Tensor]]:
    """The LoRA matrices among a PEFT model's `named_parameters()`, in their order, as `<module>.A` and `<module>.B`.

    Layouts of the base model leave out whatever is called `lora_`; under these names an adapter is published and
    travels like any other set of parameters.

    Raises ConfigError when there are none, when one belongs to an embedding or the head, or when a parameter outside
    of the adapter is trained: its changes would never reach the generators.
    """
    found: list[tuple[str, torch.Tensor]] = []
    for raw, tensor in named:
        name = clean_name(raw)
        match = _TENSOR.fullmatch(name)
        if match is None:
            if tensor.requires_grad:
                raise ConfigError(
                    f"parameter {raw} is trained, yet only the adapter's LoRA matrices travel to the generators; "
                    "freeze it, or send all weights"
                )
            continue
        if match["adapter"] != adapter:
            continue
        if match["module"].rpartition(".")[2] in _UNSERVED:
            raise ConfigError(f"{match['module']} has an adapter; adapt linear layers inside the blocks only")
        found.append((f"{match['module']}.{match['side']}", tensor))
    if not found:
        raise ConfigError(f"the model has no LoRA parameters of an adapter {adapter!r}; wrap it with PEFT first")
    return found


def adapter_spec(config: Any, parameters: Sequence[tuple[str, torch.Tensor]]) -> AdapterSpec:
    """The spec of the adapter that PEFT's `config` (LoraConfig) made of `parameters` (from `adapter_parameters`).

    Raises ConfigError naming the field where the engine would compute something else than the trainer.
    """
    for field, plain in _PLAIN_LORA.items():
        value = getattr(config, field, plain)
        if value != plain and value:
            raise ConfigError(f"the LoRA option {field} is {value!r}; the engine serves plain LoRA, leave it {plain!r}")
    start = getattr(config, "init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise ConfigError(
            f"the LoRA option init_lora_weights is {start!r}, which may change the base weights, and those do not "
            f"travel; use one of {', '.join(map(repr, _PLAIN_STARTS))}"
        )
    engine_rank(config.r)
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters}
    for name, shape in shapes.items():
        if len(shape) != 2 or shape[0 if name.endswith(".A") else 1] != config.r:
            raise ConfigError(f"{name} has shape {list(shape)}, which is not of rank {config.r}")
    targets = {name.split(".")[-2] for name in shapes}
    return AdapterSpec(
        rank=config.r,
        alpha=config.lora_alpha,
        rslora=bool(getattr(config, "use_rslora", False)),
        targets=tuple(sorted(targets)),
        tensors=tuple(shapes.items()),
    )


def engine_tensor_name(name: str) -> str:
    """`<module>.A` or `<module>.B` as PEFT's files and vLLM call it."""
    module, _, side = name.rpartition(".")
    return f"{module}.lora_{side}.weight"


def engine_rank(rank: int) -> int:
    """The least rank at or above `rank` that vLLM makes room for. Raises ConfigError outside of 1..512."""
    if not 1 <= rank <= ENGINE_RANKS[-1]:
        raise ConfigError(f"a LoRA rank must lie in 1..{ENGINE_RANKS[-1]}, got {rank}")
    return next(r for r in ENGINE_RANKS if r >= rank)


def adapter_id(slot: int) -> int:
    """The engine's id of whichever adapter is in `slot`: from 1 on, 0 stands for none."""
    return slot + 1


def adapter_name(version: int) -> str:
    """The engine's name of the adapter of `version`, part of the key of its prefix cache; never used again."""
    return f"adapter-v{version}"


@dataclass
class _Held:
    slot: int
    running: int = 0


class AdapterRegistry:
    """Which versions an engine holds, in which slots, and how many running requests use each. One per engine, no locks.

    There are `capacity` slots, numbered from 0. New requests get the newest version. A version is given up, and its
    slot is free, once it is not the newest and nobody uses it.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 2:
            raise ConfigError(
                f"an engine must hold 2 adapters or more, one that serves and one to come, got {capacity}"
            )
        self._capacity = capacity
        self._held: dict[int, _Held] = {}

    @property
    def newest(self) -> int | None:
        """The version that new requests get; None while no adapter has come: they run on the base model."""
        return max(self._held, default=None)

    @property
    def held(self) -> dict[int, int]:
        """The versions in the engine, oldest first, and the number of running requests of each."""
        return {version: held.running for version, held in sorted(self._held.items())}

    def slot(self, version: int) -> int:
        """Where a version lies that is held."""
        return self._held[version].slot

    @property
    def free_slot(self) -> int | None:
        """A slot that the next version may be written into; None while all are in use."""
        taken = {held.slot for held in self._held.values()}
        return next((slot for slot in range(self._capacity) if slot not in taken), None)

    def add(self, version: int, slot: int) -> None:
        """`version`, in `slot`, serves from now on. Raises WeightSyncError when it is no newer than the newest, or the
        slot is in use.
        """
        newest = self.newest
        if newest is not None and version <= newest:
            raise WeightSyncError(f"adapter version {version} came after {newest}; versions only grow")
        if any(held.slot == slot for held in self._held.values()):
            raise WeightSyncError(
                f"adapter version {version} does not fit into slot {slot}, which is in use: the engine holds "
                f"{self._capacity} at most ({self.describe()})"
            )
        self._held[version] = _Held(slot)
        if newest is not None:
            self._forget_unused(newest)

    def acquire(self) -> int | None:
        """Counts one more request of the newest version and returns that; None, and no count, on the base model."""
        version = self.newest
        if version is not None:
            self._held[version].running += 1
        return version

    def release(self, version: int | None) -> None:
        """One request of `version` (from `acquire`) has ended."""
        if version is None:
            return
        held = self._held.get(version)
        if held is None or held.running < 1:
            raise WeightSyncError(f"a request of adapter version {version} ended that was not counted as running")
        held.running -= 1
        self._forget_unused(version)

    def _forget_unused(self, version: int) -> None:
        if version != self.newest and not self._held[version].running:
            del self._held[version]

    def describe(self) -> str:
        """Text for errors: every version held and its running requests."""
        return ", ".join(f"v{version}: {running} running" for version, running in self.held.items()) or "none"
