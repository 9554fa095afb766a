"""One session: the tree of its conversations, token by token, and the samples that it makes. Pure.

    begin(messages, tools)   finds the longest conversation on record that these go on with
    call.given(template)     the tokens of what is new: the slow part, for a thread
    record(call, ...)        the answer is a new turn of the tree
    samples()                one a leaf

A turn holds the tokens that were given, and those that were sampled behind them; what the policy saw at a turn is
everything on the way from its root. So conversations share what they have in common, and nothing is ever tokenised
twice. A sampled token that several leaves have in common is trained in the first of them, and given in the others.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.environments.templates import ChatTemplate, Message
from actors.gateway.config import SessionLimits
from actors.gateway.conversations import message_key, tools_key
from actors.rollout import episode_seed
from actors.vllm_engine import Completion
from forge.episodes import EpisodeTokens
from forge.errors import GatewayError

ROOT = -1
"""In place of the turn before, where there is none."""


@dataclass
class Turn:
    """One answer, and what was said before it since the answer of the turn before."""

    id: str
    """Of the completion."""
    parent: int
    """Number of the turn before, or ROOT."""
    conversation: int
    """Number of its root's conversation."""
    tools: list[dict[str, Any]]
    """That the policy was shown; the same all the way from the root."""
    observed: list[Message]
    """Assistant messages among them were not sampled: the agent made them up, or altered them."""
    given: list[int]
    """Tokens of `observed`, with whatever the template puts around them."""
    answer: Completion
    message: Message
    """The answer as the agent got it."""
    keys: list[str] = field(init=False, repr=False)
    """Of `observed` and `message`."""
    tools_key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.keys = [message_key(message) for message in (*self.observed, self.message)]
        self.tools_key = tools_key(self.tools)


@dataclass
class Call:
    """A chat call under way: what it goes on with, and what is new."""

    parent: int
    conversation: int
    tools: list[dict[str, Any]]
    new: list[Message]
    last: Turn | None
    """The turn `parent`."""
    before: list[int]
    """All tokens up to that turn's last."""
    number: int
    """Tool calls on the way: how many the next one has before it."""

    def given(self, template: ChatTemplate) -> list[int]:
        """The tokens of what is new, up to where the policy answers. Raises TranscriptError where it refuses them."""
        if self.last is None:
            return template.whole(self.new, self.tools, invite=True)
        answer = self.last.answer
        return template.following(self.new, self.tools, self.last.message, answer.token_ids, answer.finish_reason)


