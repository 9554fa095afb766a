"""A run's rows to experiment trackers besides its folder: Weights & Biases and MLflow, where they are installed.

    trackers = Trackers(folder, config, wandb="my-project", mlflow="mlruns", told=log.note)
    trackers.log(row); trackers.close()

Who waits: nobody. Each tracker has a thread of its own, which imports its package, starts it and writes; rows wait in a
queue of `QUEUED` and are dropped and counted where that is full. What goes wrong in a tracker is told once and ends
nothing but that tracker.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forge.errors import ConfigError

QUEUED = 1024
CLOSE_S = 30.0
"""How long the end of a run waits for a tracker that still writes."""
_MOST_AT_ONCE = 1000
"""Metrics of one MLflow request, its own limit."""

Numbers = Mapping[str, "int | float | None"]


class Tracker(Protocol):
    """One package; used from one thread."""

    def start(self) -> None: ...

    def log(self, row: Numbers, unix_s: float) -> None: ...

    def close(self, failed: bool) -> None: ...


@dataclass
class Place:
    """What a tracker is told of a run: its folder, its configuration by dotted key, the name of its model."""

    folder: Path
    config: Mapping[str, Any]
    name: str


def check(option: str, package: str, value: str) -> None:
    """Raises ConfigError where `option` asks for a package that is not installed."""
    if value and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{option} is {value!r}, and the package {package} is not installed; `pip install {package}`, or leave "
            f"{option} out"
        )


class Wandb:
    """Weights & Biases. Without WANDB_API_KEY it writes into the run folder, for `wandb sync`; WANDB_MODE decides."""

    def __init__(self, project: str, place: Place) -> None:
        self._project, self._place = project, place

    def start(self) -> None:
        wandb: Any = importlib.import_module("wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = wandb.init(
            project=self._project,
            name=self._place.folder.name,
            id=_identity(self._place.folder / "wandb_id"),
            resume="allow",
            dir=str(self._place.folder),
            config=dict(self._place.config),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )
        # Rows of a resumed run, and evaluations, come with steps of their own; W&B's would have to grow.
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Numbers, unix_s: float) -> None:
        self._run.log({key: value for key, value in row.items() if value is not None})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Mlflow:
    """MLflow by its client, which has no state of the process's own."""

    def __init__(self, uri: str, place: Place) -> None:
        """uri: a tracking server, a database, or a folder, which holds a database then."""
        self._uri, self._place = uri, place

    def start(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        tracking: Any = importlib.import_module("mlflow.tracking")
        self._entities: Any = importlib.import_module("mlflow.entities")
        uri = self._uri
        if "://" not in uri and uri != "databricks":
            folder = Path(uri).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{folder}/mlflow.db"
        self._client = tracking.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(self._place.name)
        experiment = found.experiment_id if found else self._client.create_experiment(self._place.name)
        known = self._place.folder / "mlflow_id"
        if known.exists():
            self._id = known.read_text(encoding="utf-8")
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=self._place.folder.name).info.run_id
        known.write_text(self._id, encoding="utf-8")
        params = [self._entities.Param(_plain(key), str(value)[:6000]) for key, value in self._place.config.items()]
        for begin in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[begin : begin + 100])

    def log(self, row: Numbers, unix_s: float) -> None:
        step, at_ms = int(row["step"] or 0), int(unix_s * 1000)
        metrics = [
            self._entities.Metric(_plain(key), float(value), at_ms, step)
            for key, value in row.items()
            if value is not None and key != "step"
        ]
        for begin in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MOST_AT_ONCE])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _plain(key: str) -> str:
    """A key with nothing that MLflow refuses, such as the @ of pass@1."""
    return re.sub(r"[^\w\-./ :]", "_at_" if "@" in key else "_", key)


def _identity(path: Path) -> str:
    """The run's name at the tracker; the same one when the run is resumed."""
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
    return path.read_text(encoding="utf-8")


class _Line:
    """One tracker behind its queue and its thread."""

    def __init__(self, name: str, tracker: Tracker, told: Callable[[str], object]) -> None:
        self._name, self._tracker, self._told = name, tracker, told
        self._rows: queue.Queue[tuple[Numbers, float]] = queue.Queue(QUEUED)
        self._ending, self._failed, self._broken = threading.Event(), False, False
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def log(self, row: Numbers) -> None:
        try:
            self._rows.put_nowait((row, time.time()))
        except queue.Full:
            self.dropped += 1

    def close(self, failed: bool, seconds: float) -> None:
        self._failed = failed
        self._ending.set()
        self._thread.join(seconds)
        if self._thread.is_alive() or self._broken:
            self.dropped += self._rows.qsize()
        if self._thread.is_alive():
            self._told(f"{self._name} still writes after {seconds:.1f} s and is left behind")
        if self.dropped:
            self._told(f"{self._name} did not get {self.dropped:,} rows; metrics.jsonl has them")

    def _work(self) -> None:
        try:
            self._tracker.start()
            while not (self._ending.is_set() and self._rows.empty()):
                with suppress(queue.Empty):
                    self._tracker.log(*self._rows.get(timeout=0.1))
            self._tracker.close(self._failed)
        except Exception as error:
            self._broken = True
            self._told(f"{self._name} gets no more rows, training goes on: {type(error).__name__}: {error}")


class Trackers:
    """All that a run is configured to write to. For one thread; `told` is called from theirs."""

    def __init__(self, place: Place, *, wandb: str = "", mlflow: str = "", told: Callable[[str], object]) -> None:
        """wandb: a project. mlflow: a tracking URI or a folder. "" of either is none."""
        made: Sequence[tuple[str, Tracker | None]] = (
            ("Weights & Biases", Wandb(wandb, place) if wandb else None),
            ("MLflow", Mlflow(mlflow, place) if mlflow else None),
        )
        self._lines = [_Line(name, tracker, told) for name, tracker in made if tracker is not None]

    @property
    def dropped(self) -> int:
        """Rows that a tracker did not get."""
        return sum(line.dropped for line in self._lines)

    def log(self, row: Numbers) -> None:
        """Hands a row over, with a `step`; never waits."""
        for line in self._lines:
            line.log(row)

    def close(self, *, failed: bool = False, seconds: float = CLOSE_S) -> None:
        """Waits `seconds` in all at most for what is queued; a second call does nothing."""
        lines, self._lines = self._lines, []
        until = time.monotonic() + seconds
        for line in lines:
            line.close(failed, max(0.0, until - time.monotonic()))
