"""The replay as a Monarch actor, and the client that looks like a local `Replay`.

Nothing is decided here: the waits are in `replay/service.py`, the rules in `replay/buffer.py`. Messages
carry tickets, numbers and channel handles; tensors go through `forge.channel`.

Over a `forge.lasting.Lasting` the client outlives the replay's process. What was answered is in the journal's files by
then, which a kill leaves as they are; what was not is asked again of the next life. That one reads the journal, and is
told what only the client knows (`Known`): which tickets are in hands, and how far trainer and generators are.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from monarch.actor import concurrent_endpoint, endpoint
from tensordict import TensorDict

from forge.errors import ActorFailed
from forge.lasting import Beating, Lasting, ask, ask_of_group, end, set_up
from forge.mesh import within
from replay.config import ReplayConfig
from replay.events import Tokens
from replay.persistence import JournalPlace, Prompts
from replay.service import Replay, SampledBatch
from replay.staleness import Known, Ticket

__all__ = ["Replay", "ReplayActor", "ReplayClient", "ReplayConfig", "SampledBatch", "Ticket"]

T = TypeVar("T")
_LIVES = math.inf
"""Waits for a slot or a batch outlive any number of deaths: how many there may be is the budget of restarts."""


class ReplayActor(Beating):
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
        self._make = lambda known: Replay(
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
            known=known,
        )
        self._made: Replay | None = None

    @property
    def _replay(self) -> Replay:
        if self._made is None:
            self._made = self._make(None)
        return self._made

    @endpoint
    async def setup(self, known: Known | None = None) -> str:
        """Makes the replay, which raises what `Replay` raises; with `known` in place of one that died."""
        self._made = self._make(known)
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
    """`Replay`'s interface over a mesh of one ReplayActor, through all its lives. Groups travel through the channel.

    The project's own errors arrive as themselves (with the remote traceback as their cause), so that code
    written against `Replay` works against either. A life that ends is noticed in one case only: a batch that had been
    handed out, and not been opened, is gone with its memory; `rewind` to its version, and `sample` gives it again.
    """

    def __init__(self, mesh: Any, *, start_version: int = 0, answer_s: float = 1500.0) -> None:
        """`mesh`: plain or a Lasting. `start_version`: as `Replay` has it. `answer_s`: seconds after which an actor
        that says nothing, not even of its own deadlines, is given up."""
        self._mesh = mesh
        self._answer_s = answer_s
        self._returning: set[asyncio.Task[None]] = set()
        self._lives = 0
        self._marked_in = 0
        self._held: dict[int, Ticket] = {}
        self._released = self._next = start_version
        self._served = start_version - 1
        self._closed = False

    @property
    def lasts(self) -> bool:
        """Whether another replay takes the place of one that dies."""
        return isinstance(self._mesh, Lasting)

    async def setup(self) -> str:
        """Makes the replay, which raises what `Replay` raises. See `Replay.setup`."""
        told = ""

        async def begin(mesh: Any) -> None:
            nonlocal told
            known = self._known() if self._lives else None
            self._lives += 1
            told = await mesh.setup.call_one(known)

        await self._within("setup", set_up(self._mesh, begin))
        return told

    async def reserve(self) -> Ticket | None:
        """See `Replay.reserve`. A caller that is cancelled while it waits leaves no slot taken."""
        call = asyncio.ensure_future(self._reserve())
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
        try:
            # `put` copies, and waits for memory while the replay has not taken earlier groups.
            adding = ask_of_group(self._mesh, group, lambda mesh, handle: mesh.add.call_one(ticket, handle), _LIVES)
            await self._within("add", adding)
        finally:
            self._held.pop(ticket.seq, None)

    async def fail(self, ticket: Ticket) -> None:
        """See `Replay.fail`."""
        await self._ask("fail", lambda mesh: mesh.fail.call_one(ticket))
        self._held.pop(ticket.seq, None)

    async def sample(self, policy_version: int, num_shards: int = 1) -> SampledBatch | None:
        """See `Replay.sample`."""
        batch: SampledBatch | None = await self._ask(
            "sample", lambda mesh: mesh.sample.call_one(policy_version, num_shards)
        )
        if batch is not None:
            self._served, self._next = max(self._served, policy_version), policy_version + 1
        return batch

    async def rewind(self, version: int) -> list[int]:
        """See `Replay.rewind`."""
        self._next = version
        return await self._ask("rewind", lambda mesh: mesh.rewind.call_one(version))

    async def release(self, version: int) -> None:
        """See `Replay.release`."""
        self._released = max(self._released, version)
        await self._ask("release", lambda mesh: mesh.release.call_one(version))

    async def close(self) -> None:
        """See `Replay.close`."""
        self._closed = True
        await self._ask("close_replay", lambda mesh: mesh.close_replay.call_one())

    async def progress(self, parts: Sequence[Tokens]) -> None:
        """See `Replay.progress`."""
        await self._ask("progress", lambda mesh: mesh.progress.call_one(parts))

    async def mark(self, version: int) -> None:
        """See `Replay.mark`."""
        await self._ask("mark", lambda mesh: mesh.mark.call_one(version))
        self._marked_in = self._lives

    async def marked(self) -> int:
        """See `Replay.marked`. Raises ActorFailed when the replay has died since: the checkpoint has to be given up."""
        life = self._marked_in

        async def of_that_life(mesh: Any) -> int:
            if self._lives != life:
                raise ActorFailed("replay", "it died before its state for the checkpoint was on the disk")
            number: int = await mesh.marked.call_one()
            return number

        return await self._ask("marked", of_that_life)

    async def prune(self, before: int) -> None:
        """See `Replay.prune`."""
        await self._ask("prune", lambda mesh: mesh.prune.call_one(before))

    async def shut_down(self) -> None:
        """See `Replay.shut_down`."""
        await self._within("shut_down", end(self._mesh, lambda mesh: mesh.shut_down.call_one()))

    async def stats(self) -> dict[str, float]:
        """See `Replay.stats`."""
        return await self._ask("stats", lambda mesh: mesh.stats.call_one())

    async def why_waiting(self) -> str:
        """See `Replay.why_waiting`."""
        return await self._ask("why_waiting", lambda mesh: mesh.why_waiting.call_one())

    async def _ask(self, name: str, call: Callable[[Any], Awaitable[T]]) -> T:
        return await self._within(name, ask(self._mesh, call, _LIVES))

    async def _within(self, name: str, call: Awaitable[T]) -> T:
        return await within(self._answer_s, f"the replay to answer {name}", call)

    def _known(self) -> Known:
        return Known(list(self._held.values()), self._released, self._served, self._next, self._closed)

    async def _reserve(self) -> Ticket | None:
        ticket: Ticket | None = await self._ask("reserve", lambda mesh: mesh.reserve.call_one())
        if ticket is not None:
            self._held[ticket.seq] = ticket
        return ticket

    async def _return_slot(self, call: asyncio.Future[Ticket | None]) -> None:
        try:
            ticket = await call
            if ticket is not None:
                await self.fail(ticket)
        except Exception:
            return  # the wait ended without a slot; whoever asked for it is gone
