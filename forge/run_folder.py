"""The folder of one run, and the thread that writes it.

    runs/<name>/  config.yaml      the resolved configuration, fed back with --config
                  metrics.jsonl    one object a step, see forge/metrics.py
                  episodes.jsonl   a sample of decoded episodes
                  evaluations.jsonl  one object an evaluation, see actors/evaluator.py
                  run.json         machine, versions, how the run ended, see forge/run_facts.py
                  events.out.*     the same numbers for TensorBoard
                  wandb_id, mlflow_id  the run's name at trackers, see forge/trackers.py
                  checkpoints/     what a resume goes on from, see forge/checkpoints.py
                  logs/            what the actors' processes, and the engines, wrote to stderr
                  journal/         what happened to every group, see replay/journal.py
                  checkpoint/      the final model; made by whoever writes it

The train loop hands a row over and goes on: it never waits for a disk. What the disk answers comes back
with the next call. The files hold whole lines at any moment, also after a write that the disk refused.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge.errors import ConfigError, RunFolderError
from forge.metrics import Number, Row

_QUEUED_STEPS = 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
# The user's choice of folder is at fault, not the state of the disk.
_WRONG_FOLDER = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


@dataclass(frozen=True)
class EpisodeRecord:
    """One decoded episode of episodes.jsonl."""

    prompt: str
    completion: str
    reward: float
    versions: Sequence[int]
    """the policy versions that sampled the completion's tokens"""
    pieces: Sequence[tuple[str, int]] = ()
    """the whole episode in order: text, and the version that sampled it, -1 where it was given; () is not written"""


def folder_error(path: str | Path, error: OSError, verb: str = "write") -> RunFolderError:
    """The RunFolderError for a file below a run folder: path, error, what is free there, the remedy."""
    code = errno.errorcode.get(error.errno or 0, "unknown error")
    if error.errno in _FULL:
        remedy = "free some space there or give --run.dir a folder on another disk"
    else:
        remedy = "check the disk and the rights on the folder, or give --run.dir another folder"
    return RunFolderError(f"cannot {verb} {path}: {error.strerror or error} ({code}); {_free(path)}; {remedy}")


def _free(path: str | Path) -> str:
    for folder in Path(path).absolute().parents:
        with suppress(OSError):
            disk = os.statvfs(folder)
            return f"{disk.f_bavail * disk.f_frsize:,} bytes and {disk.f_favail:,} inodes are free there"
    return "the free space is unknown"


