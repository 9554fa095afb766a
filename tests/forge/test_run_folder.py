"""The run folder: whole lines whatever the disk does, and an error that says what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from forge.errors import ConfigError, RunFolderError
from forge.metrics import METRIC_KEYS, Row, read_rows
from forge.run_folder import EpisodeRecord, RunFolder, folder_error

ROOT = Path(__file__).parents[2]


def row(step: int) -> Row:
    return dict.fromkeys(METRIC_KEYS, 0.5) | {"step": step, "policy_version": step, "loss/kl": None}


def write_twice(folder: RunFolder, values: Row) -> None:
    folder.write(values)
    folder.write(values)


def run_on_small_disk(tmp_path: Path, size: str, script: str) -> list[str]:
    """Runs `script` with `disk` a tmpfs of that size that vanishes with its mount namespace."""
    unshare, disk = shutil.which("unshare"), tmp_path / "disk"
    enter = [unshare or "unshare", "--map-root-user", "--mount", "sh", "-ec"]
    mount = f"mount -t tmpfs -o size={size} tmpfs {disk}"
    disk.mkdir()
    if unshare is None or subprocess.run([*enter, mount], capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs in a namespace of our own")
    head = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]; disk = {str(disk)!r}\n"
    head += "import time\nfrom test_run_folder import *\n"
    code = head + textwrap.dedent(script)
    command = [*enter, f'{mount}; exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_run_leaves_config_metrics_episodes_and_events(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b", "x", "seed: 1\n")
    for step in (1, 2):
        folder.write(row(step), [EpisodeRecord("1 + 1?", "zwölf \udc80\n", float("nan"), [0, 1])])
    folder.close()
    assert (folder.path / "config.yaml").read_text() == "seed: 1\n"
    assert read_rows(folder.metrics_path) == [row(1), row(2)]
    episodes = [json.loads(line) for line in (folder.path / "episodes.jsonl").read_text("utf-8").splitlines()]
    wanted = {"prompt": "1 + 1?", "completion": "zwölf \udc80\n", "reward": None, "versions": [0, 1]}
    assert episodes == [{"step": 1, **wanted}, {"step": 2, **wanted}]


def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    folder = RunFolder(tmp_path / "run", "x", "")
    folder.write(row(1))
    folder.write(row(2))
    folder.close()
    (path,) = folder.path.glob("events.out.tfevents.*")
    events = list(loader.LegacyEventFileLoader(str(path)).Load())
    scalars = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    assert scalars[2, "reward/mean"] == 0.5
    assert {tag for step, tag in scalars if step == 1} == set(METRIC_KEYS) - {"step", "loss/kl"}


def test_without_tensorboard_no_events_are_written(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run", "x", "", tensorboard=False).close()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "config.yaml",
        "episodes.jsonl",
        "metrics.jsonl",
    ]


def test_the_default_folder_is_named_after_the_model_and_never_taken_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20240102-030405")
    folders = [RunFolder(None, "Qwen/Qwen3-1.7B", "") for _ in range(3)]
    for folder in folders:
        folder.close()
    stem = "runs/Qwen3-1.7B-20240102-030405"
    assert [str(folder.path) for folder in folders] == [stem, f"{stem}-2", f"{stem}-3"]


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty and nothing is overwritten; give another"):
        RunFolder(tmp_path, "x", "")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_resumed_run_forgets_what_came_after_the_step_that_it_goes_on_from(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "x", "seed: 1\n")
    for step in range(1, 6):
        folder.write(row(step), [EpisodeRecord(f"prompt {step}", "", 1.0, [0])] * 2)
    folder.close()
    for name in ("metrics.jsonl", "episodes.jsonl"):
        with open(folder.path / name, "a") as file:
            file.write('{"step": 6, "to')
    resumed = RunFolder(folder.path, "x", "seed: 1\nsteps: 9\n", last_step=3)
    for step in (4, 5):
        resumed.write(row(step) | {"reward/mean": 9.0}, [EpisodeRecord(f"again {step}", "", 1.0, [0])])
    resumed.close()
    assert [(r["step"], r["reward/mean"]) for r in read_rows(folder.metrics_path)] == [
        *((step, 0.5) for step in (1, 2, 3)),
        *((step, 9.0) for step in (4, 5)),
    ]
    prompts = [json.loads(line)["prompt"] for line in (folder.path / "episodes.jsonl").read_text().splitlines()]
    assert prompts == [*(f"prompt {step}" for step in (1, 1, 2, 2, 3, 3)), "again 4", "again 5"]
    assert (folder.path / "config.yaml").read_text() == "seed: 1\nsteps: 9\n"
    assert (folder.path / "config.1.yaml").read_text() == "seed: 1\n"
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder.path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        *((step, 0.5) for step in (1, 2, 3)),
        *((step, 9.0) for step in (4, 5)),
    ]


def test_a_run_that_still_writes_is_not_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "x", "seed: 1\n")
    folder.write(row(1))
    with pytest.raises(ConfigError, match=r"another process is writing to .*run"):
        RunFolder(folder.path, "x", "seed: 1\n", last_step=0)
    folder.close()
    assert read_rows(folder.metrics_path) == [row(1)], "the refused run changed something"
    RunFolder(folder.path, "x", "seed: 1\n", last_step=0).close()
    assert read_rows(folder.metrics_path) == []


def test_an_empty_folder_is_accepted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "x", "")
    folder.close()
    assert folder.path == tmp_path


def test_a_path_that_cannot_be_a_folder_is_a_config_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below", tmp_path / ("n" * 300)):
        with pytest.raises(ConfigError, match="give"):
            RunFolder(path, "x", "")


def test_of_two_runs_in_one_folder_the_second_is_refused_and_the_first_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunFolder(tmp_path / "run", "x", "first")
    monkeypatch.setattr("forge.run_folder.check_dir", lambda _: None)  # both looked while it was empty
    with pytest.raises(ConfigError, match="exists"):
        RunFolder(tmp_path / "run", "x", "second")
    first.write(row(1))
    first.close()
    assert (tmp_path / "run" / "config.yaml").read_text() == "first"
    assert len(read_rows(first.metrics_path)) == 1


def test_a_disk_that_fills_up_during_the_run_is_one_error_and_whole_lines(tmp_path: Path) -> None:
    lines = run_on_small_disk(
        tmp_path,
        "64k",
        """
        folder = RunFolder(disk + "/run", "x", "", tensorboard=False)
        try:
            for step in range(1, 100_000):
                folder.write(row(step))
                while folder._queue.qsize() > 500:
                    time.sleep(0.001)
        except RunFolderError as error:
            print(error)
        folder.close()
        rows = read_rows(folder.metrics_path)
        print(len(rows) > 10, [r["step"] for r in rows] == list(range(1, len(rows) + 1)))
        print(folder.metrics_path.read_bytes()[-2:] == b"}\\n")
        """,
    )
    message, *checks = lines
    assert f"cannot write {tmp_path}/disk/run/metrics.jsonl: No space left on device (ENOSPC)" in message
    assert "bytes and" in message
    assert "give --run.dir a folder on another disk" in message
    assert checks == ["True True", "True"]


def test_a_full_disk_that_no_write_has_reported_yet_is_reported_by_close_once(tmp_path: Path) -> None:
    lines = run_on_small_disk(
        tmp_path,
        "64k",
        """
        folder = RunFolder(disk + "/run", "x", "")
        Path(disk, "filler").write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        folder.write(row(1), [EpisodeRecord("p", "c" * 10_000, 1.0, [0])])
        for _ in range(2):
            try:
                folder.close()
                print("closed")
            except RunFolderError as error:
                print(error)
        """,
    )
    assert len(lines) == 2
    assert "ENOSPC" in lines[0]
    assert "; 0 bytes and" in lines[0]
    assert lines[1] == "closed"


def test_a_disk_full_from_the_start_stops_the_run_and_leaves_no_folder(tmp_path: Path) -> None:
    lines = run_on_small_disk(
        tmp_path,
        "16k",
        """
        Path(disk, "filler").write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        try:
            RunFolder(disk + "/run", "x", "seed: 1")
        except RunFolderError as error:
            print(error)
        print(os.listdir(disk))
        """,
    )
    assert "No space left on device (ENOSPC)" in lines[0]
    assert lines[1] == "['filler']"


def test_a_device_that_refuses_every_byte_is_an_error_of_the_next_call(tmp_path: Path) -> None:
    # Without the right to mount: /dev/full in the place of the metrics.
    folder = RunFolder(tmp_path / "run", "x", "")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, folder._metrics._fd)
    os.close(full)
    folder.write(row(1))
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl: No space left on device \(ENOSPC\).*--run\.dir"):
        folder.close()


def test_a_disk_that_hangs_never_blocks_the_train_loop_and_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge.run_folder._QUEUED_STEPS", 4)
    folder = RunFolder(tmp_path / "run", "x", "", tensorboard=False)
    # A pipe that nobody reads stands for the disk that does not answer.
    reader, writer = os.pipe()
    os.dup2(writer, folder._metrics._fd)
    os.close(writer)
    big: Row = row(1) | {f"extra/{n}": 1 for n in range(10_000)}
    for _ in range(4):
        folder.write(big)
    with pytest.raises(RunFolderError, match="4 steps behind"):  # one more may be in the writer's hands
        write_twice(folder, big)
    folder.close()
    os.close(reader)
    folder._thread.join(10)


def test_a_disk_that_hangs_at_the_end_is_given_up_after_the_deadline(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "x", "", tensorboard=False)
    reader, writer = os.pipe()
    os.dup2(writer, folder._metrics._fd)
    os.close(writer)
    folder.write(row(1) | {f"extra/{n}": 1 for n in range(10_000)})
    with pytest.raises(RunFolderError, match=r"within 0\.1 s"):
        folder.close(timeout_s=0.1)
    os.close(reader)
    folder._thread.join(10)


def test_no_thread_outlives_a_closed_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "x", "")
    assert folder._thread.is_alive()
    folder.close()
    assert not folder._thread.is_alive()


def test_the_error_names_path_reason_free_space_and_remedy() -> None:
    full = str(folder_error("/proc/none/x", OSError(errno.ENOSPC, "No space left on device")))
    assert full.startswith("cannot write /proc/none/x: No space left on device (ENOSPC); ")
    assert "inodes are free there; free some space" in full
    broken = str(folder_error("x", OSError(errno.EIO, "Input/output error")))
    assert "(EIO)" in broken
    assert "check the disk" in broken
