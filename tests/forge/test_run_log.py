"""What a run shows: the lines, the bar, the last table, and that none of them holds anybody up."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forge.errors import ConfigError, RunFolderError, SchemaError
from forge.metrics import METRIC_KEYS, Row, make_row, read_rows
from forge.run_folder import EpisodeRecord
from forge.run_log import RunConfig, RunLog, Terminal, check_run, final_table, status_line

ROOT = Path(__file__).parents[2]


def values(step: int, **changes: Any) -> dict[str, Any]:
    return dict.fromkeys(METRIC_KEYS, 0) | {"step": step, "policy_version": step, "time_s": 2.0 * step} | changes


def plain(**options: Any) -> Console:
    return Console(file=io.StringIO(), width=80, **options)


def shown(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def table_text(rows: list[Row], *args: Any, **options: Any) -> str:
    console = plain(**options)
    console.print(final_table(rows, *args))
    return shown(console)


def a_learning_run(steps: int) -> list[Row]:
    return [
        make_row(
            values(
                step,
                **{
                    "reward/mean": step / 10,
                    "staleness/mean": 0.5,
                    "staleness/max": step % 3,
                    "staleness/bound": 2,
                    "tokens/generated": 1000,
                    "tokens/trained": 900,
                    "tokens/wasted": 10,
                    "episodes/trained": 64,
                    "episodes/dropped": 2,
                    "time/wait_batch_s": 0.5,
                    "time/publish_stall_s": 0.001 * step,
                    "generator/pause_s": 0.010 if step > 1 else None,
                },
            )
        )
        for step in range(1, steps + 1)
    ]


def test_the_last_table_says_what_the_run_did() -> None:
    text = table_text(a_learning_run(20), 20, {"trainer": 3 * 2**30, "generator": 2**29})
    facts = dict(line.strip("│").split("│") for line in text.splitlines() if line.count("│") == 3)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    assert facts["steps"] == "20 of 20"
    assert facts["episodes"] == "1,280"
    assert facts["reward"] == "0.300 -> 1.800  (+1.500; first and last 5 steps)"
    assert facts["tokens"] == "20,000 generated, 18,000 trained"
    assert facts["tokens/s"] == "500"
    assert facts["trainer idle share"] == "25.0%"
    assert facts["staleness"] == "mean 0.50, max 2, bound 2"
    assert facts["dropped"] == "40 episodes, 200 tokens"
    assert facts["publish stall"] == "mean 10.5 ms, max 20.0 ms"
    assert facts["generator pause"] == "mean 10.0 ms, max 10.0 ms"
    assert facts["wall time"] == "0:00:40"
    assert facts["peak memory"] == "trainer       3.00 GiB"
    assert "generator     0.50 GiB" in text


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 9])
def test_the_table_of_a_short_run_never_compares_a_step_with_itself(steps: int) -> None:
    text = table_text(a_learning_run(steps))
    spans = {
        0: "-",
        1: "0.100 -> 0.100  (+0.000; first and last step)",
        2: "0.100 -> 0.200",
        3: "0.100 -> 0.300",
    }
    assert spans.get(steps, "0.250 -> 0.750  (+0.500; first and last 4 steps)") in text


def test_the_table_fits_80_columns_and_an_ascii_pipe() -> None:
    memory = dict.fromkeys(("trainer", "generator", "replay", "reward", "controller"), 2**37)
    rows = [row | {"tokens/generated": 10**12, "time/publish_stall_s": 123.4} for row in a_learning_run(20)]
    assert max(map(len, table_text(rows, 10**6, memory).splitlines())) <= 80
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=80).print(final_table(rows, 20, memory))


def test_the_table_counts_what_was_nan() -> None:
    rows = [make_row(values(1, grad_norm=float("nan")))]
    assert "1 values, written as null" in table_text(rows)
    assert "NaN" not in table_text(a_learning_run(2))


def test_the_status_line_fits_80_columns_and_shows_what_is_missing_as_a_dash() -> None:
    (row,) = [make_row(values(1, **{"reward/mean": None, "staleness/bound": 2, "generator/tokens_per_s": 123456.7}))]
    line = status_line(row, 3600.0 * 30)
    assert line == "reward -  staleness 0.0/0 bound 2  123,457 tok/s  idle 0%  ETA 1 day, 6:00:00"
    assert len(line) < 80


def data_values(step: int, loss: float) -> dict[str, Any]:
    """Of a run on rows that are there: nothing sampled, no replay."""
    measured = {"loss/policy": loss, "tokens/trained": 500, "episodes/trained": 64, "time/step_s": 0.25}
    nothing = dict.fromkeys(METRIC_KEYS)
    return nothing | {"step": step, "policy_version": step, "time_s": 2.0 * step, "trainer/idle_share": 0.1} | measured


def test_a_run_on_rows_that_are_there_shows_its_loss_in_place_of_rewards_and_staleness() -> None:
    rows = [make_row(data_values(step, loss)) for step, loss in enumerate([0.9, 0.7, 0.5, 0.3], start=1)]
    assert status_line(rows[0], 60.0) == "loss 0.9000  2,000 tok/s  idle 10%  ETA 0:01:00"
    text = table_text(rows, 4)
    assert "0.800 -> 0.400" in text
    assert "2,000 trained" in text
    assert not any(word in text for word in ("reward", "staleness", "generator", "publish", "dropped"))


def test_without_a_terminal_there_is_a_line_every_two_seconds_at_most_and_one_for_the_last_step() -> None:
    console, now = plain(), [0.0]
    terminal = Terminal(console, 50, live=False, clock=lambda: now[0])
    terminal.note("starting the [bold]generators")
    for step in range(1, 51):
        terminal.step(make_row(values(step)))
        now[0] += 0.1
    terminal.close()
    lines = shown(console).splitlines()
    assert lines[0] == "starting the [bold]generators"
    assert [line.split()[1] for line in lines[1:]] == ["1/50", "21/50", "41/50", "50/50"]
    assert lines[2].endswith("ETA 0:00:58")


def test_on_a_terminal_a_bar_shows_the_step_and_the_figures() -> None:
    console = plain(force_terminal=True, legacy_windows=False)
    terminal = Terminal(console, 4, live=True)
    terminal.note("starting the generators")
    terminal.step(make_row(values(1)))
    terminal.step(make_row(values(3, **{"reward/mean": 0.25})))
    terminal.close()
    text = shown(console)
    for wanted in ("starting the generators", "3/4", "reward 0.250", "ETA 0:00:02"):
        assert wanted in text
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hide) == text.count(show) == 1


def test_notes_stay_above_the_bar_within_the_width_of_the_terminal() -> None:
    console = plain(force_terminal=True, legacy_windows=False)
    terminal = Terminal(console, 4, live=True)
    note = "generator_0 failed: its process was killed by SIGKILL; the kernel does that when memory runs out"
    terminal.note(note)
    terminal.step(make_row(values(1)))
    terminal.close()
    text = shown(console)
    wrapped = "killed by SIGKILL; the kernel does that when\n  memory runs out\n"
    assert wrapped in text
    assert "reward" in text.partition(wrapped)[2]


def test_a_run_log_writes_each_step_and_a_sample_of_its_episodes(tmp_path: Path) -> None:
    console = plain()
    log = RunLog(RunConfig(dir=str(tmp_path / "run")), "seed: 1\n", 2, console=console)
    rows = [log.step(values(n), [EpisodeRecord("p", f"c{i}", 1.0, [0]) for i in range(5)]) for n in (1, 2)]
    log.close()
    log.close()
    log.print_table()
    assert read_rows(tmp_path / "run" / "metrics.jsonl") == rows
    assert (tmp_path / "run" / "episodes.jsonl").read_text().count("\n") == 4
    assert log.checkpoint == tmp_path / "run" / "checkpoint"
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert "2 of 2" in shown(console)
    assert shown(console).endswith(f"run folder {tmp_path / 'run'}\n")


def test_what_is_switched_off_is_not_there(tmp_path: Path) -> None:
    console = plain()
    cfg = RunConfig(dir=str(tmp_path), progress=False, tensorboard=False, checkpoint=False, episodes_per_step=0)
    log = RunLog(cfg, "", 1, console=console)
    log.note("starting")
    log.step(values(1), [EpisodeRecord("p", "c", 1.0, [0])])
    log.close()
    assert shown(console) == ""
    assert log.checkpoint is None
    assert (tmp_path / "episodes.jsonl").read_text() == ""
    assert not list(tmp_path.glob("events*"))


def test_a_wrong_row_is_an_error_of_the_step_that_brings_it(tmp_path: Path) -> None:
    log = RunLog(RunConfig(dir=str(tmp_path), progress=False), "", 1)
    with pytest.raises(SchemaError, match="reward/maen"):
        log.step(values(1, **{"reward/maen": 1.0}))
    log.close()
    assert read_rows(log.folder.metrics_path) == []


def test_a_full_disk_is_an_error_of_a_later_step_and_the_terminal_is_given_back(tmp_path: Path) -> None:
    console = plain(force_terminal=True, legacy_windows=False)
    log = RunLog(RunConfig(dir=str(tmp_path)), "", 9, console=console)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log.folder._metrics._fd)
    os.close(full)
    log.step(values(1))
    log.folder._thread.join(0.5)
    with pytest.raises(RunFolderError, match="ENOSPC"):
        log.step(values(2))
    log.close()  # told once already
    assert "\x1b[?25h" in shown(console)


def test_a_run_config_that_cannot_work_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.episodes_per_step must be >= 0, got -1"):
        check_run(RunConfig(dir=str(tmp_path / "run"), episodes_per_step=-1))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        check_run(RunConfig(dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="File name too long"):
        check_run(RunConfig(dir=str(tmp_path / ("n" * 300))))
    check_run(RunConfig(dir=str(tmp_path / "run")))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


RUN = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_run_log import *
log = RunLog(RunConfig(dir={dir!r}, progress={show!r} != "nothing"), "", {steps}, live={show!r} == "bar")
if log._terminal is not None:
    log._terminal._clock = iter(range(0, 10**9, 10)).__next__
for step in range(1, {steps} + 1):
    log.step(values(step))
log.close()
print("closed", file=sys.stderr)
log.print_table()
print("done", file=sys.stderr)
"""


