"""Fails when the vLLM internals that `weightsync.worker` touches move; reads vLLM's source, imports none of it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightsync.worker.shadow import _DERIVED


def source(path: str, package: str = "vllm") -> ast.Module:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse((Path(spec.origin).parent / path).read_text())


def function(tree: ast.AST, name: str) -> ast.FunctionDef:
    """The first of this name; of a class with overloads the last, which has the body."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"{name} is gone"
    return found[-1] if isinstance(tree, ast.ClassDef) else found[0]


def classes(tree: ast.AST) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def methods(body: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in body.body if isinstance(node, ast.FunctionDef)}


def arguments(body: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [argument.arg for argument in (*body.args.args, *body.args.kwonlyargs)]


def fields(body: ast.AST) -> set[str]:
    """Names that are declared with a type, as a dataclass does."""
    declared = [node.target for node in ast.walk(body) if isinstance(node, ast.AnnAssign)]
    return {target.id for target in declared if isinstance(target, ast.Name)}


def assigned(body: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(body):
        if isinstance(node, ast.Assign):
            yield from node.targets
        elif isinstance(node, ast.AnnAssign):
            yield node.target


def attributes_set_on(body: ast.AST, variable: str = "self") -> set[str]:
    return {
        target.attr
        for target in assigned(body)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == variable
    }


def calls(body: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a function or method, as it is written there."""
    return [node for node in ast.walk(body) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]


# ---- the shadow model -----------------------------------------------------------------------------


def test_what_a_cpu_linear_layer_keeps_of_its_weight_is_what_the_flip_exchanges() -> None:
    body = function(source("model_executor/layers/utils.py"), "dispatch_cpu_unquantized_gemm")
    # The convolution weight belongs to models with state-space layers: there is no shadow of those.
    assert attributes_set_on(body, "layer") == {"cpu_linear", "weight", "_cpu_unpacked_conv_weight"}
    assert "cpu_linear" in _DERIVED


def test_attention_that_derives_other_weights_from_its_own_is_known_by_its_name() -> None:
    attention = classes(source("model_executor/layers/attention/mla_attention.py"))["MLAAttention"]
    assert "replace_parameter" in ast.dump(function(attention, "process_weights_after_loading"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("initialize_layerwise_reload", ["model"]),
        ("finalize_layerwise_processing", ["model", "model_config"]),  # what finalize_layerwise_reload passes on to
    ],
)
def test_the_layerwise_reload_takes_the_model(name: str, expected: list[str]) -> None:
    assert arguments(function(source("model_executor/model_loader/reload/layerwise.py"), name)) == expected


def test_rotary_modules_are_cached_in_one_global_dictionary() -> None:
    tree = source("model_executor/layers/rotary_embedding/__init__.py")
    names = {target.id for node in tree.body for target in assigned(node) if isinstance(target, ast.Name)}
    assert "_ROPE_DICT" in names


@pytest.mark.parametrize("register", ["static_forward_context", "static_all_moe_layers"])
def test_layers_register_by_name_in_the_compilation_config(register: str) -> None:
    assert register in fields(source("config/compilation.py"))


def test_experts_are_packed_only_where_their_method_has_no_kernel() -> None:
    base = classes(source("model_executor/layers/fused_moe/fused_moe_method_base.py"))["FusedMoEMethodBase"]
    assert "moe_kernel" in attributes_set_on(function(base, "__init__"))
    assert "quant_method" in attributes_set_on(source("model_executor/layers/fused_moe/routed_experts.py"))
    body = function(source("model_executor/layers/fused_moe/unquantized_fused_moe_method.py"), "_setup_kernel")
    known = next(node for node in ast.walk(body) if isinstance(node, ast.Assign) and "moe_kernel" in ast.dump(node))
    assert ast.unparse(known) == "is_weight_update = self.moe_kernel is not None"
    pack = "self.moe_kernel.fused_experts.process_weights_after_loading"
    (guarded,) = [node for node in body.body if calls(node, pack)]
    assert isinstance(guarded, ast.If)
    assert ast.unparse(guarded.test) == "not is_weight_update"


# ---- the weight-transfer interface ----------------------------------------------------------------


def test_the_transfer_engine_has_the_methods_that_vllm_calls() -> None:
    interface = methods(classes(source("distributed/weight_transfer/base.py"))["WeightTransferEngine"])
    ours = methods(classes(source("transfer_engine.py", "weightsync.worker"))["ForgeTransferEngine"])
    abstract = {name for name, body in interface.items() if "abstractmethod" in map(ast.unparse, body.decorator_list)}
    assert abstract <= ours.keys() <= interface.keys()
    assert {name: arguments(body) for name, body in ours.items()} == {name: arguments(interface[name]) for name in ours}
    assert {"vllm_config", "model"} <= attributes_set_on(interface["__init__"])
    assert arguments(interface["parse_update_info"]) == ["self", "update_dict"]


def test_a_transfer_engine_is_registered_by_name_and_held_by_the_worker() -> None:
    factory = classes(source("distributed/weight_transfer/factory.py"))["WeightTransferEngineFactory"]
    assert arguments(methods(factory)["register_engine"]) == ["cls", "name", "module_path_or_cls", "class_name"]
    assert "weight_transfer_engine" in attributes_set_on(source("v1/worker/gpu_worker.py"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pause_generation", ["mode", "clear_cache"]),
        ("resume_generation", []),
        ("start_weight_update", []),
        ("update_weights", ["request"]),
        ("finish_weight_update", ["weight_version"]),
        ("update_weight_version", ["new_version"]),
        ("collective_rpc", ["method", "timeout", "args", "kwargs"]),
    ],
)
def test_the_engine_has_the_methods_that_an_update_calls(name: str, expected: list[str]) -> None:
    engine = classes(source("v1/engine/async_llm.py"))["AsyncLLM"]
    body = next(node for node in engine.body if isinstance(node, ast.AsyncFunctionDef) and node.name == name)
    assert arguments(body) == ["self", *expected]


# ---- labels ---------------------------------------------------------------------------------------


def test_a_step_is_labelled_with_the_version_that_holds_when_it_ends() -> None:
    body = function(source("v1/engine/core.py"), "_attach_weight_version")
    assert "_weight_version" in ast.dump(body)
    assert "_attach_weight_version" in ast.dump(function(source("v1/engine/core.py"), "step"))


def test_the_engine_that_calls_the_worker_can_be_told_the_version() -> None:
    engines = [
        name
        for name, body in classes(source("v1/engine/core.py")).items()
        if {"collective_rpc", "set_weight_version"} <= methods(body).keys()
    ]
    assert engines == ["EngineCore"]


# ---- LoRA -----------------------------------------------------------------------------------------


def test_the_lora_manager_keeps_its_slots_and_its_adapters_where_we_write_them() -> None:
    found = classes(source("lora/model_manager.py"))
    manager = found["LoRAModelManager"]
    held = {"lora_index_to_id", "_registered_adapters", "_active_adapters", "packed_modules", "modules", "lora_config"}
    assert {*held, "model"} <= attributes_set_on(methods(manager)["__init__"])
    assert {"lora_slots", "list_adapters"} <= methods(manager).keys()
    # What makes the next step look at the slots anew.
    assert "self.lora_index_to_id" in ast.unparse(methods(manager)["set_adapter_mapping"])
    # An adapter that is active already is not written into another slot.
    first = methods(manager)["activate_adapter"].body[1]
    assert ast.unparse(first) == "if lora_id in self._active_adapters:\n    return False"
    assert "pin" in methods(classes(source("utils/cache.py"))["LRUCache"])


def test_the_prefix_cache_goes_by_the_name_of_an_adapter_and_not_by_its_id() -> None:
    body = function(source("v1/core/kv_cache_utils.py"), "_gen_lora_extra_hash_keys")
    assert "lora_request.lora_name" in ast.unparse(body)
    assert "lora_int_id" not in ast.unparse(body)


def test_tokens_of_a_request_that_was_aborted_go_nowhere() -> None:
    processor = methods(classes(source("v1/engine/output_processor.py"))["OutputProcessor"])
    assert "self.request_states.pop(request_id, None)" in ast.unparse(processor["abort_requests"])
    assert "if req_state is None:\n            continue" in ast.unparse(processor["process_outputs"])


def test_a_worker_loads_an_adapter_only_where_it_does_not_know_its_id() -> None:
    found = classes(source("lora/worker_manager.py"))
    assert arguments(methods(found["WorkerLoRAManager"])["_load_adapter"]) == ["self", "lora_request"]
    manager = found["LRUCacheWorkerLoRAManager"]
    assert "_adapter_manager" in attributes_set_on(manager)
    (branch,) = [node for node in ast.walk(methods(manager)["add_adapter"]) if isinstance(node, ast.If) and node.orelse]
    assert ast.unparse(branch.test).startswith("lora_request.lora_int_id not in self.list_adapters()")
    assert calls(branch.body[0], "self._load_adapter")
    assert not any(calls(node, "self._load_adapter") for node in branch.orelse)
    assert "lora_manager" in attributes_set_on(source("v1/worker/lora_model_runner_mixin.py"))


def test_a_lora_layer_has_stacked_matrices_of_all_slots_and_cuts_what_a_worker_needs() -> None:
    column = source("lora/layers/column_parallel_linear.py")
    for tree in (source("lora/layers/base_linear.py"), column):
        bodies = [body for body in ast.walk(tree) if isinstance(body, ast.FunctionDef)]
        create = [body for body in bodies if body.name == "create_lora_weights" and calls(body, "torch.zeros")]
        assert len(create) == 1
        assert {"lora_a_stacked", "lora_b_stacked"} <= attributes_set_on(create[0])
        shapes = [[ast.unparse(argument) for argument in call.args] for call in calls(create[0], "torch.zeros")]
        assert [shape[:2] for shape in shapes] == [["max_loras", "1"]] * 2
        assert [len(shape) for shape in shapes] == [4, 4]
        assert (shapes[0][3], shapes[1][3]) == ("self.input_size", "lora_config.max_lora_rank")
    for path in ("base", "row_parallel_linear", "replicated_linear", "column_parallel_linear"):
        for name, body in classes(source(f"lora/layers/{path}.py")).items():
            for side in ("lora_a", "lora_b"):
                if f"slice_{side}" in methods(body):
                    assert arguments(function(body, f"slice_{side}")) == ["self", side], name
    base = classes(source("lora/layers/base_linear.py"))["BaseLinearLayerWithLoRA"]
    assert {"base_layer", "tp_size"} <= attributes_set_on(methods(base)["__init__"])
    assert "n_slices" in attributes_set_on(column)


def test_a_linear_layer_says_its_whole_sizes() -> None:
    linear = classes(source("model_executor/layers/linear.py"))
    assert {"input_size", "output_size"} <= attributes_set_on(linear["LinearBase"])
    assert "output_sizes" in attributes_set_on(linear["MergedColumnParallelLinear"])
    assert {"total_num_heads", "total_num_kv_heads", "head_size"} <= attributes_set_on(linear["QKVParallelLinear"])


def test_adapters_and_their_requests_are_made_as_we_make_them() -> None:
    request = classes(source("lora/request.py"))["LoRARequest"]
    declared = [ast.unparse(node.target) for node in request.body if isinstance(node, ast.AnnAssign)]
    assert declared[:3] == ["lora_name", "lora_int_id", "lora_path"]
    model = methods(classes(source("lora/lora_model.py"))["LoRAModel"])["__init__"]
    assert arguments(model)[:4] == ["self", "lora_model_id", "rank", "loras"]
    assert arguments(function(source("lora/utils.py"), "parse_fine_tuned_lora_name")) == ["name", "weights_mapper"]
    assert "get_rename_mapper" in methods(classes(source("model_executor/models/utils.py"))["WeightsMapper"])
    assert {"max_lora_rank", "lora_dtype", "fully_sharded_loras"} <= fields(source("config/lora.py"))
