"""Laws of a colocated run: the app's own loops, a real engine and a real trainer that take turns on the same CPU."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from colocated import BUDGET, Colocated, Interval, parse

from actors.vllm_engine import Completion
from forge.errors import ConfigError
from forge.launch import Hosts
from forge.placement import MeshConfig, Placement, RoleConfig, plan_placement

Traced = tuple[list[dict[str, Any]], list[Interval], list[Interval], int]


@pytest.fixture(scope="module")
def colocated(hosts: Hosts) -> Iterator[Colocated]:
    with pytest.MonkeyPatch.context() as patch:
        colocated = Colocated(hosts, patch)
        yield colocated
        colocated.close()


def overlaps(some: list[Interval], others: list[Interval]) -> list[tuple[Interval, Interval]]:
    """Pairs of both that were computed at the same time."""
    return [(a, b) for a in some for b in others if a[0] < b[1] and b[0] < a[1]]


@pytest.mark.soak
def test_on_policy_a_run_with_turns_trains_on_the_same_numbers_as_one_without(
    colocated: Colocated, tmp_path: Path
) -> None:
    options = ("--trainer.steps=3", "--replay.max_staleness=0", "--trainer.lr=1e-3")
    apart = colocated.run(colocated.train(tmp_path / "apart", *options))
    together = colocated.run(colocated.train(tmp_path / "together", *options, "--mesh.colocate"))
    for key in ("loss/policy", "grad_norm", "reward/mean", "ratio/mean", "extra/entropy"):
        assert [row[key] for row in together] == [row[key] for row in apart], key
    assert len({row["grad_norm"] for row in apart}) == 3
    assert all("extra/turn_wait_s" in row for row in together)
    assert not any("extra/turn_wait_s" in row for row in apart)


@pytest.fixture(scope="module")
def slow_run(colocated: Colocated, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A run that takes turns and whose steps take long: its rows, when it trained and decoded, interrupted requests."""
    options = ("--trainer.steps=6", "--replay.max_staleness=1", "--run.checkpoint_every=3", "--mesh.colocate")
    rows = colocated.run(colocated.train(tmp_path_factory.mktemp("run") / "run", *options, slow_s=0.2))
    return rows, *colocated.run(colocated.traces())


@pytest.mark.soak
def test_no_token_is_decoded_during_a_step_and_interrupted_requests_keep_their_budgets(slow_run: Traced) -> None:
    rows, trained, decoded, interrupted = slow_run
    assert len(trained) == 6
    assert len(decoded) > 6 * BUDGET
    assert overlaps(trained, decoded) == []
    assert interrupted > 0
    assert [row["tokens/trained"] for row in rows] == [64 * BUDGET] * 6
    assert max(row["staleness/max"] for row in rows) == 1  # the bound, reached
    assert max(row["extra/engine_mismatch"] for row in rows if row["staleness/max"] == 0) < 1e-3


@pytest.mark.soak
def test_a_step_that_fails_leaves_the_generators_awake_and_their_requests_whole(
    colocated: Colocated, slow_run: Traced
) -> None:
    assert slow_run
    trainer, generators = colocated.cluster.kept["trainer"], colocated.actors.generators
    (turns,) = {replica._turns for replica in generators.replicas}
    assert turns is not None

    async def step_among_requests(*, in_turn: bool) -> tuple[list[Interval], list[Interval]]:
        """A step that fails while requests run; when it was computed, and the decode steps."""
        requests = asyncio.ensure_future(generators.generate([[33, 50, 27]] * 40, list(range(40)), BUDGET))
        await asyncio.sleep(0.02)
        with pytest.raises(Exception, match="the loss is gone"):
            async with turns.training("a step") if in_turn else contextlib.nullcontext():
                await trainer.fail.call_one()
        assert [len(c.token_ids) for c in await requests] == [BUDGET] * 40
        trained, decoded, _ = await colocated.traces()
        return trained[-1:], decoded

    assert overlaps(*colocated.run(step_among_requests(in_turn=True))) == []
    assert overlaps(*colocated.run(step_among_requests(in_turn=False))), "what is measured cannot tell turns from none"


