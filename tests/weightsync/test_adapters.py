"""Which tensors are an adapter, under which names, and which versions of it an engine holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import ConfigError, WeightSyncError
from weightsync.adapters import (
    ENGINE_RANKS,
    AdapterRegistry,
    adapter_id,
    adapter_name,
    adapter_parameters,
    adapter_spec,
    engine_rank,
    engine_tensor_name,
)
from weightsync.layout import make_layout

LAYER = "base_model.model.model.layers.0."


def frozen(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def trained(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, requires_grad=True)


def peft_model(rank: int = 4, layer: str = LAYER) -> list[tuple[str, torch.Tensor]]:
    """What PEFT's `named_parameters()` gives for a layer whose q_proj and down_proj are adapted."""
    return [
        (f"{layer}self_attn.q_proj.base_layer.weight", frozen(16, 8)),
        (f"{layer}self_attn.q_proj.lora_A.default.weight", trained(rank, 8)),
        (f"{layer}self_attn.q_proj.lora_B.default.weight", trained(16, rank)),
        (f"{layer}mlp.down_proj.base_layer.weight", frozen(8, 24)),
        (f"{layer}mlp.down_proj.lora_A.default.weight", trained(rank, 24)),
        (f"{layer}mlp.down_proj.lora_B.default.weight", trained(8, rank)),
        (f"{layer}input_layernorm.weight", frozen(8)),
    ]


def peft_config(**options: Any) -> Any:
    return SimpleNamespace(**{"r": 4, "lora_alpha": 16, "use_rslora": False, **options})


# ---- the tensors ----------------------------------------------------------------------------------


def test_an_adapter_is_its_matrices_in_order_and_nothing_of_the_base() -> None:
    found = adapter_parameters(peft_model())
    assert [(name, tuple(tensor.shape)) for name, tensor in found] == [
        ("model.layers.0.self_attn.q_proj.A", (4, 8)),
        ("model.layers.0.self_attn.q_proj.B", (16, 4)),
        ("model.layers.0.mlp.down_proj.A", (4, 24)),
        ("model.layers.0.mlp.down_proj.B", (8, 4)),
    ]


@pytest.mark.parametrize("wrapper", ["_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."])
def test_what_wraps_a_layer_leaves_no_trace_in_the_names(wrapper: str) -> None:
    wrapped = adapter_parameters(peft_model(layer=LAYER + wrapper))
    assert [name for name, _ in wrapped] == [name for name, _ in adapter_parameters(peft_model())]


def test_a_layout_keeps_every_matrix_under_its_name() -> None:
    found = adapter_parameters(peft_model())
    layout = make_layout((name, tensor.shape, torch.bfloat16) for name, tensor in found)
    assert [(e.name, e.shape) for e in layout.entries] == [(name, tuple(tensor.shape)) for name, tensor in found]


def test_the_engine_hears_the_names_of_pefts_files() -> None:
    assert engine_tensor_name("model.layers.0.self_attn.q_proj.A") == "model.layers.0.self_attn.q_proj.lora_A.weight"


def test_another_adapter_of_the_same_model_does_not_travel() -> None:
    other = [(name.replace("default", "other"), tensor) for name, tensor in peft_model()]
    assert len(adapter_parameters([*peft_model(), *other])) == 4
    with pytest.raises(ConfigError, match="no LoRA parameters of an adapter 'default'"):
        adapter_parameters(other)


@pytest.mark.parametrize(
    "name", [f"{LAYER}input_layernorm.weight", "base_model.model.model.embed_tokens.lora_embedding_A.default"]
)
def test_a_trained_parameter_that_would_never_reach_the_generators_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"parameter {name} is trained, yet only"):
        adapter_parameters([*peft_model(), (name, trained(8))])


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_the_embedding_and_the_head_carry_no_adapter(module: str) -> None:
    name = f"base_model.model.{module}.lora_A.default.weight"
    with pytest.raises(ConfigError, match=f"{module} has an adapter"):
        adapter_parameters([*peft_model(), (name, trained(4, 8))])


# ---- the spec -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rslora", "scaling"), [(False, 4.0), (True, 8.0)])
def test_the_scaling_is_alpha_over_the_rank_or_over_its_root(rslora: bool, scaling: float) -> None:
    spec = adapter_spec(peft_config(use_rslora=rslora), adapter_parameters(peft_model()))
    assert spec.scaling == scaling
    assert spec.plain()["scaling"] == scaling
    assert spec.targets == ("down_proj", "q_proj")


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "lora_only"},
        {"lora_dropout": 0.05},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"init_lora_weights": "pissa"},
    ],
    ids=str,
)
def test_what_the_engine_would_compute_differently_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"LoRA option {next(iter(options))} is"):
        adapter_spec(peft_config(**options), adapter_parameters(peft_model()))


