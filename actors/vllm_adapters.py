"""The LoRA adapters of one engine: a version comes in while it decodes, each request keeps the one it began with.

No flip and no pause: requests that start from now on name the new adapter. An old one gives its place to a new one
once the last request that uses it has ended; a version that finds all places taken waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from forge.errors import WeightSyncError
from weightsync.adapters import AdapterRegistry, adapter_id, adapter_name, engine_rank
from weightsync.offer import Offer

_POLL_S = 0.001
Rpc = Callable[..., Awaitable[list[Any]]]
"""Calls a method of every worker, with positional arguments; the answers in order of ranks."""


@dataclass(frozen=True)
class LoraOptions:
    """What an engine makes room for: adapters up to `max_rank`, on modules named as `targets`, `adapters` at a time.

    A version waits for requests of the oldest when more than `adapters` - 1 versions have requests running.
    """

    max_rank: int
    targets: tuple[str, ...]
    adapters: int

    def engine_arguments(self) -> dict[str, Any]:
        """The options of vLLM's engine."""
        return {
            "enable_lora": True,
            # One place more: on CPUs vLLM looks up the last one for tokens of the base model, so it stays empty.
            "max_loras": self.adapters + 1,
            "max_lora_rank": engine_rank(self.max_rank),
            "lora_target_modules": list(self.targets),
        }


class EngineAdapters:
    """The adapters that an engine holds. All methods belong to the engine's event loop."""

    def __init__(self, call: Rpc, capacity: int) -> None:
        self._call = call
        self._registry = AdapterRegistry(capacity)
        self._begun = False  # an update whose adapter does not serve, or not yet
        self._staged = -1  # the version of the last adapter that has come in
        self._ended = asyncio.Event()

    @property
    def held(self) -> dict[int, int]:
        """The versions in the engine, and the number of running requests of each."""
        return self._registry.held

    @contextlib.contextmanager
    def use(self) -> Iterator[int | None]:
        """The version that a request takes for its life (None: the base model), counted until the block is left."""
        version = self._registry.acquire()
        try:
            yield version
        finally:
            self._registry.release(version)
            self._ended.set()

    async def stage(self, offer: Offer) -> float:
        """Brings an adapter in beside those that serve; returns the seconds that it took in the workers.

        Waits while no place can be had. A version that is here already, as after a reconnect, is left as it is. Raises
        WeightSyncError when it cannot be brought in; the old ones serve on.
        """
        if offer.version in self.held:
            return 0.0
        new = adapter_id(offer.version)
        if self._begun:
            await self._clear_away()
        self._begun, self._staged = True, -1
        while not self._registry.has_room:
            self._ended.clear()
            if await self.free_unused():
                continue
            # Again after a moment too: the worker may not have seen yet that the last request has ended.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _POLL_S if self._registry.unused else None)
        if problem := next(filter(None, await self._call("forge_adapter_stage", new, offer.plain())), ""):
            raise WeightSyncError(problem)
        while True:
            states = await self._call("forge_adapter_activate", new)
            if failed := next((s for s in states if s["state"] == "failed"), None):
                newest = self._registry.newest
                serving = "the base model" if newest is None else f"version {newest}"
                raise WeightSyncError(
                    f"adapter version {offer.version} could not be staged, {serving} goes on serving:\n"
                    f"{failed['error']}"
                )
            if all(s["state"] == "active" for s in states):
                self._staged = offer.version
                return float(max(s["stage_s"] for s in states))
            await asyncio.sleep(_POLL_S)

    async def flip(self, version: int) -> float:
        """Requests that start from now on use the staged `version`; returns 0.0, for nothing stands still.

        Raises WeightSyncError when it has not been staged.
        """
        if version != self._registry.newest:
            if version != self._staged:
                raise WeightSyncError(
                    f"adapter version {version} is not staged, the engine holds {self._registry.describe()}"
                )
            self._registry.add(version)
        self._begun = False
        return 0.0

    async def free_unused(self) -> bool:
        """Gives up the versions that nobody uses, as far as every worker has seen the end of their requests."""
        ids = {adapter_id(version): version for version in self._registry.unused}
        if not ids:
            return False
        gone = set.intersection(*(set(worker) for worker in await self._call("forge_adapter_free", list(ids))))
        for adapter in gone:
            self._registry.drop(ids[adapter])
        return bool(gone)

    async def _clear_away(self) -> None:
        """The last update was given up: its adapter is still on its way, up to its own deadline, or here for nobody."""
        while True:
            if all(await self._call("forge_adapter_arrived")):
                break
            await asyncio.sleep(_POLL_S)
        here = {adapter for worker in await self._call("forge_adapters") for adapter in worker}
        strays = here - {adapter_id(version) for version in self._registry.held}
        if strays:
            await self._call("forge_adapter_free", sorted(strays))


def lora_request(version: int | None) -> Any:
    """What tells vLLM to use an adapter that a worker holds already; None for the base model."""
    if version is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter_name(version), adapter_id(version), "memory")
