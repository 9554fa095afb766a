"""From runs of `apps.bench.agentic` to its rows and goals. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from apps.bench.harness import intervals
from apps.bench.harness.agentic_scene import NAIVE, SYNC, Case
from apps.bench.harness.result import Column, Goal

Found = tuple[Case, Mapping[str, float]]
"""A run and its `Figures`."""
Row = dict[str, Any]
HORIZON, LONG, TAIL = "20", "20-50", "heavy"
PACE_COLUMNS = (
    Column("arm", "arm"),
    Column("steps/s", "steps_per_s", ".3f"),
    Column("tokens/s", "tokens_per_s", ".0f"),
    Column("x sync", "ratio", ".2f"),
    Column("from", "ratio_low", ".2f"),
    Column("to", "ratio_high", ".2f"),
)
COLUMNS = (
    *PACE_COLUMNS,
    Column("ceiling", "ceiling", ".2f"),
    Column("share", "share", ".2f"),
    Column("pace", "pace", ".2f"),
    Column("generator", "generator_busy", ".0%"),
    Column("trainer", "trainer_busy", ".0%"),
    Column("stale", "staleness_mean", ".2f"),
    Column("max", "staleness_max", ".0f"),
    Column("wasted", "wasted_share", ".1%"),
    Column("CPU ms", "turn_cpu_ms", ".2f"),
    Column("lag ms", "lag_mean_ms", ".1f"),
    Column("worst", "lag_longest_ms", ".0f"),
)
"""ceiling: simulated x sync; share: of the ceiling; pace: over the simulated; CPU: of one turn of one
episode, all parts of a run together; lag: of the event loop."""
SCALING_COLUMNS = (
    Column("generators", "replicas"),
    Column("tokens/s", "generated_per_s", ".0f"),
    Column("x one", "ratio", ".2f"),
    Column("ceiling", "ceiling", ".2f"),
    Column("share", "share", ".2f"),
    *COLUMNS[8:],
)
_MEANS = (
    "steps_per_s",
    "tokens_per_s",
    "generated_per_s",
    "generator_busy",
    "trainer_busy",
    "staleness_mean",
    "wasted_share",
)


def rows_of(found: Sequence[Found]) -> list[Row]:
    """One an arm over its seeds. Ratios and ceilings are taken between runs of one seed, and then their mean."""
    arms: dict[tuple[Any, ...], list[Found]] = {}
    for case, figures in found:
        arms.setdefault((case.horizon, case.profile, case.places, case.replicas, case.arm), []).append((case, figures))
    bases = {_key(case): figures for case, figures in found if _is_base(case)}
    return [_row(runs, bases) for runs in sorted(arms.values(), key=lambda runs: _order(runs[0][0]))]


def _scaling(case: Case) -> bool:
    return case.places != Case.places


def _is_base(case: Case) -> bool:
    return case.replicas == 1 if _scaling(case) else case.arm == SYNC


def _key(case: Case) -> tuple[Any, ...]:
    return case.horizon, case.profile, case.places, case.seed


def _order(case: Case) -> tuple[Any, ...]:
    return _scaling(case), case.horizon, case.profile, case.replicas, case.arm != SYNC, case.arm == NAIVE, case.bound


def _row(runs: Sequence[Found], bases: Mapping[tuple[Any, ...], Mapping[str, float]]) -> Row:
    case, figures = runs[0][0], [figures for _, figures in runs]
    # Generators are compared by what they generate: batches of one bound come in bursts.
    key = "generated_per_s" if _scaling(case) else "steps_per_s"
    row: Row = {
        "set": "scaling" if _scaling(case) else "waits",
        **{name: getattr(case, name) for name in ("profile", "horizon", "arm", "bound", "replicas", "decode_s")},
        "seeds": len(runs),
        **{name: statistics.fmean(one[name] for one in figures) for name in _MEANS},
        "staleness_max": max(one["staleness_max"] for one in figures),
        "pace": statistics.fmean(one[key] / one[f"ceiling_{key}"] for one in figures),
        "cpu_share": statistics.fmean(one["cpu_share"] for one in figures),
        "turn_cpu_ms": 1e3 * statistics.fmean(one["turn_cpu_s"] for one in figures),
        "lag_mean_ms": 1e3 * statistics.fmean(one["lag_mean_s"] for one in figures),
        "lag_longest_ms": 1e3 * max(one["lag_longest_s"] for one in figures),
    }
    paired = [(one, bases[_key(case)]) for case, one in runs if _key(case) in bases]
    if paired:
        ratios = [one[key] / base[key] for one, base in paired]
        ceilings = [one[f"ceiling_{key}"] / base[f"ceiling_{key}"] for one, base in paired]
        mean = intervals.of_mean(ratios)
        row |= {"ratio": mean.mean, "ratio_low": mean.low, "ratio_high": mean.high}
        row |= {"ceiling": statistics.fmean(ceilings)}
        row |= {"share": statistics.fmean(ratio / most for ratio, most in zip(ratios, ceilings, strict=True))}
    return row


def goals_of(rows: Sequence[Row], sets: Sequence[str]) -> list[Goal]:
    """Those of the sets that were asked for; what is missing of them counts as not measured."""
    waits = [row for row in rows if row["set"] == "waits"]
    ahead = [row for row in waits if row["arm"] not in (SYNC, NAIVE)]
    goals = []
    if "waits" in sets:
        shares = [row["share"] for row in ahead if "share" in row]
        goals += [
            Goal("least share of the simulated ceiling", min(shares, default=None), 0.9, "least"),
            _fastest([row for row in ahead if (row["horizon"], row["profile"]) == (HORIZON, TAIL)]),
            Goal(f"{LONG} turns, {TAIL}: x naive, bound 4", _over_naive(waits), 1.55, "least"),
            _latency_free(ahead),
            Goal("versions above the bound", _above(waits), 0, "most"),
        ]
    if "scaling" in sets:
        eight = [row["ratio"] for row in rows if row["set"] == "scaling" and row["replicas"] == 8 and "ratio" in row]
        goals.append(Goal("throughput of 8 generators over 1", eight[0] if eight else None, 7.6, "least"))
    return goals


def _fastest(rows: Sequence[Row]) -> Goal:
    best = max((row for row in rows if "ratio" in row), key=lambda row: row["ratio"], default=None)
    name = f"{HORIZON} turns, {TAIL}: x sync at a bound <= 4"
    if best is not None:
        name += f" ({best['arm']}, staleness mean {best['staleness_mean']:.2f}, max {best['staleness_max']:.0f})"
    return Goal(name, best["ratio"] if best else None, 2.72, "least")


def _over_naive(rows: Sequence[Row]) -> float | None:
    pace = {row["arm"]: row["steps_per_s"] for row in rows if (row["horizon"], row["profile"]) == (LONG, TAIL)}
    return pace["bound 4"] / pace[NAIVE] if {"bound 4", NAIVE} <= set(pace) else None


def _latency_free(rows: Sequence[Row]) -> Goal:
    ratios = [row["ratio"] for row in rows if row["profile"] == "none" and "ratio" in row]
    return Goal("least x sync without latency", min(ratios, default=None), 1.0, "least")


def _above(rows: Sequence[Row]) -> float | None:
    return max((row["staleness_max"] - row["bound"] for row in rows), default=None)
