"""Laws of a real vLLM engine whose weights change while it generates: invariants a, c, f and g.

One engine for the module: starting it takes most of a minute.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actors.generator import Generator, GeneratorConfig
from actors.model import Policy, load_hf
from actors.vllm_engine import Completion, Sampling
from apps.grpo.models import resolve_model
from forge.errors import ConfigError, WeightSyncError
from weightsync.publisher import Publisher

PROMPT = [33, 50, 27, 7, 8, 9, 10, 20]
SAMPLERS = [Sampling(), Sampling(0.6, 0.9), Sampling(1.3, 1.0, 5), Sampling(0.8, 0.95, 20)]
MAX_LEN = 160


class Live:
    """A generator on an event loop of its own, a trainer-side model, and the publisher between them."""

    def __init__(self, model: str, *, enforce_eager: bool) -> None:
        self.model = model
        self.hf = load_hf(model, torch.float32).eval()
        self.disk = {name: p.detach().clone() for name, p in self.hf.named_parameters()}
        self.publisher = Publisher(self.hf.named_parameters(), torch.float32)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        config = GeneratorConfig(max_model_len=MAX_LEN, max_new_tokens=8, max_num_seqs=64, enforce_eager=enforce_eager)
        self.generator = Generator(config, self.model, "float32", seed=0, stop_ids=[])
        self.engine = self.generator._engine
        self.run(self.generator.setup(PROMPT))
        self.version = 0
        self.from_disk = self.run(self.complete(4, 32))
        self.run(self.generator.connect(self.publisher.endpoint))

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 240) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def perturb(self, seed: int) -> None:
        """The weights on disk plus noise: other log-probs, and spread wide enough for top-p to cut something."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.hf.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(self.disk[name] + 0.5 * noise * self.disk[name].std())

    def restore(self) -> None:
        with torch.no_grad():
            for name, parameter in self.hf.named_parameters():
                parameter.copy_(self.disk[name])

    async def sync(self) -> None:
        self.version += 1
        self.publisher.snapshot(self.version % 2)
        await self.generator.apply(self.version, self.version % 2)

    async def complete(
        self, count: int, length: int, sampling: Sampling = SAMPLERS[0], seed: int = 0
    ) -> list[Completion]:
        requests = (
            self.engine.generate([*PROMPT, 7 + i % 8], sampling, max_tokens=length, seed=seed + i, stop_ids=[])
            for i in range(count)
        )
        return list(await asyncio.gather(*requests))

    def expected(self, index: int, completion: Completion, sampling: Sampling = SAMPLERS[0]) -> torch.Tensor:
        """What the trainer says about the tokens of request `index`, under its weights of now."""
        tokens = torch.tensor([[*PROMPT, 7 + index % 8, *completion.token_ids]])
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, len(PROMPT) + 1 :] = True
        policy = Policy(
            self.hf,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            chunk_size=64,
        )
        with torch.no_grad():
            return policy(tokens, torch.arange(tokens.shape[1])[None], mask)[0]


ENGINES = [
    "tied",
    pytest.param("untied", marks=pytest.mark.soak),
    pytest.param("cuda graphs", marks=[pytest.mark.gpu, pytest.mark.soak]),
]


@pytest.fixture(scope="module", params=ENGINES)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model, on_gpu = str(resolve_model("nano")), request.param == "cuda graphs"
    if on_gpu and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "untied":
        model = untied(model, tmp_path_factory.mktemp("untied"))
    live = Live(model, enforce_eager=not on_gpu)
    yield live
    live.generator.shutdown()
    live.publisher.close()


def untied(model: str, folder: Path) -> str:
    """The same model with a head of its own, other than the embedding."""
    config = AutoConfig.from_pretrained(model)
    config.tie_word_embeddings = False
    hf: Any = AutoModelForCausalLM.from_pretrained(model, config=config)
    with torch.no_grad():
        hf.lm_head.weight.copy_(hf.get_input_embeddings().weight.roll(1, 1))
    hf.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def start_weights(live: Live) -> None:
    live.perturb(0)
    live.run(live.sync())


@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
def test_the_trainer_gives_every_sampled_token_the_probability_that_the_sampler_gave_it(
    live: Live, sampling: Sampling
) -> None:
    completions = live.run(live.complete(16, 24, sampling))
    for index, completion in enumerate(completions):
        recorded = torch.tensor(completion.logprobs)
        torch.testing.assert_close(live.expected(index, completion, sampling), recorded, atol=1e-4, rtol=0)


