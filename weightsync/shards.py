"""What a trainer rank holds of each parameter, and under which names it is published. Pure, but for `tensor_box`.

FSDP2 leaves a rank rows, tensor parallelism a slice of some dimension, both together a smaller box; what is
replicated lies on several ranks, of which one sends it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from forge.errors import WeightSyncError
from weightsync.layout import Box, box_shape, clean_name, full_box, intersect, is_adapter, numel

# ("replicate",), ("shard", dim) or ("strided", dim, split factor), one per dimension of the mesh
Placement = tuple[Any, ...]


def shard_box(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Box | None:
    """What the rank at `coordinate` of a mesh holds of a parameter; None when nothing is left for it.

    As DTensor does: each mesh dimension splits what the ones before it have left into chunks of `ceil(n / size)`.
    "strided" is FSDP2 over a dimension that tensor parallelism has split already: it goes last, though it stands
    first. (torch's own `compute_local_shape_and_global_offset` errs there when the sizes do not divide.)
    """
    box = list(full_box(shape))
    for mesh_dim in sorted(range(len(placements)), key=lambda i: placements[i][0] == "strided"):
        kind, *rest = placements[mesh_dim]
        if kind == "replicate":
            continue
        dim: int = rest[0]
        if kind == "strided":
            after = [i for i in range(mesh_dim + 1, len(placements)) if placements[i] == ("shard", dim)]
            if math.prod(mesh_shape[i] for i in after) != rest[1]:
                raise WeightSyncError(
                    f"placements {list(placements)} on a mesh {tuple(mesh_shape)} leave a rank several ranges of "
                    f"dimension {dim}; weightsync sends one: shard that dimension by FSDP2 over tensor parallelism only"
                )
        start, stop = box[dim]
        chunk = -(-(stop - start) // mesh_shape[mesh_dim])
        start = min(start + chunk * coordinate[mesh_dim], stop)
        box[dim] = start, min(start + chunk, stop)
    found = tuple(box)
    return found if numel(found) else None


def tensor_box(tensor: torch.Tensor) -> Box | None:
    """What this rank holds of a parameter: FSDP2, tensor parallel, both, or a plain tensor (all of it).

    None when it holds nothing. Raises WeightSyncError when what it holds is no single box of the parameter.
    """
    if not isinstance(tensor, DTensor):
        return full_box(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None  # this rank is not in the mesh
    placements = [_placement(placement) for placement in tensor.placements]
    box = shard_box(tensor.shape, tensor.device_mesh.shape, coordinate, placements)
    local = tuple(tensor.to_local().shape)
    if (math.prod(local) != 0) if box is None else (local != box_shape(box)):
        raise WeightSyncError(
            f"a shard of shape {local} of a parameter {tuple(tensor.shape)} with {tensor.placements} should be "
            f"the box {box}; this way of sharding is not supported"
        )
    return box


def _placement(placement: object) -> Placement:
    if isinstance(placement, Replicate):
        return ("replicate",)
    if isinstance(placement, _StridedShard):
        return ("strided", placement.dim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return ("shard", placement.dim)
    raise WeightSyncError(f"a parameter has the placement {placement}; only sharded and replicated ones can be sent")


def claim(boxes_by_rank: Sequence[Mapping[str, Box]], itemsize: Mapping[str, int]) -> list[dict[str, Box]]:
    """Who sends what: a box that several ranks hold alike stays with one of them, bytes balanced over the ranks.

    `itemsize` is bytes per element, by name. Every rank gets the same answer from the same arguments. Boxes that
    overlap without being equal stay as they are: `pair` takes what is common from the first rank.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, boxes in enumerate(boxes_by_rank):
        for name, box in boxes.items():
            holders.setdefault((name, box), []).append(rank)
    load = [0] * len(boxes_by_rank)
    owner: dict[tuple[str, Box], int] = {}
    # Whoever holds something alone has no choice; then the largest first, to whoever has least so far.
    for held in sorted(holders, key=lambda h: (len(holders[h]) > 1, -numel(h[1]) * itemsize[h[0]], h)):
        owner[held] = min(holders[held], key=lambda rank: (load[rank], rank))
        load[owner[held]] += numel(held[1]) * itemsize[held[0]]
    return [
        {name: box for name, box in boxes.items() if owner[name, box] == rank}
        for rank, boxes in enumerate(boxes_by_rank)
    ]


_EXPERT_NAMES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MIXTRAL_NAMES = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
# Models whose experts transformers stacks in memory as [E, 2I, H] and [E, H, I], while their checkpoints and vLLM's
# loader have one weight for each expert and projection. Where a checkpoint is stacked too, names stay as they are.
_STACKED_EXPERTS = {
    **dict.fromkeys(("mixtral", "minimax"), _MIXTRAL_NAMES),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_thinker"), _EXPERT_NAMES
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"), _EXPERT_NAMES),
    **dict.fromkeys(("glm4v_moe", "glm_moe_dsa", "afmoe", "cohere2_moe", "dots1", "flex_olmo"), _EXPERT_NAMES),
    **dict.fromkeys(("hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe", "solar_open"), _EXPERT_NAMES),
}


@dataclass(frozen=True)
class Part:
    """A tensor of the checkpoint: its name and shape, and the box of the parameter in memory that it is.

    The box may have leading dimensions of extent one that the shape has not: one expert of a stack.
    """

    name: str
    shape: tuple[int, ...]
    box: Box


def checkpoint_parts(name: str, shape: Sequence[int], model_type: str) -> list[Part]:
    """What checkpoints of `model_type` (of the Hugging Face config) and vLLM call the parameter `name` (clean).

    Stacked experts become one part per expert and projection, everything else is one part. The parts cover the
    parameter, each element once. Raises WeightSyncError when stacked experts do not have the expected shape.
    """
    full = tuple(shape)
    names = _STACKED_EXPERTS.get(model_type, {})
    if names is _MIXTRAL_NAMES:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    path, _, leaf = name.rpartition(".")
    if not path.endswith(".experts") or leaf not in names:
        return [Part(name, full, full_box(full))]
    projections = names[leaf]
    if len(full) != 3 or full[1] % len(projections):
        raise WeightSyncError(
            f"{name} has shape {full}; stacked experts of a {model_type} model are three-dimensional, their second "
            f"dimension a multiple of {len(projections)}"
        )
    experts, rows, columns = full[0], full[1] // len(projections), full[2]
    return [
        Part(
            f"{path}.{expert}.{projection}.weight",
            (rows, columns),
            ((expert, expert + 1), (number * rows, (number + 1) * rows), (0, columns)),
        )
        for expert in range(experts)
        for number, projection in enumerate(projections)
    ]


@dataclass(frozen=True)
class Source:
    """A tensor as it is published (`name`, full `shape`, `dtype`), and what this rank holds of it.

    It comes from parameter number `index`. `held` is a box of the published tensor, `local` the same elements as a
    box of this rank's local tensor; both None when this rank holds nothing of it.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    held: Box | None
    local: Box | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is held, out of parameter `index`'s local tensor: a view in the shape of `held`."""
        assert self.local is not None, f"this rank holds nothing of {self.name}"
        stacked = len(self.local) - len(self.shape)
        first = tuple(start for start, _ in self.local[:stacked])
        return tensor[first + tuple(slice(start, stop) for start, stop in self.local[stacked:])]


def published(
    named: Iterable[tuple[str, Sequence[int], torch.dtype, Box | None]], model_type: str = ""
) -> list[Source]:
    """Everything that is published of `(name, full shape, dtype, box held by this rank)` of every parameter.

    Names are cleaned and translated (`checkpoint_parts`); an adapter's own parameters are left out. Names, shapes and
    order depend on the model alone, so all ranks agree on them.
    """
    sources: list[Source] = []
    for index, (raw, shape, dtype, box) in enumerate(named):
        if is_adapter(raw):
            continue
        for part in checkpoint_parts(clean_name(raw), shape, model_type):
            both = intersect(part.box, box) if box is not None else None
            if both is None or box is None:
                sources.append(Source(index, part.name, part.shape, dtype, None, None))
                continue
            held = _shift(both, part.box)[len(part.box) - len(part.shape) :]
            sources.append(Source(index, part.name, part.shape, dtype, held, _shift(both, box)))
    return sources


def _shift(box: Box, origin: Box) -> Box:
    """`box` in coordinates that begin where `origin` begins."""
    return tuple((start - o, stop - o) for (start, stop), (o, _) in zip(box, origin, strict=True))
