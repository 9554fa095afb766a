"""The world a sandboxed program sees: namespaces of its own, and a root of a few read-only folders.

Processes, network, mounts and System V IPC are its own. What it writes lies in memory (tmpfs, of bounded size), so
nothing reaches a disk and nothing is left to remove, however the run ends. See namespaces(7), user_namespaces(7).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

HOME = "/sandbox"
"""The program's working folder."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NET = (
    *(0x00020000, 0x04000000, 0x08000000),
    *(0x10000000, 0x20000000, 0x40000000),
)
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_DETACH = 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2
# Any folder that every machine has, covered in this mount namespace only.
_BASE = "/tmp"
_MAX_FILES = 10_000

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(*, network: bool) -> None:
    """Puts the next child into namespaces of its own, as its process 1; `network`: it keeps the machine's.

    A caller who is not root gets them through a user namespace, in which it stays the user it is. OSError where the
    kernel does not allow that.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS
    flags |= (0 if network else _NEW_NET) | (_NEW_USER if uid else 0)
    _check(_libc.unshare(flags), "unshare")
    if uid:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")


def build(readable: Iterable[str], disk_bytes: int) -> None:
    """Makes the root of this process and its children: HOME, /tmp and /dev/shm, `disk_bytes` together, may be
    written; the folders and files of `readable` may be read; a /proc with this namespace's processes.

    Paths that do not exist are passed over. Changes the working folder to HOME. OSError where the kernel refuses.
    """
    _mount("none", "/", "", _REC | _PRIVATE)
    _mount("tmpfs", _BASE, "tmpfs", _NOSUID | _NODEV, "size=64k,mode=755")
    for name in ("old", "new", "scratch"):
        os.mkdir(f"{_BASE}/{name}")
    _pivot(_BASE, f"{_BASE}/old")
    # Whatever was mounted or lay below _BASE is in sight again, below /old.
    _mount("tmpfs", "/new", "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    options = f"size={disk_bytes},nr_inodes={_MAX_FILES},mode=755"
    _mount("tmpfs", "/scratch", "tmpfs", _NOSUID | _NODEV, options)
    for name, target, mode in (("home", HOME, 0o755), ("tmp", "/tmp", 0o1777), ("shm", "/dev/shm", 0o1777)):
        os.mkdir(f"/scratch/{name}")
        os.chmod(f"/scratch/{name}", mode)
        os.makedirs(f"/new{target}")
        _mount(f"/scratch/{name}", f"/new{target}", "", _BIND)
    for device in DEVICES:
        _bind(device, device, attributes=0)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/new/dev/{name}")
    _bind_all(readable)
    os.mkdir("/new/proc")
    _mount("proc", "/new/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.chdir("/new")
    _pivot(".", ".")
    _check(_libc.umount2(b".", _DETACH), "umount2 of the old root")
    os.chdir("/")
    _set_attributes("/", _ATTR_RDONLY, 0)
    os.chdir(HOME)


def _bind_all(paths: Iterable[str]) -> None:
    """Each path under its own name and, when links lead to it, under its real one."""
    bound: list[str] = []
    for path in paths:
        real = _real(path)
        for target in dict.fromkeys((real, path)):
            if not any(target == b or target.startswith(f"{b}/") for b in bound) and os.path.exists(f"/old{real}"):
                _bind(real, target, attributes=_ATTR_RDONLY | _ATTR_NOSUID)
                bound.append(target)


def _real(path: str) -> str:
    """Where links lead, as seen with /old as the root."""
    parts, done = [p for p in path.split("/") if p], ""
    for _ in range(256):
        if not parts:
            break
        part = parts.pop(0)
        if part == "..":
            done = os.path.dirname(done).rstrip("/")
        elif part != "." and os.path.islink(f"/old{done}/{part}"):
            link = os.readlink(f"/old{done}/{part}")
            done = "" if link.startswith("/") else done
            parts = [p for p in link.split("/") if p] + parts
        elif part != ".":
            done = f"{done}/{part}"
    return done


def _bind(source: str, target: str, *, attributes: int) -> None:
    if not os.path.exists(f"/old{source}"):
        return
    if os.path.isdir(f"/old{source}"):
        os.makedirs(f"/new{target}", exist_ok=True)
    else:
        os.makedirs(os.path.dirname(f"/new{target}"), exist_ok=True)
        with open(f"/new{target}", "a"):
            pass
    _mount(f"/old{source}", f"/new{target}", "", _BIND | _REC)
    if attributes:
        _set_attributes(f"/new{target}", attributes, _AT_RECURSIVE)


def _set_attributes(target: str, attributes: int, flags: int) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    number, where = ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD)
    size = ctypes.c_size_t(len(wanted))
    _check(_libc.syscall(number, where, target.encode(), flags, wanted, size), f"mount_setattr of {target}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    _check(result, f"mount of {source} on {target}")


def _pivot(new: str, old: str) -> None:
    # glibc has no wrapper; the number differs by machine.
    number = 155 if os.uname().machine == "x86_64" else 41
    _check(_libc.syscall(ctypes.c_long(number), new.encode(), old.encode()), f"pivot_root to {new}")
    os.chdir("/")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
