"""Metrics of any actor: what a kind of number is reduced to, over calls, processes and actors. Pure.

kind          keys of a row                                       over several processes
sum           KEY                                                 added
mean          KEY                                                 of all values, not of means
max           KEY                                                 the largest
percentiles   KEY/p50, KEY/p95, KEY/p99, KEY/max                  of all values (`forge.durations`)
histogram     KEY/hist/N: values above N/2 up to N, a power of 2  added; KEY/hist/0 has those up to 0
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from forge.durations import PERCENTILES, Durations
from forge.errors import SchemaError

Kind: TypeAlias = Literal["sum", "mean", "max", "percentiles", "histogram"]


@dataclass
class Tally:
    """What was recorded under one key since the last row."""

    kind: Kind
    count: int = 0
    total: float = 0.0
    most: float = -math.inf
    durations: Durations = field(default_factory=Durations)
    buckets: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise SchemaError(f"a metric is of kind {self.kind!r}; use one of {', '.join(get_args(Kind))}")

    def add(self, value: float) -> None:
        """Counts one value; NaN and infinity would make nothing of all the others, and are left out."""
        if not math.isfinite(value):
            return
        self.count += 1
        self.total += value
        self.most = max(self.most, value)
        if self.kind == "percentiles":
            self.durations.add(value)
        elif self.kind == "histogram":
            self.buckets[_bucket(value)] += 1

    def merge(self, other: Tally) -> None:
        """Adds what another process has counted under the same key. Raises SchemaError where that is another kind."""
        if other.kind != self.kind:
            raise SchemaError(f"one key is recorded as {self.kind} and as {other.kind}; give them two names")
        self.count += other.count
        self.total += other.total
        self.most = max(self.most, other.most)
        self.durations.merge(other.durations)
        self.buckets.update(other.buckets)

    def row(self, key: str) -> dict[str, float | int]:
        """Its keys of a row; {} where nothing was counted."""
        if not self.count:
            return {}
        if self.kind == "percentiles":
            high = {f"{key}/p{percent}": self.durations.percentile(percent) for percent in PERCENTILES}
            return {**high, f"{key}/max": self.most}
        if self.kind == "histogram":
            return {f"{key}/hist/{edge}": count for edge, count in sorted(self.buckets.items())}
        values = {"sum": self.total, "mean": self.total / self.count, "max": self.most}
        return {key: values[self.kind]}


def _bucket(value: float) -> int:
    """The smallest power of 2 that is not below `value`, 1 at least; 0 for what is not above 0."""
    return 0 if value <= 0 else 1 << max(0, math.ceil(math.log2(value)))


def merged(own: dict[str, Tally], other: dict[str, Tally]) -> None:
    """Adds the tallies `other` to `own`."""
    for key, tally in other.items():
        if key in own:
            own[key].merge(tally)
        else:
            own[key] = tally
