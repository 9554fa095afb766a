"""What holds whom back in a run, and which knob to turn. Pure: rows of metrics.jsonl in, findings out.

For the page at the end of a shakeout, and for the report (`forge.report.findings`): both judge by this.

    wall time of a step = waiting for the batch + the step + the snapshot + the rest
    a rollout loop      = waiting for a slot + generation + rewards
    sequences at once   = rollouts a second x seconds of one x group size        (Little 1961)

A trainer that waits is short of batches: because generators have free places and no slot may fill them (the bound),
because rewards are slow, or because generation is. A trainer that never waits is the limit itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forge.metrics import Row
from forge.report import facts

WARM_UP_STEPS = 3
"""First steps of a run that are not measured: pipelines fill, kernels compile."""
_FULL = 0.8
"""Share of the generators' places from which on they count as full."""
_NOTABLE = 0.05
"""Share of the wall time, or of tokens, from which on something is a finding."""
_BOUND = 0.8
"""Share of the wall time from which on a trainer that trains is the limit, whatever it waits for besides."""
Knobs = Mapping[str, Any]
"""The configuration as dotted keys."""


@dataclass(frozen=True)
class Turn:
    """One knob: its key, its value now, what to try."""

    key: str
    now: Any
    to: str


@dataclass(frozen=True)
class Finding:
    """What holds whom back, by which `share` of the time (or of the tokens), why we think so, what to turn."""

    title: str
    share: float
    why: str
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Measured:
    """Means a step over the measured steps, in seconds, unless said otherwise; None was not measured."""

    steps: int
    generates: bool
    """Whether anything is sampled: else a run trains on data that are there."""
    wall_s: float
    wall_max_s: float
    wait_s: float
    step_s: float
    stall_s: float
    pause_s: float
    """Longest stop of a generator for an update, mean over the steps that had one."""
    slot_wait_s: float | None
    """Of one rollout loop for a slot."""
    rollout_s: float | None
    """From a prompt to its scored group."""
    reward_share: float | None
    """Of that, in rewards."""
    groups_at_once: float | None
    """Groups that are generated at a time, on average."""
    generated_per_s: float
    trained_per_s: float
    staleness: tuple[float, float, float] | None
    """Mean, largest, bound, in versions."""
    wasted_share: float
    padding_share: float | None
    """Of the positions that a trainer computes which does not pack."""

    @property
    def rest_s(self) -> float:
        """What the train loop does besides."""
        return max(0.0, self.wall_s - self.wait_s - self.step_s - self.stall_s)


def measure(rows: Sequence[Row], warm_up: int = WARM_UP_STEPS) -> Measured | None:
    """The figures of all rows behind the first `warm_up`; None where there are none."""
    kept = rows[warm_up:]
    if not kept:
        return None
    times = [float(row["time_s"] or 0.0) for row in rows[max(0, warm_up - 1) :]]
    times = times if warm_up else [0.0, *times]
    walls = [after - before for before, after in pairwise(times)]
    wall_s = statistics.fmean(walls)

    def mean(key: str) -> float | None:
        return facts.mean(facts.values(kept, key))

    def total(key: str) -> float:
        return facts.total(kept, key) or 0.0

    rollouts, wasted = total("extra/rollouts"), total("tokens/wasted")
    bound = mean("staleness/bound")
    return Measured(
        steps=len(kept),
        generates=any(row.get("tokens/generated") is not None for row in kept),
        wall_s=wall_s,
        wall_max_s=max(walls),
        wait_s=mean("time/wait_batch_s") or 0.0,
        step_s=mean("time/step_s") or 0.0,
        stall_s=mean("time/publish_stall_s") or 0.0,
        pause_s=mean("generator/pause_s") or 0.0,
        slot_wait_s=mean("replay/admission_wait_s"),
        rollout_s=total("extra/rollout_s") / rollouts if rollouts else None,
        reward_share=total("extra/reward_s") / total("extra/rollout_s") if total("extra/rollout_s") else None,
        groups_at_once=(total("extra/rollout_s") - total("extra/reward_s")) / sum(walls) if rollouts else None,
        generated_per_s=total("tokens/generated") / sum(walls) if sum(walls) else 0.0,
        trained_per_s=total("tokens/trained") / sum(walls) if sum(walls) else 0.0,
        staleness=None
        if bound is None
        else (mean("staleness/mean") or 0.0, max(float(row.get("staleness/max") or 0) for row in kept), bound),
        wasted_share=wasted / (total("tokens/trained") + wasted) if wasted else 0.0,
        padding_share=mean("pack/padded_waste"),
    )


