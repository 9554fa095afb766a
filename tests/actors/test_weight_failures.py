"""What goes wrong with an update on a real engine: nothing stays paused, the old weights stay whole, nobody lies.

One engine for the module, driven by the real WeightSync; trainer and generator are objects of this process, so that a
test can break what it wants to. The last test kills the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import psutil
import pytest
import torch

from actors.generator import Generator, GeneratorConfig
from actors.model import load_hf
from actors.vllm_engine import Completion, Sampling
from apps.grpo.models import resolve_model
from forge.errors import ForgeError, WeightSyncError
from weightsync.config import KvMode, WeightSyncConfig
from weightsync.layout import Box
from weightsync.offer import Endpoint, Offer
from weightsync.publisher import Publisher, combine
from weightsync.sync import Applied, WeightSync

PROMPT = [33, 50, 27, 7, 8, 9, 10, 20]
LONG_PROMPT = [7 + (5 * i) % 90 for i in range(280)]  # two blocks of the prefix cache and a bit
MAX_LEN = 400
GREEDY = Sampling(temperature=0.0)
KV_MODES: list[KvMode] = ["keep", "recompute", "drain", "abort"]


class LocalTrainer:
    """A source of weight sync without actors; `spoil` is done to every offer before it leaves."""

    def __init__(self, hf: Any, config: WeightSyncConfig, transport: str, folder: str) -> None:
        self.publisher = Publisher(
            hf.named_parameters(),
            torch.float32,
            config,
            transport=transport,
            model_type=hf.config.model_type,
            folder=folder,
        )
        self.spoil: list[Callable[[Offer], None]] = []
        self.send_errors: list[Exception] = []

    async def connect(self) -> Endpoint:
        return self.publisher.endpoint

    async def add_peer(self, peer: str, needed: Sequence[Mapping[str, Box]]) -> None:
        self.publisher.add_peer(peer, needed)

    async def remove_peer(self, peer: str) -> None:
        self.publisher.remove_peer(peer)

    async def snapshot(self, version: int, buffer: int) -> float:
        return self.publisher.snapshot(version, buffer)

    async def offer(self, version: int, buffer: int, base: int) -> Offer:
        share = await asyncio.to_thread(self.publisher.offer, version, buffer, base)
        offer = combine([share], self.publisher.endpoint, version, buffer, base)
        if self.spoil:
            self.spoil.pop(0)(offer)
        return offer

    async def send(self, peer: str, offer: Offer) -> None:
        if self.send_errors:
            raise self.send_errors.pop(0)
        await asyncio.to_thread(self.publisher.send, peer, offer)


class Live:
    """An engine on an event loop of its own, and the model of a trainer."""

    def __init__(self, folder: str) -> None:
        model = str(resolve_model("nano"))
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to break things inside the worker
        self.folder = folder
        self.hf: Any = load_hf(model, torch.float32).eval()
        self.disk = {name: p.detach().clone() for name, p in self.hf.named_parameters()}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        config = GeneratorConfig(max_model_len=MAX_LEN, max_new_tokens=8, max_num_seqs=16)
        self.generator = Generator(config, model, "float32", seed=0, stop_ids=[])
        self.engine = self.generator._engine
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        self.run(self.generator.setup(PROMPT))
        started = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
        self.engine_process = next(c for c in started if "EngineCore" in c.name())
        self.version = 0

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 240) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def perturb(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.hf.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(self.disk[name] + 0.5 * noise * self.disk[name].std())

    @contextlib.asynccontextmanager
    async def syncing(self, transport: str = "memory", kv: KvMode = "keep", **options: Any) -> AsyncIterator[Syncing]:
        options.setdefault("deadline_s", 30.0)
        config = WeightSyncConfig(**options)
        self.engine.kv_mode = kv
        self.generator._deadline_s = 0.9 * config.deadline_s
        trainer = LocalTrainer(self.hf, config, transport, self.folder)
        replica = LocalReplica(self.generator)
        sync = WeightSync(trainer, [replica], config)
        syncing = Syncing(self, trainer, replica, sync)
        await sync.connect()
        # The versions of this engine go on growing from one test to the next.
        syncing.loop = asyncio.create_task(sync.run(syncing.report))
        try:
            yield syncing
        finally:
            sync.close()
            with contextlib.suppress(ForgeError):
                await syncing.loop
            trainer.publisher.close()
            self.engine.kv_mode = "keep"

    async def ask(self, count: int, length: int, sampling: Sampling = GREEDY, seed: int = 0) -> list[Completion]:
        requests = (
            self.engine.generate([*PROMPT, 7 + i % 8], sampling, max_tokens=length, seed=seed + i, stop_ids=[])
            for i in range(count)
        )
        return list(await asyncio.gather(*requests))

    def check(self, index: int, completion: Completion) -> None:
        """All tokens are the trainer's own greedy choice under its weights of now."""
        tokens = torch.tensor([[*PROMPT, 7 + index % 8, *completion.token_ids]])
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, len(PROMPT) + 1 :] = True
        with torch.no_grad():
            logits = self.hf(tokens).logits[0, len(PROMPT) : -1]
        assert logits.argmax(-1).tolist() == completion.token_ids
        assert set(completion.versions) == {self.version}


