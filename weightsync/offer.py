"""What the controller brings from the trainer to the generators: who holds what, and one published version.

The controller carries offers, a few words and numbers; the bytes go their own way (`weightsync.transports`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from weightsync.layout import Layout

FULL, DELTA = "full", "delta"


@dataclass(frozen=True)
class Offer:
    """One published version. Lists run over trainer ranks; `epoch` grows after a failed transfer to the same peer.

    `kind` is "full" (the snapshot in `buffer`) or "delta" (a payload against version `base`). `sums` are checksums
    of what travels, `where` is the transport's own.
    """

    version: int
    buffer: int
    kind: str
    base: int
    nbytes: list[int]
    sums: list[list[int]]
    where: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0

    def plain(self) -> dict[str, Any]:
        """In text and numbers, for messages that carry nothing else; `Offer(**plain)` is the offer again."""
        return asdict(self)


@dataclass(frozen=True)
class RankOffer:
    """One trainer rank's share of an offer. `nbytes` is that of its delta, or None where only a full one will do."""

    nbytes: int | None
    sums: list[int]


@dataclass(frozen=True)
class Endpoint:
    """What a receiver needs to read every version to come: the full layout, who holds what of it, and how each trainer
    rank is reached.
    """

    transport: str
    layout: Layout
    sources: list[Layout]
    links: list[Any]
    deadline_s: float
    checksums: bool = True
    adapter: dict[str, Any] | None = None
    """What travels is an adapter, described as `AdapterSpec.plain` does; None: the model itself."""

    def plain(self) -> dict[str, Any]:
        """In text and numbers, for messages that carry nothing else."""
        sources = [source.plain() for source in self.sources]
        return {**vars(self), "layout": self.layout.plain(), "sources": sources}

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> Endpoint:
        sources = [Layout.from_plain(source) for source in values["sources"]]
        return Endpoint(**{**values, "layout": Layout.from_plain(values["layout"]), "sources": sources})
