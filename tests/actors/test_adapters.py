"""Laws of a generator that gets adapters only: each request computes with one adapter, its own, for life.

One engine for the module. What PEFT computes in transformers with the same matrices is the reference.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict

from actors import trainer
from actors.generator import Generator, GeneratorConfig
from actors.lora import LoraConfig as OwnLoraConfig
from actors.model import load_hf
from actors.vllm_adapters import EngineAdapters
from actors.vllm_engine import Completion, Sampling
from apps.grpo.models import resolve_model
from forge.batch import collate, make_group
from forge.errors import WeightSyncError
from forge.losses import LossConfig
from weightsync.adapters import adapter_name, adapter_parameters, adapter_spec
from weightsync.config import WeightSyncConfig
from weightsync.layout import Layout
from weightsync.offer import Endpoint, Offer
from weightsync.publisher import Publisher, combine
from weightsync.snapshot import NUM_BUFFERS

PROMPT = [33, 50, 27, 7, 8, 9, 10, 20]
LONG_PROMPT = [7 + (5 * i) % 90 for i in range(280)]  # two blocks of the prefix cache and a bit
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, CAPACITY, MAX_LEN = 8, 2, 512
ENDLESS = MAX_LEN  # tokens that a request does not come to before somebody says that it is enough
GREEDY = Sampling(temperature=0.0)
NOISY = Sampling(temperature=2.0)
BASE = 0
GENERATOR = "generator"


def names_of_requests(worker: Any) -> list[str]:
    """Runs in the worker: the adapters of all requests that it knows."""
    return [r.lora_request.lora_name for r in worker.model_runner.requests.values() if r.lora_request is not None]


def ids_of_slots(worker: Any) -> list[int | None]:
    """Runs in the worker."""
    return list(worker.model_runner.lora_manager._adapter_manager.lora_index_to_id)


def is_receiving(worker: Any) -> bool:
    """Runs in the worker, of the collective transport."""
    return bool(worker._forge_inbox._puller._seat._lock.locked())


@dataclass(frozen=True)
class Answer:
    """One completion; `version` is that of all its tokens, `BASE` where no adapter had come."""

    prompt: list[int]
    completion: Completion

    @property
    def version(self) -> int:
        (version,) = set(self.completion.versions)
        return version


def published(publisher: Publisher, version: int) -> Offer:
    """What the parameters are now, as `version`."""
    buffer = version % NUM_BUFFERS
    publisher.snapshot(version, buffer)
    offer = combine([publisher.offer(version, buffer, -1)], publisher.endpoint, version, buffer, -1)
    return replace(offer, where=publisher.prepare(offer))


class Trainer:
    """A model with an adapter, and the publisher of its versions."""

    def __init__(self, transport: str = "memory", folder: str = "", **options: Any) -> None:
        config = LoraConfig(**{"r": RANK, "lora_alpha": 16, "target_modules": ALL_LINEAR, **options})
        self.peft: Any = get_peft_model(load_hf(resolve_model("nano"), torch.float32).eval(), config)
        self._parameters = adapter_parameters(self.peft.named_parameters())
        spec = adapter_spec(config, self._parameters)
        self.publisher = Publisher(self._parameters, torch.float32, transport=transport, adapter=spec, folder=folder)
        self.endpoint = self.publisher.endpoint

    def train(self, version: int) -> None:
        """Matrices of `version`, far enough from each other that no two versions are mistaken."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for _, parameter in self._parameters:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))

    def publish(self, version: int) -> Offer:
        self.train(version)
        return published(self.publisher, version)

    def check(self, answer: Answer, sampling: Sampling = GREEDY) -> None:
        """Its tokens have the log-probs of PEFT under the version that it names; greedy ones are the likeliest."""
        if answer.version != BASE:
            self.train(answer.version)
        ids = answer.completion.token_ids
        with torch.no_grad(), self.peft.disable_adapter() if answer.version == BASE else nullcontext():
            logits = self.peft(torch.tensor([[*answer.prompt, *ids]])).logits[0, len(answer.prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
        expected = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(expected, torch.tensor(answer.completion.logprobs), atol=1e-4, rtol=0)
        if sampling is GREEDY:
            assert logits.argmax(-1).tolist() == ids


class Training(Trainer):
    """The project's own trainer, whose versions are its optimizer steps."""

    def __init__(self) -> None:
        config = trainer.TrainerConfig(lr=1e-2, lora=OwnLoraConfig(rank=RANK))
        spec = trainer.ModelSpec(str(resolve_model("nano")), "float32", temperature=NOISY.temperature)
        self._one = trainer.Trainer(config, LossConfig(), spec)
        self.endpoint = self._one.connect("float32", WeightSyncConfig(), "memory")
        self.publisher = self._one.publisher

    def publish(self, version: int) -> Offer:
        return published(self.publisher, version)

    def step(self, answers: Sequence[Answer]) -> tuple[float, torch.Tensor]:
        """One step on completions of one prompt: the mean ratio that it finds, and how far it moves their log-probs."""
        parts = [answer.completion for answer in answers]
        tokens, versions = [part.token_ids for part in parts], [part.versions for part in parts]
        group = make_group(answers[0].prompt, tokens, [part.logprobs for part in parts], versions, group_id=0)
        group["advantages"] = torch.linspace(-1, 1, len(answers))
        batch = collate([group])
        before = self._logprobs(batch)
        torch.testing.assert_close(before, batch["behavior_logprobs"][batch["loss_mask"]], atol=1e-4, rtol=0)
        ratio = self._one.step(batch).metrics["ratio/mean"]
        return ratio or 0.0, (self._logprobs(batch) - before).abs().max()

    @torch.no_grad()
    def _logprobs(self, batch: TensorDict) -> torch.Tensor:
        positions = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
        return self._one.policy(batch["tokens"], positions, batch["loss_mask"])[0]


class Live:
    """A generator on an event loop of its own, and a trainer beside it.

    `first` are the answers of requests that ran beside each other while the first two adapters came in: begun under
    the base model, version 1, version 2; `first_held` are the versions and their requests at the end of that,
    `first_ended` says whether one of the older requests had ended by then.
    """

    def __init__(self, workers: int) -> None:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to look at things inside the worker
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.trainer = Trainer()
        config = GeneratorConfig(
            max_new_tokens=8,
            max_model_len=MAX_LEN,
            max_num_seqs=32,
            kv_cache_bytes=64 << 20,
            lora_rank=RANK,
            lora_targets=ALL_LINEAR,
            lora_adapters=CAPACITY,
        )
        self.generator = Generator(config, resolve_model("nano"), "float32", seed=0, stop_ids=[], procs=workers)
        self.engine = self.generator._engine
        self.run(self.generator.setup(PROMPT))
        self.connect(self.trainer)
        self.version = BASE
        self.first = self.run(self._begin_history())

    async def _begin_history(self) -> list[Answer]:
        long = await self.answer(LONG_PROMPT, 4)
        base = await self.begin(3)
        await self.sync()
        one = await self.begin(4)
        await self.sync()
        two = await self.begin(4, Sampling())
        self.first_held = self.adapters.held
        self.first_ended = base.done() or one.done()
        await self.enough()
        return [long, *await base, *await one, *await two]

    @property
    def adapters(self) -> EngineAdapters:
        assert self.engine.adapters is not None
        return self.engine.adapters

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 240) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def connect(self, trainer: Trainer) -> None:
        trainer.publisher.add_peer(GENERATOR, self.run(self.generator.connect(trainer.endpoint)))

    @contextmanager
    def connected(self, trainer: Trainer) -> Iterator[None]:
        """Inside, versions come from `trainer`; afterwards from the usual one again."""
        try:
            self.connect(trainer)
            yield
        finally:
            self.connect(self.trainer)
            trainer.publisher.close()

    async def sync(self, trainer: Trainer | None = None, epoch: int = 0) -> int:
        """What `weightsync.sync` does: publishes, sends and stages at the same time, flips."""
        trainer = trainer or self.trainer
        self.version += 1
        offer = replace(trainer.publish(self.version), epoch=epoch)
        sent = asyncio.to_thread(trainer.publisher.send, GENERATOR, offer)
        await asyncio.gather(self.generator.stage(offer), sent)
        assert await self.generator.flip(self.version) == 0.0
        return self.version

    async def look(self, function: Callable[[Any], Any]) -> Any:
        """What a function of a worker returns there, between two decode steps; of the first worker."""
        return (await self.engine._engine.collective_rpc(function))[0]

    async def answer(self, prompt: Sequence[int], length: int, sampling: Sampling = GREEDY, seed: int = 0) -> Answer:
        completion = await self.engine.generate(prompt, sampling, max_tokens=length, seed=seed, stop_ids=[])
        return Answer(list(prompt), completion)

    async def answers(self, count: int, length: int, sampling: Sampling = GREEDY) -> list[Answer]:
        requests = (self.answer([*PROMPT, 7 + i % 8], length, sampling, i) for i in range(count))
        return list(await asyncio.gather(*requests))

    async def begin(
        self, count: int, sampling: Sampling = GREEDY, length: int = ENDLESS
    ) -> asyncio.Future[list[Answer]]:
        """The same once all of them are running; the future brings the answers."""
        task = asyncio.ensure_future(self.answers(count, length, sampling))
        await self.begun(count)
        return task

    async def begun(self, count: int) -> None:
        """Returns once `count` requests run under the newest version."""
        while await self._running() < count:
            pass

    async def enough(self) -> None:
        """All that runs ends with what it has."""
        await self.engine.abort(list(self.engine._running))

    async def _running(self) -> int:
        """As the worker sees it; of the base model it cannot tell."""
        if self.version == BASE:
            await asyncio.sleep(0)
            return len(self.engine._running)
        name = adapter_name(self.version)
        names: list[str] = await self.look(names_of_requests)
        return names.count(name)

    @asynccontextmanager
    async def loaded(self, clients: int, length: int) -> AsyncIterator[list[Answer]]:
        """Inside, so many clients ask for one completion after the other; afterwards the list has them all."""
        answers: list[Answer] = []
        over = asyncio.Event()

        async def client(index: int) -> None:
            while not over.is_set():
                answers.append(await self.answer([*PROMPT, 7 + index], length, Sampling(), seed=len(answers)))

        running = asyncio.gather(*(client(index) for index in range(clients)))
        try:
            yield answers
        finally:
            over.set()
            await running

    def close(self) -> None:
        self.generator.shutdown()
        self.trainer.publisher.close()


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.soak)], ids=["alone", "tensor parallel"])
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    live = Live(request.param)
    yield live
    live.close()


