"""Laws of the checksums: whatever differs is found and named, and only that."""

from __future__ import annotations

import pytest
import torch

from forge.errors import WeightSyncError
from weightsync.checksums import digest, sums, verify
from weightsync.layout import Box, Layout, full_box, make_layout, sub_view, view

PARAMETERS = [
    ("embed.weight", (13, 6), torch.bfloat16),
    ("norm.weight", (6,), torch.float32),
    ("scale", (), torch.float32),
    ("gate.weight", (8, 6), torch.bfloat16),
]
WHOLE = {name: full_box(shape) for name, shape, _ in PARAMETERS}
ROWS = [
    {"embed.weight": ((0, 7), (0, 6)), "gate.weight": ((0, 4), (0, 6)), "scale": ()},
    {"embed.weight": ((7, 13), (0, 6)), "gate.weight": ((4, 8), (0, 6)), "norm.weight": ((0, 6),)},
]
# Two tensor-parallel workers: one parameter by rows, one by columns, the rest whole.
WORKERS: list[dict[str, Box]] = [
    {**WHOLE, "embed.weight": ((0, 8), (0, 6)), "gate.weight": ((0, 8), (0, 3))},
    {**WHOLE, "embed.weight": ((8, 13), (0, 6)), "gate.weight": ((0, 8), (3, 6))},
]
FULL = make_layout(PARAMETERS)
RANKS = [make_layout(PARAMETERS, boxes) for boxes in ROWS]


def published() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The whole model, and what each trainer rank holds of it."""
    image = torch.randint(1, 256, (FULL.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    held = {entry.name: entry for entry in FULL.entries}
    buffers = [torch.zeros(layout.nbytes, dtype=torch.uint8) for layout in RANKS]
    for layout, buffer in zip(RANKS, buffers, strict=True):
        for entry in layout.entries:
            view(buffer, entry).copy_(sub_view(image, held[entry.name], entry.box))
    return image, buffers


def received(image: torch.Tensor, boxes: dict[str, Box]) -> torch.Tensor:
    """An image that holds `boxes` and nothing else."""
    mine = torch.zeros_like(image)
    for entry in FULL.entries:
        sub_view(mine, entry, boxes[entry.name]).copy_(sub_view(image, entry, boxes[entry.name]))
    return mine


@pytest.mark.parametrize("boxes", [WHOLE, *WORKERS])
def test_every_worker_can_check_what_it_holds_and_needs_no_more(boxes: dict[str, Box]) -> None:
    image, buffers = published()
    expected = [sums(b, layout, [WHOLE, *WORKERS]) for b, layout in zip(buffers, RANKS, strict=True)]
    verify(received(image, boxes), FULL, RANKS, boxes, expected, 3)


def test_receivers_that_need_everything_need_not_be_named() -> None:
    image, buffers = published()
    expected = [sums(b, layout) for b, layout in zip(buffers, RANKS, strict=True)]
    assert expected == [sums(b, layout, [WHOLE, WHOLE]) for b, layout in zip(buffers, RANKS, strict=True)]
    verify(image, FULL, RANKS, WHOLE, expected, 3)


@pytest.mark.parametrize("boxes", [WHOLE, *WORKERS])
def test_any_flipped_bit_is_found_and_its_parameter_named(boxes: dict[str, Box]) -> None:
    image, buffers = published()
    expected = [sums(b, layout, [WHOLE, *WORKERS]) for b, layout in zip(buffers, RANKS, strict=True)]
    for entry in FULL.entries:
        for number in range(sub_view(image, entry, boxes[entry.name]).numel()):
            mine = received(image, boxes)
            part = sub_view(mine, entry, boxes[entry.name])
            bits = part.view(torch.int16 if part.element_size() == 2 else torch.int32)
            place = torch.unravel_index(torch.tensor(number), bits.shape) if bits.dim() else ()
            bits[place] ^= 1 << (number % (8 * part.element_size() - 1))
            with pytest.raises(WeightSyncError, match=rf"version 3 .* 1 parameters differ .* {entry.name} "):
                verify(mine, FULL, RANKS, boxes, expected, 3)


def test_a_truncated_tail_and_swapped_blocks_are_found_and_counted() -> None:
    image, buffers = published()
    expected = [sums(b, layout) for b, layout in zip(buffers, RANKS, strict=True)]
    truncated = image.clone()
    truncated[FULL.entries[1].offset + 20 :] = 0
    with pytest.raises(WeightSyncError, match=r"3 parameters differ .*first is scale .*, gate\.weight, norm\.weight"):
        verify(truncated, FULL, RANKS, WHOLE, expected, 3)
    swapped = image.clone()
    rows = view(swapped, FULL.entries[3])
    rows[0], rows[5] = rows[5].clone(), rows[0].clone()
    with pytest.raises(WeightSyncError, match=r"1 parameters differ .* gate\.weight"):
        verify(swapped, FULL, RANKS, WHOLE, expected, 3)


def test_a_worker_that_the_trainer_did_not_know_is_an_error_and_not_passed_over() -> None:
    image, buffers = published()
    expected = [sums(b, layout, [WHOLE]) for b, layout in zip(buffers, RANKS, strict=True)]
    with pytest.raises(WeightSyncError, match=r"without a checksum for gate\.weight .* rank 0.*offer the version"):
        verify(image, FULL, RANKS, WORKERS[0], expected, 3)
    with pytest.raises(WeightSyncError, match="checksums of 1 trainer ranks, and 2 publish"):
        verify(image, FULL, RANKS, WHOLE, expected[:1], 3)


def test_a_checksum_does_not_depend_on_strides_or_on_where_a_large_piece_is_cut() -> None:
    wide = torch.randint(0, 1 << 15, (3000, 2400), dtype=torch.int16)
    part = wide[5:2900, 100:2300]
    assert digest(part) == digest(part.contiguous())
    assert digest(part) != digest(wide[6:2901, 100:2300])
    assert digest(torch.tensor(1.5)) == digest(torch.tensor([1.5]))
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))


def test_an_empty_parameter_is_no_trouble() -> None:
    layout = make_layout([("nothing", (0, 3), torch.float32), ("one", (1,), torch.float32)])
    image = torch.ones(layout.nbytes, dtype=torch.uint8)
    boxes: dict[str, Box] = {"nothing": ((0, 0), (0, 3)), "one": ((0, 1),)}
    verify(image, layout, [layout], boxes, [sums(image, layout, [boxes])], 1)
    assert len(sums(image, Layout((), 0))) == 0
