"""Asynchronous GRPO against TRL's synchronous GRPOTrainer at the same work.

    python -m apps.bench.grpo [--rounds 3] [--steps 40] [--trl-python .venv-trl/bin/python] [--trl-threads 1]

The same model folder, prompts, reward, group and batch size, token budget, learning rate and sampler, in float32:
those of apps/grpo/tiny.yaml. TRL is one process, ours are several, one thread to a process (`--trl-threads 1 2`
measures TRL with two as well). Every run is a program of its own; a round runs each system once, in turns, after an
anchor of fixed work. Steps/s is the inverse of the median step, samples/s all samples over all time, both after 5
steps of warm-up and without the start of the programs. The table shows medians over the rounds, and the median of
the ratios to TRL inside a round.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from apps.bench.harness import processes, rates
from apps.bench.harness.anchor import Anchor, anchor_table
from apps.bench.harness.result import Column, Goal, Result, machine, rows_table, show
from apps.bench.harness.training import Figures, Measured, figures_of_rows, figures_of_trl, ours_name, trl_name
from apps.bench.peers import trl_grpo
from apps.grpo.config import AppConfig
from apps.grpo.models import resolve_model
from forge import config
from forge.data import load_task
from forge.metrics import read_rows

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "apps" / "grpo" / "tiny.yaml"
TRL_PINS = "apps/bench/peers/trl.txt"
TRL_SETUP = f"python3 -m venv .venv-trl && .venv-trl/bin/pip install -r {TRL_PINS}"
STALENESS = (0, 1, 2)
ENV = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
COLUMNS = (
    Column("", "name"),
    Column("steps/s", "steps_per_s", ".2f"),
    Column("samples/s", "samples_per_s", ".0f"),
    Column("x TRL", "over_trl", ".2f"),
    Column("tokens", "tokens_per_episode", ".1f"),
    Column("reward first 5", "reward_first", ".3f"),
    Column("last 5", "reward_last", ".3f"),
    Column("idle", "trainer_idle_share", ".0%"),
    Column("step ms", "step_ms", ".0f"),
    Column("publish ms", "publish_ms", ".1f"),
    Column("pause ms", "pause_ms", ".1f"),
)


@dataclass
class Work:
    """What every system has to do: the preset, its model folder and its prompts."""

    cfg: AppConfig
    model: str
    data: Path
    steps: int

    def run_ours(self, max_staleness: int, seed: int, folder: Path) -> tuple[Figures, dict[str, int]]:
        """One run of apps/grpo/main.py: its figures, and peak memory in bytes by role."""
        command = [
            *(sys.executable, "apps/grpo/main.py", "--config", str(PRESET)),
            *(f"--model={self.model}", f"--seed={seed}", "--dtype=float32", f"--run.dir={folder}"),
            *(f"--trainer.steps={self.steps}", f"--replay.max_staleness={max_staleness}"),
        ]
        done = self._run(command, "controller", folder.with_suffix(".log"))
        return figures_of_rows(read_rows(folder / "metrics.jsonl"), self.cfg.grpo.batch_size), done.peaks

    def run_trl(self, python: str, threads: int, seed: int, folder: Path) -> tuple[Figures, dict[str, int]]:
        """One run of the peer's program."""
        folder.mkdir()
        settings, out = folder / "settings.json", folder / "steps.json"
        self.trl_settings(threads, seed, folder, out).write(settings)
        command = [python, trl_grpo.__file__, str(settings)]
        done = self._run(command, "TRL", folder.with_suffix(".log"), threads)
        return figures_of_trl(json.loads(out.read_text()), self.cfg.grpo.batch_size), done.peaks

    def trl_settings(self, threads: int, seed: int, folder: Path, out: Path) -> trl_grpo.Settings:
        """The preset in the peer's words."""
        cfg = self.cfg
        return trl_grpo.Settings(
            model=self.model,
            data=str(self.data),
            folder=str(folder),
            out=str(out),
            steps=self.steps,
            seed=seed,
            threads=threads,
            group_size=cfg.grpo.group_size,
            batch_size=cfg.grpo.batch_size,
            max_new_tokens=cfg.generator.max_new_tokens,
            lr=cfg.trainer.lr,
            temperature=cfg.generator.temperature,
            top_p=cfg.generator.top_p,
            top_k=cfg.generator.top_k,
            clip_low=cfg.loss.clip_low,
            clip_high=cfg.loss.clip_high,
            clip_norm=cfg.trainer.clip_norm,
        )

    def _run(self, command: Sequence[str], role: str, log: Path, threads: int = 1) -> processes.Finished:
        deadline_s = 300 + 20 * self.steps
        env = ENV | {"OMP_NUM_THREADS": str(threads)}
        return processes.run(command, role=role, cwd=ROOT, env=env, deadline_s=deadline_s, log=log)


