"""Laws of a real vLLM engine whose weights change while it generates: invariants a, c, f and g.

One engine for the module: starting it takes most of a minute.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import statistics
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import small_models
import torch

from actors.generator import Generator, GeneratorConfig
from actors.model import Policy, load_hf
from actors.vllm_engine import Completion, Sampling
from forge.errors import ConfigError, WeightSyncError
from weightsync.config import KvMode, WeightSyncConfig
from weightsync.offer import Offer
from weightsync.publisher import Publisher, combine

PROMPT = [33, 50, 27, 7, 8, 9, 10, 20]
SAMPLERS = [Sampling(), Sampling(0.6, 0.9), Sampling(1.3, 1.0, 5), Sampling(0.8, 0.95, 20)]
KEEPING = [Sampling(0.6, 0.9, 0, 2), Sampling(1.3, 1.0, 5, 5), Sampling(0.8, 0.95, 20, 4)]
GREEDY = Sampling(temperature=0.0)
KV_MODES = get_args(KvMode)
MAX_LEN = 512
LONG = 400
"""Tokens of requests that updates interrupt: decoding them takes many times as long as an update."""
PEER = "generator"


class Live:
    """A generator on an event loop of its own, a trainer-side model, and the publisher between them."""

    def __init__(self, model: str, *, enforce_eager: bool, shadow: bool, keep_routes: bool = False) -> None:
        self.model = model
        self.sharpness = 1.0
        """What makes small supports of top-p on this model: a factor of temperatures, below 1 where nothing was
        trained."""
        self.hf = load_hf(model, torch.float32).eval()
        self.disk = {name: p.detach().clone() for name, p in self.hf.named_parameters()}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        config = GeneratorConfig(
            max_model_len=MAX_LEN,
            max_new_tokens=8,
            max_num_seqs=64,
            enforce_eager=enforce_eager,
            keep_routes=keep_routes,
        )
        sync = WeightSyncConfig(shadow=shadow)
        self.generator = Generator(config, self.model, "float32", seed=0, stop_ids=[], sync=sync)
        self.engine = self.generator._engine
        self.run(self.generator.setup(PROMPT))
        self.version, self.held = 0, -1
        self.from_disk = self.run(self.complete(4, 32))
        self.publisher = self.connect()

    def connect(self, transport: str = "memory", folder: str = "", **options: Any) -> Publisher:
        """A new publisher of the same weights, which the engine receives from now on."""
        self.held = -1
        self.publisher = Publisher(
            self.hf.named_parameters(),
            torch.float32,
            WeightSyncConfig(**options),
            transport=transport,
            model_type=self.hf.config.model_type,
            folder=folder,
        )
        self.publisher.add_peer(PEER, self.run(self.generator.connect(self.publisher.endpoint, PEER)))
        return self.publisher

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 240) -> Any:
        return self.start(coroutine).result(timeout)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

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

    def touch(self, seed: int) -> None:
        """Changes one parameter, a few dozen numbers, and with it what the model says."""
        generator = torch.Generator().manual_seed(seed)
        norm = self.hf.base_model.norm.weight
        with torch.no_grad():
            norm.mul_(1 + torch.rand(norm.shape, generator=generator))

    def offer(self) -> Offer:
        """The weights of now as the next version, as the controller would put it together."""
        self.version += 1
        version, buffer = self.version, self.version % 2
        self.publisher.snapshot(version, buffer)
        share = self.publisher.offer(version, buffer, self.held)
        offer = combine([share], self.publisher.endpoint, version, buffer, self.held)
        return replace(offer, where=self.publisher.prepare(offer))

    async def stage(self, offer: Offer) -> None:
        self.held = -1
        send = asyncio.to_thread(self.publisher.send, PEER, offer)
        await asyncio.gather(self.generator.stage(offer), send)
        self.held = offer.version

    async def sync(self) -> Offer:
        offer = self.offer()
        await self.stage(offer)
        await self.generator.flip(offer.version)
        return offer

    async def steps(self, count: int) -> None:
        """Returns after `count` more tokens of the longest request that runs, once one has any; or when none runs."""
        async with asyncio.timeout(120):
            await self.ask()
            while self.engine._running and not self.longest:
                await self.ask()
            begun = self.longest
            while self.engine._running and self.longest < begun + count:
                await self.ask()

    @property
    def longest(self) -> int:
        """Tokens that the longest running request has."""
        return max((len(c.token_ids) for c in self.engine.sampled().values()), default=0)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.ask()

    async def ask(self) -> None:
        """One call of the engine, which it answers between two decode steps."""
        await self.engine._engine.collective_rpc("check_health")

    async def complete(
        self, count: int, length: int, sampling: Sampling = SAMPLERS[0], seed: int = 0
    ) -> list[Completion]:
        requests = (
            self.engine.generate([*PROMPT, 7 + i % 8], sampling, max_tokens=length, seed=seed + i, stop_ids=[])
            for i in range(count)
        )
        return list(await asyncio.gather(*requests))

    def expected(
        self, index: int, completion: Completion, sampling: Sampling = SAMPLERS[0], *, anew: bool = False
    ) -> torch.Tensor:
        """What the trainer says about the tokens of request `index`, under its weights of now.

        Over the supports that were recorded, if any were; `anew`: over what these weights would keep.
        """
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
            return policy(tokens, torch.arange(tokens.shape[1])[None], mask, None if anew else completion.kept)[0]

    def over_kept(self, index: int, completion: Completion, sampling: Sampling) -> torch.Tensor:
        """The same from all logits: a softmax over the recorded tokens, where there are any."""
        tokens = torch.tensor([[*PROMPT, 7 + index % 8, *completion.token_ids]])
        with torch.no_grad():
            scores = self.hf(input_ids=tokens).logits[0, len(PROMPT) : -1] / sampling.temperature
        assert completion.kept is not None
        rows = zip(scores, completion.token_ids, completion.kept, strict=True)
        return torch.stack([row[token] - row[k[k >= 0].long()].logsumexp(0) for row, token, k in rows if k[0] >= 0])

    def check(self, completions: Sequence[Completion], sampling: Sampling = SAMPLERS[0]) -> None:
        """Every token was sampled with the probability that the trainer's weights of now give it, and routed so."""
        for index, completion in enumerate(completions):
            recorded = torch.tensor(completion.logprobs)
            torch.testing.assert_close(self.expected(index, completion, sampling), recorded, atol=1e-4, rtol=0)
            if completion.routes is not None:
                tokens = [*PROMPT, 7 + index % 8, *completion.token_ids]
                assert torch.equal(
                    completion.routes.long().sort().values, small_models.chosen_experts(self.hf, tokens)[:-1]
                )