class LocalReplica:
    """A sink of weight sync without actors."""

    name = "generator_0"

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.stage, self.flip = generator.stage, generator.flip

    async def connect(self, endpoint: Endpoint) -> list[dict[str, Box]]:
        return await self._generator.connect(endpoint, self.name)


class Syncing:
    """A WeightSync whose loop runs."""

    loop: asyncio.Task[None]

    def __init__(self, live: Live, trainer: LocalTrainer, replica: LocalReplica, sync: WeightSync) -> None:
        self._live, self.trainer, self.replica, self.sync = live, trainer, replica, sync
        self.applied: list[int] = []
        self._news = asyncio.Event()

    async def report(self, applied: Applied) -> None:
        self.applied.append(applied.version)
        self._live.version = applied.version
        self._news.set()

    async def publish(self) -> int:
        version = max(self._live.version, self.sync.published_version) + 1
        await self.sync.publish(version)
        return version

    async def until(self, version: int) -> None:
        while version not in self.applied:
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            await asyncio.wait([news, self.loop], return_when="FIRST_COMPLETED")
            news.cancel()
            if self.loop.done():
                await self.loop

    async def update(self) -> None:
        await self.until(await self.publish())


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    live = Live(str(tmp_path_factory.mktemp("weights")))
    yield live
    live.generator.shutdown()


def flip_a_bit(trainer: LocalTrainer) -> Callable[[Offer], None]:
    def spoil(offer: Offer) -> None:
        trainer.publisher._snapshots.data(offer.buffer)[1000] ^= 4

    return spoil


@pytest.mark.parametrize("transport", ["memory", "collective"])
def test_what_arrives_damaged_is_never_served_and_is_sent_again(live: Live, transport: str) -> None:
    async def scenario() -> None:
        async with live.syncing(transport, max_failures=2) as syncing:
            await syncing.update()
            before = await live.ask(2, 12)
            live.perturb(1)
            syncing.trainer.spoil = [flip_a_bit(syncing.trainer)]
            version = await syncing.publish()
            await syncing.until(version)
            assert syncing.sync.failures == 0
            assert await live.ask(2, 12) != before

    live.run(scenario())
    live.check(0, live.run(live.ask(1, 12))[0])


def test_a_failed_update_ends_the_loop_loudly_is_not_reported_and_leaves_the_old_weights_whole(live: Live) -> None:
    async def scenario() -> None:
        before = await live.ask(4, 12)
        async with live.syncing(max_failures=1) as syncing:
            live.perturb(2)
            syncing.trainer.spoil = [flip_a_bit(syncing.trainer)]
            with pytest.raises(WeightSyncError, match=r"version \d+ could not be staged, version \d+ goes on serving"):
                await syncing.update()
            assert syncing.applied == []
        assert await live.ask(4, 12) == before

    live.run(scenario())


def test_a_sender_that_raises_half_way_costs_one_try(live: Live) -> None:
    async def scenario() -> None:
        async with live.syncing("collective", max_failures=3, deadline_s=5.0) as syncing:
            await syncing.update()
            live.perturb(3)
            syncing.trainer.send_errors = [WeightSyncError("the link went down")]
            await syncing.update()

    live.run(scenario())
    live.check(0, live.run(live.ask(1, 12))[0])


