"""What the report page is made of: numbers of rows and spans, axes, episodes, and what a run says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.reward import Sample, Scores
from actors.rollout import Rollout
from forge import run_facts
from forge.batch import make_group
from forge.metrics import METRIC_KEYS, Row
from forge.report.charts import MAX_POINTS, Line, line_chart, thinned, tick_texts, ticks
from forge.report.episodes import best, card, worst
from forge.report.facts import (
    busy_lanes,
    environment_latencies,
    facts_of,
    quantile,
    staleness_shares,
    time_to_reach,
    trailing,
)
from forge.report.findings import findings, judged
from forge.report.runs import Episode, flat
from forge.report.timeline import running, timeline, window
from forge.report.words import duration, number, percent, size
from forge.trace import Span


def row(step: int, **changes: Any) -> Row:
    values: dict[str, Any] = dict.fromkeys(METRIC_KEYS)
    values |= {"step": step, "policy_version": step, "time_s": 10.0 * step, "tokens/generated": 10}
    return values | changes


def waits(wait_s: float, step_s: float, **more: Any) -> list[Row]:
    changes = {"time/wait_batch_s": wait_s, "time/step_s": step_s, "time/publish_stall_s": 0.0}
    return [row(step, **(changes | more)) for step in range(1, 6)]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (waits(7.0, 3.0), "Generation is slow: the trainer waits for batches, 70 %: 7.00 s of 10.00 s a step"),
        (waits(7.0, 3.0, **{"tokens/generated": None}), "Reading data is slow: the trainer waits for batches, 70 %"),
        (
            waits(5.0, 5.0, **{"replay/admission_wait_s": 4.0, "staleness/bound": 0}),
            "The staleness bound: trainer and generators wait for each other, 50 %",
        ),
        (waits(0.1, 9.5), "The trainer is the limit, as it should be, 95 %: it waits 100 ms of 10.00 s"),
        (waits(0.1, 2.0, **{"time/publish_stall_s": 7.0}), "Weights: the trainer stands still for its snapshot, 70 %"),
        (waits(0.1, 2.0), "The train loop itself, 79 %"),
    ],
)
def test_who_waits_for_whom_in_words(rows: list[Row], wanted: str) -> None:
    assert wanted in " ".join(findings(facts_of(rows), judged(rows, {"replay.max_staleness": 0})))


def test_the_wait_for_the_first_batch_is_told_apart() -> None:
    rows = [row(n, **{"time_s": 100.0 + 10 * n, "time/wait_batch_s": 0.0, "time/step_s": 10.0}) for n in range(5)]
    rows[0]["time/wait_batch_s"] = 95.0
    facts = facts_of(rows)
    assert (facts.wall_s, facts.waits.wall_s, facts.step_wall_s) == (140.0, 40.0, 10.0)
    assert facts.waits.share(facts.waits.step_s) == 1.0
    assert any("1 min 35 s went by before the first batch" in sentence for sentence in findings(facts))


def test_a_reward_that_moves_less_than_its_noise_did_not_rise() -> None:
    rows = [row(n, **{"reward/mean": 0.1 * (n % 2) + 0.001 * n}) for n in range(1, 12)]
    assert "less than one step differs from the next" in findings(facts_of(rows))[0]
    rising = [row(n, **{"reward/mean": 0.1 * n}) for n in range(1, 11)]
    assert findings(facts_of(rising))[0].startswith("Reward rose from 0.100 to 1 in 10 steps")


def test_a_trainer_that_trains_most_of_the_time_is_the_limit_whatever_it_waits_for() -> None:
    first, *_ = judged(waits(1.0, 8.9, **{"replay/admission_wait_s": 6.0}), {"replay.max_staleness": 1})
    assert "The trainer is the limit" in first.title


def test_the_timeline_shows_the_steps_around_a_restart_and_lanes_of_one_actor_together() -> None:
    steps = [Span("train loop", 0, "time/step_s", 10.0 * n, 10.0 * n + 9.0) for n in range(20)]
    spans = [
        *steps,
        Span("generator_0: weights", 0, "flip", 161.0, 162.0),
        Span("reward: rewards", 0, "score", 161.0, 162.0),
        Span("generator_0: requests", 0, "a", 162.0, 163.0),
    ]
    found = window(spans)
    assert found is not None
    assert found[2:] == (9, 11)
    found = window([*spans, Span("restarts", 0, "generator_0", 161.5, 175.0)])
    assert found is not None
    assert found[2] == 17
    drawn = timeline([*spans, Span("restarts", 0, "generator_0", 161.5, 175.0)], *found[:2])
    assert 'class="p-restart"' in drawn
    assert 'class="p-publish"' in drawn
    places = [drawn.index(name) for name in (">train loop<", ">requests<", ">weights<", ">reward<")]
    assert places == sorted(places)


def test_the_interval_of_a_single_point_is_an_upright_line() -> None:
    drawn = line_chart([Line("a", [5.0], [0.5], lows=[0.25], highs=[0.75])], label="one")
    assert '<line class="line c0"' in drawn


def test_staleness_counts_episodes_and_not_steps() -> None:
    few = row(1, **{"episodes/trained": 1, "staleness/hist/0": 1.0, "staleness/hist/2": 0.0})
    many = row(2, **{"episodes/trained": 3, "staleness/hist/0": 0.0, "staleness/hist/2": 1.0})
    assert staleness_shares([few, many]) == {0: 0.25, 2: 0.75}
    assert staleness_shares([row(1)]) == {}


def test_means_quantiles_and_the_time_to_a_reward() -> None:
    assert trailing([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
    assert [quantile([3.0, 1.0, 2.0, 4.0], q) for q in (0.5, 0.95, 1.0)] == [2.0, 4.0, 4.0]
    rows = [row(n, **{"reward/mean": reward}) for n, reward in enumerate((0.9, 0.1, 0.6, 0.8), 1)]
    assert time_to_reach(rows, 0.7, 2) == 40.0, "the first lucky step is not enough"
    assert time_to_reach(rows, 0.95, 2) is None


def test_latencies_come_from_the_report_of_the_run_and_else_from_its_rows() -> None:
    times = {"turn": "turn0", "part": "queue", "count": 3, "p50_s": 1, "p95_s": 2, "p99_s": 3, "max_s": 4}
    (one,) = environment_latencies({"maze": {"times": [times]}}, [])
    assert (one.name, one.part, one.count, one.max_s) == ("maze, reset", "queue", 3, 4.0)
    stem = "extra/env/maze/service"
    rows = [
        row(n, **{"extra/env/maze/count": n, f"{stem}_p50_s": 1.0 * n, f"{stem}_p95_s": 2.0, f"{stem}_max_s": 5.0 - n})
        for n in (1, 3)
    ]
    (two,) = environment_latencies({}, rows)
    assert (two.name, two.part, two.count, two.p50_s, two.max_s) == ("maze", "service", 4, 2.5, 4.0)


SPANS = [
    Span("train loop", 0, "time/wait_batch_s", 10.0, 12.0),
    Span("generate", 0, "a", 10.0, 11.0),
    Span("generate", 1, "b", 10.5, 11.5, {"turn": 2}),
    *(Span("train loop", 0, "time/step_s", 12.0 + 2 * n, 13.5 + 2 * n) for n in range(5)),
    Span("generate", 0, "</title>", 14.0, 20.0),
]


def test_a_lane_is_busy_while_any_of_its_spans_runs() -> None:
    (lane,) = busy_lanes(SPANS)
    assert lane.lane == "generate"
    assert lane.share == pytest.approx(7.5 / 11.5)
    assert lane.at_once == pytest.approx(8.0 / 11.5)
    assert busy_lanes([]) == []


def test_the_timeline_shows_whole_steps_from_the_middle() -> None:
    found = window(SPANS)
    assert found is not None
    begin_s, end_s, first, last = found
    assert (begin_s, first, last) == (13.5, 2, 4)
    assert 19.5 <= end_s <= 20.0
    drawn = timeline(SPANS, begin_s, end_s)
    assert drawn.count('class="p-step"') == 3
    assert "&lt;/title&gt;" in drawn
    assert "</title></title>" not in drawn
    assert window(SPANS[:3]) is None
    assert running(SPANS[1:3], 10.0, 12.0, 4) == [1.0, 2.0, 1.0, 0.0]


def test_axes_enclose_their_values_at_round_numbers() -> None:
    assert ticks(0.03, 0.98) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert tick_texts(ticks(0.0001, 0.0059)) == ["0.000", "0.002", "0.004", "0.006"]
    assert tick_texts(ticks(0, 2600)) == ["0", "1,000", "2,000", "3,000"]
    for low, high in ((5.0, 5.0), (-3.2, 7.1), (0.0, 1e-9), (1e12, 1.5e12), (0.0, 0.0)):
        found = ticks(low, high)
        assert found[0] <= low <= high <= found[-1]
        assert len(tick_texts(found)) == len(found) >= 2


def test_long_lines_are_thinned_to_means_and_every_value_is_under_the_pointer() -> None:
    long = thinned(Line("a", range(1000), [float(n % 2) for n in range(1000)]))
    assert len(long.xs) <= MAX_POINTS
    assert min(long.ys) > 0.3
    assert sum(long.ys) / len(long.ys) == pytest.approx(0.5, abs=0.01)
    drawn = line_chart([Line("a", [1, 2], [0.25, 0.5]), Line("b", [2], [3.0], colour=1)], label="x", unit="nats")
    assert "<title>step 1\na: 0.25 nats</title>".replace("0.25", "0.2500") in drawn
    assert "<title>step 2\na: 0.5000 nats\nb: 3 nats</title>" in drawn
    assert line_chart([], label="nothing") == ""


def test_best_and_worst_are_told_once_and_the_latest_of_equals_first() -> None:
    kept = [Episode(n, "p", f"c{n % 4}", [0.0, 1.0, None, 0.5][n % 4], (n,)) for n in range(8)]
    assert [(e.step, e.reward) for e in best(kept)] == [(5, 1.0), (7, 0.5), (4, 0.0)]
    assert [(e.step, e.reward) for e in worst(kept)] == [(4, 0.0), (7, 0.5), (5, 1.0)]


def test_tokens_carry_the_colour_of_their_version() -> None:
    coloured = card(Episode(3, "p", "ab", 1.0, (4, 7), (("<p>", -1), ("a", 4), ("obs", -1), ("b", 7))))
    assert '<span class="given">&lt;p&gt;</span><span class="v v0" title="version 4">a</span>' in coloured
    assert '<span class="given">obs</span><span class="v v1" title="version 7">b</span>' in coloured
    assert "which token by which was not kept" in card(Episode(3, "p", "ab", 1.0, (4, 7)))
    assert "cut here" in card(Episode(3, "p", "x" * 10_000, None, (4,)))


def test_a_rollout_says_which_version_sampled_what() -> None:
    group = make_group([1, 2], [[3, 4, 5], [6]], [[-1.0] * 3, [-1.0]], [[0, 1, 1], [1]], group_id=0)
    group["rewards"] = torch.zeros(2)
    samples = [Sample("12", "345", "", {}, 3, True), Sample("12", "6", "", {}, 1, True)]
    rollout = Rollout(group, samples, Scores([0.0, 1.0], {}))
    first, second = rollout.records(lambda ids: "".join(map(str, ids)))
    assert first.pieces == (("12", -1), ("3", 0), ("45", 1))
    assert second.pieces == (("12", -1), ("6", 1))
    assert [record.pieces for record in rollout.records()] == [(), ()]


def test_a_run_tells_its_machine_and_end_and_survives_a_folder_that_is_gone(tmp_path: Path) -> None:
    run_facts.note_start(tmp_path)
    began = json.loads((tmp_path / "run.json").read_text())["began"]
    run_facts.note(tmp_path, ended_with=run_facts.NO_ERROR, peak_memory={"trainer": 5})
    run_facts.note_start(tmp_path)
    found = json.loads((tmp_path / "run.json").read_text())
    assert (found["began"], found["ended_with"], found["peak_memory"]) == (began, "", {"trainer": 5})
    assert {"python", "torch"} <= set(found["versions"])
    assert int(found["machine"]["cores"]) >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    run_facts.note(tmp_path / "absent", ended_with="x")


def test_numbers_as_people_read_them() -> None:
    assert [number(v) for v in (None, 0, 1.0, 0.12345, 1234.5, -0.00001, 2e12)] == [
        *("-", "0", "1", "0.123", "1,234", "-1.0e-05", "2.00e+12")
    ]
    assert [percent(v) for v in (None, 0.0, 0.0001, 0.034, 0.05, 0.5)] == [
        *("-", "0 %", "under 0.1 %", "3.4 %", "5 %", "50 %")
    ]
    assert [duration(v) for v in (None, 0.0, 5e-6, 0.02, 59.0, 60.0, 61.0, 7260.0)] == [
        *("-", "0 s", "5 µs", "20 ms", "59 s", "1 min", "1 min 1 s", "2 h 1 min")
    ]
    assert [size(v) for v in (10, 2048, 3 * 2**30)] == ["10 bytes", "2 KiB", "3 GiB"]
    assert flat({"a": {"b": None, "c": [1]}, "d": {}}) == {"a.b": "null", "a.c": "[1]", "d": "{}"}
