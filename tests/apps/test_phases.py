"""The controller is killed at each phase of a step and of a checkpoint, and the run is resumed each time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from app_run import RERUN, AppRun, check_recording

from forge.checkpoints import Checkpoints

DYING = Path(__file__).with_name("dying_app.py")
STEP = [
    "replay.actor:ReplayClient.reserve after 20",
    "replay.actor:ReplayClient.add before 20",
    "replay.actor:ReplayClient.add after 20",
    "replay.actor:ReplayClient.sample before 4",
    "replay.actor:ReplayClient.sample after 4",
    "actors.trainer_mesh:TrainerMesh.step during 4",
    "actors.trainer_mesh:TrainerMesh.step after 4",
    "actors.trainer_mesh:TrainerMesh.snapshot during 4",
    "weightsync.sync:WeightSync.publish after 4",
    "forge.run_log:RunLog.step before 4",
    "forge.run_log:RunLog.step after 4",
    "actors.generators:Replica.stage after 4",
    "actors.generators:Replica.flip during 4",
    "replay.actor:ReplayClient.release before 4",
    "replay.actor:ReplayClient.progress during 2",
]
CHECKPOINT = [
    "forge.checkpoints:Checkpoints.begin after 1",
    "actors.trainer_mesh:TrainerMesh.stage_state during 2",
    "actors.trainer_mesh:TrainerMesh.stage_state after 2",
    "replay.actor:ReplayClient.mark after 2",
    "actors.trainer_mesh:TrainerMesh.wait_state after 2",
    "replay.actor:ReplayClient.marked after 2",
    "forge.checkpoints:Checkpoints.commit before 2",
    "forge.checkpoints:sync_folder before 3",  # written, not yet renamed
    "forge.checkpoints:sync_folder before 4",  # renamed, the older one still there
    "forge.checkpoints:Checkpoints.commit after 2",
]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("points", [STEP[::2], STEP[1::2], CHECKPOINT[::2], CHECKPOINT[1::2]])
def test_a_controller_that_is_killed_at_any_point_resumes_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: list[str]
) -> None:
    options = ["--trainer.steps=100000", "--run.checkpoint_every=2", "--replay.record"]
    run = first = None
    for number, point in enumerate(points):
        monkeypatch.setenv("DEATH", point)
        run = AppRun(tmp_path / f"run{number}", *options, app=DYING, resumed=first)
        first = first or run
        try:
            assert run.finish(300) == -signal.SIGKILL, f"{point}:\n{run.output}"
        finally:
            run.end()
        assert "Traceback" not in run.output, f"{point}:\n{run.output}"
    assert first is not None
    newest = Checkpoints(first.folder / "checkpoints").latest()
    seen = newest.version if newest else 0
    last = AppRun(tmp_path / "last", *options, resumed=first)
    try:
        last.wait_until(lambda: len(last.rows()) > seen + 4, "steps behind all that", 300)
        last.press_ctrl_c()
        assert last.finish(60) == 130, last.output
    finally:
        last.end()
    rows = last.rows()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert max(row["staleness/max"] for row in rows) <= 1
    check_recording(last, AppRun(tmp_path / "again", app=RERUN, resumed=first))
