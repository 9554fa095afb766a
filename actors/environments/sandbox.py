"""Runs code that nobody has read: for rewards that execute what a policy wrote, and for tools that it calls.

    sandbox = Sandbox(SandboxConfig(wall_s=5))
    result = await sandbox.run_python("print(input()[::-1])", stdin="abc")

Each run has a process tree of its own (`actors/environments/sandbox_child.py`) and waits for its end; the limits bound
that wait, and none of it happens on the event loop. Nothing outlives the call, also when it is cancelled or the caller
killed. How the program is kept in, one of two ways:

- *namespaces*: processes, network, mounts and IPC of its own, a root of a few read-only folders, writes into memory.
  For root, and for other users where the kernel allows them user namespaces.
- *filters*, in containers that forbid namespaces: seccomp, Landlock, and for root a user of its own for each run.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from actors.environments.sandbox_child import LENGTH_BYTES
from forge.errors import ConfigError, SandboxError

__all__ = ["Sandbox", "SandboxConfig", "SandboxResult"]

Reason = Literal["exit", "signal", "cpu", "wall", "memory", "processes", "disk", "start"]

_log = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 90.0
"""What a run may take besides the program's wall_s: start, end, a busy machine."""
_END_S = 75.0
_SCRIPT = "main.py"
_SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc"]
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    # One thread for each core of a big machine would be over the limit for processes.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass
class SandboxConfig:
    """What a program that nobody has read may use; over all its processes together unless said otherwise."""

    wall_s: float = 10.0
    """Seconds from start to end; a program that sleeps is killed then too."""
    cpu_s: float = 10.0
    """Seconds of processor time."""
    memory_bytes: int = 1 << 30
    """Resident memory, looked at twenty times a second."""
    address_space_bytes: int = 4 << 30
    """Address space of one process: an allocation beyond it fails, as when memory runs out."""
    disk_bytes: int = 64 << 20
    """What its files may hold; of collected files too. In namespaces they lie in memory, besides memory_bytes."""
    output_bytes: int = 64 << 10
    """What is kept of standard output, and of standard error; the rest is read and thrown away."""
    processes: int = 64
    """Processes and threads at a time."""
    open_files: int = 256
    """File descriptors of one process."""
    network: str = "deny"
    """deny: no sockets but pairs inside the program, Unix sockets included. allow: the network of this machine."""
    isolation: str = "auto"
    """namespaces, filters, or auto: namespaces where the kernel allows them."""
    readable: list[str] = field(default_factory=list)
    """Absolute paths that the program may read, besides the system's folders and Python's."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables besides PATH, LANG, HOME, TMPDIR and the like; none are inherited."""
    python: str = ""
    """The interpreter of run_python, an absolute path. Empty: the one that runs this."""

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit."""
        for name in ("wall_s", "cpu_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"sandbox.{name} must be > 0 and finite, got {getattr(self, name)}")
        least = {"memory_bytes": 16 << 20, "address_space_bytes": 64 << 20, "disk_bytes": 1 << 16, "output_bytes": 0}
        for name, limit in {**least, "processes": 1, "open_files": 8}.items():
            if getattr(self, name) < limit:
                raise ConfigError(f"sandbox.{name} must be >= {limit}, got {getattr(self, name)}")
        for name, allowed in (("network", ("deny", "allow")), ("isolation", ("auto", "namespaces", "filters"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"sandbox.{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for path in [*self.readable, *([self.python] if self.python else [])]:
            if not os.path.isabs(path) or not os.path.exists(path):
                raise ConfigError(f"sandbox.readable and sandbox.python take absolute paths that exist, got {path!r}")


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended."""

    exit_status: int | None
    """What it returned; None when a signal ended it."""
    signal: int | None
    """The signal that ended it, if one did."""
    reason: Reason
    """exit and signal are its own doing; cpu, wall, memory, processes, disk: the limit at which it was killed;
    start: there is no such program, exit_status is 127."""
    stdout: str
    """As UTF-8; other bytes are replaced."""
    stderr: str
    truncated: frozenset[str]
    """stdout, stderr: what was longer than output_bytes."""
    cpu_s: float
    wall_s: float
    peak_memory_bytes: int
    """The largest resident memory that was seen."""
    files: dict[str, bytes]
    """Collected files; what the program did not leave, or not as a regular file within disk_bytes, is missing."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with status 0."""
        return self.reason == "exit" and self.exit_status == 0


