"""Puts the page together: one file, no network, the same bytes for the same run folders. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

from forge.report import compare, curves, episodes, sections
from forge.report.charts import NUM_COLOURS
from forge.report.facts import Facts, facts_of
from forge.report.findings import comparison, findings, judged
from forge.report.runs import Run
from forge.report.style import style
from forge.report.words import duration, escaped
from forge.run_facts import NO_ERROR


def page(runs: Sequence[Run]) -> str:
    """The HTML of one run or several; the first is the one that the others are compared with."""
    facts = [facts_of(run.rows, run.evaluations) for run in runs]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    span = curves.window(runs)
    note = f"Strong lines are the mean of the last {span} steps, faint ones each step. " if span > 1 else ""
    parts = [
        f"<h1>{escaped(title)}</h1>",
        _findings(runs, facts),
        _head(runs[0], facts[0], False) if len(runs) == 1 else "",
        _section("Side by side", compare.table(runs, facts)) if len(runs) > 1 else "",
        _section("Who waits for whom", sections.waits(runs, facts)),
        _section("Staleness and throughput", _legend(runs) + sections.staleness(runs), sections.staleness(runs)),
        _section(
            "Curves",
            f'{_legend(runs)}<p class="soft">{note}Point at a chart for its values.</p>'
            f'<div class="charts">{curves.charts(runs)}</div>',
        ),
        _section("Timeline", sections.picture(runs)),
        _section("How long things took", sections.latencies(runs)),
        _section("Thrown away", sections.waste(runs, facts)),
        _section("Peak memory", sections.memory(runs)),
        _section("Episodes", _episodes(runs)),
        _section("Configuration", compare.configuration(runs)),
        _section("Runs", "".join(_head(run, own, True) for run, own in zip(runs, facts, strict=True)))
        if len(runs) > 1
        else "",
        f'<p class="soft">{_absent(runs)}</p>',
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{style()}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _section(title: str, body: str, needed: str | None = None) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if (body if needed is None else needed) else ""


def _findings(runs: Sequence[Run], facts: Sequence[Facts]) -> str:
    if len(runs) == 1:
        sentences = findings(facts[0], judged(runs[0].rows, runs[0].knobs))
    else:
        sentences = comparison([run.name for run in runs], facts)
    kind = "findings" if len(runs) > 1 else "findings lead"
    return f'<div class="{kind}">{"".join(f"<p>{escaped(s)}</p>" for s in sentences)}</div>'


def _head(run: Run, facts: Facts, named: bool) -> str:
    """What the run was, in a list of facts."""
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.began)) if run.began is not None else "unknown"
    wanted = run.config.get("trainer.steps", "")
    steps = f"{facts.num_steps:,}" + (f" of {int(wanted):,}" if wanted.isdigit() else "")
    lines = [
        ("began", began),
        ("took", f"{duration(facts.wall_s)}, the start of its processes not counted"),
        ("steps", steps),
        ("ended with", _ending(run, facts)),
        ("model", run.config.get("model", "unknown")),
    ]
    for key in ("machine", "versions"):
        found = run.facts.get(key)
        if isinstance(found, dict) and found:
            lines.append((key, ", ".join(f"{name} {value}" for name, value in found.items())))
    listed = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in lines)
    title = f"<h3>{escaped(run.name)}</h3>" if named else ""
    return f'{title}<dl class="facts">{listed}</dl>'


def _ending(run: Run, facts: Facts) -> str:
    told, wanted = run.facts.get("ended_with"), run.config.get("trainer.steps", "")
    if isinstance(told, str) and told not in ("", NO_ERROR):
        return told
    if wanted.isdigit() and int(run.rows[-1]["step"] or 0) >= int(wanted):
        return "all its steps done"
    return "a stop that was asked for" if told else "not known: it goes on, or was killed"


def _legend(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    items = []
    for n, run in enumerate(runs):
        c = n % NUM_COLOURS
        line = (
            f'<svg viewBox="0 0 34 10" aria-hidden="true"><polyline class="line dash{c} c{c}" points="0,5 34,5"/></svg>'
        )
        items.append(f"<li>{line}{escaped(run.name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _episodes(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        best, worst = episodes.best(run.episodes), episodes.worst(run.episodes)
        if not best:
            continue
        name = f"{escaped(run.name)}: " if len(runs) > 1 else ""
        cards = (
            f"<h3>{name}best</h3>{''.join(map(episodes.card, best))}"
            f"<h3>{name}worst</h3>{''.join(map(episodes.card, worst))}"
        )
        folded = f"<details><summary>{escaped(run.name)}</summary>{cards}</details>" if len(runs) > 1 else cards
        parts.append(folded)
    if not parts:
        return ""
    note = (
        "Of the few that a run keeps of each step. Grey was given, what the policy sampled is coloured by its version."
    )
    return f'<p class="soft">{note}</p>{"".join(parts)}'


def _absent(runs: Sequence[Run]) -> str:
    """A word about what would be here."""
    missing = []
    if not any(run.episodes for run in runs):
        missing.append("episodes (run.episodes_per_step)")
    if not any(run.spans for run in runs):
        missing.append("a timeline (run.trace)")
    if not any(run.facts.get("peak_memory") for run in runs):
        missing.append("peak memory")
    return f"Not in the run folder{'s' if len(runs) > 1 else ''}: {', '.join(missing)}." if missing else ""
