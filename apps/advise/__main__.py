"""Synchronous or asynchronous, how far ahead, how many environments: measured for a minute, then simulated.

    python -m apps.advise --env apps.advise.example:Waiting --decode-s 0.1 --step-s 1.0     # a world that only waits
    python -m apps.advise --env my_world:World --tasks my_world:tasks --decode-s 2.0 --step-s 5.0

Plays episodes with a stand-in for the policy, `--act module:function` from an Observation to an Action (by default one
that says nothing), and measures how long resets and turns take. What the model costs it cannot know: `--decode-s` and
`--step-s` are seconds of one policy turn and of one optimizer step, from a run's metrics.jsonl, say. The table has the
pace of every staleness bound with several numbers of environments, in virtual time, and the last line the advice.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.environments.base import Action, Observation
from actors.environments.config import EnvironmentConfig
from actors.environments.pool import EnvironmentPool
from apps.advise.advice import Choice, Costs, best, choices, percentile, scene_of
from apps.advise.measure import Measured, measure
from forge.errors import ConfigError, ForgeError
from forge.registry import load


def say_nothing(said: Observation) -> Action:
    """What stands in for the policy by default."""
    return Action(text="")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m apps.advise", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--env", required=True, help="module:name of the environment")
    parser.add_argument("--env-args", type=json.loads, default={}, help="its keyword arguments, JSON")
    parser.add_argument("--tasks", help="module:function that returns the tasks; by default one empty task")
    parser.add_argument("--act", default="apps.advise.__main__:say_nothing", help="module:function, what is said to it")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure")
    parser.add_argument("--at-once", type=int, default=16, help="environments that are measured side by side")
    parser.add_argument("--max-turns", type=int, default=50)
    parser.add_argument("--decode-s", type=float, required=True, help="seconds to decode one turn, all places taken")
    parser.add_argument("--step-s", type=float, required=True, help="seconds of one optimizer step")
    parser.add_argument("--sync-s", type=float, default=1.0, help="seconds until generators have a step's weights")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8, help="groups of one step")
    parser.add_argument("--places", type=int, default=64, help="turns that the generators decode at once")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


async def measured_by(options: argparse.Namespace) -> Measured:
    """Plays the environment that the options name. Raises ConfigError for what cannot be played."""
    config = EnvironmentConfig(path=options.env, kwargs=options.env_args, concurrency=options.at_once)
    config.validate()
    tasks: list[Any] = list(load(options.tasks, "--tasks")()) if options.tasks else [{}]
    if not tasks:
        raise ConfigError(f"--tasks {options.tasks} returned 0 tasks; give at least one")
    random.Random(options.seed).shuffle(tasks)
    act = load(options.act, "--act")
    pool = EnvironmentPool(config)
    try:
        return await measure(
            pool,
            itertools.cycle(tasks),
            act,
            at_once=options.at_once,
            seconds=options.seconds,
            max_turns=options.max_turns,
        )
    finally:
        await pool.shutdown()


def show(found: Measured, rows: list[Choice], console: Console) -> None:
    """What was measured, and what would come of it."""
    turns = [seconds for episode in found.turns_s for seconds in episode]
    for name, values in (("reset", found.resets_s), ("turn", turns)):
        shares = "  ".join(
            f"p{share:.0%}".rstrip("%") + f" {percentile(values, share):.3g} s" for share in (0.5, 0.95, 0.99)
        )
        console.print(f"{name:6} {len(values):6} measured  {shares}  longest {max(values, default=0.0):.3g} s")
    console.print(f"{len(found.turns_s)} episodes, {len(turns) / max(1, len(found.turns_s)):.1f} turns each")
    for error, count in found.failed.most_common():
        console.print(f"failed {count} times: {error}")
    title = "simulated; trainer and generator: share of the time busy; staleness: mean (most)"
    table = Table("bound", "environments", "steps/h", "x sync", "trainer", "generator", "staleness", title=title)
    for row in rows:
        out = row.outcome
        table.add_row(
            str(row.bound),
            str(row.environments),
            f"{3600 * out.steps_per_s:.1f}",
            f"{row.gain:.2f}",
            f"{out.trainer_busy:.0%}",
            f"{out.generator_busy:.0%}",
            f"{out.staleness_mean:.1f} ({out.staleness_max})",
        )
    console.print(table)


def advice(choice: Choice, places: int) -> str:
    """The last line."""
    how, environments = f"replay.max_staleness={choice.bound}", f"{choice.environments} environments"
    if choice.bound == 0:
        return f"Run synchronously ({how}) with {environments}: nothing else would be much faster."
    return (
        f"Run asynchronously ({how}) with {environments}, {choice.environments / places:.1f} for each turn that the "
        f"generators decode at once: {choice.gain:.2f} times the synchronous pace, simulated."
    )


def main() -> None:
    options, console = parse(), Console()
    try:
        found = asyncio.run(measured_by(options))
        if not found.turns_s:
            raise ConfigError(
                f"no turn of {options.env} was over within {options.seconds:g} s; raise --seconds"
                + "".join(f"\nfailed {count} times: {error}" for error, count in found.failed.most_common())
            )
    except ForgeError as error:
        raise SystemExit(f"apps.advise: {error}") from error
    costs = Costs(options.decode_s, options.step_s, options.sync_s, options.group_size, options.groups, options.places)
    rows = choices(scene_of(found, costs), seed=options.seed)
    show(found, rows, console)
    console.print(advice(best(rows), options.places), soft_wrap=True)


if __name__ == "__main__":
    main()
