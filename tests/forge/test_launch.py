"""Whole runs as a user starts them: what is printed, the exit code, and that no process stays behind."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge.errors import LaunchError
from forge.launch import INTERFACE_ENV, _ip_of_interface, configure_monarch

APP = Path(__file__).parent / "launch_app.py"
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MARK = "LAUNCH_TEST"


class App:
    """One run of the test app, in a session of its own as if in a terminal."""

    def __init__(self, folder: Path, command: list[str], what: str) -> None:
        self.mark = uuid.uuid4().hex
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        env |= {MARK: self.mark, "PYTHONPATH": str(APP.parents[2])}
        self.error = folder / f"stderr-{self.mark}"
        with self.error.open("w") as file:
            self.process = subprocess.Popen(
                [*command, str(APP), what],
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )

    def until(self, word: str) -> list[str]:
        """The words of the first line of output that starts with `word`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.split()
        raise AssertionError(f"the output ended without {word!r}; stderr:\n{self.error.read_text()}")

    def finish(self) -> tuple[int, list[str], str]:
        """Exit code, lines of output, stderr; no process of the run may be alive a little later."""
        output, _ = self.process.communicate(timeout=120)
        deadline = time.monotonic() + 10
        while left := self.processes():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)
        return self.process.returncode, output.splitlines(), self.error.read_text()

    def processes(self) -> list[str]:
        """Command lines of the live processes that descend from this run, orphans included."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found


@pytest.fixture
def apps(tmp_path: Path) -> Iterator[list[App]]:
    """The runs that a test starts; killed if the test fails half-way."""
    # A foreign package in the current directory must not be taken for ours.
    (tmp_path / "forge").mkdir()
    (tmp_path / "forge" / "__init__.py").write_text("raise ImportError('the wrong forge')")
    started: list[App] = []
    yield started
    for app in started:
        if app.process.poll() is None:
            os.killpg(app.process.pid, signal.SIGKILL)
            app.process.wait()
        assert app.process.stdout is not None
        app.process.stdout.close()


def start(apps: list[App], folder: Path, what: str, command: list[str] = PYTHON) -> App:
    apps.append(App(folder, command, what))
    return apps[-1]


def test_a_run_that_does_all_it_was_asked_exits_with_0(apps: list[App], tmp_path: Path) -> None:
    code, output, error = start(apps, tmp_path, "nothing").finish()
    assert code == 0, error
    assert output[0] == "rank 0 False 1 []"
    assert output[-1] == "done"


def test_ctrl_c_finishes_the_step_and_exits_with_130(apps: list[App], tmp_path: Path) -> None:
    app = start(apps, tmp_path, "wait")
    app.until("ready")
    os.killpg(app.process.pid, signal.SIGINT)
    code, output, error = app.finish()
    assert code == 130, error
    assert output == ["checkpoint written", "done"]
    assert "stopping after this step; press Ctrl-C again to stop now" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("delay_s", [0.3, 1.0])
def test_ctrl_c_during_start_up_ends_the_run_at_once(apps: list[App], tmp_path: Path, delay_s: float) -> None:
    app = start(apps, tmp_path, "wait")
    time.sleep(delay_s)
    os.killpg(app.process.pid, signal.SIGINT)
    code, _, _ = app.finish()
    # Python's own way to end on Ctrl-C while it still imports: by the signal, which a shell shows as 130.
    assert code in (130, -signal.SIGINT)


@pytest.mark.parametrize(
    ("what", "code", "last_line"),
    [
        ("local", 1, "ZeroDivisionError: nothing to divide by"),
        ("remote", 1, "KeyError: 'mine'"),
        ("config", 2, "ConfigError: mesh.trainer.procs must be >= 1, got 0"),
    ],
)
def test_an_error_is_shown_once_with_its_own_traceback(
    apps: list[App], tmp_path: Path, what: str, code: int, last_line: str
) -> None:
    returned, _, error = start(apps, tmp_path, what).finish()
    assert returned == code, error
    assert error.rstrip().splitlines()[-1] == last_line
    assert error.count("most recent call last") == (0 if what == "config" else 1)
    assert "ExceptionGroup" not in error


def test_a_killed_actor_ends_the_run_and_is_named(apps: list[App], tmp_path: Path) -> None:
    code, _, error = start(apps, tmp_path, "kill").finish()
    assert code == 1
    assert (
        error.rstrip()
        .splitlines()[-1]
        .startswith("ActorFailed: actor trainer_0 failed: its process was killed by SIGKILL")
    )
    assert "Traceback" not in error


def test_when_the_controller_is_killed_every_process_of_the_run_dies(apps: list[App], tmp_path: Path) -> None:
    app = start(apps, tmp_path, "wait")
    _, controller, orphan, *_ = app.until("ready")
    assert Path("/proc", orphan).exists()
    os.kill(int(controller), signal.SIGKILL)
    code, _, _ = app.finish()
    assert code == -signal.SIGKILL


def test_in_debug_mode_the_actors_are_in_the_one_process(apps: list[App], tmp_path: Path) -> None:
    app = start(apps, tmp_path, "debug")
    assert app.until("rank")[:3] == ["rank", "0", "True"]
    code, _, error = app.finish()
    assert code == 0, error


def test_torchrun_on_one_node_gives_the_trainer_its_ranks(apps: list[App], tmp_path: Path) -> None:
    app = start(apps, tmp_path, "wait", [*TORCHRUN, "--nproc-per-node", "2"])
    assert app.until("rank") == ["rank", "0", "False", "1", "[]"]
    assert app.until("rank") == ["rank", "1", "False", "1", "[]"]
    _, controller, *_ = app.until("ready")
    # torchrun's agent passes a Ctrl-C on to its workers.
    os.kill(app.process.pid, signal.SIGINT)
    _, output, error = app.finish()
    assert output == ["checkpoint written", "done"]
    assert "stopping after this step" in error
    assert not Path("/proc", controller).exists()


@pytest.mark.soak
@pytest.mark.parametrize("what", ["nothing", "kill", "wait"])
def test_two_nodes_run_one_trainer_over_both(apps: list[App], tmp_path: Path, what: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *TORCHRUN,
        *("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "test"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}"),
    ]
    nodes = [start(apps, tmp_path, what, command) for _ in range(2)]
    if what == "wait":
        # Either agent may have started the controller, the only process that prints.
        outputs = {node.process.stdout.fileno(): node for node in nodes if node.process.stdout}
        (speaking,), _, _ = select.select(list(outputs), [], [], 90)
        os.kill(int(outputs[speaking].until("ready")[1]), signal.SIGKILL)
    ended = [node.finish() for node in nodes]
    codes = [code for code, _, _ in ended]
    output = [line for _, lines, _ in ended for line in lines]
    if what == "nothing":
        assert [line for line in output if line.startswith("rank")] == [f"rank {i} False 1 []" for i in range(4)]
        assert codes == [0, 0], ended
        assert "done" in output
    elif what == "kill":
        assert codes == [1, 1], ended
        assert any("actor trainer_0 failed: rank 0 of 4" in error for _, _, error in ended), ended
    else:
        assert codes == [1, 1], ended
        assert any("the controller is gone" in error for _, _, error in ended), ended


def test_nodes_talk_over_the_interface_that_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", INTERFACE_ENV):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert _ip_of_interface() == ""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    monkeypatch.setenv(INTERFACE_ENV, "lo")
    assert _ip_of_interface() == "127.0.0.1"
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "mine")
    monkeypatch.setenv(INTERFACE_ENV, "nosuch0")
    with pytest.raises(LaunchError, match=r"is 'nosuch0', which has no IPv4 address here .* there are .*lo"):
        _ip_of_interface()


def test_settings_come_into_force_although_monarch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import monarch.config

    def in_force() -> str:
        return str(monarch.config.get_global_config()["mesh_terminate_timeout"])

    before = in_force()
    monkeypatch.delenv("HYPERACTOR_MESH_TERMINATE_TIMEOUT", raising=False)
    try:
        configure_monarch({"HYPERACTOR_MESH_TERMINATE_TIMEOUT": "7s"})
        assert in_force() == "7s" != before
        configure_monarch({"HYPERACTOR_MESH_TERMINATE_TIMEOUT": "9s"})
        assert in_force() == "7s", "what is in the environment already, the user's own choice, wins"
    finally:
        os.environ["HYPERACTOR_MESH_TERMINATE_TIMEOUT"] = before
        configure_monarch({})
        assert in_force() == before