def test_options_left_at_their_defaults_are_fine() -> None:
    config = peft_config(bias="none", lora_dropout=0.0, rank_pattern={}, modules_to_save=None, init_lora_weights=True)
    adapter_spec(config, adapter_parameters(peft_model()))


def test_matrices_of_another_rank_than_the_config_says_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"q_proj\.A has shape \[2, 8\], which is not of rank 4"):
        adapter_spec(peft_config(), adapter_parameters(peft_model(rank=2)))


@given(st.integers(1, 512))
def test_the_engine_makes_room_for_the_least_rank_that_holds_an_adapter(rank: int) -> None:
    room = engine_rank(rank)
    assert room in ENGINE_RANKS
    assert room >= rank
    assert all(other < rank or other >= room for other in ENGINE_RANKS)


@pytest.mark.parametrize("rank", [0, 513])
def test_a_rank_that_no_engine_holds_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"got {rank}"):
        engine_rank(rank)


@given(st.sets(st.integers(0, 10**6), min_size=2, max_size=20))
def test_every_version_has_a_name_and_every_slot_an_id_of_its_own(numbers: set[int]) -> None:
    assert len({adapter_name(v) for v in numbers}) == len({adapter_id(slot) for slot in numbers}) == len(numbers)
    assert min(adapter_id(slot) for slot in numbers) > 0, "vLLM's id 0 means no adapter"


# ---- which versions an engine holds ---------------------------------------------------------------


def put(registry: AdapterRegistry, version: int) -> None:
    """What an update does, into the slot that is free."""
    slot = registry.free_slot
    assert slot is not None
    registry.add(version, slot)


def test_requests_run_on_the_base_model_until_an_adapter_comes() -> None:
    registry = AdapterRegistry(2)
    assert registry.acquire() is None
    registry.add(3, 1)
    assert registry.acquire() == 3
    registry.release(None)
    assert registry.held == {3: 1}
    assert (registry.slot(3), registry.free_slot) == (1, 0)


def test_a_version_goes_when_a_newer_one_serves_and_its_last_request_has_ended() -> None:
    registry = AdapterRegistry(3)
    put(registry, 1)
    first, second = registry.acquire(), registry.acquire()
    put(registry, 2)
    registry.release(first)
    assert registry.held == {1: 1, 2: 0}
    registry.release(second)
    assert registry.held == {2: 0}
    assert registry.free_slot == 0


def test_a_version_that_nobody_used_goes_when_a_newer_one_serves() -> None:
    registry = AdapterRegistry(2)
    put(registry, 1)
    assert registry.held == {1: 0}, "the newest stays"
    put(registry, 2)
    assert registry.held == {2: 0}
    assert registry.slot(2) == 1, "requests may have begun under the old one until the new one served"


def test_a_slot_in_use_is_not_free_and_takes_no_further_version() -> None:
    registry = AdapterRegistry(2)
    put(registry, 1)
    registry.acquire()
    put(registry, 2)
    assert registry.free_slot is None
    for slot in range(2):
        with pytest.raises(WeightSyncError, match=rf"version 3 does not fit into slot {slot}.*v1: 1 running, v2: 0"):
            registry.add(3, slot)


@pytest.mark.parametrize("version", [1, 2])
def test_versions_only_grow(version: int) -> None:
    registry = AdapterRegistry(3)
    registry.add(2, 0)
    with pytest.raises(WeightSyncError, match=f"version {version} came after 2"):
        registry.add(version, 1)


def test_an_end_that_nobody_began_is_an_error() -> None:
    registry = AdapterRegistry(2)
    put(registry, 1)
    for version in (1, 7):
        with pytest.raises(WeightSyncError, match=f"version {version} ended that was not counted"):
            registry.release(version)


def test_one_adapter_alone_could_never_be_replaced() -> None:
    with pytest.raises(ConfigError, match="2 adapters or more"):
        AdapterRegistry(1)


@given(st.lists(st.integers(0, 2), max_size=200), st.integers(2, 4))
def test_whatever_happens_nothing_in_use_goes_and_no_two_versions_share_a_slot(
    events: list[int], capacity: int
) -> None:
    registry, running, version = AdapterRegistry(capacity), list[int](), 0
    for event in events:
        if event == 0 and (slot := registry.free_slot) is not None:
            version += 1
            registry.add(version, slot)
        elif event == 1 and (taken := registry.acquire()) is not None:
            assert taken == version
            running.append(taken)
        elif event == 2 and running:
            registry.release(running.pop(len(running) // 2))
        assert registry.held == {v: running.count(v) for v in {*running, version} if v}
        slots = [registry.slot(v) for v in registry.held]
        assert len(set(slots)) == len(slots) <= capacity
        assert registry.free_slot not in slots
        assert (registry.free_slot is None) == (len(slots) == capacity)
