"""An actor and an inference engine, started as a run starts them, with their times."""

from __future__ import annotations

import asyncio
import os
import statistics
import time

from monarch.actor import Actor, endpoint

from actors.generator import Generator, GeneratorConfig
from apps.doctor.checks import Report
from apps.grpo.models import resolve_model
from apps.grpo.spawn import QUIET
from forge import launch
from forge.launch import Hosts
from forge.mesh import Cluster, Placement

_CALLS = 100
_TOKENS = 32


class Echo(Actor):
    """Answers."""

    @endpoint
    async def echo(self, value: int) -> int:
        return value


def monarch() -> Report:
    """One actor in a process of its own, and how long a call takes there and back."""
    hosts = launch.bring_up()
    try:
        return asyncio.run(_call(hosts))
    finally:
        hosts.tear_down()


async def _call(hosts: Hosts) -> Report:
    trips, begin = [], time.perf_counter()
    async with Cluster(hosts, Placement("cpu", {})) as cluster:
        echo = await cluster.spawn("doctor", Echo)
        await echo.echo.call_one(0)
        up_s = time.perf_counter() - begin
        for number in range(_CALLS):
            begin = time.perf_counter()
            await echo.echo.call_one(number)
            trips.append(time.perf_counter() - begin)
    median, worst = statistics.median(trips) * 1000, max(trips) * 1000
    found = f"an actor is up in {up_s:.1f} s, a call takes {median:.1f} ms (of {_CALLS}, {worst:.0f} ms at most)"
    if median > 20:
        return Report("warning", found, "1 ms is usual: the cores are busy, see the check cpu")
    return Report("ok", found)


def engine() -> Report:
    """vLLM with the model nano: its start, and a few tokens."""
    os.environ.update(QUIET)
    return asyncio.run(_engine())


async def _engine() -> Report:
    model = await asyncio.to_thread(resolve_model, "nano")
    config = GeneratorConfig(max_model_len=64, max_new_tokens=_TOKENS, kv_cache_bytes=64 << 20)
    generator = Generator(config, model, "float32", seed=0, stop_ids=[])
    try:
        begin = time.perf_counter()
        await generator.setup([7, 8, 9])
        up_s = time.perf_counter() - begin
        begin = time.perf_counter()
        (completion,) = await generator.generate([[7, 8, 9]], [0])
        pace = len(completion.token_ids) / (time.perf_counter() - begin)
    finally:
        generator.shutdown()
    found = f"vLLM is up in {up_s:.0f} s and samples {pace:,.0f} tokens/s of one request (model nano)"
    if up_s > 120:
        return Report("warning", found, "15 to 40 s are usual: the cores or the disk are busy")
    return Report("ok", found)
