"""Laws of the weight layout."""

from __future__ import annotations

import pytest
import torch

from forge.errors import WeightSyncError
from weightsync.plan import Layout, clean_name, make_layout, row_view, shard_rows, unpaired_names, view

PARAMETERS = [
    ("model.embed.weight", (7, 3), torch.float32),
    ("model.norm.weight", (3,), torch.float32),
    ("model.gate.weight", (5, 3), torch.bfloat16),
    ("model.scale", (), torch.float32),
]


def test_every_parameter_has_its_own_bytes() -> None:
    layout = make_layout(PARAMETERS)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for number, entry in enumerate(layout.entries):
        view(buffer, entry).fill_(number + 1)
    for number, entry in enumerate(layout.entries):
        assert view(buffer, entry).shape == entry.shape
        assert bool((view(buffer, entry) == number + 1).all())


def test_a_layout_survives_a_plain_message() -> None:
    layout = make_layout(PARAMETERS)
    assert Layout.from_plain(layout.plain()).entries == layout.entries


def test_rows_written_by_all_ranks_make_the_whole_parameter() -> None:
    entry = make_layout([("w", (7, 3), torch.float32)]).entries[0]
    full = torch.arange(21.0).view(7, 3)
    for world in (1, 2, 3, 5, 9):
        buffer = torch.full((entry.nbytes,), 255, dtype=torch.uint8)
        for rank in range(world):
            rows = shard_rows(7, world, rank)
            row_view(buffer, entry, rows).copy_(full[rows.start : rows.stop])
        assert torch.equal(view(buffer, entry), full), world


@pytest.mark.parametrize("rows", [1, 5, 8, 576, 49152])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shard_rows_agree_with_torch_chunk(rows: int, world: int) -> None:
    chunks = [c.tolist() for c in torch.arange(rows).chunk(world)]
    ours = [list(shard_rows(rows, world, rank)) for rank in range(world)]
    assert [o for o in ours if o] == chunks


def test_wrapper_names_are_removed() -> None:
    wrapped = "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module._orig_mod.mlp.weight"
    assert clean_name(wrapped) == "model.layers.0.mlp.weight"


def test_two_parameters_of_one_name_are_an_error() -> None:
    with pytest.raises(WeightSyncError, match=r"two parameters are named a\.weight"):
        make_layout([("a.weight", (1,), torch.float32), ("module.a.weight", (1,), torch.float32)])


def test_a_fused_parameter_needs_all_its_parts_and_a_stray_name_is_found() -> None:
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    receiver = ["l.0.qkv_proj.weight", "l.0.norm.weight"]
    complete = ["l.0.q_proj.weight", "l.0.k_proj.weight", "l.0.v_proj.weight", "l.0.norm.weight"]
    assert unpaired_names(complete, receiver, packed) == ([], [])
    assert unpaired_names(complete[1:], receiver, packed) == (["l.0.q_proj.weight"], [])
    assert unpaired_names([*complete, "l.0.x"], receiver, packed) == ([], ["l.0.x"])
