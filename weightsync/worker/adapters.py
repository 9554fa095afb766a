"""The generator's side of adapter-only sync, inside vLLM's worker: an adapter goes from shared memory into a free slot.

vLLM computes with stacked LoRA matrices, one slot for each adapter that it serves. A slot that no running request names
is never read, so a thread fills it while decoding goes on, straight from where the adapter arrived.

vLLM's books are written once, when the trainer connects, between two forward passes: slot `i` is adapter `i + 1` for
good. Which version a slot holds is known to the actor alone (`weightsync.adapters.AdapterRegistry`), whose requests
name slots. So the staging thread touches nothing that the engine's thread looks at, dictionaries least of all: those
it walks through at every step, and an entry that comes or goes meanwhile is an error. Two things follow from one id
for many versions:

- vLLM's prefix cache goes by an adapter's name, not by its id, and each version has a name of its own.
- A request that was aborted may be computed for one step more, with half of the next version. Its tokens go nowhere,
  and the blocks that it leaves in the cache bear a name that no later request has.

Touches vLLM internals (LoRA managers and layers), on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.adapters import adapter_id, engine_tensor_name
from weightsync.layout import Layout


@dataclass(frozen=True)
class _Place:
    """Where a matrix belongs: a LoRA layer of vLLM, which of its fused parts, and the side, "A" or "B"."""

    layer: Any
    part: int
    parts: int
    side: str

    @property
    def stack(self) -> torch.Tensor:
        """All slots of this worker's share: A `[slots, 1, max rank, in]` or B `[slots, 1, out, max rank]`."""
        return (self.layer.lora_a_stacked if self.side == "A" else self.layer.lora_b_stacked)[self.part]

    def in_slot(self, slot: int, rank: int) -> torch.Tensor:
        """This matrix in `slot`: A `[rank, in]` or B `[out, rank]`."""
        return self.stack[slot, 0, :rank] if self.side == "A" else self.stack[slot, 0, :, :rank]

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of the whole matrix that this tensor-parallel worker computes with, without a copy."""
        if self.layer.tp_size == 1:
            return tensor
        cut = self.layer.slice_lora_a if self.side == "A" else self.layer.slice_lora_b
        if self.parts == 1:
            return cut(tensor)
        fused: list[torch.Tensor | None] = [None] * self.parts
        fused[self.part] = tensor
        return cut(fused)[self.part]


class _Slots:
    """Writes adapters of one kind into vLLM's slots. The views of a slot are made once: they cost more than copying."""

    def __init__(self, stacks: Iterable[torch.Tensor], places: Mapping[str, _Place], rank: int, scaling: float) -> None:
        self._places, self._rank, self._scaling = places, rank, scaling
        whole = {id(p.stack) for p in places.values() if p.in_slot(0, rank).shape == p.stack.shape[2:]}
        # Where an adapter of another shape may have left something that this one does not write over: of each slot that
        # is zeroed once.
        self._partial = [stack for stack in stacks if id(stack) not in whole]
        self._views: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    @torch.no_grad()
    def fill(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes the adapter `tensors` (by name, whole matrices) into `slot`, which no running request names."""
        if slot not in self._views:
            if self._partial:
                torch._foreach_zero_([stack[slot] for stack in self._partial])
            views = [(place.in_slot(slot, self._rank), place.side) for place in self._places.values()]
            self._views[slot] = [view for view, _ in views], [view for view, side in views if side == "B"]
        into, scaled = self._views[slot]
        torch._foreach_copy_(into, [place.share(tensors[name]) for name, place in self._places.items()])
        torch._foreach_mul_(scaled, self._scaling)  # vLLM expects the scaling inside B


class AdapterReceiver:
    """Part of a vLLM worker extension.

    Needs an engine with `enable_lora` and one slot more than adapters (`max_loras`): on CPUs vLLM looks up the last
    slot for tokens of the base model, so that one has to stay empty.
    """

    # Given by vLLM's worker, which this class is mixed into.
    model_runner: Any

    def forge_adapter_connect(self, spec: dict[str, Any], layout: list[list[Any]]) -> str:
        """Finds where each matrix of `layout` belongs, and lets requests name the slots; returns why the model cannot
        carry the adapter, or "".

        `spec` is `AdapterSpec.plain()`. vLLM itself leaves out, in silence, what it does not find or what is smaller.
        """
        worker_manager = getattr(self.model_runner, "lora_manager", None)
        if worker_manager is None:
            return "the engine runs without LoRA; start it with enable_lora"
        manager = worker_manager._adapter_manager
        places, problem = _find_places(manager, spec, Layout.from_plain(layout))
        if problem:
            return problem
        # A request whose adapter is not here is a mistake of ours: it must not become a look for files, or a download.
        worker_manager._load_adapter = _refuse_to_load
        _name_slots(manager)
        self._forge_slots = _Slots(_stacks(manager), places, spec["r"], spec["scaling"])
        return ""


def _name_slots(manager: Any) -> None:
    """What vLLM's `add_adapter` and `activate_adapter` would note down: slot `i` holds adapter `adapter_id(i)`."""
    for slot in range(manager.lora_slots - 1):
        adapter = adapter_id(slot)
        if adapter in manager.list_adapters():
            continue
        manager._registered_adapters[adapter] = _empty_lora(adapter, manager.lora_config.max_lora_rank)
        manager._active_adapters[adapter] = None
        # vLLM's caches drop the least recently used; these stay.
        manager._registered_adapters.pin(adapter)
        manager._active_adapters.pin(adapter)
        manager.lora_index_to_id[slot] = adapter


def _find_places(manager: Any, spec: Mapping[str, Any], layout: Layout) -> tuple[dict[str, _Place], str]:
    """Where each matrix of `layout` goes, and why the engine would not compute what the trainer does, or ""."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    config, mapper = manager.lora_config, getattr(manager.model, "hf_to_vllm_mapper", None)
    if manager.lora_slots < 2:
        return {}, "max_loras is 1: on CPUs requests without an adapter would get it; use one more than adapters"
    if config.fully_sharded_loras:
        return {}, "fully_sharded_loras is on, which keeps the matrices in another form; leave it off"
    if spec["r"] > config.max_lora_rank:
        return {}, f"the adapter's rank is {spec['r']}, the engine's max_lora_rank {config.max_lora_rank}"
    layers = {name: (layer, part, parts, sizes) for name, layer, part, parts, sizes in _linear_layers(manager)}
    places: dict[str, _Place] = {}
    for entry in layout.entries:
        renamed = None if mapper is None else mapper.get_rename_mapper()
        name, is_a = parse_fine_tuned_lora_name(engine_tensor_name(entry.name), renamed)
        if name not in layers:
            kinds = ", ".join(sorted({known.rpartition(".")[2] for known in layers}))
            return {}, f"the engine has no LoRA layer for {name}; it has them for {kinds}"
        layer, part, parts, (inputs, outputs) = layers[name]
        shape = (spec["r"], inputs) if is_a else (outputs, spec["r"])
        if entry.shape != shape:
            return {}, f"{entry.name} has shape {list(entry.shape)}, the engine's layer takes {list(shape)}"
        if entry.torch_dtype != config.lora_dtype:
            return {}, f"{entry.name} is published in {entry.dtype}, the engine's LoRA layers hold {config.lora_dtype}"
        places[entry.name] = _Place(layer, part, parts, "A" if is_a else "B")
    return places, ""


def _linear_layers(manager: Any) -> Iterator[tuple[str, Any, int, int, tuple[int, int]]]:
    """Each linear layer with LoRA, fused ones part by part: its name in checkpoints, the layer, which of how many
    parts it is, and its inputs and outputs over all tensor-parallel workers.
    """
    for name, layer in manager.modules.items():
        base = layer.base_layer
        if not hasattr(base, "input_size"):
            continue  # embedding, head or experts
        outputs = getattr(base, "output_sizes", None) or [base.output_size]
        if hasattr(base, "total_num_kv_heads"):
            # vLLM counts a key or value head that is replicated once for every worker.
            kv = base.total_num_kv_heads * base.head_size
            outputs = [base.total_num_heads * base.head_size, kv, kv]
        parts = manager.packed_modules.get(name, [name])
        if len(parts) != len(outputs) or len(parts) != layer.n_slices:
            continue  # a layer whose parts in checkpoints are not its slices
        for part, (part_name, size) in enumerate(zip(parts, outputs, strict=True)):
            yield part_name, layer, part, len(parts), (base.input_size, size)


def _stacks(manager: Any) -> list[torch.Tensor]:
    """The matrices of all slots of every linear layer, `[slots, 1, rows, columns]` each."""
    layers = {id(layer): layer for _, layer, *_ in _linear_layers(manager)}.values()
    return [stack for layer in layers for stack in (*layer.lora_a_stacked, *layer.lora_b_stacked)]


def _empty_lora(adapter: int, rank: int) -> Any:
    """What vLLM's list of adapters holds for one that is in its slot already."""
    from vllm.lora.lora_model import LoRAModel

    return LoRAModel(adapter, rank, {})


def _refuse_to_load(request: Any) -> Any:
    raise RuntimeError(f"adapter {request.lora_int_id} ({request.lora_name}) is not in this worker, and none is loaded")
