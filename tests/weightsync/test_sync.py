"""Laws of publish, stage, flip and join, on fakes that record who was called when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from forge.errors import ActorFailed, WeightSyncError
from weightsync.config import WeightSyncConfig
from weightsync.layout import make_layout
from weightsync.offer import Endpoint, Offer
from weightsync.sync import Applied, WeightSync


class FakeTrainer:
    """Two buffers that remember which version they hold, -1 while one is being written."""

    def __init__(self) -> None:
        self.buffers = [-1, -1]
        self.offers: list[Offer] = []
        self.sent: list[tuple[str, int, int]] = []
        self.failing: set[int] = set()
        self.life, self.dead = 0, False
        self.peers: set[str] = set()

    def die(self) -> None:
        self.buffers, self.dead = [-1, -1], True

    def come_back(self) -> None:
        self.life, self.dead, self.peers = self.life + 1, False, set()

    def check_alive(self) -> None:
        if self.dead:
            raise ActorFailed("trainer", "killed")

    async def connect(self) -> Endpoint:
        self.check_alive()
        layout = make_layout([("w", (2,), torch.float32)])
        return Endpoint("fake", layout, [layout], [None], 1.0)

    async def add_peer(self, peer: str, needed: Any) -> None:
        self.check_alive()
        self.peers.add(peer)

    async def remove_peer(self, peer: str) -> None:
        self.check_alive()
        self.peers.discard(peer)

    async def snapshot(self, version: int, buffer: int) -> float:
        self.check_alive()
        self.buffers[buffer] = -1
        await asyncio.sleep(0)
        self.buffers[buffer] = version
        return 0.0

    async def offer(self, version: int, buffer: int, base: int) -> Offer:
        self.check_alive()
        if version in self.failing:
            self.failing.remove(version)
            raise WeightSyncError(f"no checksum of version {version}")
        self.offers.append(Offer(version, buffer, "full" if base < 0 else "delta", base, [64], [[]]))
        return self.offers[-1]

    async def send(self, peer: str, offer: Offer) -> None:
        self.sent.append((peer, offer.version, offer.epoch))


class FakeReplica:
    """Reads its buffer before and after it is allowed to go on; both must hold the version it was told."""

    def __init__(self, trainer: FakeTrainer, name: str = "generator_0") -> None:
        self.name, self.trainer = name, trainer
        self.may_go_on, self.may_flip = asyncio.Event(), asyncio.Event()
        self.may_go_on.set()
        self.may_flip.set()
        self.failing: list[Exception] = []
        self.staged, self.applied = -1, [0]
        self.life, self.lives = 0, [0]
        self.flipping = False
        self._applied = asyncio.Event()

    async def connect(self, endpoint: Endpoint) -> list[dict[str, Any]]:
        self.life = self.trainer.life
        return [{"w": ((0, 2),)}]

    async def stage(self, offer: Offer) -> float:
        if offer.kind == "delta":
            assert self.staged == offer.base, "a delta came to a replica that does not hold its base"
        self.staged = -1
        before = self.trainer.buffers[offer.buffer]
        await self.may_go_on.wait()
        await asyncio.sleep(0)
        if self.failing:
            raise self.failing.pop(0)
        if self.life != self.trainer.life or self.trainer.dead:
            raise WeightSyncError("the trainer's memory is gone")
        after = self.trainer.buffers[offer.buffer]
        assert before == after == offer.version, "a buffer was overwritten while it was read"
        self.staged = offer.version
        return 0.5

    async def flip(self, version: int) -> float:
        assert self.staged == version
        self.flipping = True
        await asyncio.sleep(0)
        await self.may_flip.wait()
        self.flipping = False
        assert (version, self.life) > (self.applied[-1], self.lives[-1]), "versions only grow"
        self.applied.append(version)
        self.lives.append(self.life)
        self._applied.set()
        return 0.001

    async def until(self, version: int) -> None:
        while version not in self.applied:
            self._applied.clear()
            await self._applied.wait()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


class Running:
    """A WeightSync whose loop runs; collects what it reports."""

    def __init__(
        self, trainer: FakeTrainer, replicas: list[FakeReplica], notice_s: float = 0.0, **options: Any
    ) -> None:
        self.sync = WeightSync(trainer, replicas, WeightSyncConfig(**options), notice_s=notice_s)
        self.seen: list[Applied] = []

    async def __aenter__(self) -> Running:
        await self.sync.connect()
        self.loop = asyncio.create_task(self.sync.run(self._report))
        return self

    async def _report(self, applied: Applied) -> None:
        self.seen.append(applied)

    async def __aexit__(self, *_: object) -> None:
        self.sync.close()
        await self.loop


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_stopped_replica_never_holds_up_a_publish_and_the_newest_version_wins() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        replica = FakeReplica(trainer)
        async with Running(trainer, [replica]) as running:
            replica.may_go_on.clear()
            for version in range(1, 11):
                await running.sync.publish(version)
                await turns(5)
            replica.may_go_on.set()
            await replica.until(10)
        assert replica.applied == [0, 1, 10]
        assert [a.version for a in running.seen] == [1, 10]
        assert running.sync.skipped == 8
        assert running.sync.applied_version == 10

    run(scenario)


def test_a_version_is_reported_only_when_every_replica_holds_it() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        fast, slow = FakeReplica(trainer, "generator_0"), FakeReplica(trainer, "generator_1")
        slow.may_go_on.clear()
        async with Running(trainer, [fast, slow]) as running:
            await running.sync.publish(1)
            await turns()
            assert fast.applied == [0, 1]
            assert running.seen == []
            slow.may_go_on.set()
            await slow.until(1)
        assert [a.version for a in running.seen] == [1]
        assert running.seen[0].stage_s == 0.5

    run(scenario)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_replicas_flip_in_turn_and_the_others_go_on(at_once: int) -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        replicas = [FakeReplica(trainer, f"generator_{i}") for i in range(4)]
        for replica in replicas:
            replica.may_flip.clear()
        async with Running(trainer, replicas, flips_at_once=at_once) as running:
            await running.sync.publish(1)
            await turns()
            assert sum(r.flipping for r in replicas) == at_once
            for replica in replicas:
                replica.may_flip.set()
            await asyncio.gather(*(r.until(1) for r in replicas))
        assert [a.version for a in running.seen] == [1]

    run(scenario)


@pytest.mark.parametrize("phase", ["stage", "flip"])
def test_a_replica_that_hangs_fails_at_the_deadline_by_name(phase: str) -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        replica = FakeReplica(trainer, "generator_3")
        (replica.may_go_on if phase == "stage" else replica.may_flip).clear()
        running = await Running(trainer, [replica], deadline_s=0.05).__aenter__()
        await running.sync.publish(1)
        match = (
            rf"waited 0\.05 s for generator_3 to {phase} .*version 1 \(64 bytes by fake\).*it goes on serving version 0"
        )
        with pytest.raises(WeightSyncError, match=match):
            await running.loop
        assert running.seen == []
        assert running.sync.applied_version == 0

    run(scenario)


def test_a_failed_update_is_tried_again_with_the_newest_version_until_too_many_have_failed() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        good, bad = FakeReplica(trainer, "generator_0"), FakeReplica(trainer, "generator_1")
        bad.failing = [WeightSyncError("out of memory")] * 2
        async with Running(trainer, [good, bad], max_failures=3) as running:
            await running.sync.publish(1)
            await bad.until(1)
            await turns()
            assert running.sync.failures == 0
        assert good.applied == bad.applied == [0, 1]
        assert [a.version for a in running.seen] == [1]
        # A new epoch each time: whatever the failed transfer left behind belongs to the old one.
        assert [s for s in trainer.sent if s[0] == "generator_1"] == [("generator_1", 1, e) for e in (0, 1, 2)]

        bad.failing = [WeightSyncError("out of memory")] * 3
        running = await Running(trainer, [good, bad], max_failures=3).__aenter__()
        await running.sync.publish(2)
        with pytest.raises(WeightSyncError, match="out of memory"):
            await running.loop
        assert running.seen == []

    run(scenario)


def test_an_offer_that_fails_is_tried_again() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        trainer.failing = {1}
        replica = FakeReplica(trainer)
        async with Running(trainer, [replica], max_failures=2) as running:
            await running.sync.publish(1)
            await replica.until(1)
        assert running.sync.applied_version == 1

    run(scenario)


def test_a_delta_is_offered_only_to_replicas_that_hold_its_base() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        one, two = FakeReplica(trainer, "generator_0"), FakeReplica(trainer, "generator_1")
        async with Running(trainer, [one, two], max_failures=2) as running:
            for version in (1, 2, 3):
                if version == 3:
                    two.failing = [WeightSyncError("half a transfer")]
                await running.sync.publish(version)
                await asyncio.gather(one.until(version), two.until(version))
                await turns()
            await running.sync.publish(4)
            await asyncio.gather(one.until(4), two.until(4))
        assert [(o.version, o.base) for o in trainer.offers] == [(1, -1), (2, 1), (3, 2), (3, -1), (4, 3)]

    run(scenario)


def test_a_late_replica_holds_the_newest_version_before_it_counts() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        first, late = FakeReplica(trainer, "generator_0"), FakeReplica(trainer, "generator_1")
        async with Running(trainer, [first]) as running:
            await running.sync.publish(1)
            await first.until(1)
            late.may_go_on.clear()
            joining = asyncio.create_task(running.sync.join(late))
            await turns()
            assert not joining.done()
            await running.sync.publish(2)  # while it is being brought to version 1
            late.may_go_on.set()
            assert await joining == 2
            await first.until(2)
            await running.sync.publish(3)
            await asyncio.gather(first.until(3), late.until(3))
        assert late.applied == [0, 1, 2, 3]
        assert [a.version for a in running.seen] == [1, 2, 3]

    run(scenario)


def test_a_replica_that_cannot_join_harms_nobody() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        first, late = FakeReplica(trainer, "generator_0"), FakeReplica(trainer, "generator_1")
        late.failing = [WeightSyncError("no memory")]
        async with Running(trainer, [first]) as running:
            await running.sync.publish(1)
            await first.until(1)
            with pytest.raises(WeightSyncError, match="no memory"):
                await running.sync.join(late)
            assert await running.sync.join(late) == 1
            await running.sync.publish(2)
            await asyncio.gather(first.until(2), late.until(2))

    run(scenario)


def test_a_join_is_refused_once_the_loop_has_ended_and_given_up_by_who_asked_for_it() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        late, other = FakeReplica(trainer, "late"), FakeReplica(trainer, "other")
        async with Running(trainer, [FakeReplica(trainer)]) as running:
            await running.sync.publish(1)
            late.may_go_on.clear()
            joining = asyncio.create_task(running.sync.join(late))
            await asyncio.sleep(0.01)
            joining.cancel()
            await asyncio.wait([joining])
            late.may_go_on.set()
            assert await running.sync.join(other) == 1, "one who left ended the loop"
            await running.sync.publish(2)
            await other.until(2)
            assert "late" not in running.sync.describe()
        with pytest.raises(WeightSyncError, match="the weight loop has ended"):
            await running.sync.join(late)

    run(scenario)


def test_nobody_waits_for_a_replica_that_has_left() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        first, dead = FakeReplica(trainer, "generator_0"), FakeReplica(trainer, "generator_1")
        dead.failing = [WeightSyncError("killed")]
        async with Running(trainer, [first, dead], max_failures=2) as running:
            await running.sync.publish(1)
            await first.until(1)
            running.sync.leave(dead)
            await turns()
            assert trainer.peers == {"generator_0"}, "the trainer makes checksums for the dead one, and may wait for it"
            successor = FakeReplica(trainer, "generator_1")
            joining = asyncio.create_task(running.sync.join(successor))
            running.sync.leave(dead)
            await joining
            await turns()
            assert trainer.peers == {"generator_0", "generator_1"}
        assert [a.version for a in running.seen] == [1]

    run(scenario)


@pytest.mark.parametrize("own_half_fails", [True, False])
def test_a_replica_whose_death_the_trainer_notices_first_fails_no_update(own_half_fails: bool) -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        first, dying = FakeReplica(trainer, "generator_0"), FakeReplica(trainer, "generator_1")
        dying.may_go_on.clear()

        async def send(peer: str, offer: Offer) -> None:
            if peer == dying.name:
                raise WeightSyncError("worker 0 of generator_1 broke off: Connection reset by peer")

        trainer.send = send  # type: ignore[method-assign]
        async with Running(trainer, [first, dying], notice_s=0.3) as running:
            await running.sync.publish(1)
            await first.until(1)
            await asyncio.sleep(0.02)
            running.sync.leave(dying)
            if own_half_fails:
                dying.failing = [ActorFailed("generator_1", "killed")]
                dying.may_go_on.set()
            await running.sync.publish(2)
            await first.until(2)
        assert [a.version for a in running.seen][-1] == 2
        assert running.sync.failures == 0

    run(scenario)


def test_of_two_halves_that_fail_the_one_that_tells_of_a_death_counts() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        dying = FakeReplica(trainer)
        dying.may_go_on.clear()
        dying.failing = [ActorFailed("generator_0", "killed")]

        async def send(peer: str, offer: Offer) -> None:
            asyncio.get_running_loop().call_later(0.01, dying.may_go_on.set)
            raise WeightSyncError("worker 0 of generator_0 broke off: Connection reset by peer")

        trainer.send = send  # type: ignore[method-assign]
        running = await Running(trainer, [dying], notice_s=0.1).__aenter__()
        await running.sync.publish(1)
        with pytest.raises(ActorFailed, match="generator_0 failed: killed"):
            await running.loop

    run(scenario)


def test_a_trainer_whose_death_a_replica_notices_first_fails_no_update() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        serving = FakeReplica(trainer)
        async with Running(trainer, [serving], notice_s=0.3) as running:
            serving.may_go_on.clear()
            await running.sync.publish(1)
            await turns()
            trainer.die()
            serving.failing = [WeightSyncError("trainer rank 0 broke off: Connection reset by peer")]
            serving.may_go_on.set()
            await asyncio.sleep(0.02)
            running.sync.lose_source()
            trainer.come_back()
            await running.sync.reconnect()
            await running.sync.publish(1)
            await serving.until(1)
        assert (running.sync.failures, serving.lives) == (0, [0, 1])

    run(scenario)


def test_a_failure_that_no_death_explains_counts_as_soon_as_none_is_to_be_expected() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        replica = FakeReplica(trainer)
        replica.failing = [WeightSyncError("out of memory")]
        running = await Running(trainer, [replica], notice_s=0.1).__aenter__()
        await running.sync.publish(1)
        with pytest.raises(WeightSyncError, match="out of memory"):
            await running.loop

    run(scenario)


def test_a_trainer_that_does_not_forget_a_dead_replica_fails_an_update_and_is_asked_again() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        first, dead = FakeReplica(trainer, "generator_0"), FakeReplica(trainer, "generator_1")
        forget, asked = trainer.remove_peer, list[str]()

        async def remove_peer(peer: str) -> None:
            asked.append(peer)
            if len(asked) == 1:
                await asyncio.sleep(60)
            await forget(peer)

        trainer.remove_peer = remove_peer  # type: ignore[method-assign]
        async with Running(trainer, [first, dead], deadline_s=0.1, max_failures=2) as running:
            running.sync.leave(dead)
            while trainer.peers != {"generator_0"}:
                assert not running.loop.done()
                await asyncio.sleep(0.01)
            assert running.sync.failures == 1
            await running.sync.publish(1)
            await first.until(1)
            await turns()
        assert (running.sync.failures, asked) == (0, ["generator_1", "generator_1"])

    run(scenario)


def test_one_that_dies_in_the_update_behind_which_it_would_depart_is_no_failure_of_it() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        staying, leaving = FakeReplica(trainer), FakeReplica(trainer, "generator_1")
        async with Running(trainer, [staying, leaving]) as running:
            leaving.may_go_on.clear()
            await running.sync.publish(1)
            await turns()
            departing = asyncio.create_task(running.sync.depart(leaving))
            await turns()
            leaving.failing = [ActorFailed("generator_1", "calls to it fail")]
            leaving.may_go_on.set()
            await departing
            await turns()
            assert not running.loop.done()
        assert [a.version for a in running.seen] == [1]

    run(scenario)


def test_a_death_in_the_turn_in_which_connect_is_answered_is_not_forgotten() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        staying, dying = FakeReplica(trainer), FakeReplica(trainer, "generator_1")
        connect = dying.connect

        async def connect_and_die(endpoint: Endpoint) -> list[dict[str, Any]]:
            needed = await connect(endpoint)
            running.sync.leave(dying)
            return needed

        dying.connect = connect_and_die  # type: ignore[method-assign]
        async with (running := Running(trainer, [staying, dying])):
            await turns()
            assert trainer.peers == {"generator_0"}

    run(scenario)


def test_one_that_dies_while_all_connect_is_left_out() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        dying, other = FakeReplica(trainer, "generator_0"), FakeReplica(trainer, "generator_1")
        sync = WeightSync(trainer, [dying, other])

        async def die(endpoint: Endpoint) -> list[dict[str, Any]]:
            sync.leave(dying)
            raise ActorFailed("generator_0", "killed")

        dying.connect = die  # type: ignore[method-assign]
        await sync.connect()
        assert trainer.peers == {"generator_1"}
        other.connect = die  # type: ignore[method-assign]
        with pytest.raises(ActorFailed, match="killed"):
            await sync.connect()

    run(scenario)


def test_versions_only_grow() -> None:
    async def scenario() -> None:
        sync = WeightSync(FakeTrainer(), [])
        await sync.publish(1)
        with pytest.raises(WeightSyncError, match="version 1 was published after 1"):
            await sync.publish(1)

    run(scenario)


@pytest.mark.parametrize("seed", range(200))
def test_in_any_order_of_publishes_stops_failures_joins_and_deaths_no_buffer_is_torn_and_the_last_version_arrives(
    seed: int,
) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        trainer = FakeTrainer()
        replicas = [FakeReplica(trainer, f"generator_{i}") for i in range(3)]
        joins: list[asyncio.Task[int]] = []
        version = 0
        async with Running(trainer, replicas[:2], max_failures=1000) as running:
            for _ in range(60):
                replica = rng.choice(replicas)
                match rng.choice(
                    ["publish", "publish", "stop", "go", "hold", "flip", "fail", "fail offer", "join", "die"]
                ):
                    case "publish":
                        version += 1
                        await running.sync.publish(version)
                    case "stop":
                        replica.may_go_on.clear()
                    case "go":
                        replica.may_go_on.set()
                    case "hold":
                        replica.may_flip.clear()
                    case "flip":
                        replica.may_flip.set()
                    case "fail":
                        replica.failing.append(WeightSyncError("now and then"))
                    case "fail offer":
                        trainer.failing.add(version)
                    case "join" if not joins:
                        replicas[2].failing.clear()
                        joins.append(asyncio.create_task(running.sync.join(replicas[2])))
                    case "die":
                        trainer.die()
                        running.sync.lose_source()
                        await turns(rng.randrange(8))
                        for replica in replicas:
                            replica.may_go_on.set()
                            replica.may_flip.set()
                        trainer.come_back()
                        await running.sync.reconnect()
                        await running.sync.publish(max(1, version))
                        version = max(1, version)
                await turns(rng.randrange(8))
            replicas[2].failing.clear()
            for replica in replicas:
                replica.may_go_on.set()
                replica.may_flip.set()
            version += 1
            await running.sync.publish(version)
            await asyncio.gather(*(r.until(version) for r in replicas[:2]))
            assert running.loop.done() is False
            for join in joins:
                await asyncio.wait([join])
            await turns(200)
        reported = [a.version for a in running.seen]
        assert reported == sorted(set(reported))
        assert reported[-1] == version == running.sync.applied_version

    run(scenario)


def test_visitors_get_the_newest_version_all_the_same_one_and_keep_it_while_the_others_go_on() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        serving = FakeReplica(trainer)
        visitors = [FakeReplica(trainer, f"evaluator_{i}") for i in range(2)]
        async with Running(trainer, [serving]) as running:
            assert await running.sync.visit(visitors) == 0, "nothing was published: they are as they were loaded"
            await running.sync.publish(1)
            assert await running.sync.visit(visitors) == 1
            for version in (2, 3, 4):
                await running.sync.publish(version)
                await serving.until(version)
            assert [v.applied for v in visitors] == [[0, 1], [0, 1]]
            assert await running.sync.visit(visitors) == 4
            assert await running.sync.visit(visitors) == 4, "a second visit brings nothing anew"
        assert [v.applied for v in visitors] == [[0, 1, 4], [0, 1, 4]]

    run(scenario)


def test_a_visitor_by_the_name_of_one_that_died_is_another_one() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        dead, successor = FakeReplica(trainer, "evaluator_0"), FakeReplica(trainer, "evaluator_0")
        async with Running(trainer, [FakeReplica(trainer)]) as running:
            await running.sync.publish(1)
            assert await running.sync.visit([dead]) == 1
            dead.failing = [ActorFailed("evaluator_0", "killed")] * 9
            await running.sync.publish(2)
            with pytest.raises(ActorFailed, match="killed"):
                await running.sync.visit([dead])
            assert await running.sync.visit([successor]) == 2
        assert successor.applied == [0, 2]

    run(scenario)


@pytest.mark.parametrize("closing", [False, True])
def test_who_departs_goes_between_two_updates_and_the_next_one_is_without_it(closing: bool) -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        staying, leaving = FakeReplica(trainer), FakeReplica(trainer, "generator_1")
        async with Running(trainer, [staying, leaving]) as running:
            leaving.may_go_on.clear()
            await running.sync.publish(1)
            await turns(9)
            departing = asyncio.create_task(running.sync.depart(leaving))
            await turns(9)
            assert not departing.done(), "it reads"
            if closing:
                running.sync.close()
            leaving.may_go_on.set()
            await departing
            assert leaving.applied == [0, 1]
            if not closing:
                await running.sync.publish(2)
                await staying.until(2)
        assert leaving.applied == [0, 1]
        await running.sync.depart(staying)  # nobody to wait for

    run(scenario)


def test_nobody_waits_for_visitors_and_one_that_fails_harms_nobody() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        serving, visitor = FakeReplica(trainer), FakeReplica(trainer, "evaluator_0")
        visitor.failing = [WeightSyncError("no memory")]
        async with Running(trainer, [serving]) as running:
            await running.sync.publish(1)
            with pytest.raises(WeightSyncError, match="no memory"):
                await running.sync.visit([visitor])
            assert [a.version for a in running.seen] == [1], "the slots of version 1 were held for a visitor"
            await running.sync.publish(2)
            await serving.until(2)
            assert await running.sync.visit([visitor]) == 2
        assert running.sync.failures == 0
        with pytest.raises(WeightSyncError, match="the weight loop has ended"):
            await running.sync.visit([visitor])

    run(scenario)


def test_a_visit_that_nobody_can_answer_any_more_is_cancelled() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        serving, visitor = FakeReplica(trainer), FakeReplica(trainer, "evaluator_0")
        async with Running(trainer, [serving]) as running:
            visiting = asyncio.create_task(running.sync.visit([visitor]))
            await turns(1)  # it has been asked for, and the loop has not woken yet
            running.sync.close()
        with pytest.raises(asyncio.CancelledError):
            await visiting

    run(scenario)


def test_a_source_that_comes_back_publishes_its_newest_version_once_more_and_nobody_fails_meanwhile() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        serving, late, visitor = (FakeReplica(trainer, name) for name in ("generator_0", "generator_1", "evaluator_0"))
        async with Running(trainer, [serving], max_failures=1) as running:
            sync = running.sync
            await sync.publish(1)
            await serving.until(1)
            assert await sync.visit([visitor]) == 1
            serving.may_go_on.clear()
            await sync.publish(2)
            await turns()
            trainer.die()
            sync.lose_source()
            serving.may_go_on.set()
            joining, visiting = asyncio.create_task(sync.join(late)), asyncio.create_task(sync.visit([visitor]))
            await turns()
            assert not joining.done()
            assert not visiting.done()
            assert serving.applied == [0, 1]
            trainer.come_back()
            await sync.reconnect()
            await turns()
            assert not joining.done(), "version 2 was published, and is nowhere yet"
            with pytest.raises(WeightSyncError, match="versions only grow"):
                await sync.publish(1)
            await sync.publish(2)
            assert (await joining, await visiting) == (2, 2)
            await serving.until(2)
            await sync.publish(3)
            await serving.until(3)
        assert [a.version for a in running.seen] == [1, 2, 3]
        assert (sync.failures, serving.lives) == (0, [0, 0, 1, 1])

    run(scenario)


def test_replicas_that_hold_the_newest_version_get_it_again_from_a_source_that_came_back() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        serving = FakeReplica(trainer)
        async with Running(trainer, [serving]) as running:
            await running.sync.publish(1)
            await serving.until(1)
            running.sync.lose_source()
            trainer.die()
            again = asyncio.create_task(running.sync.reconnect())
            with pytest.raises(ActorFailed):
                await again
            trainer.come_back()
            await running.sync.reconnect()
            await running.sync.publish(1)
            await turns()
        assert (serving.applied, serving.lives) == ([0, 1, 1], [0, 0, 1])
        assert [a.version for a in running.seen] == [1]

    run(scenario)


def test_a_source_cannot_come_back_once_the_loop_has_ended() -> None:
    async def scenario() -> None:
        trainer = FakeTrainer()
        async with Running(trainer, [FakeReplica(trainer)]) as running:
            pass
        with pytest.raises(WeightSyncError, match="the weight loop has ended"):
            await running.sync.reconnect()

    run(scenario)