def sync_folder(path: Path) -> None:
    """The names in `path` are on the disk from here on. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_dir(path: str | Path) -> None:
    """Raises ConfigError unless `path` is free to become a run folder: absent, or an empty folder.

    RunFolderError when the disk does not answer the question.
    """
    folder = Path(path)
    try:
        is_folder = folder.is_dir()
        taken = any(folder.iterdir()) if is_folder else folder.exists() or folder.is_symlink()
    except OSError as error:
        raise _creation_error(folder, error) from error
    if taken and is_folder:
        raise ConfigError(
            f"run.dir {folder} is not empty and nothing is overwritten; give another folder, "
            "remove this one, or leave run.dir out for a new folder below runs/"
        )
    if taken:
        raise ConfigError(f"run.dir {folder} is not a folder; give a folder that is empty or does not exist")


class _AppendOnly:
    """A file that only ever grows by whole records."""

    def __init__(self, path: Path, *, new: bool = False, alone: bool = False) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_EXCL if new else 0)
        self._fd = os.open(path, flags, 0o644)
        if alone:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._fd)
                raise ConfigError(f"another process is writing to {path.parent}; wait for it or end it") from None
        self._size = os.fstat(self._fd).st_size

    def cut(self, last_step: int) -> None:
        """Forgets the lines of later steps, and a torn last line; `step` only grows from line to line."""
        keep = 0
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n") or json.loads(line)["step"] > last_step:
                    break
                keep += len(line)
        os.ftruncate(self._fd, keep)
        self._size = keep

    def append(self, record: bytes) -> None:
        left = memoryview(record)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            # A full disk takes the head of a record and refuses the rest.
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(record)

    def close(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)


class _EventFile(_AppendOnly):
    """TensorBoard events, one record a step.

    Not SummaryWriter: it writes from a thread of its own, which prints its traceback when the disk is full.
    """

    def __init__(self, folder: Path, last_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
            from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
                RecordWriter,
            )
        except ImportError as error:
            raise ConfigError("run.tensorboard needs `pip install tensorboard`, or set it to false") from error
        self._event, self._records = Event, RecordWriter(self)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.0"
        super().__init__(folder / name)
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        if last_step is not None:
            # Makes TensorBoard forget what an earlier file holds of later steps.
            start = Event(wall_time=time.time(), step=last_step + 1, session_log=SessionLog(status=SessionLog.START))
            self._records.write(start.SerializeToString())

    def write(self, record: bytes) -> None:
        """What RecordWriter calls with a framed record."""
        self.append(record)

    def append_row(self, row: Row, wall_time: float) -> None:
        event = self._event(wall_time=wall_time, step=int(row["step"] or 0))
        for key, value in row.items():
            if value is not None and key != "step":
                event.summary.value.add(tag=key, simple_value=value)
        self._records.write(event.SerializeToString())


class RunFolder:
    """The open files of one run.

    `dir` None makes a new folder runs/<name>-<time>. Creation writes and syncs config.yaml, so that a
    folder that cannot be written is known before anything is started. With `last_step` the run in `dir` goes on
    behind that step: what the files hold of later ones is forgotten. Raises ConfigError when `dir` is taken or cannot
    be used, RunFolderError when the disk is full or broken; then no folder is left.
    """

    def __init__(
        self,
        dir: str | Path | None,
        name: str,
        config_yaml: str,
        *,
        tensorboard: bool = True,
        last_step: int | None = None,
    ) -> None:
        self.path, made = _claim(dir, name) if dir is None or last_step is None else (Path(dir), False)
        self.absolute = self.path.absolute()
        """The path for processes that may have another current folder."""
        self.checkpoint = self.path / "checkpoint"
        self.logs = self.absolute / "logs"
        """What the actors' processes write to stderr (`forge.mesh.Cluster`), made by the first of them."""
        self.metrics_path = self.path / "metrics.jsonl"
        self.evaluations_path = self.path / "evaluations.jsonl"
        """Made by the first evaluation."""
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: RunFolderError | None = None
        self._told = self._closed = False
        try:
            if last_step is not None:
                self._open(tensorboard, last_step)
                _replace_config(self.path / "config.yaml", config_yaml)
            else:
                _write_config(self.path / "config.yaml", config_yaml)
                try:
                    self._open(tensorboard, None)
                except BaseException:
                    for file in self.path.iterdir():
                        file.unlink()
                    raise
        except BaseException as error:
            if made:
                with suppress(OSError):
                    self.path.rmdir()
            if isinstance(error, OSError):
                raise _creation_error(self.path, error) from error
            raise
        self._thread = threading.Thread(target=self._work, name="run-folder", daemon=True)
        self._thread.start()

    def _open(self, tensorboard: bool, last_step: int | None) -> None:
        self._metrics = _AppendOnly(self.metrics_path, alone=True)
        self._episodes = _AppendOnly(self.path / "episodes.jsonl")
        if last_step is not None:
            self._metrics.cut(last_step)
            self._episodes.cut(last_step)
        self._evaluations: _AppendOnly | None = None
        if last_step is not None and self.evaluations_path.exists():
            self._evaluations = _AppendOnly(self.evaluations_path)
            self._evaluations.cut(last_step)
        self._events = _EventFile(self.path, last_step) if tensorboard else None

    def write(self, row: Row, episodes: Sequence[EpisodeRecord] = ()) -> None:
        """Hands one row (see `make_row`) and its sampled episodes to the writer; never waits.

        Raises RunFolderError when an earlier write failed, or when the disk is so far behind that
        the queue is full.
        """
        texts = b"".join(_episode_line(row["step"], episode) for episode in episodes)
        line, now = _json_line(row), time.time()
        self._put(lambda: self._guard(self._metrics, self._append, row, line, texts, now))

    def write_evaluation(self, row: Row) -> None:
        """The same with the figures of one evaluation, for evaluations.jsonl; `step` only grows."""
        line, now = _json_line(row), time.time()
        self._put(lambda: self._append_evaluation(row, line, now))

    def _put(self, write: Callable[[], None]) -> None:
        self._raise_failure()
        if self._queue.qsize() >= _QUEUED_STEPS:
            self._told = True
            raise RunFolderError(
                f"the disk is {_QUEUED_STEPS} steps behind in {self.path} and the queue holds no more; "
                "give --run.dir a folder on a disk that answers"
            )
        self._queue.put(write)

    def close(self, timeout_s: float = 30.0) -> None:
        """Writes what is queued, syncs, closes; a second call does nothing.

        Raises RunFolderError when a write failed and nobody was told yet, or when the disk has not
        answered within `timeout_s`.
        """
        if self._closed:
            return
        self._closed = True
        timeout_s = min(timeout_s, 1.0) if self._told else timeout_s
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._told:
            return
        if self._thread.is_alive():
            raise RunFolderError(
                f"the disk has not taken the last {self._queue.qsize():,} steps of {self.path} within "
                f"{timeout_s:g} s; those rows are lost; give --run.dir a folder on a disk that answers"
            )
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._told = True
            raise self._failure

    def _work(self) -> None:
        while (write := self._queue.get()) is not None:
            if self._failure is None:
                write()
        for file in (self._metrics, self._episodes, self._evaluations, self._events):
            if file is not None:
                self._guard(file, file.close)

    def _append(self, row: Row, line: bytes, episodes: bytes, wall_time: float) -> None:
        self._metrics.append(line)
        if episodes:
            self._guard(self._episodes, self._episodes.append, episodes)
        if self._events is not None:
            self._guard(self._events, self._events.append_row, row, wall_time)

    def _append_evaluation(self, row: Row, line: bytes, wall_time: float) -> None:
        if self._evaluations is None:
            try:
                self._evaluations = _AppendOnly(self.evaluations_path)
            except OSError as error:
                self._failure = folder_error(self.evaluations_path, error)
                return
        self._guard(self._evaluations, self._evaluations.append, line)
        if self._events is not None:
            self._guard(self._events, self._events.append_row, row, wall_time)

    def _guard(self, file: _AppendOnly, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except OSError as error:
            self._failure = self._failure or folder_error(file.path, error)
        except Exception as error:  # a thread that ends in silence would lose every later row
            self._failure = self._failure or RunFolderError(f"cannot write {file.path}: {error!r}")


def _claim(dir: str | Path | None, name: str) -> tuple[Path, bool]:
    """The folder, and whether it was made here."""
    stem = f"{_slug(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        if dir is not None:
            check_dir(dir)
            made = not Path(dir).exists()
            Path(dir).mkdir(parents=True, exist_ok=True)
            return Path(dir), made
        Path("runs").mkdir(exist_ok=True)
        for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
            with suppress(FileExistsError):
                path = Path("runs") / (stem + suffix)
                path.mkdir()
                return path, True
    except OSError as error:
        raise _creation_error(Path(dir or "runs"), error) from error
    raise ConfigError(f"runs/{stem} and 998 folders like it are taken; give --run.dir a folder")


def _write_config(path: Path, text: str) -> None:
    # Made exclusively: of two runs that were given one folder, the second stops here.
    config = _AppendOnly(path, new=True)
    try:
        config.append(text.encode())
        config.close()
    except OSError:
        path.unlink()
        raise


def _replace_config(path: Path, text: str) -> None:
    """The configuration that the run goes on with; the one before stays beside it under a number."""
    before = path.read_text(encoding="utf-8")
    if before == text:
        return
    number = next(n for n in itertools.count(1) if not path.with_name(f"config.{n}.yaml").exists())
    os.link(path, path.with_name(f"config.{number}.yaml"))
    new = path.with_name("config.yaml.new")
    new.unlink(missing_ok=True)
    _write_config(new, text)
    new.rename(path)


def _slug(name: str) -> str:
    last = name.rstrip("/").rpartition("/")[2]
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in last).strip(".") or "run"


def _creation_error(path: Path, error: OSError) -> ConfigError | RunFolderError:
    if isinstance(error, FileExistsError) or error.errno in _WRONG_FOLDER:
        return ConfigError(
            f"run folder {path} cannot be made: {error.strerror}; give --run.dir a folder that you can write"
        )
    return folder_error(path, error)


def _episode_line(step: Number | None, episode: EpisodeRecord) -> bytes:
    reward = float(episode.reward)
    fields = asdict(episode) | {"reward": reward if math.isfinite(reward) else None}
    if not episode.pieces:
        del fields["pieces"]
    return _json_line({"step": step, **fields, "versions": [int(v) for v in episode.versions]})


def _json_line(record: Row | dict[str, Any]) -> bytes:
    # Model output may hold lone surrogates, which UTF-8 refuses; as \udXXX they are legal JSON.
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode("utf-8", "backslashreplace")
