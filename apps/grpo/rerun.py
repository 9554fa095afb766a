"""Trains again, without generators, what a recorded run was trained on, and compares the losses.

    python apps/grpo/main.py --replay.record --run.dir runs/A        # a run that keeps its whole journal
    python apps/grpo/rerun.py --resume runs/A                        # the same batches in the same order
    python apps/grpo/rerun.py --resume runs/A --mesh.debug --trainer.steps=3      # for pdb

It takes the configuration of the run and every option of apps/grpo/main.py; nothing in the run folder is changed.
Exit code 1 when a loss or a gradient norm differs, which under an unchanged configuration is a bug.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from apps.grpo.command_line import start
from apps.grpo.config import AppConfig, plan_run
from apps.grpo.models import resolve_model
from apps.grpo.spawn import model_spec, start_trainer
from forge import channel
from forge.checkpoints import Checkpoints
from forge.errors import ConfigError, ForgeError
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster
from forge.metrics import Row, read_rows
from forge.run_log import CHECKPOINTS
from replay.recording import RecordedReplay, Recording
from replay.shards import hand_over

COMPARED = ("loss/policy", "loss/kl", "grad_norm", "ratio/mean")
SHOWN = ("loss/policy", "grad_norm")


class Differs(ForgeError):
    """A batch that was trained again gave other numbers."""


async def main(cfg: AppConfig, hosts: Hosts, stopping: Stopping) -> None:
    """The recorded batches from the first one on, until `trainer.steps` or their end."""
    folder = recorded_folder(cfg)
    recording = Recording(folder / "journal")
    recorded = {row["step"]: row for row in read_rows(folder / "metrics.jsonl")}
    together = {"together": cfg.loss.needs.together, "readers": cfg.trainer.tensor_parallel}
    row_tokens = cfg.trainer.microbatch_tokens
    replay = RecordedReplay(recording, lambda groups, ranks: hand_over(groups, ranks, row_tokens, channel, **together))
    compared: list[tuple[Row, Row]] = []
    async with Cluster(hosts, plan_run(cfg, hosts.slots_per_host, hosts.num_hosts), debug=cfg.mesh.debug) as cluster:
        version, state = first_state(recording, folder)
        spec = model_spec(cfg, str(resolve_model(cfg.model)), cluster.device)
        trainer = await start_trainer(cfg, cluster, spec, state)
        while version < cfg.trainer.steps and not stopping.is_set():
            batch = await replay.sample(version, trainer.num_shards)
            if batch is None:
                break
            result = await trainer.step(batch.handles)
            version = result.policy_version
            if version in recorded:
                compared.append((recorded[version], {"step": version, **result.metrics}))
    show(compared)


def first_state(recording: Recording, folder: Path) -> tuple[int, Path | None]:
    """The version of the first batch to train, and the trainer's state then: None where it is new."""
    versions = recording.versions
    if 0 in versions:
        return 0, None
    found = next((c for c in Checkpoints(folder / CHECKPOINTS).list() if c.version in versions), None)
    if found is None:
        raise ConfigError(
            f"{folder} has batches from version {versions[0]} on and no checkpoint to begin with; "
            "record with --replay.record"
        )
    return found.version, found.path / "trainer"


def show(compared: list[tuple[Row, Row]]) -> None:
    """A line a step. Raises Differs when a number is not the recorded one, bit for bit."""
    table = Table("step", *(f"{name}, recorded and again" for name in SHOWN), "equal")
    differing = []
    for was, now in compared:
        equal = all(was[name] == now[name] for name in COMPARED)
        texts = (f"{was[name]:.9g}  {now[name]:.9g}" for name in SHOWN)
        table.add_row(str(was["step"]), *texts, "yes" if equal else "NO")
        if not equal:
            differing.append(was["step"])
    Console().print(table)
    if differing:
        raise Differs(
            f"{len(differing)} of {len(compared)} steps gave other numbers than the recorded ones, the first is step "
            f"{differing[0]}; the same configuration, model, number of ranks and machine give the same ones"
        )
    print(f"{len(compared)} of {len(compared)} steps gave the recorded numbers, bit for bit")


def recorded_folder(cfg: AppConfig) -> Path:
    """The run folder, for processes with another current folder too."""
    return Path(cfg.run.resume or "").absolute()


def check(cfg: AppConfig, slots: int | None, num_hosts: int) -> None:
    """Raises ConfigError where the run cannot be trained again."""
    if cfg.run.resume is None:
        raise ConfigError("give the recorded run: --resume runs/NAME")
    plan_run(cfg, slots, num_hosts)


if __name__ == "__main__":
    start(main, prog="apps/grpo/rerun.py", description=__doc__ or "", check=check)
