"""The replay as a Monarch actor, and the client that looks like a local `Replay`.

Nothing is decided here: the waits are in `replay/service.py`, the rules in `replay/buffer.py`. Messages
carry tickets, numbers and channel handles; tensors go through `forge.channel`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from monarch.actor import Actor, concurrent_endpoint, endpoint
from tensordict import TensorDict

import forge.channel
from forge.mesh import within
from replay.config import ReplayConfig
from replay.events import Tokens
from replay.persistence import JournalPlace, Prompts
from replay.service import Channel, Replay, SampledBatch
from replay.staleness import Ticket

__all__ = ["Replay", "ReplayActor", "ReplayClient", "ReplayConfig", "SampledBatch", "Ticket"]

T = TypeVar("T")


class ReplayActor(Actor):
    """One process, one `Replay`. Endpoints that wait, and `add`, run concurrently: no wait blocks a call."""

    def __init__(
        self,
        cfg: ReplayConfig,
        groups_per_step: int,
        degenerate: Literal["keep", "drop"] = "keep",
        start_version: int = 0,
        row_tokens: int = 4096,
        together: int = 1,
        readers: int = 1,
        reward_name: str = "the reward",
        seed: int = 0,
        prompts: Callable[[], Prompts] | None = None,
        journal: JournalPlace | None = None,
    ) -> None:
        """`prompts` makes the source of prompts, in this process."""
        self._make = lambda: Replay(
            cfg,
            groups_per_step=groups_per_step,
            degenerate=degenerate,
            start_version=start_version,
            row_tokens=row_tokens,
            together=together,
            readers=readers,
            reward_name=reward_name,
            seed=seed,
            prompts=prompts() if prompts else None,
            journal=journal,
        )
        self._made: Replay | None = None

    @property
    def _replay(self) -> Replay:
        if self._made is None:
            self._made = self._make()
        return self._made

    @endpoint
    async def setup(self) -> str:
        """Makes the replay, which raises what `Replay` raises. See `Replay.setup`."""
        return await self._replay.setup()

    @concurrent_endpoint
    async def reserve(self) -> Ticket | None:
        """See `Replay.reserve`."""
        return await self._replay.reserve()

    @concurrent_endpoint
    async def add(self, ticket: Ticket, group: Any) -> None:
        """See `Replay.add`."""
        await self._replay.add(ticket, group)

    @concurrent_endpoint
    async def sample(self, policy_version: int, num_shards: int = 1) -> SampledBatch | None:
        """See `Replay.sample`."""
        return await self._replay.sample(policy_version, num_shards)

    @endpoint
    async def fail(self, ticket: Ticket) -> None:
        """See `Replay.fail`."""
        await self._replay.fail(ticket)

    @endpoint
    async def rewind(self, version: int) -> list[int]:
        """See `Replay.rewind`."""
        return await self._replay.rewind(version)

    @endpoint
    async def release(self, version: int) -> None:
        """See `Replay.release`."""
        await self._replay.release(version)

    @endpoint
    async def progress(self, parts: Sequence[Tokens]) -> None:
        """See `Replay.progress`."""
        await self._replay.progress(parts)

    @endpoint
    async def mark(self, version: int) -> None:
        """See `Replay.mark`."""
        await self._replay.mark(version)

    @concurrent_endpoint
    async def marked(self) -> int:
        """See `Replay.marked`."""
        return await self._replay.marked()

    @endpoint
    async def prune(self, before: int) -> None:
        """See `Replay.prune`."""
        await self._replay.prune(before)

    @concurrent_endpoint
    async def shut_down(self) -> None:
        """See `Replay.shut_down`."""
        await self._replay.shut_down()

    @endpoint
    async def why_waiting(self) -> str:
        """See `Replay.why_waiting`."""
        return await self._replay.why_waiting()

    @endpoint
    async def close_replay(self) -> None:
        """See `Replay.close`."""
        await self._replay.close()

    @endpoint
    async def stats(self) -> dict[str, float]:
        """See `Replay.stats`."""
        return await self._replay.stats()


class ReplayClient:
    """`Replay`'s interface over a mesh of one ReplayActor. Groups travel through the channel.

    The project's own errors arrive as themselves (with the remote traceback as their cause), so that code
    written against `Replay` works against either.
    """

    def __init__(self, mesh: Any, channel: Channel = forge.channel, *, answer_s: float = 1500.0) -> None:
        """`answer_s`: seconds after which an actor that says nothing, not even of its own deadlines, is given up."""
        self._mesh = mesh
        self._channel = channel
        self._answer_s = answer_s
        self._returning: set[asyncio.Task[None]] = set()

    async def setup(self) -> str:
        """Makes the replay, which raises what `Replay` raises. See `Replay.setup`."""
        return await self._call("setup", self._mesh.setup.call_one())

    async def reserve(self) -> Ticket | None:
        """See `Replay.reserve`. A caller that is cancelled while it waits leaves no slot taken."""
        call = asyncio.ensure_future(self._call("reserve", self._mesh.reserve.call_one()))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            # A remote call cannot be cancelled: it may still be granted a slot that nobody waits for.
            task = asyncio.ensure_future(self._return_slot(call))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)
            raise

    async def add(self, ticket: Ticket, group: TensorDict) -> None:
        """See `Replay.add`."""
        # In a thread: `put` copies, and waits for memory while the replay has not taken earlier groups.
        handle = await asyncio.to_thread(self._channel.put, group)
        await self._call("add", self._mesh.add.call_one(ticket, handle))

    async def fail(self, ticket: Ticket) -> None:
        """See `Replay.fail`."""
        await self._call("fail", self._mesh.fail.call_one(ticket))

    async def sample(self, policy_version: int, num_shards: int = 1) -> SampledBatch | None:
        """See `Replay.sample`."""
        return await self._call("sample", self._mesh.sample.call_one(policy_version, num_shards))

    async def rewind(self, version: int) -> list[int]:
        """See `Replay.rewind`."""
        return await self._call("rewind", self._mesh.rewind.call_one(version))

    async def release(self, version: int) -> None:
        """See `Replay.release`."""
        await self._call("release", self._mesh.release.call_one(version))

    async def close(self) -> None:
        """See `Replay.close`."""
        await self._call("close_replay", self._mesh.close_replay.call_one())

    async def progress(self, parts: Sequence[Tokens]) -> None:
        """See `Replay.progress`."""
        await self._call("progress", self._mesh.progress.call_one(parts))

    async def mark(self, version: int) -> None:
        """See `Replay.mark`."""
        await self._call("mark", self._mesh.mark.call_one(version))

    async def marked(self) -> int:
        """See `Replay.marked`."""
        return await self._call("marked", self._mesh.marked.call_one())

    async def prune(self, before: int) -> None:
        """See `Replay.prune`."""
        await self._call("prune", self._mesh.prune.call_one(before))

    async def shut_down(self) -> None:
        """See `Replay.shut_down`."""
        await self._call("shut_down", self._mesh.shut_down.call_one())

    async def stats(self) -> dict[str, float]:
        """See `Replay.stats`."""
        return await self._call("stats", self._mesh.stats.call_one())

    async def why_waiting(self) -> str:
        """See `Replay.why_waiting`."""
        return await self._call("why_waiting", self._mesh.why_waiting.call_one())

    async def _call(self, name: str, call: Awaitable[T]) -> T:
        return await within(self._answer_s, f"the replay to answer {name}", call)

    async def _return_slot(self, call: asyncio.Future[Ticket | None]) -> None:
        try:
            ticket = await call
            if ticket is not None:
                await self.fail(ticket)
        except Exception:
            return  # the wait ended without a slot; whoever asked for it is gone
