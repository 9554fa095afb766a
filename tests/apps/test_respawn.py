"""A run whose processes die, and which goes on."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from app_run import RERUN, AppRun, check_nothing_was_lost, check_recording

from forge.metrics import Row, read_rows

PPO = ["--algorithm=ppo", "--trainer.updates=1", "--mesh.critic.procs=1"]


@pytest.mark.soak
def test_a_run_whose_generator_is_stopped_and_whose_rewards_are_killed_goes_on_and_ends_as_it_should(
    tmp_path: Path,
) -> None:
    run = AppRun(
        tmp_path / "run",
        "--trainer.steps=400",
        "--mesh.generator.heartbeat_s=5",
        "--replay.journal_interval_s=1",
    )
    try:
        run.wait_until(lambda: len(run.rows()) >= 3, "three steps", 400)
        run.signal_engine("generator_0", signal.SIGSTOP)  # which neither the kernel, Monarch nor its actor tells of
        run.wait_until(lambda: "generator_0 serves again" in run.output, "the generator to be back", 400)
        rows = len(run.rows())
        run.kill_actor("reward")
        run.wait_until(lambda: "reward serves again" in run.output, "the rewards to be back", 100)
        run.wait_until(lambda: len(run.rows()) > rows + 3, "steps behind both", 100)
        run.press_ctrl_c()
        assert run.finish(120) == 130, run.output
    finally:
        run.end()
    check_nothing_was_lost(run)


@pytest.mark.soak
def test_actors_that_are_killed_while_the_run_starts_are_started_again(tmp_path: Path) -> None:
    run = AppRun(tmp_path / "run", "--trainer.steps=12")
    roles = ("replay", "reward", "trainer_0", "generator_0")
    try:
        for role in roles:  # the engine takes longest: all of this is before the first step
            run.wait_until(lambda: run.process_of(role), f"{role} to be spawned", 100)  # noqa: B023
            run.kill_actor(role)
            told = f"{role} failed while the run started: its process was killed by SIGKILL"
            run.wait_until(lambda: told in run.output, "the news of it", 60)  # noqa: B023
        assert not run.rows()
        assert run.finish(400) == 0, run.output
    finally:
        run.end()
    assert len(run.rows()) == 12
    check_nothing_was_lost(run)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["memory", "collective", "rdma"])
def test_one_of_two_generators_is_killed_and_comes_back_while_the_run_goes_on_with_the_other(
    tmp_path: Path, transport: str
) -> None:
    options = ["--mesh.generator.replicas=2", "--mesh.slots=3", f"--weightsync.transport={transport}"]
    run = AppRun(tmp_path / "run", "--trainer.steps=100000", *options)
    try:
        run.wait_until(lambda: len(run.rows()) >= 3, "three steps", 400)
        run.kill_actor("generator_1")
        run.wait_until(lambda: "generator_1 failed" in run.output, "the news of it", 60)
        rows = len(run.rows())
        run.wait_until(lambda: "generator_1 serves again" in run.output, "it to be back", 400)
        assert len(run.rows()) > rows + 3, "the other one fed the trainer meanwhile"
        rows = len(run.rows())
        run.wait_until(lambda: len(run.rows()) > rows + 5, "steps with both", 200)
        run.press_ctrl_c()
        assert run.finish(120) == 130, run.output
    finally:
        run.end()
    check_nothing_was_lost(run)


@pytest.mark.soak
def test_an_evaluator_that_is_killed_is_replaced_and_evaluations_go_on(tmp_path: Path) -> None:
    run = AppRun(tmp_path / "run", "--trainer.steps=100000", "--evaluation.every=3", "--evaluation.prompts=16")
    results = run.folder / "evaluations.jsonl"

    def evaluated() -> list[Row]:
        return read_rows(results) if results.exists() else []

    try:
        run.wait_until(lambda: len(evaluated()) >= 2, "two evaluations", 400)
        run.kill_actor("evaluator_0")
        run.wait_until(lambda: "evaluator_0 serves again" in run.output, "the evaluator to be back", 400)
        count = len(evaluated())
        run.wait_until(lambda: len(evaluated()) > count + 1, "evaluations by its successor", 200)
        run.press_ctrl_c()
        assert run.finish(300) == 130, run.output
    finally:
        run.end()
    steps = [row["step"] for row in run.rows()]
    assert steps == list(range(1, len(steps) + 1))
    versions = [int(row["step"] or 0) for row in evaluated()]
    assert versions == sorted(set(versions))
    assert "Traceback" not in run.output


@pytest.mark.soak
@pytest.mark.parametrize(
    ("role", "deaths", "options"),
    [
        ("replay", 5, []),
        ("replay", 3, ["--mesh.trainer.procs=2"]),
        ("trainer_0", 5, []),
        ("trainer_0", 2, ["--mesh.trainer.procs=2", "--weightsync.transport=collective"]),
        ("trainer_0", 2, ["--weightsync.transport=file", "--weightsync.delta", "--dtype=bfloat16"]),
        ("trainer_0", 2, PPO),
        ("critic_0", 2, PPO),
    ],
)
@pytest.mark.timeout(1800)
def test_a_run_whose_trainer_or_replay_is_killed_again_and_again_trains_as_if_nothing_had_happened(
    tmp_path: Path, role: str, deaths: int, options: list[str]
) -> None:
    options = [*options, "--run.checkpoint_every=4", "--replay.record"]
    options += ["--mesh.trainer.max_restarts=10", "--mesh.replay.max_restarts=10"]
    run = AppRun(tmp_path / "run", "--trainer.steps=100000", *options)
    rng = random.Random(0)
    try:
        for death in range(1, deaths + 1):
            if death != 3:  # the third one comes while the second is being mended
                rows = len(run.rows()) + rng.randrange(1, 8)
                run.wait_until(lambda rows=rows: len(run.rows()) > rows, f"step {rows}", 400)
            time.sleep(rng.random())
            run.wait_until(lambda: run.process_of(role), "somebody to kill", 60)
            run.kill_actor(role)
            run.wait_until(lambda death=death: run.output.count(f"{role} failed") == death, "the news of it", 60)
        back = "trainer_0" if role == "critic_0" else role  # which live and die together
        run.wait_until(lambda: f"{back} serves again" in run.output, "it to be back", 200)
        rows = len(run.rows())
        run.wait_until(lambda: len(run.rows()) > rows + 6, "steps behind all that", 200)
        run.press_ctrl_c()
        assert run.finish(120) == 130, run.output
    finally:
        run.end()
    numbers, steps = run.rows(), len(run.rows())
    assert [row["step"] for row in numbers] == list(range(1, steps + 1))
    assert max(row["staleness/max"] for row in numbers) <= 1
    assert "Traceback" not in run.output
    check_recording(run, AppRun(tmp_path / "again", app=RERUN, resumed=run))
