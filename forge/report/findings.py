"""Facts -> a few sentences that come first: how it went, who waited for whom, what that means. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge import shakeout
from forge.metrics import Row
from forge.report.facts import Facts
from forge.report.words import duration, number, percent
from forge.shakeout import Finding

MOST = 3
"""Things that hold somebody back, of which the page speaks."""
_MUCH = 0.25
_LITTLE = 0.5


def findings(facts: Facts, found: Sequence[Finding] = ()) -> list[str]:
    """Of one run, the most important first. `found` is what holds whom back, see `judged`."""
    return [*_outcome(facts), *_first_wait(facts), *_judged(found), *_staleness(facts), *_alarms(facts)]


def judged(rows: Sequence[Row], knobs: Mapping[str, Any]) -> list[Finding]:
    """What holds whom back, without the step in which the pipeline filled up where there are others."""
    measured = shakeout.measure(rows, 1 if len(rows) > 2 else 0)
    return shakeout.findings(measured, knobs) if measured else []


def _outcome(facts: Facts) -> list[str]:
    took = f"in {facts.num_steps:,} step{'s' if facts.num_steps > 1 else ''} and {duration(facts.wall_s)}"
    if facts.reward is not None:
        first, last = facts.reward
        if facts.num_steps > 2 and abs(last - first) < facts.reward_noise:
            moved = f"Reward went from {number(first)} to {number(last)}, less than one step differs from the next,"
            return [f"{moved} {took}.{_evaluated(facts)}"]
        return [f"{_moved('Reward', first, last)} {took}.{_evaluated(facts)}"]
    if facts.loss is not None:
        return [f"{_moved('The loss', *facts.loss)} {took}."]
    return [f"The run went on for {took.removeprefix('in ')}."]


def _evaluated(facts: Facts) -> str:
    if facts.passed is None:
        return ""
    mean, low, high = (number(value) for value in facts.passed)
    return f" The last evaluation passed {mean} of its samples (95 % interval {low} to {high})."


def _moved(name: str, first: float, last: float) -> str:
    if abs(last - first) < 0.005 * max(abs(first), abs(last), 1e-9):
        return f"{name} stayed at {number(last)}"
    return f"{name} {'rose' if last > first else 'fell'} from {number(first)} to {number(last)}"


def _first_wait(facts: Facts) -> list[str]:
    if facts.first_wait_s <= _MUCH * facts.wall_s:
        return []
    return [f"Of that, {duration(facts.first_wait_s)} went by before the first batch; the shares leave it out."]


def _judged(found: Sequence[Finding]) -> Iterator[str]:
    """What `forge.shakeout` finds, each with what to try."""
    for finding in found[:MOST]:
        tries = " or ".join(f"{turn.key} {turn.to} (it is {turn.now})" for turn in finding.turns[:2])
        yield f"{finding.title}, {percent(finding.share)}: {finding.why}." + (f" Try {tries}." if tries else "")


def _staleness(facts: Facts) -> list[str]:
    if facts.staleness_mean is None:
        return []
    most, bound = number(facts.staleness_max), number(facts.staleness_bound)
    text = f"Trained episodes were {number(facts.staleness_mean)} versions old on average and {most} at most"
    text += f" (bound {bound})"
    if facts.wasted_share is not None:
        text += f"; {percent(facts.wasted_share)} of the sampled tokens were thrown away"
    return [text + "."]


def _alarms(facts: Facts) -> list[str]:
    found = []
    if facts.effective_sample_size is not None and facts.effective_sample_size < _LITTLE:
        share = percent(facts.effective_sample_size)
        found.append(
            f"Importance weights left {share} of a batch on average: the data were too old for much of them to count."
        )
    if facts.skipped_updates:
        found.append(f"{facts.skipped_updates:,.0f} updates were skipped, since their gradient was not finite.")
    for role, steps in facts.restarts.items():
        times = "once" if len(steps) == 1 else f"{len(steps)} times"
        found.append(f"A {role} died and was restarted {times}, before step {', '.join(map(str, steps[:8]))}.")
    if facts.nonfinite:
        found.append(f"{facts.nonfinite:,.0f} measured values were NaN or infinite.")
    return found


def comparison(names: Sequence[str], facts: Sequence[Facts]) -> list[str]:
    """Each run against the first: never its speed without its staleness and its reward."""
    base = facts[0]
    sentences = []
    for name, own in zip(names[1:], facts[1:], strict=True):
        faster = base.step_wall_s / own.step_wall_s if own.step_wall_s > 0 else None
        pace = "at an unknown pace" if faster is None else f"at {number(faster)} times the pace"
        text = f"{name} made its steps {pace} of {names[0]}"
        if own.staleness_mean is not None and base.staleness_mean is not None:
            text += f", on episodes {number(own.staleness_mean)} versions old against {number(base.staleness_mean)}"
        if own.reward is not None and base.reward is not None:
            text += f", and ended at a reward of {number(own.reward[1])} against {number(base.reward[1])}"
        waits = f"its trainer waited {percent(own.waits.share(own.waits.wait_s))} of the time for batches"
        sentences.append(f"{text}; {waits} against {percent(base.waits.share(base.waits.wait_s))}.")
    return sentences
