"""The arithmetic, the tables and the JSON line of the benches; no bench runs here."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from apps.bench import channel, generator, grpo, staleness, weightsync
from apps.bench.harness import (
    llamas,
    pacing,
    processes,
    rates,
    sync_bytes,
    sync_pause,
    sync_training,
)
from apps.bench.harness.engines import GROUP_SIZE, GROUPS_PER_LOOP, make_turn
from apps.bench.harness.result import Column, Goal, Result, machine, rows_table, show
from apps.bench.harness.sync_actors import Span, client_of
from apps.bench.harness.token_gaps import Trace, gaps_of, measure
from apps.bench.harness.training import OURS, TRL, Measured, figures_of_rows, figures_of_trl, ours_name
from apps.bench.peers import trl_grpo, vllm_bare
from apps.grpo import tasks
from forge.batch import check_batch
from forge.metrics import METRIC_KEYS, Row
from forge.processes import RUN_ID_ENV

ROOT = Path(__file__).parents[2]
SHOWN = {"bench", "machine", "rows", "peak_rss_bytes", "goals"}


def printed(result: Result, *tables: Any, notes: tuple[str, ...] = ()) -> list[str]:
    out = io.StringIO()
    show(result, *tables, notes=notes, console=Console(file=out, width=100))
    return out.getvalue().splitlines()


def a_result(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "bench": "example",
        "rows": [{"name": "ours", "ms": 1234.5}],
        "goals": [Goal("ms", 1234.5, 2000.0, "most")],
        "peaks": {"trainer": 3 << 20},
    }
    return Result(**(fields | changes))


# --- tables, goals, the JSON line


@pytest.mark.parametrize(
    ("value", "at", "met"),
    [
        (1.0, "least", True),
        (0.99, "least", False),
        (1.0, "most", True),
        (1.01, "most", False),
        (None, "least", False),
        (None, "most", False),
    ],
)
def test_a_goal_is_met_at_its_target_and_never_unmeasured(value: float | None, at: Any, met: bool) -> None:
    goal = Goal("x", value, 1.0, at)
    assert goal.plain() == {"name": "x", "value": value, "target": 1.0, "met": met}
    assert str(goal).endswith("NOT met") == (not met)


def test_the_last_line_is_one_json_object_and_all_above_it_is_for_people() -> None:
    lines = printed(a_result(extra={"settings": {"mb": 64}}), notes=("a note",))
    found = json.loads(lines[-1])
    assert found.keys() == SHOWN | {"settings"}
    assert found["goals"] == [{"name": "ms", "value": 1234.5, "target": 2000.0, "met": True}]
    assert found["peak_rss_bytes"] == {"trainer": 3 << 20}
    above = "\n".join(lines[:-1])
    for text in ("peak memory", "trainer", "ms: 1234.5 (at most 2000) met", "a note"):
        assert text in above


def test_a_goal_that_was_not_measured_is_null_and_not_met() -> None:
    lines = printed(a_result(goals=[Goal("x", None, 1.0, "least")]))
    assert json.loads(lines[-1])["goals"] == [{"name": "x", "value": None, "target": 1.0, "met": False}]
    assert "x: not measured (at least 1) NOT met" in lines


def test_a_figure_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        a_result(rows=[{"name": "ours", "ms": float("nan")}]).line()


def test_a_table_formats_numbers_and_marks_what_a_row_does_not_have() -> None:
    rows: list[dict[str, Any]] = [{"name": "a name", "ms": 1234.56}, {"name": "other", "ms": None}, {"name": "third"}]
    table = rows_table("title", rows, (Column("", "name"), Column("ms", "ms", ",.1f")))
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    cells = [[c.strip() for c in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert cells == [["a name", "1,234.6"], ["other", "-"], ["third", "-"]]


def test_the_machine_is_described_in_plain_values() -> None:
    found = json.loads(json.dumps(machine(ray=None, trl="1.0")))
    assert found["cpus"] >= 1
    assert found["memory_gib"] > 0
    assert (found["ray"], found["trl"]) == (None, "1.0")


# --- rates


def test_a_steady_state_leaves_the_warm_up_out() -> None:
    stamps = [100.0, 200.0, 300.0, 400.0, 500.0, 500.5, 501.0, 501.5]
    assert rates.steady(stamps, 64) == rates.Rates(steps_per_s=2.0, samples_per_s=128.0)


def test_samples_per_second_see_the_long_steps_that_a_median_hides() -> None:
    steps = [0.1, 0.1, 1.0] * 4
    stamps = [sum(steps[:n]) for n in range(1, len(steps) + 1)]
    found = rates.steady(stamps, 10, warm_up=3)
    assert found.steps_per_s == pytest.approx(10.0)
    assert found.samples_per_s == pytest.approx(10 * 9 / 3.6)


@pytest.mark.parametrize(("num_steps", "warm_up"), [(5, 5), (0, 1), (5, 0)])
def test_too_few_steps_are_an_error_that_says_how_many_it_takes(num_steps: int, warm_up: int) -> None:
    with pytest.raises(ValueError, match=f"run at least {max(warm_up, 1) + 1}"):
        rates.steady([float(n) for n in range(num_steps)], 64, warm_up)


def test_first_and_last_are_means_that_may_overlap() -> None:
    assert rates.first_and_last([0, 0, 0, 0, 0, 9, 1, 1, 1, 1, 1]) == (0, 1)
    assert rates.first_and_last([1.0, 2.0, 3.0]) == (2.0, 2.0)


def test_a_slow_round_does_not_move_the_ratio() -> None:
    assert rates.ratio([20.0, 1.0, 20.0], [10.0, 0.5, 10.0]) == 2.0


def test_everyone_goes_first_once() -> None:
    names = ["a", "b", "c"]
    orders = [rates.turns(names, n) for n in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert rates.turns(names, 3) == orders[0]


# --- training runs


def a_row(step: int) -> Row:
    """A run whose steps take half a second, a fifth of it waiting."""
    values: Row = dict.fromkeys(METRIC_KEYS, 0.0)
    values |= {
        "step": step,
        "time_s": 10 + step / 2,
        "time/wait_batch_s": 0.1,
        "time/step_s": 0.3,
        "time/publish_stall_s": 0.004,
        "generator/pause_s": 0.001 if step % 2 else None,
        "reward/mean": step / 10,
        "tokens/trained": 448,
        "episodes/trained": 64,
        "staleness/mean": 1.0,
    }
    return values


def test_the_figures_of_a_run_come_from_its_rows() -> None:
    found = figures_of_rows([a_row(step) for step in range(1, 13)], 64)
    assert found == pytest.approx(
        {
            "steps_per_s": 2.0,
            "samples_per_s": 128.0,
            "tokens_per_episode": 7.0,
            "reward_first": 0.3,
            "reward_last": 1.0,
            "trainer_idle_share": 0.2,
            "step_ms": 300.0,
            "publish_ms": 4.0,
            "pause_ms": 1.0,
            "staleness_mean": 1.0,
        }
    )


def trl_steps(samples_per_s: float, steps: int = 10) -> dict[str, Any]:
    return {
        "stamps": [64 / samples_per_s * n for n in range(1, steps + 1)],
        "rewards": [0.5] * steps,
        "tokens_per_episode": [7.0] * steps,
    }


def test_rows_hold_medians_and_the_ratio_inside_the_rounds() -> None:
    measured = Measured()
    for slow, rate in ((1, 300.0), (10, 300.0), (1, 330.0)):
        ours = figures_of_trl(trl_steps(rate / slow), 64)
        measured.add(ours_name(1), ours, {"trainer_0": slow, "controller": 5})
        measured.add(TRL, figures_of_trl(trl_steps(150.0 / slow), 64), {"TRL": 7})
    row, trl = measured.rows()
    assert (row["name"], row["over_trl"]) == (f"{OURS}, max_staleness 1", 2.0)
    assert row["samples_per_s"] == pytest.approx(300.0)
    assert row["samples_per_s_by_round"] == [300.0, 30.0, 330.0]
    assert trl["over_trl"] == 1.0
    assert measured.peaks == {"trainer_0, max_staleness 1": 10, "controller, max_staleness 1": 5, TRL: 7}
    (goal,) = grpo.goals(measured, 1)
    assert (goal.value, goal.met) == (2.0, True)


def test_without_trl_there_is_no_ratio_and_the_goal_is_not_met() -> None:
    measured = Measured()
    measured.add(ours_name(0), figures_of_trl(trl_steps(100.0), 64), {})
    assert measured.rows()[0]["over_trl"] is None
    (goal,) = grpo.goals(measured, 0)
    assert goal.plain()["value"] is None
    assert not goal.met


# --- the work of the peers is our work


@given(st.text("0123456789x", max_size=9), st.text("0123456789", min_size=6, max_size=6))
def test_the_peers_reward_is_ours(text: str, answer: str) -> None:
    assert trl_grpo.score([text], [answer]) == [tasks.digits_reward(text, answer)]


def test_the_peer_gets_the_preset(tmp_path: Path) -> None:
    cfg = grpo.config.parse(grpo.AppConfig, [], default_config=grpo.PRESET, prog="test", description="")
    work = grpo.Work(cfg, "model", tmp_path / "prompts.jsonl", 7)
    settings = work.trl_settings(2, 3, tmp_path, tmp_path / "out")
    settings.write(tmp_path / "settings.json")
    assert trl_grpo.Settings(**json.loads((tmp_path / "settings.json").read_text())) == settings
    found = trl_grpo.trainer_arguments(settings)
    expected = {
        "max_steps": 7,
        "seed": 3,
        "num_generations": cfg.grpo.group_size,
        "per_device_train_batch_size": cfg.grpo.batch_size,
        "max_completion_length": cfg.generator.max_new_tokens,
        "temperature": cfg.generator.temperature,
        "learning_rate": cfg.trainer.lr,
    }
    assert {key: found[key] for key in expected} == expected
    assert found["model_init_kwargs"] == {"dtype": "float32"}


def keywords_of(path: str, function: str) -> dict[str, ast.expr]:
    """The keyword arguments of the only call of `function` in a file."""
    calls = [
        node
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    ]
    (call,) = calls
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


@pytest.mark.parametrize(
    ("function", "not_in_bare"),
    [
        ("AsyncEngineArgs", {"worker_extension_cls", "weight_transfer_config", "max_logprobs", "enable_sleep_mode"}),
        ("SamplingParams", set[str]()),
    ],
)
def test_bare_vllm_gets_our_engines_arguments_less_the_receiver(function: str, not_in_bare: set[str]) -> None:
    ours = keywords_of("actors/vllm_engine.py", function)
    bare = keywords_of("apps/bench/peers/vllm_bare.py", function)
    assert bare.keys() == ours.keys() - not_in_bare
    constants = {name: value.value for name, value in ours.items() if isinstance(value, ast.Constant)}
    assert constants
    for name in constants.keys() - not_in_bare:
        assert ast.unparse(bare[name]) == repr(constants[name]), name


@pytest.mark.parametrize("max_tokens", sorted(GROUPS_PER_LOOP))
def test_a_turn_is_the_same_for_both_engines_and_another_one_in_the_next_round(max_tokens: int) -> None:
    prompts = [[1, 2], [3, 4]]
    turn = make_turn(prompts, 64, max_tokens, 1)
    assert turn == make_turn(prompts, 64, max_tokens, 1) != make_turn(prompts, 64, max_tokens, 2)
    assert len(turn.loops) * GROUP_SIZE == 64
    seeds = [seed for groups in turn.loops for _, group in groups for seed in group]
    assert len(set(seeds)) == len(seeds) == 64 * GROUPS_PER_LOOP[max_tokens]
    read = vllm_bare.Turn(**json.loads(turn.line()))
    assert [[tuple(group) for group in groups] for groups in read.loops] == turn.loops


def test_the_generators_goal_is_a_ratio_for_each_length() -> None:
    measured = generator.Measured()
    for rate in (100.0, 10.0, 120.0):
        for length, share in ((8, 0.9), (64, 0.97)):
            measured.add(generator.BARE, length, rate)
            measured.add(generator.ACTOR, length, rate * share)
    assert [(goal.value, goal.met) for goal in measured.goals()] == [(0.9, False), (0.97, True)]
    assert [row["tokens_per_s"] for row in measured.rows()] == [100.0, 90.0, 100.0, 97.0]


def test_the_channels_goals_are_ratios_inside_the_rounds() -> None:
    names = (channel.MEMCPY, channel.MAPPED, channel.RESIDENT)
    times = dict(zip(names, ([10.0, 100.0], [14.0, 140.0], [2.0, 2.5]), strict=True))
    result = channel.make_result(times, 1 << 20, {"sender": 1}, None)
    assert [(goal.name, goal.value, goal.met) for goal in result.goals] == [
        ("mapped_over_memcpy", 1.4, True),
        ("resident_ms", 2.25, True),
    ]
    assert json.loads(printed(result)[-1]).keys() >= SHOWN


# --- weight sync


@pytest.mark.parametrize("mb", [llamas.MIN_MB, 12, 270, 1000])
def test_a_llama_has_the_size_that_was_asked_for(mb: int) -> None:
    shape = llamas.shape_of(mb)
    assert shape.nbytes == pytest.approx(mb * 1e6, rel=0.05)
    assert shape.heads == 3 * shape.kv_heads
    assert shape.hidden == shape.heads * llamas.HEAD_DIM
    with pytest.raises(ValueError, match="too small"):
        llamas.shape_of(llamas.MIN_MB / 2)


def test_a_llama_on_disk_has_as_many_parameters_as_its_shape_says(tmp_path: Path) -> None:
    from safetensors import safe_open

    shape = llamas.Shape(96, 16)
    llamas.write(shape, tmp_path, 64)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sum(file.get_tensor(name).numel() for name in file.keys()) == shape.num_parameters  # noqa: SIM118


def a_trace(*times: float, stage: tuple[float, float], flip: tuple[float, float]) -> Trace:
    """Two clients that get a token at each of `times`."""
    return Trace([(time, ["a", "b"]) for time in times], stage, flip)


def test_the_gap_around_a_flip_is_told_from_those_of_the_staging() -> None:
    trace = a_trace(0, 1, 2, 3, 8, 10, 13, 14, 20, stage=(3.5, 10.5), flip=(11, 11.5))
    found = measure(trace)
    assert (found.step, found.before) == (1, 1)
    assert (found.flip, found.update) == (3, 5)
    assert found.staging == 2  # from 8 to 10: the one that began before the staging is not its own


def test_a_client_that_waits_for_its_next_request_is_in_a_gap_too() -> None:
    steps = [(0.0, ["a", "b"]), (1.0, ["a", "b"]), (2.0, ["a", "b"]), (3.0, ["a"]), (9.0, ["a", "b"])]
    assert sorted(gaps_of(steps)) == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 9), (3, 9)]
    assert measure(Trace(steps, (2.1, 2.2), (3.5, 3.6))).flip == 7


def test_tokens_before_all_clients_have_begun_count_for_nothing() -> None:
    steps = [(0.0, ["a"]), (50.0, ["a"]), (51.0, ["a", "b"]), (52.0, ["a", "b"]), (60.0, ["a", "b"])]
    assert measure(Trace(steps, (53.0, 54.0), (55.0, 56.0))).before == 1


@pytest.mark.parametrize(
    ("times", "message"), [((), "0 gaps"), ((0.0, 5.0), "before the update"), ((0.0, 1.0, 2.0), "after the flip")]
)
def test_a_trace_that_says_too_little_is_an_error(times: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(a_trace(*times, stage=(3.0, 4.0), flip=(5.0, 6.0)))


def test_a_request_belongs_to_its_client() -> None:
    assert client_of("client3:12/0.7-8f3a") == "client3"


def test_requests_outlast_an_update_and_end_one_by_one_where_it_drains_them() -> None:
    pace = sync_pause.Pace(step_s=0.01, update_s=0.5)
    assert set(pace.lengths(sync_pause.KEEP)) == {172}
    drained = pace.lengths(sync_pause.DRAIN)
    assert drained == sorted(set(drained))
    assert drained[0] == 74
    assert max(sync_pause.Pace(0.001, 100.0).lengths(sync_pause.KEEP)) < 512


def test_a_transfer_begins_when_both_sides_know_of_it() -> None:
    assert sync_bytes.since_both(Span(1.0, 5.0, 0.0), Span(2.0, 9.0, 0.0)) == 3.0


def rounds_of(stall: float, transfer: float, read: float) -> sync_bytes.Rounds:
    """One round of 1 s, and one in which the whole machine was ten times slower."""
    measured = sync_bytes.Rounds()
    for slow in (1.0, 10.0):
        measured.stall.append(stall * slow)
        measured.transfer.append(transfer * slow)
        measured.read.append(read * slow)
        for values in (measured.sums, measured.check, measured.trainer_cpu, measured.receiver_cpu):
            values.append(slow)
        for name, seconds in ((sync_bytes.MEMCPY, 0.5), (sync_bytes.SHARED, 1.0), (sync_bytes.GLOO, 2.0)):
            measured.bare[name].append(seconds * slow)
    return measured


def bytes_rows() -> list[dict[str, Any]]:
    more = {"trainer": 2 * 10**9, "receiver": 10**9}
    times = {"memory": (0.7, 0.05, 0.5), "collective": (0.6, 2.5, 0.5)}
    return [
        rounds_of(*times[name]).row(1000, name, sync_bytes.COSTS[name], 10**9, more)
        for name in ("memory", "collective")
    ]


def test_the_goals_of_the_bytes_are_ratios_inside_the_rounds() -> None:
    rows = bytes_rows()
    memory, collective = rows
    assert (memory["transfer_gb_s"], memory["over_gloo"]) == (None, None)  # nothing moves
    assert memory["over_shared"] == 0.8
    assert (collective["over_gloo"], collective["stall_over_memcpy"]) == (0.8, 1.2)
    assert (memory["trainer_measured"], memory["receiver_measured"]) == (2.0, 1.0)
    goals = weightsync.bytes_goals(rows)
    assert [(goal.value, goal.met) for goal in goals] == [(1.4, True), (0.8, True), (0.8, False)]


def pause_row(mb: int, pause_ms: float, modules: int) -> dict[str, Any]:
    gaps = {"gap_steps": 1.5, "gap_steps_max": 2.5}
    return {
        "part": "pause",
        "mb": mb,
        "name": "keep",
        "how": "",
        "pause_ms": pause_ms,
        "modules": modules,
        "updates": 1,
        **gaps,
    }


def test_a_flip_is_compared_for_each_module_between_the_smallest_and_the_largest_model() -> None:
    goals = weightsync.pause_goals([pause_row(12, 1.0, 100), pause_row(270, 4.0, 200), pause_row(1000, 6.0, 200)])
    assert [(goal.value, goal.met) for goal in goals[:2]] == [(4.0, True), (3.0, False)]
    assert [goal.met for goal in goals[2:]] == [True, False] * 3


def test_what_one_size_cannot_tell_is_not_met() -> None:
    goals = weightsync.pause_goals([pause_row(12, 1.0, 100)])
    assert [goal.plain()["value"] for goal in goals[:2]] == [None, None]
    result = weightsync.make_result([], {}, weightsync.Options(parts=("pause",)))
    assert [goal.met for goal in result.goals] == [False, False]


def test_every_part_has_its_tables_and_the_json_line() -> None:
    rows = [*bytes_rows(), pause_row(270, 3.0, 339)]
    rows.append({"part": "training", "mb": 12, "name": "generator idle", "over_none": 0.98})
    rows.append({"part": "stop", "mb": 12, "name": "stopped for 10 s", "during_over_before": 1.01, "skipped": 8})
    rows[-1] |= {"newest": 20, "applied": 20, "processes": 1, "stopped": 1}
    rows.append({"part": "adapters", "mb": 270, "name": "q, v, idle", "transfer_ms": 0.9, "applied_ms": 6.0})
    result = weightsync.make_result(rows, {"trainer_0, 12 MB": 1}, weightsync.Options())
    lines = printed(result, *weightsync.tables(rows), notes=tuple(weightsync.notes(rows)))
    found = json.loads(lines[-1])
    assert found.keys() == SHOWN | {"settings"}
    met = {goal["name"]: goal["met"] for goal in found["goals"]}
    assert met["12 MB: versions skipped, the newest applied after it"]
    assert met["12 MB: steps/s with a sync, generator idle"]
    assert [met[f"adapter on q, v, idle: {what}, ms"] for what in ("transfer", "applied")] == [True, False]
    assert "modules that a flip visits: 339 at 270 MB" in lines


def test_large_models_are_not_trained_and_one_size_is_enough_for_what_does_not_depend_on_it() -> None:
    options = weightsync.Options()
    assert options.parts_of(12) == ["bytes", "pause", "training", "stop"]
    assert options.parts_of(270) == ["bytes", "pause", "training", "adapters"]
    assert options.parts_of(1000) == ["bytes", "pause"]
    assert weightsync.Options(sizes=(1000,)).parts_of(1000) == list(weightsync.PARTS)


@pytest.mark.parametrize("mb", [12, 270])
def test_recorded_batches_are_batches(mb: int) -> None:
    for batch in sync_training.recorded_batches(mb):
        check_batch(batch)


# --- programs


def test_memory_is_counted_for_the_mesh_that_a_process_belongs_to() -> None:
    child = "import os, sys; print(1, flush=True); sys.stdin.read()"
    parent = (
        "import os, subprocess, sys\n"
        f"env = {{**os.environ, {RUN_ID_ENV!r}: 'run/trainer_0'}}\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], env=env)"
    )
    env = {key: value for key, value in os.environ.items() if key != RUN_ID_ENV}
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        peaks = processes.peaks_by_role(process.pid, "controller")
        renamed = processes.peaks_by_role(process.pid, "controller", {process.pid: "other"})
        process.stdin.close()
    assert peaks.keys() == {"controller", "trainer_0"}
    assert min(peaks.values()) > 1 << 20
    assert renamed.keys() == {"other", "trainer_0"}


def run_python(code: str, log: Path, deadline_s: float = 30) -> processes.Finished:
    return processes.run(
        [sys.executable, "-c", code], role="program", cwd=ROOT, env={"X": "42"}, deadline_s=deadline_s, log=log
    )


def test_a_program_is_run_to_its_end_with_its_memory(tmp_path: Path) -> None:
    done = run_python("import os, time; print(os.environ['X'], flush=True); time.sleep(0.3)", tmp_path / "log")
    assert done.output == "42\n"
    assert done.peaks["program"] > 0


def test_a_program_that_fails_shows_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)exit code 3:.*what went wrong"):
        run_python("import sys; print('what went wrong'); sys.exit(3)", tmp_path / "log")


def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with pytest.raises(TimeoutError, match=r"did not end within 0\.5 s"):
        run_python(code, tmp_path / "log", deadline_s=0.5)
    pid = (tmp_path / "log").read_text().split()[0]
    assert not Path(f"/proc/{pid}").exists()


# --- staleness.py: runs in virtual time

PLANT = pacing.Plant(workers=6, steps=30, warm_up=5, groups_per_step=4, mean_latency_s=1.0)


def simulated(name: str, bound: int, latencies: list[float]) -> pacing.Simulation:
    return pacing.Simulation(PLANT, pacing.QUEUES[name](bound, PLANT.groups_per_step), latencies).run()


@pytest.mark.parametrize("shape", pacing.LATENCIES)
def test_latencies_have_their_mean_and_a_longest(shape: str) -> None:
    drawn = pacing.draw_latencies(shape, 4000, mean_s=2.0)
    assert sum(drawn) / len(drawn) == pytest.approx(2.0, rel=0.02)
    assert 0 < min(drawn) <= max(drawn) <= pacing.LONGEST * 2.0
    assert drawn == pacing.draw_latencies(shape, 4000, mean_s=2.0)


def test_in_virtual_time_a_synchronous_run_takes_generation_then_step_then_sync() -> None:
    run = simulated(pacing.STRICT, 0, [0.5])
    assert run.now == pytest.approx(PLANT.steps * (0.5 + PLANT.step_s + PLANT.sync_s) - PLANT.sync_s)
    found = pacing.figures(run)
    assert found["busy_share"] == pytest.approx(1 / 1.75)
    assert (found["staleness_max"], found["wasted_share"], found["discard_bias"]) == (0, 0, None)


def test_dropping_what_is_stale_drops_what_is_slow_and_pacing_drops_nothing() -> None:
    latencies = [0.5, 0.5, 0.5, 6.0] * 50
    dropping = pacing.figures(simulated(pacing.DROP, 1, latencies))
    assert dropping["staleness_max"] <= 1
    assert dropping["slow_drops"] > 0.9
    assert dropping["slow_share"] < 0.3
    for name in (pacing.STRICT, *pacing.WINDOWED.values()):
        paced = pacing.figures(simulated(name, 1, latencies))
        assert (paced["staleness_max"], paced["wasted_share"], paced["slow_drops"]) == (1, 0, 0)
    assert pacing.figures(simulated(pacing.UNBOUNDED, 0, latencies))["staleness_max"] > 1


def test_a_queue_that_never_gives_a_batch_is_a_deadlock_and_no_hang() -> None:
    class Closed(pacing.Open):
        def batch(self, policy_version: int) -> list[int] | None:
            return None

        def reserve(self) -> None:
            return None

    with pytest.raises(RuntimeError, match="deadlock at version 0"):
        pacing.Simulation(PLANT, Closed(4, None), [1.0]).run()


def test_a_window_trains_earlier_what_is_complete_in_time() -> None:
    for window, name in pacing.WINDOWED.items():
        found = pacing.figures(simulated(name, 4, [0.6]))
        assert found["staleness_mean"] == 4 * (1 - window)


@pytest.fixture(scope="module")
def rows_of_a_short_run() -> list[dict[str, Any]]:
    return staleness.measure(PLANT, [2, 4], seed=0)


def staleness_goals(rows: list[dict[str, Any]]) -> dict[str, Goal]:
    return {goal.name: goal for goal in staleness.goals_of(rows)}


def test_the_staleness_bench_has_a_row_for_every_queue(rows_of_a_short_run: list[dict[str, Any]]) -> None:
    rows = rows_of_a_short_run
    assert len(rows) == len(pacing.LATENCIES) * (2 * (len(pacing.QUEUES) - 1) + 1)
    result = staleness.make_result(rows, {"steps": PLANT.steps})
    found = json.loads(printed(result, *staleness.tables(rows, [PLANT]))[-1])
    goals = {goal["name"]: goal for goal in found["goals"]}
    assert goals["windowed: versions above the bound"]["met"]
    assert goals["windowed: share wasted"]["met"]
    assert goals["w 0.5, bound 4, 6 groups at once, moderate tails: over unbounded, steps/s"]["value"] <= 1.1


HALF, WHERE = pacing.WINDOWED[0.5], "w 0.5, bound 4, 6 groups at once"
WORSE: dict[str, tuple[str, int, str, dict[str, float], float | None]] = {
    "windowed: versions above the bound": (HALF, 2, "uniform", {"staleness_max": 3}, 1),
    "windowed: share wasted": (HALF, 2, "uniform", {"wasted_share": 0.5}, 0.5),
    "windowed: slow groups trained over started": (HALF, 2, "uniform", {"slow_share": 0.5}, 0.5),
    f"{WHERE}, moderate tails: over unbounded, steps/s": (HALF, 4, "uniform", {"over_unbounded": 0.1}, 0.1),
    f"{WHERE}, moderate tails: over strict FIFO, mean staleness": (
        *(pacing.STRICT, 4, "uniform", {"staleness_mean": 0.0001}),
        None,
    ),
    f"{WHERE}: over strict FIFO at bound 2, steps/s": (HALF, 4, "pareto 1.2", {"steps_per_s": 0.0}, 0),
}


@pytest.mark.parametrize("name", WORSE)
def test_a_goal_of_the_staleness_bench_is_that_of_the_worst_row(
    rows_of_a_short_run: list[dict[str, Any]], name: str
) -> None:
    queue, bound, shape, change, value = WORSE[name]
    key = {"name": queue, "bound": bound, "latency": shape}
    rows = [row | change if key.items() <= row.items() else row for row in rows_of_a_short_run]
    assert rows != rows_of_a_short_run
    goal = staleness_goals(rows)[name]
    assert not goal.met
    assert value is None or goal.value == value


def test_the_best_window_counts_and_the_worst_case(rows_of_a_short_run: list[dict[str, Any]]) -> None:
    def best(*slow: str) -> float | None:
        rows = [
            row | {"steps_per_s": row["steps_per_s"] / 10}
            if row["name"] in slow and row["latency"] == "uniform"
            else row
            for row in rows_of_a_short_run
        ]
        return staleness_goals(rows)["best window over strict FIFO, steps/s"].value

    *others, last = pacing.WINDOWED.values()
    assert best(last) == best() == 1
    assert (best(*others, last) or 0) == pytest.approx(0.1, abs=0.01)


def test_without_the_bounds_of_its_goals_the_staleness_bench_measures_none() -> None:
    goals = staleness_goals(staleness.measure(PLANT, [1], seed=0))
    assert [goal.value for name, goal in goals.items() if name.startswith("w 0.5")] == [None] * 3


# --- command lines


@pytest.mark.parametrize(
    ("bench", "arguments", "message"),
    [
        (grpo, ["--steps", "5"], "--steps > 5"),
        (grpo, ["--rounds", "0"], "--rounds must be >= 1"),
        (grpo, ["--trl-threads", "2"], "must contain 1"),
        (generator, ["--sequences", "12"], "multiple of 8"),
        (weightsync, ["--sizes", "2"], "--sizes must be >= 6"),
        (weightsync, ["--parts", "naps"], "invalid choice"),
        (staleness, ["--steps", "20"], "--steps must be > 20"),
        (staleness, ["--bounds", "1", "-1"], "--bounds >= 0"),
    ],
)
def test_wrong_arguments_end_with_2_before_anything_starts(
    bench: Any,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        bench.main()
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_trl_says_how_to_make_its_environment(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"does not exist.*pip install -r apps/bench/peers/trl\.txt"):
        grpo.find_trl(str(tmp_path / "python"))
    assert (ROOT / grpo.TRL_PINS).is_file()
