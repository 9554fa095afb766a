"""Many runs of one app that differ in a few options and the seed; what is done already is not run again.

An arm is a name and options. A run leaves `result.json` in its folder once it has ended and was judged. Those of
apps/grpo are judged by their last weights, on prompts that nobody trained on, sampled as in training: the rewards of
the batches trained last are those of older weights, the older the staler.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch

from actors.model import load_hf
from apps.bench.grpo import ENV, PRESET, ROOT
from apps.bench.harness import processes
from apps.grpo.reversal import digits_reward, reversal
from forge.metrics import Row, read_rows

Arms = Mapping[str, tuple[str, ...]]
"""Options of the app, by the name of the arm."""
EVALUATED = 1024
"""Prompts that the last weights are judged on."""
_EVALUATION_SEED = 10_007
"""No seed of a task."""


@dataclass(frozen=True)
class Run:
    """One run: the reward of each step's batch, that of the last weights, and what it took."""

    rewards: list[float]
    final: float
    seconds: float
    staleness_mean: float
    staleness_max: float
    ratio_clipped: float

    @staticmethod
    def of(rows: Sequence[Row], final: float) -> Run:
        """From metrics.jsonl; a step without a reward counts as the one before."""
        rewards: list[float] = []
        for row in rows:
            value = row["reward/mean"]
            rewards.append(float(value) if value is not None else (rewards[-1] if rewards else 0.0))
        return Run(
            rewards,
            final,
            seconds=float(rows[-1]["time_s"] or 0.0),
            staleness_mean=_mean(rows, "staleness/mean"),
            staleness_max=max(float(row["staleness/max"] or 0.0) for row in rows),
            ratio_clipped=_mean(rows, "ratio/clip_fraction"),
        )


def _mean(rows: Sequence[Row], key: str) -> float:
    values = [float(value) for row in rows if (value := row[key]) is not None]
    return sum(values) / max(len(values), 1)


@dataclass(frozen=True)
class App:
    """What is run: program and options, and from a run's folder, rows and seed to its `Run.final`."""

    command: tuple[str, ...]
    judge: Callable[[Path, Sequence[Row], int], float]


def _last_weights(place: Path, rows: Sequence[Row], seed: int) -> float:
    return evaluate(place / "checkpoint", seed)


GRPO = App(("apps/grpo/main.py", "--config", str(PRESET)), _last_weights)


def run_all(
    arms: Arms, seeds: Sequence[int], steps: int, folder: Path, *, side_by_side: int, app: App = GRPO
) -> dict[str, list[Run]]:
    """All arms with all seeds, seeds outermost, so that what there is when time is up is as good for every arm."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(name, seed) for seed in seeds for name in arms]

    def one(job: tuple[str, int]) -> Run:
        name, seed = job
        return run_once(name, arms[name], seed, steps, folder, app)

    with ThreadPoolExecutor(side_by_side) as pool:
        runs = list(pool.map(one, jobs))
    found: dict[str, list[Run]] = {name: [] for name in arms}
    for (name, _), run in zip(jobs, runs, strict=True):
        found[name].append(run)
    return found


def place_of(name: str, seed: int, folder: Path) -> Path:
    """The folder of a run."""
    return folder / f"{name.replace(' ', '_').replace('/', '_')}-{seed}"


def run_once(name: str, options: Sequence[str], seed: int, steps: int, folder: Path, app: App = GRPO) -> Run:
    """One run, or what is left of it. Raises RuntimeError when the app fails."""
    place = place_of(name, seed, folder)
    result = place / "result.json"
    if result.exists():
        return Run(**json.loads(result.read_text()))
    print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    log = place.with_suffix(".log")
    for half in (place, log):
        _clear(half)
    command = [
        *(sys.executable, *app.command),
        *(f"--run.dir={place}", f"--seed={seed}", f"--trainer.steps={steps}"),
        *("--run.checkpoint_every=0", "--replay.journal=false", "--dtype=float32"),
        *options,
    ]
    env = ENV | {"OMP_NUM_THREADS": "1"}
    processes.run(command, role="controller", cwd=ROOT, env=env, deadline_s=300 + 20 * steps, log=log)
    rows = read_rows(place / "metrics.jsonl")
    run = Run.of(rows, app.judge(place, rows, seed))
    result.write_text(json.dumps(asdict(run)))
    _clear(place / "checkpoint")
    return run


def _clear(path: Path) -> None:
    if path.is_dir():
        for child in path.iterdir():
            _clear(child)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@torch.no_grad()
def evaluate(checkpoint: Path, seed: int, num_digits: int = 6) -> float:
    """Mean reward of one completion of each of `EVALUATED` prompts, sampled at temperature 1."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    hf = load_hf(checkpoint, torch.float32).eval()
    hf.set_attn_implementation("sdpa")
    draw = Random(_EVALUATION_SEED)
    pairs = [reversal(draw, num_digits) for _ in range(EVALUATED)]
    tokens = torch.tensor(tokenizer([prompt for prompt, _ in pairs]).input_ids)
    torch.manual_seed(seed)
    sampled = hf.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=num_digits + 2,
    )
    texts = tokenizer.batch_decode(sampled[:, tokens.shape[1] :], skip_special_tokens=True)
    return sum(digits_reward(text, answer) for text, (_, answer) in zip(texts, pairs, strict=True)) / len(pairs)
