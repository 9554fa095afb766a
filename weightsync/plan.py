"""Who needs which boxes, and what goes from where to where. Computed once, when they connect; pure.

trainer rank:   shards.published(...)    under which names, and what of each lies on this rank
                shards.claim(...)        of what several ranks hold alike, one rank sends each box
vLLM worker:    needed(layout, ...)      what its tensor-parallel rank reads of each parameter
both sides:     pair(sources, needed)    the moves: every needed element once for each that needs it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from forge.errors import WeightSyncError
from weightsync.layout import Box, Entry, Layout, full_box, intersect, numel

_LISTED = 8  # names in an error's text


@dataclass(frozen=True)
class ModulePart:
    """How a module of vLLM divides its parameters over tensor-parallel ranks, in plain words; the same for all ranks.

    Its key is the module's path as the published names have it: the qkv_proj of a layer is at
    "model.layers.0.self_attn.qkv_proj" and its parts are q_proj, k_proj and v_proj beside it. `kind`:

    - "column": dimension 0 evenly, of weight and bias.
    - "merged": as "column", for each of `parts`, which are fused here (gate_up_proj).
    - "qkv": `parts` are q, k, v. q by `heads`; k and v by `kv_heads`, several ranks having the same ones where there
      are fewer than ranks. A head has `head_dim` rows, one of v `v_head_dim` where that is another number.
    - "row": dimension 1 of the weight evenly; the whole bias.
    - "vocab": dimension 0 in chunks of `rows` (vLLM pads the vocabulary), clipped to what there is.
    - "moe": `parts` are w1, w2, w3 (gate, down, up) of each of `count` experts, below this path: w1 and w3 as
      "column", w2 as "row", in chunks of `rows` where that is not zero (vLLM may pad). With expert parallelism
      `experts` are those of each rank, whole.
    - "whole": nothing is divided, as where a module has tensor parallelism off.

    `sizes` are the full sizes that vLLM expects of the divided dimension, one for each part, or one ("moe", and where
    there are no parts); heads say it for "qkv". A parameter of another size (transposed, packed) is read whole.
    `world` is over how many ranks it divides where that is not the receiver's tensor parallelism, `first` which of
    those is the receiver's rank 0: vLLM's experts also divide over data-parallel replicas.
    """

    kind: str
    parts: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    rows: int = 0
    count: int = 0
    experts: tuple[tuple[int, ...], ...] = ()
    world: int = 0
    first: int = 0

    def plain(self) -> dict[str, Any]:
        """The description in text, numbers and lists, for messages that carry nothing else."""
        lists = {"parts": list(self.parts), "sizes": list(self.sizes), "experts": [list(e) for e in self.experts]}
        return {**asdict(self), **lists}

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> ModulePart:
        experts = tuple(tuple(rank) for rank in values["experts"])
        return ModulePart(
            **{**values, "parts": tuple(values["parts"]), "sizes": tuple(values["sizes"]), "experts": experts}
        )


# How many parts and sizes a module of each kind may have.
_PARTS = {"column": range(1), "row": range(1), "vocab": range(1), "merged": range(1, 100), "qkv": range(3, 4)}
_PARTS |= {"moe": range(3, 4), "whole": range(100)}


@dataclass(frozen=True)
class _Cut:
    """The chunk number `index` of dimension `dim`, of a parameter of size `size` there (0: of any size).

    A chunk has `chunk` indices, the last one perhaps fewer; 0: an even share for each of `world`.
    """

    dim: int
    index: int
    world: int
    size: int = 0
    chunk: int = 0

    def box(self, shape: tuple[int, ...]) -> Box | None:
        """The whole parameter where the description does not fit it, None where nothing is left."""
        whole = full_box(shape)
        if self.dim >= len(shape) or self.size not in (0, shape[self.dim]):
            return whole
        rows = shape[self.dim]
        if not self.chunk and rows % self.world:
            return whole
        chunk = self.chunk or rows // self.world
        start, stop = min(self.index * chunk, rows), min((self.index + 1) * chunk, rows)
        return (*whole[: self.dim], (start, stop), *whole[self.dim + 1 :]) if start < stop else None


def needed(full: Layout, modules: Mapping[str, ModulePart], tp_rank: int, tp_world: int) -> dict[str, Box]:
    """What tensor-parallel rank `tp_rank` reads of each parameter; one that it does not read is left out.

    What `modules` does not describe is needed whole, as is what does not have the described size: always right,
    merely more bytes. Raises WeightSyncError for a description that makes no sense.
    """
    if not 0 <= tp_rank < tp_world:
        raise WeightSyncError(f"tensor-parallel rank {tp_rank} of {tp_world}: ranks go from 0 to {tp_world - 1}")
    cuts: dict[str, _Cut | None] = {}
    for path, module in modules.items():
        cuts.update(_cuts(path, module, tp_rank, tp_world))
    boxes = {entry.name: _box(entry, cuts) for entry in full.entries}
    return {name: box for name, box in boxes.items() if box is not None}


def _box(entry: Entry, cuts: Mapping[str, _Cut | None]) -> Box | None:
    if entry.name not in cuts:
        return full_box(entry.shape)
    cut = cuts[entry.name]
    return None if cut is None else cut.box(entry.shape)


def _cuts(path: str, module: ModulePart, tp_rank: int, tp_world: int) -> Iterator[tuple[str, _Cut | None]]:
    """Names of parameters of `module` with the chunk that is read of each; None where nothing is read."""
    kind, parts, sizes = module.kind, module.parts, module.sizes
    most = 1 if kind == "moe" else len(parts) or 1
    fits = kind in _PARTS and len(parts) in _PARTS[kind] and len(sizes) in (0, most)
    if not fits or (module.rows == 0 if kind == "vocab" else module.rows and kind != "moe"):
        raise WeightSyncError(f"{path} is described as {module}; ModulePart says what goes with which kind")
    rank, world = module.first + tp_rank, module.world or tp_world
    beside = path.rpartition(".")[0] + "." if "." in path else ""
    if kind == "moe" and module.experts:
        yield from _experts_of_rank(path, module, tp_rank)
    elif kind == "moe":
        yield from _slices_of_experts(path, module, rank, world)
    elif kind == "row":
        yield f"{path}.weight", _Cut(1, rank, world, sum(sizes))
    elif kind == "qkv":
        for part, cut in zip(parts, _heads(path, module, rank, world), strict=True):
            yield from _weight_and_bias(f"{beside}{part}", cut)
    elif kind != "whole":
        names = [f"{beside}{part}" for part in parts] or [path]
        for name, size in zip(names, sizes or [0] * len(names), strict=True):
            yield from _weight_and_bias(name, _Cut(0, rank, world, size, module.rows))


def _weight_and_bias(name: str, cut: _Cut | None) -> Iterator[tuple[str, _Cut | None]]:
    yield f"{name}.weight", cut
    yield f"{name}.bias", cut


def _heads(path: str, module: ModulePart, rank: int, world: int) -> list[_Cut]:
    heads, kv_heads, head_dim = module.heads, module.kv_heads, module.head_dim
    if min(heads, kv_heads, head_dim) < 1 or heads % world or max(kv_heads, world) % min(kv_heads, world):
        raise WeightSyncError(
            f"{path} has {heads} heads of {head_dim} rows and {kv_heads} for keys and values, over {world} ranks: the "
            "ranks must divide the heads, and divide those for keys and values or be a multiple of them"
        )
    copies = max(world // kv_heads, 1)  # ranks that have the same keys and values
    kv_chunk = max(kv_heads // world, 1)
    v_dim = module.v_head_dim or head_dim
    return [
        _Cut(0, rank, world, heads * head_dim, heads // world * head_dim),
        _Cut(0, rank // copies, world, kv_heads * head_dim, kv_chunk * head_dim),
        _Cut(0, rank // copies, world, kv_heads * v_dim, kv_chunk * v_dim),
    ]


def _experts_of_rank(path: str, module: ModulePart, tp_rank: int) -> Iterator[tuple[str, _Cut | None]]:
    if tp_rank >= len(module.experts):
        raise WeightSyncError(f"{path} names the experts of {len(module.experts)} ranks, and there is a rank {tp_rank}")
    elsewhere = set(range(module.count)) - set(module.experts[tp_rank])
    for expert in sorted(elsewhere):
        for part in module.parts:
            yield from _weight_and_bias(f"{path}.{expert}.{part}", None)


def _slices_of_experts(path: str, module: ModulePart, rank: int, world: int) -> Iterator[tuple[str, _Cut | None]]:
    across = _Cut(0, rank, world, sum(module.sizes), module.rows)
    w1, w2, w3 = module.parts
    for expert in range(module.count):
        yield from _weight_and_bias(f"{path}.{expert}.{w1}", across)
        yield from _weight_and_bias(f"{path}.{expert}.{w3}", across)
        yield f"{path}.{expert}.{w2}.weight", replace(across, dim=1)


def unpaired_names(
    published: Iterable[str],
    receiver: Iterable[str],
    packed: Mapping[str, Sequence[str]],
    modules: Mapping[str, ModulePart] | None = None,
) -> tuple[list[str], list[str]]:
    """(missing, unknown): what the receiver's parameters need and nobody publishes, and the other way round.

    `packed` maps the receiver's fused modules to their parts, such as qkv_proj to q_proj, k_proj, v_proj: a fused
    parameter that got only some of its parts would be loaded without complaint and be wrong. Of `modules` the kind
    "moe" counts: its w13_weight and w2_weight need every expert, also those that other ranks hold.
    """
    experts = {path: module for path, module in (modules or {}).items() if module.kind == "moe"}
    wanted: set[str] = set()
    for name in receiver:
        path = next((path for path in experts if name.startswith(f"{path}.")), None)
        fused = next((module for module in name.split(".") if module in packed), None)
        if path is not None:
            wanted |= _expert_names(path, experts[path], name)
        else:
            wanted |= {name} if fused is None else {name.replace(fused, part) for part in packed[fused]}
    have = set(published)
    return sorted(wanted - have), sorted(have - wanted)


def _expert_names(path: str, module: ModulePart, name: str) -> set[str]:
    """What goes into a stacked parameter of vLLM below `path`, such as w13_weight."""
    stack, _, suffix = name.rpartition(".")[2].partition("_")
    w1, w2, w3 = module.parts
    parts = {"w13": (w1, w3), "w2": (w2,)}.get(stack)
    if parts is None:
        return {name}
    return {f"{path}.{expert}.{part}.{suffix}" for expert in range(module.count) for part in parts}


@dataclass(frozen=True)
class Move:
    """`box` of parameter `name` goes from trainer rank `source` to the receiver's tensor-parallel rank `target`."""

    source: int
    target: int
    name: str
    box: Box


