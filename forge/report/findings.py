"""Facts -> a few sentences that come first: how it went, who waited for whom, what that means. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from forge.report.facts import Facts
from forge.report.words import duration, number, percent

_MUCH = 0.25
_LITTLE = 0.5


def findings(facts: Facts) -> list[str]:
    """Of one run, the most important first."""
    return [*_outcome(facts), *_waits(facts), *_staleness(facts), *_alarms(facts)]


def _outcome(facts: Facts) -> list[str]:
    took = f"in {facts.num_steps:,} step{'s' if facts.num_steps > 1 else ''} and {duration(facts.wall_s)}"
    if facts.reward is not None:
        first, last = facts.reward
        if facts.num_steps > 2 and abs(last - first) < facts.reward_noise:
            moved = f"Reward went from {number(first)} to {number(last)}, less than one step differs from the next,"
            return [f"{moved} {took}."]
        return [f"{_moved('Reward', first, last)} {took}."]
    if facts.loss is not None:
        return [f"{_moved('The loss', *facts.loss)} {took}."]
    return [f"The run went on for {took.removeprefix('in ')}."]


def _moved(name: str, first: float, last: float) -> str:
    if abs(last - first) < 0.005 * max(abs(first), abs(last), 1e-9):
        return f"{name} stayed at {number(last)}"
    return f"{name} {'rose' if last > first else 'fell'} from {number(first)} to {number(last)}"


def _waits(facts: Facts) -> list[str]:
    first = []
    if facts.first_wait_s > _MUCH * facts.wall_s:
        first = [f"Of that, {duration(facts.first_wait_s)} went by before the first batch; the shares leave it out."]
    return [*first, _bottleneck(facts)]


def _bottleneck(facts: Facts) -> str:
    waits = facts.waits
    waited, worked = waits.share(waits.wait_s), waits.share(waits.step_s)
    stalled, rest = waits.share(waits.publish_s), waits.share(waits.rest_s)
    slot_s = facts.admission_wait_s or 0.0
    held_back = slot_s > _MUCH * facts.step_wall_s
    if waited >= max(_MUCH, stalled, rest):
        return _data_late(facts, waited, slot_s, held_back)
    if stalled >= _MUCH:
        return f"Publishing weights stopped the trainer {percent(stalled)} of the time: the copy is the bottleneck."
    if rest >= _MUCH:
        return (
            f"{percent(rest)} of the time the train loop neither trained, waited nor published: look for checkpoints, "
            "or for other work of its process."
        )
    text = (
        f"The trainer worked {percent(worked)} of the time and waited {percent(waited)} for batches: training is the "
    )
    text += "bottleneck, and its data keep up."
    if held_back:
        text += f" Rollouts waited {duration(slot_s)} for a free slot on average."
    return text


def _data_late(facts: Facts, waited: float, slot_s: float, held_back: bool) -> str:
    text = f"The trainer waited {percent(waited)} of the time for batches: "
    if not facts.generates:
        return text + "reading data is the bottleneck."
    if held_back:
        bound = number(facts.staleness_bound)
        return text + (
            f"it and the generators take turns. Rollouts in turn waited {duration(slot_s)} for a free slot on average, "
            f"because the staleness bound {bound} lets them run no further ahead; a larger replay.max_staleness would "
            "overlap the two, at the price of older data."
        )
    return text + (
        "generation, with its environments and rewards, is the bottleneck. More or faster generators would shorten "
        "the run; a faster trainer would not."
    )


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
