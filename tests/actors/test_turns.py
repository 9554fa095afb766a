"""Laws of taking turns: whoever fails or is cancelled, nothing is left asleep, held, or waiting."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator

import pytest
import torch

from actors.generator import Generator, GeneratorConfig
from actors.turns import Clock, Turns
from actors.vllm_engine import Sampling
from apps.grpo.models import resolve_model
from forge.errors import DeadlineExceeded
from weightsync.config import WeightSyncConfig

WAIT_S = 60.0


async def moments(rng: random.Random, most: int = 4) -> None:
    """Lets others go first a few times."""
    for _ in range(rng.randrange(most + 1)):
        await asyncio.sleep(0)


class Devices:
    """What is computed on them just now, and the law about it."""

    def __init__(self) -> None:
        self.steps = self.flips = self.decoding = 0
        self.trained = 0

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        setattr(self, what, getattr(self, what) + 1)
        self.check()
        try:
            yield
        finally:
            self.check()
            setattr(self, what, getattr(self, what) - 1)

    def check(self) -> None:
        assert self.steps <= 1
        assert not (self.steps and (self.flips or self.decoding)), vars(self)


class Engine:
    """Decodes while it is awake, one step of all requests at a time; its verbs fail with probability `fails`."""

    def __init__(self, name: str, devices: Devices, rng: random.Random, fails: float = 0.0) -> None:
        self.name, self.fails = name, fails
        self._devices, self._rng = devices, rng
        self._awake, self._step = asyncio.Event(), asyncio.Lock()
        self._awake.set()

    @property
    def awake(self) -> bool:
        return self._awake.is_set()

    async def sleep(self) -> None:
        self._awake.clear()
        async with self._step:
            await moments(self._rng)
        if self._rng.random() < self.fails:
            raise OSError(f"{self.name} cannot sleep")

    async def wake(self) -> None:
        await moments(self._rng)
        self._awake.set()
        if self._rng.random() < self.fails:
            raise OSError(f"{self.name} woke badly")

    async def decode(self, tokens: int) -> None:
        while tokens:
            await self._awake.wait()
            async with self._step:
                if self._awake.is_set():
                    with self._devices.doing("decoding"):
                        await moments(self._rng, 2)
                    tokens -= 1


@pytest.mark.parametrize("seed", range(100))
def test_in_any_order_of_turns_failures_and_cancellations_nobody_overlaps_and_nothing_is_left(seed: int) -> None:
    asyncio.run(asyncio.wait_for(any_order(random.Random(seed)), WAIT_S))


async def any_order(rng: random.Random) -> None:
    turns, devices = Turns(WAIT_S), Devices()
    engines = [Engine(f"engine {i}", devices, rng, rng.choice([0.0, 0.3])) for i in range(rng.randrange(3))]
    for engine in engines:
        turns.add(engine)

    async def train() -> None:
        await moments(rng, 20)
        async with turns.training("a step"):
            with devices.doing("steps"):
                assert not any(engine.awake for engine in engines)
                await moments(rng)
                if rng.random() < 0.2:
                    raise OSError("a step failed")

    async def flip() -> None:
        await moments(rng, 20)
        async with turns.serving("a flip"):
            with devices.doing("flips"):
                await moments(rng)
                if rng.random() < 0.2:
                    raise OSError("a flip failed")

    requests = [asyncio.create_task(engine.decode(rng.randrange(1, 30))) for engine in engines for _ in range(3)]
    tasks = [asyncio.create_task(rng.choice([train, flip])()) for _ in range(20)]
    for task in rng.sample(tasks, rng.randrange(6)):
        await moments(rng, 10)
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [o for o in outcomes if o is not None and not isinstance(o, OSError | asyncio.CancelledError)], outcomes
    assert all(engine.awake for engine in engines)
    await asyncio.gather(*requests)  # each has all its tokens
    async with turns.serving("one more"):  # nobody holds a turn
        with pytest.raises(DeadlineExceeded):  # deadlines run
            await turns.clock.within(0.001, "nothing", asyncio.get_running_loop().create_future())


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_the_loops_of_a_run_never_wait_for_each_other_in_a_circle(seed: int, bound: int) -> None:
    """Requests wait for slots, slots for flips, flips and steps for turns, batches for requests."""
    assert asyncio.run(asyncio.wait_for(loops(random.Random(seed), bound, steps=12), WAIT_S)) == 12


async def loops(rng: random.Random, bound: int, steps: int) -> int:
    turns, devices, batch_size = Turns(WAIT_S), Devices(), 4
    engine = Engine("engine", devices, rng)
    turns.add(engine)
    slots, complete = asyncio.Semaphore(batch_size * (1 + bound)), asyncio.Semaphore(0)
    newest, published = 0, asyncio.Event()

    async def rollout() -> None:
        while True:
            await slots.acquire()
            await engine.decode(rng.randrange(1, 6))
            complete.release()

    async def weights() -> None:
        applied = 0
        while True:
            await published.wait()
            published.clear()
            version = newest
            await moments(rng, 8)
            async with turns.serving("a flip"):
                with devices.doing("flips"):
                    await moments(rng)
            for _ in range(batch_size * (version - applied)):
                slots.release()
            applied = version

    others = [asyncio.create_task(rollout()) for _ in range(8)] + [asyncio.create_task(weights())]
    for version in range(1, steps + 1):
        for _ in range(batch_size):
            await complete.acquire()
        async with turns.training("a step"):
            with devices.doing("steps"):
                await moments(rng)
        newest = version
        published.set()
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    return newest


def test_turns_are_given_in_the_order_in_which_they_are_asked_for() -> None:
    async def run() -> list[str]:
        turns, order, ready = Turns(WAIT_S), list[str](), asyncio.Event()

        async def take(name: str) -> None:
            async with turns.training(name) if name.startswith("step") else turns.serving(name):
                order.append(name)
                await ready.wait()

        names = ["step 1", "flip 1", "flip 2", "step 2", "flip 3"]
        tasks = [asyncio.create_task(take(name)) for name in names]
        await asyncio.sleep(0.01)
        assert order == ["step 1"]
        ready.set()
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(run()) == ["step 1", "flip 1", "flip 2", "step 2", "flip 3"]


def test_who_waits_too_long_for_a_turn_is_told_whose_it_is() -> None:
    async def run() -> None:
        turns = Turns(0.05)
        async with turns.serving("generator_0 to flip to version 3"):
            with pytest.raises(
                DeadlineExceeded, match=r"the turn of a step, in vain: it is that of generator_0 to flip"
            ):
                async with turns.training("a step"):
                    raise AssertionError("two turns at a time")
        async with turns.training("a step"):
            pass

    asyncio.run(run())


def test_what_a_failed_step_raises_is_told_together_with_an_engine_that_does_not_wake() -> None:
    class Deaf:
        name = "generator_0"

        async def sleep(self) -> None:
            pass

        async def wake(self) -> None:
            raise OSError("generator_0 is gone")

    async def run() -> None:
        turns = Turns(WAIT_S)
        turns.add(Deaf())
        with pytest.raises(ValueError, match="no loss") as raised:
            async with turns.training("a step"):
                raise ValueError("no loss")
        assert "generator_0 is gone" in str(raised.value.__notes__)
        with pytest.raises(OSError, match="is gone"):
            async with turns.training("a step"):
                pass

    asyncio.run(run())


def test_deadlines_stand_still_while_the_clock_is_stopped_and_go_on_afterwards() -> None:
    async def run() -> str:
        clock, loop = Clock(), asyncio.get_running_loop()
        waiting = asyncio.create_task(clock.within(0.2, "an answer", loop.create_future()))
        await asyncio.sleep(0)
        clock.stop()
        begun_later = asyncio.create_task(clock.within(0.2, "another answer", loop.create_future()))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        assert not begun_later.done()
        assert await clock.within(0.01, "a value", asyncio.sleep(0.1, "late")) == "late"
        clock.go_on()
        for task in (waiting, begun_later):
            with pytest.raises(DeadlineExceeded, match=r"waited 0.2 s for an(other)? answer, in vain"):
                await task
        return await clock.within(0.2, "a value", asyncio.sleep(0, "in time"))

    assert asyncio.run(run()) == "in time"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_engine_that_sleeps_leaves_the_gpu_and_its_requests_go_on_where_they_were() -> None:
    """Also the test that vLLM's sleep mode is there, and that the weights of before serve after it."""
    asyncio.run(asyncio.wait_for(sleep_on_a_gpu(), 280))


async def sleep_on_a_gpu() -> None:
    config = GeneratorConfig(max_model_len=512, max_new_tokens=400, kv_cache_bytes=4 << 30)
    sync, model = WeightSyncConfig(shadow=False), str(resolve_model("nano"))
    generator = Generator(config, model, "bfloat16", seed=0, stop_ids=[], sync=sync, sleep_mode=True)
    prompts = [[33, 50, 27, digit] for digit in range(7, 17)]

    async def greedy() -> list[list[int]]:
        engine = generator._engine
        requests = (engine.generate(p, Sampling(0.0), max_tokens=400, seed=0, stop_ids=[]) for p in prompts)
        return [completion.token_ids for completion in await asyncio.gather(*requests)]

    await generator.setup(prompts[0])
    try:
        whole, free = await greedy(), torch.cuda.mem_get_info()[0]
        interrupted = asyncio.ensure_future(greedy())
        await asyncio.sleep(0.2)
        await generator.sleep()
        assert torch.cuda.mem_get_info()[0] - free > 3 << 30  # the KV cache above all: nano's weights are small
        assert not interrupted.done()
        await generator.wake()
        assert await interrupted == whole
    finally:
        generator.shutdown()
