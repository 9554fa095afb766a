"""What one step measures: the keys of metrics.jsonl, the row, and the meter that fills it.

    rollout loops --Meter.add-->   |             |
    train loop ----Meter.timed-->  | Meter.lap() | --> make_row --> one object of metrics.jsonl
    weight loop ---Meter.longest-> |             |

Counts and times belong to the step of their row (since the row before), so that sums over rows give the
run. A value that was not measured is null.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.errors import SchemaError
from forge.trace import TRAIN_LOOP, Trace

Number = int | float
Row = dict[str, Number | None]


@dataclass(frozen=True)
class Metric:
    """One key of metrics.jsonl: its unit ("1" for a pure number) and what it says."""

    unit: str
    description: str


METRICS: dict[str, Metric] = {
    "step": Metric("steps", "training step of this row, counted from 1"),
    "policy_version": Metric("versions", "version of the weights that this step made"),
    "time_s": Metric("s", "wall time from the start of the meter to the end of this step"),
    "reward/mean": Metric("1", "mean total reward of the trained episodes"),
    "reward/std": Metric("1", "standard deviation of the total reward over the trained episodes"),
    "loss/policy": Metric("1", "policy loss, without the KL term"),
    "loss/kl": Metric("nats", "estimated KL divergence from the reference policy; null without a reference"),
    "grad_norm": Metric("1", "norm of the gradient before clipping"),
    "ratio/mean": Metric("1", "mean ratio of trainer to generator probability over the trained tokens"),
    "ratio/clip_fraction": Metric("1", "share of the trained tokens whose ratio the clipping cut off"),
    "staleness/mean": Metric("versions", "mean staleness of the trained episodes, from their oldest token"),
    "staleness/max": Metric("versions", "largest staleness of a trained episode"),
    "staleness/bound": Metric("versions", "max_staleness: no trained episode is staler"),
    "tokens/generated": Metric("tokens", "tokens that the generators sampled during this step"),
    "tokens/trained": Metric("tokens", "tokens under the loss mask of the trained batch"),
    "tokens/wasted": Metric("tokens", "sampled tokens of dropped episodes"),
    "episodes/trained": Metric("episodes", "episodes in the trained batch"),
    "episodes/dropped": Metric("episodes", "episodes thrown away untrained: too stale, or degenerate and dropped"),
    "groups/degenerate": Metric("groups", "groups whose rewards are all equal"),
    "time/wait_batch_s": Metric("s", "time that the train loop waited for its batch"),
    "time/step_s": Metric("s", "time that the trainer took for forward, backward and the optimizer"),
    "time/publish_stall_s": Metric("s", "time that publishing the weights kept the train loop from going on"),
    "generator/pause_s": Metric("s", "longest stop of a generator for a weight update; null without one"),
    "generator/tokens_per_s": Metric("tokens/s", "tokens/generated over the wall time of this step"),
    "trainer/idle_share": Metric("1", "time/wait_batch_s over the wall time of this step"),
}
"""Every key of a row, in the order in which it is written."""

METRIC_KEYS: tuple[str, ...] = tuple(METRICS)
EXTRA_PREFIXES: tuple[str, ...] = (
    "extra/",
    "replay/",
    "groups/",
    "staleness/hist/",
    "waste/",
    "queue/",
    "discard/",
    "pack/",
)
"""Keys beyond `METRIC_KEYS` are free under these prefixes."""

NONFINITE = "extra/nonfinite"
"""How many values of the row were NaN or infinite; absent when none was."""

_INTEGERS = ("step", "policy_version")
_REQUIRED = (*_INTEGERS, "time_s")


def make_row(values: Mapping[str, Any]) -> Row:
    """One checked object of metrics.jsonl, keys in the order of `METRIC_KEYS`, extra keys behind them.

    Values are numbers, one-element tensors or arrays, or None (not measured). NaN and infinity become
    None and are counted under `NONFINITE`, because JSON has neither. Raises SchemaError for a missing or
    unknown key and for a value that is no number; `step`, `policy_version` and `time_s` must be finite.
    """
    missing = [key for key in METRIC_KEYS if key not in values]
    if missing:
        raise SchemaError(f"the row lacks {missing}; pass None for what was not measured")
    extra = [key for key in values if key not in METRICS]
    unknown = [key for key in extra if not key.startswith(EXTRA_PREFIXES)]
    if unknown:
        raise SchemaError(
            f"unknown metric keys {unknown}; use a key of forge.metrics.METRIC_KEYS "
            f"or start it with one of {', '.join(EXTRA_PREFIXES)}"
        )
    row: Row = {}
    num_nonfinite = 0
    for key in (*METRIC_KEYS, *extra):
        number = _number(key, values[key])
        if number is not None and not math.isfinite(number):
            number, num_nonfinite = None, num_nonfinite + 1
        row[key] = number
    for key in _REQUIRED:
        if row[key] is None or (key in _INTEGERS and not isinstance(row[key], int)):
            kind = "an integer" if key in _INTEGERS else "a finite number"
            raise SchemaError(f"{key} must be {kind}, got {values[key]!r}")
    if num_nonfinite:
        row[NONFINITE] = num_nonfinite
    return row


def _number(key: str, value: Any) -> Number | None:
    if value is not None and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError, TypeError) as error:
            raise SchemaError(f"{key} must hold one element, got shape {list(value.shape)}") from error
    if value is None or isinstance(value, (int, float)):
        return value
    raise SchemaError(f"{key} must be a number or None, got {value!r} of type {type(value).__name__}")


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a metrics.jsonl file; a torn last line (the run was killed) is left out.

    Raises SchemaError naming the line when any other line is no JSON object, and OSError when the file
    cannot be read.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise SchemaError(f"{path} line {number} is no JSON: {error}; mend or remove it") from error
        if not isinstance(row, dict):
            raise SchemaError(f"{path} line {number} is {type(row).__name__}, expected an object")
        rows.append(row)
    return rows


class Meter:
    """Counts and times between two steps of a run, turned into metric keys by `lap`.

    For one event loop: the loops of the app share it, threads must not. `clock` gives seconds; a run that was
    resumed had taken `elapsed_s` before.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, elapsed_s: float = 0.0, trace: Trace | None = None
    ) -> None:
        """What `timed` measures is written into `trace` as well."""
        self._clock = clock
        self._last = clock()
        self._start = self._last - elapsed_s
        self._totals: dict[str, Number] = {}
        self._values: dict[str, Number] = {}
        self._sources: list[Callable[[], Mapping[str, Number]]] = []
        self._trace = trace or Trace()
        self._reset()

    def include(self, source: Callable[[], Mapping[str, Number]]) -> None:
        """Asks `source` for keys of its own at the end of each step; it answers at once."""
        self._sources.append(source)

    def _reset(self) -> None:
        self._values = {"tokens/generated": 0}
        self._values |= {"time/wait_batch_s": 0.0, "time/step_s": 0.0, "time/publish_stall_s": 0.0}

    def add(self, key: str, amount: Number) -> None:
        """Adds `amount` to what this step counted under `key`."""
        self._values[known(key)] = self._values.get(key, 0) + amount

    def total(self, key: str, running_total: Number) -> None:
        """Counts what a total that somebody else keeps over the whole run has grown by."""
        self.add(key, running_total - self._totals.get(key, 0))
        self._totals[key] = running_total

    def longest(self, key: str, seconds: float) -> None:
        """Keeps the largest of the values reported under `key` during this step."""
        self._values[known(key)] = max(self._values.get(key, seconds), seconds)

    @contextmanager
    def timed(self, key: str) -> Iterator[None]:
        """Adds the wall time of the block to `key`, also when the block raises."""
        start = self._clock()
        try:
            with self._trace.span(TRAIN_LOOP, key):
                yield
        finally:
            self.add(key, self._clock() - start)

    def lap(self) -> dict[str, Number | None]:
        """Ends a step: its counts and times with `time_s` and the two rates; then starts over at zero.

        The rates are over the wall time since the last lap; they are 0 when no time went by.
        """
        now = self._clock()
        wall_s = now - self._last
        lap: dict[str, Number | None] = {"time_s": now - self._start, "generator/pause_s": None}
        lap |= self._values
        for source in self._sources:
            lap |= source()
        waited, sampled = self._values["time/wait_batch_s"], self._values["tokens/generated"]
        lap["trainer/idle_share"] = min(1.0, waited / wall_s) if wall_s > 0 else 0.0
        lap["generator/tokens_per_s"] = sampled / wall_s if wall_s > 0 else 0.0
        self._last = now
        self._reset()
        return lap


def known(key: str) -> str:
    """`key`, where a row may have it; else raises SchemaError."""
    if key in METRICS or key.startswith(EXTRA_PREFIXES):
        return key
    raise SchemaError(f"unknown metric key {key!r}; use one of METRIC_KEYS or a prefix of {EXTRA_PREFIXES}")
