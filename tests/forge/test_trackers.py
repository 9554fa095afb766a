"""Laws of forge/trackers.py: rows reach a tracker, nobody waits for it, and what goes wrong in it ends only itself.

Against the real packages, from an interpreter that has them: FORGE_TRACKERS_PYTHON=X/bin/python pytest -m soak
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from forge import trackers
from forge.errors import ConfigError
from forge.metrics import METRIC_KEYS
from forge.run_log import RunConfig, RunLog, check_run
from forge.trackers import Place, Trackers

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("FORGE_TRACKERS_PYTHON", "")


class FakeWandb(ModuleType):
    """Its calls, as our code makes them; `log` may be held up or fail."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.options: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.ended: list[int] = []
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None
        self.Settings = SimpleNamespace

    def init(self, **options: Any) -> FakeWandb:
        self.options = options
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, row: dict[str, Any]) -> None:
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return fake


def opened(folder: Path, told: list[str]) -> Trackers:
    return Trackers(Place(folder, {"trainer.lr": 0.1}, "nano"), wandb="sums", told=told.append)


def test_a_run_writes_its_rows_and_evaluations_and_goes_on_under_its_name(wandb: FakeWandb, tmp_path: Path) -> None:
    cfg = RunConfig(dir=str(tmp_path / "run"), wandb="sums", progress=False, tensorboard=False)
    values = dict.fromkeys(METRIC_KEYS, 0) | {"step": 1, "policy_version": 1, "loss/kl": None}
    with RunLog(cfg, "model: nano\n", 1) as log:
        log.step(values)
        log.evaluation({"step": 1, "eval/pass@1": 0.5})
    first = wandb.options
    assert (first["project"], first["mode"], first["config"]) == ("sums", "offline", {"model": "nano"})
    assert [row["step"] for row in wandb.rows] == [1, 1]
    assert "loss/kl" not in wandb.rows[0]
    assert wandb.rows[1]["eval/pass@1"] == 0.5
    assert wandb.ended == [0]
    opened(tmp_path / "run", []).close()
    assert wandb.options["id"] == first["id"]


def test_a_tracker_that_hangs_holds_nobody_up_and_what_it_missed_is_counted(
    wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "QUEUED", 2)
    wandb.go.clear()
    told: list[str] = []
    both = opened(tmp_path, told)
    for step in range(10):
        both.log({"step": step})
    assert both.dropped >= 7
    both.close(seconds=0.1)
    assert "still writes after" in told[0]
    assert "did not get" in told[1]
    wandb.go.set()


def test_an_error_is_told_once_and_ends_the_tracker_alone(wandb: FakeWandb, tmp_path: Path) -> None:
    wandb.error = RuntimeError("402 payment required")
    told: list[str] = []
    both = opened(tmp_path, told)
    for step in range(3):
        both.log({"step": step})
    both.close()
    both.close()
    assert told[0] == "Weights & Biases gets no more rows, training goes on: RuntimeError: 402 payment required"
    assert len(told) == 2, "that, and how many rows it did not get"
    assert wandb.ended == []


def test_a_run_that_failed_is_told_as_such(wandb: FakeWandb, tmp_path: Path) -> None:
    cfg = RunConfig(dir=str(tmp_path / "run"), wandb="sums", progress=False, tensorboard=False)
    with pytest.raises(KeyError), RunLog(cfg, "model: nano\n", 1):
        raise KeyError
    assert wandb.ended == [1]


@pytest.mark.parametrize("option", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_named_before_anything_starts(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    cfg = RunConfig(wandb="x") if option == "wandb" else RunConfig(mlflow="x")
    with pytest.raises(ConfigError, match=rf"run\.{option} is 'x'.*`pip install {option}`, or leave run\.{option} out"):
        check_run(cfg)


REAL = """
import json, sys
from pathlib import Path
from forge.trackers import Place, Trackers
folder, told = Path(sys.argv[1]), []
for begin in (1, 4):  # a run, and the same one resumed
    place = Place(folder, {"trainer.lr": 0.1}, "nano")
    both = Trackers(place, wandb="sums", mlflow=str(folder / "ml"), told=told.append)
    for step in range(begin, begin + 3):
        both.log({"step": step, "reward/mean": step / 10, "eval/pass@1": 0.5, "loss/kl": None})
    both.close(seconds=240)
from mlflow.tracking import MlflowClient
client = MlflowClient(f"sqlite:///{folder}/ml/mlflow.db")
run = client.get_run((folder / "mlflow_id").read_text())
history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward/mean")]
print(json.dumps([told, sorted(history), sorted(run.data.metrics), run.data.params, run.info.status]))
"""


@pytest.mark.soak
@pytest.mark.skipif(not PYTHON, reason="FORGE_TRACKERS_PYTHON names no interpreter with wandb and mlflow")
def test_both_real_packages_take_a_run_and_its_resume(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    ran = subprocess.run(
        [PYTHON, "-c", REAL, str(tmp_path)],
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told, history, metrics, params, status = json.loads(ran.stdout.splitlines()[-1])
    assert told == []
    assert history == [[step, step / 10] for step in range(1, 7)]
    assert metrics == ["eval/pass_at_1", "reward/mean"]
    assert (params, status) == ({"trainer.lr": "0.1"}, "FINISHED")
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 2
