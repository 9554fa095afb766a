"""Spans of a trace -> a picture of a few steps, a lane a role. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from forge.report.charts import ticks
from forge.report.words import duration, escaped, number
from forge.trace import RESTARTS, TRAIN_LOOP, WEIGHTS, Span, lane_of

WIDTH = 860
_LEFT, _RIGHT, _ROW, _TALL, _GAP = 104, 8, 11, 64, 18
NUM_STEPS = 3
MAX_ROWS = 8
"""A lane with more spans at a time is drawn as how many run, not each of them."""
MAX_SPANS = 1500
PARTS = {"time/step_s": "step", "time/wait_batch_s": "wait", "time/publish_stall_s": "publish"}


def window(spans: Sequence[Span]) -> tuple[float, float, int, int] | None:
    """Begin and end in seconds of a few steps, and the first and last of them: those around the first restart, else
    those in the middle of the trace.

    Steps count from 1, in the trace. None where the train loop left no step.
    """
    trained = sorted((s for s in spans if s.lane == TRAIN_LOOP and s.name == "time/step_s"), key=lambda s: s.begin_s)
    if not trained:
        return None
    first = max(0, (len(trained) - NUM_STEPS) // 2)
    if restarted := [span.begin_s for span in spans if span.lane == RESTARTS]:
        done = sum(span.end_s < min(restarted) for span in trained)
        first = max(0, min(done, len(trained) - NUM_STEPS))
    last = min(len(trained), first + NUM_STEPS) - 1
    before = trained[first - 1].end_s if first else min(s.begin_s for s in spans)
    after = max(s.end_s for s in spans) if last + 1 == len(trained) else trained[last + 1].begin_s
    return before, min(after, trained[last].end_s + (trained[last].end_s - before) * 0.1), first + 1, last + 1


def timeline(spans: Sequence[Span], begin_s: float, end_s: float) -> str:
    """An SVG of `begin_s` to `end_s`: the train loop first, then actors in the order in which they came up."""
    shown = [span for span in spans if span.end_s > begin_s and span.begin_s < end_s]
    lanes = dict.fromkeys(span.lane for span in shown)
    actors = list(dict.fromkeys((TRAIN_LOOP, *(lane.partition(": ")[0] for lane in lanes))))
    order = sorted(lanes, key=lambda lane: (actors.index(lane.partition(": ")[0]), lane))
    scale = (WIDTH - _LEFT - _RIGHT) / max(1e-9, end_s - begin_s)
    top, parts = 4.0, list[str]()
    for lane in order:
        own = [span for span in shown if span.lane == lane]
        rows = 1 + max(span.row for span in own)
        many = rows > MAX_ROWS or len(own) > MAX_SPANS
        if many:
            drawn, tall = _crowd(own, begin_s, end_s, scale, top), _TALL
        else:
            drawn, tall = "".join(_bar(span, begin_s, end_s, scale, top) for span in own), rows * (_ROW + 1)
        actor, _, part = lane.partition(": ")
        below = f'<text x="0" y="{top + 22:.0f}">{escaped(_short(part))}</text>'
        parts.append(f'<text class="lane" x="0" y="{top + 10:.0f}">{escaped(_short(actor))}</text>{below}{drawn}')
        top += tall + _GAP
    parts.append(_axis(end_s - begin_s, top))
    label = f"timeline of {number(end_s - begin_s)} seconds"
    return f'<svg viewBox="0 0 {WIDTH} {top + 22:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _short(lane: str) -> str:
    return lane if len(lane) <= 15 else lane[:14] + "…"


def _bar(span: Span, begin_s: float, end_s: float, scale: float, top: float) -> str:
    left = _LEFT + (max(begin_s, span.begin_s) - begin_s) * scale
    wide = max(0.7, (min(end_s, span.end_s) - max(begin_s, span.begin_s)) * scale)
    name = PARTS.get(span.name, span.name)
    more = "".join(f"\n{key} {value}" for key, value in span.arguments.items())
    text = escaped(f"{span.lane}: {name}, {duration(span.end_s - span.begin_s)}{more}")
    kind = f"p-{name}" if span.name in PARTS else "p-span"
    if span.lane == RESTARTS:
        kind = "p-restart"
    elif span.lane.endswith(lane_of("", WEIGHTS)):
        kind = "p-publish"
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top + span.row * (_ROW + 1):.1f}" width="{wide:.1f}" height="{_ROW}">'
        f"<title>{text}</title></rect>"
    )


def running(spans: Sequence[Span], begin_s: float, end_s: float, parts: int) -> list[float]:
    """How many spans ran in each of `parts` equal parts of the time, on average."""
    each = (end_s - begin_s) / parts
    found = [0.0] * parts
    for span in spans:
        first = max(0, int((span.begin_s - begin_s) / each))
        last = min(parts - 1, int((span.end_s - begin_s) / each))
        for n in range(first, last + 1):
            left, right = begin_s + n * each, begin_s + (n + 1) * each
            found[n] += max(0.0, min(right, span.end_s) - max(left, span.begin_s)) / each
    return found


def _crowd(spans: Sequence[Span], begin_s: float, end_s: float, scale: float, top: float) -> str:
    parts = 200
    counts = running(spans, begin_s, end_s, parts)
    most = max(counts) or 1.0
    wide = (end_s - begin_s) / parts * scale
    track = [f"{_LEFT},{top + _TALL:.1f}"]
    for n, count in enumerate(counts):
        height = top + _TALL - count / most * (_TALL - 2)
        track += [f"{_LEFT + n * wide:.1f},{height:.1f}", f"{_LEFT + (n + 1) * wide:.1f},{height:.1f}"]
    track.append(f"{_LEFT + parts * wide:.1f},{top + _TALL:.1f}")
    text = f"{len(spans):,} spans, up to {number(most)} at once"
    return (
        f'<polygon class="crowd" points="{" ".join(track)}"><title>{text}</title></polygon>'
        f'<text x="0" y="{top + 36:.0f}">up to {most:.0f}</text><text x="0" y="{top + 49:.0f}">at once</text>'
    )


def _axis(seconds: float, top: float) -> str:
    scale = (WIDTH - _LEFT - _RIGHT) / max(1e-9, seconds)
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{top:.0f}" y2="{top:.0f}"/>']
    for tick in (t for t in ticks(0.0, seconds, 6) if t <= seconds):
        place = _LEFT + tick * scale
        anchor = "end" if place > WIDTH - 30 else "middle"
        parts.append(f'<line class="axis" x1="{place:.1f}" x2="{place:.1f}" y1="{top:.0f}" y2="{top + 4:.0f}"/>')
        parts.append(
            f'<text x="{place:.1f}" y="{top + 16:.0f}" text-anchor="{anchor}">{duration(round(tick, 9))}</text>'
        )
    return "".join(parts)
