"""Laws of the delta: bit for bit, for every worker, from every pattern of changes; nothing is written of a bad one."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.errors import WeightSyncError
from weightsync import delta
from weightsync.layout import Box, Entry, Layout, full_box, intersect, make_layout, numel, sub_view, view

VERSIONS = {"version": 8, "base_version": 7}
TwoRanks: TypeAlias = tuple[Layout, list[Layout], list[torch.Tensor], torch.Tensor]
INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float8_e4m3fn: torch.int8}


def bits(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    return view(buffer, entry).view(INTEGERS[entry.torch_dtype])


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def change(buffer: torch.Tensor, layout: Layout, share: float, seed: int) -> torch.Tensor:
    """A copy in which about `share` of the elements have one bit flipped."""
    new = buffer.clone()
    generator = torch.Generator().manual_seed(seed)
    for entry in layout.entries:
        values = bits(new, entry)
        values ^= (torch.rand(values.shape, generator=generator) < share).to(values.dtype)
    return new


def cut(image: torch.Tensor, full: Layout, layout: Layout) -> torch.Tensor:
    """What a rank with `layout` holds of `image`."""
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    held = {entry.name: entry for entry in full.entries}
    for entry in layout.entries:
        view(buffer, entry).copy_(sub_view(image, held[entry.name], entry.box))
    return buffer


def payload_of(new: torch.Tensor, base: torch.Tensor, layout: Layout, room: int = 1 << 20) -> torch.Tensor:
    payload = torch.full((room,), 0xAB, dtype=torch.uint8)
    nbytes = delta.encode(new, base, layout, payload, **VERSIONS)
    assert nbytes is not None
    return payload[:nbytes].clone()


def roomy(parameters: list[tuple[str, tuple[int, ...], torch.dtype]], boxes: dict[str, Box] | None = None) -> Layout:
    """A layout with room behind it, so that a dense delta of a few bytes is still worth sending."""
    layout = make_layout(parameters, boxes)
    return Layout(layout.entries, layout.nbytes + 4096)


def halves(shape: tuple[int, ...], dim: int, at: int) -> list[Box | None]:
    box = full_box(shape)
    parts = [(*box[:dim], part, *box[dim + 1 :]) for part in ((0, at), (at, shape[dim]))]
    return [part if numel(part) else None for part in parts]


@st.composite
def models(draw: st.DrawFn) -> tuple[Layout, list[Layout], dict[str, Box]]:
    """A full layout, two trainer ranks that share it by rows or columns, and what a worker needs of it."""
    parameters: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    ranks: list[dict[str, Box]] = [{}, {}]
    needed: dict[str, Box] = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        name, dtype = f"p{number}", draw(st.sampled_from(list(INTEGERS)))
        parameters.append((name, shape, dtype))
        if shape:
            dim = draw(st.integers(0, len(shape) - 1))
            boxes = halves(shape, dim, draw(st.integers(0, shape[dim])))
        else:
            boxes = [(), None]
        for rank, box in zip(ranks, boxes, strict=True):
            if box is not None:
                rank[name] = box
        starts = [draw(st.integers(0, size - 1)) for size in shape]
        wanted = tuple((a, draw(st.integers(a + 1, size))) for a, size in zip(starts, shape, strict=True))
        if draw(st.integers(0, 4)):
            needed[name] = wanted if draw(st.booleans()) else full_box(shape)
    return roomy(parameters), [roomy(parameters, boxes) for boxes in ranks], needed


@given(models(), st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]), st.integers(0, 1000))
@settings(max_examples=80)
def test_a_patched_image_holds_the_new_bits_of_what_is_needed_and_the_old_ones_of_the_rest(
    model: tuple[Layout, list[Layout], dict[str, Box]], share: float, seed: int
) -> None:
    full, sources, needed = model
    old = random_bytes(full.nbytes, seed)
    new = change(old, full, share, seed)
    payloads = [payload_of(cut(new, full, s), cut(old, full, s), s) for s in sources]
    image, expected = old.clone(), old.clone()
    for entry in full.entries:
        if entry.name in needed:
            box = needed[entry.name]
            sub_view(expected, entry, box).copy_(sub_view(new, entry, box))
    delta.apply(image, payloads, sources, full, needed, **VERSIONS)
    assert torch.equal(image, expected)
    delta.apply(image, payloads, sources, full, needed, **VERSIONS)  # again, after a failure half way
    assert torch.equal(image, expected)


@pytest.mark.parametrize("dtype", list(INTEGERS))
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.2, 0.9])
def test_blocks_of_every_kind_and_uneven_size_arrive(dtype: torch.dtype, share: float) -> None:
    full = make_layout([("a", (3, 100_003), dtype), ("b", (1 << 18,), dtype), ("c", (77,), dtype)])
    old = random_bytes(full.nbytes, 1)
    new = change(old, full, share, 2)
    bits(new, full.entries[0])[0, 1000:1600] ^= 1  # a stretch that changes throughout
    payload = torch.zeros(2 * full.nbytes, dtype=torch.uint8)
    nbytes = delta.encode(new, old, full, payload, **VERSIONS)
    if nbytes is None:
        assert (share, dtype) == (0.9, torch.float8_e4m3fn)
        return
    needed = {"a": ((1, 3), (7, 100_003)), "b": ((5, 200_000),), "c": ((0, 77),)}
    for boxes in ({e.name: full_box(e.shape) for e in full.entries}, needed):
        image, expected = old.clone(), old.clone()
        for entry in full.entries:
            sub_view(expected, entry, boxes[entry.name]).copy_(sub_view(new, entry, boxes[entry.name]))
        delta.apply(image, [payload[:nbytes]], [full], full, boxes, **VERSIONS)
        assert torch.equal(image, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_signed_zeros_and_the_payloads_of_nans_are_bits_like_others(dtype: torch.dtype) -> None:
    layout = roomy([("w", (4,), dtype)])
    old = torch.zeros(layout.nbytes, dtype=torch.uint8)
    view(old, layout.entries[0]).copy_(torch.tensor([0.0, torch.nan, torch.nan, 1.0]))
    new = old.clone()
    view(new, layout.entries[0])[0] = -0.0
    bits(new, layout.entries[0])[1] ^= 1
    assert delta.sparsity(view(new, layout.entries[0]), view(old, layout.entries[0])) == 0.5
    image = old.clone()
    payload = payload_of(new, old, layout)
    delta.apply(image, [payload], [layout], layout, {"w": ((0, 4),)}, **VERSIONS)
    assert torch.equal(image, new)


def test_one_change_costs_little_and_a_delta_that_is_not_smaller_is_none() -> None:
    layout = make_layout([("w", (1000, 1000), torch.bfloat16)])
    old = random_bytes(layout.nbytes, 3)
    one = old.clone()
    bits(one, layout.entries[0])[500, 500] ^= 1
    payload = torch.zeros(2 * layout.nbytes, dtype=torch.uint8)
    assert (delta.encode(one, old, layout, payload, **VERSIONS) or 0) < 1500
    assert (delta.encode(old, old, layout, payload, **VERSIONS) or 0) < 200
    dense = change(old, layout, 1.0, 4)
    assert delta.encode(dense, old, layout, payload, **VERSIONS) is None
    # Neither when the room that was set aside for payloads is used up.
    half = change(old, layout, 0.5, 4)
    nbytes = delta.encode(half, old, layout, payload, **VERSIONS)
    assert nbytes is not None
    assert nbytes < 0.6 * layout.nbytes
    assert delta.encode(half, old, layout, payload[:nbytes], **VERSIONS) == nbytes
    assert delta.encode(half, old, layout, payload[: nbytes - 1], **VERSIONS) is None
    assert delta.encode(half, old, layout, payload[:10], **VERSIONS) is None


def test_bytes_behind_the_snapshot_and_between_parameters_do_not_travel() -> None:
    layout = make_layout([("a", (3,), torch.float32), ("b", (3,), torch.float32)])
    old = torch.zeros(layout.nbytes + 64, dtype=torch.uint8)
    new = torch.ones_like(old)
    for entry in layout.entries:
        view(new, entry).zero_()
    image = torch.zeros(layout.nbytes, dtype=torch.uint8)
    payload = torch.zeros(4096, dtype=torch.uint8)
    nbytes = delta.encode(new, old, layout, payload, **VERSIONS)
    assert nbytes is not None
    assert delta.apply(image, [payload[:nbytes]], [layout], layout, {"a": ((0, 3),)}, **VERSIONS) == 0
    assert not image.any()


@pytest.fixture(scope="module")
def two_ranks() -> TwoRanks:
    parameters = [("w", (64, 40), torch.bfloat16), ("n", (40,), torch.float32)]
    full = make_layout(parameters)
    sources = [
        roomy(parameters, {"w": ((0, 32), (0, 40))}),
        roomy(parameters, {"w": ((32, 64), (0, 40)), "n": ((0, 40),)}),
    ]
    old = random_bytes(full.nbytes, 5)
    new = change(old, full, 0.1, 6)
    return full, sources, [payload_of(cut(new, full, s), cut(old, full, s), s) for s in sources], old


def refused(two_ranks: TwoRanks, bad: torch.Tensor, why: str) -> None:
    """Rank 1's payload is `bad`: rank 0's, which is good, must not have been written either."""
    full, sources, payloads, old = two_ranks
    image = old.clone()
    needed = {entry.name: full_box(entry.shape) for entry in full.entries}
    with pytest.raises(WeightSyncError, match=rf"rank 1 for version 8 .*{why}.*; nothing was changed"):
        delta.apply(image, [payloads[0], bad], sources, full, needed, **VERSIONS)
    assert torch.equal(image, old)


def test_a_truncated_payload_changes_nothing(two_ranks: TwoRanks) -> None:
    good = two_ranks[2][1]
    for length in (0, 1, 63):
        refused(two_ranks, good[:length], "its header alone has 64")
    for length in (64, 65, len(good) - 1):
        refused(two_ranks, good[:length], "is truncated")
    zeroed = good.clone()
    zeroed[len(good) // 2 :] = 0
    refused(two_ranks, zeroed, "is damaged")


def test_any_flipped_bit_in_a_payload_changes_nothing(two_ranks: TwoRanks) -> None:
    good = two_ranks[2][1]
    for at in [*range(56), *range(64, len(good), 7)]:
        bad = good.clone()
        bad[at] ^= 1 << (at % 8)
        refused(two_ranks, bad, "(begins with|is truncated|is damaged)")


def test_a_payload_of_another_version_base_or_layout_changes_nothing(two_ranks: TwoRanks) -> None:
    full, sources, payloads, old = two_ranks
    needed = {entry.name: full_box(entry.shape) for entry in full.entries}
    image = old.clone()
    with pytest.raises(WeightSyncError, match="makes 8 of 7, and this worker holds 6 and expects 8"):
        delta.apply(image, payloads, sources, full, needed, version=8, base_version=6)
    with pytest.raises(WeightSyncError, match="makes 8 of 7, and this worker holds 7 and expects 9"):
        delta.apply(image, payloads, sources, full, needed, version=9, base_version=7)
    with pytest.raises(WeightSyncError, match="another layout"):
        delta.apply(image, payloads[::-1], sources, full, needed, **VERSIONS)
    with pytest.raises(WeightSyncError, match="1 delta payloads came for the layouts of 2 trainer ranks"):
        delta.apply(image, payloads[:1], sources, full, needed, **VERSIONS)
    assert torch.equal(image, old)


def test_apply_says_how_many_elements_it_wrote(two_ranks: TwoRanks) -> None:
    full, sources, payloads, old = two_ranks
    image = old.clone()
    needed = {"w": ((10, 50), (3, 17))}
    new = old.clone()
    delta.apply(new, payloads, sources, full, {"w": ((0, 64), (0, 40))}, **VERSIONS)
    w = full.entries[0]
    differ = bits(new, w) != bits(old, w)
    sent = sum(intersect(needed["w"], s.entries[0].box) is not None for s in sources)
    assert sent == 2
    assert delta.apply(image, payloads, sources, full, needed, **VERSIONS) == int(differ[10:50, 3:17].sum())


def test_sparsity_counts_changed_elements() -> None:
    old = torch.zeros(300_000)
    new = old.clone()
    new[::3] = -0.0
    assert delta.sparsity(new, old) == pytest.approx(1 / 3, abs=1e-6)
    assert delta.sparsity(old, old) == 0.0
    assert delta.sparsity(torch.zeros(0), torch.zeros(0)) == 0.0
