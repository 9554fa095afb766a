"""Cores, memory, shared memory, limits, loopback, environment: what the machine gives to a run."""

from __future__ import annotations

import asyncio
import ctypes.util
import os
import resource
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from actors.environments.sandbox import Sandbox, SandboxConfig
from apps.doctor.checks import Report, merged
from forge.errors import SandboxError
from forge.memory import memory_limit_bytes

_GIB = 2**30
_NEEDED_MEMORY = 4 * _GIB
"""Of the smallest run: an engine, a trainer, a replay and a controller of a model of 0.1 M parameters hold 3 GiB."""
_NEEDED_SHM = _GIB
_NEEDED_FILES = 4096


def cpu() -> Report:
    """Cores that this process may use, and how busy they are."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return cores_report(cores, load, _cgroup("cpu.max"))


def cores_report(cores: int, load: float, quota: str) -> Report:
    """Pure. `quota` is what the file cpu.max of the control group holds."""
    found = f"{cores} cores, load {load:.1f}"
    limit, _, period = quota.partition(" ")
    if limit.isdecimal() and period.isdecimal() and int(limit) / int(period) < cores:
        found += f", of which the container may use {int(limit) / int(period):g}"
    if load > 2 * cores:
        return Report("warning", found, "others use the cores: what is measured below is too slow, and so is a run")
    return Report("ok", found)


def memory() -> Report:
    """Memory that is available, in the machine and in the container."""
    values = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(values["MemAvailable"].split()[0]) * 1024
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit.isdecimal() and used.isdecimal():
        free = min(free, int(limit) - int(used))
    return memory_report(memory_limit_bytes(), free)


def memory_report(total: int, free: int) -> Report:
    """Pure; bytes."""
    found = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    if free < _NEEDED_MEMORY:
        return Report("warning", found, f"the smallest run takes {_NEEDED_MEMORY / _GIB:.0f} GiB: end other programs")
    return Report("ok", found)


def shared_memory() -> Report:
    """/dev/shm, which torch and vLLM use; our own segments have no name there, but count as memory all the same."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Report("wrong", f"/dev/shm: {error.strerror}", "mount a tmpfs there")
    return shm_report(usage.total, usage.free)


def shm_report(total: int, free: int) -> Report:
    """Pure; bytes."""
    found = f"/dev/shm has {free / _GIB:.2f} of {total / _GIB:.2f} GiB free"
    if total < _NEEDED_SHM:
        return Report(
            "warning", found, "a container has 64 MiB unless told otherwise: docker run --ipc=host, or --shm-size=8g"
        )
    if free < _NEEDED_SHM:
        return Report("warning", found, "see the check leftovers for what fills it")
    return Report("ok", found)


def limits() -> Report:
    """What a user may open, start and lock."""
    files, processes = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_NPROC)
    return limits_report(files[0], files[1], processes[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def limits_report(files: int, hard_files: int, processes: int, locked: int) -> Report:
    """Pure; soft limits, -1 for none."""

    def text(value: int) -> str:
        return "unlimited" if value < 0 else f"{value:,}"

    found = f"{text(files)} open files, {text(processes)} processes, {text(locked)} bytes locked"
    remedies = []
    if 0 <= files < _NEEDED_FILES:
        room = "" if hard_files < 0 or hard_files >= _NEEDED_FILES else f" (root must raise the hard {hard_files:,})"
        remedies.append(f"ulimit -n 65536{room}")
    if 0 <= processes < 1024:
        remedies.append("ulimit -u 4096: threads count, too")
    return Report("warning" if remedies else "ok", found, "; ".join(remedies))


def loopback() -> Report:
    """A connection of this machine with itself, its name, and proxies that would be asked for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        with socket.create_connection(server.getsockname(), timeout=5) as client:
            peer, _ = server.accept()
            with peer:
                client.sendall(b"x")
                if peer.recv(1) != b"x":
                    return Report("wrong", "127.0.0.1 connects, but loses what is sent", "check the firewall")
    low, high = (int(port) for port in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = Report("ok", f"127.0.0.1 answers, {high - low + 1:,} ports to choose from")
    try:
        name = Report("ok", f"{socket.gethostname()} is {socket.gethostbyname(socket.gethostname())}")
    except OSError:
        name = Report("warning", f"the name {socket.gethostname()} has no address", "add it to /etc/hosts")
    return merged([ports, name, proxies_report(os.environ)])


def proxies_report(environ: Mapping[str, str]) -> Report:
    """Pure."""
    lowered = {key.lower(): value for key, value in environ.items()}
    proxies = [key for key in ("http_proxy", "https_proxy", "all_proxy") if lowered.get(key)]
    if not proxies:
        return Report("ok", "no proxy")
    around = {part.strip() for part in lowered.get("no_proxy", "").split(",")}
    missing = [] if "*" in around else [host for host in ("127.0.0.1", "localhost") if host not in around]
    if missing:
        return Report(
            "warning",
            f"{', '.join(proxies)} set, and no_proxy lacks {' and '.join(missing)}",
            f"agents reach the gateway over loopback: export no_proxy={','.join([*sorted(around - {''}), *missing])}",
        )
    return Report("ok", f"{', '.join(proxies)} set, not for loopback")


def environment() -> Report:
    """Variables that change what a run does."""
    return environment_report(os.environ)


def environment_report(environ: Mapping[str, str]) -> Report:
    """Pure."""
    told, remedies = [], []
    for key, value in sorted(environ.items()):
        if key.startswith("HYPERACTOR_"):
            told.append(f"{key}={value}")
            remedies.append(f"unset {key}: a run sets what it needs of Monarch by itself")
    threads = environ.get("OMP_NUM_THREADS", "")
    told.append(f"OMP_NUM_THREADS {threads or 'unset'}: of this process only, actors get theirs from mesh.ROLE.threads")
    if environ.get("CUDA_VISIBLE_DEVICES") == "":
        told.append("CUDA_VISIBLE_DEVICES is empty")
        remedies.append("unset CUDA_VISIBLE_DEVICES, unless GPUs are to stay unused")
    if environ.get("PYTHONPATH"):
        told.append(f"PYTHONPATH={environ['PYTHONPATH']}")
        remedies.append("a package of the same name there comes before ours in actors: unset PYTHONPATH")
    return Report("warning" if remedies else "ok", "; ".join(told), "; ".join(remedies))


def libraries() -> Report:
    """Shared libraries that wheels expect of the system."""
    if ctypes.util.find_library("numa") is None:
        return Report("wrong", "libnuma is not there, which vLLM loads", "apt-get install libnuma1")
    return Report("ok", "libnuma is there, which vLLM loads")


def sandbox() -> Report:
    """How programs that nobody has read would be kept in."""
    try:
        kind = asyncio.run(Sandbox(SandboxConfig()).check())
    except SandboxError as error:
        remedy = "needed by rewards and tools that run a policy's code only; see the README on the sandbox"
        return Report("warning", f"no sandbox: {error}", remedy)
    return Report("ok", f"a policy's code is kept in by {kind}")


def hub() -> Report:
    """Whether models and data can be downloaded."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes"):
        return Report("skipped", "HF_HUB_OFFLINE is set")
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=8):
            return Report("ok", f"{address} answers")
    except urllib.error.HTTPError as error:
        if error.code < 500:
            return Report("ok", f"{address} answers")
        reason = str(error)
    except OSError as error:
        reason = str(getattr(error, "reason", error))
    remedy = "smollm2, tiny and nano need no hub; give other models as a folder, and export HF_HUB_OFFLINE=1"
    return Report("warning", f"{address} cannot be reached: {reason}", remedy)


def _cgroup(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""
