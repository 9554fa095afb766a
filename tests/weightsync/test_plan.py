"""Laws of pairing: whatever the two sides' layouts, every rank gets what vLLM reads there, each element once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import WeightSyncError
from weightsync.layout import Box, Layout, full_box, intersect, make_layout, numel, sub_view, view
from weightsync.plan import ModulePart, Move, needed, pair, unpaired_names
from weightsync.shards import claim, published, shard_box

Slices = tuple[slice, ...]
GARBAGE = 0xAB  # read as a float32 it is a small negative number, while weights here are from 1 to 2


def cut(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(start, stop) for start, stop in box)]


def layouts(held: Sequence[Mapping[str, Box]], shapes: Mapping[str, tuple[int, ...]]) -> list[Layout]:
    return [make_layout(((name, shape, torch.float32) for name, shape in shapes.items()), boxes) for boxes in held]


# --- any boxes


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return tuple((start, stop) for start, stop in ends)


@given(st.data())
def test_every_needed_element_is_sent_once_whatever_overlaps(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    held = data.draw(st.lists(boxes(shape), min_size=1, max_size=4))
    wanted = data.draw(st.lists(boxes(shape), min_size=1, max_size=3))
    owned = torch.zeros(shape)
    for box in held:
        cut(owned, box).fill_(1)
    sources = layouts([{"w": box} for box in held], {"w": shape})
    need = [{"w": box} for box in wanted]
    if any(bool((cut(owned, box) == 0).any()) for box in wanted):
        with pytest.raises(WeightSyncError, match=r"held by no trainer rank: w"):
            pair(sources, need)
        return
    moves = pair(sources, need)
    assert moves == pair(sources, need)
    assert [move.target for move in moves] == sorted(move.target for move in moves)
    for target, box in enumerate(wanted):
        got = torch.zeros(shape)
        for move in moves:
            if move.target == target:
                assert intersect(move.box, held[move.source]) == move.box
                cut(got, move.box).add_(1)
        assert bool((cut(got, box) == 1).all())
        assert got.sum() == numel(box)


# --- a model, a trainer that shards it somehow, a tensor-parallel vLLM that loads it


def model(heads: int, kv_heads: int, experts: int, vocab: int, odd: int) -> dict[str, tuple[int, ...]]:
    """Parameters in memory; `odd` sizes are divided by no number of ranks."""
    hidden, inner, head_dim = odd, 8, 2
    shapes: dict[str, tuple[int, ...]] = {"model.embed.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        shapes[f"model.attn.{name}.weight"] = (rows * head_dim, hidden)
        shapes[f"model.attn.{name}.bias"] = (rows * head_dim,)
    shapes |= {"model.attn.o.weight": (hidden, heads * head_dim), "model.attn.o.bias": (hidden,)}
    shapes |= {"model.mlp.gate_proj.weight": (inner, hidden), "model.mlp.up_proj.weight": (2 * inner, hidden)}
    shapes |= {"model.mlp.down_proj.weight": (hidden, inner), "model.col.weight": (inner, 1), "model.scale": ()}
    shapes |= {"model.mlp.experts.gate_up_proj": (experts, 2 * inner, hidden)}
    shapes |= {"model.mlp.experts.down_proj": (experts, hidden, inner), "model.odd.weight": (odd, odd)}
    return shapes


def describe(shapes: Mapping[str, tuple[int, ...]], tp: int, expert_parallel: bool) -> dict[str, ModulePart]:
    (vocab, _), experts = shapes["model.embed.weight"], shapes["model.mlp.experts.down_proj"][0]
    heads, kv_heads = shapes["model.attn.q.bias"][0] // 2, shapes["model.attn.k.bias"][0] // 2
    moe = ModulePart("moe", parts=("gate_proj", "down_proj", "up_proj"), count=experts, sizes=(8,))
    if expert_parallel:
        ranks = tuple(tuple(range(rank, experts, tp)) for rank in range(tp))
        moe = ModulePart("moe", parts=("gate_proj", "down_proj", "up_proj"), count=experts, experts=ranks)
    return {
        "model.embed": ModulePart("vocab", rows=-(-vocab // 64) * 64 // tp, sizes=(vocab,)),
        "model.attn.qkv": ModulePart("qkv", parts=("q", "k", "v"), heads=heads, kv_heads=kv_heads, head_dim=2),
        "model.attn.o": ModulePart("row"),
        "model.mlp.gate_up_proj": ModulePart("merged", parts=("gate_proj", "up_proj"), sizes=(8, 16)),
        "model.mlp.down_proj": ModulePart("row", sizes=(8,)),
        "model.col": ModulePart("column"),
        "model.odd": ModulePart("whole"),
        "model.mlp.experts": moe,
    }


def read_by_vllm(
    shapes: Mapping[str, tuple[int, ...]], tp: int, rank: int, expert_parallel: bool
) -> dict[str, list[Slices]]:
    """What vLLM's loaders narrow to, in their own words; by names in memory."""
    vocab, experts = shapes["model.embed.weight"][0], shapes["model.mlp.experts.down_proj"][0]
    kv_heads = shapes["model.attn.k.bias"][0] // 2
    per_vocab = -(-vocab // 64) * 64 // tp
    replicas, kv_per_rank = (tp // kv_heads, 1) if tp >= kv_heads else (1, kv_heads // tp)

    def narrow(start: int, size: int) -> slice:
        return slice(start, start + size)

    def even(size: int) -> slice:
        return narrow(rank * (size // tp), size // tp)

    everything = slice(None)
    read: dict[str, list[Slices]] = {name: [(everything,) * len(shape)] for name, shape in shapes.items()}
    read["model.embed.weight"] = [(slice(min(rank * per_vocab, vocab), min((rank + 1) * per_vocab, vocab)),)]
    for kind in ("weight", "bias"):
        read[f"model.attn.q.{kind}"] = [(even(shapes["model.attn.q.bias"][0]),)]
        for part in "kv":
            read[f"model.attn.{part}.{kind}"] = [(narrow(rank // replicas * kv_per_rank * 2, kv_per_rank * 2),)]
    read["model.attn.o.weight"] = [(everything, even(shapes["model.attn.o.weight"][1]))]
    read["model.mlp.gate_proj.weight"], read["model.mlp.up_proj.weight"] = [(even(8),)], [(even(16),)]
    read["model.mlp.down_proj.weight"], read["model.col.weight"] = [(everything, even(8))], [(even(8),)]
    gate_up, down = "model.mlp.experts.gate_up_proj", "model.mlp.experts.down_proj"
    if expert_parallel:
        local = [e for e in range(experts) if e % tp == rank]
        read[gate_up], read[down] = [(narrow(e, 1),) for e in local], [(narrow(e, 1),) for e in local]
    else:
        gate, up = even(8), narrow(8 + rank * (8 // tp), 8 // tp)
        read[gate_up] = [(everything, gate), (everything, up)]
        read[down] = [(everything, everything, even(8))]
    return read


COLUMN_WISE = ("q.", "k.", "v.", "gate_proj", "up_proj", "embed", "gate_up_proj")
ROW_WISE = ("o.weight", "down_proj")


def held_by(shapes: Mapping[str, tuple[int, ...]], mesh: tuple[int, int, int], rank: int) -> dict[str, Box | None]:
    """A mesh of (replicas, FSDP2, tensor parallelism): what a rank holds of each parameter in memory."""
    replicas, fsdp, tp = mesh
    coordinate = (rank // (fsdp * tp), rank // tp % fsdp, rank % tp)
    found: dict[str, Box | None] = {}
    for name, shape in shapes.items():
        dim = next((0 for word in COLUMN_WISE if f".{word}" in name), None)
        dim = next((len(shape) - 1 for word in ROW_WISE if word in name), dim)
        dim = 1 if name.endswith("experts.gate_up_proj") else dim
        split: tuple[Any, ...] = ("replicate",) if dim is None or tp == 1 else ("shard", dim)
        rows: tuple[Any, ...] = ("strided", 0, tp) if split == ("shard", 0) else ("shard", 0)
        placements = [("replicate",), rows if shape else ("replicate",), split]
        found[name] = shard_box(shape, (replicas, fsdp, tp), coordinate, placements)
    return found


def transfer(
    moves: Sequence[Move], target: int, layout: Layout, sources: Sequence[Layout], buffers: Any
) -> torch.Tensor:
    """A receiver's image, and the law that nothing is sent twice."""
    image = torch.full((layout.nbytes,), GARBAGE, dtype=torch.uint8)
    entries = {entry.name: entry for entry in layout.entries}
    held = [{entry.name: entry for entry in source.entries} for source in sources]
    for move in moves:
        if move.target == target:
            place = sub_view(image, entries[move.name], move.box)
            assert bool((place < 1).all()), f"{move} comes twice"
            place.copy_(sub_view(buffers[move.source], held[move.source][move.name], move.box))
    return image


@given(
    mesh=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 3)),
    tp=st.sampled_from([1, 2, 4]),
    kv_heads=st.sampled_from([1, 2, 4]),
    experts=st.integers(1, 5),
    vocab=st.sampled_from([1, 63, 64, 130]),
    odd=st.sampled_from([1, 3, 7]),
    expert_parallel=st.booleans(),
)
def test_each_receiver_gets_what_vllm_reads_bit_for_bit_and_nothing_else(
    mesh: tuple[int, int, int], tp: int, kv_heads: int, experts: int, vocab: int, odd: int, expert_parallel: bool
) -> None:
    shapes = model(4, kv_heads, experts, vocab, odd)
    generator = torch.Generator().manual_seed(vocab + odd)
    truth = {name: torch.rand(shape, generator=generator) + 1 for name, shape in shapes.items()}
    world = mesh[0] * mesh[1] * mesh[2]
    held = [held_by(shapes, mesh, rank) for rank in range(world)]
    by_rank = [
        published(((name, shape, torch.float32, boxes[name]) for name, shape in shapes.items()), "qwen3_moe")
        for boxes in held
    ]
    names = [(s.name, s.shape, s.dtype) for s in by_rank[0]]
    assert all([(s.name, s.shape, s.dtype) for s in sources] == names for sources in by_rank)
    layout = make_layout(names)
    claimed = claim(
        [{s.name: s.held for s in sources if s.held is not None} for sources in by_rank], {n: 4 for n, *_ in names}
    )
    sources = [make_layout(names, boxes) for boxes in claimed]
    assert sum(numel(entry.box) for source in sources for entry in source.entries) == sum(
        map(torch.numel, truth.values())
    )
    buffers = []
    order = list(shapes)
    for rank, source in enumerate(sources):
        buffer = torch.zeros(source.nbytes, dtype=torch.uint8)
        of = {s.name: s for s in by_rank[rank]}
        for entry in source.entries:
            parameter = order[of[entry.name].index]
            box = held[rank][parameter]
            assert box is not None
            view(buffer, entry).copy_(of[entry.name].of(cut(truth[parameter], box)))
        buffers.append(buffer)

    parts = describe(shapes, tp, expert_parallel)
    need = [needed(layout, parts, rank, tp) for rank in range(tp)]
    moves = pair(sources, need)
    index = {s.name: s for s in published(((n, s, torch.float32, full_box(s)) for n, s in shapes.items()), "qwen3_moe")}
    for rank in range(tp):
        image = transfer(moves, rank, layout, sources, buffers)
        got = {name: torch.zeros(shape) for name, shape in shapes.items()}
        arrived = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
        for entry in layout.entries:
            s = index[entry.name]
            s.of(got[order[s.index]]).copy_(view(image, entry))
            s.of(arrived[order[s.index]]).copy_(view(image, entry) >= 1)
        for name, reads in read_by_vllm(shapes, tp, rank, expert_parallel).items():
            mask = torch.zeros(shapes[name], dtype=torch.bool)
            for slices in reads:
                mask[slices] = True
            assert torch.equal(arrived[name], mask), name
            assert torch.equal(got[name][mask], truth[name][mask]), name


# --- what is needed


def need_of(part: ModulePart, shape: tuple[int, ...], rank: int, world: int, leaf: str = "m.x.weight") -> Box | None:
    layout = make_layout([(leaf, shape, torch.float32)])
    return needed(layout, {"m.x": part}, rank, world).get(leaf)


def test_what_is_not_described_is_needed_whole() -> None:
    layout = make_layout([("m.x.weight", (4, 4), torch.float32), ("m.x.scale", (4,), torch.float32)])
    assert needed(layout, {}, 1, 2) == {"m.x.weight": ((0, 4), (0, 4)), "m.x.scale": ((0, 4),)}
    assert needed(layout, {"m.x": ModulePart("column")}, 1, 2)["m.x.scale"] == ((0, 4),)


@pytest.mark.parametrize("part", [ModulePart("column", sizes=(8,)), ModulePart("row", sizes=(8,)), ModulePart("whole")])
def test_what_does_not_have_the_described_size_is_needed_whole(part: ModulePart) -> None:
    assert need_of(part, (4, 4), 1, 2) == ((0, 4), (0, 4))
    assert need_of(ModulePart(part.kind), (3, 3), 1, 2) == ((0, 3), (0, 3)), "does not divide"


def test_a_rank_behind_the_end_of_the_vocabulary_needs_nothing_of_it() -> None:
    part = ModulePart("vocab", rows=32)
    assert [need_of(part, (40, 2), rank, 4) for rank in range(4)] == [((0, 32), (0, 2)), ((32, 40), (0, 2)), None, None]


def test_fewer_key_value_heads_than_ranks_are_shared_by_neighbours() -> None:
    part = ModulePart("qkv", parts=("q", "k", "v"), heads=8, kv_heads=2, head_dim=3, v_head_dim=1)
    layout = make_layout((f"m.{name}.bias", (rows,), torch.float32) for name, rows in (("q", 24), ("k", 6), ("v", 2)))
    by_rank = [needed(layout, {"m.qkv": part}, rank, 4) for rank in range(4)]
    assert [boxes["m.q.bias"] for boxes in by_rank] == [((0, 6),), ((6, 12),), ((12, 18),), ((18, 24),)]
    assert [boxes["m.k.bias"] for boxes in by_rank] == [((0, 3),), ((0, 3),), ((3, 6),), ((3, 6),)]
    assert [boxes["m.v.bias"] for boxes in by_rank] == [((0, 1),), ((0, 1),), ((1, 2),), ((1, 2),)]


def test_experts_may_divide_over_more_ranks_than_the_receiver_has() -> None:
    """Two replicas of two ranks: vLLM divides experts over all four; this is the second replica."""
    part = ModulePart("moe", parts=("w1", "w2", "w3"), count=1, world=4, first=2, rows=3)
    layout = make_layout(
        [("m.experts.0.w1.weight", (10, 2), torch.float32), ("m.experts.0.w2.weight", (2, 10), torch.float32)]
    )
    assert [list(needed(layout, {"m.experts": part}, rank, 2).values()) for rank in (0, 1)] == [
        [((6, 9), (0, 2)), ((0, 2), (6, 9))],
        [((9, 10), (0, 2)), ((0, 2), (9, 10))],
    ]


@pytest.mark.parametrize(
    "part",
    [
        ModulePart("diagonal"),
        ModulePart("qkv", parts=("q", "k"), heads=2, kv_heads=2, head_dim=1),
        ModulePart("qkv", parts=("q", "k", "v"), heads=3, kv_heads=1, head_dim=1),
        ModulePart("qkv", parts=("q", "k", "v"), heads=6, kv_heads=3, head_dim=1),
        ModulePart("qkv", parts=("q", "k", "v")),
        ModulePart("moe", parts=("w1", "w2")),
        ModulePart("moe", parts=("w1", "w2", "w3"), count=2, experts=((0,),)),
        ModulePart("merged", parts=("a", "b"), sizes=(1,)),
        ModulePart("merged"),
        ModulePart("vocab"),
        ModulePart("column", rows=3),
    ],
    ids=lambda part: f"{part.kind}-{len(part.parts)}",
)
def test_a_description_that_makes_no_sense_is_an_error_that_names_the_module(part: ModulePart) -> None:
    with pytest.raises(WeightSyncError, match=r"m\.x "):
        need_of(part, (4, 4), 1, 2)


def test_a_rank_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="rank 2 of 2"):
        need_of(ModulePart("column"), (4, 4), 2, 2)


def test_a_description_survives_a_plain_message() -> None:
    for part in (
        ModulePart("moe", parts=("w1", "w2", "w3"), count=2, experts=((0,), (1,)), world=4, first=2),
        ModulePart("qkv", parts=("q", "k", "v"), heads=2, kv_heads=1, head_dim=3, v_head_dim=2),
        ModulePart("vocab", sizes=(100,), rows=64),
    ):
        assert ModulePart.from_plain(json.loads(json.dumps(part.plain()))) == part


# --- errors of pairing


def test_everything_that_nobody_holds_is_listed() -> None:
    sources = layouts([{"a": ((0, 2),)}, {"a": ((3, 4),)}], {"a": (4,)})
    with pytest.raises(WeightSyncError, match=r"2 parameters or boxes .*: a \(\(2, 3\),\), b;"):
        pair(sources, [{"a": ((0, 4),), "b": ((0, 1),)}, {"b": ((0, 1),)}])
    with pytest.raises(WeightSyncError, match=r"12 parameters .*: p0, p1, p2, p3, p4, p5, p6, p7 and 4 more"):
        pair([], [{f"p{number}": ((0, 1),) for number in range(12)}])
    with pytest.raises(WeightSyncError, match=r"a \(\(0, 4\), \(0, 1\)\)"):
        pair(sources, [{"a": ((0, 4), (0, 1))}])


def test_ranks_that_disagree_on_a_parameter_are_an_error() -> None:
    first = make_layout([("a", (4,), torch.float32)], {"a": ((0, 2),)})
    with pytest.raises(WeightSyncError, match=r"a \(bfloat16 \(4,\) on rank 1"):
        pair([first, make_layout([("a", (4,), torch.bfloat16)], {"a": ((2, 4),)})], [])
    with pytest.raises(WeightSyncError, match=r"a \(float32 \(5,\) on rank 1"):
        pair([first, make_layout([("a", (5,), torch.float32)], {"a": ((2, 4),)})], [])


def test_a_fused_parameter_needs_all_its_parts_and_a_stray_name_is_found() -> None:
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    receiver = ["l.0.qkv_proj.weight", "l.0.norm.weight"]
    complete = ["l.0.q_proj.weight", "l.0.k_proj.weight", "l.0.v_proj.weight", "l.0.norm.weight"]
    assert unpaired_names(complete, receiver, packed) == ([], [])
    assert unpaired_names(complete[1:], receiver, packed) == (["l.0.q_proj.weight"], [])
    assert unpaired_names([*complete, "l.0.x"], receiver, packed) == ([], ["l.0.x"])


def test_stacked_experts_need_every_expert() -> None:
    modules = {"l.0.mlp.experts": ModulePart("moe", parts=("w1", "w2", "w3"), count=2, experts=((0,), (1,)))}
    receiver = [
        "l.0.mlp.experts.routed_experts.w13_weight",
        "l.0.mlp.experts.routed_experts.w2_weight",
        "l.0.gate.weight",
    ]
    complete = [f"l.0.mlp.experts.{e}.{p}.weight" for e, p in product(range(2), ("w1", "w2", "w3"))] + [
        "l.0.gate.weight"
    ]
    assert unpaired_names(complete, receiver, {}, modules) == ([], [])
    assert unpaired_names(complete[1:], receiver, {}, modules) == (["l.0.mlp.experts.0.w1.weight"], [])
    stray = "l.0.mlp.experts.2.w1.weight"
    assert unpaired_names([*complete, stray], receiver, {}, modules) == ([], [stray])
