"""Writes requirements/cpu.lock: every package that a CPU machine needs, pinned, from what is installed.

    make lock                                     # after trying new pins out in .venv
    .venv/bin/python requirements/lock.py --check # exit code 1 where lock, pyproject.toml and .venv disagree

The lock is the closure of pyproject.toml's dependencies, extras `cpu` and `dev`, and build requirements
over the metadata of the installed packages, without the packages that `[tool.meshforge.unwanted]` names.
pip cannot leave those out by itself, so the lock is installed with `--no-deps`. Covers Linux on x86_64 and
aarch64, CPython 3.11 and later.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
HEADER = "# Written by `make lock` from pyproject.toml; installed with --no-deps by `make setup`. Do not edit.\n"


def direct_requirements(project: dict[str, Any]) -> list[Requirement]:
    """What pyproject.toml asks for on a CPU machine."""
    extras = project["project"]["optional-dependencies"]
    groups = [
        project["project"]["dependencies"],
        extras["cpu"],
        extras["dev"],
        project["build-system"]["requires"],
    ]
    return [Requirement(line) for group in groups for line in group]


def closure(roots: list[Requirement], unwanted: set[str], machine: str) -> dict[str, str]:
    """Canonical name to installed version of `roots` and all that they need on `machine`."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = list(roots)
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in unwanted or (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(
                f"{name} is needed but not installed; run: pip install --no-deps '{requirement}'"
            ) from None
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            raise SystemExit(
                f"{name} {distribution.version} is installed, '{requirement}' is asked for; "
                f"run: pip install --no-deps '{requirement}'"
            )
        versions[name] = distribution.version
        for line in distribution.requires or []:
            needed = Requirement(line)
            marker = needed.marker
            environments = [{"platform_machine": machine, "extra": extra} for extra in extras | {""}]
            if marker is None or any(marker.evaluate(environment) for environment in environments):
                todo.append(needed)
    return versions


def lock_text() -> str:
    """The lock as it should be."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    roots, settings = direct_requirements(project), project["tool"]["meshforge"]
    x86, arm = (closure(roots, set(settings["unwanted"]), machine) for machine in ("x86_64", "aarch64"))
    lines = list(settings["without-dependencies"])
    for name, version in (x86 | arm).items():
        only = "x86_64" if name not in arm else "aarch64" if name not in x86 else ""
        lines.append(f"{name}=={version}" + (f' ; platform_machine == "{only}"' if only else ""))
    return HEADER + "\n".join(sorted(lines)) + "\n"


def main() -> None:
    """Writes the lock, or with `--check` says how it differs."""
    wanted = lock_text()
    if sys.argv[1:] != ["--check"]:
        LOCK.write_text(wanted)
        return
    found = LOCK.read_text()
    if found != wanted:
        diff = difflib.unified_diff(found.splitlines(), wanted.splitlines(), str(LOCK), "as it should be", lineterm="")
        raise SystemExit("\n".join([*diff, "the lock is stale; run: make lock"]))


if __name__ == "__main__":
    main()