@pytest.fixture(autouse=True)
def one_version(live: Live) -> None:
    live.run(live.sync())


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(temperature=0.6)], ids=str)
def test_every_token_has_the_probability_that_peft_gives_it(live: Live, sampling: Sampling) -> None:
    for answer in live.run(live.answers(8, 24, sampling)):
        assert answer.version == live.version
        live.trainer.check(answer, sampling)


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"r": 4, "lora_alpha": 3},  # padded with zeros to the engine's rank
        {"target_modules": ["q_proj", "down_proj"]},  # of a fused layer one part only
    ],
    ids=str,
)
def test_adapters_of_other_shapes_leave_nothing_of_what_was_in_their_slot(live: Live, options: dict[str, Any]) -> None:
    live.run(live.sync())  # both slots have been written to
    other = Trainer(**options)
    with live.connected(other):
        live.run(live.sync(other))
        for answer in live.run(live.answers(4, 24)):
            assert answer.version == live.version
            other.check(answer)


def test_each_step_of_the_trainer_is_sampled_from_by_the_engine_with_a_ratio_of_one(live: Live) -> None:
    async def sample() -> list[Answer]:
        return list(await asyncio.gather(*(live.answer(PROMPT, 12, NOISY, seed) for seed in range(8))))

    training = Training()
    with live.connected(training):
        for _ in range(4):  # from the second on the adapter is not zero
            live.run(live.sync(training))
            answers = live.run(sample())
            assert {answer.version for answer in answers} == {live.version}
            ratio, moved = training.step(answers)
            assert ratio == pytest.approx(1.0, abs=1e-4)
            assert moved > 0.1


