"""The trainer's step against the bare forward and backward of its model, and against TRL's step.

    python -m apps.bench.trainer [--rounds 3] [--trl-python .venv-trl/bin/python]

One ragged batch, the same for all: half of its episodes are shorter than a third of the longest. Every way runs in a
process of its own, one thread a rank, in float32; a round runs each once, in turns, after an anchor of fixed work.
`bare` is Hugging Face's model, forward, cross entropy on the trained tokens and backward: no trainer can be faster on
the same rows. Three kinds of rows: packed, padded (episodes of about equal length together, as our trainer pads), and
padded to the longest (as a trainer does that neither packs nor sorts). Tokens/s count tokens of episodes, not padding.

A second part trains two random Llamas that differ in their vocabulary alone: what memory grows by, beyond weights,
gradients and optimizer, in blocks of [chunk, vocabulary] logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from apps.bench.grpo import ENV, ROOT, TRL_SETUP, find_trl
from apps.bench.harness import processes, rates
from apps.bench.harness.anchor import Anchor, anchor_table
from apps.bench.harness.result import Column, Goal, Result, machine, rows_table, show
from apps.bench.harness.trainer_run import WHOLE, Settings, episodes_of
from apps.bench.harness.trainer_vocabulary import HIDDEN, VOCABULARIES, write_llama
from apps.bench.peers import trl_step
from apps.grpo.models import resolve_model

DEADLINE_S = 900.0
BARE, PACKED, LONGEST = "bare, packed", "meshforge, packed", "bare, padded to the longest"
TRL = "TRL, padded to the longest"
COLUMNS = (
    Column("", "name"),
    Column("step ms", "step_ms", ".0f"),
    Column("tokens/s", "tokens_per_s", ",.0f"),
    Column("x bare packed", "over_bare", ".2f"),
    Column("peak MiB", "peak_mib", ",.0f"),
)
VOCABULARY_COLUMNS = (
    Column("", "name"),
    Column("vocabulary", "vocabulary", ",.0f"),
    Column("weights, gradients, AdamW MiB", "state_mib", ".0f"),
    Column("peak MiB", "peak_mib", ",.0f"),
    Column("[chunk, V] MiB", "block_mib", ".0f"),
)


@dataclass
class Runs:
    """What was measured of each way, a number a round."""

    step_s: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    tokens: int = 0

    def add(self, name: str, found: Mapping[str, Any]) -> None:
        self.step_s.setdefault(name, []).append(found["step_s"])
        self.peaks[name] = max(self.peaks.get(name, 0), found["peak_rss_bytes"])
        self.tokens = found["tokens"]

    def ratio(self, name: str, base: str) -> float | None:
        """Median over the rounds of how many times `name` is as fast as `base`."""
        if name not in self.step_s or base not in self.step_s:
            return None
        return rates.ratio(self.step_s[base], self.step_s[name])

    def rows(self) -> list[dict[str, Any]]:
        """One a way: medians over the rounds, ratios inside a round."""
        return [
            {
                "name": name,
                "step_ms": statistics.median(seconds) * 1e3,
                "tokens_per_s": self.tokens / statistics.median(seconds),
                "over_bare": self.ratio(name, BARE),
                "peak_mib": self.peaks[name] / 2**20,
            }
            for name, seconds in self.step_s.items()
        ]


def ways(model: str) -> dict[str, Settings]:
    """What takes part, by name; `out` is filled in for each run."""
    ours = Settings(model=model, out="", way="ours")
    bare = replace(ours, way="bare")
    return {
        BARE: bare,
        "bare, packed, kept apart by a mask": replace(bare, way="bare_masked"),
        "bare, padded": replace(bare, packing=False),
        LONGEST: replace(bare, way="bare_longest"),
        PACKED: ours,
        "meshforge, packed, all logits at once": replace(ours, chunk=WHOLE),
        "meshforge, padded": replace(ours, packing=False),
        "meshforge, packed, 2 ranks": replace(ours, ranks=2),
        "meshforge, padded, 2 ranks": replace(ours, packing=False, ranks=2),
    }


def trl_settings(work: Settings, folder: Path) -> trl_step.Settings:
    """The same work in the peer's words; its episodes go into `folder`."""
    episodes = [
        {"prompt": tokens[:start], "completion": tokens[start:], "advantage": advantage}
        for tokens, start, advantage in episodes_of(work)
    ]
    data = folder / "episodes.json"
    data.write_text(json.dumps(episodes))
    per_pass = work.microbatch_tokens // work.longest
    return trl_step.Settings(work.model, str(data), str(folder / "trl"), "", work.steps, per_pass)