@pytest.mark.parametrize("forgotten", [Sampling(1.0, 0.9), Sampling(0.6, 1.0)], ids=["temperature", "top_p"])
def test_forgetting_temperature_or_top_p_would_be_noticed(live: Live, forgotten: Sampling) -> None:
    completions = live.run(live.complete(8, 24, Sampling(0.6, 0.9)))
    gaps = [(live.expected(i, c, forgotten) - torch.tensor(c.logprobs)).abs().mean() for i, c in enumerate(completions)]
    assert max(gaps) > 0.005


def test_after_a_sync_the_engine_serves_the_published_weights_and_its_labels_say_so(live: Live) -> None:
    before = live.run(live.complete(4, 24))
    live.perturb(1)
    live.run(live.sync())
    after = live.run(live.complete(4, 24))
    for index, completion in enumerate(after):
        torch.testing.assert_close(
            live.expected(index, completion), torch.tensor(completion.logprobs), atol=1e-4, rtol=0
        )
        assert set(completion.versions) == {live.version}
    assert [c.logprobs for c in before] != [c.logprobs for c in after]


def test_publishing_the_weights_on_disk_gives_the_log_probs_of_loading_them_bit_for_bit(live: Live) -> None:
    live.restore()
    live.run(live.sync())
    published = live.run(live.complete(4, 32))
    assert [c.token_ids for c in published] == [c.token_ids for c in live.from_disk]
    assert [c.logprobs for c in published] == [c.logprobs for c in live.from_disk]
    live.perturb(2)
    live.run(live.sync())
    assert [c.logprobs for c in live.run(live.complete(4, 32))] != [c.logprobs for c in live.from_disk]


@pytest.mark.parametrize("num_updates", [0, 1, 3])
def test_greedy_output_interrupted_by_updates_to_equal_weights_is_unchanged_and_keeps_its_budget(
    live: Live, num_updates: int
) -> None:
    greedy = Sampling(temperature=0.0)
    reference = live.run(live.complete(6, 140, greedy))

    async def interrupted() -> list[Completion]:
        running = asyncio.ensure_future(live.complete(6, 140, greedy))
        for _ in range(num_updates):
            await asyncio.sleep(0.02)
            await live.sync()
        assert not running.done(), "the requests ended before the updates: nothing was interrupted"
        return await running

    completions = live.run(interrupted())
    assert [c.token_ids for c in completions] == [c.token_ids for c in reference]
    assert all(len(c.token_ids) == 140 for c in completions)
    assert all(len(set(c.versions)) == num_updates + 1 for c in completions)


def test_tokens_around_an_update_carry_the_version_that_sampled_them(live: Live) -> None:
    async def updated() -> list[Completion]:
        running = asyncio.ensure_future(live.complete(8, 140))
        await asyncio.sleep(0.03)
        live.perturb(3)
        await live.sync()
        return await running

    completions = live.run(updated())
    new, gaps = live.version, []
    live.perturb(0)
    for index, completion in enumerate(completions):
        assert completion.versions == sorted(completion.versions)
        num_old = completion.versions.count(new - 1)
        assert 0 < num_old < 140, f"the update did not fall into request {index}: {num_old}"
        under_old = live.expected(index, completion)
        recorded = torch.tensor(completion.logprobs)
        torch.testing.assert_close(under_old[:num_old], recorded[:num_old], atol=1e-4, rtol=0)
        gaps.append(abs(float(under_old[num_old] - recorded[num_old])))
    # The very next token is the new version's already: no label is late. Chance may bring one pair together.
    assert statistics.median(gaps) > 1e-3, gaps


def test_a_publisher_whose_names_do_not_pair_up_is_refused_and_the_old_weights_go_on_serving(
    live: Live,
) -> None:
    before = live.run(live.complete(2, 16))
    parameters = list(live.hf.named_parameters())
    without_q = [(n, p) for n, p in parameters if "layers.1.self_attn.q_proj" not in n]
    with_extra = [*parameters, ("model.layers.0.mlp.extra.weight", torch.zeros(4))]
    for wrong, named in (
        (without_q, r"1 missing \(model\.layers\.1\.self_attn\.q_proj\.weight\)"),
        (with_extra, r"1 unknown .*extra"),
    ):
        publisher = Publisher(wrong, torch.float32)
        with pytest.raises(WeightSyncError, match=named):
            live.run(live.generator.connect(publisher.endpoint))
        publisher.close()
    assert live.run(live.complete(2, 16)) == before
    live.run(live.sync())


