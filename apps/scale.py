"""More generators, or fewer, in a run that goes on.

    python -m apps.scale runs/NAME 3        # three, from now on; also after a --resume

Up to `mesh.generator.max_replicas`, whose device slots the run keeps. One that comes holds the newest weights before it
takes requests; one that leaves ends those that it has first. The run's lines tell of it (`apps/grpo/fleet.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from apps.grpo.fleet import WISH
from forge.errors import ConfigError


def wish(folder: Path, generators: int) -> None:
    """Writes down that the run in `folder` is to have so many. Raises ConfigError where it cannot have them."""
    try:
        mesh = yaml.safe_load((folder / "config.yaml").read_text())["mesh"]
        generator = mesh["generator"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} is no run with generators: {type(error).__name__}: {error}") from error
    if mesh.get("colocate") or mesh.get("debug"):
        raise ConfigError(f"with mesh.colocate or mesh.debug, as in {folder}, no generator comes or goes")
    most = max(generator["replicas"], generator.get("max_replicas") or 0)
    if not 1 <= generators <= most:
        raise ConfigError(
            f"the run in {folder} can have 1 to {most} generators, not {generators}; mesh.generator.max_replicas is "
            "chosen when it starts"
        )
    new = folder / f"{WISH}.new"
    new.write_text(json.dumps({"generators": generators}) + "\n")
    new.rename(folder / WISH)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m apps.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("generators", type=int, help="how many it is to have")
    options = parser.parse_args(arguments)
    try:
        wish(options.run, options.generators)
    except ConfigError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.generators} wanted; the run's own lines say when they serve")
    return 0


if __name__ == "__main__":
    sys.exit(main())
