"""Two machines on one: network, process, mount and host-name namespaces, so that nothing passes but by the cable.

Each machine has an address of its own, its own /dev/shm and its own process numbers; abstract unix sockets belong to a
network namespace, and pidfds to a process one. They share the disk, as machines of a cluster share a folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil
from environs import variable

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29511
MARK = "MESHFORGE_TWO_MACHINES"
_NOBODY = "02:00:00:00:00:99"
_ENTER = 'mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def why_not() -> str:
    """What keeps this machine from being two; "" where nothing does."""
    if os.geteuid() != 0:
        return "namespaces with a cable between them need root"
    try:
        with_cable = ["unshare", "--net", "--pid", "--fork", "--mount", "--uts", "ip", "link", "add", "type", "veth"]
        subprocess.run(with_cable, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no namespaces here: {error}"
    return ""


class Machines:
    """Two machines with a cable; `with` takes them down, with every process on them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.mark = uuid.uuid4().hex
        self._names = [f"mf{self.mark[:6]}{index}" for index in (0, 1)]
        self._started: list[Node] = []

    def __enter__(self) -> Machines:
        hosts = "".join(f"{ip} {name}\n" for ip, name in zip(ADDRESSES, self._names, strict=True))
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        first, second = self._names
        try:
            for name in self._names:
                _ip("netns", "add", name)
            _ip("link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
            for name, address in zip(self._names, ADDRESSES, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
                _ip("-n", name, "link", "set", name, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._started:
            node.kill()
        for process in marked(self.mark):
            process.kill()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def start(self, index: int, command: Sequence[str], **env: str) -> Node:
        """Runs `command` on machine `index`; its output goes to a file of the folder."""
        name = self._names[index]
        enter = ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        shell = ["sh", "-c", _ENTER, "sh", str(self._folder / "hosts"), name]
        log = self._folder / f"{name}_{len(self._started)}.log"
        node = Node([*enter, *shell, *command], log, {**os.environ, **env, MARK: f"{self.mark}/{index}"})
        self._started.append(node)
        return node

    def torchrun(self, index: int, app: Path, *options: str) -> Node:
        """Machine `index` takes its part in a run of `app` over both."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={index}"]
        command += ["--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}", str(app), *options]
        return self.start(index, command, OMP_NUM_THREADS="1")

    def cut(self) -> None:
        """The cable is cut as far as anybody can tell: what is sent arrives nowhere, and no link goes down."""
        for name, other in zip(self._names, reversed(ADDRESSES), strict=True):
            _ip("-n", name, "neigh", "replace", other, "lladdr", _NOBODY, "dev", name, "nud", "permanent")

    def mend(self) -> None:
        """What `cut` did is undone."""
        for name, other in zip(self._names, reversed(ADDRESSES), strict=True):
            _ip("-n", name, "neigh", "del", other, "dev", name)

    def processes(self, index: int) -> list[psutil.Process]:
        """What runs on machine `index`."""
        return marked(f"{self.mark}/{index}")

    def torchrun_agent(self, index: int) -> psutil.Process:
        """The launcher on machine `index`, to which a terminal or a cluster sends its signals."""
        (agent,) = [
            process
            for process in self.processes(index)
            if process.cmdline()[:3] == [sys.executable, "-m", "torch.distributed.run"]
        ]
        return agent

    def run(self, index: int, *command: str) -> str:
        """The output of a command in the network of machine `index`."""
        return subprocess.run(
            ["ip", "netns", "exec", self._names[index], *command], check=True, capture_output=True, text=True
        ).stdout


class Node:
    """What was started on a machine."""

    def __init__(self, command: Sequence[str], log: Path, env: dict[str, str]) -> None:
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, cwd=log.parent
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """The machine goes without a word: SIGKILL of all its processes."""
        self.process.kill()
        self.process.wait()

    def wait(self, timeout_s: float) -> int:
        """The exit code; fails after `timeout_s`."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.output}") from None


def marked(mark: str) -> list[psutil.Process]:
    """Live processes whose environment has the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if variable(process, MARK).startswith(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def gone(machines: Machines, timeout_s: float = 10.0) -> list[str]:
    """Command lines of what still runs on either machine after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := marked(machines.mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [" ".join(process.cmdline()) for process in left]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)