@pytest.mark.soak
def test_greedy_output_interrupted_by_turns_is_the_uninterrupted_output(colocated: Colocated, slow_run: Traced) -> None:
    assert slow_run
    generator = colocated.cluster.kept["generator"]
    (turns,) = {replica._turns for replica in colocated.actors.generators.replicas}
    assert turns is not None
    prompts = [[33, 50, 27, digit] for digit in range(7, 17)]

    async def among_turns() -> tuple[list[Completion], int]:
        requests = asyncio.ensure_future(generator.greedy.call_one(prompts))
        before = await generator.interrupted.call_one()
        for _ in range(4):
            await asyncio.sleep(0.02)
            async with turns.training("a step"):
                pass
        return await requests, await generator.interrupted.call_one() - before

    whole = colocated.run(generator_greedy(generator, prompts))
    parts, interrupted = colocated.run(among_turns())
    assert interrupted > 0
    for one, other in zip(whole, parts, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.finish_reason == other.finish_reason == "length"


async def generator_greedy(generator: Any, prompts: list[list[int]]) -> list[Completion]:
    completions: list[Completion] = await generator.greedy.call_one(prompts)
    return completions


# --- what is refused, and where roles go; nothing is started


def plan(cfg: MeshConfig, device: Literal["cpu", "cuda"] = "cuda", slots: int = 1, **options: Any) -> Placement:
    roles = options.pop("roles", ("trainer", "generator"))
    return plan_placement(cfg, device=device, slots=slots, torchrun_slots=None, roles=roles, **options)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--weightsync.staging=device", "weightsync.staging device: the trainer keeps nothing on a device"),
        ("--weightsync.transport=ipc", "weightsync.transport ipc: the trainer keeps nothing on a device"),
        ("--mesh.generator.pool=other", "mesh.generator.pool 'other': they are to share their devices"),
    ],
)
def test_a_combination_that_cannot_work_is_one_line_before_any_process(option: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse("--mesh.colocate", option)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_critic_on_a_mesh_of_its_own_takes_no_turns() -> None:
    ppo = ("--loss.token_advantages=gae", "--grpo.advantage=none", "--mesh.critic.procs=1")
    with pytest.raises(ConfigError, match=r"mesh.critic.procs 1: a critic on a mesh of its own takes no turns"):
        parse("--mesh.colocate", *ppo)


def test_without_generators_there_are_no_turns() -> None:
    with pytest.raises(ConfigError, match=r"has the roles trainer only: nobody takes turns"):
        plan(MeshConfig(colocate=True), roles=("trainer",))


def test_trainer_and_generators_get_the_same_gpus() -> None:
    one = plan(MeshConfig(colocate=True))
    assert one.replica("trainer", 0).devices == one.replica("generator", 0).devices == (0,)
    assert one.replica("generator", 0).envs[0]["CUDA_VISIBLE_DEVICES"] == "0"
    four = MeshConfig(colocate=True, trainer=RoleConfig(procs=4), generator=RoleConfig(procs=2, replicas=2))
    placed = plan(four, slots=8, roles=("trainer", "generator", "reference"))
    assert [r.devices for r in placed.replicas("generator")] == [(0, 1), (2, 3)]
    assert placed.replica("reference", 0).devices == (4,)  # roles that take no turns have slots of their own


@pytest.mark.parametrize(
    ("generator", "slots"),
    [(RoleConfig(replicas=3), 4), (RoleConfig(procs=4), 4), (RoleConfig(procs=3), 2)],
)
def test_generators_that_need_more_than_the_trainer_has_are_refused(generator: RoleConfig, slots: int) -> None:
    cfg = MeshConfig(colocate=True, trainer=RoleConfig(procs=2), generator=generator)
    with pytest.raises(ConfigError, match=r"raise mesh.trainer.procs|no multiple of them"):
        plan(cfg, slots=slots, num_hosts=2)


def test_on_one_gpu_without_turns_the_error_names_them() -> None:
    with pytest.raises(ConfigError, match=r"mesh.colocate=true"):
        plan(MeshConfig())
