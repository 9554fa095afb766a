"""What stands between a sandboxed program and the process that asked for it.

    caller ──spec──► supervisor ──fork──► first process ──fork──► program
      ▲  └─lifeline─────────────────────────┘    │ watches, drains, kills
      └────────────result────────────────────────┘

The supervisor waits for the first process. The first process, number 1 of its namespace, waits for the program, its
output, the limits and the lifeline: the pipe that the spec came through, whose end means that the caller is gone.
It ends after the last of the program's descendants. Its own death takes them with it: in a namespace the kernel sees
to that.

Light on purpose: it starts with every run, without site-packages.
"""

from __future__ import annotations

import binascii
import contextlib
import ctypes
import fcntl
import json
import math
import os
import resource
import select
import signal
import stat
import sys
import time
from typing import Any, NoReturn

from actors.environments import sandbox_filters as filters
from actors.environments import sandbox_world as world
from actors.environments.sandbox_watch import Usage, kill_all, measure, threads_of_user

LENGTH_BYTES = 8
"""The spec comes as JSON after its length; the result is JSON up to the end of standard output."""
WATCH_S = 0.05
"""How often the limits that count over all processes are looked at, seconds."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
# User numbers that nobody has: one for each run, so that limits for a user count this run only.
_FIRST_USER, _NOBODY = 1_000_000_000, 65534
_NICE = 5
_MAX_FD = 1 << 16
_SPARE_PROCESSES = 64

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """The supervisor: reads the spec (see `Sandbox._spec`), forks the first process and waits for its end."""
    with os.fdopen(os.dup(0), "rb", buffering=0) as stream:
        spec = json.loads(_read(stream, int.from_bytes(_read(stream, LENGTH_BYTES), "little")))
    if os.geteuid() == 0:
        spec["user"] = _FIRST_USER + os.getpid()
    try:
        if spec["namespaces"]:
            world.unshare(network=spec["network"])
        first = os.fork()
    except OSError as error:
        _answer({"error": str(error)})
        return
    if first == 0:
        _first_process(spec)
    os.waitpid(first, 0)


def _read(stream: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            sys.exit("the caller is gone")
        data += part
    return data


def _answer(result: dict[str, Any]) -> None:
    data = memoryview(json.dumps(result).encode())
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(1, data) :]


def _first_process(spec: dict[str, Any]) -> NoReturn:
    """Makes the program's world, has it run, answers, and leaves nothing."""
    folder = ""
    try:
        if spec["namespaces"]:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            world.build(spec["readable"], spec["disk_bytes"])
            folder = world.HOME
        else:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            folder = _make_folder()
        # Its memory and file descriptors, the result's among them, are closed to the program.
        _libc.prctl(_PR_SET_DUMPABLE, 0)
        _own(folder, spec)
        _put_files(folder, spec)
        answer = _Run(spec, folder).result()
    except BaseException as error:
        import traceback

        detail = str(error) if isinstance(error, OSError) else traceback.format_exc()
        answer = {"error": detail.strip()}
    with contextlib.suppress(BaseException):
        kill_all(spec["namespaces"], _own_user(spec))
    if folder and not spec["namespaces"]:
        _remove_folder(folder)
    _answer(answer)
    os._exit(0)


def _make_folder() -> str:
    import tempfile

    return os.path.realpath(tempfile.mkdtemp(prefix="meshforge-sandbox-"))


