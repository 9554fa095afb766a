"""What a run folder holds, as far as the page shows it. Reads files, computes nothing.

A file that is missing leaves its part of the page out; so does one that a run which was killed left torn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from forge.errors import ConfigError, SchemaError
from forge.metrics import Row, read_rows
from forge.trace import Span, read_spans


@dataclass(frozen=True)
class Episode:
    """One line of episodes.jsonl."""

    step: int
    prompt: str
    completion: str
    reward: float | None
    versions: tuple[int, ...]
    pieces: tuple[tuple[str, int], ...] = ()
    """The whole episode in order: text, and the version that sampled it, -1 where it was given; () in older files."""


@dataclass(frozen=True)
class Run:
    """One run folder, read."""

    name: str
    rows: list[Row]
    episodes: list[Episode] = field(default_factory=list)
    config_text: str = ""
    config: dict[str, str] = field(default_factory=dict)
    """The configuration by dotted name, values as text."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """The same, values as they are."""
    evaluations: list[Row] = field(default_factory=list)
    """evaluations.jsonl, one object a version that was evaluated."""
    spans: list[Span] = field(default_factory=list)
    environments: dict[str, Any] = field(default_factory=dict)
    """environments.json: latencies of the whole run by kind of environment."""
    facts: dict[str, Any] = field(default_factory=dict)
    """run.json: when, where, with what, and how it ended."""
    began: float | None = None
    """Unix time, from run.json or else from the age of config.yaml."""


def read_run(folder: str | Path, name: str | None = None) -> Run:
    """Reads the folder of a run that goes on or is over.

    Raises ConfigError when it is no run folder, or its metrics.jsonl has no row yet.
    """
    path = Path(folder)
    try:
        rows = read_rows(path / "metrics.jsonl")
    except FileNotFoundError:
        raise ConfigError(f"{path} is no run folder: it has no metrics.jsonl; give a folder below runs/") from None
    except (OSError, UnicodeDecodeError, SchemaError) as error:
        raise ConfigError(f"{path}/metrics.jsonl cannot be read: {error}; give the folder of a run") from error
    rows = [row for row in rows if isinstance(row.get("step"), int)]
    if not rows:
        raise ConfigError(f"{path} has no finished step in metrics.jsonl; wait for the first one")
    text = _text(path / "config.yaml")
    facts = _object(path / "run.json")
    return Run(
        name=name or path.resolve().name,
        rows=rows,
        episodes=list(_episodes(_text(path / "episodes.jsonl"))),
        config_text=text,
        config=flat(_yaml(text)),
        knobs=leaves(_yaml(text)),
        evaluations=_evaluations(path / "evaluations.jsonl"),
        spans=_spans(path),
        environments=_object(path / "environments.json"),
        facts=facts,
        began=facts["began"] if isinstance(facts.get("began"), (int, float)) else _began(path),
    )


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Several, under names that tell them apart: as much of the path as that takes."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"a run is given twice: {', '.join(map(str, folders))}; give each folder once")
    depth = 1
    while len(names := ["/".join(path.parts[-depth:]) for path in paths]) > len(set(names)):
        depth += 1
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def flat(tree: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted names with values as text."""
    return {key: "null" if value is None else str(value) for key, value in leaves(tree, prefix).items()}


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The same with values as they are."""
    if isinstance(tree, Mapping) and tree:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            found |= leaves(value, f"{prefix}.{key}" if prefix else str(key))
        return found
    return {prefix: tree} if prefix else {}


def _evaluations(path: Path) -> list[Row]:
    with suppress(OSError, UnicodeDecodeError, SchemaError):
        return [row for row in read_rows(path) if isinstance(row.get("step"), int)]
    return []


def _episodes(text: str) -> Iterator[Episode]:
    for line in text.splitlines():
        # The last line may be torn; any other that is no episode is of no more use.
        with suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            reward = record["reward"]
            yield Episode(
                int(record["step"]),
                str(record["prompt"]),
                str(record["completion"]),
                None if reward is None else float(reward),
                tuple(int(version) for version in record["versions"]),
                tuple((str(piece), int(version)) for piece, version in record.get("pieces", ())),
            )


def _spans(path: Path) -> list[Span]:
    """Of the last part of the run where it was resumed: each part has a file, and clocks of its own."""
    files = sorted(path.glob("trace*.json"), key=lambda file: (len(file.name), file.name))
    with suppress(OSError, ValueError, KeyError, TypeError):
        return read_spans(files[-1]) if files else []
    return []


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _object(path: Path) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(_text(path) or "{}")
        return found if isinstance(found, dict) else {}
    return {}


def _yaml(text: str) -> Any:
    with suppress(yaml.YAMLError):
        return yaml.safe_load(text)
    return {}


def _began(path: Path) -> float | None:
    """A resumed run keeps its first configuration as config.1.yaml."""
    for name in ("config.1.yaml", "config.yaml"):
        with suppress(OSError):
            return (path / name).stat().st_mtime
    return None