def findings(m: Measured, knobs: Knobs) -> list[Finding]:
    """What costs a share of 5 % or more, the dearest first; that the trainer is the limit where it trains, or waits
    for nothing."""
    found = [f for f in (*_of_batches(m, knobs), *_of_weights(m, knobs), *_of_waste(m, knobs)) if f.share >= _NOTABLE]
    if m.wait_s < _NOTABLE * m.wall_s or m.step_s >= _BOUND * m.wall_s > 0:
        found.append(_trainer_bound(m, knobs))
    return sorted(found, key=lambda f: -f.share)


def _of_batches(m: Measured, knobs: Knobs) -> Iterator[Finding]:
    """The trainer waits, and why: slots, rewards, or generation."""
    share = m.wait_s / m.wall_s if m.wall_s else 0.0
    waited = f"{_s(m.wait_s)} of {_s(m.wall_s)} a step"
    if not m.generates:
        yield Finding("Reading data is slow: the trainer waits for batches", share, waited)
        return
    cycle = (m.slot_wait_s or 0.0) + (m.wall_s if m.rollout_s is None else m.rollout_s)
    full = _places_taken(m, knobs)
    if m.slot_wait_s and m.slot_wait_s > 0.25 * cycle and (full is None or full < _FULL):
        bound = knobs.get("replay.max_staleness")
        turns = (
            (Turn("replay.max_staleness", bound, f"{bound + 1}, and a loss that corrects for it"),)
            if isinstance(bound, int)
            else ()
        )
        places = "" if full is None else f", and {full:.0%} of the generators' places are taken"
        why = (
            f"{waited}; meanwhile a rollout loop waits {_s(m.slot_wait_s)} for a slot before it may begin{places}: at "
            "this bound both sides take turns"
        )
        yield Finding("The staleness bound: trainer and generators wait for each other", share, why, turns)
        return
    if m.reward_share is not None and m.reward_share > 0.4:
        why = f"{waited}; rewards take {m.reward_share:.0%} of a rollout of {_s(m.rollout_s)}"
        yield Finding(
            "Rewards are slow: the trainer waits for batches", share, why, tuple(_more(knobs, "reward.workers"))
        )
        return
    why = f"{waited}, while generators sample {m.generated_per_s:,.0f} tokens/s"
    if full is not None:
        why += f", {full:.0%} of their places taken on average"
    yield Finding("Generation is slow: the trainer waits for batches", share, why, tuple(_for_generation(knobs)))


def _places_taken(m: Measured, knobs: Knobs) -> float | None:
    """Sequences that are under way over what the generators decode at once; above 1 some wait in the engines."""
    keys = ("generator.max_num_seqs", "mesh.generator.replicas", "grpo.group_size")
    places, replicas, group = (knobs.get(key) for key in keys)
    if m.groups_at_once is None or not (places and replicas and group):
        return None
    return m.groups_at_once * group / (places * replicas)


