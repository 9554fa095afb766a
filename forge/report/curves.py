"""Which numbers are drawn over steps and over time, and what each says. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from forge.metrics import Row
from forge.report.charts import Line, line_chart
from forge.report.facts import restarts, trailing, values
from forge.report.runs import Run
from forge.report.words import duration, escaped

SMOOTH_FROM = 20
"""Shorter runs show each step only."""


@dataclass(frozen=True)
class Curve:
    """One chart: the key of metrics.jsonl, its name for readers, what it says."""

    key: str
    title: str
    says: str
    unit: str = ""
    from_zero: bool = False


_PASS = re.compile(r"eval/pass@(\d+)")
THROUGHPUT = "generator/tokens_per_s"
CURVES = (
    Curve("reward/mean", "Reward", "mean of the episodes that a step trained on"),
    Curve("extra/sampled_reward", "Reward, all sampled", "sum over the episodes that were sampled"),
    Curve("loss/policy", "Loss", "of the policy; near zero in policy-gradient methods, its trend says little"),
    Curve("grad_norm", "Gradient norm", "before clipping; spikes are updates to look at", from_zero=True),
    Curve("extra/entropy", "Entropy", "how undecided the policy is, per token", "nats", True),
    Curve("ratio/mean", "Probability ratio", "trainer's over generator's, mean of the trained tokens; 1 is on-policy"),
    Curve("extra/effective_sample_size", "Effective sample size", "share of a batch that counts; 1 is on-policy"),
    Curve("ratio/clip_fraction", "Clipped tokens", "share of the trained tokens beyond the clipping range", "", True),
    Curve("loss/kl", "KL from the reference", "how far the policy has moved", "nats"),
    Curve(
        "extra/kl_behavior", "KL from the sampling policy", "what staleness and the engines' difference make", "nats"
    ),
    Curve("extra/value_explained_variance", "Critic", "share of the returns' variance that its values explain"),
    Curve("extra/pair_accuracy", "Pairs told apart", "share of the pairs whose better answer scores higher"),
    Curve(THROUGHPUT, "Throughput", "tokens sampled a second", "tokens/s", True),
    Curve("staleness/mean", "Staleness", "mean age of the trained episodes", "versions", True),
    Curve("trainer/idle_share", "Trainer waits", "share of a step's time that it waited for its batch", "", True),
)


def evaluated(runs: Sequence[Run]) -> str:
    """Evaluations by version, each under the interval that it came with; "" where there were none."""
    ks = sorted(
        {int(key.rpartition("@")[2]) for run in runs for row in run.evaluations for key in row if _PASS.fullmatch(key)}
    )
    shown = [Curve("eval/reward", "Reward in evaluation", "mean reward of the evaluated prompts")]
    shown += [
        Curve(f"eval/pass@{k}", f"pass@{k} in evaluation", _passed(k), from_zero=True)
        for k in dict.fromkeys((*ks[:1], *ks[-1:]))
    ]
    figures = []
    for curve in shown:
        lines = [line for n, run in enumerate(runs) if (line := _evaluation(run, curve.key, n))]
        drawn = line_chart(
            lines, label=f"{curve.title} over versions", x_label="version", low=0.0 if curve.from_zero else None
        )
        says = f"{curve.says}, each of one version of the weights; the band is its 95 % interval"
        figures.append(framed(curve.title, "", says, drawn))
    return "".join(figures)


def _passed(k: int) -> str:
    return "share of the samples that passed" if k == 1 else f"chance that one of {k} samples passes"


def _evaluation(run: Run, key: str, colour: int) -> Line | None:
    rows = [row for row in run.evaluations if all(row.get(k) is not None for k in (key, f"{key}/low", f"{key}/high"))]
    if not rows:
        return None
    low, high = values(rows, f"{key}/low"), values(rows, f"{key}/high")
    return Line(run.name, values(rows, "step"), values(rows, key), colour, lows=low, highs=high)


def window(runs: Sequence[Run]) -> int:
    """Steps in the mean of the strong line: a twentieth of the longest run; 1: no mean."""
    longest = max(len(run.rows) for run in runs)
    return longest // 20 if longest >= SMOOTH_FROM else 1


def charts(runs: Sequence[Run], keys: Sequence[str] | None = None) -> str:
    """Those that any of the runs has, as figures; None: all but throughput, which stands beside staleness."""
    span = window(runs)
    figures = [
        figure(runs, curve, span)
        for curve in CURVES
        if (curve.key != THROUGHPUT if keys is None else curve.key in keys)
    ]
    if keys is None:
        figures[1:1] = [over_time(runs, span), evaluated(runs)]
    return "".join(figures)


def figure(runs: Sequence[Run], curve: Curve, span: int) -> str:
    """One chart over steps; "" where no run has its number."""
    band_key = "reward/std" if curve.key == "reward/mean" and len(runs) == 1 else None
    lines = [line for n, run in enumerate(runs) for line in _lines(run, curve.key, n, span, "step", band_key)]
    low = 0.0 if curve.from_zero else None
    drawn = line_chart(lines, label=f"{curve.title} over steps", unit=curve.unit, low=low, marks=_marks(runs))
    says = curve.says + ("; the band is one standard deviation of the episodes" if band_key else "")
    return framed(curve.title, curve.unit, says, drawn)


def over_time(runs: Sequence[Run], span: int) -> str:
    """The reward over wall time, where runs are compared: what asynchrony is for."""
    if len(runs) < 2:
        return ""
    lines = [line for n, run in enumerate(runs) for line in _lines(run, "reward/mean", n, span, "time_s", None)]
    drawn = line_chart(lines, label="reward over time", x_label="time", show_x=duration)
    return framed("Reward over time", "", "the same rewards by wall time since the start of the loops", drawn)


def framed(title: str, unit: str, says: str, drawn: str) -> str:
    """A drawing under its name; "" of none."""
    if not drawn:
        return ""
    named = f"{escaped(title)}{f' <span class=soft>in {escaped(unit)}</span>' if unit else ''}"
    return f'<figure><figcaption><h3>{named}</h3><p class="soft">{escaped(says)}</p></figcaption>{drawn}</figure>'


def _lines(run: Run, key: str, colour: int, span: int, over: str, band_key: str | None) -> list[Line]:
    rows: list[Row] = [row for row in run.rows if row.get(key) is not None and row.get(over) is not None]
    if not rows:
        return []
    xs, ys = values(rows, over), values(rows, key)
    smooth = trailing(ys, span)
    half = trailing([float(row.get(band_key) or 0.0) for row in rows], span) if band_key else []
    lows = [a - b for a, b in zip(smooth, half, strict=True)] if half else []
    highs = [a + b for a, b in zip(smooth, half, strict=True)] if half else []
    faint = [Line(run.name, xs, ys, colour, faint=True)] if span > 1 else []
    return [*faint, Line(run.name, xs, smooth, colour, lows=lows, highs=highs)]


def _marks(runs: Sequence[Run]) -> list[tuple[float, str]]:
    """Restarts, of a run that stands alone."""
    if len(runs) > 1:
        return []
    found = restarts(runs[0].rows)
    return [(step, f"a {role} took up its work again") for role, steps in found.items() for step in steps]
