"""Do the generators stay busy while an environment takes long? Answers it from the trace of a run.

    python -m apps.worlds.slots runs/NAME/trace.json --slots 16 -o slots.png

For a run with --run.trace. Finds the longest steps of an environment, and prints how many of the generators' slots
(generator.max_num_seqs x replicas) were in use before, during and after them. A turn that has been asked for takes a
slot, or waits for one in the engine's queue: `slots` of them in flight are full slots. Turns a second say what came of
it. The picture needs matplotlib (extra `dev`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge.errors import ConfigError
from forge.trace import GENERATE, TRAIN_LOOP, Span, read_spans


@dataclass(frozen=True)
class Use:
    """Of slots, in a time that has `seconds`."""

    seconds: float
    mean: float
    """Slots in use."""
    full: float
    """Share of the time in which all were."""


def in_flight(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """(time in seconds, how many spans are open from then on), at each change."""
    changes = sorted([(span.begin_s, 1) for span in spans] + [(span.end_s, -1) for span in spans])
    steps: list[tuple[float, int]] = []
    count = 0
    for time_s, change in changes:
        count += change
        if steps and steps[-1][0] == time_s:
            steps.pop()
        steps.append((time_s, count))
    return steps


def use(steps: Sequence[tuple[float, int]], begin_s: float, end_s: float, slots: int) -> Use:
    """What `in_flight` says of a time."""
    total = full = 0.0
    ends = [time_s for time_s, _ in steps[1:]] + [end_s]
    for (from_s, count), until_s in zip(steps, ends, strict=True):
        seconds = max(0.0, min(until_s, end_s) - max(from_s, begin_s))
        total += seconds * min(count, slots)
        full += seconds * (count >= slots)
    seconds = end_s - begin_s
    return Use(seconds, total / seconds, full / seconds) if seconds > 0 else Use(0.0, 0.0, 0.0)


def longest(spans: Sequence[Span]) -> list[Span]:
    """The longest step of an environment, and those that overlap it and are half as long at least."""
    steps = [span for span in spans if span.lane not in (GENERATE, TRAIN_LOOP) and span.arguments.get("turn")]
    if not steps:
        raise ConfigError("the trace has no step of an environment; run with --run.trace")
    most = max(steps, key=lambda span: span.end_s - span.begin_s)
    least_s = (most.end_s - most.begin_s) / 2
    return [s for s in steps if s.end_s - s.begin_s >= least_s and s.begin_s < most.end_s and s.end_s > most.begin_s]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the numbers, and draws them where -o asks for it."""
    parser = argparse.ArgumentParser(prog="python -m apps.worlds.slots", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--slots", type=int, required=True, help="generator.max_num_seqs x replicas")
    parser.add_argument("-o", "--output", type=Path, help="picture to write")
    args = parser.parse_args(argv)
    spans = read_spans(args.trace)
    slow = longest(spans)
    steps = in_flight([span for span in spans if span.lane == GENERATE])
    if not steps:
        raise ConfigError(f"{args.trace} has no span of {GENERATE}; run with --run.trace")
    begin_s, end_s = min(span.begin_s for span in slow), max(span.end_s for span in slow)
    times = {"before": (steps[0][0], begin_s), "during": (begin_s, end_s), "after": (end_s, steps[-1][0])}
    longest_s = max(span.end_s - span.begin_s for span in slow)
    print(f"{len(slow)} steps of {slow[0].lane} took up to {longest_s:.1f} s")
    for name, (from_s, until_s) in times.items():
        one = use(steps, from_s, until_s, args.slots)
        turns = sum(from_s < span.end_s <= until_s for span in spans if span.lane == GENERATE)
        pace = f"{turns / one.seconds:.2f} turns/s" if one.seconds else "-"
        in_use = f"{one.mean:.2f} of {args.slots} slots in use, all {one.full:.1%} of it"
        print(f"{name:6}  {one.seconds:6.1f} s  {in_use}, {pace}")
    if args.output:
        draw(spans, steps, slow, args.slots, args.output)


def draw(
    spans: Sequence[Span], steps: Sequence[tuple[float, int]], slow: Sequence[Span], slots: int, output: Path
) -> None:
    """Slots in use over time, under the slow steps and the trainer's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 4.5), sharex=True, height_ratios=(1, 2))
    for row, span in enumerate(sorted(slow, key=lambda span: span.begin_s)):
        above.barh(row, span.end_s - span.begin_s, left=span.begin_s, height=0.7, color="tab:red")
    training = [span for span in spans if span.lane == TRAIN_LOOP and span.name == "time/step_s"]
    for span in training:
        above.barh(-1.5, span.end_s - span.begin_s, left=span.begin_s, height=0.9, color="tab:green")
    above.set_yticks([-1.5, (len(slow) - 1) / 2], ["trainer", f"slow steps\nof {slow[0].lane}"])
    times = [time_s for time_s, _ in steps]
    below.step(times, [min(count, slots) for _, count in steps], where="post", linewidth=0.8)
    below.axhline(slots, color="grey", linewidth=0.6, linestyle="--")
    begin_s, end_s = min(span.begin_s for span in slow), max(span.end_s for span in slow)
    below.axvspan(begin_s, end_s, color="tab:red", alpha=0.1)
    below.set_ylim(0, slots * 1.1)
    below.set_ylabel(f"generation slots in use, of {slots}")
    below.set_xlabel("seconds from the start of the run")
    figure.tight_layout()
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    main()
