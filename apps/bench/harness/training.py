"""From training runs of several systems to the rows that compare them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apps.bench.harness import processes, rates
from forge.metrics import Row

OURS, TRL = "meshforge", "TRL GRPOTrainer"
Figures = dict[str, float | None]


def ours_name(max_staleness: int) -> str:
    """The name of our row at that bound."""
    return f"{OURS}, max_staleness {max_staleness}"


def trl_name(threads: int) -> str:
    """The name of TRL's row; the one with a single thread is what ratios are taken to."""
    return TRL if threads == 1 else f"{TRL}, {threads} threads"


def figures_of_rows(rows: Sequence[Row], batch_size: int) -> Figures:
    """What metrics.jsonl says about one run of ours; times in ms are medians after the warm-up."""
    stamps = [_number(row, "time_s") for row in rows]
    reached = rates.steady(stamps, batch_size)
    steady = rows[rates.WARM_UP :]
    waited = sum(_number(row, "time/wait_batch_s") for row in steady)
    tokens = sum(_number(row, "tokens/trained") for row in steady)
    first, last = rates.first_and_last([_number(row, "reward/mean") for row in rows])
    return {
        "steps_per_s": reached.steps_per_s,
        "samples_per_s": reached.samples_per_s,
        "tokens_per_episode": tokens / sum(_number(row, "episodes/trained") for row in steady),
        "reward_first": first,
        "reward_last": last,
        "trainer_idle_share": waited / (stamps[-1] - stamps[rates.WARM_UP - 1]),
        "step_ms": _median_ms(steady, "time/step_s"),
        "publish_ms": _median_ms(steady, "time/publish_stall_s"),
        "pause_ms": _median_ms(steady, "generator/pause_s"),
        "staleness_mean": statistics.fmean(_number(row, "staleness/mean") for row in steady),
    }


def figures_of_trl(found: Mapping[str, Any], batch_size: int) -> Figures:
    """What the peer's program wrote about one run of its."""
    reached = rates.steady(found["stamps"], batch_size)
    first, last = rates.first_and_last(found["rewards"])
    return {
        "steps_per_s": reached.steps_per_s,
        "samples_per_s": reached.samples_per_s,
        "tokens_per_episode": statistics.fmean(found["tokens_per_episode"][rates.WARM_UP :]),
        "reward_first": first,
        "reward_last": last,
    }


def _number(row: Row, key: str) -> float:
    value = row[key]
    if value is None:
        raise RuntimeError(f"step {row['step']} has no {key}; the run did not end well")
    return value


def _median_ms(rows: Sequence[Row], key: str) -> float | None:
    values = [value for row in rows if (value := row[key]) is not None]
    return statistics.median(values) * 1e3 if values else None


@dataclass
class Measured:
    """All rounds of all systems, by name; peak memory in bytes by system and role."""

    runs: dict[str, list[Figures]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    anchors: list[dict[str, float]] = field(default_factory=list)

    def add(self, name: str, figures: Figures, peaks: Mapping[str, int]) -> None:
        """One run. Peaks keep the largest of all rounds."""
        self.runs.setdefault(name, []).append(figures)
        processes.raise_peaks(self.peaks, {_role(name, role): peak for role, peak in peaks.items()})

    def rows(self) -> list[dict[str, Any]]:
        """One row a system: medians over the rounds, and the median ratio of samples/s to TRL's."""
        return [self._row(name, runs) for name, runs in self.runs.items()]

    def _row(self, name: str, runs: Sequence[Figures]) -> dict[str, Any]:
        row: dict[str, Any] = {"name": name, "rounds": len(runs)}
        for key in runs[0]:
            values = [value for run in runs if (value := run[key]) is not None]
            row[key] = round(statistics.median(values), 4) if values else None
        row["over_trl"] = self.over_trl(name)
        row["samples_per_s_by_round"] = [round(rate, 1) for rate in _samples_per_s(runs)]
        return row

    def over_trl(self, name: str) -> float | None:
        """Median over the rounds of samples/s over TRL's; None where one of them did not run."""
        if not {name, TRL} <= self.runs.keys():
            return None
        return round(rates.ratio(_samples_per_s(self.runs[name]), _samples_per_s(self.runs[TRL])), 4)


def _samples_per_s(runs: Sequence[Figures]) -> list[float]:
    return [rate for run in runs if (rate := run["samples_per_s"]) is not None]


def _role(name: str, role: str) -> str:
    return f"{role}, {name.removeprefix(f'{OURS}, ')}" if name.startswith(OURS) else name
