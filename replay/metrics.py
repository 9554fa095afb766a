"""What the replay says of itself: counts, and the numbers of one step. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from operator import itemgetter

from replay.storage import Record

OUTCOMES = 1024
"""Episodes, the last ones that ended, over which the discard rates are taken."""
QUARTILES = 4


@dataclass(slots=True)
class Counts:
    """What happened so far; the difference of two readings is what happened between them."""

    groups_reserved: int = 0
    groups_added: int = 0
    groups_trained: int = 0
    groups_failed: int = 0
    groups_straggled: int = 0
    groups_expired: int = 0
    groups_degenerate: int = 0
    episodes_trained: int = 0
    episodes_dropped: int = 0
    tokens_trained: int = 0
    tokens_wasted: int = 0

    def since(self, earlier: Counts) -> Counts:
        """This reading less an earlier one."""
        return Counts(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


def batch_stats(
    records: Sequence[Record], ages_s: Sequence[float], policy_version: int, max_staleness: int
) -> dict[str, float]:
    """Staleness, rewards and queue ages of one batch. Nothing of a dropped group is in it.

    An episode that trains no token has no staleness and enters none of its figures.
    """
    staleness = [policy_version - version for r in records for version in r.oldest if version >= 0] or [0]
    rewards = [reward for r in records for reward in r.rewards]
    shares, mean = Counter(staleness), statistics.fmean(rewards)
    return {
        "staleness/mean": statistics.fmean(staleness),
        "staleness/max": max(staleness),
        "staleness/bound": max_staleness,
        **{f"staleness/hist/{n}": shares[n] / len(staleness) for n in range(max_staleness + 1)},
        "reward/mean": mean,
        # statistics.pstdev works in fractions: ten times as long.
        "reward/std": math.sqrt(statistics.fmean((reward - mean) ** 2 for reward in rewards)),
        "queue/age_mean_s": statistics.fmean(ages_s),
        "queue/age_max_s": max(ages_s),
    }


def interval_stats(recent: Counts, admission_waits_s: Sequence[float]) -> dict[str, float]:
    """What happened since the batch before: what was trained, what was thrown away, what was waited for."""
    return {
        "tokens/trained": recent.tokens_trained,
        "tokens/wasted": recent.tokens_wasted,
        "waste/share": _share(recent.tokens_wasted, recent.tokens_trained + recent.tokens_wasted),
        "episodes/trained": recent.episodes_trained,
        "episodes/dropped": recent.episodes_dropped,
        "groups/degenerate": recent.groups_degenerate,
        "groups/degenerate_share": _share(recent.groups_degenerate, recent.groups_added),
        "groups/expired": recent.groups_expired,
        "groups/straggled": recent.groups_straggled,
        "groups/failed": recent.groups_failed,
        "replay/admission_wait_s": statistics.fmean(admission_waits_s) if admission_waits_s else 0.0,
    }


def discard_rates(outcomes: Iterable[tuple[int, bool]]) -> dict[str, float]:
    """Share of dropped episodes in each quartile of length, `discard/q1` the shortest; empty ones are absent.

    `outcomes`: length in tokens and whether it was dropped, of each episode that ended. Rates that rise with
    the length say that the policy is trained on what was quick to make. Groups that never came have no length.
    """
    ended, was_dropped = list(outcomes), itemgetter(1)
    if any(map(was_dropped, ended)):  # else their order says nothing
        ended.sort(key=itemgetter(0))
    dropped = list(map(was_dropped, ended))
    bounds = [-(-quarter * len(dropped) // QUARTILES) for quarter in range(QUARTILES + 1)]
    quarters = enumerate((dropped[start:stop] for start, stop in pairwise(bounds)), start=1)
    return {f"discard/q{n}": sum(quarter) / len(quarter) for n, quarter in quarters if quarter}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
