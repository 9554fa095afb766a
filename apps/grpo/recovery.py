"""The trainer dies and comes back, while the run goes on.

    trainer mesh dies ──► its calls fail; weight sync offers nothing; generators and rollout loops go on, under their
                          weights, into the slots that are free
    the guard's task      waits for new processes, the model, and the newest checkpoint's state: version c
    train loop            waits for that (`restored`), then for the replay to say which batches it serves again, and
                          for the generators to connect to the new trainer
    train loop            trains the batches since c once more, as they were, and logs nothing of it; from the newest
                          version that it had published on everything is as before: that one is published again

So versions only grow for everybody but the trainer, and no token is staler than the bound. What a death costs is the
new processes' start and the steps since the checkpoint (`run.checkpoint_every`); before the first one, those since the
start of the run. Batches come again out of the journal.

The replay's death is its client's business (`replay.actor.ReplayClient`), but for a batch that the trainer had not
opened yet: that comes again (`batch_again`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

from actors.trainer_mesh import TrainerMesh
from forge.checkpoints import Checkpoints, Saver
from forge.errors import ActorFailed, ChannelError
from forge.lasting import MOST_LIVES
from forge.supervision import Guard
from replay.actor import ReplayClient, SampledBatch
from replay.service import Rewound
from weightsync.sync import WeightSync


class Recovery:
    """The trainer's lives as the train loop sees them. Without `arm` a death is the run's end."""

    def __init__(
        self,
        trainer: TrainerMesh,
        replay: ReplayClient,
        sync: WeightSync,
        saver: Saver,
        checkpoints: Checkpoints,
        start: int,
        told: Callable[[str], None],
    ) -> None:
        """`start` is the version that the run began with; `told` gets a line for each restart."""
        self._trainer, self._replay, self._sync, self._saver = trainer, replay, sync, saver
        self._checkpoints, self._start, self._told = checkpoints, start, told
        self._guard: Guard | None = None
        self._next: TrainerMesh | None = None
        self._ready: asyncio.Future[tuple[TrainerMesh, int]] | None = None
        self._again: Counter[int] = Counter()
        self._asked: asyncio.Task[SampledBatch | None] | None = None

    def arm(self, guard: Guard) -> None:
        """From now on another trainer takes the place of one that dies, where the guard's policy says so."""
        self._guard = guard
        guard.arm(self._lost, self._revive, lambda: self._trainer.beat())

    def disarm(self) -> None:
        """The last step is done: from now on a death ends the run."""
        if self._guard is not None:
            self._guard.disarm()

    @property
    def _armed(self) -> bool:
        return self._guard is not None and self._guard.armed

    async def sample(self, version: int) -> SampledBatch | None:
        """`ReplayClient.sample`; raises ActorFailed as soon as the trainer dies."""
        if not self._armed:
            return await self._replay.sample(version, self._trainer.num_shards)
        asked = self._asked = asyncio.create_task(self._replay.sample(version, self._trainer.num_shards))
        died = asyncio.ensure_future(self._trainer.until_lost())
        try:
            await asyncio.wait([asked, died], return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                await died
            return await asked
        except asyncio.CancelledError:
            asked.cancel()
            raise
        finally:
            died.cancel()

    async def restored(self, error: ActorFailed) -> int:
        """Behind `error` in the train loop: the version from which it goes on. Raises `error` if it is another's."""
        if not self._armed or not self._trainer.lost:
            raise error
        await self._saver.settle()
        while True:
            assert self._ready is not None, "a guard told of the death"
            successor, version = await asyncio.shield(self._ready)
            self._trainer.succeed(successor)
            try:
                again = await self._go_on_from(version)
                break
            except ActorFailed as another:
                if not self._trainer.lost:
                    raise another from error
        steps = f"; {len(again)} steps are trained again" if again else ""
        self._told(f"the trainer goes on from version {version}{steps}")
        return version

    async def batch_again(self, version: int, error: ChannelError) -> int:
        """Behind `error` in the train loop: a batch whose memory died with the replay before the trainer opened it.

        Returns the version from which the train loop goes on. Raises `error` where no other replay takes its place.
        """
        self._again[version] += 1
        if not self._replay.lasts or self._again[version] > MOST_LIVES:
            raise error
        if self._trainer.world == 1:
            await self._replay.rewind(version)
            return version
        # Ranks that did get their share wait for the others, and cannot be called back.
        report = self._guard.reporter() if self._guard else None
        if report is None:
            raise error
        report(f"its ranks wait for each other over a batch that died with the replay: {error}")
        return await self.restored(ActorFailed("trainer", str(error)))

    async def _go_on_from(self, version: int) -> list[int]:
        again = await self._replay.rewind(version)  # takes back the batch that the dead trainer was given
        if self._asked is not None:
            with contextlib.suppress(Rewound):
                await self._asked
            again = await self._replay.rewind(version)  # where the replay died too, that may have been asked anew
        await self._sync.reconnect()
        if version >= self._sync.published_version:
            await self._sync.publish(version)
        return again

    def _lost(self, reason: str) -> None:
        if self._ready is None or self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()
        for life in (self._trainer, self._next):
            if life is not None:
                life.lose(reason)
        self._next = None
        self._sync.lose_source()

    async def _revive(self) -> None:
        await self._saver.settle()
        checkpoint = await asyncio.to_thread(self._checkpoints.latest)
        self._next = successor = await self._trainer.respawn()
        await successor.setup()
        version = self._start
        if checkpoint is not None:
            version = await successor.load_state(str(checkpoint.path / "trainer"))
        assert self._ready is not None, "it is armed"
        if not successor.lost:
            self._ready.set_result((successor, version))
