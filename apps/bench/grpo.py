"""Asynchronous GRPO against TRL's synchronous GRPOTrainer at the same work.

    python -m apps.bench.grpo [--rounds 3] [--steps 40] [--trl-python .venv-trl/bin/python]

The same model folder, prompts, reward, group and batch size, token budget, learning rate and sampler in float32
on one thread a process: those of apps/grpo/tiny.yaml. Every run is a program of its own; a round runs each system
once, in turns, after an anchor of fixed work. Steps/s is the inverse of the median step, samples/s all samples over
all time, both after 5 steps of warm-up and without the start of the programs; the table shows medians over rounds,
and the median of the ratios to TRL inside a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apps.bench.harness import processes, rates
from apps.bench.harness.anchor import Anchor, anchor_table
from apps.bench.harness.result import Column, Goal, Result, machine, rows_table, show
from apps.bench.peers import trl_grpo
from apps.grpo.config import AppConfig
from apps.grpo.models import resolve_model
from forge import config
from forge.data import load_task
from forge.metrics import Row, read_rows

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "apps" / "grpo" / "tiny.yaml"
TRL_PINS = "apps/bench/peers/trl.txt"
TRL_SETUP = f"python3 -m venv .venv-trl && .venv-trl/bin/pip install -r {TRL_PINS}"
TRL = "TRL GRPOTrainer"
STALENESS = (0, 1, 2)
ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
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
Figures = dict[str, float | None]


def ours_name(max_staleness: int) -> str:
    """The name of our row at that bound."""
    return f"meshforge, max_staleness {max_staleness}"


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

    def run_trl(self, python: str, seed: int, folder: Path) -> tuple[Figures, dict[str, int]]:
        """One run of the peer's program."""
        folder.mkdir()
        settings, out = folder / "settings.json", folder / "steps.json"
        self.trl_settings(seed, folder, out).write(settings)
        done = self._run([python, trl_grpo.__file__, str(settings)], "TRL", folder.with_suffix(".log"))
        return figures_of_trl(json.loads(out.read_text()), self.cfg.grpo.batch_size), done.peaks

    def trl_settings(self, seed: int, folder: Path, out: Path) -> trl_grpo.Settings:
        """The preset in the peer's words."""
        cfg = self.cfg
        return trl_grpo.Settings(
            model=self.model,
            data=str(self.data),
            folder=str(folder),
            out=str(out),
            steps=self.steps,
            seed=seed,
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

    def _run(self, command: Sequence[str], role: str, log: Path) -> processes.Finished:
        deadline_s = 300 + 20 * self.steps
        return processes.run(command, role=role, cwd=ROOT, env=ENV, deadline_s=deadline_s, log=log)


def make_work(steps: int, folder: Path) -> Work:
    """Reads the preset, makes the model where it is not cached, writes the prompts into `folder`."""
    cfg = config.parse(AppConfig, [], default_config=PRESET, prog="apps.bench.grpo", description="")
    rows = load_task(cfg.data)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(dict(rows[i])) + "\n" for i in range(len(rows))))
    return Work(cfg, resolve_model(cfg.model), data, steps)


# ---- from runs to rows ---------------------------------------------------------------------------------


def figures_of_rows(rows: Sequence[Row], batch_size: int) -> Figures:
    """What metrics.jsonl says about one run of ours; times in ms are medians after the warm-up."""
    stamps = [_number(row, "time_s") for row in rows]
    reached = rates.steady(stamps, batch_size)
    steady = rows[rates.WARM_UP :]
    waited = sum(_number(row, "time/wait_batch_s") for row in steady)
    tokens = sum(_number(row, "tokens/trained") for row in steady)
    first, last = rates.first_and_last([_number(row, "reward/mean") for row in rows])
    return {
        "steps_per_s": reached.steps_per_s,
        "samples_per_s": reached.samples_per_s,
        "tokens_per_episode": tokens / sum(_number(row, "episodes/trained") for row in steady),
        "reward_first": first,
        "reward_last": last,
        "trainer_idle_share": waited / (stamps[-1] - stamps[rates.WARM_UP - 1]),
        "step_ms": _median_ms(steady, "time/step_s"),
        "publish_ms": _median_ms(steady, "time/publish_stall_s"),
        "pause_ms": _median_ms(steady, "generator/pause_s"),
        "staleness_mean": statistics.fmean(_number(row, "staleness/mean") for row in steady),
    }


