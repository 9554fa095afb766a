"""Percentiles of any number of durations in fixed memory.

Durations are counted in buckets whose bounds grow by a tenth, after DDSketch (Masson, Rim and Lee, 2019): a percentile
is off by 5 % at most, those of several processes add up exactly, and nothing grows with the count.
"""

from __future__ import annotations

import math
from collections import Counter

PERCENTILES = (50, 95, 99)
LARGEST_ERROR = math.sqrt(1.1) - 1
"""Of a percentile, relative: 4.9 %; durations below `SHORTEST_S` count as that long at most."""
SHORTEST_S = 1e-5
LONGEST_S = 1e6
_GROWTH = 1.1


class Durations:
    """Of one kind of wait; seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self.max_s = 0.0
        self._min_s = math.inf
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Counts one duration; negative ones, of a clock that was set back, count as none."""
        seconds = max(0.0, seconds)
        self.count += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)
        self._min_s = min(self._min_s, seconds)
        self._buckets[_bucket(seconds)] += 1

    def merge(self, other: Durations) -> None:
        """Adds what another one has counted."""
        self.count += other.count
        self.total_s += other.total_s
        self.max_s = max(self.max_s, other.max_s)
        self._min_s = min(self._min_s, other._min_s)
        self._buckets.update(other._buckets)

    def percentile(self, percent: float) -> float:
        """The duration that `percent` of all do not exceed, to within `LARGEST_ERROR`; NaN without any."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(self.count * percent / 100))
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return min(max(_middle(bucket), self._min_s), self.max_s)
        raise AssertionError("the buckets hold fewer durations than were counted")


def _bucket(seconds: float) -> int:
    """Bucket 0 holds what is at most SHORTEST_S, bucket i > 0 what is at most SHORTEST_S x 1.1^i."""
    if seconds <= SHORTEST_S:
        return 0
    return math.ceil(math.log(min(seconds, LONGEST_S) / SHORTEST_S) / math.log(_GROWTH))


def _middle(bucket: int) -> float:
    """Geometric middle of a bucket's bounds."""
    return SHORTEST_S * _GROWTH ** (bucket - 0.5) if bucket else SHORTEST_S