@pytest.mark.parametrize("transport", ["collective", "file"])
def test_adapters_come_by_any_transport_while_requests_run(live: Live, transport: str, tmp_path: Path) -> None:
    async def versions() -> list[Answer]:
        async with live.loaded(2, 40) as answers:
            for _ in range(NUM_BUFFERS + 1):
                await live.sync(far)
        return answers + await live.answers(2, 12)

    far = Trainer(transport, str(tmp_path))
    with live.connected(far):
        answers = live.run(versions())
    assert answers[-1].version == live.version
    for answer in answers:
        live.trainer.check(answer, Sampling() if len(answer.completion.token_ids) == 40 else GREEDY)


def test_a_request_keeps_what_it_began_with_the_base_model_too_while_newer_adapters_come(live: Live) -> None:
    assert live.first_held == {1: 4, 2: 4}
    assert not live.first_ended, "the older requests ended before the newer ones began"
    assert [a.version for a in live.first] == [BASE] * 4 + [1] * 4 + [2] * 4
    for answer in live.first:
        live.trainer.check(answer, Sampling() if answer.version == 2 else GREEDY)


def test_the_trainer_may_write_over_its_snapshot_once_an_adapter_is_in(live: Live) -> None:
    before = live.run(live.answers(2, 16))
    for _ in range(NUM_BUFFERS):  # overtaken, never offered
        live.version += 1
        live.trainer.publish(live.version)
    assert live.run(live.answers(2, 16)) == before
    live.trainer.check(before[0])