def figures_of_trl(found: Mapping[str, Any], batch_size: int) -> Figures:
    """What the peer's program wrote about one run of its."""
    reached = rates.steady(found["stamps"], batch_size)
    first, last = rates.first_and_last(found["rewards"])
    return {
        "steps_per_s": reached.steps_per_s,
        "samples_per_s": reached.samples_per_s,
        "tokens_per_episode": statistics.fmean(found["tokens_per_episode"][rates.WARM_UP :]),
        "reward_first": first,
        "reward_last": last,
    }


def _number(row: Row, key: str) -> float:
    value = row[key]
    if value is None:
        raise RuntimeError(f"step {row['step']} has no {key}; the run did not end well")
    return value


def _median_ms(rows: Sequence[Row], key: str) -> float | None:
    values = [value for row in rows if (value := row[key]) is not None]
    return statistics.median(values) * 1e3 if values else None


@dataclass
class Measured:
    """All rounds of all systems, by name; peak memory in bytes by system and role."""

    runs: dict[str, list[Figures]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    anchors: list[dict[str, float]] = field(default_factory=list)

    def add(self, name: str, figures: Figures, peaks: Mapping[str, int]) -> None:
        """One run. Peaks keep the largest of all rounds."""
        self.runs.setdefault(name, []).append(figures)
        processes.raise_peaks(self.peaks, {_role(name, role): peak for role, peak in peaks.items()})

    def rows(self) -> list[dict[str, Any]]:
        """One row a system: medians over the rounds, and the median ratio of samples/s to TRL's."""
        return [self._row(name, runs) for name, runs in sorted(self.runs.items())]

    def _row(self, name: str, runs: Sequence[Figures]) -> dict[str, Any]:
        row: dict[str, Any] = {"name": name, "rounds": len(runs)}
        for key in runs[0]:
            values = [value for run in runs if (value := run[key]) is not None]
            row[key] = round(statistics.median(values), 4) if values else None
        row["over_trl"] = self.over_trl(name)
        row["samples_per_s_by_round"] = [round(rate, 1) for rate in _samples_per_s(runs)]
        return row

    def over_trl(self, name: str) -> float | None:
        """Median over the rounds of samples/s over TRL's; None where one of them did not run."""
        if not {name, TRL} <= self.runs.keys():
            return None
        return round(rates.ratio(_samples_per_s(self.runs[name]), _samples_per_s(self.runs[TRL])), 4)


def _samples_per_s(runs: Sequence[Figures]) -> list[float]:
    return [rate for run in runs if (rate := run["samples_per_s"]) is not None]


def _role(name: str, role: str) -> str:
    return role if name == TRL else f"{role}, {name.removeprefix('meshforge, ')}"


def goals(measured: Measured, preset_staleness: int) -> list[Goal]:
    """The preset as it stands is not slower than TRL."""
    value = measured.over_trl(ours_name(preset_staleness))
    return [Goal(f"samples/s over TRL's, max_staleness {preset_staleness}", value, 1.0, "least")]


# ---- the command line ----------------------------------------------------------------------------------


def measure(work: Work, rounds: int, trl_python: str | None, folder: Path) -> Measured:
    """All rounds, each run in a folder of its own below `folder`; says on stderr what it does."""
    measured, anchor = Measured(), Anchor(work.model)
    names = [*map(ours_name, STALENESS), *([TRL] if trl_python else [])]
    bounds = dict(zip(map(ours_name, STALENESS), STALENESS, strict=True))
    for number in range(rounds):
        measured.anchors.append(anchor.measure())
        for name in rates.turns(names, number):
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            where = folder / f"{number}-{names.index(name)}"
            if name in bounds:
                figures, peaks = work.run_ours(bounds[name], number, where)
            else:
                assert trl_python is not None
                figures, peaks = work.run_trl(trl_python, number, where)
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
    args = parser.parse_args()
    if args.rounds < 1 or args.steps <= rates.WARM_UP:
        parser.error(f"--rounds must be >= 1 and --steps > {rates.WARM_UP}, got {args.rounds} and {args.steps}")
    trl_python = find_trl(args.trl_python)
    with tempfile.TemporaryDirectory(prefix="meshforge-bench-") as folder:
        work = make_work(args.steps, Path(folder))
        measured = measure(work, args.rounds, trl_python, Path(folder))
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
