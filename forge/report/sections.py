"""The parts of the page between the curves and the episodes: facts -> HTML. Pure. "" where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence

from forge.report import curves
from forge.report.charts import column_chart
from forge.report.facts import (
    Facts,
    Latency,
    busy_lanes,
    environment_latencies,
    staleness_shares,
    step_latencies,
    total,
    values,
)
from forge.report.runs import Run
from forge.report.timeline import timeline, window
from forge.report.words import duration, escaped, number, percent, size, table
from forge.trace import BATCHES, GENERATE, JOURNAL, RESTARTS, STEP, WEIGHTS, lane_of

_SEEN_ELSEWHERE = tuple(lane_of("", lane) for lane in (STEP, WEIGHTS, BATCHES, JOURNAL))
"""Lanes of actors that say of waiting what the train loop's bar says, or that nobody waits for."""


def waits(runs: Sequence[Run], facts: Sequence[Facts]) -> str:
    """A bar for each role of each run."""
    bars = "".join(_waits_of(run, own, len(runs) > 1) for run, own in zip(runs, facts, strict=True))
    if all(run.spans or own.rollout_s or not own.generates for run, own in zip(runs, facts, strict=True)):
        return bars
    note = "How busy generators and environments were is in no trace of these runs (run.trace)."
    return f'{bars}<p class="soft">{note}</p>'


def _waits_of(run: Run, facts: Facts, named: bool) -> str:
    own = facts.waits
    parts = [
        ("p-step", "training", own.step_s),
        ("p-wait", "waiting for a batch", own.wait_s),
        ("p-publish", "publishing weights", own.publish_s),
        ("p-rest", "the rest", own.rest_s),
    ]
    shares = [(kind, name, own.share(seconds), duration(seconds)) for kind, name, seconds in parts]
    since = ", from the second step on" if facts.waits_steps < facts.num_steps else ""
    bars = [_bar("Trainer", f"{duration(own.wall_s)} in all{since}", shares), _rollouts(facts)]
    for lane in busy_lanes(run.spans):
        if lane.lane == RESTARTS or lane.lane.endswith(_SEEN_ELSEWHERE):
            continue
        name = "Generators" if lane.lane == GENERATE else lane.lane
        what = "requests " if lane.lane == GENERATE else ""
        more = f"{number(lane.at_once)} {what}at a time on average, from the trace"
        idle = [("p-busy", "at least one at work", lane.share, ""), ("p-idle", "none", 1 - lane.share, "")]
        bars.append(_bar(name, more, idle))
    notes = []
    if (pauses := total(run.rows, "generator/pause_s")) is not None:
        share = percent(own.share(pauses))
        if pauses:
            notes.append(f"Generators stopped for new weights {duration(pauses)} in all, {share} of the time.")
    if facts.admission_wait_s is not None:
        slot = f"A rollout waited {duration(facts.admission_wait_s)} for a free slot on average"
        notes.append(f"{slot}; a step of the train loop took {duration(facts.step_wall_s)}.")
    title = f"<h3>{escaped(run.name)}</h3>" if named else ""
    return f'{title}{"".join(bars)}<p class="soft">{escaped(" ".join(notes))}</p>'


def _rollouts(facts: Facts) -> str:
    """What a rollout loop does with its time, where rollouts are timed."""
    if facts.rollout_s is None or facts.admission_wait_s is None:
        return ""
    reward_s = facts.reward_s or 0.0
    parts = [
        ("p-busy", "generating", max(0.0, facts.rollout_s - reward_s)),
        ("p-publish", "waiting for rewards", reward_s),
        ("p-wait", "waiting for a free slot", facts.admission_wait_s),
    ]
    each_s = sum(seconds for _, _, seconds in parts) or 1.0
    return _bar(
        "Rollouts",
        f"{duration(each_s)} each on average",
        [(kind, name, seconds / each_s, duration(seconds)) for kind, name, seconds in parts],
    )


def _bar(name: str, more: str, shares: Sequence[tuple[str, str, float, str]]) -> str:
    spans = []
    for kind, part, share, took in shares:
        text = escaped(f"{part}: {percent(share)} {took}".strip())
        spans.append(f'<span class="{kind}" style="width:{share * 100:.2f}%" title="{text}"></span>')
    keys = [f'<li><i class="{kind}"></i>{escaped(part)} {percent(share)}</li>' for kind, part, share, _ in shares]
    return (
        f'<div class="share"><h3>{escaped(name)} <span class="soft">{escaped(more)}</span></h3>'
        f'<div class="bar">{"".join(spans)}</div><ul class="keys">{"".join(keys)}</ul></div>'
    )


def staleness(runs: Sequence[Run]) -> str:
    """The histogram next to throughput."""
    found = [staleness_shares(run.rows) for run in runs]
    ages = sorted({age for own in found for age, share in own.items() if share > 0})
    throughput = curves.charts(runs, [curves.THROUGHPUT])
    if not ages and not throughput:
        return ""
    span = range(ages[0], ages[-1] + 1) if ages else ()
    columns = [(str(age), [own.get(age, 0.0) for own in found]) for age in span]
    drawn = column_chart(columns, label="histogram of staleness", x_label="versions behind")
    says = "share of the trained episodes by how many versions passed since their oldest token was sampled"
    histogram = curves.framed("Staleness of what was trained", "", says, drawn)
    return f'<div class="charts">{histogram}{throughput}</div>'