def _for_generation(knobs: Knobs) -> Iterator[Turn]:
    replicas, places = knobs.get("mesh.generator.replicas"), knobs.get("generator.max_num_seqs")
    batch, bound = knobs.get("grpo.batch_size"), knobs.get("replay.max_staleness")
    if isinstance(places, int) and isinstance(replicas, int) and isinstance(batch, int) and isinstance(bound, int):
        at_once = -(-batch * (bound + 1) // replicas)
        if at_once > places:
            yield Turn("generator.max_num_seqs", places, f"{at_once}: as many episodes are begun for each replica")
    yield from _more(knobs, "mesh.generator.replicas")
    if knobs.get("grpo.oversample") == 0:
        yield Turn("grpo.oversample", 0, "1 or 2, where single long episodes hold their group up")


def _of_weights(m: Measured, knobs: Knobs) -> Iterator[Finding]:
    def share(seconds: float) -> float:
        return seconds / m.wall_s if m.wall_s else 0.0

    transport = tuple(_turn(knobs, "weightsync.staging", "device, where there is memory for a copy of the weights"))
    why = f"{_s(m.stall_s)} of {_s(m.wall_s)} a step go into the copy that is published"
    yield Finding("Weights: the trainer stands still for its snapshot", share(m.stall_s), why, transport)
    why = f"a generator decodes nothing for {_s(m.pause_s)} at an update, a step takes {_s(m.wall_s)}"
    kv = tuple(_turn(knobs, "weightsync.kv", "keep")) if knobs.get("weightsync.kv") != "keep" else ()
    shadow = tuple(_turn(knobs, "weightsync.shadow", "true")) if knobs.get("weightsync.shadow") is False else ()
    yield Finding("Weights: generators stand still for updates", share(m.pause_s), why, (*kv, *shadow))
    why = f"{_s(m.rest_s)} of {_s(m.wall_s)} a step are neither waiting, nor a step, nor a snapshot: logs, checkpoints"
    yield Finding("The train loop itself", share(m.rest_s), why)


def _of_waste(m: Measured, knobs: Knobs) -> Iterator[Finding]:
    why = f"{m.wasted_share:.0%} of the sampled tokens are never trained: too stale, or of groups that teach nothing"
    yield Finding("Waste: sampled tokens are thrown away", m.wasted_share, why, tuple(_for_waste(knobs)))
    if m.padding_share and knobs.get("trainer.packing") is False:
        share = m.padding_share * m.step_s / m.wall_s if m.wall_s else 0.0
        why = f"{m.padding_share:.0%} of the positions that the trainer computes are padding"
        yield Finding("The trainer computes padding", share, why, (Turn("trainer.packing", False, "true"),))


def _for_waste(knobs: Knobs) -> Iterator[Turn]:
    bound = knobs.get("replay.max_staleness")
    if isinstance(bound, int):
        yield Turn("replay.max_staleness", bound, str(bound + 1))
    if knobs.get("grpo.degenerate") == "drop":
        yield Turn("grpo.degenerate", "drop", "keep, or a task at the policy's level")


def _trainer_bound(m: Measured, knobs: Knobs) -> Finding:
    """Nobody waits for data: more of it would not help."""
    why = f"it waits {_s(m.wait_s)} of {_s(m.wall_s)} a step; a step takes {_s(m.step_s)}"
    if m.slot_wait_s:
        why += f", and rollout loops wait {_s(m.slot_wait_s)} for a slot: generation has room to spare"
    turns = [*_more(knobs, "mesh.trainer.procs"), *_turn(knobs, "trainer.microbatch_tokens", "twice, if memory allows")]
    replicas = knobs.get("mesh.generator.replicas")
    if isinstance(replicas, int) and replicas > 1 and m.slot_wait_s and m.slot_wait_s > m.step_s:
        turns.append(Turn("mesh.generator.replicas", replicas, f"{replicas - 1}, and its devices to the trainer"))
    return Finding(
        "The trainer is the limit, as it should be", m.step_s / m.wall_s if m.wall_s else 0.0, why, tuple(turns)
    )


def _more(knobs: Knobs, key: str) -> Iterator[Turn]:
    if key in knobs:
        now = knobs[key]
        yield Turn(
            key, "1 by default" if now is None else now, str((now or 1) + 1) + ", where there are cores or devices"
        )


def _turn(knobs: Knobs, key: str, to: str) -> Iterator[Turn]:
    if key in knobs:
        yield Turn(key, knobs[key], to)


def _s(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


# --- the page


def page(measured: Measured | None, found: Sequence[Finding], title: str = "Shakeout") -> RenderableType:
    """All of it for a terminal of 80 columns."""
    if measured is None:
        return Text(f"{title}: no step behind the {WARM_UP_STEPS} of the warm-up was measured; give more steps")
    table = Table(box=box.ROUNDED, show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _figures(measured):
        table.add_row(name, value)
    parts: list[RenderableType] = [table, Text("What holds whom back", style="bold")]
    for number, finding in enumerate(found, start=1):
        parts.append(Text(f"{number}. {finding.title} ({finding.share:.0%})", style="bold"))
        parts.append(Padding(Text(finding.why), (0, 0, 0, 3)))
        parts += [Padding(Text(f"{t.key} is {t.now}; try {t.to}", style="cyan"), (0, 0, 0, 3)) for t in finding.turns]
    return Group(*parts)


def _figures(m: Measured) -> Iterator[tuple[str, str]]:
    yield "measured", f"{m.steps} steps, without a warm-up of {WARM_UP_STEPS}"
    yield "a step", f"{_s(m.wall_s)} on average, {_s(m.wall_max_s)} at most"
    parts = (("waiting", m.wait_s), ("training", m.step_s), ("snapshot", m.stall_s), ("other", m.rest_s))
    yield "train loop", ", ".join(f"{name} {seconds / m.wall_s:.0%}" for name, seconds in parts if m.wall_s)
    yield "tokens/s", f"{m.generated_per_s:,.0f} generated, {m.trained_per_s:,.0f} trained"
    if m.staleness is not None:
        mean, largest, bound = m.staleness
        yield "policy lag", f"{mean:.1f} versions on average, {largest:.0f} at most, bound {bound:.0f}"
    if m.rollout_s is not None:
        yield "a rollout", f"{_s(m.rollout_s)}, rewards {m.reward_share or 0.0:.0%} of it"
    if m.slot_wait_s is not None:
        yield "wait for a slot", _s(m.slot_wait_s)
    yield "an update", f"stops a generator for {_s(m.pause_s)}"
