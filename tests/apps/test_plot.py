"""The picture of one or more runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from apps.grpo.plot import load, main, smooth
from forge.errors import ConfigError

ROOT = Path(__file__).parents[2]


def a_run(folder: Path, rewards: list[float | None], bound: int = 2) -> Path:
    folder.mkdir()
    rows = [{"step": n, "reward/mean": r, "staleness/bound": bound} for n, r in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_of_different_lengths_become_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    a, b = a_run(tmp_path / "a", [0.1, 0.2, 0.6], 0), a_run(tmp_path / "b", [0.1, None, 0.5, 0.7])
    out = tmp_path / "curve.svg"
    command = [sys.executable, "-m", "apps.grpo.plot", str(a), str(b), "-o", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{out}\n", "")
    picture = out.read_text()
    # matplotlib writes each text as a comment beside its outlines.
    for text in (
        "a (staleness ≤ 0)",
        "b (staleness ≤ 2)",
        "training step",
        "reward/mean  (raw, and mean of 5 steps)",
    ):
        assert f"<!-- {text} -->" in picture


def test_a_png_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run, out = a_run(tmp_path / "a", [0.1, 0.2]), tmp_path / "curve.png"
    assert main([str(run), "-o", str(out), "--window", "1"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_smoothing_is_the_mean_of_the_last_values_and_shorter_at_the_start() -> None:
    assert smooth([1, 2, 3, 6], 2) == [1.0, 1.5, 2.5, 4.5]
    assert smooth([1, 2, 3], 1) == [1, 2, 3]


def test_steps_without_the_value_are_left_out(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", [0.1, None, 0.3])
    assert [row["step"] for row in load(run, "reward/mean")] == [1, 3]


def test_a_folder_without_metrics_or_values_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is no run folder.*metrics\.jsonl"):
        load(tmp_path / "nowhere", "reward/mean")
    run = a_run(tmp_path / "a", [None])
    with pytest.raises(ConfigError, match="no value of reward/mean"):
        load(run, "reward/mean")


def test_the_command_ends_with_2_and_one_line_on_a_wrong_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main([str(tmp_path / "nowhere"), "-o", str(tmp_path / "x.png")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "x.png").exists()
