"""Evaluation during training: a set of prompts, several samples of each, all from one version of the policy.

    train loop ── due(v) ──► evaluation loop ── bring() ──► replicas of its own get the newest weights, all the same
                                  │                         version, and keep it: no update reaches them before the next
                                  ├── a few prompts at a time ──► completions, rewards
                                  └── pass@k, mean reward, their intervals ──► evaluations.jsonl

The evaluation loop waits for a version that is due. Nobody waits for it: one that is due while another still runs is
skipped and counted. A replica that dies is replaced; the evaluation goes on with the others, or else fails, is
counted, and the next one waits for the successor.

Why replicas of its own: those of the rollouts flip at every step, and holding a flip until an evaluation has ended
would hold the slots that the flip frees, and with them the train loop.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge import registry
from forge.data import Prompt
from forge.errors import ConfigError, ForgeError, WeightSyncError
from forge.mesh import within
from forge.metrics import Row
from forge.pass_at_k import bootstrap, ks_of, pass_at_1, pass_at_k


@dataclass
class EvaluationConfig:
    """Evaluation during training, on generators of its own (mesh.evaluator)."""

    every: int = 0
    """Steps between two evaluations; the first version and the last are evaluated, too. 0 starts no engine for it."""
    task: str = ""
    """module:function that returns the rows, as data.task; empty: the rows that are trained on, which says nothing of
    new ones."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task's function."""
    prompts: int = 64
    """The first rows of the task, in its order; as many at most."""
    samples: int = 4
    """Completions of each prompt; pass@k is told for k up to that number."""
    temperature: float = 1.0
    """Sampling temperature, of the whole vocabulary; 0 takes the likeliest token and needs samples 1."""
    max_new_tokens: int = 0
    """Tokens sampled at most for one completion; 0: generator.max_new_tokens."""
    passed: float = 1.0
    """Reward from which on a completion has passed."""
    concurrent: int = 4
    """Prompts under way at once on each replica."""
    timeout_s: float = 1800.0
    """Seconds that one evaluation may take before it is given up; training goes on."""
    seed: int = 0
    """Seed of sampling, the same for each evaluation, so that two differ by their weights."""

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit; imports the task, loads no data."""
        if self.every < 0:
            raise ConfigError(f"evaluation.every must be >= 0 steps, got {self.every}; 0 never evaluates")
        for name in ("prompts", "samples", "concurrent"):
            if getattr(self, name) < 1:
                raise ConfigError(f"evaluation.{name} must be >= 1, got {getattr(self, name)}")
        if not self.temperature >= 0 or (self.temperature == 0 and self.samples > 1):
            raise ConfigError(
                f"evaluation.temperature is {self.temperature}, evaluation.samples {self.samples}: samples differ at a "
                "temperature above 0 only; raise the former, or use samples 1 at 0"
            )
        if self.max_new_tokens < 0:
            raise ConfigError(f"evaluation.max_new_tokens must be >= 0, got {self.max_new_tokens}; 0: the generator's")
        if not self.timeout_s > 0:
            raise ConfigError(f"evaluation.timeout_s must be > 0 seconds, got {self.timeout_s}")
        if self.args and not self.task:
            raise ConfigError(f"evaluation.args is {self.args} without evaluation.task; name one, or use data.args")
        if self.task:
            task = registry.load(self.task, "evaluation.task")
            try:
                inspect.signature(task).bind(**self.args)
            except TypeError as error:
                raise ConfigError(f"evaluation.task {self.task} cannot be called with {self.args}: {error}") from error


@dataclass(frozen=True)
class Answers:
    """What came of one prompt: the rewards of its samples, in tokens what they took, and who sampled them."""

    rewards: Sequence[float]
    num_tokens: int
    num_unfinished: int
    """Samples that did not end by themselves."""
    versions: frozenset[int]


def summary(answers: Sequence[Answers], passed: float, seed: int = 0) -> Row:
    """The figures of one evaluation under their keys. Pure. `answers` hold equally many samples each, at least one."""
    samples = len(answers[0].rewards)
    num_passed = [sum(reward >= passed for reward in answer.rewards) for answer in answers]
    row: Row = {"eval/prompts": len(answers), "eval/samples": samples}

    def tell(key: str, estimate: tuple[float, tuple[float, float]]) -> None:
        row[key], (row[f"{key}/low"], row[f"{key}/high"]) = estimate

    tell("eval/reward", bootstrap([sum(answer.rewards) / samples for answer in answers], seed))
    for k in ks_of(samples):
        of_prompts = [pass_at_k(samples, count, k) for count in num_passed]
        tell(f"eval/pass@{k}", pass_at_1(samples, num_passed) if k == 1 else bootstrap(of_prompts, seed))
    total = len(answers) * samples
    row["eval/tokens_mean"] = sum(answer.num_tokens for answer in answers) / total
    row["eval/unfinished_share"] = sum(answer.num_unfinished for answer in answers) / total
    return row


def unevaluated(evaluated: Iterable[int], every: int, start: int) -> list[int]:
    """The versions before `start` that were due and have no result of theirs, nor a later one's. Pure."""
    return sorted(set(range(0, start, every)) - {version // every * every for version in evaluated})


class Evaluations:
    """The evaluations of a run, one at a time; nobody who calls `due` waits.

    `bring` gives the replicas the newest weights and returns their version; `answer(number, prompt)` asks them. An
    evaluation that fails is told by `note`, counted, and ends nothing else: training does not depend on it.
    """

    def __init__(
        self,
        cfg: EvaluationConfig,
        prompts: Sequence[Prompt],
        replicas: int,
        *,
        bring: Callable[[], Awaitable[int]],
        answer: Callable[[int, Prompt], Awaitable[Answers]],
        record: Callable[[Row], object],
        note: Callable[[str], object],
        last: int = -1,
    ) -> None:
        """`last` is the newest version that has been evaluated before; -1: none."""
        self._cfg, self._prompts, self._gate = cfg, prompts, asyncio.Semaphore(replicas * cfg.concurrent)
        self._bring, self._answer, self._record, self._note = bring, answer, record, note
        self._asked, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._last = last
        self.skipped = 0
        """Evaluations that were due while another ran."""
        self.failed = 0
        """Evaluations that came to no result."""

    def due(self, version: int) -> None:
        """Begins an evaluation if one is due at `version`, whose snapshot has been published. Waits for nothing."""
        if version % self._cfg.every == 0 and version > self._last:
            self._begin(version)

    def _begin(self, version: int) -> None:
        if not self._idle.is_set():
            self.skipped += 1
            self._note(f"evaluation at version {version} skipped: the one before still runs ({self.skipped} so far)")
            return
        self._idle.clear()
        self._asked.set()

    async def finish(self, version: int) -> None:
        """Waits for the evaluation that runs, and for one of the last `version`."""
        limit_s = self._cfg.timeout_s + 60
        await within(limit_s, "the evaluation that runs to end", self._idle.wait())
        if self._last < version:
            self._note(f"evaluating version {version}, the last")
            self._begin(version)
            await within(limit_s, f"the evaluation of version {version} to end", self._idle.wait())

    async def run(self) -> None:
        """The evaluation loop: waits for a version that is due; until it is cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                what = f"an evaluation of {len(self._prompts)} prompts (evaluation.timeout_s)"
                await within(self._cfg.timeout_s, what, self._evaluate())
            except ForgeError as error:
                self.failed += 1
                self._note(f"evaluation failed, training goes on: {error}")
            finally:
                self._idle.set()

    async def _evaluate(self) -> None:
        begin = time.monotonic()
        version = await self._bring()
        answers = await self._answers(version)
        seconds = time.monotonic() - begin
        row: Row = {"step": version, "policy_version": version, **summary(answers, self._cfg.passed, self._cfg.seed)}
        row |= {"eval/seconds": seconds, "eval/skipped": self.skipped, "eval/failed": self.failed}
        self._last = version
        self._record(row)
        low, high = row["eval/pass@1/low"], row["eval/pass@1/high"]
        self._note(
            f"evaluation of version {version}: pass@1 {row['eval/pass@1']:.3f} ({low:.3f} to {high:.3f}), "
            f"reward {row['eval/reward']:.3f}, {len(answers)} prompts, {seconds:.0f} s"
        )

    async def _answers(self, version: int) -> list[Answers]:
        tasks = [asyncio.ensure_future(self._one(n, prompt, version)) for n, prompt in enumerate(self._prompts)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, number: int, prompt: Prompt, version: int) -> Answers:
        async with self._gate:
            answers = await self._answer(number, prompt)
        if others := answers.versions - {version}:
            raise WeightSyncError(
                f"an evaluation of version {version} holds tokens of {sorted(others)}: an update reached its replicas, "
                "or one of them died in its midst"
            )
        return answers
