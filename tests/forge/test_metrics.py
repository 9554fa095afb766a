"""The row of metrics.jsonl and the meter that fills it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge.errors import SchemaError
from forge.metrics import METRIC_KEYS, METRICS, NONFINITE, Meter, make_row, read_rows

PUBLISHED_KEYS = (
    "step policy_version time_s reward/mean reward/std loss/policy loss/kl grad_norm ratio/mean "
    "ratio/clip_fraction staleness/mean staleness/max staleness/bound tokens/generated tokens/trained "
    "tokens/wasted episodes/trained episodes/dropped groups/degenerate time/wait_batch_s time/step_s "
    "time/publish_stall_s generator/pause_s generator/tokens_per_s trainer/idle_share"
)


def some_values(**changes: Any) -> dict[str, Any]:
    return dict.fromkeys(METRIC_KEYS, 0) | changes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_keys_are_the_published_ones_in_their_order() -> None:
    assert tuple(PUBLISHED_KEYS.split()) == METRIC_KEYS
    assert all(metric.unit and metric.description for metric in METRICS.values())


def test_a_row_has_exactly_the_keys_in_order_whatever_order_they_came_in() -> None:
    shuffled = dict(reversed(some_values().items()))
    assert tuple(make_row({"replay/queued": 3, **shuffled})) == (*METRIC_KEYS, "replay/queued")


def test_tensors_and_arrays_of_one_element_become_plain_numbers() -> None:
    row = make_row(some_values(step=torch.tensor(3), grad_norm=torch.tensor([0.5]), time_s=np.float32(1.5)))
    assert (row["step"], row["grad_norm"], row["time_s"]) == (3, 0.5, 1.5)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_nan_and_infinity_are_written_as_null_and_counted() -> None:
    values = some_values(grad_norm=math.nan, **{"loss/kl": torch.tensor(math.inf), "extra/x": -math.inf})
    row = make_row(values)
    assert [row["grad_norm"], row["loss/kl"], row["extra/x"]] == [None, None, None]
    assert row[NONFINITE] == 3


def test_what_was_not_measured_is_null_and_not_counted_as_nonfinite() -> None:
    row = make_row(some_values(**{"loss/kl": None}))
    assert row["loss/kl"] is None
    assert NONFINITE not in row


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward/maen": 1.0}, "reward/maen.*METRIC_KEYS.*extra/"),
        ({"grad_norm": "1.0"}, "grad_norm must be a number or None, got '1.0' of type str"),
        ({"grad_norm": torch.zeros(2)}, r"grad_norm must hold one element, got shape \[2\]"),
        ({"step": 1.5}, "step must be an integer, got 1.5"),
        ({"policy_version": None}, "policy_version must be an integer, got None"),
        ({"time_s": math.nan}, "time_s must be a finite number, got nan"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_key_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        make_row(some_values(**changes))


def test_a_missing_key_is_an_error_that_names_it() -> None:
    values = some_values()
    del values["loss/kl"]
    with pytest.raises(SchemaError, match=r"loss/kl.*pass None"):
        make_row(values)


def test_a_torn_last_line_is_left_out_when_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_rows(path) == [{"step": 1}, {"step": 2}]


def test_a_broken_line_before_the_last_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(SchemaError, match="line 2"):
        read_rows(path)


def test_idle_share_is_the_wait_for_a_batch_over_the_wall_time_since_the_last_step() -> None:
    clock = Clock()
    meter = Meter(clock)
    with meter.timed("time/wait_batch_s"):
        clock.now += 1.0
    with meter.timed("time/step_s"):
        clock.now += 3.0
    meter.add("tokens/generated", 200)
    lap = meter.lap()
    assert (lap["trainer/idle_share"], lap["time/wait_batch_s"], lap["time/step_s"]) == (0.25, 1.0, 3.0)
    assert (lap["generator/tokens_per_s"], lap["time_s"]) == (50.0, 4.0)


def test_a_lap_starts_counts_over_and_time_s_goes_on() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.add("tokens/generated", 7)
    meter.longest("generator/pause_s", 0.5)
    clock.now += 1.0
    meter.lap()
    clock.now += 2.0
    lap = meter.lap()
    assert (lap["tokens/generated"], lap["generator/tokens_per_s"], lap["trainer/idle_share"]) == (
        0,
        0.0,
        0.0,
    )
    assert (lap["generator/pause_s"], lap["time_s"]) == (None, 3.0)


def test_a_running_total_counts_by_its_growth() -> None:
    meter = Meter(Clock())
    grown = []
    for total in (3, 3, 10):
        meter.total("episodes/dropped", total)
        grown.append(meter.lap()["episodes/dropped"])
    assert grown == [3, 0, 7]


def test_the_longest_pause_of_a_step_is_kept() -> None:
    meter = Meter(Clock())
    for seconds in (0.1, 0.3, 0.2):
        meter.longest("generator/pause_s", seconds)
    assert meter.lap()["generator/pause_s"] == 0.3


def test_a_source_is_asked_once_a_step() -> None:
    meter, asked = Meter(Clock()), iter(range(9))
    meter.include(lambda: {"extra/asked": next(asked)})
    assert [meter.lap()["extra/asked"] for _ in range(3)] == [0, 1, 2]


def test_time_is_counted_also_when_the_block_raises() -> None:
    clock = Clock()
    meter = Meter(clock)

    def fail() -> None:
        with meter.timed("time/step_s"):
            clock.now += 2.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert meter.lap()["time/step_s"] == 2.0


def test_a_step_that_takes_no_time_has_rates_of_zero() -> None:
    meter = Meter(Clock())
    meter.add("tokens/generated", 5)
    lap = meter.lap()
    assert (lap["generator/tokens_per_s"], lap["trainer/idle_share"]) == (0.0, 0.0)


def test_a_key_that_no_row_may_have_cannot_be_metered() -> None:
    with pytest.raises(SchemaError, match="tokens/genrated"):
        Meter().add("tokens/genrated", 1)


def test_a_lap_only_uses_keys_that_a_row_accepts() -> None:
    meter = Meter()
    meter.add("extra/evictions", 1)
    make_row(some_values(**meter.lap()))
