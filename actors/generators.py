"""All generators as the controller sees them: which of them answers, and what becomes of the calls of one that dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from actors.generator import GeneratorConfig, Progress
from actors.routing import Load, Router
from actors.turns import Clock, Turns
from actors.vllm_engine import Completion
from forge.errors import ActorFailed
from forge.failure import first_line
from forge.lasting import MOST_LIVES, Life, given_up
from forge.mesh import within
from weightsync.layout import Box
from weightsync.offer import Endpoint, Offer

T = TypeVar("T")
_ANSWER_S = 60.0
"""How long an actor may take to answer what costs it nothing, seconds."""


class Replica:
    """One generator as the controller sees it; a sink of weight sync, and a sleeper where it shares its devices.

    `turns` are those it takes with the trainer then; handing the devices over may take `turn_s` seconds.
    """

    def __init__(
        self,
        mesh: Any,
        name: str,
        config: GeneratorConfig,
        turns: Turns | None = None,
        turn_s: float = _ANSWER_S,
        *,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """`report`, where somebody replaces it when it dies (`forge.supervision`), takes the reason of a death that
        only failing calls tell of."""
        self._turns, self._turn_s = turns, turn_s
        self._life = Life(name, report) if report else None
        self.name = name
        self.mesh = mesh
        self.config = config
        self.running = 0
        self.flipping = False

    @property
    def lost(self) -> bool:
        """Whether it has died, and another is to take its place."""
        return self._life is not None and self._life.lost

    def lose(self, reason: str) -> None:
        """Fails the calls that run, and all later ones, with ActorFailed."""
        if self._life is not None:
            self._life.lose(reason)

    async def ask(self, call: Awaitable[T]) -> T:
        """The answer to `call`. Where somebody replaces a dead replica, raises ActorFailed as soon as it has died."""
        return await (self._life.ask(call) if self._life else call)

    async def setup(self, warm_up: Sequence[int] = ()) -> None:
        deadline_s = 2 * self.config.start_timeout_s + _ANSWER_S
        await within(deadline_s, f"{self.name} to start its engine", self.ask(self.mesh.setup.call_one(warm_up)))

    async def connect(self, endpoint: Endpoint) -> list[dict[str, Box]]:
        return await self.ask(self.mesh.connect.call_one(endpoint, self.name))

    async def stage(self, offer: Offer) -> float:
        if not self.config.lora_rank:
            return await self.ask(self.mesh.stage.call_one(offer))  # into host memory, or beside what serves
        async with self._serving(f"{self.name} to stage version {offer.version}"):
            return await self.ask(self.mesh.stage.call_one(offer))

    async def flip(self, version: int) -> float:
        if self.config.lora_rank:
            return 0.0  # an adapter serves as soon as it is staged
        async with self._serving(f"{self.name} to flip to version {version}"):
            self.flipping = True
            try:
                return await self.ask(self.mesh.flip.call_one(version))
            finally:
                self.flipping = False

    def _serving(self, what: str) -> contextlib.AbstractAsyncContextManager[None]:
        return self._turns.serving(what) if self._turns else contextlib.nullcontext()

    async def sleep(self) -> None:
        """It leaves its devices to the trainer; running requests keep their tokens."""
        await within(self._turn_s, f"{self.name} to interrupt its requests and sleep", self.mesh.sleep.call_one())

    async def wake(self) -> None:
        """It has its devices again."""
        await within(self._turn_s, f"{self.name} to wake", self.mesh.wake.call_one())


@dataclass
class _Call:
    """A call that runs: what its completions had as far as is known here, by place, and where it runs now."""

    begun: dict[int, Completion]
    replica: Replica | None = None
    lost: list[ActorFailed] = field(default_factory=list)

    def goes_on(self, part: Progress) -> None:
        """Adds what was sampled since."""
        if part.place not in self.begun:
            self.begun[part.place] = Completion([], [], [], "abort")
        self.begun[part.place].extend(part.tokens)


class Generators:
    """All replicas; `actors/routing.py` says which of them takes a request.

    The call of a replica that dies goes to another one, or waits for one to serve again. It goes on from the tokens
    that `progress` has brought of it, else anew: under the same seed it samples the same.
    """

    def __init__(self, replicas: Sequence[Replica], turns: Turns | None = None) -> None:
        """`turns` are those that they take with the trainer, where they share devices."""
        self.replicas = list(replicas)
        """Those that take requests."""
        self.router = Router()
        self._clock = turns.clock if turns else Clock()
        self._calls: dict[str, _Call] = {}
        self._away: dict[str, str] = {}
        self._patience_s = _ANSWER_S
        self._came, self._ended = asyncio.Event(), asyncio.Event()

    def add(self, replica: Replica) -> None:
        """From now on it takes requests: it is to hold the current version."""
        self._away.pop(replica.name, None)
        self.replicas.append(replica)
        self._came.set()

    def lose(self, replica: Replica, reason: str) -> None:
        """It has died; another of its name is to come."""
        replica.lose(reason)
        self._away[replica.name] = first_line(reason)
        # It starts an engine, and once more where that fails.
        self._patience_s = 4 * replica.config.start_timeout_s + _ANSWER_S
        if replica in self.replicas:
            self.replicas.remove(replica)
            self.router.lose(replica.name)

    async def retire(self, replica: Replica) -> None:
        """It takes no request any more; waits until those that it has have ended, there or, if it dies, elsewhere."""
        self.replicas.remove(replica)
        self.router.lose(replica.name)
        while replica.running:
            self._ended.clear()
            await self._ended.wait()

    def give_up(self, name: str) -> None:
        """The replica `name`, which has died, gets no successor."""
        self._away.pop(name, None)
        self._came.set()

    async def complete(self) -> None:
        """Waits until every replica that has died has its successor, or is given up."""
        while self._away:
            await self._one_back()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_new_tokens: int | None = None,
        request_id: str = "",
        *,
        begun: Mapping[int, Completion] | None = None,
        wanted: int = 0,
        affinity: str = "",
    ) -> list[Completion]:
        """See `Generator.generate`. Calls of one `affinity`, the turns of a conversation, find their prefix again."""
        call = _Call({place: part.after(0) for place, part in (begun or {}).items()})
        if request_id:
            self._calls[request_id] = call
        try:
            while True:
                replica = call.replica = await self._choose(affinity)
                try:
                    return await self._ask(replica, prompts, seeds, max_new_tokens, request_id, call.begun, wanted)
                except ActorFailed as error:
                    if not replica.lost:
                        raise
                    call.lost.append(error)
                if len(call.lost) == MOST_LIVES:
                    raise given_up(call.lost, request_id or f"of {len(prompts)} prompts")
        finally:
            self._calls.pop(request_id, None)

    async def _choose(self, affinity: str) -> Replica:
        """The replica for a call of `affinity`; waits for one where all have died."""
        while not self.replicas:
            await self._one_back()
        loads = {r.name: Load(r.running, r.config.max_num_seqs, r.flipping) for r in self.replicas}
        chosen = self.router.choose(loads, affinity)
        return next(replica for replica in self.replicas if replica.name == chosen)

    async def _one_back(self) -> None:
        self._came.clear()
        dead = ", ".join(f"{name} ({reason})" for name, reason in self._away.items())
        await within(self._patience_s, f"a generator to serve again after {dead}", self._came.wait())

    async def _ask(
        self, replica: Replica, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *options: Any
    ) -> list[Completion]:
        replica.running += len(prompts)
        try:
            return await self._clock.within(
                replica.config.request_timeout_s + _ANSWER_S,
                f"{len(prompts)} completions of {replica.name}",
                replica.ask(replica.mesh.generate.call_one(prompts, seeds, *options)),
            )
        finally:
            replica.running -= len(prompts)
            self._ended.set()

    async def progress(self) -> list[Progress]:
        """What running calls have sampled since the last time; costs no decode step anything."""
        asked = await self._ask_all("the generators' progress", lambda replica: replica.mesh.progress.call_one())
        parts = []
        for replica, found in asked:
            for part in found:
                call = self._calls.get(part.request_id)
                if call is not None and call.replica is not replica:
                    continue  # it runs elsewhere by now, from what was known before
                if call is not None and not replica.config.keep_routes:  # progress has no routes
                    call.goes_on(part)
                parts.append(part)
        return parts

    async def peak_memory(self) -> dict[str, int]:
        """Bytes by replica, engine processes included."""
        what = "the generators' memory figures"
        asked = await self._ask_all(what, lambda replica: replica.mesh.peak_memory.call_one())
        return {replica.name: peak for replica, peak in asked}

    async def shutdown(self) -> None:
        await self._ask_all("the engines to end", lambda replica: replica.mesh.shutdown.call_one())

    async def _ask_all(self, what: str, call: Callable[[Replica], Awaitable[T]]) -> list[tuple[Replica, T]]:
        """The answers of all that do not die over it."""

        async def ask(replica: Replica) -> list[tuple[Replica, T]]:
            try:
                return [(replica, await replica.ask(call(replica)))]
            except ActorFailed:
                if not replica.lost:
                    raise
                return []

        answers = await within(_ANSWER_S, what, asyncio.gather(*(ask(replica) for replica in self.replicas)))
        return [answer for found in answers for answer in found]
