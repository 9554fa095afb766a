"""What a crash costs in generation: with the journal, with checkpoints only, and where the buffer is in neither.

    python -m apps.bench.crash [--kills 6] [--token-s 0.02] [--seed 0]

A run without a model (apps/bench/harness/crash_run.py; the real replay, journal and checkpoints) is killed by SIGKILL
at random moments. Each kill is judged three ways, on the same files: a token that was generated is lost when a resume
would have to generate it again. "journal" is what this project resumes from. "checkpoint" is the newest checkpoint
alone, buffer and unfinished episodes in it. "weights only" keeps the trainer's checkpoint and forgets the buffer.

A generation-second is one sequence decoding for one second: tokens times `--token-s`.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
from pathlib import Path
from typing import Any

from apps.bench.harness import crashes
from apps.bench.harness.crash_run import GROUP_SIZE, GROUPS_PER_STEP, MAX_STALENESS, Pace
from apps.bench.harness.result import Column, Goal, Result, machine, rows_table, show

Row = dict[str, Any]
SEQUENCES = GROUPS_PER_STEP * (MAX_STALENESS + 1) * GROUP_SIZE
"""Decoded at once, at most."""
DURABLE_S = 2.0
"""Within which what was generated has to be on the disk, seconds."""
COLUMNS = (
    Column("kill", "kill"),
    Column("ran s", "ran_s", ".1f"),
    Column("generated, gen-s", "generated_s", ".1f"),
    Column("lost: journal", "journal_s", ".2f"),
    Column("checkpoint", "checkpoint_s", ".2f"),
    Column("weights only", "weights_only_s", ".2f"),
    Column("made twice", "twice"),
)


def measure(kills: int, pace: Pace, seed: int) -> list[Row]:
    """A row a kill."""
    rng, rows = random.Random(seed), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        kept: set[crashes.Token] = set()
        before = 0
        for kill in range(kills):
            ran_s = rng.uniform(6.0, 14.0)
            crashes.kill_while_it_runs(folder, ran_s, pace)
            made = crashes.generated(folder)
            fresh, before = made[before:], len(made)
            version, checkpoint = crashes.checkpointed(folder)
            state = crashes.journalled(folder)
            twice = len(kept & set(fresh))
            kept = crashes.tokens_of(state)
            # What was trained before the checkpoint is in the weights, and lost to nobody.
            trained = set(range(state.next_seq)) - set(state.entries)
            needed = {token for token in made if token[0] not in trained}
            lost = {
                "journal_s": len(needed - kept),
                "checkpoint_s": len(needed - crashes.tokens_of(checkpoint)),
                "weights_only_s": len(needed),
            }
            seconds = {name: count * pace.token_s for name, count in lost.items()}
            generated_s = len(fresh) * pace.token_s
            rows.append(
                {
                    "kill": kill + 1,
                    "ran_s": ran_s,
                    "version": version,
                    "generated_s": generated_s,
                    **seconds,
                    "twice": twice,
                }
            )
    return rows


def goals_of(rows: list[Row]) -> list[Goal]:
    """The promise of the journal, and what it saves."""
    most, journal = max(row["journal_s"] for row in rows), sum(row["journal_s"] for row in rows)
    checkpoint = sum(row["checkpoint_s"] for row in rows)
    return [
        Goal("lost per crash with the journal, seconds of each sequence", most / SEQUENCES, DURABLE_S, "most"),
        Goal("tokens on the disk that were made again", sum(row["twice"] for row in rows), 0, "most"),
        Goal("lost with checkpoints only over lost with the journal", checkpoint / max(journal, 1e-9), 1.0, "least"),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m apps.bench.crash", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--token-s", type=float, default=0.02, help="seconds that a token takes")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.kills < 1 or args.token_s <= 0 or args.every < 1:
        parser.error("--kills and --every must be >= 1, --token-s > 0")
    pace = Pace(args.token_s, 0.3, progress_s=0.5, journal_s=1.0, every=args.every, lengths=(20, 40, 80, 250))
    rows = measure(args.kills, pace, args.seed)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    result = Result("crash", rows, goals_of(rows), {"run": peak}, machine(), {"settings": vars(args)})
    show(result, rows_table("generation-seconds lost by a SIGKILL", rows, COLUMNS))


if __name__ == "__main__":
    main()