@pytest.mark.parametrize("transport", ["memory", "collective"])
def test_a_stopped_receiver_holds_up_no_publish_fails_by_name_and_recovers(live: Live, transport: str) -> None:
    async def scenario() -> None:
        async with live.syncing(transport, deadline_s=3.0, max_failures=1) as syncing:
            await syncing.update()
            running = asyncio.ensure_future(live.ask(2, 300))
            live.engine_process.send_signal(signal.SIGSTOP)
            try:
                stalls = []
                for seed in range(20):
                    live.perturb(seed)
                    await syncing.publish()
                    stalls.append(syncing.sync.skipped)
                with pytest.raises(WeightSyncError, match=r"waited .* s for generator_0 to stage version"):
                    await syncing.loop
            finally:
                live.engine_process.send_signal(signal.SIGCONT)
            assert syncing.sync.skipped >= 18, stalls
            assert len(syncing.applied) == 1
            assert [len(c.token_ids) for c in await running] == [300, 300]
        async with live.syncing(transport) as syncing:
            live.perturb(4)
            await syncing.update()

    live.run(scenario())
    live.check(0, live.run(live.ask(1, 12))[0])


def no_memory(worker: Any) -> None:
    """Runs in the worker: the next images cannot be allocated."""
    from weightsync.transports import collective

    def refuse(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
        raise MemoryError(f"cannot allocate {nbytes} bytes")

    collective.make_image = refuse


def memory_again(worker: Any) -> None:
    from weightsync.transports import collective, context

    collective.make_image = context.make_image


def test_a_receiver_without_memory_for_the_version_says_so_and_serves_on(live: Live) -> None:
    async def scenario() -> None:
        before = await live.ask(2, 12)
        async with live.syncing("collective", max_failures=1, deadline_s=5.0) as syncing:
            await live.engine._engine.collective_rpc(no_memory)
            live.perturb(5)
            with pytest.raises(WeightSyncError, match="MemoryError: cannot allocate"):
                await syncing.update()
        await live.engine._engine.collective_rpc(memory_again)
        assert await live.ask(2, 12) == before
        async with live.syncing("collective") as syncing:
            await syncing.update()

    live.run(scenario())
    live.check(0, live.run(live.ask(1, 12))[0])


@pytest.mark.parametrize("kv", ["drain", "abort", "recompute"])
def test_a_flip_that_takes_too_long_leaves_nothing_paused(live: Live, kv: KvMode) -> None:
    async def scenario() -> None:
        async with live.syncing(kv=kv, deadline_s=2.0, max_failures=1) as syncing:
            running = asyncio.ensure_future(live.ask(4, 380))
            await asyncio.sleep(0.05)
            live.perturb(6)
            if kv == "drain":
                live.generator._deadline_s = 0.2  # the requests take longer
            else:
                live.engine_process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(WeightSyncError):
                    await syncing.update()
            finally:
                live.engine_process.send_signal(signal.SIGCONT)
            assert syncing.applied == []
            assert [len(c.token_ids) for c in await running] == [380] * 4
        async with live.syncing(kv=kv) as syncing:
            await syncing.update()

    live.run(scenario())
    live.check(0, live.run(live.ask(1, 12))[0])


LATE_S = 5.0


def late_flips(worker: Any) -> None:
    """Runs in the worker: a flip takes longer than the test below waits for one."""
    from weightsync.worker import receiver

    flip = receiver.WeightReceiver.forge_flip

    def late(self: Any, version: int) -> Any:
        time.sleep(LATE_S)
        receiver.WeightReceiver.forge_flip = flip  # type: ignore[method-assign]
        return flip(self, version)

    receiver.WeightReceiver.forge_flip = late  # type: ignore[method-assign]


def test_requests_around_a_flip_that_lands_late_read_nothing_that_older_weights_left_in_the_cache(live: Live) -> None:
    async def long_one() -> Completion:
        return await live.engine.generate(LONG_PROMPT, GREEDY, max_tokens=12, seed=0, stop_ids=[])

    async def scenario() -> tuple[Completion, list[Completion]]:
        async with live.syncing() as syncing:
            await syncing.update()
            old = await long_one()
        live.perturb(7)
        await live.engine._engine.collective_rpc(late_flips)
        async with live.syncing(max_failures=1, deadline_s=0.6 * LATE_S) as syncing:
            with pytest.raises(WeightSyncError, match="to flip to version"):
                await syncing.update()
            live.version = syncing.sync.published_version
            before = asyncio.ensure_future(long_one())  # the engine is still in the flip
            await asyncio.sleep(0.1)
            assert not before.done()
            return old, [await before, await long_one(), await long_one()]

    def check(completion: Completion) -> None:
        tokens = torch.tensor([[*LONG_PROMPT, *completion.token_ids]])
        with torch.no_grad():
            logits = live.hf(tokens).logits[0, len(LONG_PROMPT) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, tokens[0, len(LONG_PROMPT) :, None])[:, 0]
        torch.testing.assert_close(expected, torch.tensor(completion.logprobs), atol=1e-4, rtol=0)
        assert set(completion.versions) == {live.version}

    old, around = live.run(scenario())
    for completion in around:
        check(completion)
    assert set(old.versions) == {live.version - 1}

    async def next_one() -> Completion:
        async with live.syncing() as syncing:
            live.perturb(8)
            await syncing.update()
        return await long_one()

    check(live.run(next_one()))


def test_a_flip_that_lands_after_its_version_was_staged_again_is_no_second_failure(live: Live) -> None:
    async def scenario() -> None:
        async with live.syncing(max_failures=2, deadline_s=0.8 * LATE_S) as syncing:
            await syncing.update()
            live.perturb(9)
            await live.engine._engine.collective_rpc(late_flips)
            await syncing.update()
            assert syncing.sync.failures == 0

    live.run(scenario())
    live.check(0, live.run(live.ask(1, 12))[0])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_in_any_order_of_requests_aborts_updates_and_failures_everything_goes_on(live: Live, seed: int) -> None:
    rng = random.Random(seed)

    async def scenario() -> None:
        calls: dict[str, tuple[asyncio.Future[list[Completion]], int]] = {}
        aborts: list[asyncio.Future[None]] = []
        transport = rng.choice(["memory", "collective"])
        async with live.syncing(transport, deadline_s=20.0, max_failures=1000) as syncing:
            for step in range(24):
                match rng.choice(
                    ["request", "request", "abort", "update", "publish", "damage", "send error", "cancel", "kv"]
                ):
                    case "request":
                        name, length = f"call{step}", rng.randrange(1, 200)
                        asked = live.generator.generate([[*PROMPT, 7 + step % 8]] * 2, [step, step + 1], length, name)
                        calls[name] = asyncio.ensure_future(asked), length
                    case "abort" if calls:
                        aborts.append(asyncio.ensure_future(live.generator.abort(rng.choice(list(calls)))))
                    case "cancel" if calls:
                        calls.pop(rng.choice(list(calls)))[0].cancel()
                    case "update":
                        live.perturb(rng.randrange(1000))
                        await syncing.update()
                    case "publish":
                        live.perturb(rng.randrange(1000))
                        await syncing.publish()
                    case "damage":
                        syncing.trainer.spoil = [flip_a_bit(syncing.trainer)]
                    case "send error":
                        syncing.trainer.send_errors = [WeightSyncError("now and then")]
                    case "kv":
                        live.engine.kv_mode = rng.choice(KV_MODES)
                await asyncio.sleep(rng.random() * 0.02)
            for call, length in calls.values():
                for completion in await call:
                    tokens = len(completion.token_ids)
                    assert tokens == length or (completion.finish_reason == "abort" and tokens < length)
                    assert len(completion.logprobs) == len(completion.versions) == tokens
                    assert completion.versions == sorted(completion.versions)
            await asyncio.gather(*aborts)
            live.perturb(seed)
            syncing.trainer.spoil, syncing.trainer.send_errors = [], []
            await syncing.update()
            assert syncing.applied == sorted(set(syncing.applied))
        assert not await live.engine._engine.is_paused()
        live.check(0, (await live.ask(1, 12))[0])

    live.run(scenario())


def test_a_killed_engine_fails_the_update_and_every_request_within_seconds(live: Live) -> None:
    async def scenario() -> None:
        async with live.syncing(deadline_s=60.0) as syncing:
            running = asyncio.ensure_future(live.ask(2, 380))
            await asyncio.sleep(0.05)
            os.kill(live.engine_process.pid, signal.SIGKILL)
            await syncing.publish()
            with pytest.raises(Exception, match=r"[Ee]ngine"):
                await asyncio.wait_for(asyncio.shield(syncing.loop), 20)
            assert syncing.applied == []
            with pytest.raises(Exception, match=r"[Ee]ngine"):
                await asyncio.wait_for(running, 20)
            syncing.loop = asyncio.create_task(asyncio.sleep(0))  # the error has been looked at

    live.run(scenario())
