"""What evaluation during a GRPO run is made of: prompts, generators of its own, a prompt's answers.

A prompt is answered in one turn and scored by the run's rewards, as in `actors.rollout.rollout_group`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from actors.evaluator import Answers, EvaluationConfig, Evaluations, unevaluated
from actors.generator import GeneratorActor, GeneratorConfig
from actors.generators import Generators, Replica
from actors.rollout import rollout_group
from actors.trainer import ModelSpec
from forge.data import Prompt, PromptStream, load_task, make_encoder
from forge.errors import NodeLost
from forge.metrics import read_rows
from forge.run_log import RunLog
from forge.supervision import Guard

if TYPE_CHECKING:
    from apps.grpo.config import AppConfig
    from apps.grpo.spawn import Actors, Meshes


@dataclass(frozen=True)
class Evaluators:
    """Generators that serve evaluations only, and the prompts of each."""

    generators: Generators
    prompts: list[Prompt]
    guards: list[Guard]


def evaluation_prompts(cfg: AppConfig, tokenizer: Any) -> list[Prompt]:
    """The first `evaluation.prompts` of its task, each once; as many as the task has."""
    own = cfg.evaluation
    data = replace(cfg.data, task=own.task, args=own.args, path=None) if own.task else cfg.data
    data = replace(data, shuffle=False, size=own.prompts)
    stream = PromptStream(load_task(data), make_encoder(tokenizer, data.template_args), shuffle=False)
    prompts: list[Prompt] = []
    while len(prompts) < own.prompts and (prompt := stream.draw()).epoch == 0:
        prompts.append(prompt)
    return prompts


def evaluator_config(cfg: EvaluationConfig, generator: GeneratorConfig) -> GeneratorConfig:
    """The section generator for the evaluations' own engines: their sampling, places for what runs at once. Pure."""
    budget = cfg.max_new_tokens or generator.max_new_tokens
    return replace(
        generator,
        temperature=cfg.temperature,
        top_p=1.0,
        top_k=0,
        keep_support=0,
        keep_routes=False,
        max_new_tokens=budget,
        max_model_len=generator.max_model_len + max(0, budget - generator.max_new_tokens),
        max_num_seqs=min(generator.max_num_seqs, cfg.concurrent * cfg.samples),
    )


async def start_evaluators(
    cfg: AppConfig,
    cluster: Meshes,
    spec: ModelSpec,
    generator: GeneratorConfig,
    tokenizer: Any,
    stop: list[int],
    env: Mapping[str, str],
    note: Callable[[str], None],
) -> Evaluators | None:
    """The engines of the evaluations, where there are any; `generator` and `stop` are those of the rollouts'.

    When one dies, another starts in its place; `note` tells of it. It has the weights on the disk until the next
    evaluation brings newer ones.
    """
    if not cfg.evaluation.every:
        return None
    prompts = await asyncio.to_thread(evaluation_prompts, cfg, tokenizer)
    own = evaluator_config(cfg.evaluation, generator)

    async def start(index: int, guard: Guard) -> Replica:
        options: dict[str, Any] = {"procs": cluster.procs("evaluator"), "sync": cfg.weightsync, "stop_ids": stop}
        mesh = await cluster.spawn(
            "evaluator",
            GeneratorActor,
            own,
            spec.path,
            spec.dtype,
            seed=cfg.evaluation.seed + index,
            **options,
            replica=index,
            env=env,
            guard=guard,
        )
        replica = Replica(mesh, f"evaluator_{index}", own, report=guard.reporter())
        await replica.setup(prompts[0].token_ids)
        return replica

    policy = cfg.failure_policy("evaluator")
    guards = [Guard(policy, note) for _ in range(cluster.replicas("evaluator"))]
    starts = [partial(start, index, guard) for index, guard in enumerate(guards)]
    async with asyncio.TaskGroup() as tasks:
        begun = [tasks.create_task(guard.start(begin)) for guard, begin in zip(guards, starts, strict=True)]
    replicas = [task.result() for task in begun]
    generators = Generators(replicas)
    for guard, begin, replica in zip(guards, starts, replicas, strict=True):
        _replace_when_dead(guard, replica, begin, generators)
    return Evaluators(generators, prompts, guards)


def _replace_when_dead(
    guard: Guard, replica: Replica, start: Callable[[], Awaitable[Replica]], generators: Generators
) -> None:
    async def revive() -> None:
        nonlocal replica
        try:
            replica = await start()
        except NodeLost:
            generators.give_up(replica.name)
            raise
        generators.add(replica)

    guard.arm(
        lambda reason: generators.lose(replica, reason), revive, lambda: replica.ask(replica.mesh.beat.call_one())
    )


def make_evaluations(cfg: AppConfig, actors: Actors, log: RunLog) -> Evaluations | None:
    """The evaluations of a run, where there are any; of a resumed run it says which have no result."""
    own, evaluators = cfg.evaluation, actors.evaluators
    if evaluators is None:
        return None
    generators, evaluated = evaluators.generators, _evaluated(log)
    if lost := unevaluated(evaluated, own.every, log.start):
        log.note(f"evaluations that were due have no result and are not made up for: versions {lost}")

    async def bring() -> int:
        await generators.complete()
        return await actors.sync.visit(generators.replicas)

    return Evaluations(
        own,
        evaluators.prompts,
        len(generators.replicas),
        bring=bring,
        answer=partial(_answer, own, actors, generators),
        record=log.evaluation,
        note=log.note,
        last=max(evaluated, default=-1),
    )


def _evaluated(log: RunLog) -> list[int]:
    path = log.folder.evaluations_path
    return [int(row["step"] or 0) for row in read_rows(path)] if path.exists() else []


async def _answer(
    cfg: EvaluationConfig, actors: Actors, generators: Generators, number: int, prompt: Prompt
) -> Answers:
    rollout = await rollout_group(
        prompt,
        generators,
        actors.reward,
        group_id=number,
        group_size=cfg.samples,
        advantage="none",
        decode=actors.decode,
        seed=cfg.seed,
        reward_model=actors.reward_model,
    )
    versions = rollout.group["token_versions"]
    unfinished = sum(not sample.finished for sample in rollout.samples)
    return Answers(
        rollout.scores.total, rollout.num_tokens, unfinished, frozenset(versions[versions >= 0].unique().tolist())
    )