def picture(runs: Sequence[Run]) -> str:
    """A timeline of each run that has a trace."""
    parts = []
    for run in runs:
        if (part := window(run.spans)) is None:
            continue
        begin_s, end_s, first, last = part
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        name = f"{escaped(run.name)}: " if len(runs) > 1 else ""
        parts.append(
            f'<p class="soft">{name}{steps}, {duration(end_s - begin_s)}; the whole trace opens in ui.perfetto.dev</p>'
        )
        parts.append(f'<div class="wide">{timeline(run.spans, begin_s, end_s)}</div>')
    if not parts:
        return ""
    keys = (
        ("p-step", "training"),
        ("p-wait", "waiting for a batch"),
        ("p-publish", "weights on their way"),
        ("p-span", "other work"),
        ("p-restart", "a restart"),
    )
    drawn = "".join(parts)
    legend = "".join(f'<li><i class="{kind}"></i>{name}</li>' for kind, name in keys if f'class="{kind}"' in drawn)
    return f'<ul class="keys">{legend}</ul>{drawn}'


def latencies(runs: Sequence[Run]) -> str:
    """Percentiles of every wait and every kind of work, of each run."""
    parts = []
    for run in runs:
        title = f"<h3>{escaped(run.name)}</h3>" if len(runs) > 1 else ""
        found = step_latencies(run.rows)
        if found:
            parts.append(f"{title}{_table(found, 'steps')}")
        if environments := environment_latencies(run.environments, run.rows):
            note = "Environments: queue is the wait for a place, service the work itself."
            whole = [one for one in environments if "," not in one.name]
            turns = [one for one in environments if "," in one.name]
            parts.append(f'<p class="soft">{note}</p>{_table(whole, "calls")}')
            if turns:
                parts.append(f"<details><summary>turn by turn</summary>{_table(turns, 'calls')}</details>")
    return "".join(parts)


def _table(found: Sequence[Latency], counted: str) -> str:
    rows = [
        f'<td class="left">{escaped(one.name)}: {escaped(one.part)}</td><td>{one.count:,}</td>'
        + "".join(f"<td>{duration(high)}</td>" for high in (one.p50_s, one.p95_s, one.p99_s, one.max_s))
        for one in found
    ]
    return table(("", counted, "half below", "95 % below", "99 % below", "longest"), rows)


def waste(runs: Sequence[Run], facts: Sequence[Facts]) -> str:
    """What was sampled in vain, and whether long episodes go before short ones."""
    return "".join(_waste_of(run, own, len(runs) > 1) for run, own in zip(runs, facts, strict=True))


def _waste_of(run: Run, facts: Facts, named: bool) -> str:
    names = {
        "tokens/generated": "tokens sampled",
        "tokens/trained": "tokens trained",
        "tokens/wasted": "tokens of episodes thrown away",
        "extra/tokens_cut": "tokens of episodes begun as a reserve and cut",
        "episodes/trained": "episodes trained",
        "episodes/dropped": "episodes thrown away",
        "groups/expired": "groups thrown away as too old",
        "groups/straggled": "groups thrown away as too slow",
        "groups/failed": "groups that failed",
        "groups/degenerate": "groups of equal rewards, which teach nothing",
    }
    counts = [(name, count) for key, name in names.items() if (count := total(run.rows, key)) is not None]
    if facts.wasted_share is None or not counts:
        return ""
    counts = counts[:2] + [(name, count) for name, count in counts[2:] if count]
    listed = "".join(f"<dt>{name}</dt><dd>{count:,.0f}</dd>" for name, count in counts)
    title = f"<h3>{escaped(run.name)}</h3>" if named else ""
    return f'{title}<dl class="facts">{listed}</dl><p>{escaped(_bias(run))}</p>'


def _bias(run: Run) -> str:
    """Of the last 1024 episodes that ended, as the replay counts them."""
    found = [values(run.rows, f"discard/q{n}") for n in range(1, 5)]
    if not all(found):
        return ""
    last = [own[-1] for own in found]
    if not any(last):
        return "At the end of the run no episode was thrown away, long or short: what is trained is not biased by that."
    shares = ", ".join(percent(share) for share in last)
    text = f"Thrown away at the end of the run, from the shortest quarter of the episodes to the longest: {shares}."
    if last[3] > 1.5 * last[0] + 0.01:
        return text + " Long episodes go more often, so what is trained is shorter than what the policy writes."
    return text


def memory(runs: Sequence[Run]) -> str:
    """The peak of each role, where the run wrote it down."""
    roles = list(dict.fromkeys(role for run in runs for role in run.facts.get("peak_memory", {})))
    if not roles:
        return ""
    names = [run.name for run in runs] if len(runs) > 1 else ["peak"]
    rows = [f"<td>{escaped(role)}</td>{''.join(f'<td>{_peak(run, role)}</td>' for run in runs)}" for role in roles]
    return table(("", *names), rows)


def _peak(run: Run, role: str) -> str:
    peak = run.facts.get("peak_memory", {}).get(role)
    return size(peak) if isinstance(peak, (int, float)) else "-"
