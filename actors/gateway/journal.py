"""Sessions in a folder, one file each, one line for each thing that happened: what a server's death leaves."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from actors.gateway.saved import Entry, session_of
from actors.gateway.sessions import Session
from forge.errors import RunFolderError

_log = logging.getLogger(__name__)


class Journal:
    """Files that their user alone may read, since they have the sessions' keys. One writer at a time."""

    def __init__(self, folder: str) -> None:
        """Made where it is missing. Raises RunFolderError where it cannot be."""
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise RunFolderError(f"gateway.journal {folder} cannot be made: {error}; give another folder") from error

    def write(self, session: str, entry: Entry) -> None:
        """One line behind the others; it outlives this process once this returns. Raises RunFolderError."""
        path = self._path(session)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(file, "ab") as lines:
                lines.write(json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise RunFolderError(f"{path} cannot be written: {error}; free space, or give another folder") from error

    def forget(self, session: str) -> None:
        """Deletes a session's file."""
        self._path(session).unlink(missing_ok=True)

    def load(self) -> list[Session]:
        """All sessions on file. A last line that a death has cut is cut off; a file without a whole one is left out."""
        return [session for path in sorted(self._folder.glob("*.jsonl")) if (session := _read(path)) is not None]

    def _path(self, session: str) -> Path:
        return self._folder / f"{session}.jsonl"


def _read(path: Path) -> Session | None:
    whole = path.read_bytes()
    lines = whole[: whole.rfind(b"\n") + 1]
    if len(lines) < len(whole):
        os.truncate(path, len(lines))  # what is written next must begin a line
    entries = [json.loads(line) for line in lines.splitlines()]
    if not entries:
        _log.warning("%s has no whole line and is left out", path)
        return None
    return session_of(entries)
