"""On a real engine: the routes that vLLM's workers record are what their routers chose, and replaying them is what
keeps trainer and generator together at equal weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from small_models import chosen_experts, family

from actors.model import Policy, load_hf
from actors.vllm_engine import Completion, EngineOptions, Sampling, VllmEngine
from forge.routes import NOT_ROUTED

LAYERS, EXPERTS, CHOSEN = 3, 32, 4
BEGIN = [1 + i % 60 for i in range(300)]  # longer than two blocks of the KV cache: prompts share it

Ask = Callable[[VllmEngine], Coroutine[Any, Any, Any]]
Run = Callable[[Ask], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    changes: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 32, "initializer_range": 0.2}
    changes |= {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "head_dim": 32}
    return family("qwen3_moe", tmp_path_factory.mktemp("experts"), **changes, num_attention_heads=2)


@pytest.fixture(scope="module")
def run(model: str) -> Iterator[Run]:
    """Has a coroutine of the engine run to its end."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    engine = VllmEngine(
        EngineOptions(
            model=model,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=8,
            kv_cache_bytes=1 << 26,
            enforce_eager=True,
            tensor_parallel=1,
            seed=0,
            keep_routes=True,
        )
    )

    def run(ask: Ask) -> Any:
        return asyncio.run_coroutine_threadsafe(ask(engine), loop).result(180)

    run(VllmEngine.start)
    yield run
    engine.shutdown()


def prompt(index: int) -> list[int]:
    return [*BEGIN, 5 + index % 3]


async def complete(engine: VllmEngine, count: int, length: int) -> list[Completion]:
    requests = (
        engine.generate(prompt(i), Sampling(), max_tokens=length + i, seed=i, stop_ids=[]) for i in range(count)
    )
    return list(await asyncio.gather(*requests))


def chosen(model: str, index: int, completion: Completion) -> torch.Tensor:
    """What transformers chooses for all tokens but the last, `[tokens, layers, k]`."""
    return chosen_experts(load_hf(model, torch.float32).eval(), [*prompt(index), *completion.token_ids])[:-1]


def sort(routes: torch.Tensor | None) -> torch.Tensor:
    assert routes is not None
    return routes.long().sort().values


def test_recorded_is_what_each_token_chose_also_where_others_had_computed_the_prompt(model: str, run: Run) -> None:
    completions = run(lambda engine: complete(engine, 20, 12))
    for index, completion in enumerate(completions):
        assert torch.equal(sort(completion.routes), chosen(model, index, completion))


def test_a_request_that_is_cut_and_goes_on_keeps_its_first_routes(model: str, run: Run) -> None:
    async def cut(engine: VllmEngine) -> Completion:
        request = asyncio.ensure_future(
            engine.generate(prompt(0), Sampling(), max_tokens=200, seed=1, stop_ids=[], request_id="cut")
        )
        while not (engine.sampled().get("cut") and len(engine.sampled()["cut"].token_ids) > 5):
            await engine._engine.collective_rpc("check_health")
        while not request.done():
            await engine.abort(["cut"])
            await asyncio.sleep(0.01)
        return await request

    part: Completion = run(cut)
    assert part.routes is not None
    assert part.finish_reason == "abort"
    assert 5 < len(part.token_ids) < 200
    assert len(part.routes) == len(BEGIN) + len(part.token_ids)  # all but the last token were inputs
    count = len(part.token_ids)
    marked = part.routes.clone()
    part.routes[:] = 7  # nothing could choose that: it must come back as it is
    limit = count + 6

    async def go_on(engine: VllmEngine) -> Completion:
        return await engine.generate(prompt(0), Sampling(), max_tokens=limit, seed=1, stop_ids=[], begun=part)

    whole: Completion = run(go_on)
    assert whole.routes is not None
    assert len(whole.token_ids) == limit
    assert bool((whole.routes[: len(marked)] == 7).all())
    expected = chosen(model, 0, whole)
    assert torch.equal(sort(whole.routes)[len(marked) :], expected[len(marked) :])
    assert torch.equal(sort(marked), expected[: len(marked)])
    part.routes = None  # as from a journal, which keeps no routes of what has not ended
    whole = run(go_on)
    assert torch.equal(sort(whole.routes), chosen(model, 0, whole))


def test_at_equal_weights_the_ratio_of_a_trainer_in_half_precision_is_one_only_with_replay(
    model: str, run: Run
) -> None:
    completions: list[Completion] = run(lambda engine: complete(engine, 16, 40))
    policy = Policy(load_hf(model, torch.bfloat16).eval(), replay_routes=True)

    def gaps(*, replay: bool) -> torch.Tensor:
        found = []
        for index, completion in enumerate(completions):
            tokens = torch.tensor([[*prompt(index), *completion.token_ids]])
            positions = torch.arange(tokens.shape[1])[None]
            routes = torch.full((*tokens.shape, LAYERS, CHOSEN), NOT_ROUTED, dtype=torch.int16)
            assert completion.routes is not None
            routes[0, : len(completion.routes)] = completion.routes
            with torch.no_grad():
                values, _ = policy(tokens, positions, positions > len(BEGIN), None, routes if replay else None)
            found.append(values - torch.tensor(completion.logprobs))
        return torch.cat(found).abs()

    replayed, free = gaps(replay=True), gaps(replay=False)
    assert float(free.mean()) > 2 * float(replayed.mean())
    assert float(free.max()) > 3 * float(replayed.max())
    assert float(replayed.max()) < 0.5