def test_a_slot_in_use_is_not_written_to_until_its_last_request_has_ended(live: Live) -> None:
    async def third() -> list[Answer]:
        task = await live.begin(2)
        await live.sync()
        live.version += 1
        staging = asyncio.ensure_future(live.generator.stage(live.trainer.publish(live.version)))
        await live.look(ids_of_slots)
        await live.look(ids_of_slots)
        assert not staging.done()
        assert not task.done()
        await live.enough()
        answers = await task
        await staging
        await live.generator.flip(live.version)
        return answers

    answers = live.run(third())
    assert live.adapters.held == {live.version: 0}
    for answer in answers:
        assert answer.version == live.version - 2
        live.trainer.check(answer)


def test_the_last_slot_stays_empty_for_tokens_of_the_base_model(live: Live) -> None:
    assert live.run(live.look(ids_of_slots)) == [*range(1, CAPACITY + 1), None]


def test_requests_that_are_aborted_or_cancelled_give_their_adapter_back(live: Live) -> None:
    async def ended() -> list[Completion]:
        prompts, seeds, old = [PROMPT] * 2, [1, 2], live.version
        aborted = asyncio.ensure_future(live.generator.generate(prompts, seeds, ENDLESS, "aborted"))
        cancelled = asyncio.ensure_future(live.generator.generate(prompts, seeds, ENDLESS, "cancelled"))
        await live.begun(4)
        assert live.adapters.held[old] == 4
        await live.sync()
        cancelled.cancel()
        await live.generator.abort("aborted")
        await asyncio.wait([cancelled])
        completions = await aborted
        assert live.adapters.held == {live.version: 0}
        return completions

    for completion in live.run(ended()):
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.token_ids) < MAX_LEN - len(PROMPT)
        assert set(completion.versions) == {live.version - 1}


def test_a_version_that_finds_all_slots_in_use_waits_for_the_oldest_requests(live: Live) -> None:
    async def third() -> tuple[list[Answer], list[Answer], list[Answer]]:
        oldest = await live.begin(2, length=120)
        await live.sync()
        middle = await live.begin(2)
        await live.sync()
        assert oldest.done()
        assert not middle.done()
        await live.enough()
        return await oldest, await middle, await live.answers(2, 8)

    for back, answers in zip((2, 1, 0), live.run(third()), strict=True):
        for answer in answers:
            assert answer.version == live.version - back
            live.trainer.check(answer)


def test_twenty_versions_under_load_use_the_slots_again_and_leave_nothing_behind(live: Live) -> None:
    async def soak() -> list[Answer]:
        async with live.loaded(6, 12) as answers:
            for _ in range(20):
                await live.sync()
                assert len(live.adapters.held) <= CAPACITY
        return answers

    answers = live.run(soak())
    assert live.adapters.held == {live.version: 0}
    assert len({answer.version for answer in answers}) > 10
    for answer in answers:
        live.trainer.check(answer, Sampling())


