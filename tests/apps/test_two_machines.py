"""Runs over two machines, by torchrun as a user starts it: that they learn, and what a lost machine or cable means."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from app_run import APP, NANO
from two_machines import Machines, Node, gone, why_not

from forge.nodes import SILENCE_S

START_S = 400.0
"""Far above the minute in which two machines start a run; the generator's engine takes most of it."""
END_S = 120.0
"""Far above the half minute within which a run ends that has lost a node."""
APART = ["--mesh.pools={train: 1, rollout: 1}", "--mesh.trainer.pool=train", "--mesh.generator.pool=rollout"]
TOGETHER = ["--mesh.pools={all: 2}", "--mesh.trainer.pool=all", "--mesh.generator.pool=all"]

_WHY_NOT = why_not()
pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)]


class Run:
    """One run over both machines; `folder` is its run folder."""

    def __init__(self, machines: Machines, folder: Path, *options: str) -> None:
        self.folder, self._machines = folder, machines
        self.nodes: list[Node] = []
        self.start(*NANO, f"--run.dir={folder}", *options)

    def start(self, *options: str) -> None:
        self.nodes = [self._machines.torchrun(index, APP, *options) for index in (0, 1)]

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            said = "\n".join(node.output for node in self.nodes)
            assert self.nodes[0].process.poll() is None, f"the run ended before {what}:\n{said}"
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}:\n{said}"
            time.sleep(0.1)

    def end(self, timeout_s: float) -> list[int]:
        """Exit codes of both nodes; nothing of the run is left on either."""
        codes = [node.wait(timeout_s) for node in self.nodes]
        assert not (left := gone(self._machines)), left
        return codes


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(tmp_path) as both:
        yield both


def error(node: Node) -> str:
    """The one line that says why the run ended."""
    lines = [line for line in node.output.splitlines() if line.startswith("ActorFailed")]
    assert len(lines) == 1, node.output
    return lines[0]


@pytest.mark.parametrize("transport", ["auto", "rdma", "file"])
def test_the_trainer_on_one_machine_and_the_generator_on_the_other_learn(
    machines: Machines, tmp_path: Path, transport: str
) -> None:
    run = Run(machines, tmp_path / "run", *APART, f"--weightsync.transport={transport}", "--trainer.steps=40")
    assert run.end(START_S) == [0, 0], run.nodes[0].output
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert max(row["staleness/max"] for row in rows) <= 1, "weights have come: old ones would not have been trained on"
    first, last = (sum(row["reward/mean"] for row in some) / 10 for some in (rows[:10], rows[-10:]))
    assert last > first
    assert len(list(run.folder.glob("checkpoint/model.safetensors"))) == 1


def test_a_trainer_that_spans_both_machines_gets_its_batches_by_message(machines: Machines, tmp_path: Path) -> None:
    run = Run(machines, tmp_path / "run", *TOGETHER, "--mesh.trainer.procs=2", "--trainer.steps=4")
    assert run.end(START_S) == [0, 0], run.nodes[0].output
    assert len(run.rows()) == 4


@pytest.mark.parametrize("fault", ["killed", "cut"])
def test_a_lost_machine_ends_the_run_with_its_name_and_the_run_can_be_resumed(
    machines: Machines, tmp_path: Path, fault: str
) -> None:
    run = Run(machines, tmp_path / "run", *APART, "--trainer.steps=5000", "--run.checkpoint_every=2")
    run.wait_until(lambda: len(run.rows()) >= 5, "five steps")
    if fault == "killed":
        run.nodes[1].kill()
    else:
        machines.cut()
    codes = run.end(END_S)
    assert codes[0] == 1
    assert codes[1] != 0
    said = error(run.nodes[0])
    assert said.startswith("ActorFailed: actor generator_0 failed: node 1 (10.77.0.2) is lost: ")
    if fault == "cut":
        assert f"nothing was heard from it for {SILENCE_S} s" in said
        assert "the controller is gone, or the network to it" in run.nodes[1].output
        machines.mend()
    done = len(run.rows())
    run.start(f"--resume={run.folder}", f"--trainer.steps={done + 3}")
    assert run.end(START_S) == [0, 0], run.nodes[0].output
    assert [row["step"] for row in run.rows()] == list(range(1, done + 4))


def test_when_all_nodes_are_told_to_end_the_step_ends_and_the_checkpoint_is_written(
    machines: Machines, tmp_path: Path
) -> None:
    run = Run(machines, tmp_path / "run", *APART, "--trainer.steps=5000")
    run.wait_until(lambda: len(run.rows()) >= 2, "two steps")
    for index in (1, 0):  # the far one first: it must not end before the controller says so
        machines.torchrun_agent(index).send_signal(signal.SIGINT)
    run.end(END_S)
    assert "stopping after this step" in run.nodes[0].output
    assert "is lost" not in run.nodes[0].output
    assert (run.folder / "checkpoint" / "model.safetensors").exists()
    assert len(list(run.folder.glob("checkpoints/*"))) == 1


def test_when_the_controllers_machine_is_killed_the_other_ends(machines: Machines, tmp_path: Path) -> None:
    run = Run(machines, tmp_path / "run", *APART, "--trainer.steps=5000")
    run.wait_until(lambda: run.rows(), "a step")
    run.nodes[0].kill()
    assert run.end(END_S)[1] == 1
    assert "the controller is gone" in run.nodes[1].output


def test_a_replica_on_a_lost_machine_is_given_up_and_the_run_goes_on_with_the_other(
    machines: Machines, tmp_path: Path
) -> None:
    options = [*TOGETHER, "--mesh.trainer.procs=1", "--mesh.generator.replicas=2"]
    run = Run(machines, tmp_path / "run", *options, "--trainer.steps=5000")
    run.wait_until(lambda: run.rows(), "a step")
    run.nodes[1].kill()
    run.wait_until(lambda: "the run goes on with generator_0" in run.nodes[0].output, "the other to be given up", END_S)
    rows = len(run.rows())
    run.wait_until(lambda: len(run.rows()) > rows + 5, "steps with one generator", END_S)
    assert max(row["staleness/max"] for row in run.rows()) <= 1
