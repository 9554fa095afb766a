"""Where proposals meet the slots of the solver's replay, and what happens when there is none.

    proposer's episode ── solve(task) ──►  ┌──────────┐  ◄── take() ── solver's rollout loop, which holds a slot
                       ◄── its rewards ──  └──────────┘  ── proposal ──►

    a proposal waits for a slot of the solver's, then for the answers; at most until the proposer's trainer has
    waited `patience_s` for a batch while the solver answers nothing

    a slot of the solver's waits for a proposal; at most until the solver's trainer has waited `patience_s` for a
    batch while no episode of the proposer's is under way

Behind that each goes on alone: the proposal is answered, the slot gets a proposal, and what the other policy samples
for it is not trained. So neither trainer ever waits for the other's: while one waits, it is for generators. There is
no circle: proposals and slots that wait are matched at once, so that only one of the two kinds ever waits, for
episodes whose generators do not wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from forge.data import Prompt
from forge.mesh import within


@dataclass(eq=False)
class Proposal:
    """A legal task, as the solver is asked."""

    prompt: Prompt
    answered: asyncio.Future[list[float] | None] = field(default_factory=lambda: asyncio.Future())

    def tell(self, rewards: list[float] | None) -> None:
        """The rewards of its answers, or None: whoever had it gives it back. The first call counts."""
        if not self.answered.done():
            self.answered.set_result(rewards)


@dataclass
class Side:
    """What the other policy has to know of one."""

    working: int = 0
    """Episodes under way, which may give the other side what it waits for."""
    hungry: bool = False
    """Its trainer has waited for a batch longer than is put up with."""
    ended: bool = False
    """It is trained no more."""


class Handover:
    """See above. For one event loop."""

    def __init__(self, patience_s: float, timeout_s: float) -> None:
        """`timeout_s`: after so many seconds of waiting for the other side something is broken."""
        self.proposer, self.solver = Side(), Side()
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self._proposals: deque[Proposal] = deque()
        self._seats: deque[asyncio.Future[Proposal | None]] = deque()

    async def solve(self, prompt: Prompt) -> list[float] | None:
        """The rewards of the solver's answers; None where they are not to be had, see above.

        Raises DeadlineExceeded.
        """
        proposal = Proposal(prompt)
        self._proposals.append(proposal)
        self._settle()
        try:
            return await within(self._timeout_s, f"the solver's answers to {prompt.text[:80]!r}", proposal.answered)
        finally:
            if proposal in self._proposals:
                self._proposals.remove(proposal)

    async def take(self) -> Proposal | None:
        """A proposal for a slot of the solver's; None where none is to be had, see above. Raises DeadlineExceeded."""
        seat: asyncio.Future[Proposal | None] = asyncio.Future()
        self._seats.append(seat)
        self._settle()
        try:
            return await within(self._timeout_s, "a proposal to answer", seat)
        except BaseException:
            # Both may have come in the same turn of the loop: the proposal, and who cancels.
            if seat.done() and not seat.cancelled() and (proposal := seat.result()) is not None:
                proposal.tell(None)
            raise
        finally:
            if seat in self._seats:
                self._seats.remove(seat)

    @contextmanager
    def working(self, side: Side) -> Iterator[None]:
        """An episode of `side` is under way."""
        side.working += 1
        try:
            yield
        finally:
            side.working -= 1
            self._settle()

    @contextmanager
    def waiting(self, side: Side) -> Iterator[None]:
        """The trainer of `side` waits for a batch."""
        timer = asyncio.get_running_loop().call_later(self._patience_s, self._starve, side)
        try:
            yield
        finally:
            timer.cancel()
            side.hungry = False

    def end(self, side: Side) -> None:
        """Its last step is done, and its loops are cancelled."""
        side.ended = True
        self._settle()

    def _starve(self, side: Side) -> None:
        side.hungry = True
        self._settle()

    def _settle(self) -> None:
        """Brings together what waits; sends on alone who has waited long enough."""
        proposals = deque(p for p in self._proposals if not p.answered.done())
        seats = deque(s for s in self._seats if not s.done())
        while proposals and seats:
            seats.popleft().set_result(proposal := proposals.popleft())
            self._proposals.remove(proposal)
        if _goes_alone(self.proposer, self.solver):
            for proposal in proposals:
                proposal.tell(None)
        if _goes_alone(self.solver, self.proposer):
            for seat in seats:
                seat.set_result(None)


def _goes_alone(own: Side, other: Side) -> bool:
    return other.working == 0 and (own.hungry or other.ended)
