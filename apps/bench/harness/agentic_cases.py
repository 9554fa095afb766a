"""Which runs `apps.bench.agentic` makes of sleeping compute, and how long each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apps.bench.harness.agentic_scene import HORIZONS, NAIVE, Case

SETS = ("waits", "scaling", "real")
REPLICAS = (1, 2, 4, 8)
SCALING_PLACES = 4
"""Of one replica: few enough that a batch keeps eight replicas busy."""


@dataclass(frozen=True)
class Length:
    """Seconds of one policy turn, and steps with their warm-up."""

    decode_s: float
    steps: int
    warm_up: int = 6


LENGTHS: dict[tuple[str, str], Length] = {
    ("1", "none"): Length(0.5, 30),
    ("1", "uniform"): Length(0.3, 40),
    ("1", "heavy"): Length(0.1, 60),
    ("1", "slow"): Length(0.1, 60),
    ("20", "none"): Length(0.5, 14),
    ("20", "uniform"): Length(0.1, 20),
    ("20", "heavy"): Length(0.05, 26),
    ("20", "slow"): Length(0.05, 24),
    ("20-50", "heavy"): Length(0.05, 20),
}
"""By turns and profile: long enough that Python's milliseconds for a turn are few beside it. Without latency all turns
begin at the same moment and wait for each other's Python, so these are the longest."""
_SCALING = Length(0.2, 14)


def cases_of(
    sets: Sequence[str],
    horizons: Sequence[str],
    profiles: Sequence[str],
    arms: Sequence[str],
    seeds: int,
    scale: float = 1.0,
) -> list[Case]:
    """The longest first, so that none of them is the last to begin."""
    cases = []
    if "waits" in sets:
        for (horizon, profile), length in LENGTHS.items():
            if horizon in horizons and profile in profiles:
                times = (length.steps, length.warm_up, length.decode_s * scale)
                cases += [Case(profile, horizon, arm, seed, *times) for seed in range(seeds) for arm in arms]
    if "scaling" in sets:
        times = (_SCALING.steps, _SCALING.warm_up, _SCALING.decode_s * scale)
        cases += [Case("none", "20", "bound 4", 0, *times, count, SCALING_PLACES) for count in REPLICAS]
    return sorted(cases, key=_about_s, reverse=True)


def _about_s(case: Case) -> float:
    ahead = 1 if case.arm == NAIVE else case.bound + 1
    return case.steps * sum(HORIZONS[case.horizon]) * case.decode_s / ahead / case.replicas
