"""Laws of the layout: every box has its own bytes, and names are those of the bare model."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import WeightSyncError
from weightsync.layout import (
    Box,
    Layout,
    box_shape,
    clean_name,
    full_box,
    inside,
    intersect,
    is_adapter,
    make_layout,
    numel,
    sub_view,
    view,
)

PARAMETERS = [
    ("model.embed.weight", (7, 3), torch.float32),
    ("model.norm.weight", (3,), torch.float32),
    ("model.gate.weight", (5, 3), torch.bfloat16),
    ("model.scale", (), torch.float32),
]
BOXES: dict[str, Box | None] = {
    "model.embed.weight": ((2, 5), (1, 3)),
    "model.norm.weight": None,
    "model.gate.weight": ((4, 4), (0, 3)),
    "model.scale": (),
}


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return tuple((start, stop) for start, stop in ends)


def test_every_parameter_has_its_own_bytes() -> None:
    layout = make_layout(PARAMETERS)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for number, entry in enumerate(layout.entries):
        view(buffer, entry).fill_(number + 1)
    for number, entry in enumerate(layout.entries):
        assert entry.offset % 64 == 0
        assert entry.box == full_box(entry.shape)
        assert view(buffer, entry).shape == entry.shape
        assert bool((view(buffer, entry) == number + 1).all())


def test_a_rank_layout_packs_what_the_rank_holds_and_leaves_out_the_rest() -> None:
    layout = make_layout(PARAMETERS, BOXES)
    assert [(e.name, e.shape, box_shape(e.box), e.offset, e.nbytes) for e in layout.entries] == [
        ("model.embed.weight", (7, 3), (3, 2), 0, 24),
        ("model.scale", (), (), 64, 4),
    ]
    assert layout.nbytes == 128
    assert make_layout(PARAMETERS, {}).entries == ()


@pytest.mark.parametrize("layout", [make_layout(PARAMETERS), make_layout(PARAMETERS, BOXES), make_layout([])])
def test_a_layout_survives_a_plain_message(layout: Layout) -> None:
    assert Layout.from_plain(json.loads(json.dumps(layout.plain()))) == layout


@given(st.data())
def test_a_view_of_a_box_is_that_part_of_the_parameter(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    full = torch.arange(1.0, 1 + numel(full_box(shape))).view(shape)
    held, wanted = data.draw(boxes(shape)), data.draw(boxes(shape))
    layout = make_layout([("before", (3,), torch.uint8), ("w", shape, torch.float32)], {"w": held, "before": ((0, 3),)})
    if numel(held) == 0:
        assert [e.name for e in layout.entries] == ["before"]
        return
    entry = layout.entries[1]
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    view(buffer, entry).copy_(full[tuple(slice(*r) for r in held)])
    part = sub_view(buffer, entry, held if not inside(wanted, held) else wanted)
    assert torch.equal(part, full[tuple(slice(*r) for r in (held if not inside(wanted, held) else wanted))])
    assert part.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    if not inside(wanted, held):
        with pytest.raises(WeightSyncError, match=r"w: box .* is not inside"):
            sub_view(buffer, entry, wanted)


@given(st.data())
def test_an_intersection_has_the_elements_that_are_in_both(data: st.DataObject) -> None:
    a, b = data.draw(boxes((4, 5))), data.draw(boxes((4, 5)))
    cells = [set(product(*(range(*r) for r in box))) for box in (a, b)]
    both = intersect(a, b)
    assert (set(product(*(range(*r) for r in both))) if both else set()) == cells[0] & cells[1]


def test_two_parameters_of_one_name_are_an_error() -> None:
    with pytest.raises(WeightSyncError, match=r"two parameters are named a\.weight"):
        make_layout([("a.weight", (1,), torch.float32), ("module.a.weight", (1,), torch.float32)])


@pytest.mark.parametrize("box", [((0, 8), (0, 3)), ((0, 7),), ((5, 4), (0, 3)), ((-1, 2), (0, 3))])
def test_a_box_that_is_no_box_of_the_parameter_is_an_error(box: Box) -> None:
    with pytest.raises(WeightSyncError, match=r"model\.embed\.weight"):
        make_layout(PARAMETERS, {"model.embed.weight": box})


@pytest.mark.parametrize(
    ("wrapped", "bare"),
    [
        (
            "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module._orig_mod.mlp.weight",
            "model.layers.0.mlp.weight",
        ),
        ("module._orig_mod.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.module.model.norm.weight", "model.norm.weight"),
        ("base_model.model.model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight"),
        ("module.base_model.model.model.layers.0.q_proj.base_layer.bias", "model.layers.0.q_proj.bias"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("base_model.model.model.experts.base_layer.gate_up_proj", "model.experts.gate_up_proj"),
        ("model.submodule.module.weight", "model.submodule.module.weight"),
        ("base_model.layers.0.weight", "base_model.layers.0.weight"),
        ("w", "w"),
    ],
)
def test_wrapper_names_are_removed(wrapped: str, bare: str) -> None:
    assert clean_name(wrapped) == bare


def test_parameters_of_an_adapter_are_no_parameters_of_the_base_model() -> None:
    prefix = "base_model.model.model.layers.0.q_proj"
    adapter = [f"{prefix}.lora_A.default.weight", f"{prefix}.lora_B.default.weight", f"{prefix}.lora_embedding_A.x"]
    frozen = "base_model.model.lm_head.original_module.weight"
    trained = "base_model.model.lm_head.modules_to_save.default.weight"
    assert all(map(is_adapter, [*adapter, frozen]))
    names = [f"{prefix}.base_layer.weight", *adapter, frozen, trained]
    layout = make_layout((name, (2,), torch.float32) for name in names)
    assert [entry.name for entry in layout.entries] == ["model.layers.0.q_proj.weight", "lm_head.weight"]
