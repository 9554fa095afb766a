"""Memory that processes of one host share, and that nobody can leave behind.

A segment is an anonymous Linux memory file (`memfd_create`): it has no name in any folder, so when
the last process that maps it is gone (however it went), so is the memory. The process that made it
hands out a `SegmentRef`, a few words that fit in any message. Others attach through
`/proc/<pid>/fd/<fd>`; no socket has to carry a descriptor, and close-on-exec children inherit none.

    owner                                     anybody of the same user on the same host
    seg = Segment.create(nbytes)
    seg.ref  ------------- message ---------> peer = Segment.attach(ref)
    seg.buffer[a:b].copy_(x)                  peer.buffer[a:b]           one and the same bytes

Laws: (1) memory is unmapped only when the last tensor that views it is gone, `close` included.
(2) A segment can be attached as long as its owner lives and has not closed it, and never again after.
(3) Two parties that write the same bytes agree between themselves who writes when; `locked` helps.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from forge.errors import ChannelError

_PAGE = mmap.PAGESIZE
_NAME = "meshforge-"


def start_time(pid: int) -> int | None:
    """When the process `pid` started, in clock ticks since boot; None when it has ended.

    A number that the kernel gives twice: (pid, start_time) names one process for ever. A zombie has
    ended (its memory is gone, only its parent has not noticed), unless other threads of it still run.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, num_threads, started = fields[0], int(fields[17]), int(fields[19])
    return None if state in b"ZX" and num_threads <= 1 else started


def identity() -> tuple[int, int]:
    """(pid, start_time) of this process."""
    pid = os.getpid()
    return pid, _own_start_time(pid)


@lru_cache(maxsize=1)
def _own_start_time(pid: int) -> int:
    started = start_time(pid)
    assert started is not None, "a running process has a start time"
    return started


@dataclass(frozen=True)
class SegmentRef:
    """Where a segment lies: enough to attach from another process; picklable, about 150 bytes."""

    pid: int
    """Process that owns the segment."""
    start_time: int
    """When that process started, in clock ticks since boot."""
    fd: int
    """Descriptor of the segment in that process."""
    nbytes: int
    """Size in bytes."""
    id: str
    """Random name: a recycled pid or descriptor is never mistaken for this segment."""

    @property
    def path(self) -> str:
        """The way to the segment through the owner's descriptors."""
        return f"/proc/{self.pid}/fd/{self.fd}"

    def check_open(self) -> None:
        """Raises ChannelError, saying why, when the segment can no longer be attached."""
        try:
            target = os.readlink(self.path)
        except PermissionError as error:
            raise ChannelError(
                f"segment {self.id} of process {self.pid} is closed to user {os.geteuid()}: "
                f"{error.strerror}; run both processes as one user, in one container"
            ) from error
        except OSError:
            target = ""
        if target.startswith(f"/memfd:{_NAME}{self.id}"):
            return
        if start_time(self.pid) == self.start_time:
            raise ChannelError(
                f"segment {self.id} was closed by its owner, process {self.pid}; attach while it is open"
            )
        raise ChannelError(
            f"segment {self.id} is gone with its owner, process {self.pid}, which has ended, or runs on "
            "another host or in another container; produce the data again, or use another transport"
        )


class Segment:
    """Shared bytes. Make one with `create`, or reach somebody else's with `attach`."""

    def __init__(self, fd: int, ref: SegmentRef) -> None:
        """Maps the file behind `fd` and takes `fd` over; callers use `create` or `attach`."""
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._fd = fd
        try:
            mapping = mmap.mmap(fd, ref.nbytes)
        except (OSError, OverflowError, ValueError) as error:
            self._close_fd()
            raise ChannelError(f"cannot map {ref.nbytes} shared bytes: {error}; ask for less") from error
        self.ref = ref
        """What another process needs to attach."""
        self.memory = memoryview(mapping)
        """The bytes as a writable buffer; a tensor made of a slice of it keeps the mapping alive."""
        self.buffer = torch.frombuffer(self.memory, dtype=torch.uint8)
        """The bytes as a tensor, uint8 `[nbytes]`."""

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """A new segment of `nbytes` zero bytes, its pages already there: writes to it run at memcpy speed.

        Raises ChannelError when nbytes < 1, or memory or descriptors are used up.
        """
        if nbytes < 1:
            raise ChannelError(f"nbytes must be >= 1, got {nbytes}; an empty segment cannot be mapped")
        if not hasattr(os, "memfd_create"):
            raise ChannelError(f"shared memory files need Linux, this is {sys.platform}; use a Linux container")
        name = secrets.token_hex(8)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        fd = _open(lambda: os.memfd_create(_NAME + name, flags), f"make a segment of {nbytes} bytes")
        try:
            os.ftruncate(fd, nbytes)
            # Nobody who holds the file may shrink it under a mapping: that would be a SIGBUS for the others.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise ChannelError(f"cannot make a segment of {nbytes} bytes: {error}; ask for less") from error
        pid, started = identity()
        segment = cls(fd, SegmentRef(pid=pid, start_time=started, fd=fd, nbytes=nbytes, id=name))
        segment.buffer[::_PAGE] = 0
        return segment

    @classmethod
    def attach(cls, ref: SegmentRef) -> Segment:
        """The segment behind `ref`, mapped into this process; costs no copy.

        Raises ChannelError when its owner has ended, has closed it, or belongs to another user.
        """
        ref.check_open()
        what = f"attach segment {ref.id} of process {ref.pid}"
        fd = _open(lambda: os.open(ref.path, os.O_RDWR | os.O_CLOEXEC), what)
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}{ref.id}"):
            os.close(fd)
            raise ChannelError(f"cannot {what}: it was closed meanwhile; attach while the owner keeps it")
        return cls(fd, ref)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.ref.nbytes

    @contextmanager
    def locked(self, timeout_s: float = 5.0) -> Iterator[None]:
        """One process at a time; a process that dies inside gives the lock back.

        Threads that share this object are not held apart. Raises ChannelError after `timeout_s` seconds.
        """
        if not self._close_fd.alive:
            raise ChannelError(f"segment {self.ref.id} was closed here; lock it before `close`")
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ChannelError(
                        f"the lock of segment {self.ref.id} was held by another process for {timeout_s} s; "
                        "is that process stopped?"
                    ) from None
                time.sleep(0.0002)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Gives up the descriptor: an owner's segment can no longer be attached. May be called twice.

        Tensors that view the memory stay valid; it is unmapped with the last of them.
        """
        self._close_fd()


def _open(opener: Callable[[], int], what: str) -> int:
    try:
        return opener()
    except OSError as error:
        remedy = "try again"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            remedy = f"a segment takes two of the {limit} descriptors of a process; raise `ulimit -n`"
        raise ChannelError(f"cannot {what}: {error.strerror}; {remedy}") from error
