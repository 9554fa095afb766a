"""Where the data stood at each checkpoint: `data.json` in the run folder, what the replay's journal is to a rollout."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.errors import ConfigError, RunFolderError
from forge.run_folder import folder_error, sync_folder


class Cursor:
    """Kept beside the checkpoints by `forge.checkpoints.Saver`, whose calls these are.

    Raises RunFolderError where the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._states: dict[int, Mapping[str, Any]] = {}
        self._version = -1
        self.now: Mapping[str, Any] = {}
        """Behind the batch that was trained last."""
        if path.exists():
            try:
                self._states = {int(key): state for key, state in json.loads(path.read_text("utf-8")).items()}
            except OSError as error:
                raise folder_error(path, error, "read") from error
            except (ValueError, AttributeError) as error:
                raise RunFolderError(f"{path} does not say where the data stood: {error!r}; begin a new run") from error

    def at(self, version: int) -> Mapping[str, Any]:
        """Where the data stood when `version` was saved. Raises ConfigError where that is not known."""
        if version not in self._states:
            raise ConfigError(f"{self._path} does not know where the data stood at step {version}; begin a new run")
        return self._states[version]

    async def mark(self, version: int) -> None:
        """The state of now is that of `version`."""
        self._version = version
        self._states[version] = self.now

    async def marked(self) -> int:
        """Until it is on the disk; its version. Raises RunFolderError."""
        await asyncio.to_thread(self._write, json.dumps(self._states))
        return self._version

    async def prune(self, before: int) -> None:
        """Forgets what was marked before; the file follows at the next mark."""
        self._states = {version: state for version, state in self._states.items() if version >= before}

    def _write(self, text: str) -> None:
        new = self._path.with_suffix(".new")
        try:
            with open(new, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.rename(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            raise folder_error(self._path, error) from error
