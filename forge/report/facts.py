"""Rows of metrics.jsonl and spans of a trace -> the numbers of the page. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from forge.metrics import NONFINITE, Row
from forge.trace import TRAIN_LOOP, Span

_PERCENTS = ("p50_s", "p95_s", "p99_s", "max_s")


def values(rows: Sequence[Row], key: str) -> list[float]:
    """What was measured under `key`, in order."""
    return [float(value) for row in rows if (value := row.get(key)) is not None]


def total(rows: Sequence[Row], key: str) -> float | None:
    """The sum over the run; None where no row has it."""
    found = values(rows, key)
    return sum(found) if found else None


def mean(found: Sequence[float]) -> float | None:
    """None of nothing."""
    return sum(found) / len(found) if found else None


def trailing(found: Sequence[float], window: int) -> list[float]:
    """Mean over up to `window` values, the present one last."""
    sums, out = 0.0, []
    for end, value in enumerate(found):
        sums += value - (found[end - window] if end >= window else 0.0)
        out.append(sums / min(end + 1, window))
    return out


def quantile(found: Sequence[float], q: float) -> float:
    """The nearest rank: a value that was measured."""
    return sorted(found)[max(0, math.ceil(q * len(found)) - 1)]


def ends(found: Sequence[float]) -> tuple[float, float] | None:
    """Mean of the first and of the last values: a tenth of them, ten at most."""
    if not found:
        return None
    span = max(1, min(10, len(found) // 10))
    return sum(found[:span]) / span, sum(found[-span:]) / span


def noise(found: Sequence[float]) -> float:
    """Standard deviation of one value, from the differences of neighbours: a trend does not count."""
    squares = [(b - a) ** 2 for a, b in pairwise(found)]
    return math.sqrt(sum(squares) / len(squares) / 2) if squares else 0.0


@dataclass(frozen=True)
class Waits:
    """Where the wall time of the train loop went, in seconds, once its first batch had come."""

    wall_s: float
    step_s: float
    wait_s: float
    publish_s: float

    @property
    def rest_s(self) -> float:
        """Everything else: logging, checkpoints, the loop itself."""
        return max(0.0, self.wall_s - self.step_s - self.wait_s - self.publish_s)

    def share(self, seconds: float) -> float:
        return min(1.0, seconds / self.wall_s) if self.wall_s > 0 else 0.0


@dataclass(frozen=True)
class Facts:
    """One run in numbers; None where nothing was measured."""

    num_steps: int
    wall_s: float
    """From the start of the loops."""
    first_wait_s: float
    """Until the first batch came, where `waits` leave that step out; else 0."""
    waits: Waits
    waits_steps: int
    """Steps that `waits` cover."""
    reward: tuple[float, float] | None
    """First and last, each over a few steps."""
    reward_noise: float
    """How far one step is from the next, as the standard deviation of a step."""
    loss: tuple[float, float] | None
    tokens_per_s: float | None
    """Generated, or trained where nothing is generated, over the wall time."""
    generates: bool
    staleness_mean: float | None
    staleness_max: float | None
    staleness_bound: float | None
    wasted_share: float | None
    """Wasted tokens over trained and wasted ones."""
    admission_wait_s: float | None
    """Mean wait of a rollout loop for a free slot."""
    rollout_s: float | None
    """Mean time of a rollout behind that, with its rewards."""
    reward_s: float | None
    """What its rewards took of it."""
    restarts: dict[str, list[int]]
    """The steps before which replicas of a role took up their work again, a number for each time."""
    effective_sample_size: float | None
    """Its mean."""
    skipped_updates: float
    nonfinite: float
    passed: tuple[float, float, float] | None = None
    """pass@1 of the last evaluation, and its interval."""

    @property
    def step_wall_s(self) -> float:
        return self.waits.wall_s / self.waits_steps


def facts_of(rows: Sequence[Row], evaluations: Sequence[Row] = ()) -> Facts:
    """The numbers of a run with one row or more, and those of its evaluations.

    The wait for the first batch is the pipeline filling up; with three rows or more `waits` begin behind that step.
    """
    wall_s = float(rows[-1].get("time_s") or 0.0)
    steady = rows[1:] if len(rows) > 2 else rows
    filled_s = float(rows[0].get("time_s") or 0.0) if len(rows) > 2 else 0.0
    parts = (total(steady, f"time/{key}_s") or 0.0 for key in ("step", "wait_batch", "publish_stall"))
    waits = Waits(wall_s - filled_s, *parts)
    generated = total(rows, "tokens/generated")
    tokens = generated if generated is not None else total(rows, "tokens/trained")
    trained, wasted = total(rows, "tokens/trained") or 0.0, total(rows, "tokens/wasted")
    return Facts(
        num_steps=len(rows),
        wall_s=wall_s,
        first_wait_s=float(rows[0].get("time/wait_batch_s") or 0.0) if len(rows) > 2 else 0.0,
        waits=waits,
        waits_steps=len(steady),
        reward=ends(values(rows, "reward/mean")),
        reward_noise=noise(values(rows, "reward/mean")),
        loss=ends(values(rows, "loss/policy")),
        tokens_per_s=tokens / wall_s if tokens is not None and wall_s > 0 else None,
        generates=generated is not None,
        staleness_mean=weighted(rows, "staleness/mean"),
        staleness_max=max(values(rows, "staleness/max"), default=None),
        staleness_bound=max(values(rows, "staleness/bound"), default=None),
        wasted_share=wasted / (trained + wasted) if wasted is not None and trained + wasted > 0 else None,
        admission_wait_s=mean(values(steady, "replay/admission_wait_s")),
        rollout_s=_each(rows, "extra/rollout_s"),
        reward_s=_each(rows, "extra/reward_s"),
        restarts=restarts(rows),
        effective_sample_size=mean(values(rows, "extra/effective_sample_size")),
        skipped_updates=total(rows, "extra/skipped_updates") or 0.0,
        nonfinite=total(rows, NONFINITE) or 0.0,
        passed=_passed(evaluations),
    )


def _passed(evaluations: Sequence[Row]) -> tuple[float, float, float] | None:
    for row in reversed(evaluations):
        found = [row.get(f"eval/pass@1{end}") for end in ("", "/low", "/high")]
        if None not in found:
            mean, low, high = (float(value or 0.0) for value in found)
            return mean, low, high
    return None


def restarts(rows: Sequence[Row]) -> dict[str, list[int]]:
    """By role, the steps of the rows that count a restart of it."""
    prefix = "extra/restarts/"
    found: dict[str, list[int]] = {}
    for row in rows:
        for key in row:
            if key.startswith(prefix) and (count := row[key]):
                found.setdefault(key.removeprefix(prefix), []).extend([int(row["step"] or 0)] * int(count))
    return found


def _each(rows: Sequence[Row], key: str) -> float | None:
    """Seconds of all rollouts under `key`, for one of them."""
    seconds, count = total(rows, key), total(rows, "extra/rollouts")
    return seconds / count if seconds is not None and count else None


def weighted(rows: Sequence[Row], key: str) -> float | None:
    """The mean of `key` over trained episodes, not over steps."""
    pairs = [(float(v), float(row.get("episodes/trained") or 1)) for row in rows if (v := row.get(key)) is not None]
    weight = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / weight if weight else None


def staleness_shares(rows: Sequence[Row]) -> dict[int, float]:
    """Share of all trained episodes by how many versions old they were; {} where it was not measured."""
    prefix = "staleness/hist/"
    weights: dict[int, float] = {}
    for row in rows:
        for key in row:
            if key.startswith(prefix) and (share := row[key]) is not None:
                age = int(key.removeprefix(prefix))
                weights[age] = weights.get(age, 0.0) + share * (row.get("episodes/trained") or 0)
    episodes = sum(weights.values())
    return {age: weights[age] / episodes for age in sorted(weights)} if episodes else {}


def time_to_reach(rows: Sequence[Row], reward: float, window: int) -> float | None:
    """Seconds until the trailing mean of the reward is `reward` for the first time; None when it never is."""
    scored = [row for row in rows if row.get("reward/mean") is not None]
    smooth = trailing(values(scored, "reward/mean"), window)
    for n, (row, value) in enumerate(zip(scored, smooth, strict=True)):
        # The mean of fewer steps than the window would be luck.
        if n + 1 >= window and value >= reward:
            return float(row["time_s"] or 0.0)
    return None


@dataclass(frozen=True)
class Latency:
    """How long one kind of wait or work took, in seconds."""

    name: str
    part: str
    count: int
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


def step_latencies(rows: Sequence[Row]) -> list[Latency]:
    """Over the steps of the run."""
    parts = {
        "time/step_s": ("trainer", "forward, backward, optimizer"),
        "time/wait_batch_s": ("trainer", "wait for a batch"),
        "time/publish_stall_s": ("trainer", "publishing weights"),
        "generator/pause_s": ("generator", "pause for new weights, longest of a step"),
        "replay/admission_wait_s": ("rollout loop", "wait for a free slot, mean of a step"),
        "queue/age_mean_s": ("replay", "from complete to trained, mean of a step"),
    }
    found = []
    for key, (name, part) in parts.items():
        if measured := values(rows, key):
            high = (quantile(measured, q) for q in (0.5, 0.95, 0.99, 1.0))
            found.append(Latency(name, part, len(measured), *high))
    return found


def environment_latencies(environments: dict[str, object], rows: Sequence[Row]) -> list[Latency]:
    """Queue and service of each kind of environment, and of its turns.

    From environments.json, which knows the whole run; else from the rows: means over steps, weighted by calls.
    """
    found = []
    for kind, report in environments.items():
        times = report.get("times", []) if isinstance(report, dict) else []
        for entry in times:
            turn = "" if entry.get("turn") == "all" else f", {_turn(str(entry.get('turn')))}"
            if entry.get("count"):
                name = f"{kind}{turn}"
                found.append(
                    Latency(name, str(entry["part"]), int(entry["count"]), *(float(entry[p]) for p in _PERCENTS))
                )
    return found or _latencies_of_rows(rows)


def _latencies_of_rows(rows: Sequence[Row]) -> list[Latency]:
    prefix, suffix = "extra/env/", "_p50_s"
    stems = sorted(
        {key[: -len(suffix)] for row in rows for key in row if key.startswith(prefix) and key.endswith(suffix)}
    )
    found = []
    for stem in stems:
        place, _, part = stem.rpartition("/")
        kind, _, turn = place.removeprefix(prefix).partition("/")
        calls = [(row, row.get(f"{place}/count") or 0) for row in rows if row.get(f"{stem}_p50_s") is not None]
        count = sum(n for _, n in calls)
        if count:
            high = [sum((row.get(f"{stem}_{p}") or 0.0) * n for row, n in calls) / count for p in _PERCENTS[:3]]
            high.append(max(row.get(f"{stem}_max_s") or 0.0 for row, _ in calls))
            found.append(Latency(kind + (f", {_turn(turn)}" if turn else ""), part, int(count), *high))
    return found


def _turn(turn: str) -> str:
    place = turn.removeprefix("turn")
    return "reset" if place == "0" else f"turn {place}"


@dataclass(frozen=True)
class Busy:
    """One lane of a trace: how long at least one of its spans ran, and how many ran at a time on average."""

    lane: str
    share: float
    at_once: float
    num_spans: int


def busy_lanes(spans: Sequence[Span]) -> list[Busy]:
    """All lanes but the train loop's, over the time from the first to the last span."""
    if not spans:
        return []
    start, end = min(span.begin_s for span in spans), max(span.end_s for span in spans)
    wall_s = max(end - start, 1e-9)
    found = []
    for lane in dict.fromkeys(span.lane for span in spans if span.lane != TRAIN_LOOP):
        own = [span for span in spans if span.lane == lane]
        work_s = sum(span.end_s - span.begin_s for span in own)
        found.append(Busy(lane, _union_s(own) / wall_s, work_s / wall_s, len(own)))
    return found


def _union_s(spans: Sequence[Span]) -> float:
    covered, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda s: s.begin_s):
        covered += max(0.0, span.end_s - max(span.begin_s, until))
        until = max(until, span.end_s)
    return covered