class Sandbox:
    """Runs programs, any number at once, under one configuration. Belongs to one event loop.

    How many run at once is up to the caller: each has up to memory_bytes + disk_bytes, and a core to itself.
    """

    def __init__(self, config: SandboxConfig) -> None:
        """Raises ConfigError, see `SandboxConfig.validate`; starts nothing."""
        config.validate()
        self._config = config
        self._isolation = ""
        self._checking = asyncio.Lock()

    async def check(self) -> str:
        """How programs are kept in, "namespaces" or "filters", by trying; later runs use that.

        SandboxError with what the kernel says when neither works. The first run calls this.
        """
        async with self._checking:
            if self._isolation:
                return self._isolation
            wanted = self._config.isolation
            failures = []
            for isolation in ("namespaces", "filters") if wanted == "auto" else (wanted,):
                try:
                    result = await self._run(isolation, [self._python(), "-I", "-S", "-c", ""], None, {}, ())
                except SandboxError as error:
                    failures.append(f"{isolation}: {error}")
                    continue
                if result.ok:
                    self._isolation = isolation
                    break
                failures.append(f"{isolation}: {self._python()} ended with {result.reason}, {result.stderr.strip()!r}")
            if not self._isolation:
                raise SandboxError(
                    f"this machine cannot keep a program in ({'; '.join(failures)}); allow user namespaces, or use a "
                    "kernel with Landlock (6.2) and a sandbox.python that every user can read"
                )
            if failures:
                _log.warning("sandbox: no namespaces, so seccomp and Landlock keep programs in (%s)", failures[0])
            return self._isolation

    async def run_python(
        self,
        source: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        collect: Sequence[str] = (),
    ) -> SandboxResult:
        """Runs `source` as main.py in the working folder, otherwise as `run`."""
        given = dict(files or {})
        if _SCRIPT in given:
            raise ValueError(f"files has a {_SCRIPT!r}, which is where the source goes; name it otherwise")
        argv = [self._python(), _SCRIPT]
        return await self.run(argv, stdin=stdin, files={**given, _SCRIPT: source}, collect=collect)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        collect: Sequence[str] = (),
    ) -> SandboxResult:
        """Runs a program in a fresh folder to its end, or to its first limit.

        argv: program and arguments. files: contents by name relative to the folder, put there before. collect: names
        read out after. Whatever the program does is in the result: ValueError is for arguments that cannot be,
        SandboxError for a sandbox that cannot be made.
        """
        isolation = self._isolation or await self.check()
        return await self._run(isolation, argv, stdin, files or {}, collect)

    def _python(self) -> str:
        return self._config.python or sys.executable

    async def _run(
        self,
        isolation: str,
        argv: Sequence[str],
        stdin: str | None,
        files: Mapping[str, str | bytes],
        collect: Sequence[str],
    ) -> SandboxResult:
        spec = json.dumps(self._spec(isolation, argv, stdin, files, collect)).encode()
        limit_s = self._config.wall_s + _GRACE_S
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _supervisor()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(limit_s):
                answer, complaint = await _converse(process, spec)
        except TimeoutError as error:
            raise SandboxError(f"waited {limit_s:g} s for the sandbox of {argv[0]}, in vain") from error
        finally:
            await _end(process)
        return _result(answer, complaint)

    def _spec(
        self,
        isolation: str,
        argv: Sequence[str],
        stdin: str | None,
        files: Mapping[str, str | bytes],
        collect: Sequence[str],
    ) -> dict[str, Any]:
        if not argv or not argv[0] or any("\0" in part for part in argv):
            raise ValueError(f"argv must be a program and its arguments, without NUL, got {list(argv)!r}")
        for name in (*files, *collect):
            _check_name(name)
        config = self._config
        names = ("wall_s", "cpu_s", "memory_bytes", "address_space_bytes", "disk_bytes", "output_bytes")
        return {
            **{name: getattr(config, name) for name in (*names, "processes", "open_files")},
            "namespaces": isolation == "namespaces",
            "network": config.network == "allow",
            "readable": [*_SYSTEM, *_python_folders(self._python()), *config.readable],
            "env": {**_ENVIRONMENT, **config.environment},
            "argv": list(argv),
            "stdin": _base64(stdin or ""),
            "files": {name: _base64(content) for name, content in files.items()},
            "collect": list(collect),
        }


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or str(path) != name or ".." in path.parts or name == "." or "\0" in name:
        raise ValueError(f"a file of a sandbox is named relative to its folder, such as 'data/in.txt', got {name!r}")


def _python_folders(python: str) -> list[str]:
    """What an interpreter needs to start: its own prefix and, of a virtual environment, that of its base."""
    if python == sys.executable:
        return [*dict.fromkeys((sys.prefix, sys.base_prefix, str(Path(python).resolve().parents[1])))]
    return [str(Path(python).parents[1]), str(Path(python).resolve().parents[1])]


def _base64(content: str | bytes) -> str:
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    return base64.b64encode(data).decode()


def _supervisor() -> str:
    return f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from actors.environments.sandbox_child import main; main()"


async def _converse(process: asyncio.subprocess.Process, spec: bytes) -> tuple[bytes, bytes]:
    """What the supervisor answers and what it complains of; standard input stays open, it is the lifeline."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(len(spec).to_bytes(LENGTH_BYTES, "little") + spec)
        await process.stdin.drain()
    return await asyncio.gather(process.stdout.read(), process.stderr.read())


async def _end(process: asyncio.subprocess.Process) -> None:
    """Cuts the lifeline and waits for the supervisor, and so for all that it stands for. Cancelling waits too."""
    assert process.stdin is not None
    process.stdin.close()
    ending = asyncio.ensure_future(_wait_or_kill(process))
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise


async def _wait_or_kill(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        _log.error("sandbox: supervisor %d did not end within %g s and is killed", process.pid, _END_S)
        process.kill()
        await process.wait()


def _result(answer: bytes, complaint: bytes) -> SandboxResult:
    try:
        parsed = json.loads(answer)
    except ValueError:
        said = complaint.decode(errors="replace").strip() or "nothing"
        raise SandboxError(f"the sandbox's own process died, saying: {said}") from None
    if "error" in parsed:
        raise SandboxError(parsed["error"])
    return SandboxResult(
        exit_status=parsed["exit_status"],
        signal=parsed["signal"],
        reason=parsed["reason"],
        stdout=base64.b64decode(parsed["stdout"]).decode(errors="replace"),
        stderr=base64.b64decode(parsed["stderr"]).decode(errors="replace"),
        truncated=frozenset(parsed["truncated"]),
        cpu_s=parsed["cpu_s"],
        wall_s=parsed["wall_s"],
        peak_memory_bytes=parsed["peak_memory_bytes"],
        files={name: base64.b64decode(content) for name, content in parsed["files"].items()},
    )
