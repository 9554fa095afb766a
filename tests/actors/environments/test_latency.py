"""Percentiles of durations are right to within the promised error, in memory that does not grow."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environments.latency import OTHER, LatencyRecorder, turn_label
from forge.durations import LARGEST_ERROR, LONGEST_S, SHORTEST_S, Durations
from forge.metrics import METRIC_KEYS, make_row

SECONDS = st.floats(min_value=SHORTEST_S, max_value=LONGEST_S)


def durations(values: list[float] | np.ndarray) -> Durations:
    counted = Durations()
    for value in values:
        counted.add(float(value))
    return counted


@given(st.lists(SECONDS, min_size=1, max_size=200), st.sampled_from([1, 50, 95, 99, 100]))
def test_a_percentile_is_within_the_promised_error_of_numpys(values: list[float], percent: int) -> None:
    want = float(np.percentile(values, percent, method="inverted_cdf"))
    assert durations(values).percentile(percent) == pytest.approx(want, rel=LARGEST_ERROR + 1e-9)


@pytest.mark.parametrize("sigma", [0.1, 1.4])
def test_percentiles_of_a_heavy_tail_are_those_of_numpy(sigma: float) -> None:
    values = np.random.default_rng(0).lognormal(0.0, sigma, 50_000)
    counted = durations(values)
    for percent in (50, 95, 99):
        assert counted.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=0.055)
    assert counted.max_s == values.max()
    assert counted.total_s == pytest.approx(values.sum())


@given(st.lists(SECONDS, max_size=50), st.lists(SECONDS, max_size=50))
def test_merged_recorders_are_one_recorder_that_saw_all(first: list[float], second: list[float]) -> None:
    together = durations(first)
    together.merge(durations(second))
    whole = durations(first + second)
    assert together.count == whole.count
    for percent in (0, 50, 99, 100):
        assert together.percentile(percent) == pytest.approx(whole.percentile(percent), nan_ok=True)


def test_memory_does_not_grow_with_the_count_the_turns_or_the_names() -> None:
    def size(count: int) -> int:
        recorder = LatencyRecorder(max_names=3)
        values = np.random.default_rng(1).lognormal(0.0, 6.0, count)
        for index, value in enumerate(values):
            recorder.record(f"tool {index % 17}", turn=index, queue_s=value, service_s=value / 3)
        return len(pickle.dumps(recorder))

    assert size(50_000) < 1.5 * size(10_000) < 150_000


def test_a_name_too_many_is_counted_under_other() -> None:
    recorder = LatencyRecorder(max_names=2)
    for name in ("a", "b", "c", "d", "a"):
        recorder.record(name, turn=1, queue_s=0.0, service_s=1.0)
    assert {line.name: line.count for line in recorder.lines() if line.turn == "all"} == {"a": 2, "b": 1, OTHER: 2}


def test_queue_and_service_and_turns_are_told_apart() -> None:
    recorder = LatencyRecorder()
    for turn in (0, 0, 1, 40):
        recorder.record("shell", turn=turn, queue_s=8.0, service_s=0.5 * (turn + 1))
    row = recorder.row("extra/env/")
    assert row["extra/env/shell/count"] == 4
    assert row["extra/env/shell/turn0/count"] == 2
    assert row["extra/env/shell/queue_p95_s"] == pytest.approx(8.0, rel=0.05)
    assert row["extra/env/shell/turn0/service_p50_s"] == pytest.approx(0.5, rel=0.05)
    assert row["extra/env/shell/turn33+/service_max_s"] == 20.5
    assert [line.turn for line in recorder.lines()][::2] == ["all", "turn0", "turn1", "turn33+"]
    make_row(dict.fromkeys(METRIC_KEYS) | {"step": 1, "policy_version": 1, "time_s": 1.0} | row)


def test_turns_have_few_labels() -> None:
    assert [turn_label(turn) for turn in (0, 8, 9, 16, 17, 32, 33, 10**6)] == [
        *("turn0", "turn8", "turn9-16", "turn9-16", "turn17-32", "turn17-32", "turn33+", "turn33+"),
    ]


def test_what_is_shorter_or_longer_than_the_buckets_is_counted_all_the_same() -> None:
    counted = durations([-1.0, 0.0, SHORTEST_S / 2])
    assert counted.percentile(100) == SHORTEST_S / 2
    counted.add(10 * LONGEST_S)
    assert (counted.count, counted.max_s) == (4, 10 * LONGEST_S)
    assert counted.percentile(100) * (1 + LARGEST_ERROR) > LONGEST_S


def test_no_durations_have_no_percentile() -> None:
    assert math.isnan(Durations().percentile(50))
    assert LatencyRecorder().row() == {}
