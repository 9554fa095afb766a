"""`verifiers` environments, which bring their own agent: it speaks to the gateway, and is trained as it is.

A program, run by the interpreter that has verifiers installed, since that needs other versions than we do:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... PYTHON verifiers.py '{"taskset": {"id": "my-taskset"}}' --index 3

The first argument is verifiers' own environment config (`verifiers.v1.EnvConfig`) as JSON. The file verifiers.json gets
the reward, what it is made of, and how many turns the episode took; `check` reads it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULT = "verifiers.json"
"""Where `check` looks for a result, in the episode's folder."""


def check(task: Mapping[str, Any], folder: str) -> float:
    """The reward that the program left in `folder`. Raises RuntimeError when the episode failed."""
    result = json.loads((Path(folder) / RESULT).read_text())
    if result["errors"]:
        raise RuntimeError(f"verifiers' episode of task {task.get('id', '')!r} failed: {result['errors'][0]}")
    return float(result["reward"])


async def play(config: dict[str, Any], index: int, model: str, sampling: dict[str, Any]) -> dict[str, Any]:
    """One episode of the task at place `index`, with the policy behind OPENAI_BASE_URL."""
    import os

    import verifiers.v1 as vf  # type: ignore[import-not-found]
    from verifiers.v1.utils.loaders import resolve_env_config  # type: ignore[import-not-found]

    env = vf.load_environment(resolve_env_config(config))
    task = next(itertools.islice(iter(env.taskset), index, None), None)
    if task is None:
        raise SystemExit(f"the taskset has no task at place {index}; places begin at 0")
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(model, client, vf.SamplingConfig(**sampling))
    async with env.serving():
        episode = await env.run_episode(task, context)
    errors = [error for holder in (episode, *episode.traces) for error in holder.errors]
    return {
        "reward": sum(trace.reward for trace in episode.traces),
        "rewards": [{name: r.value for name, r in trace.rewards.items() if r is not None} for trace in episode.traces],
        "turns": sum(trace.num_turns for trace in episode.traces),
        "errors": [f"{error.type}: {error.message}" for error in errors],
    }


def main() -> int:
    """Reads the command line, plays, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=json.loads, help="verifiers' environment config, JSON")
    parser.add_argument("--index", type=int, default=0, help="place of the task in the taskset")
    parser.add_argument("--model", default="policy")
    parser.add_argument("--sampling", type=json.loads, default={}, help="of verifiers' SamplingConfig, JSON")
    parser.add_argument("--out", default=RESULT)
    args = parser.parse_args()
    result = asyncio.run(play(args.config, args.index, args.model, args.sampling))
    Path(args.out).write_text(json.dumps(result))
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where modules are called as the packages they adapt
    sys.exit(main())
