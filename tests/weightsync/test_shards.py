"""Laws of what a trainer rank holds: torch's own shards, and the names of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from forge.errors import WeightSyncError
from weightsync.layout import Box, box_shape, full_box, intersect, make_layout, numel, view
from weightsync.shards import _STACKED_EXPERTS, checkpoint_parts, claim, published, shard_box, tensor_box

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts_per_tok": 2,
}


def part_of(full: torch.Tensor, box: Box | None) -> torch.Tensor:
    return full.flatten()[:0] if box is None else full[tuple(slice(start, stop) for start, stop in box)]


# --- boxes


@contextmanager
def rank_of(world: int, rank: int) -> Iterator[None]:
    """This process as one rank of a group whose other ranks do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=3),
)
def test_boxes_are_those_of_dtensor(shape: list[int], mesh: list[tuple[int, int]]) -> None:
    """A mesh dimension of some size shards the dimension of that number, where there is one."""
    sizes = [size for size, _ in mesh]
    theirs = [Shard(dim) if dim < len(shape) else Replicate() for _, dim in mesh]
    ours = [("shard", dim) if dim < len(shape) else ("replicate",) for _, dim in mesh]
    covered = torch.zeros(shape)
    for coordinate in torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, len(sizes)).tolist():
        box = shard_box(shape, sizes, coordinate, ours)
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, coordinate, theirs)
        if 0 in local:
            assert box is None
        else:
            assert box is not None
            assert (box_shape(box), tuple(start for start, _ in box)) == (local, offset)
            part_of(covered, box).add_(1)
    copies = [size for size, dim in mesh if dim >= len(shape)]
    assert bool((covered == torch.tensor(copies).prod()).all())


@pytest.mark.parametrize("split", [0, 1, None], ids=["tp_rows", "tp_columns", "tp_replicated"])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (4, 1), (3, 2), (2, 3)])
def test_the_box_of_a_tensor_is_what_fsdp2_over_tensor_parallelism_left_on_the_rank(
    dp: int, tp: int, split: int | None
) -> None:
    for rows in (1, 5, 7, 8):
        full = torch.arange(rows * 6.0).view(rows, 6)
        covered = torch.zeros(rows, 6)
        for rank in range(dp * tp):
            with rank_of(dp * tp, rank):
                # FSDP2 keeps a mesh of the same names, with the coordinate of the rank that made it first.
                names = (f"dp{rank}of{dp}x{tp}", f"tp{rank}of{dp}x{tp}")
                mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=names)
                placement = Replicate() if split is None else Shard(split)
                module = nn.Module()
                module.w = nn.Parameter(distribute_tensor(full, mesh[names[1]], [placement], src_data_rank=None))
                fully_shard(module, mesh=mesh[names[0]])
                assert isinstance(module.w, DTensor)
                box = tensor_box(module.w)
                assert torch.equal(part_of(full, box).reshape(-1), module.w.to_local().detach().reshape(-1))
                part_of(covered, box).add_(1)
        assert bool((covered == (tp if split is None else 1)).all())


def test_a_plain_tensor_is_held_whole_and_one_of_another_mesh_not_at_all() -> None:
    assert tensor_box(torch.zeros(3, 2)) == ((0, 3), (0, 2))
    assert tensor_box(torch.zeros(())) == ()
    with rank_of(3, 2):
        elsewhere = dist.device_mesh.DeviceMesh("cpu", [0, 1])
        assert tensor_box(DTensor.from_local(torch.zeros(1), elsewhere, [Shard(0)], run_check=False)) is None
        everywhere = init_device_mesh("cpu", (3,))
        assert tensor_box(DTensor.from_local(torch.zeros(()), everywhere, [Replicate()], run_check=False)) == ()


def test_ways_of_sharding_that_leave_no_single_box_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="several ranges of dimension 0"):
        shard_box((8,), (2,), (0,), [("strided", 0, 2)])
    with rank_of(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(WeightSyncError, match=r"placement P\(sum\)"):
            tensor_box(DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False))
        with pytest.raises(WeightSyncError, match="several ranges"):
            tensor_box(DTensor.from_local(torch.zeros(4), mesh, [_StridedShard(0, split_factor=2)], run_check=False))
        other = DTensor.from_local(
            torch.zeros(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
        )
        with pytest.raises(WeightSyncError, match=r"a shard of shape \(3,\)"):
            tensor_box(other)


# --- owners


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), max_size=12))
def test_of_what_ranks_hold_alike_one_sends_each_box_and_none_has_much_more_to_send(
    world: int, parameters: list[tuple[int, int]]
) -> None:
    held: list[dict[str, Box]] = [{} for _ in range(world)]
    for number, (rows, shards) in enumerate(parameters):
        for rank in range(world):  # `shards` shards, each on every rank of that remainder
            box = shard_box((rows,), (shards,), (rank % shards,), [("shard", 0)]) if shards <= world else ((0, rows),)
            if box is not None:
                held[rank][f"p{number}"] = box
    itemsize = {f"p{number}": 2 + number % 3 for number in range(len(parameters))}
    claimed = claim(held, itemsize)
    sent = [(name, box) for boxes in claimed for name, box in boxes.items()]
    assert len(sent) == len(set(sent))
    assert set(sent) == {(name, box) for boxes in held for name, box in boxes.items()}
    assert all(boxes.items() <= had.items() for boxes, had in zip(claimed, held, strict=True))
    assert claim(held, itemsize) == claimed
    if all(shards > world for _, shards in parameters) and sent:  # all replicated: free to balance
        load = [sum(numel(box) * itemsize[name] for name, box in boxes.items()) for boxes in claimed]
        assert max(load) - min(load) <= max(numel(box) * itemsize[name] for name, box in sent)


