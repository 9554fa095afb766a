"""The folders of a run's checkpoints: each whole or not at all.

checkpoints/000040.partial/   being written
checkpoints/000040/           complete: trainer/ and checkpoint.json
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forge.errors import ActorFailed, RunFolderError
from forge.run_folder import folder_error, sync_folder

_META = "checkpoint.json"
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Checkpoint:
    """A complete one: what it is called in `policy_version`, where it lies, and the plain values saved with it."""

    version: int
    path: Path
    meta: Mapping[str, Any]


class Checkpoints:
    """Those of one run, in `folder`; the newest `keep` of them stay.

    `begin` gives a folder to fill, `commit` makes it count: a crash in between leaves the older ones as they were.
    """

    def __init__(self, folder: Path, keep: int = 1) -> None:
        self.folder, self._keep = folder, keep

    def begin(self, version: int) -> Path:
        """An empty folder for the checkpoint of `version`. Raises RunFolderError when it cannot be made."""
        path = self._path(version).with_suffix(_PARTIAL)
        try:
            if self.folder.is_dir():
                for left in self.folder.glob(f"*{_PARTIAL}"):  # by a run that was killed
                    shutil.rmtree(left)
            path.mkdir(parents=True)
        except OSError as error:
            raise folder_error(path, error) from error
        return path

    def commit(self, version: int, meta: Mapping[str, Any]) -> Checkpoint:
        """Makes the filled folder count, with `meta` (plain values); removes those beyond `keep`.

        Returns the oldest that stays.

        What is in the folder must have been synced. Raises RunFolderError when the disk refuses.
        """
        path = self._path(version)
        partial = path.with_suffix(_PARTIAL)
        try:
            with open(partial / _META, "w", encoding="utf-8") as file:
                json.dump({"version": version, **meta}, file)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(partial)
            shutil.rmtree(path, ignore_errors=True)  # of the same version, by an earlier incarnation
            partial.rename(path)
            sync_folder(self.folder)
            there = self.list()
            for old in there[: -self._keep]:
                shutil.rmtree(old.path)
        except OSError as error:
            raise folder_error(path, error) from error
        return there[-self._keep :][0]

    def list(self) -> list[Checkpoint]:
        """The complete ones, oldest first. Raises RunFolderError for one that cannot be read."""
        found = []
        for path in self.folder.glob(f"*/{_META}"):
            if path.parent.suffix == _PARTIAL:
                continue
            try:
                meta = json.loads(path.read_text(encoding="utf-8"))
                found.append(Checkpoint(int(meta["version"]), path.parent, meta))
            except OSError as error:
                raise folder_error(path, error, "read") from error
            except (ValueError, KeyError, TypeError) as error:
                raise RunFolderError(
                    f"{path} does not describe a checkpoint ({error!r}); remove {path.parent} to resume from an "
                    "older one"
                ) from error
        return sorted(found, key=lambda checkpoint: checkpoint.version)

    def latest(self) -> Checkpoint | None:
        """The newest complete one; None while there is none."""
        return next(reversed(self.list()), None)

    def _path(self, version: int) -> Path:
        return self.folder / f"{version:06d}"


class SavesState(Protocol):
    """The trainer as a checkpoint sees it."""

    async def stage_state(self, folder: str) -> None:
        """Copies the state; it is on its way to `folder` then."""

    async def wait_state(self) -> None:
        """Until it is there."""


class Marks(Protocol):
    """The replay as a checkpoint sees it."""

    async def mark(self, version: int) -> None:
        """The state of now is that of `version`."""

    async def marked(self) -> int:
        """Until it is on the disk; its number."""
        ...

    async def prune(self, before: int) -> None:
        """What was marked with smaller numbers is needed no more."""


class Saver:
    """Begins a checkpoint every `every` steps (0: never); the train loop waits for a copy in memory, for no disk.

    One at a time: when a step is due while the last is still being written, it is left out and counted in `skipped`.
    `record` keeps all of the journal; `start` is the version that the run goes on from.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainer: SavesState,
        replay: Marks,
        every: int,
        *,
        start: int = 0,
        record: bool = False,
    ) -> None:
        self._checkpoints, self._trainer, self._replay = checkpoints, trainer, replay
        self._every, self._record = every, record
        self._writing: asyncio.Task[None] | None = None
        self._last = start
        self.skipped = 0

    async def after_step(self, version: int) -> None:
        """Between the step that made `version` and the next batch. Raises what the last checkpoint failed of."""
        writing = self._writing
        if writing is not None and writing.done():
            writing.result()
        if not self._every or version % self._every:
            return
        if writing is not None and not writing.done():
            self.skipped += 1
        else:
            await self._begin(version)

    async def settle(self) -> None:
        """The trainer has died: whatever becomes of the checkpoint that is being written, nobody is told."""
        writing = self._writing
        if writing is None:
            return
        await asyncio.wait([writing])
        if not writing.cancelled() and writing.exception() is not None:
            self._last = -1
        if self._writing is writing:
            self._writing = None

    async def finish(self, version: int) -> None:
        """At the end: `version` is on the disk. Raises what goes wrong with it."""
        if self._writing is not None:
            await self._writing
        while self._every and version != self._last:  # once more where the replay dies meanwhile
            await (await self._begin(version))

    async def _begin(self, version: int) -> asyncio.Task[None]:
        if self._writing is not None:
            await self._writing
        path = await asyncio.to_thread(self._checkpoints.begin, version)
        await self._trainer.stage_state(str(path / "trainer"))
        await self._replay.mark(version)
        self._last = version
        self._writing = asyncio.create_task(self._write(version))
        return self._writing

    async def _write(self, version: int) -> None:
        number, written = await asyncio.gather(
            self._replay.marked(), self._trainer.wait_state(), return_exceptions=True
        )
        if isinstance(number, ActorFailed) and written is None:
            # The replay has died, and lives again: the next checkpoint will do.
            self.skipped, self._last = self.skipped + 1, -1
            return
        for outcome in (written, number):
            if isinstance(outcome, BaseException):
                raise outcome
        assert isinstance(number, int)
        oldest = await asyncio.to_thread(self._checkpoints.commit, version, {"segment": number})
        if number >= 0 and not self._record:
            await self._replay.prune(int(oldest.meta["segment"]))
