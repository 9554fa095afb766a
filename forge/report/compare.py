"""Several runs in one table, a column a run, and where their configurations differ. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forge.report import words
from forge.report.curves import window
from forge.report.facts import Facts, time_to_reach
from forge.report.runs import Run
from forge.report.words import duration, escaped, number, percent

_ELSEWHERE = ("run.dir", "run.resume")
_NEAR = 0.9


def table(runs: Sequence[Run], facts: Sequence[Facts]) -> str:
    """Speed with the staleness and the reward that it goes with, against the first run."""
    base = facts[0]

    def pace(own: Facts) -> str:
        return f"{number(base.step_wall_s / own.step_wall_s)}x" if own.step_wall_s > 0 else "-"

    lines: list[tuple[str, Callable[[Facts], str]]] = [
        ("pace of steps, against the first", pace),
        ("staleness, mean and largest", lambda f: f"{number(f.staleness_mean)}, {number(f.staleness_max)}"),
        ("reward, first to last", lambda f: _pair(f.reward)),
        ("pass@1, last evaluation", lambda f: "-" if f.passed is None else _interval(f.passed)),
        ("staleness bound", lambda f: number(f.staleness_bound)),
        ("effective sample size, mean", lambda f: number(f.effective_sample_size)),
        ("steps", lambda f: f"{f.num_steps:,}"),
        ("wall time", lambda f: duration(f.wall_s)),
        ("time of a step", lambda f: duration(f.step_wall_s)),
        ("tokens a second", lambda f: number(f.tokens_per_s)),
        ("trainer waits for batches", lambda f: percent(f.waits.share(f.waits.wait_s))),
        ("trainer trains", lambda f: percent(f.waits.share(f.waits.step_s))),
        ("sampled tokens thrown away", lambda f: percent(f.wasted_share)),
        ("loss, first to last", lambda f: _pair(f.loss)),
    ]
    rows = [(name, [show(own) for own in facts]) for name, show in lines]
    rows = [(name, cells) for name, cells in rows if any(cell.strip("-, ") for cell in cells)]
    if (reached := _reached(runs, facts)) is not None:
        rows.insert(3, reached)
    return _beside(runs, rows)


def _reached(runs: Sequence[Run], facts: Sequence[Facts]) -> tuple[str, list[str]] | None:
    """How long each took to the reward that all of them reach: that far up from the lowest start."""
    found = [own.reward for own in facts if own.reward is not None]
    if len(found) < len(facts):
        return None
    start, end = min(first for first, _ in found), min(last for _, last in found)
    if end <= start:
        return None
    goal, span = start + _NEAR * (end - start), window(runs)
    times = [time_to_reach(run.rows, goal, span) for run in runs]
    return f"time to a reward of {number(goal)}", [duration(time_s) for time_s in times]


def _interval(found: tuple[float, float, float]) -> str:
    mean, low, high = (number(value) for value in found)
    return f"{mean} ({low} to {high})"


def _pair(pair: tuple[float, float] | None) -> str:
    return "-" if pair is None else f"{number(pair[0])} → {number(pair[1])}"


def configuration(runs: Sequence[Run]) -> str:
    """Differences first, then each file, folded."""
    parts = []
    if len(runs) > 1:
        keys = list(dict.fromkeys(key for run in runs for key in run.config if key not in _ELSEWHERE))
        differ = [key for key in keys if len({run.config.get(key) for run in runs}) > 1]
        rows = [(key, [run.config.get(key, "absent") for run in runs]) for key in differ]
        parts.append(_beside(runs, rows) if rows else "<p>The configurations are the same.</p>")
    for run in runs:
        if run.config_text:
            title = f"config.yaml of {run.name}" if len(runs) > 1 else "config.yaml, all of it"
            parts.append(f"<details><summary>{escaped(title)}</summary><pre>{escaped(run.config_text)}</pre></details>")
        else:
            parts.append(f"<p>{escaped(run.name)} has no config.yaml.</p>")
    return "".join(parts)


def _beside(runs: Sequence[Run], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A column for each run, a row for each name."""
    cells = ["".join(f'<td class="text">{escaped(cell)}</td>' for cell in texts) for _, texts in rows]
    names = [f"<td>{escaped(name)}</td>" for name, _ in rows]
    return words.table(("", *(run.name for run in runs)), [name + own for name, own in zip(names, cells, strict=True)])
