"""The arithmetic and the systems of `apps.bench.replay`, at small sizes."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from apps.bench import replay
from apps.bench.harness import replay_buffers, replay_http
from apps.bench.harness.result import Result, show
from apps.bench.peers import torchrl_replay

ROOT = Path(__file__).parents[2]


SMALL = replay_buffers.Work(items=128, tokens=32, many=8)


def replay_rows() -> list[dict[str, Any]]:
    ours, peer, copy = [0.1, 0.1, 1.0], [0.3, 0.2, 2.0], [0.01, 0.01, 0.1]
    times: replay.Times = {}
    for work in replay.REPEATS:
        times[work, replay.OURS] = ours
        if work != replay_buffers.PACKED:
            times |= {(work, name): peer for name in torchrl_replay.STORAGES}
            times[work, replay.COPY] = copy
    names = [replay.OURS, replay.COPY, *torchrl_replay.STORAGES]
    rows = replay.buffer_rows(times, names)
    rows.append({"part": "hand-over", "name": "64 episodes", "mb": 69.2, "over_memcpy": 1.4})
    actor = {"part": "actor", "x Atropos": 120.0, "limit x Atropos": 200.0}
    rows += [actor | {"name": name} for name in ("add", "add, 8", "sample")]
    return rows


def test_what_a_buffer_takes_is_compared_inside_each_round() -> None:
    add, *_ = replay_rows()
    assert add["ours, ms"] == 100
    assert add["x LazyTensorStorage"] == 2  # not 2 / 1 of the slow round alone, nor 3
    packed = next(row for row in replay_rows() if row["name"] == replay_buffers.PACKED)
    assert packed["x ListStorage"] == 2  # against a plain sample: TorchRL has no other


def test_the_replay_bench_has_its_tables_its_goals_and_the_json_line() -> None:
    rows = replay_rows()
    out = io.StringIO()
    result = Result("replay", rows, replay.make_goals(rows), {"trainer's rank": 1 << 20})
    tables = replay.tables(rows, [replay.OURS, *torchrl_replay.STORAGES])
    show(result, *tables, console=Console(file=out, width=150))
    found = json.loads(out.getvalue().splitlines()[-1])
    assert [goal["met"] for goal in found["goals"]] == [True] * 6
    assert found["goals"][-1]["name"] == "actor, sample 64: x Atropos (its messages, empty: 200)"
    for row in rows:
        for key in [key for key in row if key.startswith("x Lazy")]:
            del row[key]
    assert [goal.met for goal in replay.make_goals(rows)] == [False, False, False, True, True, True]


def test_every_work_on_a_buffer_is_done_and_leaves_it_as_full_as_it_was() -> None:
    even, ragged = replay_buffers.Ours(SMALL), replay_buffers.Ours(SMALL, ragged=True)
    systems: dict[str, replay_buffers.System] = {replay.OURS: even, replay.RAGGED: ragged}
    systems[replay.COPY] = replay_buffers.Memcpy(SMALL)
    times = replay.measure_buffers(systems, 2)
    assert {work for work, name in times if name == replay.OURS} == set(replay.REPEATS)
    assert {work for work, name in times if name == replay.COPY} == set(replay.REPEATS)
    assert min(map(min, times.values())) > 0
    for ours in (even, ragged):
        assert ours._buffer.num_queued == SMALL.items // SMALL.group_size


def test_a_buffer_behind_http_gives_back_what_it_was_sent() -> None:
    groups = replay_buffers.make_groups(SMALL, 8)
    with contextlib.closing(replay_http.HttpBuffer(SMALL)) as peer:
        assert peer.add(groups) > 0
        assert peer.sample() > 0
        assert peer.add(groups[:1]) > 0
        (got,) = peer._ask("GET", "/batch/1", None)
        assert got["tokens"] == groups[0]["tokens"].tolist()


def test_a_missing_torchrl_says_how_to_make_its_environment(tmp_path: Path) -> None:
    assert replay_buffers.find_python(tmp_path, "torchrl", None, replay.TORCHRL_SETUP) is None
    with pytest.raises(SystemExit, match=r"does not exist.*pip install -r apps/bench/peers/torchrl\.txt"):
        replay_buffers.find_python(tmp_path, "torchrl", str(tmp_path / "python"), replay.TORCHRL_SETUP)
    for peer in ("torchrl", "atropos"):
        assert (ROOT / f"apps/bench/peers/{peer}.txt").is_file()


def test_a_buffer_that_is_too_small_ends_with_2_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--items", "64"])
    with pytest.raises(SystemExit) as exit_info:
        replay.main()
    assert exit_info.value.code == 2
    assert "--items >= 512" in capsys.readouterr().err
