"""Reward curves of finished or running runs in one picture.

    python -m apps.grpo.plot runs/a runs/b -o curve.png
    python -m apps.grpo.plot runs/a --key trainer/idle_share

The faint line is what each step measured, the strong one its trailing mean. Needs matplotlib (extra `dev`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forge.errors import ConfigError, SchemaError
from forge.metrics import METRICS, Number, Row, read_rows


def load(run: Path, key: str) -> list[Row]:
    """The rows of a run folder that hold `key`. Raises ConfigError naming the folder when there are none."""
    try:
        rows = read_rows(run / "metrics.jsonl")
    except OSError as error:
        raise ConfigError(f"{run} is no run folder: {error.strerror} (metrics.jsonl)") from error
    rows = [row for row in rows if row.get(key) is not None]
    if not rows:
        raise ConfigError(f"{run}/metrics.jsonl has no value of {key}; wait for a step or give another --key")
    return rows


def smooth(values: Sequence[Number], window: int) -> list[float]:
    """Trailing mean over up to `window` values."""
    out = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        out.append(sum(recent) / len(recent))
    return out


def plot(runs: Sequence[Path], out: Path, *, key: str = "reward/mean", window: int = 5) -> None:
    """Writes a picture with one line a run to `out`; the format follows its suffix."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ConfigError("plotting needs `pip install matplotlib`") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run in runs:
        rows = load(run, key)
        steps, values = [row["step"] or 0 for row in rows], [row[key] or 0.0 for row in rows]
        label = f"{run.resolve().name} (staleness ≤ {rows[-1].get('staleness/bound', '?')})"
        (line,) = axes.plot(steps, smooth(values, window), linewidth=2, label=label)
        axes.plot(steps, values, color=line.get_color(), alpha=0.3, linewidth=1)
    metric = METRICS.get(key)
    unit = f" [{metric.unit}]" if metric and metric.unit != "1" else ""
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"{key}{unit}  (raw, and mean of {window} steps)")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(out, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for a folder or key that cannot be plotted."""
    parser = argparse.ArgumentParser(prog="python -m apps.grpo.plot", description="Plot runs into one picture.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, each with a metrics.jsonl")
    parser.add_argument("-o", "--out", type=Path, default=Path("curve.png"), help="picture to write (curve.png)")
    parser.add_argument("--key", default="reward/mean", help="key of metrics.jsonl to plot (reward/mean)")
    parser.add_argument("--window", type=int, default=5, help="steps in the trailing mean (5)")
    args = parser.parse_args(argv)
    if args.window < 1:
        parser.error(f"--window must be >= 1, got {args.window}; use 1 for no smoothing")
    try:
        plot(args.runs, args.out, key=args.key, window=args.window)
    except (ConfigError, SchemaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