def pair(sources: Sequence[Layout], needed: Sequence[Mapping[str, Box]]) -> tuple[Move, ...]:
    """The moves from trainer ranks (their layouts) to a receiver's ranks (what each needs), by target and then in the
    order of its needs: every needed element once for each rank that needs it.

    Raises WeightSyncError that lists what no trainer rank holds, or what they hold in different shapes or dtypes.
    """
    held = _holders(sources)
    moves: list[Move] = []
    unowned: list[str] = []
    for target, boxes in enumerate(needed):
        for name, wanted in boxes.items():
            left = [wanted] if numel(wanted) else []
            for rank, box in held.get(name, ()):
                if len(box) != len(wanted):
                    break  # a parameter of another shape: left over, as what nobody holds
                after: list[Box] = []
                for piece in left:
                    common = intersect(piece, box)
                    if common is None:
                        after.append(piece)
                    else:
                        moves.append(Move(rank, target, name, common))
                        after += _without(piece, common)
                left = after
            if left and name not in held:
                unowned.append(name)
            else:
                unowned += [f"{name} {piece}" for piece in left]
    if unowned:
        unique = list(dict.fromkeys(unowned))
        raise WeightSyncError(
            f"{len(unique)} parameters or boxes of them are needed by the generators and held by no trainer rank: "
            f"{_listed(unique)}; trainer and generators must load the same architecture, and every rank must publish"
        )
    return tuple(moves)


def _holders(sources: Sequence[Layout]) -> dict[str, list[tuple[int, Box]]]:
    held: dict[str, list[tuple[int, Box]]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    differing: list[str] = []
    for rank, layout in enumerate(sources):
        for entry in layout.entries:
            held.setdefault(entry.name, []).append((rank, entry.box))
            if kinds.setdefault(entry.name, (entry.dtype, entry.shape)) != (entry.dtype, entry.shape):
                differing.append(
                    f"{entry.name} ({entry.dtype} {entry.shape} on rank {rank}, before {kinds[entry.name]})"
                )
    if differing:
        raise WeightSyncError(f"trainer ranks differ in {len(differing)} parameters: {_listed(differing)}")
    return held


def _without(box: Box, hole: Box) -> list[Box]:
    """`box` minus `hole`, which lies inside of it, as boxes that do not overlap."""
    rest: list[Box] = []
    for dim, ((start, stop), (begin, end)) in enumerate(zip(box, hole, strict=True)):
        sides = ((start, begin), (end, stop))
        rest += [(*hole[:dim], side, *box[dim + 1 :]) for side in sides if side[0] < side[1]]
    return rest


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
