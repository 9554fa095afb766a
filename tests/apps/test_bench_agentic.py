"""Laws of apps/bench/agentic.py: the loops lose nothing to the simulation, and what rows and goals make of runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.bench import agentic
from apps.bench.harness import agentic_clock, agentic_real, agentic_run
from apps.bench.harness.agentic_cases import cases_of
from apps.bench.harness.agentic_rows import goals_of, rows_of
from apps.bench.harness.agentic_scene import BOUND_OF, NAIVE, PROFILES, SYNC, Case, SlowReversals, Waits
from apps.bench.harness.result import Result, machine
from apps.worlds.config import WorldsConfig, plan_run
from forge import config

SMALL = Case("heavy", "1", "bound 2", seed=3, steps=7, warm_up=2, decode_s=0.1)


def figures(steps_per_s: float, ceiling: float, stale: float = 0.0, **more: float) -> dict[str, float]:
    names = ("tokens_per_s", "generator_busy", "trainer_busy", "staleness_mean", "wasted_share", "cpu_share")
    zeros = dict.fromkeys((*names, "turn_cpu_s", "lag_mean_s", "lag_longest_s"), 0.0)
    pace = {"steps_per_s": steps_per_s, "ceiling_steps_per_s": ceiling}
    pace |= {"generated_per_s": 8 * steps_per_s, "ceiling_generated_per_s": 8 * ceiling}
    return {**zeros, **pace, "staleness_max": stale, **more}


@pytest.mark.parametrize("arm", ["bound 2", NAIVE])
def test_in_virtual_time_the_loops_reach_the_simulated_pace_within_their_bound(arm: str) -> None:
    case = replace(SMALL, arm=arm)
    found = agentic_run.measure(case, virtual=True)
    assert found["steps_per_s"] == pytest.approx(found["ceiling_steps_per_s"], rel=0.02)
    assert 0 < found["staleness_max"] <= case.bound
    assert found["wasted_share"] == 0
    assert 0 < found["generator_busy"] < 1
    assert 0 < found["trainer_busy"] < 1


def test_waits_take_real_time_by_the_real_clock() -> None:
    found = agentic_run.measure(Case("none", "1", SYNC, seed=0, steps=4, warm_up=1, decode_s=0.02))
    assert found["steps_per_s"] <= found["ceiling_steps_per_s"] * 1.001
    assert found["staleness_max"] == 0


def test_in_virtual_time_sleepers_wake_in_order_and_nobody_waits() -> None:
    woken: list[float] = []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append(asyncio.get_running_loop().time())

    async def all_of_them() -> None:
        await asyncio.gather(*map(sleeper, (3600.0, 60.0, 7200.0)), asyncio.to_thread(len, ""))

    agentic_clock.run(all_of_them(), virtual=True)
    assert woken == pytest.approx([60.0, 3600.0, 7200.0])


def test_waiting_for_nothing_in_virtual_time_is_an_error() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        agentic_clock.run(forever(), virtual=True)


def test_every_arm_has_the_same_latencies_and_every_episode_its_own() -> None:
    waits, again = (Waits(replace(SMALL, arm=arm).scene(), 3) for arm in (SYNC, "bound 4"))
    first = [waits.episode(group) for group in (0, 0, 1)]
    assert [again.episode(group) for group in (1, 0, 0)] == [first[2], first[0], first[1]]
    assert len({str(episode) for episode in first}) == 3


def test_the_profiles_have_the_median_of_one_policy_turn_and_the_tails_that_they_name() -> None:
    import random

    rng = random.Random(0)
    drawn = {name: sorted(profile(rng) for _ in range(20_000)) for name, profile in PROFILES.items()}
    for name in ("uniform", "heavy", "slow"):
        assert drawn[name][10_000] == pytest.approx(1.0, abs=0.05)
    assert drawn["heavy"][19_000] == pytest.approx(10.0, rel=0.1)
    assert sum(value > 1 for value in drawn["slow"]) == pytest.approx(1000, rel=0.1)
    assert set(drawn["none"]) == {0.0}


def test_the_world_of_tiny_waits_the_same_in_every_run_and_rewards_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.environments.base import Action

    slept: list[float] = []

    async def noted(seconds: float) -> None:
        slept.append(seconds)

    async def play() -> float:
        world = SlowReversals("heavy", 0.5, seed=1)
        await world.reset({"id": "7", "questions": ["12"], "answers": ["21"]})
        return (await world.step(Action("21"))).reward

    monkeypatch.setattr(asyncio, "sleep", noted)
    for _ in range(2):
        monkeypatch.setattr(SlowReversals, "_begun", type(SlowReversals._begun)())
        assert asyncio.run(play()) == 1.0
    assert slept[0] == slept[1] > 0


def made_up(**stale: float) -> list[tuple[Case, Mapping[str, float]]]:
    found: list[tuple[Case, Mapping[str, float]]] = []
    for case in cases_of(["waits", "scaling"], ["1", "20", "20-50"], list(PROFILES), list(BOUND_OF), seeds=2):
        if case.places != Case.places:
            found.append((case, figures(1.0 * case.replicas, 1.0 * case.replicas, 4)))
            continue
        speed = 1.0 if case.arm in (SYNC, NAIVE) else 1.0 + 0.5 * case.bound
        base = 2.0 if case.seed else 1.0  # a seed with short latencies
        found.append((case, figures(base * speed, base * speed / 0.95, stale.get(case.arm, case.bound))))
    return found


def test_ratios_are_taken_within_a_seed_and_shares_are_of_the_ratio() -> None:
    rows = rows_of(made_up())
    row = next(r for r in rows if (r["horizon"], r["profile"], r["arm"]) == ("20", "heavy", "bound 4"))
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == pytest.approx((3.0, 3.0, 3.0))
    assert (row["ceiling"], row["share"], row["pace"]) == pytest.approx((3.0, 1.0, 0.95))
    assert (row["steps_per_s"], row["seeds"], row["staleness_max"]) == (4.5, 2, 4)
    assert [r["ratio"] for r in rows if r["set"] == "scaling"] == [1, 2, 4, 8]


def test_goals_are_met_or_missed_by_the_rows_and_missing_rows_miss_them() -> None:
    goals = goals_of(rows_of(made_up()), ["waits", "scaling"])
    assert [goal.met for goal in goals] == [True] * 6
    assert any("staleness mean" in goal.name and "max 4" in goal.name for goal in goals)
    stale = {"bound 2": 3.0}
    assert [goal.value for goal in goals_of(rows_of(made_up(**stale)), ["waits"]) if "above" in goal.name] == [1.0]
    assert not any(goal.met for goal in goals_of([], ["waits", "scaling"]))
    few = [(case, one) for case, one in made_up() if case.arm != SYNC]
    assert [goal.met for goal in goals_of(rows_of(few), ["waits"])] == [False, False, True, False, True]


def test_a_result_is_one_line_of_json_and_tables_name_the_waits() -> None:
    rows = rows_of(made_up())
    line = Result("agentic", rows, goals_of(rows, ["waits"]), {}, machine()).line()
    found: dict[str, Any] = json.loads(line)
    assert found["bench"] == "agentic"
    assert len(found["rows"]) == len(rows)
    assert all("waits stand for compute" in str(table.title) for table in agentic.tables(rows))


def test_a_case_that_is_done_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "waits").mkdir()
    (tmp_path / "waits" / f"{SMALL.name}.json").write_text('{"steps_per_s": 2.0}')
    assert agentic.measured(SMALL, tmp_path, virtual=False) == (SMALL, {"steps_per_s": 2.0})


def metrics(seconds_a_step: float, rewards: list[float], stale: float = 0.0) -> list[dict[str, Any]]:
    fixed = {"tokens/trained": 40, "tokens/generated": 50, "tokens/wasted": 5, "time/step_s": seconds_a_step / 4}
    fixed |= {"staleness/mean": stale / 2, "staleness/max": stale}
    return [{**fixed, "reward/mean": reward, "time_s": seconds_a_step * n} for n, reward in enumerate(rewards, 1)]


def test_real_runs_are_compared_by_seed_in_pace_and_in_their_last_rewards() -> None:
    sync = [metrics(2.0, [0.0] * 10 + [0.5] * 10), metrics(4.0, [0.0] * 10 + [0.7] * 10)]
    ahead = [metrics(1.0, [0.0] * 10 + [0.52] * 10, 2), metrics(2.0, [0.0] * 10 + [0.66] * 10, 2)]
    rows = [agentic_real.row_of("none", SYNC, sync, sync), agentic_real.row_of("none", "bound 2", ahead, sync)]
    row = rows[1]
    assert (row["ratio"], row["ratio_low"]) == pytest.approx((2.0, 2.0))
    assert (row["steps_per_s"], row["tokens_per_s"], row["trainer_busy"]) == pytest.approx((0.75, 30.0, 0.25))
    assert (row["staleness_mean"], row["staleness_max"], row["wasted_share"]) == pytest.approx((1.0, 2.0, 0.1))
    assert row["reward_difference"] == pytest.approx(-0.01)
    assert [goal.met for goal in agentic_real.goals_of(rows)] == [True, True]
    worse = agentic_real.row_of("none", "bound 2", [metrics(2.1, [0.4] * 20)] * 2, sync)
    assert [goal.met for goal in agentic_real.goals_of([rows[0], worse])] == [False, True]
    assert [goal.met for goal in agentic_real.goals_of([])] == [False, False]


def test_real_arms_are_options_of_the_app_and_naive_batching_is_none() -> None:
    arms = agentic_real.arms_of(["heavy"], [SYNC, "bound 4", NAIVE])
    assert list(arms) == ["heavy sync", "heavy bound 4"]
    cfg = config.parse(
        WorldsConfig, list(arms["heavy bound 4"]), default_config=Path("apps/worlds/tiny.yaml"), prog="", description=""
    )
    plan_run(cfg, None)
    assert cfg.replay.max_staleness == 4
    assert cfg.environment.kwargs == {"profile": "heavy", "unit_s": agentic_real.UNIT_S}
