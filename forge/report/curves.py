"""Which numbers are drawn over steps and over time, and what each says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.metrics import Row
from forge.report.charts import Line, line_chart
from forge.report.facts import trailing, values
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
        figures.insert(1, over_time(runs, span))
    return "".join(figures)


def figure(runs: Sequence[Run], curve: Curve, span: int) -> str:
    """One chart over steps; "" where no run has its number."""
    band_key = "reward/std" if curve.key == "reward/mean" and len(runs) == 1 else None
    lines = [line for n, run in enumerate(runs) for line in _lines(run, curve.key, n, span, "step", band_key)]
    drawn = line_chart(lines, label=f"{curve.title} over steps", unit=curve.unit, low=0.0 if curve.from_zero else None)
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
    band = [float(row.get(band_key) or 0.0) for row in rows] if band_key else []
    if span == 1:
        return [Line(run.name, xs, ys, colour, band=band)]
    smooth = trailing(ys, span)
    return [
        Line(run.name, xs, ys, colour, faint=True),
        Line(run.name, xs, smooth, colour, band=trailing(band, span) if band else ()),
    ]