def run_once(
    python: str, program: Sequence[str], settings: Settings | trl_step.Settings, folder: Path, name: str
) -> dict[str, Any]:
    """Runs one way in a process of its own; the memory is that of all its processes."""
    out = folder / f"{name}.json"
    path = folder / f"{name}.settings.json"
    replace(settings, out=str(out)).write(path)
    command = [python, *program, str(path)]
    env = ENV | {"OMP_NUM_THREADS": "1"}
    log = folder / f"{name}.log"
    done = processes.run(command, role="trainer", cwd=ROOT, env=env, deadline_s=DEADLINE_S, log=log)
    found: dict[str, Any] = json.loads(out.read_text())
    if settings.ranks > 1:
        found["peak_rss_bytes"] = sum(done.peaks.values())
    return found


OURS = ("-m", "apps.bench.harness.trainer_run")


def measure(model: str, rounds: int, trl_python: str | None, folder: Path) -> tuple[Runs, list[dict[str, float]]]:
    """All ways, `rounds` times, in turns."""
    runs, anchors, anchor = Runs(), [], Anchor(model)
    taking_part: dict[str, tuple[str, Sequence[str], Settings | trl_step.Settings]] = {
        name: (sys.executable, OURS, settings) for name, settings in ways(model).items()
    }
    if trl_python is not None:
        taking_part[TRL] = (trl_python, (trl_step.__file__,), trl_settings(ways(model)[PACKED], folder))
    for number in range(rounds):
        anchors.append(anchor.measure())
        for place, name in enumerate(rates.turns(list(taking_part), number)):
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            runs.add(name, run_once(*taking_part[name], folder, f"{number}-{place}"))
    return runs, anchors


def measure_vocabulary(folder: Path) -> tuple[list[dict[str, Any]], float]:
    """The two Llamas; and what the peak grows by, beyond weights, gradients and optimizer, in blocks of logits."""
    rows: list[dict[str, Any]] = []
    for vocabulary in VOCABULARIES:
        print(f"memory at a vocabulary of {vocabulary}", file=sys.stderr, flush=True)
        model, num_parameters = write_llama(vocabulary, folder / f"llama-{vocabulary}")
        settings = Settings(model=model, out="", way="ours", episodes=16, steps=2)
        found = run_once(sys.executable, OURS, settings, folder, f"vocabulary-{vocabulary}")
        rows.append(
            {
                "name": f"Llama, hidden size {HIDDEN}",
                "vocabulary": vocabulary,
                "state_mib": 4 * 4 * num_parameters / 2**20,
                "peak_mib": found["peak_rss_bytes"] / 2**20,
                "block_mib": 4 * settings.chunk * vocabulary / 2**20,
            }
        )
    small, large = rows
    grown = {key: large[key] - small[key] for key in ("state_mib", "peak_mib", "block_mib")}
    return rows, (grown["peak_mib"] - grown["state_mib"]) / grown["block_mib"]


def goals(runs: Runs, blocks: float) -> list[Goal]:
    """The figures of the trainer, and what they should be."""
    speed = runs.ratio(PACKED, BARE)
    return [
        Goal("packed over padded to the longest, bare", runs.ratio(PACKED, LONGEST), 2.0, "least"),
        Goal("time of a packed step over bare forward and backward", 1 / speed if speed else None, 1.1, "most"),
        Goal("blocks of [chunk, vocabulary] by which memory grows", blocks, 1.0, "most"),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m apps.bench.trainer", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds; each runs every way once")
    parser.add_argument("--model", default="tiny", help="what --model of apps/grpo takes")
    parser.add_argument("--trl-python", help=f"Python of a venv with TRL (default .venv-trl): {TRL_SETUP}")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be >= 1, got {args.rounds}")
    trl_python, model = find_trl(args.trl_python), resolve_model(args.model)
    with tempfile.TemporaryDirectory(prefix="meshforge-bench-") as folder:
        runs, anchors = measure(model, args.rounds, trl_python, Path(folder))
        vocabulary_rows, blocks = measure_vocabulary(Path(folder))
    found = Result(
        "trainer",
        runs.rows() + vocabulary_rows,
        goals(runs, blocks),
        runs.peaks,
        machine(),
        {"anchors": anchors, "over_trl": runs.ratio(PACKED, TRL)},
    )
    over_trl = runs.ratio(PACKED, TRL)
    notes = [f"meshforge packed over TRL's step: {over_trl:.2f}x"] if over_trl else []
    notes += [] if trl_python else [f"TRL did not run; make its environment with: {TRL_SETUP}"]
    title = f"one step on {runs.tokens:,} tokens of {args.model}, {args.rounds} rounds"
    tables = (
        rows_table(title, runs.rows(), COLUMNS),
        rows_table("memory and the vocabulary", vocabulary_rows, VOCABULARY_COLUMNS),
        anchor_table(anchors),
    )
    show(found, *tables, notes=notes)


if __name__ == "__main__":
    main()