def numbers(completions: Sequence[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(c.token_ids, c.logprobs) for c in completions]


def versions(completions: Sequence[Completion]) -> set[int]:
    return {version for completion in completions for version in completion.versions}


ENGINES = [
    "tied",
    pytest.param("untied", marks=pytest.mark.soak),
    pytest.param("experts", marks=pytest.mark.soak),
    pytest.param("no shadow", marks=pytest.mark.soak),
    pytest.param("cuda graphs", marks=[pytest.mark.gpu, pytest.mark.soak]),
]


@pytest.fixture(scope="module", params=ENGINES)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    on_gpu = request.param == "cuda graphs"
    if on_gpu and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    kind = request.param if request.param in ("untied", "experts") else "nano"
    model = small_models.make(kind, tmp_path_factory.mktemp(kind))
    live = Live(model, enforce_eager=not on_gpu, shadow=request.param != "no shadow", keep_routes=kind == "experts")
    live.sharpness = 1.0 if kind == "nano" else 0.25
    assert bool(live.engine.why_no_shadow) == (request.param == "no shadow"), live.engine.why_no_shadow
    yield live
    live.generator.shutdown()
    live.publisher.close()


@pytest.fixture(autouse=True)
def start_weights(live: Live) -> None:
    live.engine.kv_mode = "keep"
    live.perturb(0)
    live.run(live.sync())


@pytest.fixture(scope="module")
def greedy(live: Live) -> list[Completion]:
    """What the weights of seed 0 say when nothing interrupts them."""
    live.perturb(0)
    live.run(live.sync())
    completions: list[Completion] = live.run(live.complete(6, LONG, GREEDY))
    return completions


@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
def test_the_trainer_gives_every_sampled_token_the_probability_that_the_sampler_gave_it(
    live: Live, sampling: Sampling
) -> None:
    live.check(live.run(live.complete(16, 24, sampling)), sampling)


@pytest.mark.parametrize("sampling", KEEPING, ids=str)
def test_over_recorded_supports_the_ratio_is_one_at_once_and_that_of_one_support_after_an_update(
    live: Live, sampling: Sampling
) -> None:
    sampling = replace(sampling, temperature=sampling.temperature * live.sharpness)
    completions = live.run(live.complete(16, 24, sampling))
    kept = torch.cat([c.kept for c in completions])
    recorded = (kept >= 0).any(dim=-1)
    assert kept.shape == (16 * 24, sampling.keep)
    assert bool(recorded.all()) == (sampling.top_p == 1.0), "some supports of top-p are larger than what is recorded"
    assert float(recorded.float().mean()) > 0.5
    assert int((kept >= 0).sum(dim=-1).max()) > 1
    live.check(completions, sampling)
    unrecorded = [replace(c, kept=None) for c in completions]
    live.check(unrecorded, sampling)  # at staleness 0 what is computed anew is the same

    live.perturb(1)
    now = torch.cat([live.expected(i, c, sampling) for i, c in enumerate(completions)])
    anew = torch.cat([live.expected(i, c, sampling, anew=True) for i, c in enumerate(completions)])
    assert bool(now.isfinite().all())
    torch.testing.assert_close(now[~recorded], anew[~recorded])
    assert float(((now - anew).abs() > 0.01)[recorded].float().mean()) > 0.05, "the new weights keep the same tokens"
    for index, completion in enumerate(completions):
        torch.testing.assert_close(
            live.expected(index, completion, sampling)[(completion.kept >= 0).any(dim=-1)],
            live.over_kept(index, completion, sampling),
            atol=1e-4,
            rtol=0,
        )


@pytest.mark.parametrize("forgotten", [Sampling(1.0, 0.9), Sampling(0.6, 1.0)], ids=["temperature", "top_p"])
def test_forgetting_temperature_or_top_p_would_be_noticed(live: Live, forgotten: Sampling) -> None:
    completions = live.run(live.complete(8, 24, Sampling(0.6, 0.9)))
    gaps = [(live.expected(i, c, forgotten) - torch.tensor(c.logprobs)).abs().mean() for i, c in enumerate(completions)]
    assert max(gaps) > 0.005


def test_after_a_sync_the_engine_serves_the_published_weights_and_its_labels_say_so(live: Live) -> None:
    old = live.run(live.complete(4, 24))
    live.perturb(1)
    live.run(live.sync())
    new = live.run(live.complete(4, 24))
    live.check(new)
    assert versions(new) == {live.version}
    assert numbers(old) != numbers(new)


def test_publishing_the_weights_on_disk_gives_the_log_probs_of_loading_them_bit_for_bit(live: Live) -> None:
    live.restore()
    live.run(live.sync())
    assert numbers(live.run(live.complete(4, 32))) == numbers(live.from_disk)
    live.perturb(2)
    live.run(live.sync())
    assert numbers(live.run(live.complete(4, 32))) != numbers(live.from_disk)


def test_no_flip_leaves_a_trace_in_the_ones_after_it(live: Live) -> None:
    for seed in range(10, 14):
        live.perturb(seed)
        live.run(live.sync())
        live.check(live.run(live.complete(4, 16)))
        for _ in range(seed % 3):  # 1, 2, 0, 1: each of the two models has been live and shadow
            live.restore()
            live.run(live.sync())
            assert numbers(live.run(live.complete(4, 32))) == numbers(live.from_disk)


@pytest.mark.parametrize(
    ("transport", "delta"),
    [("memory", False), ("collective", False), ("collective", True), ("file", False), ("file", True)],
)
def test_by_every_transport_the_engine_gets_the_published_weights_whole_or_as_a_delta(
    live: Live, transport: str, delta: bool, tmp_path: Path
) -> None:
    def check(kind: str) -> None:
        assert live.run(live.sync()).kind == kind
        completions = live.run(live.complete(4, 16))
        live.check(completions)
        assert versions(completions) == {live.version}

    memory = live.publisher
    publisher = live.connect(transport, str(tmp_path), delta=delta, deadline_s=60)
    small = "delta" if delta else "full"
    try:
        live.perturb(1)
        check("full")
        for seed in (1, 2):
            live.touch(seed)
            check(small)
        live.restore()
        check("full")
        assert numbers(live.run(live.complete(4, 32))) == numbers(live.from_disk)
        check(small)  # nothing has changed
        assert numbers(live.run(live.complete(4, 32))) == numbers(live.from_disk)
    finally:
        live.connect()
        for one in (memory, publisher):
            one.close()


@pytest.mark.parametrize(
    ("mode", "num_updates"), [("keep", 0), *((mode, count) for mode in KV_MODES for count in (1, 3))]
)
def test_greedy_output_interrupted_by_updates_to_equal_weights_is_unchanged_and_keeps_its_budget(
    live: Live, greedy: list[Completion], mode: KvMode, num_updates: int
) -> None:
    live.engine.kv_mode = mode

    async def interrupted() -> list[Completion]:
        running = asyncio.ensure_future(live.complete(6, LONG, GREEDY))
        for _ in range(num_updates):
            await live.steps(4)
            await live.sync()
        assert mode == "drain" or not running.done(), "the requests ended before the updates: nothing was interrupted"
        return await running

    completions = live.run(interrupted())
    assert [c.token_ids for c in completions] == [c.token_ids for c in greedy]
    assert {(len(c.token_ids), c.finish_reason) for c in completions} == {(LONG, "length")}
    for index, completion in enumerate(completions):
        if completion.routes is not None:
            tokens = [*PROMPT, 7 + index % 8, *completion.token_ids]
            assert torch.equal(
                completion.routes.long().sort().values, small_models.chosen_experts(live.hf, tokens)[:-1]
            )
    num_versions = 1 if mode == "drain" else num_updates + 1
    assert all(len(set(c.versions)) == num_versions for c in completions)


def test_tokens_around_an_update_carry_the_version_that_sampled_them(live: Live) -> None:
    completions = updated(live, "keep")
    new, gaps, cache_gaps = live.version, [], []
    under_new = [live.expected(index, completion) for index, completion in enumerate(completions)]
    live.perturb(0)
    for index, completion in enumerate(completions):
        num_old = before(completion, new)
        under_old = live.expected(index, completion)
        recorded = torch.tensor(completion.logprobs)
        torch.testing.assert_close(under_old[:num_old], recorded[:num_old], atol=1e-4, rtol=0)
        gaps.append(abs(float(under_old[num_old] - recorded[num_old])))
        cache_gaps.append(float((under_new[index] - recorded)[num_old:].abs().max()))
    # The very next token is the new version's already: no label is late. Chance may bring one pair together.
    assert statistics.median(gaps) > 1e-3, gaps
    # Keys and values are still the old version's.
    assert statistics.median(cache_gaps) > 1e-3, cache_gaps


@pytest.mark.parametrize("mode", ["recompute", "abort"])
def test_where_the_cache_is_not_kept_later_tokens_are_those_of_the_new_weights_over_the_whole_prefix(
    live: Live, mode: KvMode
) -> None:
    completions = updated(live, mode)
    new = live.version
    under_new = [live.expected(index, completion) for index, completion in enumerate(completions)]
    live.perturb(0)
    for index, completion in enumerate(completions):
        num_old, recorded = before(completion, new), torch.tensor(completion.logprobs)
        torch.testing.assert_close(under_new[index][num_old:], recorded[num_old:], atol=1e-4, rtol=0)
        under_old = live.expected(index, completion)
        torch.testing.assert_close(under_old[:num_old], recorded[:num_old], atol=1e-4, rtol=0)


def updated(live: Live, mode: KvMode) -> list[Completion]:
    """Requests that run while the weights change from those of seed 0 to those of seed 3."""
    live.engine.kv_mode = mode

    async def scenario() -> list[Completion]:
        # Seeds of its own: blocks that an earlier test has computed must be of no use to this one.
        running = asyncio.ensure_future(live.complete(8, LONG, seed=100 * KV_MODES.index(mode)))
        # Where the cache is to be given up it holds a full block by then, 128 tokens on CPUs.
        await live.steps(4 if mode == "keep" else 130)
        live.perturb(3)
        await live.sync()
        return await running

    completions: list[Completion] = live.run(scenario())
    return completions


def before(completion: Completion, new: int) -> int:
    """How many tokens of a completion are older than version `new`; it has some of both, in order."""
    num_old, length = completion.versions.count(new - 1), len(completion.versions)
    assert completion.versions == [new - 1] * num_old + [new] * (length - num_old)
    assert 0 < num_old < length == LONG, f"the update did not fall into the request: {num_old}"
    return num_old


def test_draining_gives_every_request_one_version_and_lets_none_in_meanwhile(live: Live) -> None:
    live.engine.kv_mode = "drain"

    async def drained() -> tuple[list[Completion], list[Completion]]:
        early = asyncio.ensure_future(live.complete(8, LONG))
        await live.steps(4)
        live.perturb(3)
        sync = asyncio.ensure_future(live.sync())
        await live.until(lambda: not live.engine._open.is_set())
        late = asyncio.ensure_future(live.complete(8, 40))
        assert not early.done()
        await sync
        assert early.done()
        return await early, await late

    early, late = live.run(drained())
    assert (versions(early), versions(late)) == ({live.version - 1}, {live.version})
    live.check(late)
    live.perturb(0)
    live.check(early)


@pytest.mark.parametrize("mode", KV_MODES)
def test_a_flip_that_fails_leaves_nothing_paused_and_the_old_weights_serving(live: Live, mode: KvMode) -> None:
    if live.engine.why_no_shadow:
        pytest.skip("without a shadow an update that fails may have left a mixture")
    reference = live.run(live.complete(4, 60, GREEDY))
    live.engine.kv_mode = mode

    async def failed() -> list[Completion]:
        running = asyncio.ensure_future(live.complete(4, 60, GREEDY))
        await live.steps(4)
        with pytest.raises(WeightSyncError, match=rf"version \d+ could not be made live, {live.version} goes on"):
            await live.generator.flip(live.version + 1)
        return await running

    completions = live.run(failed())
    assert [c.token_ids for c in completions] == [c.token_ids for c in reference]
    assert versions(completions) == {live.version}
    assert live.run(live.complete(4, 60, GREEDY)) == reference


def test_a_drain_that_is_called_off_lets_requests_in_again_and_can_be_repeated(live: Live) -> None:
    live.engine.kv_mode = "drain"

    async def called_off() -> list[Completion]:
        running = asyncio.ensure_future(live.complete(4, LONG))
        await live.steps(4)
        offer = live.offer()
        await live.stage(offer)
        flip = asyncio.ensure_future(live.generator.flip(offer.version))
        await live.until(lambda: not live.engine._open.is_set())
        flip.cancel()
        await asyncio.wait([flip])
        assert not running.done()
        between = await live.complete(2, 8)
        await live.generator.flip(offer.version)
        return [*await running, *between]

    assert versions(live.run(called_off())) == {live.version - 1}
    assert versions(live.run(live.complete(2, 8))) == {live.version}


def test_a_publisher_whose_names_do_not_pair_up_is_refused_and_the_old_weights_go_on_serving(
    live: Live,
) -> None:
    served = live.run(live.complete(2, 16))
    parameters = list(live.hf.named_parameters())
    without_q = [(n, p) for n, p in parameters if "layers.1.self_attn.q_proj" not in n]
    with_extra = [*parameters, ("model.layers.0.mlp.extra.weight", torch.zeros(4))]
    for wrong, named in (
        (without_q, r"1 missing \(model\.layers\.1\.self_attn\.q_proj\.weight\)"),
        (with_extra, r"1 unknown .*extra"),
    ):
        publisher = Publisher(wrong, torch.float32, model_type=live.hf.config.model_type)
        with pytest.raises(WeightSyncError, match=named):
            live.run(live.generator.connect(publisher.endpoint, PEER))
        publisher.close()
    assert live.run(live.complete(2, 16)) == served
    live.run(live.sync())


def halved(live: Live) -> Publisher:
    """One whose names are right, and the shape of one parameter, in the last layer, wrong."""
    named = [(n, p[: len(p) // 2] if "layers.1.self_attn.o_proj" in n else p) for n, p in live.hf.named_parameters()]
    return Publisher(named, torch.float32, model_type=live.hf.config.model_type)


def test_a_version_that_fails_half_way_is_reported_and_the_old_one_goes_on_serving(live: Live) -> None:
    if live.engine.why_no_shadow:
        pytest.skip("without a shadow an update that fails may have left a mixture")
    served, good = live.run(live.complete(2, 16)), live.publisher
    live.publisher = halved(live)
    try:
        live.publisher.add_peer(PEER, live.run(live.generator.connect(live.publisher.endpoint, PEER)))
        with pytest.raises(WeightSyncError, match=r"could not be staged, version \d+ goes on serving"):
            live.run(live.sync())
        assert live.run(live.complete(2, 16)) == served
    finally:
        live.publisher.close()
        live.publisher = good
        live.run(live.generator.connect(good.endpoint, PEER))
    live.perturb(4)
    live.run(live.sync())
    live.check(live.run(live.complete(4, 16)))


def test_an_abort_returns_what_was_sampled_and_leaves_the_engine_working(live: Live) -> None:
    async def aborted() -> list[Completion]:
        running = asyncio.ensure_future(live.generator.generate([PROMPT] * 3, [1, 2, 3], LONG, "mine"))
        await live.steps(4)
        await live.generator.abort("mine")
        return await asyncio.wait_for(running, 20)

    completions = live.run(aborted())
    for completion in completions:
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.token_ids) < LONG
        assert len(completion.logprobs) == len(completion.versions) == len(completion.token_ids)
    assert len(live.run(live.generator.generate([PROMPT], [1]))[0].token_ids) == 8


def test_an_abort_also_reaches_requests_that_are_still_on_their_way_to_the_engine(live: Live) -> None:
    async def aborted() -> list[Completion]:
        running = asyncio.ensure_future(live.generator.generate([PROMPT] * 80, list(range(80)), LONG, "early"))
        await asyncio.sleep(0)
        await live.generator.abort("early")
        return await asyncio.wait_for(running, 20)

    completions = live.run(aborted())
    assert {c.finish_reason for c in completions} == {"abort"}
    assert all(len(c.token_ids) < LONG for c in completions)


def test_requests_that_wait_for_a_place_start_under_the_version_that_serves_then(live: Live) -> None:
    prompt = PROMPT * 17  # longer than a block of the prefix cache, which has 128 tokens on CPUs

    async def crowded() -> list[Completion]:
        synced = asyncio.Event()

        async def client(seed: int) -> list[Completion]:
            # One request after the other until the flip is over: more clients than places, so some always wait.
            done: list[Completion] = []
            while not synced.is_set():
                done += await live.generator.generate([prompt], [seed + len(done)], 60)
            return done

        clients = asyncio.gather(*(client(seed) for seed in range(0, 8000, 100)))
        await live.until(live.engine._places.locked)
        await live.steps(4)
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
    with pytest.raises(ConfigError, match=rf"a prompt has {MAX_LEN} tokens, generator\.max_model_len is {MAX_LEN}"):
        live.run(live.generator.generate([[7] * MAX_LEN], [0]))


@pytest.mark.parametrize("live", [pytest.param("no shadow", marks=pytest.mark.soak)], indirect=True)
def test_without_a_shadow_a_load_that_stops_half_way_is_told_to_every_request_until_a_whole_one_mends_it(
    live: Live,
) -> None:
    good, told = live.publisher, r"an update to version \d+ stopped half-way, the weights are of two versions"
    live.publisher = halved(live)
    try:
        live.publisher.add_peer(PEER, live.run(live.generator.connect(live.publisher.endpoint, PEER)))
        running = live.start(live.complete(2, LONG))
        live.run(live.steps(4))
        with pytest.raises(WeightSyncError, match=rf"(?s){told}.*load_row_parallel_weight"):
            live.run(live.sync())
        with pytest.raises(WeightSyncError, match=told):
            live.run(live.complete(1, 8))
    finally:
        live.publisher.close()
        live.publisher = good
        live.run(live.generator.connect(good.endpoint, PEER))
    live.restore()
    live.run(live.sync())
    with pytest.raises(WeightSyncError, match=r"a mix of two versions|the weights are of two versions"):
        running.result(60)
    assert numbers(live.run(live.complete(4, 32))) == numbers(live.from_disk)
