"""Generators that come and go in a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from app_run import AppRun, check_nothing_was_lost

from apps import scale
from forge.errors import ConfigError
from forge.placement import MeshConfig, RoleConfig, plan_placement


def plan(cfg: MeshConfig, slots: int = 4) -> list[tuple[int, ...]]:
    placed = plan_placement(cfg, device="cuda", slots=slots, torchrun_slots=None, roles=("trainer", "generator"))
    return [replica.devices for replica in placed.replicas("generator")]


def test_device_slots_are_kept_for_those_that_may_come() -> None:
    assert plan(MeshConfig(generator=RoleConfig(replicas=1, max_replicas=3))) == [(1,), (2,), (3,)]
    with pytest.raises(ConfigError, match=r"mesh\.generator\.max_replicas=4\), but pool 'default' has 3"):
        plan(MeshConfig(generator=RoleConfig(replicas=1, max_replicas=4)), slots=3)


@pytest.mark.parametrize(
    ("cfg", "why_not"),
    [
        (MeshConfig(generator=RoleConfig(replicas=3, max_replicas=2)), "must be >= mesh.generator.replicas, 3"),
        (MeshConfig(trainer=RoleConfig(max_replicas=2)), "mesh.trainer.max_replicas is 2, but only generators"),
        (MeshConfig(debug=True, generator=RoleConfig(max_replicas=2)), "with mesh.debug or mesh.colocate none"),
        (MeshConfig(colocate=True, generator=RoleConfig(max_replicas=2)), "with mesh.debug or mesh.colocate none"),
    ],
)
def test_who_cannot_come_is_refused_before_anything_starts(cfg: MeshConfig, why_not: str) -> None:
    with pytest.raises(ConfigError, match=why_not):
        plan(cfg)


def test_a_wish_is_written_down_where_the_run_can_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main([str(tmp_path), "2"]) == 2
    assert "is no run with generators" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("mesh: {colocate: true, generator: {replicas: 2}}")
    assert scale.main([str(tmp_path), "1"]) == 2
    assert "no generator comes or goes" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("mesh: {generator: {replicas: 1, max_replicas: 2}}")
    assert scale.main([str(tmp_path), "2"]) == 0
    assert json.loads((tmp_path / "scale.json").read_text()) == {"generators": 2}
    assert scale.main([str(tmp_path), "3"]) == 2
    assert "can have 1 to 2 generators, not 3" in capsys.readouterr().err
    assert json.loads((tmp_path / "scale.json").read_text()) == {"generators": 2}


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["memory", "collective"])
def test_a_generator_comes_and_leaves_while_the_run_goes_on(tmp_path: Path, transport: str) -> None:
    options = ["--mesh.generator.max_replicas=2", "--mesh.slots=3", f"--weightsync.transport={transport}"]
    run = AppRun(tmp_path / "run", "--trainer.steps=100000", *options)
    try:
        run.wait_until(lambda: len(run.rows()) >= 3, "three steps", 400)
        for wanted, said in ((2, "generator_1 serves; there are 2"), (1, "generator_1 has left; there are 1")):
            rows, before = len(run.rows()), run.output.count(said)
            scale.wish(run.folder, wanted)
            run.wait_until(lambda said=said, before=before: run.output.count(said) > before, said, 400)
            assert wanted == 1 or len(run.rows()) > rows + 3, "nobody waits for who comes"
            rows = len(run.rows())
            run.wait_until(lambda rows=rows: len(run.rows()) > rows + 8, "steps behind that", 200)
        assert not run.process_of("generator_1")
        run.press_ctrl_c()
        assert run.finish(120) == 130, run.output
    finally:
        run.end()
    check_nothing_was_lost(run)
    assert "failed" not in run.output