class Session:
    """What one agent says and is told. Times are seconds of one clock of the caller's."""

    def __init__(self, id: str, key: str, limits: SessionLimits, expires: float, *, seed: int = 0) -> None:
        """key: the agent's. expires: when it ends by itself. Equal calls under an equal seed sample alike."""
        self.id, self.key, self.limits, self.expires, self.seed = id, key, limits, expires, seed
        self.turns: list[Turn] = []
        self.rewards: list[tuple[float, str]] = []
        """Each with the id of its turn, or "" for the session's."""
        self.ended = False
        self._children: dict[int, list[int]] = {ROOT: []}
        self._numbers: dict[str, int] = {}
        self._conversations = 0
        self._calls: list[Call] = []
        self._asked: Counter[str] = Counter()
        self._unheard: set[int] = set()

    # --- a call

    def check_open(self, now: float) -> None:
        """Raises GatewayError when it has ended, or its time is over."""
        if self.ended:
            raise GatewayError(400, f"the session {self.id} has ended; open another", code="session_ended")
        if now >= self.expires:
            raise GatewayError(
                400,
                f"the session {self.id} is over its deadline of {self.limits.deadline_s:g} s; open another, or one "
                "with a longer deadline_s",
                code="session_deadline",
            )

    def begin(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], now: float) -> Call:
        """A call of `plain_messages`; `finish` it whatever happens. Raises GatewayError where a limit is reached."""
        self.check_open(now)
        if len(self._calls) >= self.limits.max_calls:
            raise GatewayError(
                429,
                f"the session has {len(self._calls)} calls under way, max_calls is {self.limits.max_calls}; wait for "
                "one of them",
                code="session_calls",
                retry=True,
            )
        if len(self.turns) + len(self._calls) >= self.limits.max_turns:
            raise GatewayError(
                400,
                f"the session has had {len(self.turns) + len(self._calls)} answers, max_turns is "
                f"{self.limits.max_turns}; end the episode, or open a session with more",
                code="session_turns",
            )
        keys = [message_key(message) for message in messages]
        parent, known = self._longest(keys, tools_key(tools))
        last = self.turns[parent] if parent != ROOT else None
        if last is None:
            self._conversations += 1
        call = Call(
            parent,
            last.conversation if last is not None else self._conversations - 1,
            [dict(tool) for tool in tools],
            [dict(message) for message in messages[known:]],
            last,
            self.tokens(parent),
            sum(len(turn.message.get("tool_calls") or ()) for turn in self.path(parent)),
        )
        self._calls.append(call)
        return call

    def _longest(self, keys: Sequence[str], tools: str) -> tuple[int, int]:
        """The turn whose conversation is the longest beginning of this one, of equal ones the latest; its messages."""
        best, known = ROOT, 0
        todo = [(ROOT, 0)]
        while todo:
            at, length = todo.pop()
            if (length, at) > (known, best):
                best, known = at, length
            for child in self._children[at]:
                turn = self.turns[child]
                end = length + len(turn.keys)
                if (at != ROOT or turn.tools_key == tools) and list(keys[length:end]) == turn.keys:
                    todo.append((child, end))
        return best, known

    def resumed(self) -> None:
        """Whoever was answered last may never have heard of it: the server died."""
        self._unheard = set(self.leaves)

    def unheard(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Turn | None:
        """The answer to an equal call that was on record when the session was `resumed`; it is given once.

        For a client that asks again since it got no answer: another one would be a branch that nobody knows of.
        """
        keys = [message_key(message) for message in messages]
        parent, known = self._longest(keys, tools_key(tools))
        for number in sorted(self._unheard.intersection(self._children[parent])):
            turn = self.turns[number]
            if turn.keys[:-1] == keys[known:] and turn.tools_key == tools_key(tools):
                self._unheard.discard(number)
                return turn
        return None

    def next_seed(self, prompt: Sequence[int]) -> int:
        """For sampling behind `prompt`: the same in every run, and another each time it is asked."""
        digest = hashlib.blake2b(repr(list(prompt)).encode(), digest_size=8).hexdigest()
        self._asked[digest] += 1
        return episode_seed(self.seed, int(digest, 16), self._asked[digest])

    def finish(self, call: Call) -> None:
        """The call is over, answered or not."""
        self._calls = [other for other in self._calls if other is not call]

    def record(self, id: str, call: Call, given: Sequence[int], answer: Completion, message: Message) -> Turn:
        """The answer to a call becomes a turn."""
        turn = Turn(id, call.parent, call.conversation, call.tools, call.new, list(given), answer, message)
        self.add(turn)
        return turn

    def add(self, turn: Turn) -> None:
        """A turn behind those that are there, its parent one of them."""
        number = len(self.turns)
        self.turns.append(turn)
        self._children[number] = []
        self._children[turn.parent].append(number)
        self._numbers[turn.id] = number
        self._conversations = max(self._conversations, turn.conversation + 1)

    def reward(self, value: float, turn: str = "") -> None:
        """What the session earned, or the turn of this completion id; adds up. Raises GatewayError (400, 404)."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise GatewayError(400, f"a reward must be a finite number, got {value!r}", param="reward")
        if turn and turn not in self._numbers:
            raise GatewayError(404, f"the session {self.id} has no completion {turn!r}; give an id of its answers")
        self.rewards.append((float(value), turn))

    # --- what came of it

    @property
    def total(self) -> float:
        """All rewards."""
        return math.fsum(value for value, _ in self.rewards)

    def path(self, number: int) -> Iterator[Turn]:
        """The turns from the root to this one."""
        numbers = []
        while number != ROOT:
            numbers.append(number)
            number = self.turns[number].parent
        return (self.turns[n] for n in reversed(numbers))

    def tokens(self, number: int) -> list[int]:
        """What the policy saw and said up to this turn's end."""
        return [token for turn in self.path(number) for part in (turn.given, turn.answer.token_ids) for token in part]

    @property
    def leaves(self) -> list[int]:
        """Turns that nothing goes on with, in the order in which they were answered."""
        return [number for number in range(len(self.turns)) if not self._children[number]]

    def samples(self) -> list[EpisodeTokens]:
        """One episode a leaf, each with the session's whole reward as its total.

        A turn's reward stands where its tokens are trained; the session's at the last token of each.
        """
        trained: set[str] = set()
        return [self._sample(leaf, trained) for leaf in self.leaves]

    def _sample(self, leaf: int, trained: set[str]) -> EpisodeTokens:
        episode = EpisodeTokens()
        for turn in self.path(leaf):
            episode.given(turn.given)
            answer = turn.answer
            if turn.id in trained:
                episode.given(answer.token_ids)
                continue
            trained.add(turn.id)
            columns = (answer.token_ids, answer.logprobs, answer.versions)
            episode.sampled(*columns, kept=answer.kept, routes=answer.routes)
            for value, where in self.rewards:
                if where == turn.id:
                    episode.reward(value)
        own = [value for value, where in self.rewards if not where]
        if own:
            episode.reward(math.fsum(own))
        episode.total, episode.rewarded = self.total, bool(self.rewards)
        return episode

    def summary(self) -> dict[str, Any]:
        """Counts, for a harness and for people."""
        return {
            "id": self.id,
            "turns": len(self.turns),
            "conversations": len(self._children[ROOT]),
            "samples": len(self.leaves),
            "sampled_tokens": sum(len(turn.answer.token_ids) for turn in self.turns),
            "unsampled_answers": sum(m["role"] == "assistant" for turn in self.turns for m in turn.observed),
            "reward": self.total,
            "ended": self.ended,
        }
