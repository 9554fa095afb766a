"""Fails when the vLLM internals that `weightsync/receiver.py` touches move; reads vLLM's source, imports none of it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest


def source(path: str) -> ast.Module:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return ast.parse((Path(spec.origin).parent / path).read_text())


def function(tree: ast.Module, name: str) -> ast.FunctionDef:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"{name} is gone"
    return found[0]


def attributes_set_on(body: ast.FunctionDef, variable: str) -> set[str]:
    return {
        target.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == variable
    }


def test_what_a_cpu_linear_layer_keeps_of_its_weight_is_what_the_flip_exchanges() -> None:
    body = function(source("model_executor/layers/utils.py"), "dispatch_cpu_unquantized_gemm")
    # The convolution weight belongs to models with state-space layers.
    assert attributes_set_on(body, "layer") == {"cpu_linear", "weight", "_cpu_unpacked_conv_weight"}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("initialize_layerwise_reload", ["model"]),
        ("finalize_layerwise_processing", ["model", "model_config"]),  # what finalize_layerwise_reload passes on to
    ],
)
def test_the_layerwise_reload_takes_the_model(name: str, arguments: list[str]) -> None:
    body = function(source("model_executor/model_loader/reload/layerwise.py"), name)
    assert [argument.arg for argument in body.args.args] == arguments


def test_rotary_modules_are_cached_in_one_global_dictionary() -> None:
    tree = source("model_executor/layers/rotary_embedding/__init__.py")
    names = {
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    assert "_ROPE_DICT" in names


def test_attention_layers_register_in_the_static_forward_context() -> None:
    fields = [node.target for node in ast.walk(source("config/compilation.py")) if isinstance(node, ast.AnnAssign)]
    assert "static_forward_context" in [field.id for field in fields if isinstance(field, ast.Name)]


def test_a_step_is_labelled_with_the_version_that_holds_when_it_ends() -> None:
    body = function(source("v1/engine/core.py"), "_attach_weight_version")
    assert "_weight_version" in ast.dump(body)
    assert "_attach_weight_version" in ast.dump(function(source("v1/engine/core.py"), "step"))


def test_the_engine_that_calls_the_worker_can_be_told_the_version() -> None:
    engines = [
        node
        for node in ast.walk(source("v1/engine/core.py"))
        if isinstance(node, ast.ClassDef)
        and {"collective_rpc", "set_weight_version"} <= {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
    ]
    assert [engine.name for engine in engines] == ["EngineCore"]
