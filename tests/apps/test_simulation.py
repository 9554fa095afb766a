"""Laws of apps/advise/simulation.py: what can be worked out by hand, the bound, and who waits for whom."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.advise.simulation import Draw, Scene, simulate


def always(seconds: float) -> Draw:
    return lambda rng: seconds


def heavy(rng: random.Random) -> float:
    """Median 1, the 95th percentile ten times that."""
    return rng.lognormvariate(0.0, math.log(10) / 1.6449)


EVEN = Scene(turns=3, latency_s=always(2.0), decode_s=always(1.0), step_s=4.0, sync_s=0.5)
HEAVY = Scene(turns=1, latency_s=heavy, decode_s=always(1.0), step_s=0.5, environments=1024, places=1024)


def test_synchronous_without_spread_is_the_sum_of_its_parts() -> None:
    out = simulate(EVEN, 0)
    assert out.steps_per_s == pytest.approx(1 / (3 * 3.0 + 4.0 + 0.5))
    assert out.trainer_busy == pytest.approx(4.0 / 13.5)
    assert out.generator_busy == pytest.approx(3 / 13.5)
    assert out.environments_busy == pytest.approx(9 / 13.5)
    assert out.staleness_max == 0


def test_one_version_ahead_without_spread_the_longer_of_two_parts_counts() -> None:
    out = simulate(replace(EVEN, environments=1024, places=1024), 1)
    assert 1 / 13.5 < out.steps_per_s <= 2 / 13.5 + 1e-9
    assert simulate(replace(EVEN, environments=1024, places=1024), 4).trainer_busy == pytest.approx(1.0, abs=0.02)


def test_a_turn_that_waits_holds_no_place_in_the_generator() -> None:
    few = replace(EVEN, places=8, environments=1024)
    assert simulate(few, 4).generator_busy == pytest.approx(1.0, abs=0.03)
    held = simulate(few, 1, barrier=True)
    assert held.generator_busy < 0.5, "with the environment inside the call two thirds of each place only wait"


def test_with_few_environments_those_are_what_is_always_busy() -> None:
    out = simulate(replace(EVEN, environments=16), 4)
    assert out.environments_busy == pytest.approx(1.0, abs=0.02)
    assert out.steps_per_s == pytest.approx(16 / 9 / 64, rel=0.02)


def test_heavy_tails_gain_about_what_was_worked_out_elsewhere() -> None:
    sync = simulate(HEAVY, 0).steps_per_s
    gains = [simulate(HEAVY, bound).steps_per_s / sync for bound in (1, 2, 4)]
    assert gains == pytest.approx([1.5, 2.0, 2.7], abs=0.2)
    assert simulate(HEAVY, 1, barrier=True).steps_per_s / sync == pytest.approx(1.0, abs=0.1)
    long = replace(HEAVY, turns=20, step_s=10.0)
    assert simulate(long, 4).steps_per_s / simulate(long, 0).steps_per_s > 3.5


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 40),
    st.floats(0.1, 20.0),
    st.integers(0, 9),
)
def test_no_batch_is_older_than_the_bound_and_nothing_waits_for_ever(
    bound: int, turns: int, environments: int, places: int, step_s: float, seed: int
) -> None:
    scene = Scene(turns, heavy, always(0.5), step_s, 0.1, 3, 4, environments, places)
    out = simulate(scene, bound, steps=30, warm_up=5, seed=seed)
    assert 0 <= out.staleness_mean <= out.staleness_max <= bound
    assert 0 < out.trainer_busy <= 1 + 1e-9
    assert out.generator_busy <= 1 + 1e-9
    assert out.environments_busy <= 1.1, "an episode counts when it ends, also if it began before the warm-up did"
    ahead = simulate(scene, 0, steps=30, warm_up=5, seed=seed)
    assert out.steps_per_s <= (bound + 1) * ahead.steps_per_s * 1.35, "the draws of other groups may be luckier"


def test_equal_seeds_give_equal_outcomes() -> None:
    assert simulate(HEAVY, 2, steps=40, seed=3) == simulate(HEAVY, 2, steps=40, seed=3)
    assert simulate(HEAVY, 2, steps=40, seed=3) != simulate(HEAVY, 2, steps=40, seed=4)