def test_a_version_that_fails_half_way_is_reported_and_the_old_one_goes_on_serving(live: Live) -> None:
    before = live.run(live.complete(2, 16))
    halved = [(n, p[: len(p) // 2] if "layers.1.mlp.down_proj" in n else p) for n, p in live.hf.named_parameters()]
    publisher = Publisher(halved, torch.float32)
    publisher.snapshot(0)
    live.run(live.generator.connect(publisher.endpoint))
    with pytest.raises(WeightSyncError, match=r"could not be staged, version \d+ goes on serving"):
        live.run(live.generator.apply(live.version + 1, 0))
    assert live.run(live.complete(2, 16)) == before
    live.run(live.generator.connect(live.publisher.endpoint))
    publisher.close()
    live.perturb(4)
    live.run(live.sync())
    completion = live.run(live.complete(1, 16))[0]
    torch.testing.assert_close(live.expected(0, completion), torch.tensor(completion.logprobs), atol=1e-4, rtol=0)


def test_an_abort_returns_what_was_sampled_and_leaves_the_engine_working(live: Live) -> None:
    async def aborted() -> list[Completion]:
        running = asyncio.ensure_future(live.generator.generate([PROMPT] * 3, [1, 2, 3], 140, "mine"))
        await asyncio.sleep(0.1)
        await live.generator.abort("mine")
        return await asyncio.wait_for(running, 20)

    completions = live.run(aborted())
    for completion in completions:
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.token_ids) < 140
        assert len(completion.logprobs) == len(completion.versions) == len(completion.token_ids)
    assert len(live.run(live.generator.generate([PROMPT], [1]))[0].token_ids) == 8


def test_an_abort_also_reaches_requests_that_are_still_on_their_way_to_the_engine(live: Live) -> None:
    async def aborted() -> list[Completion]:
        running = asyncio.ensure_future(live.generator.generate([PROMPT] * 80, list(range(80)), 140, "early"))
        await asyncio.sleep(0)
        await live.generator.abort("early")
        return await asyncio.wait_for(running, 20)

    completions = live.run(aborted())
    assert {c.finish_reason for c in completions} == {"abort"}
    assert all(len(c.token_ids) < 140 for c in completions)


def test_requests_that_wait_for_a_place_start_under_the_version_that_serves_then(live: Live) -> None:
    prompt = PROMPT * 5  # longer than a block of the prefix cache

    async def crowded() -> list[Completion]:
        synced = asyncio.Event()

        async def client(seed: int) -> list[Completion]:
            # One request after the other until the flip is over: more clients than places, so some always wait.
            done: list[Completion] = []
            while not synced.is_set():
                done += await live.generator.generate([prompt], [seed + len(done)], 60)
            return done

        clients = asyncio.gather(*(client(seed) for seed in range(0, 8000, 100)))
        await asyncio.sleep(0.1)
        live.perturb(5)
        await live.sync()
        synced.set()
        return [completion for done in await clients for completion in done]

    completions = live.run(crowded())
    late = [c for c in completions if set(c.versions) == {live.version}]
    assert late, "every request had a place before the update"
    for completion in late:
        tokens = torch.tensor([[*prompt, *completion.token_ids]])
        mask = torch.arange(tokens.shape[1])[None] >= len(prompt)
        with torch.no_grad():
            expected, _ = Policy(live.hf)(tokens, torch.arange(tokens.shape[1])[None], mask)
        torch.testing.assert_close(expected, torch.tensor(completion.logprobs), atol=1e-4, rtol=0)


def test_a_request_gives_the_same_tokens_alone_and_among_many(live: Live) -> None:
    crowd = live.run(live.complete(100, 20, seed=5))
    alone = live.run(live.complete(1, 20, seed=5))
    assert crowd[0].token_ids == alone[0].token_ids


def test_a_prompt_without_room_for_a_token_is_an_error_that_says_what_to_raise(live: Live) -> None:
    with pytest.raises(ConfigError, match=r"a prompt has 160 tokens, generator\.max_model_len is 160"):
        live.run(live.generator.generate([[7] * MAX_LEN], [0]))
