"""A run whose processes die, and which goes on because mesh.<role>.on_failure says so."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from app_run import AppRun


@pytest.mark.soak
def test_a_run_whose_generator_is_stopped_and_whose_rewards_are_killed_goes_on_and_ends_as_it_should(
    tmp_path: Path,
) -> None:
    run = AppRun(
        tmp_path / "run",
        "--trainer.steps=400",
        "--mesh.generator.on_failure=respawn",
        "--mesh.generator.heartbeat_s=5",
        "--mesh.reward.on_failure=respawn",
        "--replay.journal_interval_s=1",
    )
    try:
        run.wait_until(lambda: len(run.rows()) >= 3, "three steps", 400)
        run.signal_actor("generator_0", signal.SIGSTOP)  # which neither the kernel nor Monarch tells of
        run.wait_until(lambda: "generator_0 serves again" in run.output, "the generator to be back", 400)
        rows = len(run.rows())
        run.kill_actor("reward")
        run.wait_until(lambda: "reward serves again" in run.output, "the rewards to be back", 100)
        run.wait_until(lambda: len(run.rows()) > rows + 3, "steps behind both", 100)
        run.press_ctrl_c()
        assert run.finish(120) == 130, run.output
    finally:
        run.end()
    numbers = run.rows()
    assert [row["step"] for row in numbers] == list(range(1, len(numbers) + 1))
    assert max(row["staleness/max"] for row in numbers) <= 1
    assert sum(row["episodes/dropped"] for row in numbers) == 0
    assert "Traceback" not in run.output
