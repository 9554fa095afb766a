"""`--shakeout N`: a run of N measured steps that keeps nothing and ends with what holds whom back.

    python apps/grpo/main.py --config apps/grpo/tiny.yaml --shakeout 20

No checkpoints, no final model, no TensorBoard; the folder is a scratch one that is removed, unless run.dir is given.
Everything else runs as configured, so what is measured is what a long run has.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import uuid
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from forge.config_schema import leaves
from forge.errors import ConfigError
from forge.metrics import read_rows
from forge.shakeout import WARM_UP_STEPS, findings, measure, page

FLAG = "--shakeout"
_KEEPS_NOTHING = {"run.checkpoint": "false", "run.checkpoint_every": "0", "run.tensorboard": "false"}


class Shakeout:
    """What the command line says of it, and the page at the end. Off until `expand` finds the flag."""

    def __init__(self, config_cls: type) -> None:
        self._keys = {leaf.key for leaf in leaves(config_cls)}
        self._scratch: Path | None = None
        self.steps = 0

    def expand(self, words: Sequence[str]) -> list[str]:
        """The command line with `--shakeout=N` (or `--shakeout N`) written out, behind every other option.

        Raises ConfigError for a number of steps below 1, and beside --resume.
        """
        rest = list(words)
        places = [i for i, word in enumerate(rest) if word.partition("=")[0] == FLAG]
        if not places:
            return rest
        word = rest.pop(places[0])
        following = places[0] < len(rest) and not rest[places[0]].startswith("--")
        text = word.partition("=")[2] if "=" in word else rest.pop(places[0]) if following else ""
        if len(places) > 1 or not text.isdecimal() or not int(text):
            raise ConfigError(f"shakeout is {text!r} (command line), allowed: steps to measure, once; write {FLAG}=20")
        given = {word.removeprefix("--").partition("=")[0] for word in rest if word.startswith("--")}
        if given & {"resume", "run.resume"}:
            raise ConfigError(
                f"{FLAG} and --resume are both given: a shakeout keeps nothing to go on with; leave one out"
            )
        self.steps = int(text)
        if "run.dir" in self._keys and "run.dir" not in given:
            self._scratch = Path(tempfile.gettempdir()) / f"shakeout-{uuid.uuid4().hex[:8]}"
            rest.append(f"--run.dir={self._scratch}")
        total = self.steps + WARM_UP_STEPS
        rest += [f"--{key}={total}" for key in sorted(self._keys) if f".{key}".endswith(".trainer.steps")]
        return rest + [f"--{key}={value}" for key, value in _KEEPS_NOTHING.items() if key in self._keys]

    async def around(self, run: Awaitable[object], cfg: Any, console: Console | None = None) -> None:
        """Awaits the run, and tells what it has measured. A run that fails leaves its folder."""
        await run
        if not self.steps:
            return
        console = console or Console()
        for name, folder in _folders(Path(cfg.run.dir)):
            knobs = knobs_of(getattr(cfg, name)) if name else knobs_of(cfg)
            measured = measure(read_rows(folder / "metrics.jsonl"))
            found = findings(measured, knobs) if measured else []
            console.print(page(measured, found, f"Shakeout of {name}" if name else "Shakeout"))
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _folders(run: Path) -> Iterator[tuple[str, Path]]:
    """The run folder, or those of the policies in it, by their names."""
    if (run / "metrics.jsonl").exists():
        yield "", run
    else:
        yield from ((path.parent.name, path.parent) for path in sorted(run.glob("*/metrics.jsonl")))


def knobs_of(section: Any, prefix: str = "") -> dict[str, Any]:
    """Every key of a configuration with its value. Pure."""
    knobs: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            knobs |= knobs_of(value, f"{prefix}{field.name}.")
        else:
            knobs[prefix + field.name] = value
    return knobs
