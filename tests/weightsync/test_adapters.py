"""Which tensors are an adapter, under which names, and which versions of it an engine may give up."""

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
def test_every_version_has_an_id_and_a_name_of_its_own(versions: set[int]) -> None:
    assert len({adapter_id(v) for v in versions}) == len({adapter_name(v) for v in versions}) == len(versions)
    assert min(adapter_id(v) for v in versions) > 0, "vLLM's id 0 means no adapter"


# ---- which versions an engine holds ---------------------------------------------------------------


def test_requests_run_on_the_base_model_until_an_adapter_comes() -> None:
    registry = AdapterRegistry(2)
    assert registry.acquire() is None
    registry.add(3)
    assert registry.acquire() == 3
    assert not registry.release(None)
    assert registry.held == {3: 1}


def test_a_version_may_go_when_a_newer_one_serves_and_its_last_request_has_ended() -> None:
    registry = AdapterRegistry(3)
    registry.add(1)
    first, second = registry.acquire(), registry.acquire()
    registry.add(2)
    assert registry.unused == []
    assert not registry.release(first)
    assert registry.release(second)
    assert registry.unused == [1]
    registry.drop(1)
    assert registry.held == {2: 0}


def test_the_newest_version_stays_even_when_nobody_uses_it() -> None:
    registry = AdapterRegistry(2)
    registry.add(1)
    assert registry.unused == []
    with pytest.raises(WeightSyncError, match=r"version 1 may not be freed: the engine holds v1: 0 running"):
        registry.drop(1)


def test_a_version_in_use_may_not_be_dropped() -> None:
    registry = AdapterRegistry(2)
    registry.add(1)
    registry.acquire()
    registry.add(2)
    with pytest.raises(WeightSyncError, match=r"version 1 may not be freed: .*v1: 1 running, v2: 0 running"):
        registry.drop(1)


def test_a_full_engine_takes_no_further_version() -> None:
    registry = AdapterRegistry(2)
    registry.add(1)
    registry.acquire()
    registry.add(2)
    assert not registry.has_room
    with pytest.raises(WeightSyncError, match=r"version 3 does not fit: the engine holds 2 \(v1: 1 running"):
        registry.add(3)


@pytest.mark.parametrize("version", [1, 2])
def test_versions_only_grow(version: int) -> None:
    registry = AdapterRegistry(3)
    registry.add(2)
    with pytest.raises(WeightSyncError, match=f"version {version} came after 2"):
        registry.add(version)


def test_an_end_that_nobody_began_is_an_error() -> None:
    registry = AdapterRegistry(2)
    registry.add(1)
    with pytest.raises(WeightSyncError, match="version 1 ended that was not counted"):
        registry.release(1)


def test_one_adapter_alone_could_never_be_replaced() -> None:
    with pytest.raises(ConfigError, match="2 adapters or more"):
        AdapterRegistry(1)


@given(st.lists(st.integers(0, 3), max_size=200), st.integers(2, 4))
def test_whatever_happens_nothing_in_use_goes_and_no_more_than_fits_is_held(events: list[int], capacity: int) -> None:
    registry, running, version = AdapterRegistry(capacity), list[int](), 0
    for event in events:
        if event == 0 and registry.has_room:
            version += 1
            registry.add(version)
        elif event == 1 and (taken := registry.acquire()) is not None:
            assert taken == version
            running.append(taken)
        elif event == 2 and running:
            ended = running.pop(len(running) // 2)
            assert registry.release(ended) == (ended not in running and ended != version)
        elif event == 3:
            for unused in registry.unused:
                registry.drop(unused)
        assert set(running) <= set(registry.held)
        assert len(registry.held) <= capacity
        assert {v: n for v, n in registry.held.items() if n} == {v: running.count(v) for v in set(running)}