def test_no_version_reads_what_another_left_in_the_prefix_cache(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    cached: list[int] = []
    generate = live.engine._engine.generate

    async def listening(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
        async for output in generate(*arguments, **options):
            cached.append(output.num_cached_tokens)
            yield output

    monkeypatch.setattr(live.engine._engine, "generate", listening)
    once, again = live.run(live.answer(LONG_PROMPT, 4)), live.run(live.answer(LONG_PROMPT, 4))
    live.run(live.sync())
    newer = live.run(live.answer(LONG_PROMPT, 4))
    assert cached[1] > 0, "the prompt is too short for the prefix cache"
    assert (cached[0], cached[2]) == (0, 0)
    for answer in (once, again, newer):
        live.trainer.check(answer)


def overtaken(live: Live) -> Offer:
    """The trainer has written the next version but one over it."""
    offer = live.trainer.publish(live.version + 1)
    live.trainer.publish(live.version + 1 + NUM_BUFFERS)
    live.version += 1 + NUM_BUFFERS
    return offer


def damaged(live: Live) -> Offer:
    live.version += 1
    offer = live.trainer.publish(live.version)
    return replace(offer, sums=[[number ^ (at % 2) for at, number in enumerate(sums)] for sums in offer.sums])


FAILURES: dict[str, Callable[[Live], Offer]] = {
    "the trainer overtook a receiver": overtaken,
    "did not arrive as it was sent": damaged,
}


@pytest.mark.parametrize("text", FAILURES)
def test_a_version_that_fails_to_arrive_takes_no_slot_and_the_old_one_serves_on(live: Live, text: str) -> None:
    before, serving = live.run(live.answers(2, 16)), live.version
    for _ in range(CAPACITY + 1):
        with pytest.raises(WeightSyncError, match=rf"(?s)version {serving} goes on serving.*{text}"):
            live.run(live.generator.stage(FAILURES[text](live)))
    assert live.run(live.answers(2, 16)) == before
    live.run(live.sync())
    live.trainer.check(live.run(live.answers(1, 16))[0])


def test_a_version_that_was_given_up_takes_no_slot_and_is_never_served(live: Live) -> None:
    async def given_up() -> None:
        for _ in range(CAPACITY + 1):
            live.version += 1
            staging = asyncio.ensure_future(live.engine.stage(live.trainer.publish(live.version)))
            await asyncio.sleep(0)
            staging.cancel()
            await asyncio.wait([staging])

    serving = live.version
    live.run(given_up())
    with pytest.raises(WeightSyncError, match=rf"version {live.version} does not serve, the engine holds v{serving}"):
        live.run(live.generator.flip(live.version))
    assert live.run(live.answers(1, 4))[0].version == serving
    live.run(live.sync())
    live.trainer.check(live.run(live.answers(1, 16))[0])


def test_a_version_that_was_given_up_on_its_way_does_not_stand_against_the_next(live: Live) -> None:
    async def given_up() -> None:
        first = asyncio.ensure_future(live.generator.stage(far.publish(live.version + 1)))  # nobody sends it
        while not await live.look(is_receiving):
            pass
        first.cancel()
        await asyncio.wait([first])
        live.version += 1
        await asyncio.wait_for(live.sync(far, epoch=1), 30)  # its own deadline would end the first one much later

    far = Trainer("collective")
    with live.connected(far):
        live.run(given_up())
    answer = live.run(live.answers(1, 16))[0]
    assert answer.version == live.version
    live.trainer.check(answer)


def test_a_version_may_be_brought_again(live: Live) -> None:
    async def again() -> None:
        live.version += 1
        offer = live.trainer.publish(live.version)
        for _ in range(2):
            await live.generator.stage(offer)
        for _ in range(2):
            await live.generator.flip(live.version)
            await live.generator.stage(offer)

    live.run(again())
    answer = live.run(live.answers(1, 16))[0]
    assert answer.version == live.version
    live.trainer.check(answer)


def with_entry(endpoint: Endpoint, index: int, **changes: Any) -> Endpoint:
    fields, rows = ("name", "dtype", "shape", "offset", "nbytes", "box"), endpoint.layout.plain()
    rows[index] = [changes.get(field, value) for field, value in zip(fields, rows[index], strict=True)]
    return replace(endpoint, layout=Layout.from_plain(rows))


MISFITS: dict[str, Callable[[Endpoint], Endpoint]] = {
    r"the engine has no LoRA layer for model\.norm": lambda e: with_entry(e, 0, name="model.norm.A"),
    r"q_proj\.B has shape \[48, 8\], the engine's layer takes \[64, 8\]": lambda e: with_entry(e, 1, shape=[48, 8]),
    r"published in bfloat16, the engine's LoRA layers hold torch.float32": lambda e: with_entry(e, 0, dtype="bfloat16"),
    "rank is 16, the engine's max_lora_rank 8": lambda e: replace(e, adapter={**(e.adapter or {}), "r": 16}),
    "the trainer publishes all weights, the engine was started with LoRA": lambda e: replace(e, adapter=None),
}


@pytest.mark.parametrize("text", MISFITS)
def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_serves_on(live: Live, text: str) -> None:
    with pytest.raises(WeightSyncError, match=text):
        live.run(live.generator.connect(MISFITS[text](live.trainer.endpoint)))
    live.run(live.sync())
    live.trainer.check(live.run(live.answers(1, 16))[0])
