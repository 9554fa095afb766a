"""A proposer and a solver in the same episodes: who waits for whom, what is trained of it, and the app as a whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache, reduce
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from app_run import ROOT, AppRun
from transformers import AutoTokenizer

from actors.reward import Sample, Scores
from actors.vllm_engine import Completion
from apps.grpo.main import Run, rollout_loop, train_loop
from apps.grpo.models import resolve_model
from apps.grpo.tasks import reversed_digits
from apps.two_agents.config import POLICIES, TwoAgentsConfig, plan_run, policies
from apps.two_agents.digits import ILLEGAL, at_the_edge, to_task
from apps.two_agents.handover import Handover
from apps.two_agents.main import join
from apps.two_agents.meshes import side_by_side
from forge import channel, config
from forge.data import Prompt
from forge.errors import ConfigError, DeadlineExceeded
from forge.placement import MeshConfig, plan_placement
from replay.service import Replay
from replay.staleness import num_slots

APP = ROOT / "apps/two_agents/main.py"
PRESET = ROOT / "apps/two_agents/nano.yaml"
TASK = Prompt(0, 0, "rev:12=", [1, 2])
DEADLINE_S = 60.0


@cache
def preset() -> TwoAgentsConfig:
    return config.parse(TwoAgentsConfig, [], default_config=PRESET, prog="", description="")


def changed(values: Mapping[str, Any] | None = None) -> TwoAgentsConfig:
    """The preset with other values, by their dotted names. Parsed once, since that takes a second."""
    cfg = deepcopy(preset())
    for key, value in (values or {}).items():
        *path, name = key.split(".")
        setattr(reduce(getattr, path, cfg), name, value)
    return cfg


# --- rewards and tasks


@pytest.mark.parametrize(("answers", "worth"), [([1, 1, 0, 0], 1), ([1, 0.9, 0, 0], 0.5), ([1, 1], 0), ([0, 0], 0)])
def test_a_proposal_is_worth_most_where_every_second_answer_is_right(answers: list[float], worth: float) -> None:
    assert at_the_edge(Sample("", "12", answer=answers)) == worth


def test_what_is_no_task_is_worth_less_than_any_task() -> None:
    assert [text for text in ("", "12345", "12a", "123456789", "12 ") if to_task(text)] == ["12345"]
    assert at_the_edge(Sample("", "12a", answer=None)) == ILLEGAL < 0


# --- the handover


async def turns() -> None:
    """Lets everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def bound(main: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main()

    asyncio.run(run())


def test_a_proposal_and_a_slot_that_wait_meet_whoever_came_first() -> None:
    async def main() -> None:
        for first in ("proposal", "slot"):
            handover = Handover(patience_s=1000, timeout_s=DEADLINE_S)
            calls = [handover.solve(TASK), handover.take()]
            tasks = [asyncio.ensure_future(call) for call in (calls if first == "proposal" else reversed(calls))]
            await turns()
            taken = tasks[1 if first == "proposal" else 0].result()
            assert taken.prompt is TASK
            taken.tell([1.0])
            assert await tasks[0 if first == "proposal" else 1] == [1.0]

    bound(main)


@pytest.mark.parametrize("own", POLICIES)
def test_one_goes_on_alone_only_when_its_trainer_starves_and_the_other_has_nothing_under_way(own: str) -> None:
    async def main() -> None:
        handover = Handover(patience_s=0, timeout_s=DEADLINE_S)
        sides = {"proposer": handover.proposer, "solver": handover.solver}
        other = sides["solver" if own == "proposer" else "proposer"]
        call = asyncio.ensure_future(handover.solve(TASK) if own == "proposer" else handover.take())
        await turns()
        assert not call.done(), "its trainer has work"
        with handover.waiting(sides[own]):
            with handover.working(other):
                await asyncio.sleep(0.01)
                assert not call.done(), "what is under way may still bring it"
            assert await call is None
        assert not sides[own].hungry

    bound(main)


@pytest.mark.parametrize("own", POLICIES)
def test_nobody_waits_for_a_policy_that_is_trained_no_more(own: str) -> None:
    async def main() -> None:
        handover = Handover(patience_s=1000, timeout_s=DEADLINE_S)
        handover.end(handover.solver if own == "proposer" else handover.proposer)
        if own == "solver":
            assert await handover.take() is None
            return
        call = asyncio.ensure_future(handover.solve(TASK))
        await turns()
        handover.end(handover.solver)
        assert await call is None

    bound(main)


def test_a_proposal_survives_whoever_took_it() -> None:
    async def main() -> None:
        handover = Handover(patience_s=1000, timeout_s=DEADLINE_S)
        seat = asyncio.ensure_future(handover.take())
        await turns()
        call = asyncio.ensure_future(handover.solve(TASK))
        await asyncio.sleep(0)  # it is in the seat now, whose holder has not run since
        seat.cancel()
        assert await call is None
        with pytest.raises(asyncio.CancelledError):
            await seat

    bound(main)


@pytest.mark.parametrize("gone", POLICIES)
def test_nobody_is_matched_with_a_wait_that_was_cancelled(gone: str) -> None:
    async def main() -> None:
        handover = Handover(patience_s=1000, timeout_s=DEADLINE_S)
        calls = [lambda: handover.solve(TASK), handover.take]
        first, second = calls if gone == "proposer" else reversed(calls)
        cancelled: asyncio.Future[Any] = asyncio.ensure_future(first())
        await turns()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        other: asyncio.Future[Any] = asyncio.ensure_future(second())
        await turns()
        assert not other.done()
        other.cancel()
        await asyncio.wait([other])

    bound(main)


def test_a_wait_that_is_too_long_names_what_it_waited_for() -> None:
    async def main() -> None:
        handover = Handover(patience_s=1000, timeout_s=0.01)
        with pytest.raises(DeadlineExceeded, match="answers to 'rev:12='"):
            await handover.solve(TASK)
        with pytest.raises(DeadlineExceeded, match="a proposal to answer"):
            await handover.take()

    bound(main)


# --- both runs, with real replays and loops, and stand-ins for models


class FakeGenerators:
    """Says digits, in tokens of the version that it holds."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer, self._rng = tokenizer, Random(seed)
        self.version, self.says = 0, "1234x"

    async def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], **_: Mapping[str, Any]
    ) -> list[Completion]:
        await asyncio.sleep(0)
        eos = self._tokenizer.eos_token_id
        said = [self._tokenizer("".join(self._rng.choices(self.says, k=2))).input_ids for _ in prompts]
        return [Completion([*ids, eos], [-1.0] * 3, [self.version] * 3, "stop") for ids in said]


class FakeReward:
    def __init__(self, function: Any) -> None:
        self._function = function

    async def score(self, samples: list[Sample]) -> Scores:
        return Scores([self._function(sample) for sample in samples], {})


class FakeTrainer:
    num_shards = 1

    def __init__(self) -> None:
        self.version, self.may_step = 0, asyncio.Event()
        self.may_step.set()

    async def step(self, handles: list[Any]) -> Any:
        await self.may_step.wait()
        for handle in handles:
            channel.close(handle)
        self.version += 1
        return SimpleNamespace(policy_version=self.version, metrics={}, peak_rss_bytes=0)


class Fleet:
    """One policy's run: its own Replay, loops and versions."""

    def __init__(self, name: str, cfg: TwoAgentsConfig, reward: Any) -> None:
        own, model = policies(cfg)[name], str(resolve_model("nano"))
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.generators, self.trainer = FakeGenerators(tokenizer, own.seed), FakeTrainer()
        self.rows: list[dict[str, Any]] = []
        groups = own.grpo.groups_per_step
        self.replay = Replay(own.replay, groups_per_step=groups, prompts=Endless(tokenizer))
        actors: Any = SimpleNamespace(
            model=model,
            decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
            generators=self.generators,
            reward=FakeReward(reward),
            reference=None,
            reward_model=None,
            replay=self.replay,
            trainer=self.trainer,
            sync=SimpleNamespace(published_version=0, publish=self.publish, close=lambda: None, describe=lambda: ""),
            num_rollouts=num_slots(own.replay.max_staleness, groups),
            restarts=dict,
            evaluators=None,
        )
        log: Any = SimpleNamespace(
            elapsed_s=0.0,
            trace=None,
            checkpoints=None,
            start=0,
            note=print,
            patiently=lambda wait, why: wait,
            step=lambda values, episodes: self.rows.append(values),
        )
        self.run = Run(own, actors, log)

    async def publish(self, version: int) -> None:
        self.generators.version = version
        await self.replay.release(version)

    async def train(self) -> None:
        rollouts = [asyncio.ensure_future(rollout_loop(self.run)) for _ in range(self.run.actors.num_rollouts)]
        try:
            await train_loop(self.run)
        finally:
            for task in rollouts:
                task.cancel()
            await asyncio.wait(rollouts)
        for task in rollouts:
            if not task.cancelled():
                task.result()
        assert self.run.ended is not None
        await self.run.ended()


class Endless:
    """Prompts for ever."""

    def __init__(self, tokenizer: Any) -> None:
        self._prompt = Prompt(0, 0, "rev:12=", tokenizer("rev:12=").input_ids)

    def draw(self) -> Prompt:
        return self._prompt

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


SMALL = {
    "run.checkpoint_every": 0,
    "episode.patience_s": 0.0,
    **{f"{name}.trainer.steps": 8 for name in POLICIES},
    **{f"{name}.grpo.group_size": 4 for name in POLICIES},
    "proposer.grpo.batch_size": 8,
    "solver.grpo.batch_size": 32,
    "proposer.replay.max_staleness": 1,
    "solver.replay.max_staleness": 2,
}


def fleets() -> tuple[Fleet, Fleet]:
    cfg = changed(SMALL)
    proposer, solver = Fleet("proposer", cfg, at_the_edge), Fleet("solver", cfg, reversed_digits)
    join(cfg, proposer.run, solver.run)
    return proposer, solver


def total(fleet: Fleet, key: str) -> float:
    return float(sum(row.get(key, 0) for row in fleet.rows))


def check_bounds(*all_fleets: Fleet) -> None:
    for fleet in all_fleets:
        assert len(fleet.rows) == 8
        limit = fleet.run.cfg.replay.max_staleness
        assert [row["staleness/bound"] for row in fleet.rows] == [limit] * 8
        assert max(row["staleness/max"] for row in fleet.rows) <= limit


def test_both_train_to_their_end_each_within_its_own_bound() -> None:
    async def main() -> None:
        both = fleets()
        await asyncio.gather(*(fleet.train() for fleet in both))
        check_bounds(*both)
        proposals, illegal = (total(both[0], f"extra/{key}") for key in ("proposals", "illegal_proposals"))
        assert 0 < illegal < proposals, "the stand-in says x now and then"

    bound(main)


@pytest.mark.parametrize("stuck", POLICIES)
def test_a_trainer_that_stands_still_does_not_hold_up_the_other_one(stuck: str) -> None:
    async def main() -> None:
        both = dict(zip(POLICIES, fleets(), strict=True))
        slow, other = both.pop(stuck), next(iter(both.values()))
        slow.trainer.may_step.clear()
        trains = asyncio.ensure_future(slow.train())
        done = asyncio.ensure_future(other.train())
        while len(other.rows) < 8:
            await asyncio.wait([trains, done], timeout=0.01)
            assert not trains.done(), trains.result()
        assert slow.trainer.version == 0
        slow.trainer.may_step.set()
        await asyncio.gather(trains, done)
        check_bounds(slow, other)
        untrained = ("extra/answered_untrained", "extra/untrained_proposals")[stuck == "proposer"]
        assert total(other, untrained) > 0

    bound(main)


def test_a_solver_that_waits_for_a_legal_proposal_in_vain_says_so() -> None:
    async def main() -> None:
        cfg = changed({**SMALL, "episode.timeout_s": 0.05})
        proposer, solver = Fleet("proposer", cfg, at_the_edge), Fleet("solver", cfg, reversed_digits)
        join(cfg, proposer.run, solver.run)
        proposer.generators.says = "x"
        assert proposer.run.ended is not None
        ended = asyncio.ensure_future(proposer.run.ended())
        with pytest.raises(DeadlineExceeded, match=r"a legal task by apps\.two_agents\.digits:to_task"):
            await solver.run.rollout(TASK, solver.generators, solver.run.actors.reward, group_id=0)
        ended.cancel()

    bound(main)


# --- configuration and placement


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("proposer.run.dir", "x", "proposer.run.dir is x, but both policies share it; set run.dir"),
        ("solver.mesh.debug", True, "solver.mesh.debug is True, but both policies share it; set mesh.debug"),
        ("episode.task", "apps.two_agents.digits:nothing", "nothing"),
        ("episode.patience_s", -1, "episode.patience_s must be >= 0, got -1"),
        ("episode.timeout_s", 0, "episode.timeout_s must be > 0, got 0"),
        ("solver.grpo.group_size", 3, "solver: grpo.batch_size must be a positive multiple of grpo.group_size 3"),
        ("run.resume", "nowhere", "run.resume nowhere holds no config.yaml"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(key: str, value: object, message: str) -> None:
    plan_run(changed(), None)
    with pytest.raises(ConfigError, match=message):
        plan_run(changed({key: value}), None)


def test_each_policy_has_its_own_folder_and_what_is_shared_is_that_of_both() -> None:
    own = policies(changed({"mesh.debug": True, "run.tensorboard": False}), Path("runs/x"))
    assert [own[name].run.dir for name in POLICIES] == ["runs/x/proposer", "runs/x/solver"]
    assert all(cfg.mesh.debug and not cfg.run.tensorboard for cfg in own.values())


def test_roles_are_placed_side_by_side_under_names_of_their_own() -> None:
    placement = plan_run(changed({"solver.mesh.generator.replicas": 2, "mesh.device": "cpu"}), None)
    assert set(placement.roles) == {f"{name}_{role}" for name in POLICIES for role in ("trainer", "generator")}
    assert [r.name for r in placement.replicas("solver_generator")] == ["solver_generator_0", "solver_generator_1"]


def on_gpus(cfg: TwoAgentsConfig) -> dict[str, Any]:
    meshes: dict[str, MeshConfig] = {name: own.mesh for name, own in policies(cfg).items()}
    roles = ("trainer", "generator")
    return {
        name: plan_placement(mesh, device="cuda", slots=4, torchrun_slots=None, roles=roles)
        for name, mesh in meshes.items()
    }


def test_on_gpus_each_policy_draws_from_the_pool_with_its_name() -> None:
    placement = side_by_side(on_gpus(changed({"mesh.pools": {"proposer": 2, "solver": 2}})))
    assert [placement.roles[f"{name}_generator"].replicas[0].devices for name in POLICIES] == [(1,), (3,)]
    with pytest.raises(ConfigError, match=r"proposer and solver would share device 0.*mesh\.pools"):
        side_by_side(on_gpus(changed()))


# --- the app


def rows_of(run: AppRun, name: str) -> list[dict[str, Any]]:
    path = run.folder / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.soak
def test_a_killed_run_goes_on_in_one_process_with_both_policies_within_their_bounds(tmp_path: Path) -> None:
    options = ["--run.checkpoint_every=2", *(f"--{name}.trainer.steps=6" for name in POLICIES)]
    run = AppRun(tmp_path / "run", *options, app=APP, preset=["--config", str(PRESET)])
    try:
        run.wait_until(lambda: all(len(rows_of(run, name)) >= 3 for name in POLICIES), "three steps of both", 900)
        run.kill_controller()
        assert run.finish(60) != 0
    finally:
        run.end()
    resumed = AppRun(tmp_path / "again", "--mesh.debug", app=APP, resumed=run)
    try:
        assert resumed.finish(900) == 0, resumed.output
    finally:
        resumed.end()
    for name, limit in (("proposer", 1), ("solver", 2)):
        rows = rows_of(run, name)
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert max(row["staleness/max"] for row in rows) <= limit
        assert (run.folder / name / "checkpoint" / "model.safetensors").exists()


@pytest.mark.soak
@pytest.mark.parametrize("how", ["ctrl-c", "dead actor"])
def test_both_end_together(tmp_path: Path, how: str) -> None:
    run = AppRun(tmp_path / "run", app=APP, preset=["--config", str(PRESET)])
    try:
        run.wait_until(lambda: all(rows_of(run, name) for name in POLICIES), "a step of both", 900)
        if how == "ctrl-c":
            run.press_ctrl_c()
            assert run.finish(300) == 130, run.output
            assert all((run.folder / name / "checkpoint").is_dir() for name in POLICIES)
        else:
            run.kill_actor("solver_trainer_0")
            assert run.finish(300) == 1
            assert run.output.count("ActorFailed: actor solver_trainer_0 failed") == 1, run.output
    finally:
        run.end()