def _remove_folder(folder: str) -> None:
    import shutil

    for path, names, _ in os.walk(folder):
        for name in names:
            # Its owner may have taken rights from itself.
            if not os.path.islink(os.path.join(path, name)):
                os.chmod(os.path.join(path, name), 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _base64(data: bytes | bytearray) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _own(path: str, spec: dict[str, Any]) -> None:
    if "user" in spec:
        try:
            os.chown(path, spec["user"], spec["user"])
        except OSError:
            # A container's users end below our numbers.
            spec["user"] = _NOBODY
            os.chown(path, _NOBODY, _NOBODY)


def _own_user(spec: dict[str, Any]) -> int | None:
    """The user that is this run's alone; nobody may have other processes."""
    return None if spec.get("user") == _NOBODY else spec.get("user")


def _put_files(folder: str, spec: dict[str, Any]) -> None:
    for name, text in spec["files"].items():
        parts = name.split("/")
        for depth in range(1, len(parts)):
            parent = os.path.join(folder, *parts[:depth])
            if not os.path.isdir(parent):
                os.mkdir(parent)
                _own(parent, spec)
        path = os.path.join(folder, name)
        with open(path, "xb") as file:
            file.write(binascii.a2b_base64(text))
        _own(path, spec)


class _Run:
    """One program, from its start to the end of all it started."""

    def __init__(self, spec: dict[str, Any], folder: str) -> None:
        self._spec = spec
        self._folder = folder
        self._kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._truncated = {"stdout": False, "stderr": False}
        self._reason = ""
        self._status: int | None = None
        self._usage = Usage()

    def result(self) -> dict[str, Any]:
        """Runs the program; what `Sandbox` makes its result of."""
        begin = time.monotonic()
        stdin = self._stdin()
        outputs = {name: os.pipe() for name in self._kept}
        failed, report = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _become_program(self._spec, self._folder, [stdin, *(write for _, write in outputs.values())], report)
        for fd in (stdin, report, *(write for _, write in outputs.values())):
            os.close(fd)
        with os.fdopen(failed, "rb") as stream:
            if failure := stream.read():
                os.waitpid(self._pid, 0)
                step, number, text = json.loads(failure)
                if step != "exec":
                    raise OSError(number, f"{step}: {text}")
                self._kept["stderr"] += text.encode()
                self._status, self._reason = 127 << 8, "start"
        readers = {read: name for name, (read, _) in outputs.items()}
        if self._status is None:
            self._watch(begin + self._spec["wall_s"], readers)
        wall_s = time.monotonic() - begin
        kill_all(self._spec["namespaces"], _own_user(self._spec))
        for fd, name in readers.items():
            while self._drain(fd, name):
                pass
            os.close(fd)
        return self._describe(wall_s)

    def _stdin(self) -> int:
        if not self._spec["stdin"]:
            return os.open("/dev/null", os.O_RDONLY)
        written = os.memfd_create("stdin")
        with os.fdopen(written, "wb") as file:
            file.write(binascii.a2b_base64(self._spec["stdin"]))
            file.flush()
            return os.open(f"/proc/self/fd/{written}", os.O_RDONLY)

    def _watch(self, deadline: float, readers: dict[int, str]) -> None:
        """Waits for the program's end and kills it at the first limit that it reaches."""
        poll = select.poll()
        program = os.pidfd_open(self._pid)
        for fd in (*readers, program, 0):
            poll.register(fd, select.POLLIN)
            if fd in readers:
                os.set_blocking(fd, False)
        look = 0.0
        while self._status is None:
            now = time.monotonic()
            if now >= look:
                self._usage = measure(self._spec["namespaces"], self._spec["memory_bytes"], self._usage)
                self._reason = self._reason or self._exceeded()
                look = now + WATCH_S
            if now >= deadline:
                self._reason = self._reason or "wall"
            if self._reason:
                os.kill(self._pid, signal.SIGKILL)
            for fd, _ in poll.poll(max(0.0, min(look, deadline) - now) * 1000):
                if fd in readers:
                    if self._drain(fd, readers[fd]) == 0:
                        poll.unregister(fd)
                elif fd == 0:
                    self._reason = "cancelled"
            self._reap()
        os.close(program)

    def _exceeded(self) -> str:
        """The limit over all processes that is exceeded; empty if none."""
        spec, usage = self._spec, self._usage
        if usage.cpu_s > spec["cpu_s"]:
            return "cpu"
        if usage.memory_bytes > spec["memory_bytes"]:
            return "memory"
        # In namespaces the kernel holds these two, exactly.
        if not spec["namespaces"] and usage.processes > spec["processes"]:
            return "processes"
        if not spec["namespaces"] and _disk_bytes(self._folder) > spec["disk_bytes"]:
            return "disk"
        return ""

    def _drain(self, fd: int, name: str) -> int | None:
        """Takes what there is of an output: number of bytes, 0 at its end, None when there is nothing now."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return None
        kept = self._kept[name]
        room = self._spec["output_bytes"] - len(kept)
        kept += data[:room]
        self._truncated[name] |= len(data) > room
        return len(data)

    def _reap(self) -> None:
        """Takes the ends of the program and of orphans."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    self._status = ended[1]

    def _describe(self, wall_s: float) -> dict[str, Any]:
        assert self._status is not None
        killed = os.WTERMSIG(self._status) if os.WIFSIGNALED(self._status) else None
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        by_kernel = "cpu" if killed == signal.SIGXCPU else "disk" if killed == signal.SIGXFSZ else "signal"
        return {
            "exit_status": None if killed else os.WEXITSTATUS(self._status),
            "signal": killed,
            "reason": self._reason or (by_kernel if killed else "exit"),
            "truncated": [name for name, cut in self._truncated.items() if cut],
            "cpu_s": max(self._usage.cpu_s, children.ru_utime + children.ru_stime),
            "wall_s": wall_s,
            "peak_memory_bytes": max(self._usage.peak_bytes, children.ru_maxrss * 1024),
            **{name: _base64(kept) for name, kept in self._kept.items()},
            "files": self._collect(),
        }

    def _collect(self) -> dict[str, str]:
        """The files asked for, as far as the program left regular ones of its own, `disk_bytes` in all."""
        files, room = {}, self._spec["disk_bytes"]
        for name in self._spec["collect"]:
            with contextlib.suppress(OSError):
                data = _read_own(self._folder, name, room)
                files[name] = _base64(data)
                room -= len(data)
        return files


def _read_own(folder: str, name: str, room: int) -> bytes:
    """Follows no link, waits for no pipe. OSError when that is not possible, or the file is bigger than `room`."""
    *parents, last = name.split("/")
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for parent in parents:
            deeper = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = deeper
        with os.fdopen(os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at), "rb") as file:
            status, top = os.fstat(file.fileno()), os.stat(folder)
            # Another name of a file outside of the folder belongs to somebody else, or has two names.
            if not stat.S_ISREG(status.st_mode) or status.st_uid != top.st_uid or status.st_nlink != 1:
                raise OSError(f"{name} is no regular file of the program's own")
            if status.st_size > room:
                raise OSError(f"{name} is bigger than {room} bytes")
            return file.read(room)
    finally:
        os.close(at)


