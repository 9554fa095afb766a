"""Unfinished episodes on a real vLLM engine: told as they grow, gone on with by another engine, cut when not needed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import small_models
import torch

from actors.generator import Generator, GeneratorConfig, Progress
from actors.vllm_engine import Completion, Sampling

PROMPT = [33, 50, 27, 7, 8, 9, 10, 20]
LENGTH = 96
GREEDY = Sampling(temperature=0.0)


class Live:
    """A generator on an event loop of its own."""

    def __init__(self, model: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        config = GeneratorConfig(max_model_len=256, max_new_tokens=LENGTH, max_num_seqs=16)
        self.generator = Generator(config, model, "float32", seed=0, stop_ids=[])
        self.engine = self.generator._engine
        self.run(self.generator.setup(PROMPT))

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.start(coroutine).result(280)

    async def greedy(self, length: int, begun: Completion | None = None, stop_ids: tuple[int, ...] = ()) -> Completion:
        return await self.engine.generate(PROMPT, GREEDY, max_tokens=length, seed=0, stop_ids=stop_ids, begun=begun)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    live = Live(small_models.make("nano", tmp_path_factory.mktemp("nano")))
    yield live
    live.generator.shutdown()


def test_what_is_told_while_a_call_runs_adds_up_to_its_completions(live: Live) -> None:
    async def told_and_returned() -> tuple[list[Progress], list[Completion]]:
        call = asyncio.ensure_future(live.generator.generate([PROMPT] * 4, [1, 2, 3, 4], request_id="g"))
        parts: list[Progress] = []
        relabelled = False
        while not call.done():
            parts += live.generator.progress()
            if parts and not relabelled:
                relabelled = True
                await live.engine._engine.update_weight_version("7")
            await asyncio.sleep(0.01)
        assert live.generator.progress() == [], "a call that is over is told no more"
        await live.engine._engine.update_weight_version("0")
        return parts, await call

    parts, completions = live.run(told_and_returned())
    assert len(parts) > 8, "it was told once at the end"
    assert any(0 in part.tokens.versions for part in parts)
    assert any(7 in part.tokens.versions for part in parts)
    for place, completion in enumerate(completions):
        whole = Completion([], [], [], "abort")
        for part in (p for p in parts if p.place == place):
            assert part.request_id == "g"
            assert part.offset == len(whole.token_ids)
            whole.extend(part.tokens)
        count = len(whole.token_ids)
        assert count > LENGTH // 2
        assert whole.token_ids == completion.token_ids[:count]
        assert whole.logprobs == completion.logprobs[:count]
        assert whole.versions == completion.versions[:count]


def test_supports_are_told_with_the_tokens_that_were_sampled_from_them(live: Live) -> None:
    sampling = Sampling(1.0, 0.9, 0, 8)

    async def told_and_returned() -> tuple[list[Completion], Completion]:
        request = live.engine.generate(PROMPT, sampling, max_tokens=LENGTH, seed=5, stop_ids=(), request_id="r")
        call, parts, told = asyncio.ensure_future(request), list[Completion](), 0
        while not call.done():
            if (part := live.engine.sampled({"r": told}).get("r")) and part.token_ids:
                parts.append(part)
                told += len(part.token_ids)
            await asyncio.sleep(0.01)
        return parts, await call

    parts, completion = live.run(told_and_returned())
    assert len(parts) > 4
    whole = Completion([], [], [], "abort")
    for part in parts:
        whole.extend(part)
    count = len(whole.token_ids)
    assert whole.token_ids == completion.token_ids[:count]
    assert whole.logprobs == completion.logprobs[:count]
    assert whole.kept is not None
    assert completion.kept is not None
    assert completion.kept.shape == (LENGTH, 8)
    assert torch.equal(whole.kept, completion.kept[:count])
    sampled = torch.tensor(completion.token_ids)[:, None]
    recorded = (completion.kept >= 0).any(dim=-1)
    assert bool(recorded.any())
    assert torch.equal((completion.kept == sampled).any(dim=-1), recorded)

    # Another engine goes on: what it was given keeps its supports, as far as they fit, and has none where it had none.
    for begun, expected in ((parts[0], parts[0].kept), (Completion([9] * 3, [-1.0] * 3, [0] * 3, "abort"), None)):
        keeping = live.engine.generate(PROMPT, sampling, max_tokens=40, seed=5, stop_ids=(), begun=begun)
        done, n = live.run(keeping), len(begun.token_ids)
        assert done.kept.shape == (len(done.token_ids), 8)
        assert torch.equal(done.kept[:n], torch.full((n, 8), -1).int() if expected is None else expected)
    without = live.engine.generate(PROMPT, Sampling(), max_tokens=40, seed=5, stop_ids=(), begun=parts[0])
    assert live.run(without).kept is None


def test_a_completion_that_ended_while_others_run_is_told_once_with_its_end(live: Live) -> None:
    async def told() -> list[Progress]:
        done = Completion([9] * (LENGTH - 4), [-1.0] * (LENGTH - 4), [0] * (LENGTH - 4), "abort")
        call = asyncio.ensure_future(live.generator.generate([PROMPT] * 2, [1, 2], request_id="g", begun={1: done}))
        parts: list[Progress] = []
        while not call.done():
            parts += live.generator.progress()
            await asyncio.sleep(0.01)
        return parts

    parts = [part for part in live.run(told()) if part.place == 1]
    assert parts[0].offset == LENGTH - 4, "what had begun before was told again"
    assert [part.finish for part in parts] == [""] * (len(parts) - 1) + ["length"]
    assert sum(len(part.tokens.token_ids) for part in parts) == 4


@pytest.mark.parametrize("done", [1, 40, LENGTH - 1])
def test_another_engine_goes_on_where_one_was_interrupted(live: Live, done: int) -> None:
    whole = live.run(live.greedy(LENGTH))
    begun = Completion(whole.token_ids[:done], whole.logprobs[:done], [3] * done, "abort")
    resumed = live.run(live.greedy(LENGTH, begun))
    assert resumed.token_ids == whole.token_ids
    torch.testing.assert_close(torch.tensor(resumed.logprobs), torch.tensor(whole.logprobs), atol=1e-4, rtol=0)
    assert resumed.versions == [3] * done + [0] * (LENGTH - done)
    assert resumed.finish_reason == "length"
    assert begun.token_ids == whole.token_ids[:done], "the caller's own was changed"


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_completion_that_had_ended_is_not_gone_on_with(live: Live, finish: str) -> None:
    begun = Completion([5] * 8, [-1.0] * 8, [0] * 8, finish)
    assert live.run(live.greedy(8 if finish == "length" else LENGTH, begun)) == begun


def test_the_first_to_end_are_whole_and_the_others_are_cut(live: Live) -> None:
    begun = {place: Completion([9] * 80, [-1.0] * 80, [0] * 80, "abort") for place in (1, 3)}
    seeds = [1, 2, 3, 4]
    completions = live.run(live.generator.generate([PROMPT] * 4, seeds, begun=begun, wanted=2))
    assert [c.finish_reason for c in completions] == ["cut", "length", "cut", "length"]
    assert [len(c.token_ids) == LENGTH for c in completions] == [False, True, False, True]
    assert all(len(c.versions) == len(c.logprobs) == len(c.token_ids) for c in completions)
    assert live.engine._running == {}, "a completion that was cut goes on in the engine"
    assert live.engine.sampled() == {}


def test_of_those_that_end_at_one_moment_no_more_are_whole_than_wanted(live: Live) -> None:
    completions = live.run(live.generator.generate([PROMPT] * 5, [1, 2, 3, 4, 5], 8, wanted=3))
    assert sum(c.finish_reason == "cut" for c in completions) == 2
    assert sum(c.finish_reason == "length" for c in completions) == 3
