"""Laws of apps/bench/convergence.py: intervals, verdicts, and that a run which is done is not run again."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from apps.bench import convergence
from apps.bench.harness import arms, intervals
from apps.bench.harness.arms import Run
from apps.bench.harness.intervals import Interval


def runs(final: list[float], steps: int = 20) -> list[Run]:
    return [Run([value * (n + 1) / steps for n in range(steps)], value, 40.0, 0.5, 2.0, 0.1) for value in final]


def test_an_interval_holds_the_mean_of_most_samples() -> None:
    draw = random.Random(0)
    held = 0
    for _ in range(200):
        interval = intervals.of_mean([draw.gauss(1.0, 0.3) for _ in range(12)])
        held += interval.low <= 1.0 <= interval.high
    assert 170 <= held <= 199  # 95 % less what ten runs cannot know


def test_equal_runs_have_an_interval_without_width() -> None:
    assert intervals.of_mean([0.5] * 4) == Interval(0.5, 0.5, 0.5)
    assert intervals.of_difference([0.5] * 4, [0.25] * 3) == Interval(0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    "low, high, expected",
    [
        (-0.04, 0.04, "equal"),
        (-0.06, 0.01, "open"),
        (-0.01, 0.06, "open"),
        (-0.2, -0.06, "worse"),
        (0.06, 0.2, "better"),
        (-0.05, 0.0, "open"),
        (-0.2, 0.2, "open"),
    ],
)
def test_a_verdict_needs_the_whole_interval(low: float, high: float, expected: str) -> None:
    assert intervals.verdict(Interval((low + high) / 2, low, high), 0.05) == expected


def test_the_step_of_a_level_is_where_the_trailing_mean_reaches_it() -> None:
    assert intervals.steps_to([0.0, 0.0, 1.0, 1.0, 1.0], 1.0, window=2) == 4
    assert intervals.steps_to([0.0, 0.5], 1.0, window=2) is None


def test_every_corrected_arm_is_compared_to_sync_and_the_control_too() -> None:
    draw = random.Random(1)
    names = convergence.STALENESS_ARMS
    found = {name: runs([0.9 + draw.gauss(0, 0.01) for _ in range(10)], 40) for name in names}
    found[convergence.CONTROL] = runs([0.6 + draw.gauss(0, 0.05) for _ in range(10)])
    table = convergence.rows(found)
    assert [row.get("verdict") for row in table] == [None, *["equal"] * 7, "worse"]
    assert [(goal.value, goal.met) for goal in convergence.goals(table)] == [(6, True), (1.0, True)]
    assert table[0]["steps_to_plateau"] == pytest.approx(38, abs=1)  # of a line, in means of 5 steps
    assert table[-1]["steps_to_plateau"] is None
    found[convergence.CONTROL] = found[convergence.SYNC]
    assert [goal.met for goal in convergence.goals(convergence.rows(found))] == [True, False]


def test_algorithms_have_no_baseline_and_no_goals() -> None:
    table = convergence.rows({name: runs([0.9, 0.8]) for name in convergence.ALGORITHM_ARMS})
    assert convergence.goals(table) == []
    assert {"grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "decoupled_ppo"} <= set(convergence.ALGORITHM_ARMS)


def test_a_run_that_is_done_is_not_run_again(tmp_path: Path) -> None:
    done = runs([0.7])[0]
    place = tmp_path / "1_ahead,_TIS-3"
    place.mkdir()
    (place / "result.json").write_text(json.dumps(asdict(done)))
    found = arms.run_all({"1 ahead, TIS": ("--no-such-option",)}, [3], 20, tmp_path, side_by_side=2)
    assert found == {"1 ahead, TIS": [done]}


def test_a_step_without_a_reward_counts_as_the_one_before() -> None:
    row = {"time_s": 2.0, "staleness/mean": 0.5, "staleness/max": 1.0, "ratio/clip_fraction": None}
    rows = [{**row, "reward/mean": reward} for reward in (None, 0.25, None)]
    run = Run.of(rows, 0.5)
    assert run.rewards == [0.0, 0.25, 0.25]
    assert (run.seconds, run.staleness_mean, run.staleness_max, run.ratio_clipped) == (2.0, 0.5, 1.0, 0.0)


def test_the_picture_has_a_curve_an_arm(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "curves.svg"
    convergence.draw({"sync": runs([0.5, 0.6]), "other": runs([0.2])}, out)
    picture = out.read_text()
    assert all(f"<!-- {label} -->" in picture for label in ("sync (2 runs)", "other (1 runs)", "training step"))