def make_work(steps: int, folder: Path) -> Work:
    """Reads the preset, makes the model where it is not cached, writes the prompts into `folder`."""
    cfg = config.parse(AppConfig, [], default_config=PRESET, prog="apps.bench.grpo", description="")
    rows = load_task(cfg.data)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(dict(rows[i])) + "\n" for i in range(len(rows))))
    return Work(cfg, resolve_model(cfg.model), data, steps)


def goals(measured: Measured, preset_staleness: int) -> list[Goal]:
    """The preset as it stands is not slower than TRL."""
    value = measured.over_trl(ours_name(preset_staleness))
    return [Goal(f"samples/s over TRL's, max_staleness {preset_staleness}", value, 1.0, "least")]


Run = Callable[[int, Path], tuple[Figures, dict[str, int]]]
"""Runs a system once with that seed in that folder."""


def systems(work: Work, trl_python: str | None, trl_threads: Sequence[int]) -> dict[str, Run]:
    """What takes part, by name."""
    ours = {ours_name(bound): partial(work.run_ours, bound) for bound in STALENESS}
    if trl_python is None:
        return dict(ours)
    return {**ours, **{trl_name(n): partial(work.run_trl, trl_python, n) for n in trl_threads}}


def measure(runs: Mapping[str, Run], anchor: Anchor, rounds: int, folder: Path) -> Measured:
    """All rounds, each run in a folder of its own below `folder`; says on stderr what it does."""
    measured, names = Measured(), list(runs)
    for number in range(rounds):
        measured.anchors.append(anchor.measure())
        for name in rates.turns(names, number):
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            figures, peaks = runs[name](number, folder / f"{number}-{names.index(name)}")
            measured.add(name, figures, peaks)
    return measured


def find_trl(asked_for: str | None) -> str | None:
    """The Python that was asked for, else that of .venv-trl where there is one. Its path is not resolved: that
    would leave the virtual environment."""
    python = Path(asked_for) if asked_for else ROOT / ".venv-trl" / "bin" / "python"
    if not python.exists():
        if asked_for:
            raise SystemExit(f"--trl-python {asked_for} does not exist; make it with: {TRL_SETUP}")
        return None
    return str(python.absolute())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m apps.bench.grpo", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds; each runs every system once")
    parser.add_argument("--steps", type=int, default=40, help=f"optimizer steps of a run, > {rates.WARM_UP}")
    parser.add_argument("--trl-python", help=f"Python of a venv with TRL (default .venv-trl): {TRL_SETUP}")
    parser.add_argument("--trl-threads", type=int, nargs="+", default=[1], help="threads of TRL, one row each")
    args = parser.parse_args()
    if 1 not in args.trl_threads:
        parser.error(f"--trl-threads must contain 1, to which ratios are taken, got {args.trl_threads}")
    if args.rounds < 1 or args.steps <= rates.WARM_UP:
        parser.error(f"--rounds must be >= 1 and --steps > {rates.WARM_UP}, got {args.rounds} and {args.steps}")
    trl_python = find_trl(args.trl_python)
    with tempfile.TemporaryDirectory(prefix="meshforge-bench-") as folder:
        work = make_work(args.steps, Path(folder))
        runs = systems(work, trl_python, args.trl_threads)
        measured = measure(runs, Anchor(work.model), args.rounds, Path(folder))
    settings = {"steps": args.steps, "batch_size": work.cfg.grpo.batch_size, "model": work.cfg.model}
    found = Result(
        "grpo",
        measured.rows(),
        goals(measured, work.cfg.replay.max_staleness),
        measured.peaks,
        machine(),
        {"settings": settings, "anchors": measured.anchors},
    )
    notes = [] if trl_python else [f"TRL did not run; make its environment with: {TRL_SETUP}"]
    title = f"GRPO on {work.cfg.model}, {args.steps} steps of {work.cfg.grpo.batch_size} episodes, {args.rounds} rounds"
    show(found, rows_table(title, found.rows, COLUMNS), anchor_table(measured.anchors), notes=notes)


if __name__ == "__main__":
    main()
