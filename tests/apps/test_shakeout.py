"""A shakeout names the bottleneck that the rows show, and the knob that moves it; it keeps nothing."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from app_run import ROOT, AppRun
from rich.console import Console

from apps.grpo.config import AppConfig
from apps.grpo.shakeout import Shakeout, knobs_of
from apps.sft.config import SftConfig
from apps.two_agents.config import TwoAgentsConfig
from forge import config
from forge.errors import ConfigError
from forge.metrics import METRIC_KEYS, Row
from forge.shakeout import WARM_UP_STEPS, Finding, findings, measure, page

KNOBS = knobs_of(AppConfig())


def rows(each: Row | None = None, *, wall_s: float = 1.0, steps: int = 8, warm_up_s: float = 30.0) -> list[Row]:
    """Steps of `wall_s` seconds behind slow ones of a warm-up that must not count."""
    quiet: Row = {
        **dict.fromkeys(METRIC_KEYS, 0.0),
        "staleness/bound": 1,
        "generator/pause_s": None,
        "time/step_s": 0.9 * wall_s,
        "replay/admission_wait_s": 0.0,
        "extra/rollouts": 4.0,
        "extra/rollout_s": 2.0,
        "extra/reward_s": 0.1,
    }
    made: list[Row] = []
    for step in range(1, WARM_UP_STEPS + steps + 1):
        warm = step <= WARM_UP_STEPS
        time_s = step * warm_up_s if warm else WARM_UP_STEPS * warm_up_s + (step - WARM_UP_STEPS) * wall_s
        slow: Row = {"time/wait_batch_s": 0.9 * warm_up_s} if warm else {}
        made.append({**quiet, **(each or {}), **slow, "step": step, "policy_version": step, "time_s": time_s})
    return made


def found(each: Row, knobs: dict[str, Any] | None = None) -> list[Finding]:
    measured = measure(rows(each))
    assert measured is not None
    return findings(measured, KNOBS | (knobs or {}))


def waiting(share: float) -> Row:
    return {"time/wait_batch_s": share, "time/step_s": 0.95 - share}


def turned(finding: Finding) -> dict[str, str]:
    return {turn.key: turn.to for turn in finding.turns}


def test_a_warm_up_is_no_part_of_what_is_measured() -> None:
    measured = measure(rows(wall_s=2.0))
    assert measured is not None
    assert (measured.steps, measured.wall_s, measured.wait_s) == (8, pytest.approx(2.0), 0.0)
    assert measure(rows(steps=0)) is None


def test_a_bound_that_is_too_tight_is_named_where_both_sides_wait() -> None:
    first, *_ = found({**waiting(0.5), "replay/admission_wait_s": 0.5})
    assert "staleness bound" in first.title
    assert "24% of the generators' places" in first.why  # 1.9 groups of 8 at a time, for 64 places
    assert first.share == pytest.approx(0.5)
    assert turned(first)["replay.max_staleness"].startswith("2")
    assert first.turns[0].now == 1


def test_slow_generation_is_named_where_nobody_waits_for_a_slot() -> None:
    first, *_ = found(waiting(0.6))
    assert "Generation is slow" in first.title
    assert set(turned(first)) == {"generator.max_num_seqs", "mesh.generator.replicas", "grpo.oversample"}
    assert turned(first)["generator.max_num_seqs"].startswith("128")


def test_a_bound_is_not_blamed_where_the_generators_are_full() -> None:
    full: Row = {"replay/admission_wait_s": 1.2, "extra/rollouts": 8.0, "extra/rollout_s": 9.0}
    first, *_ = found({**waiting(0.7), **full})
    assert "Generation is slow" in first.title
    assert "111% of their places" in first.why


def test_places_are_no_advice_where_there_are_enough() -> None:
    first, *_ = found(waiting(0.6), {"generator.max_num_seqs": 256})
    assert "generator.max_num_seqs" not in turned(first)


def test_slow_rewards_are_named_before_generation() -> None:
    first, *_ = found({**waiting(0.6), "extra/reward_s": 1.5})
    assert "Rewards are slow" in first.title
    assert turned(first)["reward.workers"].startswith(str(KNOBS["reward.workers"] + 1))


def test_a_trainer_that_never_waits_is_the_limit() -> None:
    (only,) = found({"replay/admission_wait_s": 0.6, "time/step_s": 0.97})
    assert "The trainer is the limit" in only.title
    assert {"mesh.trainer.procs", "trainer.microbatch_tokens"} <= set(turned(only))


def test_generators_that_idle_may_give_devices_to_the_trainer() -> None:
    (only,) = found({"replay/admission_wait_s": 1.6, "time/step_s": 0.97}, {"mesh.generator.replicas": 4})
    assert turned(only)["mesh.generator.replicas"].startswith("3")


@pytest.mark.parametrize(
    ("key", "title"),
    [("time/publish_stall_s", "stands still for its snapshot"), ("generator/pause_s", "stand still for updates")],
)
def test_weights_that_stop_somebody_are_named(key: str, title: str) -> None:
    first, *_ = found({key: 0.3, "time/step_s": 0.2, "time/wait_batch_s": 0.2, "replay/admission_wait_s": 0.0})
    titles = [finding.title for finding in found({key: 0.3, "time/step_s": 0.65})]
    assert any(title in one for one in titles)
    assert first.share >= 0.2


def test_a_loop_that_does_other_things_wasted_tokens_and_empty_rows_are_named() -> None:
    titles = " ".join(finding.title for finding in found({"time/step_s": 0.5}))
    assert "train loop itself" in titles
    wasteful = found({"tokens/trained": 100.0, "tokens/wasted": 50.0})
    assert any("Waste" in finding.title and finding.share == pytest.approx(1 / 3) for finding in wasteful)
    padded: Row = {"pack/padded_waste": 0.7}
    assert any("computes padding" in finding.title for finding in found(padded, {"trainer.packing": False}))
    assert not any("padding" in finding.title for finding in found(padded, {"trainer.packing": True}))


def test_the_dearest_comes_first_and_what_costs_little_is_no_finding() -> None:
    several = found({**waiting(0.3), "time/publish_stall_s": 0.1, "generator/pause_s": 0.01})
    assert [f.share for f in several] == sorted((f.share for f in several), reverse=True)
    assert not any("updates" in finding.title for finding in several)


def test_only_knobs_that_the_configuration_has_are_turned() -> None:
    measured = measure(rows({**waiting(0.6), "staleness/bound": None, "replay/admission_wait_s": None}))
    assert measured is not None
    knobs = knobs_of(SftConfig())
    assert all(turn.key in knobs for finding in findings(measured, knobs) for turn in finding.turns)


def test_the_page_fits_80_columns_and_has_every_finding_with_its_knobs() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    measured = measure(rows({**waiting(0.6), "tokens/wasted": 10.0, "tokens/trained": 20.0}))
    assert measured is not None
    several = findings(measured, KNOBS)
    console.print(page(measured, several))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert all(finding.title in words for finding in several)
    assert all(turn.key in words for finding in several for turn in finding.turns)


# --- the command line


@pytest.mark.parametrize("words", [["--shakeout", "5"], ["--shakeout=5"], ["--seed=1", "--shakeout=5"]])
def test_the_flag_becomes_options_that_keep_nothing(words: list[str]) -> None:
    shakeout = Shakeout(AppConfig)
    options = dict(word.removeprefix("--").split("=", 1) for word in shakeout.expand(words))
    assert options["trainer.steps"] == str(5 + WARM_UP_STEPS)
    assert (options["run.checkpoint"], options["run.checkpoint_every"]) == ("false", "0")
    assert not Path(options["run.dir"]).exists()


def test_a_folder_of_the_users_stays_and_every_policy_gets_its_steps() -> None:
    words = Shakeout(TwoAgentsConfig).expand(["--shakeout=5", "--run.dir=mine"])
    assert [word for word in words if word.startswith("--run.dir")] == ["--run.dir=mine"]
    assert {"--proposer.trainer.steps=8", "--solver.trainer.steps=8"} <= set(words)
    assert Shakeout(AppConfig).expand(["--seed=1"]) == ["--seed=1"]


@pytest.mark.parametrize(
    "words", [["--shakeout"], ["--shakeout=0"], ["--shakeout=x"], ["--shakeout=1", "--shakeout=2"]]
)
def test_a_shakeout_without_a_number_of_steps_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="steps to measure"):
        Shakeout(AppConfig).expand(words)


def test_a_shakeout_resumes_nothing() -> None:
    with pytest.raises(ConfigError, match="--resume"):
        Shakeout(AppConfig).expand(["--shakeout=3", "--resume", "runs/A"])


def test_the_scratch_folder_goes_behind_the_page() -> None:
    shakeout = Shakeout(AppConfig)
    preset = ROOT / "apps/grpo/tiny.yaml"
    options: dict[str, Any] = {"default_config": preset, "prog": "x", "description": "", "expand": shakeout.expand}
    cfg = config.parse(AppConfig, ["--shakeout=8"], **options)

    folder = Path(cfg.run.dir or "")

    def write() -> None:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(waiting(0.6))))

    console = Console(width=80, record=True, file=io.StringIO())
    write()
    asyncio.run(shakeout.around(asyncio.sleep(0), cfg, console))
    assert "Generation is slow" in console.export_text()
    assert not folder.exists()


@pytest.mark.soak
def test_a_shakeout_of_the_app_ends_with_findings_and_keeps_nothing(tmp_path: Path) -> None:
    run = AppRun(tmp_path / "run", "--shakeout=4")
    try:
        assert run.finish(timeout_s=900) == 0
        assert "What holds whom back" in run.output
        assert len(run.rows()) == 4 + WARM_UP_STEPS
        assert not (run.folder / "checkpoint").exists()
        assert not any((run.folder / "checkpoints").glob("*"))
    finally:
        run.end()