def test_a_rank_that_holds_more_alone_gets_less_of_what_is_shared() -> None:
    whole: Box = ((0, 8),)
    held: list[dict[str, Box]] = [{"own": ((0, 10),), "norm": whole}, {"own": ((10, 12),), "norm": whole}]
    assert claim(held, {"own": 1, "norm": 1}) == [{"own": ((0, 10),)}, {"own": ((10, 12),), "norm": whole}]


# --- names


def tiny(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if model_type == "qwen3_moe":
        config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=4, num_experts=3, mlp_only_layers=[1])
        return Qwen3MoeForCausalLM(config)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_parts_are_the_tensors_of_the_checkpoint_bit_for_bit(model_type: str, tmp_path: Path) -> None:
    model = tiny(model_type)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    ours = {
        part.name: part_of(tensor.detach(), part.box).reshape(part.shape)
        for name, tensor in model.named_parameters()
        for part in checkpoint_parts(name, tensor.shape, model_type)
    }
    assert ours.keys() == saved.keys()
    assert any(".experts.2." in name for name in ours)
    for name, tensor in saved.items():
        assert torch.equal(ours[name], tensor), name


def test_the_models_with_stacked_experts_are_converted_alike() -> None:
    def rules(model_type: str) -> list[str]:
        found = get_checkpoint_conversion_mapping(model_type)
        return [f"{r.source_patterns} {r.target_patterns} {getattr(r, 'operations', '')}" for r in found]

    proven = {"gate_proj": rules("qwen3_moe"), "w1": rules("mixtral")}
    assert proven["w1"] != proven["gate_proj"]
    for model_type, names in _STACKED_EXPERTS.items():
        assert rules(model_type) == proven[names["gate_up_proj"][0]], model_type


def test_names_of_other_models_stay_as_they_are() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert [(part.name, part.box) for part in checkpoint_parts(name, (2, 4, 3), "gpt_oss")] == [
        (name, ((0, 2), (0, 4), (0, 3)))
    ]


def test_experts_of_an_unexpected_shape_are_an_error() -> None:
    with pytest.raises(WeightSyncError, match=r"experts\.gate_up_proj has shape \(2, 5, 3\)"):
        checkpoint_parts("model.layers.0.mlp.experts.gate_up_proj", (2, 5, 3), "qwen3_moe")


@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from(["experts", "rows", "both"]))
def test_what_a_rank_holds_of_stacked_experts_is_its_part_of_each_expert(world: int, experts: int, by: str) -> None:
    """FSDP2 shards the stack of experts, tensor parallelism the rows of each."""
    stacked = torch.arange(experts * 6 * 2.0).view(experts, 6, 2)
    norm = torch.arange(3.0)
    placements = [("replicate",) if by == "rows" else ("shard", 0), ("replicate",) if by == "experts" else ("shard", 1)]
    name = "_fsdp_wrapped_module.model.layers.0.mlp.experts.gate_up_proj"
    seen: dict[str, torch.Tensor] = {}
    for rank in range(world * 2):
        coordinate = divmod(rank, 2)
        box = shard_box(stacked.shape, (world, 2), coordinate, placements)
        local = part_of(stacked, box)
        sources = published(
            [
                (name, stacked.shape, torch.float32, box),
                ("x.lora_A.weight", (1,), torch.float32, None),
                ("norm", (3,), torch.bfloat16, full_box((3,))),
            ],
            "qwen3_moe",
        )
        assert len(sources) == 2 * experts + 1
        assert (sources[-1].index, sources[-1].dtype) == (2, torch.bfloat16)
        assert torch.equal(sources[-1].of(norm), norm)
        layout = make_layout(
            ((s.name, s.shape, torch.float32) for s in sources[:-1]), {s.name: s.held for s in sources}
        )
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
        by_name = {s.name: s for s in sources}
        for entry in layout.entries:
            view(buffer, entry).copy_(by_name[entry.name].of(local))
            target = seen.setdefault(entry.name, torch.full(entry.shape, -1.0))
            part_of(target, entry.box).copy_(view(buffer, entry))
        held = sum(numel(s.held) for s in sources[:-1] if s.held is not None)
        assert held == (0 if box is None else numel(box))
    for expert in range(experts):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        assert torch.equal(seen[f"{prefix}.gate_proj.weight"], stacked[expert, :3])
        assert torch.equal(seen[f"{prefix}.up_proj.weight"], stacked[expert, 3:])


def test_parts_cover_a_parameter_once() -> None:
    parts = checkpoint_parts("a.mlp.experts.gate_up_proj", (3, 4, 2), "mixtral")
    assert sum(numel(part.box) for part in parts) == 24
    assert all(intersect(a.box, b.box) is None for i, a in enumerate(parts) for b in parts[:i])
    assert parts[1].name == "a.block_sparse_moe.experts.0.w3.weight"
