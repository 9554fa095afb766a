"""Does asynchronous training end where synchronous training does? Many seeds, a margin fixed beforehand, a control.

    python -m apps.bench.convergence --folder runs/convergence [--seeds 10] [--steps 120] [-o convergence.png]
    python -m apps.bench.convergence --arms algorithms --seeds 3 --folder runs/algorithms -o algorithms.png

Runs of apps/grpo/main.py on the tiny preset. `sync` is the baseline: max_staleness 0. The other arms let generation
run 1, 2 or 4 versions ahead and correct for it, by TIS or by decoupled PPO. The controls let it run far ahead, by 32
versions or without a bound, with a loss that ignores who sampled: the test must find the latter worse, or it could
not find anything. Arms are compared by the reward of their last weights on prompts that nobody trained on, by the 95
% interval of the difference to the baseline. Equal means that the whole of it lies within MARGIN, worse that it lies
below. A run that is done is not run again: the bench may be stopped and continued, and --seeds raised.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from apps.bench.harness import intervals
from apps.bench.harness.arms import Arms, Run, run_all
from apps.bench.harness.result import Column, Goal, Result, machine, rows_table, show
from apps.grpo.algorithms import ALGORITHMS

MARGIN = 0.05
"""Of a reward between -0.1 and 1."""
SYNC = "sync"
FAR, CONTROL = "control: 32 ahead, uncorrected", "control: unbounded, uncorrected"
BOUNDS = (1, 2, 4)
PLATEAU_SHARE = 0.9
STALENESS_ARMS: Arms = {
    SYNC: ("--replay.max_staleness=0",),
    **{f"{bound} ahead, TIS": (f"--replay.max_staleness={bound}", "--loss.correction=tis") for bound in BOUNDS},
    **{
        f"{bound} ahead, decoupled PPO": (f"--replay.max_staleness={bound}", "--algorithm=decoupled_ppo")
        for bound in BOUNDS
    },
    FAR: ("--replay.max_staleness=32", "--loss.name=reinforce", "--loss.allow_off_policy"),
    # As many slots as 120 steps have batches: the queue never turns a rollout away.
    CONTROL: ("--replay.max_staleness=120", "--loss.name=reinforce", "--loss.allow_off_policy"),
}
ALGORITHM_ARMS: Arms = {
    name: (f"--algorithm={name}",)
    for name in ALGORITHMS
    if name not in ("dr_grpo", "reinforce_pp_baseline")  # GRPO and REINFORCE++ with another baseline
}
ARMS: Mapping[str, Arms] = {"staleness": STALENESS_ARMS, "algorithms": ALGORITHM_ARMS}
COLUMNS = (
    Column("", "name"),
    Column("runs", "runs", ".0f"),
    Column("last weights", "final", ".3f"),
    Column("low", "low", ".3f"),
    Column("high", "high", ".3f"),
    Column("less sync", "difference", "+.3f"),
    Column("from", "difference_low", "+.3f"),
    Column("to", "difference_high", "+.3f"),
    Column("verdict", "verdict"),
    Column("steps to 90 %", "steps_to_plateau", ".0f"),
    Column("s a step", "step_s", ".2f"),
    Column("staleness", "staleness_mean", ".2f"),
    Column("max", "staleness_max", ".0f"),
)


def rows(found: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """One an arm; differences are to `sync` where it took part."""
    baseline = [run.final for run in found.get(SYNC, ())]
    level = PLATEAU_SHARE * max(statistics.fmean(run.final for run in runs) for runs in found.values())
    table = []
    for name, runs in found.items():
        final = [run.final for run in runs]
        mean = intervals.of_mean(final)
        reached = [step for run in runs if (step := intervals.steps_to(run.rewards, level)) is not None]
        row: dict[str, Any] = {
            "name": name,
            "runs": len(runs),
            "final": mean.mean,
            "low": mean.low,
            "high": mean.high,
            "steps_to_plateau": statistics.median(reached) if 2 * len(reached) > len(runs) else None,
            "step_s": statistics.median(run.seconds / len(run.rewards) for run in runs),
            "staleness_mean": statistics.fmean(run.staleness_mean for run in runs),
            "staleness_max": max(run.staleness_max for run in runs),
        }
        if baseline and name != SYNC:
            difference = intervals.of_difference(final, baseline)
            row |= {f"difference_{end}": getattr(difference, end) for end in ("low", "high")}
            row |= {"difference": difference.mean, "verdict": intervals.verdict(difference, MARGIN)}
        table.append(row)
    return table


def goals(table: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Every corrected arm is equal to the baseline, and the control is worse."""
    judged = {row["name"]: row["verdict"] for row in table if "verdict" in row}
    if not judged:
        return []
    corrected = [verdict for name, verdict in judged.items() if name not in (FAR, CONTROL)]
    return [
        Goal(
            f"corrected arms within {MARGIN:g} of sync", sum(v == "equal" for v in corrected), len(corrected), "least"
        ),
        Goal("control found worse", float(judged.get(CONTROL) == "worse"), 1.0, "least"),
    ]


def draw(found: Mapping[str, Sequence[Run]], out: Path) -> None:
    """The reward of each step, mean and 95 % interval over the runs, one curve an arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = [f"C{n}" for n in range(10)]
    for (name, runs), colour in zip(found.items(), colours, strict=False):
        mean, low, high = intervals.curve([run.rewards for run in runs])
        steps = range(1, len(mean) + 1)
        axes.plot(steps, mean, color=colour, linewidth=2, label=f"{name} ({len(runs)} runs)")
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward of the batch (mean of 5 steps, 95 % interval over runs)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(out, dpi=150)


def main() -> None:
    """The command line."""
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m apps.bench.convergence", description=description)
    parser.add_argument("--arms", choices=list(ARMS), default="staleness", help="what is compared (staleness)")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each arm (10)")
    parser.add_argument("--steps", type=int, default=120, help="training steps of a run (120)")
    folder = Path("runs/convergence")
    parser.add_argument(
        "--folder", type=Path, default=folder, help=f"where runs are kept, done ones for good ({folder})"
    )
    parser.add_argument("--side-by-side", type=int, default=1, help="runs at the same time; s a step means little then")
    parser.add_argument("-o", "--out", type=Path, help="picture to write")
    args = parser.parse_args()
    for name in ("seeds", "steps", "side_by_side"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    arms = ARMS[args.arms]
    found = run_all(arms, range(args.seeds), args.steps, args.folder, side_by_side=args.side_by_side)
    table = rows(found)
    if args.out:
        draw(found, args.out)
    settings = {"steps": args.steps, "seeds": args.seeds, "side_by_side": args.side_by_side, "margin": MARGIN}
    runs = {name: [asdict(run) for run in runs] for name, runs in found.items()}
    result = Result("convergence", table, goals(table), {}, machine(), {"settings": settings, "runs": runs})
    title = f"{args.arms}: {args.steps} steps of the tiny preset; equal: within {MARGIN:g}"
    show(result, rows_table(title, table, COLUMNS))


if __name__ == "__main__":
    main()
