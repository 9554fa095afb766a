"""A folder that both sides see: for generators that come and go, for far-away ones, and for looking at weights.

    <folder>/v7.tmp/       trainer ranks write their shards here, each its own
    <folder>/v7/           appears by one rename, when all of them are there and synced
        manifest.json      version, kind, base, and for each file its tensors: names, dtypes, shapes, boxes, checksums
        model.safetensors  one rank; of several, rank 0 writes model-00001-of-00004.safetensors, and so on
    <folder>/v8.delta-from-7/    the same, with a delta payload for each rank
        delta-00001-of-00004.bin

A shard is an ordinary safetensors file under checkpoint names. Where a rank holds a part of a parameter the tensor is
that part, and the file's metadata says which; where all tensors are whole, several files get the usual index, so that
with a config.json beside them `from_pretrained` loads the folder.

Checksums go by blocks of whole rows, so a puller can check what it reads however little of a tensor it needs. It reads
with `pread`, straight into its image where it can: unlike a mapped file, one that is cut short or a network that goes
away is an error and not the end of the process.

Who waits for whom: rank 0 for the shards of the others, by looking; a puller for the folder, which a network file
system may show late. While it reads, a puller leaves a mark in the folder, and a marked version is not removed before
the mark is a deadline old.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from xxhash import xxh3_64_intdigest

from forge.errors import ConfigError, DeadlineExceeded, ForgeError, WeightSyncError
from forge.run_folder import sync_folder
from weightsync.checksums import digest
from weightsync.layout import Box, Entry, box_shape, full_box, intersect, sub_view, view
from weightsync.offer import DELTA, FULL, Offer
from weightsync.transports.base import Puller, Sender
from weightsync.transports.context import PullerContext, SenderContext, make_image

MANIFEST = "manifest.json"
KEEP = 2
"""Versions that stay, beside those that are being read."""
_FORMAT = "meshforge-weights-1"
_BLOCK_BYTES = 4 << 20
_POLL_S = 0.02
_VERSION = re.compile(r"v(\d+)(\.delta-from-\d+)?")
_MARK = ".reading-"
_GONE = ".gone-"
_INDEX = "model.safetensors.index.json"
_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def version_folder(folder: str | Path, version: int, kind: str, base: int) -> Path:
    """Where a version lies once it is whole."""
    return Path(folder) / (f"v{version}" if kind == FULL else f"v{version}.delta-from-{base}")


class FileSender(Sender):
    """Writes a rank's shard of every version; rank 0 makes the folder appear and removes old ones.

    Raises ConfigError without a folder, or when another run publishes into it.
    """

    name = "file"

    def __init__(self, context: SenderContext) -> None:
        if not context.folder:
            raise ConfigError("transport file needs weightsync.folder, a folder that trainer and generators see")
        self._context = context
        self._folder = Path(context.folder).absolute()
        self._token = uuid.uuid4().hex  # tells this run's shards from those that an earlier one left behind
        self._tokens = [self._token]
        self._published: list[Path] = []
        self._lock: int | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if context.rank == 0:
                self._lock = _lock(self._folder)
                self._clear_away()
                # An earlier run's: the first to go.
                self._published = sorted(_versions(self._folder), key=_number)
        except OSError as error:
            raise ConfigError(
                f"weightsync.folder {self._folder} cannot be used: {error.strerror or error}; give a folder that you "
                "can write"
            ) from error

    @staticmethod
    def available(same_host: bool, device: str) -> str:
        return ""

    def link(self) -> dict[str, str]:
        return {"folder": str(self._folder), "token": self._token}

    def meet(self, links: Sequence[Any]) -> None:
        self._tokens = [link["token"] for link in links]

    def prepare(self, offer: Offer) -> dict[str, Any]:
        """Writes this rank's share; on rank 0 returns when the version is complete, on disk and visible."""
        final = version_folder(self._folder, offer.version, offer.kind, offer.base)
        work = final.with_name(final.name + ".tmp")
        deadline = time.monotonic() + self._context.deadline_s
        if (there := self._where(final)) is not None:  # offered again, to a replica that failed
            return there if self._context.rank == 0 else {}
        try:
            work.mkdir(exist_ok=True)
            (work / f"rank-{self._context.rank}.json").unlink(missing_ok=True)
            _write_json(work / f"rank-{self._context.rank}.json", self._write_share(work, offer, deadline))
            if self._context.rank != 0:
                return {}
            shares = self._gather(work, offer, deadline)
            self._finish(work, final, offer, shares)
        except ForgeError as error:
            self._give_up(work, offer, str(error))
            raise
        except OSError as error:
            failure = _disk_error("write", offer.version, work, error)
            self._give_up(work, offer, str(failure))
            raise failure from error
        with contextlib.suppress(OSError):  # what cannot be removed now is removed next time
            self._remove_old(final)
        return self._where(final) or {}

    def _where(self, final: Path) -> dict[str, Any] | None:
        """Where pullers find a version that this run has published."""
        try:
            text = (final / MANIFEST).read_bytes()
        except OSError:
            return None
        run = json.loads(text).get("run")
        where = {"path": str(final), "run": run, "manifest": xxh3_64_intdigest(text)}
        return where if run == self._tokens[0] else None

    def _identity(self, offer: Offer) -> dict[str, Any]:
        return {"token": self._token, "kind": offer.kind, "base": offer.base}

    def _write_share(self, work: Path, offer: Offer, deadline: float) -> dict[str, Any]:
        """Writes the shard or the payload; returns what the manifest says of it."""
        rank, world = self._context.rank, self._context.world
        number = "" if world == 1 else f"-{rank + 1:05d}-of-{world:05d}"
        if offer.kind == FULL:
            path = work / f"model{number}.safetensors"
            header, tensors = self._header(offer)
            size = len(header) + sum(t["nbytes"] for t in tensors)
        else:
            path = work / f"delta{number}.bin"
            size = offer.nbytes[rank]
        _need(self._folder, size)
        with _new_file(path) as fd:
            share: dict[str, Any] = {**self._identity(offer), "file": path.name, "nbytes": size}
            if offer.kind == FULL:
                _write(fd, header)
                buffer = self._context.buffers[offer.buffer]
                entries = self._context.layout.by_name
                for tensor in tensors:
                    for block in view(buffer, entries[tensor["name"]]).reshape(-1).split(tensor["block"]):
                        _before(deadline, self._context.deadline_s, f"{path} to be written ({size} bytes)")
                        host = block.cpu()
                        tensor["sums"].append(digest(host))
                        _write(fd, host.view(torch.uint8).numpy().data)
                share["tensors"] = tensors
            else:
                assert self._context.payload is not None, "a delta was offered, and there is no payload"
                payload = self._context.payload[:size].cpu()
                share["sum"] = digest(payload)
                _write(fd, payload.numpy().data)
        return share

    def _header(self, offer: Offer) -> tuple[bytes, list[dict[str, Any]]]:
        """The head of the safetensors file, and the manifest's tensors, whose `begin` counts from the file's start."""
        # Wide elements first, so that every tensor is aligned.
        entries = sorted(self._context.layout.entries, key=lambda e: -e.torch_dtype.itemsize)
        parts = {e.name: {"shape": e.shape, "box": e.box} for e in entries if e.box != full_box(e.shape)}
        metadata = {"format": "pt", "version": str(offer.version), "parts": json.dumps(parts)}
        header: dict[str, Any] = {"__metadata__": metadata}
        tensors: list[dict[str, Any]] = []
        at = 0
        for e in entries:
            shape, end = box_shape(e.box), at + e.nbytes
            if e.dtype not in _SAFETENSORS:
                raise WeightSyncError(
                    f"{e.name} has dtype {e.dtype}, which transport file cannot write; use another weightsync.transport"
                )
            header[e.name] = {"dtype": _SAFETENSORS[e.dtype], "shape": shape, "data_offsets": [at, end]}
            row = max(1, e.nbytes // e.torch_dtype.itemsize // shape[0]) if shape and shape[0] else 1
            block = row * max(1, _BLOCK_BYTES // (row * e.torch_dtype.itemsize))
            tensors.append({"name": e.name, "dtype": e.dtype, "shape": e.shape, "box": e.box, "nbytes": e.nbytes})
            tensors[-1] |= {"begin": at, "block": block, "sums": []}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        for tensor in tensors:
            tensor["begin"] += 8 + len(text)
        return len(text).to_bytes(8, "little") + text, tensors

    def _gather(self, work: Path, offer: Offer, deadline: float) -> list[dict[str, Any]]:
        """The shares of all ranks, once they are there."""
        shares: list[dict[str, Any]] = []
        for rank, token in enumerate(self._tokens):
            wanted = {**self._identity(offer), "token": token}
            while True:
                share = _read_json(work / f"rank-{rank}.json")
                if share is not None and share.items() >= wanted.items():
                    break
                what = f"trainer rank {rank} to write its shard of version {offer.version} to {work}"
                _before(deadline, self._context.deadline_s, what)
                time.sleep(_POLL_S)
            if "error" in share:
                raise WeightSyncError(f"trainer rank {rank}: {share['error']}")
            shares.append(share)
        return shares

    def _finish(self, work: Path, final: Path, offer: Offer, shares: list[dict[str, Any]]) -> None:
        files = [{k: v for k, v in share.items() if k not in self._identity(offer)} for share in shares]
        manifest = {"format": _FORMAT, "version": offer.version, "kind": offer.kind, "base": offer.base}
        _write_json(work / MANIFEST, {**manifest, "run": self._token, "files": files})
        kept = {MANIFEST, *(file["file"] for file in files)}
        tensors = [(t, file["file"]) for file in files for t in file.get("tensors", ())]
        if len(files) > 1 and tensors and all(_whole(t) for t, _ in tensors):
            index = {"metadata": {"total_size": sum(t["nbytes"] for t, _ in tensors)}}
            _write_json(work / _INDEX, {**index, "weight_map": {t["name"]: file for t, file in tensors}})
            kept.add(_INDEX)
        for path in work.iterdir():
            if path.name not in kept:
                path.unlink()
        sync_folder(work)
        if final.exists():  # an earlier run's, which cannot be told by its name
            _remove(final)
        work.rename(final)
        sync_folder(final.parent)

    def _give_up(self, work: Path, offer: Offer, why: str) -> None:
        """Leaves nothing half-written; tells rank 0, which waits for this rank."""
        with contextlib.suppress(OSError):
            if self._context.rank == 0:
                shutil.rmtree(work, ignore_errors=True)
            else:
                _write_json(work / f"rank-{self._context.rank}.json", {**self._identity(offer), "error": why})

    def _remove_old(self, newest: Path) -> None:
        """Removes versions beyond the newest `KEEP`, unless somebody reads them."""
        self._published = [path for path in self._published if path != newest] + [newest]
        versions = list(dict.fromkeys(_number(path) for path in reversed(self._published)))
        now = (newest / MANIFEST).stat().st_mtime  # by the clock of the file system, which dates the marks too
        for path in list(self._published):
            if _number(path) in versions[KEEP:] and not self._is_read(path, now):
                _remove(path)
                self._published.remove(path)
        self._clear_away(below=versions[0])

    def _clear_away(self, below: float = math.inf) -> None:
        """Removes what failed attempts at versions `below` this one have left, and what was to be removed already."""
        for path in self._folder.iterdir():
            if 0 <= _number(path) < below and (path.suffix == ".tmp" or _GONE in path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _is_read(self, path: Path, now: float) -> bool:
        with contextlib.suppress(OSError):
            marks = [mark.stat().st_mtime for mark in path.glob(_MARK + "*")]
            return any(now - mark < self._context.deadline_s for mark in marks)
        return False

    def close(self) -> None:
        """Versions stay; the folder may be taken by another run."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._clear_away()
            os.close(self._lock)
            self._lock = None


class FilePuller(Puller):
    """Reads what its worker needs of a version into an image of its own, and checks every block that it reads."""

    def __init__(self, context: PullerContext) -> None:
        self._context = context
        self._needed = context.needed[context.tp_rank]
        self._held = context.layout.by_name
        self._image: torch.Tensor | None = None

    def pull(self, offer: Offer) -> torch.Tensor:
        if self._image is None:
            self._image = make_image(self._context.layout.nbytes, self._context.device)
        with self._open(offer, FULL) as reading:
            files = zip(reading.files, self._context.sources, strict=True)
            for file, source in files:
                found = {t["name"]: t for t in file["tensors"]}
                if {name: _identity(t) for name, t in found.items()} != {e.name: _plain(e) for e in source.entries}:
                    raise WeightSyncError(
                        f"{reading.path / file['file']} of version {offer.version} does not hold what its trainer rank "
                        "said at connect; connect again"
                    )
                with reading.file(file) as fd:
                    for entry in source.entries:
                        self._read(reading, file, fd, entry, found[entry.name])
        return self._image

    def pull_payloads(self, offer: Offer) -> list[torch.Tensor]:
        payloads = []
        with self._open(offer, DELTA) as reading:
            for file in reading.files:
                with reading.file(file) as fd:
                    payload = torch.empty(file["nbytes"], dtype=torch.uint8)
                    for at in range(0, len(payload), _BLOCK_BYTES):
                        reading.read(file, fd, at, payload[at : at + _BLOCK_BYTES])
                    if digest(payload) != file["sum"]:
                        raise reading.error(file, "is damaged")
                    payloads.append(payload)
        return payloads

    def _read(self, reading: _Reading, file: dict[str, Any], fd: int, entry: Entry, tensor: dict[str, Any]) -> None:
        """Brings what is needed of one tensor into the image, by blocks of whole rows."""
        wanted = intersect(entry.box, self._needed[entry.name]) if entry.name in self._needed else None
        if wanted is None:
            return
        assert self._image is not None
        held = self._held[entry.name]
        itemsize, shape = entry.torch_dtype.itemsize, box_shape(entry.box)
        rows = shape[0] if shape else 1
        row_bytes = entry.nbytes // rows
        block_rows = max(1, tensor["block"] * itemsize // row_bytes)
        (first, _), *inner = entry.box or ((0, 1),)
        (low, high), *inner_wanted = wanted or ((0, 1),)
        for number in range((low - first) // block_rows, -(-(high - first) // block_rows)):
            start, stop = number * block_rows, min(rows, (number + 1) * block_rows)
            lo, hi = max(low, first + start), min(high, first + stop)
            box: Box = ((lo, hi), *inner_wanted) if shape else ()
            target = sub_view(self._image, held, box)
            whole = (hi - lo, inner_wanted) == (stop - start, inner)
            straight = whole and target.is_contiguous() and not target.is_cuda
            block = target if straight else torch.empty((stop - start, *shape[1:]), dtype=entry.torch_dtype)
            reading.read(file, fd, tensor["begin"] + start * row_bytes, block.reshape(-1).view(torch.uint8))
            if digest(block) != tensor["sums"][number]:
                raise reading.error(file, f"is damaged in {entry.name}, rows {first + start} to {first + stop}")
            if not straight:
                cut = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(inner_wanted, inner, strict=True))
                target.copy_(block[(slice(lo - first - start, hi - first - start), *cut)].view(target.shape))

    @contextlib.contextmanager
    def _open(self, offer: Offer, kind: str) -> Iterator[_Reading]:
        """The version's folder, marked as being read."""
        if offer.kind != kind:
            raise WeightSyncError(f"version {offer.version} is offered as {offer.kind}, and was to be read as {kind}")
        context = self._context
        path = Path(offer.where["path"])
        mark = path / f"{_MARK}{urllib.parse.quote(context.peer, safe='')}-{context.tp_rank}"
        deadline = time.monotonic() + context.deadline_s
        text = self._manifest(path, mark, offer, deadline)
        try:
            if xxh3_64_intdigest(text) != offer.where["manifest"]:
                raise WeightSyncError(
                    f"{path / MANIFEST} is not the one that version {offer.version} was offered with: it is damaged, "
                    "or another run publishes into the same folder; give each run a weightsync.folder of its own"
                )
            yield _Reading(path, offer.version, json.loads(text)["files"], deadline, context.deadline_s)
        except ForgeError:
            raise  # DeadlineExceeded is an OSError too
        except OSError as error:
            raise _disk_error("read", offer.version, path, error) from error
        finally:
            with contextlib.suppress(OSError):
                mark.unlink()

    def _manifest(self, path: Path, mark: Path, offer: Offer, deadline: float) -> bytes:
        """Waits for the folder: a network file system may show it later than the offer came."""
        while True:
            try:
                _leave_mark(mark)
                return (path / MANIFEST).read_bytes()
            except FileNotFoundError as error:
                overtaken = any(
                    (_read_json(other / MANIFEST) or {}).get("run") == offer.where["run"]
                    for other in _versions(path.parent)
                    if _number(other) > offer.version
                )
                if overtaken or time.monotonic() > deadline:
                    why = "it has been removed, newer ones are there" if overtaken else "this host does not see it"
                    raise WeightSyncError(
                        f"version {offer.version} is not in {path}: {why}; take the newest offer, or see to it that "
                        "weightsync.folder is the same file system under the same path here and at the trainer"
                    ) from error
                time.sleep(_POLL_S)
            except OSError as error:
                raise _disk_error("read", offer.version, path, error) from error


class _Reading(NamedTuple):
    """A version that is being read: `files` as the manifest has them."""

    path: Path
    version: int
    files: list[dict[str, Any]]
    deadline: float
    deadline_s: float

    @contextlib.contextmanager
    def file(self, file: dict[str, Any]) -> Iterator[int]:
        """A file of the folder, open, once it is known to be as long as it should be."""
        try:
            fd = os.open(self.path / file["file"], os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self.error(file, f"cannot be opened ({error.strerror})") from error
        try:
            size = os.fstat(fd).st_size
            if size != file["nbytes"]:
                raise self.error(file, f"has {size} bytes and should have {file['nbytes']}")
            yield fd
        finally:
            os.close(fd)

    def read(self, file: dict[str, Any], fd: int, at: int, target: torch.Tensor) -> None:
        """Fills `target` (uint8, contiguous, on the host) from byte `at` of the file."""
        _before(self.deadline, self.deadline_s, f"{self.path / file['file']} to be read (version {self.version})")
        left = target.numpy().data
        while left:
            count = os.preadv(fd, [left], at)
            if count == 0:
                raise self.error(file, f"ends at byte {at}")
            left, at = left[count:], at + count

    def error(self, file: dict[str, Any], what: str) -> WeightSyncError:
        return WeightSyncError(
            f"{self.path / file['file']} of version {self.version} {what}; the version is not applied, publish it "
            "again or take a newer one"
        )


# --- manifests


def _identity(tensor: dict[str, Any]) -> list[Any]:
    return [tensor["dtype"], tensor["shape"], tensor["box"], tensor["nbytes"]]


def _plain(entry: Entry) -> list[Any]:
    """The same of an entry, as JSON has it."""
    return [entry.dtype, list(entry.shape), [list(r) for r in entry.box], entry.nbytes]


def _whole(tensor: dict[str, Any]) -> bool:
    return [list(r) for r in tensor["box"]] == [[0, size] for size in tensor["shape"]]


def _number(path: Path) -> int:
    """The version in the name of a folder of ours, finished or not; -1 for any other name."""
    found = _VERSION.match(path.name)
    return int(found[1]) if found else -1


def _versions(folder: Path) -> list[Path]:
    """The finished versions in a folder, whoever has written them."""
    with contextlib.suppress(OSError):
        return [p for p in folder.iterdir() if _VERSION.fullmatch(p.name) and (p / MANIFEST).exists()]
    return []


# --- files


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """A file that appears under its name once it is written and synced, or not at all."""
    partial = path.with_name(path.name + ".part")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write(fd: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with _new_file(path) as fd:
        _write(fd, json.dumps(value).encode())


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return value


def _remove(path: Path) -> None:
    """Out of sight at once, then gone."""
    gone = path.with_name(f"{path.name}{_GONE}{uuid.uuid4().hex[:8]}")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _lock(folder: Path) -> int | None:
    """Held for as long as this process lives; None where the file system has no locks."""
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise ConfigError(
            f"another run publishes into weightsync.folder {folder}; give each run a folder of its own"
        ) from error
    except OSError:
        os.close(fd)
        return None
    return fd


def _leave_mark(path: Path) -> None:
    """A puller that may not write leaves none."""
    try:
        path.touch()
    except FileNotFoundError:
        raise
    except OSError:
        return


def _need(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {nbytes:,} bytes are needed")


def _before(deadline: float, deadline_s: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise DeadlineExceeded(f"waited {deadline_s:g} s for {what}")


def _disk_error(verb: str, version: int, folder: Path, error: OSError) -> WeightSyncError:
    code = errno.errorcode.get(error.errno or 0, "unknown error")
    remedy = "it is not applied, take a newer one once the file system answers"
    if verb == "write":
        remedy = "nothing of it is left behind. Free some space or set weightsync.folder to a folder on another disk"
        with contextlib.suppress(OSError):
            remedy = f"{shutil.disk_usage(folder.parent).free:,} bytes are free there, {remedy}"
    return WeightSyncError(f"cannot {verb} version {version} in {folder}: {error.strerror or error} ({code}); {remedy}")
