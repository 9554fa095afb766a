"""The generator's side of adapter-only sync, inside vLLM's worker: an adapter goes from shared memory into a free slot.

vLLM computes with stacked LoRA matrices, one slot for each adapter that it serves. A slot that no request is mapped to
is never read, so a thread fills it while decoding goes on, straight from where the adapter arrived; making the adapter
known takes three dictionary entries between two forward passes. Nothing is read from disk, and requests under older
adapters keep theirs.

Touches vLLM internals (LoRA managers and layers), on purpose.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.adapters import engine_tensor_name
from weightsync.layout import Layout

_NOTHING: dict[str, Any] = {"state": "idle", "adapter": 0, "error": "", "stage_s": 0.0}


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
        # An adapter of another shape may have left something in layers or ranks that this one does not write to.
        self._partial = [stack for stack in stacks if id(stack) not in whole]
        self._views: dict[int, list[torch.Tensor]] = {}

    @torch.no_grad()
    def fill(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes the adapter `tensors` (by name, whole matrices) into `slot`, which no request is mapped to."""
        places = self._places
        if slot not in self._views:
            self._views[slot] = [place.in_slot(slot, self._rank) for place in places.values()]
        into = self._views[slot]
        if self._partial:
            torch._foreach_zero_([stack[slot] for stack in self._partial])
        torch._foreach_copy_(into, [place.share(tensors[name]) for name, place in places.items()])
        # vLLM expects the scaling inside B.
        scaled = [tensor for place, tensor in zip(places.values(), into, strict=True) if place.side == "B"]
        torch._foreach_mul_(scaled, self._scaling)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies to the device may still be under way


