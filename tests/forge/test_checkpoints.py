"""A checkpoint counts whole or not at all, whenever the process that writes it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from forge.checkpoints import Checkpoints
from forge.errors import RunFolderError


def write(checkpoints: Checkpoints, version: int, text: str = "") -> None:
    (checkpoints.begin(version) / "weights").write_text(text or f"weights of {version}")
    checkpoints.commit(version, {"incarnation": 0})


def test_the_newest_stay_and_are_found_in_order(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.latest() is None
    for version in (5, 999_999, 1_000_000):
        write(checkpoints, version)
    assert [c.version for c in checkpoints.list()] == [999_999, 1_000_000]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.meta == {"version": 1_000_000, "incarnation": 0}
    assert (latest.path / "weights").read_text() == "weights of 1000000"


def test_one_that_was_begun_does_not_count_and_the_next_begin_removes_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    partial = checkpoints.begin(2)
    (partial / "weights").write_text("half")
    assert [c.version for c in checkpoints.list()] == [1]
    again = checkpoints.begin(2)
    assert list(again.iterdir()) == []
    checkpoints.begin(3)
    assert not again.exists()


def test_a_version_that_is_made_again_replaces_the_one_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 4, "first")
    write(checkpoints, 4, "again")
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.path / "weights").read_text() == "again"


def test_a_description_that_cannot_be_read_is_an_error_with_its_path(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 4)
    (tmp_path / "000004" / "checkpoint.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"000004/checkpoint.json does not describe"):
        checkpoints.latest()


def test_a_folder_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"cannot write .*file/000001.partial: Not a directory"):
        Checkpoints(tmp_path / "file").begin(1)


WRITER = """
    import sys
    from pathlib import Path
    from forge.checkpoints import Checkpoints
    checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
    for version in range(1, 100_000):
        (checkpoints.begin(version) / "weights").write_text(str(version) * 1000)
        checkpoints.commit(version, {})
        print(version, flush=True)
"""


def test_kill_at_any_moment_leaves_what_was_committed(tmp_path: Path) -> None:
    for trial in range(5):
        folder = tmp_path / str(trial)
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        assert writer.stdout is not None
        for _ in range(3 + trial):
            told = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        told = max(told, *(int(line) for line in writer.communicate()[0].split()), 0)
        latest = Checkpoints(folder).latest()
        assert latest is not None
        assert latest.version in (told, told + 1)
        assert (latest.path / "weights").read_text() == str(latest.version) * 1000
        assert json.loads((latest.path / "checkpoint.json").read_text()) == {"version": latest.version}
