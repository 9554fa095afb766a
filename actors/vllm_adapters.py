"""The LoRA adapters of one engine: a version comes in while it decodes, each request keeps the one it began with.

No flip and no pause: once it is there, requests that start name the new adapter. An old one gives its place to a new
one once the last request that uses it has ended; a version that finds all places taken waits for that. Which version
lies in which of the engine's slots is known here alone; the workers fill slots.
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

Stage = Callable[[Offer, int | None, str], Awaitable[float]]
"""Has every worker bring an offered version in, an adapter into that slot; the text says what serves if that fails."""


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

    def __init__(self, stage: Stage, capacity: int) -> None:
        self._stage = stage
        self._registry = AdapterRegistry(capacity)
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

    def request(self, version: int | None) -> Any:
        """What tells vLLM to use the adapter of `version`, which `use` has given; None for the base model."""
        if version is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(adapter_name(version), adapter_id(self._registry.slot(version)), "memory")

    async def stage(self, offer: Offer) -> float:
        """Brings an adapter in beside those that serve; requests that start afterwards use it. Returns the seconds that
        it took in the workers.

        Waits while no slot can be had. A version that is here already, as after a reconnect, is left as it is. Raises
        WeightSyncError when it cannot be brought in; the old ones serve on.
        """
        if offer.version in self.held:
            return 0.0
        while (slot := self._registry.free_slot) is None:
            self._ended.clear()
            await self._ended.wait()
        newest = self._registry.newest
        seconds = await self._stage(offer, slot, "the base model" if newest is None else f"version {newest}")
        self._registry.add(offer.version, slot)
        return seconds

    def check_serving(self, version: int) -> None:
        """What is left of a flip. Raises WeightSyncError when `version` has not been staged, or is not the newest."""
        if version != self._registry.newest:
            raise WeightSyncError(
                f"adapter version {version} does not serve, the engine holds {self._registry.describe()}"
            )
