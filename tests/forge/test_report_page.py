"""The report page: its numbers against rows, what it escapes, that the same folder gives the same bytes."""

from __future__ import annotations

import json
import os
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from forge.errors import ConfigError
from forge.metrics import METRIC_KEYS, Row, make_row
from forge.report.__main__ import main
from forge.report.facts import (
    facts_of,
)
from forge.report.findings import comparison
from forge.report.page import page
from forge.report.runs import read_run, read_runs
from forge.report.words import escaped

Number = int | float


def row(step: int, **changes: Number | None) -> Row:
    """A step of 10 s: 6 waiting, 3 training, 0.5 publishing; 4 episodes."""
    values: dict[str, Any] = dict.fromkeys(METRIC_KEYS)
    values |= {"step": step, "policy_version": step, "time_s": 10.0 * step, "episodes/trained": 4}
    values |= {"reward/mean": step / 10, "reward/std": 0.1, "loss/policy": -0.5 / step, "grad_norm": 1.0}
    values |= {"time/wait_batch_s": 6.0, "time/step_s": 3.0, "time/publish_stall_s": 0.5, "generator/pause_s": 0.01}
    values |= {"tokens/generated": 100, "tokens/trained": 90, "tokens/wasted": 10, "generator/tokens_per_s": 10.0}
    values |= {"staleness/mean": 0.5, "staleness/max": 1, "staleness/bound": 1}
    values |= {"staleness/hist/0": 0.5, "staleness/hist/1": 0.5, "replay/admission_wait_s": 0.2}
    return make_row(values | changes)


ROWS = [row(step) for step in range(1, 11)]
EPISODES = [
    {"step": 1, "prompt": "2+2=", "completion": "<script>alert('boo')</script>", "reward": -1.0, "versions": [0]},
    {"step": 9, "prompt": "3+3=", "completion": "6 & more", "reward": 1.0, "versions": [7, 8]},
]


def write_run(folder: Path, rows: list[Row] = ROWS, config: str = "model: nano\ntrainer:\n  steps: 10\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "episodes.jsonl").write_text("".join(json.dumps(episode) + "\n" for episode in EPISODES))
    (folder / "config.yaml").write_text(config)
    os.utime(folder / "config.yaml", (1_700_000_000, 1_700_000_000))
    return folder


def words_of(html: str) -> str:
    """What a reader sees, without titles."""
    body = re.sub(r"<style>.*?</style>|<title>.*?</title>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_the_page_says_what_the_rows_say(tmp_path: Path) -> None:
    text = words_of(page([read_run(write_run(tmp_path / "one"))]))
    for wanted in (
        "Reward rose from 0.100 to 1 in 10 steps and 1 min 40 s.",
        "Generation is slow: the trainer waits for batches, 60 %: 6.00 s of 10.00 s a step",
        "0.500 versions old on average and 1 at most (bound 1); 10 % of the sampled tokens were thrown away",
        "training 30 %",
        "publishing weights 5 %",
        "the rest 5 %",
        "all its steps done",
        "2023-11-14 22:13 UTC",
    ):
        assert wanted in text


def test_what_a_model_wrote_stays_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>", config="model: </pre><script>\n")
    html = page([read_run(folder)])
    assert "<script" not in html
    assert "&lt;script&gt;alert(&#x27;boo&#x27;)&lt;/script&gt;" in html
    assert "<b>" not in html.replace("<b>reward", "")
    assert escaped("a\udc80\x00\x1b") == "a?��"


def test_the_same_folder_gives_the_same_bytes_whatever_the_day(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    assert main([str(folder)]) == 0
    first = (folder / "report.html").read_bytes()
    assert main([str(folder), "-o", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_bytes() == first
    # One file that needs nothing else.
    assert not re.search(rb"(src|href)\s*=|@import|url\(|https?://", first)


def test_a_run_of_one_row_and_nothing_else_has_a_page(tmp_path: Path) -> None:
    empty: dict[str, Any] = dict.fromkeys(METRIC_KEYS)
    folder = tmp_path / "bare"
    folder.mkdir()
    bare = json.dumps(make_row(empty | {"step": 1, "policy_version": 1, "time_s": 0.0}))
    (folder / "metrics.jsonl").write_text(bare + '\n{"step": 2, "tor')
    text = words_of(page([read_run(folder)]))
    assert "The run went on for 1 step and 0 s." in text
    assert "Not in the run folder: episodes (run.episodes_per_step), a timeline (run.trace), peak memory." in text


def test_a_folder_that_is_no_run_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    for folder, reason in ((tmp_path, "is no run folder"), (tmp_path / "empty", "has no finished step")):
        assert main([str(folder)]) == 2
        assert re.fullmatch(rf"\S+ {reason}.*\n", capsys.readouterr().err)
    one = write_run(tmp_path / "one")
    assert main([str(one), "-o", str(tmp_path / "absent" / "a.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="given twice"):
        read_runs([one, one])


def evaluation(version: int, passed: float) -> Row:
    row: Row = {"step": version, "policy_version": version}
    for key in ("eval/reward", "eval/pass@1", "eval/pass@4"):
        row |= {key: passed, f"{key}/low": passed - 0.1, f"{key}/high": passed + 0.1}
    return row


def test_evaluations_stand_beside_the_reward_with_their_intervals(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    lines = [json.dumps(evaluation(version, 0.3 + version / 20)) for version in (0, 5, 10)]
    (folder / "evaluations.jsonl").write_text("\n".join(lines))
    html = page([read_run(folder)])
    assert "The last evaluation passed 0.800 of its samples (95 % interval 0.700 to 0.900)." in words_of(html)
    titles = re.findall(r"<h3>([^<]*)", html[html.index("<h2>Curves") :])
    assert titles[:4] == ["Reward", "Reward in evaluation", "pass@1 in evaluation", "pass@4 in evaluation"]
    assert html.count('class="band') == 4
    other = write_run(tmp_path / "two")
    assert "pass@1, last evaluation 0.800 (0.700 to 0.900) -" in words_of(page(read_runs([folder, other])))


def test_restarts_are_told_and_marked_where_they_happened(tmp_path: Path) -> None:
    rows = [row(step, **{"extra/restarts/generator": int(step in (4, 7))}) for step in range(1, 11)]
    html = page([read_run(write_run(tmp_path / "one", rows))])
    assert "A generator died and was restarted 2 times, before step 4, 7." in words_of(html)
    assert html.count("a generator took up its work again") == html.count('class="mark"') > 2
    assert 'class="mark"' not in page([read_run(write_run(tmp_path / "two"))])


def test_two_runs_stand_beside_each_other_and_speed_never_alone(tmp_path: Path) -> None:
    fast = [row(n, **{"time_s": 4.0 * n, "time/wait_batch_s": 0.4, "staleness/mean": 1.0}) for n in range(1, 11)]
    folders = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", fast, "model: tiny\n")]
    runs = read_runs(folders)
    assert [run.name for run in runs] == ["a/run", "b/run"]
    html = page(runs)
    text = words_of(html)
    (sentence,) = comparison(["a", "b"], [facts_of(run.rows) for run in runs])
    assert sentence == (
        "b made its steps at 2.50 times the pace of a, on episodes 1 versions old against 0.500, and ended at a reward "
        "of 1 against 1; its trainer waited 10 % of the time for batches against 60 %."
    )
    assert "pace of steps, against the first 1x 2.50x" in text
    assert "time to a reward of 0.910 1 min 40 s 40 s" in text
    assert "model nano tiny" in text
    assert "trainer.steps 10 absent" in text
    assert {"dash0", "dash1"} <= set(re.findall(r'class="line (dash\d)', html))
