"""What tests of pools and processes have in common."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`worlds.py`, as a user's module, here and in processes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    module = importlib.import_module("worlds")
    module.Waiting.alive = module.Waiting.closed = 0
    return module
