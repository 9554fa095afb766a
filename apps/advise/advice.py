"""From measured turns to a choice: synchronous or not, which staleness bound, how many environments. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from apps.advise.measure import Measured
from apps.advise.simulation import Outcome, Scene, simulate

BOUNDS = (0, 1, 2, 4)
GOOD_ENOUGH = 0.95
"""Of the best pace: a smaller bound, or fewer environments, that reach it are preferred."""
WORTH_IT = 1.1
"""Times the synchronous pace, below which asynchrony is not worth what it brings with it."""


@dataclass(frozen=True)
class Costs:
    """What the environment is trained with; seconds."""

    decode_s: float
    """To decode one turn of the policy, with all places taken."""
    step_s: float
    sync_s: float
    group_size: int
    groups_per_step: int
    places: int
    """Turns that the generators decode at once."""


@dataclass(frozen=True)
class Choice:
    """One way to run, and what it gives."""

    bound: int
    environments: int
    outcome: Outcome
    gain: float
    """Times the pace of bound 0 with as many environments as a batch has episodes."""


def scene_of(measured: Measured, costs: Costs) -> Scene:
    """Draws from what was measured. `measured` holds at least one turn."""
    turns = [seconds for episode in measured.turns_s for seconds in episode]
    lengths, resets = [len(episode) for episode in measured.turns_s], measured.resets_s or [0.0]
    return Scene(
        turns=lambda rng: rng.choice(lengths),
        latency_s=lambda rng: rng.choice(turns),
        decode_s=lambda rng: costs.decode_s,
        reset_s=lambda rng: rng.choice(resets),
        step_s=costs.step_s,
        sync_s=costs.sync_s,
        group_size=costs.group_size,
        groups_per_step=costs.groups_per_step,
        environments=costs.group_size * costs.groups_per_step,
        places=costs.places,
    )


def choices(scene: Scene, *, steps: int = 100, seed: int = 0) -> list[Choice]:
    """Every bound with half to four times as many environments as a batch has episodes."""
    batch = scene.group_size * scene.groups_per_step
    counts = sorted({max(1, batch // 2), batch, 2 * batch, 4 * batch})
    base = simulate(replace(scene, environments=batch), 0, steps=steps, seed=seed).steps_per_s
    found = []
    for bound in BOUNDS:
        for count in counts:
            outcome = simulate(replace(scene, environments=count), bound, steps=steps, seed=seed)
            found.append(Choice(bound, count, outcome, outcome.steps_per_s / base))
    return found


def best(found: Sequence[Choice]) -> Choice:
    """The smallest bound, then the fewest environments, that come near the best pace.

    Synchronous, where nothing else is much better.
    """
    fastest = max(choice.gain for choice in found)
    synchronous = [choice for choice in found if choice.bound == 0]
    pool = synchronous if fastest < WORTH_IT * max(c.gain for c in synchronous) else list(found)
    limit = GOOD_ENOUGH * max(choice.gain for choice in pool)
    return min((c for c in pool if c.gain >= limit), key=lambda c: (c.bound, c.environments))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lie; of none 0."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0