def _disk_bytes(folder: str) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


def _become_program(spec: dict[str, Any], folder: str, streams: list[int], report: int) -> NoReturn:
    """Turns this process into the program; a failure goes to `report` as [step, errno, text]."""
    step = "the program's process"
    try:
        # Out of the way of 0, 1 and 2 first: each of them may have another one's number.
        report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, 10)
        for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in streams]):
            os.dup2(fd, number)
        os.closerange(3, report)
        os.closerange(report + 1, _MAX_FD)
        os.setsid()
        os.chdir(folder)
        os.umask(0o022)
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        step = "the program's user"
        _be_taken_first()
        if "user" in spec:
            os.setgroups([])
            os.setresgid(spec["user"], spec["user"], spec["user"])
            os.setresuid(spec["user"], spec["user"], spec["user"])
        step = "the limits"
        _set_limits(spec)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        step = "the filters"
        _filter(spec, folder)
        step = "exec"
        os.execvpe(spec["argv"][0], spec["argv"], {**spec["env"], "HOME": folder, "TMPDIR": folder, "PWD": folder})
    except BaseException as error:
        text = f"{spec['argv'][0]}: {error.strerror}" if step == "exec" and isinstance(error, OSError) else str(error)
        os.write(report, json.dumps([step, getattr(error, "errno", 0) or 0, text]).encode())
    os._exit(127)


def _be_taken_first() -> None:
    """Where memory runs out all the same, the kernel ends this process before others."""
    _libc.prctl(_PR_SET_DUMPABLE, 1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _set_limits(spec: dict[str, Any]) -> None:
    os.nice(_NICE)
    limits = {
        resource.RLIMIT_AS: spec["address_space_bytes"],
        resource.RLIMIT_CPU: math.ceil(spec["cpu_s"]) + 1,
        resource.RLIMIT_FSIZE: spec["disk_bytes"],
        resource.RLIMIT_NOFILE: spec["open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    # A namespace's or a run's own user has no other processes. Any other may have more of them at any time.
    limits[resource.RLIMIT_NPROC] = spec["processes"]
    if not spec["namespaces"] and _own_user(spec) is None:
        limits[resource.RLIMIT_NPROC] += _SPARE_PROCESSES + threads_of_user()
    for number, value in limits.items():
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # The kernel's signal at the soft limit for processor time says why; at the hard one it does not.
        soft = value - 1 if number == resource.RLIMIT_CPU else value
        resource.setrlimit(number, (soft, value))


def _filter(spec: dict[str, Any], folder: str) -> None:
    """The seccomp filter and, where the program has no root of its own, Landlock."""
    filters.no_new_privileges()
    version = filters.landlock_version()
    if not spec["namespaces"]:
        if version >= 3:
            filters.restrict_files([*spec["readable"], "/proc"], folder, world.DEVICES)
        elif "user" not in spec:
            raise OSError("the kernel has no Landlock (Linux 6.2), so the program could write the caller's files")
    signals = spec["namespaces"] or version >= 6
    metadata = spec["namespaces"] or _own_user(spec) is not None
    filters.install_seccomp(
        filters.seccomp_program(network=spec["network"], signals=signals, metadata=metadata, pid=os.getpid())
    )