def start_run(tmp_path: Path, steps: int, stdout: int, *, show: str = "lines") -> subprocess.Popen[str]:
    names = {"root": str(ROOT), "tests": str(Path(__file__).parent), "dir": str(tmp_path / "run")}
    code = RUN.format(**names, steps=steps, show=show)
    return subprocess.Popen([sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True)


def fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 4096)
    os.set_blocking(pipe, True)


@pytest.mark.parametrize("show", ["lines", "bar", "nothing"])
def test_a_reader_of_the_output_that_went_away_stops_nothing(tmp_path: Path, show: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with start_run(tmp_path, 20, writer, show=show) as run:
        os.close(writer)
        _, errors = run.communicate(timeout=60)
    assert errors == "closed\ndone\n"
    assert run.returncode == 0
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 20


def test_a_terminal_that_is_gone_ends_the_showing_and_nothing_else() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    terminal = Terminal(Console(file=Gone(), width=80), 2, live=False)
    terminal.step(make_row(values(1)))
    terminal.close()
    assert not terminal._thread.is_alive()


def test_a_reader_of_the_output_that_reads_no_more_holds_up_no_step(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    fill(writer)
    with start_run(tmp_path, 20, writer) as run:
        os.close(writer)
        assert run.stderr is not None
        assert run.stderr.readline() == "closed\n"
        assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 20
        os.close(reader)
        run.communicate(timeout=60)