class AdapterReceiver:
    """Part of a vLLM worker extension; every method is called by `collective_rpc`, in the engine's own thread.

    Arguments and results are msgpack-plain: text, numbers, lists, dicts. Needs an engine with `enable_lora` and one
    slot more than adapters (`max_loras`): on CPUs vLLM looks up the last slot for tokens of the base model, so that
    one has to stay empty.
    """

    # Given by vLLM's worker, which this class is mixed into.
    model_runner: Any

    def forge_adapter_connect(self, spec: dict[str, Any], layout: list[list[Any]]) -> str:
        """Finds where each matrix of `layout` belongs; returns why the model cannot carry the adapter, or "".

        `spec` is `AdapterSpec.plain()`. vLLM itself leaves out, in silence, what it does not find or what is smaller.
        """
        worker_manager = getattr(self.model_runner, "lora_manager", None)
        if worker_manager is None:
            return "the engine runs without LoRA; start it with enable_lora"
        if self._forge_adapter["state"] == "staging":
            return f"adapter {self._forge_adapter['adapter']} is still being staged; connect when it has arrived"
        manager = worker_manager._adapter_manager
        new = Layout.from_plain(layout)
        places, problem = _find_places(manager, spec, new)
        if problem:
            return problem
        # A request whose adapter is not here is a mistake of ours: it must not become a look for files, or a download.
        worker_manager._load_adapter = _refuse_to_load
        self._forge_loras = manager
        self._forge_adapter_rank = spec["r"]
        self._forge_slots = _Slots(_stacks(manager), places, spec["r"], spec["scaling"])
        return ""

    def forge_adapter_stage(self, adapter: int, offer: dict[str, Any]) -> str:
        """Starts filling a free slot with adapter id `adapter` from what `offer` brings; returns at once.

        Returns what stands against it, or "". An adapter that was staged before and not activated is given up.
        """
        stage, manager = self._forge_adapter, self._forge_loras
        if stage["state"] == "staging":
            return f"adapter {stage['adapter']} is still being staged; wait for it"
        ids = manager.lora_index_to_id
        if stage["state"] in ("ready", "failed") and stage["adapter"] in ids:
            ids[ids.index(stage["adapter"])] = None
        if adapter in ids:
            return f"adapter {adapter} is here already; ids are used once"
        slot = next((i for i in range(manager.lora_slots - 1) if ids[i] is None), None)
        if slot is None:
            return f"all {manager.lora_slots - 1} slots for adapters are taken (ids {ids[:-1]}); free one first"
        ids[slot] = adapter
        self._forge_adapter = {**_NOTHING, "state": "staging", "adapter": adapter}
        threading.Thread(target=self._forge_stage_adapter, args=(adapter, slot, offer), daemon=True).start()
        return ""

    def forge_adapter_arrived(self) -> bool:
        """Whether nothing is being staged any more."""
        return bool(self._forge_adapter["state"] != "staging")

    def forge_adapter_activate(self, adapter: int) -> dict[str, Any]:
        """Makes `adapter` known to vLLM if it has been staged: requests that name it may come once `state` is "active".

        Otherwise `state` is "staging": call again; or "failed", with `error`. `stage_s` was spent beside decoding,
        `pause_s` between two forward passes.
        """
        begin = time.perf_counter()
        stage, manager = self._forge_adapter, self._forge_loras
        if adapter in manager.list_adapters():
            return {**stage, "state": "active", "pause_s": 0.0}
        if stage["adapter"] != adapter:
            raise RuntimeError(f"adapter {adapter} is not staged: {stage}")
        if stage["state"] != "ready":
            return {**stage, "pause_s": 0.0}
        # What `add_adapter` and `activate_adapter` would note down; the slot is filled and named already.
        manager._registered_adapters[adapter] = _empty_lora(adapter, self._forge_adapter_rank)
        manager._active_adapters[adapter] = None
        # vLLM's caches drop the least recently used; which adapter goes is decided by who uses it.
        manager._registered_adapters.pin(adapter)
        manager._active_adapters.pin(adapter)
        self._forge_adapter = _NOTHING
        return {**stage, "state": "active", "pause_s": time.perf_counter() - begin}

    def forge_adapter_free(self, adapters: list[int]) -> list[int]:
        """Gives up the adapters that no request of this worker uses; returns those of `adapters` that are gone.

        The others stay: call again later. Repeating it does no harm.
        """
        in_use = {request.lora_int_id for request in self._forge_lora_requests()}
        for adapter in set(adapters) - in_use:
            self._forge_loras.remove_adapter(adapter)
        return sorted(set(adapters) - set(self._forge_loras.list_adapters()))

    def forge_adapters(self) -> list[int]:
        """The ids of the adapters that requests may name."""
        return sorted(self._forge_loras.list_adapters())

    @property
    def _forge_adapter(self) -> dict[str, Any]:
        return self.__dict__.get("_forge_adapter_stage", _NOTHING)

    @_forge_adapter.setter
    def _forge_adapter(self, stage: dict[str, Any]) -> None:
        self.__dict__["_forge_adapter_stage"] = stage

    def _forge_lora_requests(self) -> list[Any]:
        """The LoRA of every unfinished request that has been scheduled once, preempted ones included."""
        runner = self.model_runner
        if hasattr(runner, "requests"):
            return [r.lora_request for r in runner.requests.values() if r.lora_request is not None]
        return list(runner.lora_state.lora_requests.values())  # vLLM's second model runner, on GPUs

    def _forge_adapter_arrival(
        self, offer: dict[str, Any]
    ) -> contextlib.AbstractContextManager[dict[str, torch.Tensor]]:
        """The adapter's whole matrices by their names in the layout, to be read inside; in the staging thread."""
        raise NotImplementedError

    def _forge_stage_adapter(self, adapter: int, slot: int, offer: dict[str, Any]) -> None:
        begin = time.perf_counter()
        try:
            with self._forge_adapter_arrival(offer) as tensors:
                self._forge_slots.fill(slot, tensors)
            state = {"state": "ready", "adapter": adapter, "error": ""}
        except BaseException:
            state = {"state": "failed", "adapter": adapter, "error": traceback.format_exc()}
        self._forge_adapter = {**state, "stage_s": time.perf_counter() - begin}


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
