"""What a sandboxed program may not ask of the kernel: a seccomp filter and, where there is no other root, Landlock.

Both need no privilege, hold for every descendant and cannot be taken off again. Numbers of system calls are those
of Linux's asm/unistd.h; see also seccomp(2), landlock(7).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Sequence

_libc = ctypes.CDLL(None, use_errno=True)

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> column of the tables below, AUDIT_ARCH."""
_X32_BIT = 0x40000000

_SOCKET = (41, 198)
_DENIED = {
    # Memory that belongs to no process: no limit counts it, and it may outlive its maker.
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # A world of its own inside the sandbox would have file systems without limits.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Sockets by another door, and parts of the kernel that a program under test has no use for.
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
_OWN_PROCESS_ONLY = {
    # (x86_64, aarch64, which argument is a process)
    "prlimit64": (302, 261, 0),
    "sched_setaffinity": (203, 122, 0),
    "sched_setparam": (142, 118, 0),
    "sched_setscheduler": (144, 119, 0),
    "sched_setattr": (314, 274, 0),
    "setpriority": (141, 140, 1),
    "ioprio_set": (251, 30, 1),
}
_SIGNALS = {
    "kill": (62, 129, 0),
    "tkill": (200, 130, 0),
    "tgkill": (234, 131, 0),
    "rt_sigqueueinfo": (129, 138, 0),
    "rt_tgsigqueueinfo": (297, 240, 0),
    # A pidfd is no number of a process: no value passes.
    "pidfd_send_signal": (424, 424, 0),
}
_METADATA = {
    # Landlock leaves these be. The older ones are missing on aarch64: the newer one stands for them.
    "chmod": (90, 53),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, 54),
    "fchown": (93, 55),
    "lchown": (94, 54),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "utime": (132, 88),
    "utimes": (235, 88),
    "futimesat": (261, 88),
    "utimensat": (280, 88),
}
_CLONE, _CLONE3, _SOCKETPAIR = (56, 220), (435, 435), (53, 199)
_NEW_NAMESPACES = 0x7E020000
_AF_UNIX, _SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_TYPE_MASK = 1, 1, 5, 0xF

_LOAD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NUMBER, _ARCH, _ARGS = 0, 4, 16  # offsets in struct seccomp_data
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


def seccomp_program(*, network: bool, signals: bool, metadata: bool, pid: int) -> bytes:
    """The filter for this machine, as an array of struct sock_filter.

    network: whether `socket` is allowed; socketpair always is, for streams. signals: whether to leave them to other
    means; else only the program itself (`pid`) and its process group may be signalled. metadata: whether owners, rights
    and times of files may be changed, which is for users with no other files. OSError (ENOSYS) on a machine
    whose system calls this file does not know.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no seccomp filter for {machine}, only for {', '.join(_ARCHITECTURES)}")
    column, arch = _ARCHITECTURES[machine]
    code = [_step(_LOAD, _ARCH), _step(_JEQ, arch, 1, 0), _step(_RET, _KILL), _step(_LOAD, _NUMBER)]
    if machine == "x86_64":
        code += [_step(_JGE, _X32_BIT, 0, 1), _refuse()]
    denied = {**_DENIED, **({} if network else {"socket": _SOCKET}), **({} if metadata else _METADATA)}
    for number in sorted({numbers[column] for numbers in denied.values()}):
        code += [_step(_JEQ, number, 0, 1), _refuse()]
    # Its flags lie in memory, which a filter cannot read; C libraries then take clone.
    code += [_step(_JEQ, _CLONE3[column], 0, 1), _refuse(errno.ENOSYS)]
    body = [_step(_LOAD, _ARGS), _step(_JSET, _NEW_NAMESPACES, 0, 1), _refuse(), _step(_RET, _ALLOW)]
    code += [_step(_JEQ, _CLONE[column], 0, len(body)), *body]
    # A pair of datagram sockets could be sent to any socket in the file system.
    body = [_step(_LOAD, _ARGS), _step(_JEQ, _AF_UNIX, 1, 0), _refuse(), _step(_LOAD, _ARGS + 8)]
    body += [_step(_AND, _SOCK_TYPE_MASK), *_allow_only((_SOCK_STREAM, _SOCK_SEQPACKET))]
    code += [_step(_JEQ, _SOCKETPAIR[column], 0, len(body)), *body]
    own = _OWN_PROCESS_ONLY if signals else {**_OWN_PROCESS_ONLY, **_SIGNALS}
    for name, entry in own.items():
        values = () if name == "pidfd_send_signal" else (0, pid)
        body = [_step(_LOAD, _ARGS + 8 * entry[2]), *_allow_only(values)]
        code += [_step(_JEQ, entry[column], 0, len(body)), *body]
    return b"".join([*code, _step(_RET, _ALLOW)])


def _step(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, k)


def _refuse(error: int = errno.EPERM) -> bytes:
    return _step(_RET, 0x00050000 | error)


def _allow_only(values: Sequence[int]) -> list[bytes]:
    """Ends the filter for the loaded argument: the low half, which is all that the kernel reads of an int."""
    return [*(s for v in values for s in (_step(_JEQ, v, 0, 1), _step(_RET, _ALLOW))), _refuse()]


def install_seccomp(program: bytes) -> None:
    """Puts the filter on this thread, for good; no new privileges either. OSError where the kernel has none."""
    buffer = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    no_new_privileges()
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def no_new_privileges() -> None:
    """No program that this process executes gains rights, setuid or not."""
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")


# --- Landlock

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read file, read folder
_FILE = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14  # what a rule about a file, not a folder, may grant
_WRITE_FILE, _IOCTL = 1 << 1 | 1 << 14, 1 << 15
_SCOPES = 1 << 0 | 1 << 1  # abstract Unix sockets, signals
_LANDLOCK_CREATE_RULESET_VERSION = 1


def landlock_version() -> int:
    """The kernel's Landlock ABI; 0 without one. From 3 on files are covered, from 6 on signals too."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_CREATE_RULESET_VERSION)))


def restrict_files(readable: Iterable[str], writable: str, devices: Iterable[str]) -> None:
    """Leaves this process `readable` for reading, `devices` for both, everything below `writable` and nothing else.

    Needs `landlock_version() >= 3` and `no_new_privileges`. Paths that do not exist are passed over. OSError when
    the kernel refuses.
    """
    version = landlock_version()
    # Folders and files, up to truncate; ioctl on devices came with version 5.
    handled = (1 << 15) - 1 | (_IOCTL if version >= 5 else 0)
    attributes = struct.pack("QQQ", handled, 0, _SCOPES) if version >= 6 else struct.pack("Q", handled)
    ruleset = _syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in readable:
            _grant(ruleset, path, _READ)
        for path in devices:
            _grant(ruleset, path, _READ | _WRITE_FILE)
        _grant(ruleset, writable, handled)
        _syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _grant(ruleset: int, path: str, access: int) -> None:
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        allowed = access if os.path.isdir(path) else access & _FILE
        _syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, target), 0)
    finally:
        os.close(target)


def _syscall(number: int, *args: int | bytes) -> int:
    result = int(_libc.syscall(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in args)))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return result
