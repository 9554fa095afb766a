"""The set `real` of `apps.bench.agentic`: apps/worlds on `tiny`, whose environment takes its time."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apps.bench.harness import intervals
from apps.bench.harness.agentic_rows import PACE_COLUMNS
from apps.bench.harness.agentic_scene import BOUND_OF, NAIVE, SYNC, SlowReversals
from apps.bench.harness.arms import App, Arms, place_of, run_all
from apps.bench.harness.rates import WARM_UP
from apps.bench.harness.result import Column, Goal
from forge.metrics import Row, read_rows

LAST = 10
"""Steps at the end that rewards are compared by."""
MARGIN = 0.05
"""Of a reward between 0 and 1."""
UNIT_S = 0.1
"""Of the latencies: about what the engine takes for one turn of a batch, on two cores."""
COLUMNS = (
    *PACE_COLUMNS,
    Column("trainer", "trainer_busy", ".0%"),
    Column("stale", "staleness_mean", ".2f"),
    Column("max", "staleness_max", ".0f"),
    Column("wasted", "wasted_share", ".1%"),
    Column("last reward", "reward", ".3f"),
    Column("less sync", "reward_difference", "+.3f"),
    Column("from", "reward_low", "+.3f"),
    Column("to", "reward_high", "+.3f"),
)
"""last reward: mean of the last ten steps; differences are between runs of one seed."""


def last_reward(place: Path, rows: Sequence[Row], seed: int) -> float:
    """What a run is judged by."""
    return statistics.fmean(float(row["reward/mean"] or 0.0) for row in rows[-LAST:])


WORLDS = App(("apps/worlds/main.py",), last_reward)


def arms_of(profiles: Sequence[str], arms: Sequence[str]) -> Arms:
    """Options of apps/worlds by arm and profile; naive batching is no option of it."""
    found = {}
    for profile in profiles:
        environment = {"profile": profile, "unit_s": UNIT_S}
        for arm in arms:
            if arm != NAIVE:
                found[f"{profile} {arm}"] = (
                    f"--environment.path={SlowReversals.__module__}:SlowReversals",
                    f"--environment.kwargs={json.dumps(environment)}",
                    f"--replay.max_staleness={BOUND_OF[arm]}",
                    "--loss.correction=tis",
                    "--run.checkpoint=false",
                )
    return found


def measure_real(profiles: Sequence[str], arms: Sequence[str], seeds: int, steps: int, folder: Path) -> list[Any]:
    """A row an arm and profile. Runs that are done are not run again."""
    options = arms_of(profiles, arms)
    run_all(options, range(seeds), steps, folder, side_by_side=1, app=WORLDS)
    runs = {
        (profile, arm): [
            read_rows(place_of(f"{profile} {arm}", seed, folder) / "metrics.jsonl") for seed in range(seeds)
        ]
        for profile in profiles
        for arm in arms
        if f"{profile} {arm}" in options
    }
    return [row_of(profile, arm, own, runs.get((profile, SYNC))) for (profile, arm), own in runs.items()]


def row_of(
    profile: str, arm: str, runs: Sequence[Sequence[Row]], sync: Sequence[Sequence[Row]] | None
) -> dict[str, Any]:
    """From the metrics of an arm's runs, and of the synchronous ones with the same seeds."""
    rewards = [last_reward(Path(), run, 0) for run in runs]
    row: dict[str, Any] = {
        "set": "real",
        "profile": profile,
        "horizon": "3",
        "arm": arm,
        "bound": BOUND_OF[arm],
        "seeds": len(runs),
        "steps_per_s": statistics.fmean(map(_pace, runs)),
        "tokens_per_s": statistics.fmean(_sum(run, "tokens/trained") / _wall_s(run) for run in runs),
        "trainer_busy": statistics.fmean(_sum(run, "time/step_s") / _wall_s(run) for run in runs),
        "staleness_mean": statistics.fmean(_sum(run, "staleness/mean") / len(run[WARM_UP:]) for run in runs),
        "staleness_max": max(float(one["staleness/max"] or 0.0) for run in runs for one in run),
        "wasted_share": statistics.fmean(_sum(run, "tokens/wasted") / _sum(run, "tokens/generated") for run in runs),
        "reward": statistics.fmean(rewards),
    }
    if sync is not None:
        ratio = intervals.of_mean([_pace(own) / _pace(base) for own, base in zip(runs, sync, strict=True)])
        row |= {"ratio": ratio.mean, "ratio_low": ratio.low, "ratio_high": ratio.high}
        less = [own - last_reward(Path(), base, 0) for own, base in zip(rewards, sync, strict=True)]
        difference = intervals.of_mean(less)
        row |= {"reward_difference": difference.mean, "reward_low": difference.low, "reward_high": difference.high}
    return row


def _wall_s(rows: Sequence[Row]) -> float:
    return float(rows[-1]["time_s"] or 0.0) - float(rows[WARM_UP - 1]["time_s"] or 0.0)


def _pace(rows: Sequence[Row]) -> float:
    return len(rows[WARM_UP:]) / _wall_s(rows)


def _sum(rows: Sequence[Row], key: str) -> float:
    return sum(float(row[key] or 0.0) for row in rows[WARM_UP:])


def goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Rewards as synchronous, and no loss of pace where there is no latency to gain from."""
    ahead = [row for row in rows if row["set"] == "real" and row["arm"] != SYNC]
    away = [abs(row["reward_difference"]) for row in ahead if "reward_difference" in row]
    paces = [row["ratio"] for row in ahead if row["profile"] == "none" and "ratio" in row]
    return [
        Goal(f"tiny: largest difference of the last {LAST} rewards to sync", max(away, default=None), MARGIN, "most"),
        Goal("tiny: least x sync without latency", min(paces, default=None), 1.0, "least"),
    ]
