"""One conversation of a policy with its environment, token by token.

    observe(messages)   appends the tokens of the new messages, and the invitation to answer
    .tokens             what a generator is asked to continue
    sampled(answer)     appends the answer's tokens as they were sampled
    .episode            the same as `EpisodeTokens`, with log-probs, versions and rewards

What was sampled is what is trained: an answer is never put through the tokenizer again, and what stands before it
never changes. So a transcript may differ from what the chat template makes of the whole conversation. `check` says
where; `check_template` (`template_check.py`) says at the start whether it will, and what for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.environments.comparison import Comparison, Parting, compare
from actors.environments.templates import ChatTemplate, Message
from actors.vllm_engine import Completion
from forge.episodes import EpisodeTokens
from forge.errors import TranscriptError

_AROUND = 5
"""Tokens on either side of one that an error shows."""


@dataclass(frozen=True)
class Difference:
    """The first token at which a transcript and its chat template part."""

    index: int
    ours: int | None
    """The transcript's token there; None where it ends."""
    theirs: int | None
    ours_around: str
    theirs_around: str
    message: int
    role: str
    sampled: bool
    """Whether the policy sampled it."""

    def __str__(self) -> str:
        whose = f"message {self.message} ({self.role}{', sampled' if self.sampled else ''})"
        return (
            f"token {self.index} of {whose} is {self.ours} in the transcript, {self.theirs} in the "
            f"chat template's rendering: {self.ours_around!r} against {self.theirs_around!r}"
        )


@dataclass(frozen=True)
class Checked:
    """A transcript against the template's rendering of the whole conversation."""

    difference: Difference | None
    """The first token that differs in earnest, None where there is none."""
    retokenised: list[Difference]
    """Places before it where a sampled text has other tokens than the tokenizer gives it: as it should be."""


@dataclass
class _Turn:
    """Messages `first` to `last`, and where their tokens begin."""

    first: int
    last: int
    start: int
    sampled: bool


class Transcript:
    """A conversation that begins with `observe`; `tools` are JSON schemas that the template shows the policy."""

    def __init__(self, template: ChatTemplate, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._template = template
        self._tools = [dict(tool) for tool in tools]
        self.episode = EpisodeTokens()
        """What was observed and sampled; what nothing was sampled behind yet is left out."""
        self.messages: list[Message] = []
        """The conversation, answers included."""
        self._turns: list[_Turn] = []
        self._unanswered: list[int] = []  # tokens behind the last answer
        self._finish = ""

    @property
    def tokens(self) -> list[int]:
        """All tokens so far; a copy."""
        return [*self.episode.tokens, *self._unanswered]

    def observe(self, messages: Sequence[Message]) -> None:
        """Appends what an environment says. Observations with no answer between them are as one.

        Raises TranscriptError where the chat template refuses the messages; nothing has changed then.
        """
        turn = self._turns[-1] if self._turns else None
        waiting = turn is not None and not turn.sampled
        first = turn.first if turn is not None and waiting else len(self.messages)
        new = [*self.messages[first:], *messages]
        self._unanswered = self._tokens_of(new, answered=first > 0)
        self.messages += [dict(message) for message in messages]
        if turn is not None and waiting:
            turn.last = len(self.messages) - 1
        else:
            self._turns.append(_Turn(first, len(self.messages) - 1, len(self.episode.tokens), sampled=False))

    def _tokens_of(self, new: Sequence[Message], *, answered: bool) -> list[int]:
        if not answered:
            return self._template.whole(new, self._tools, invite=True)
        last = self.messages[self._answer_before(len(self.messages))]
        return self._template.following(new, self._tools, last, self.episode.tokens, self._finish)

    def _answer_before(self, index: int) -> int:
        return max(turn.first for turn in self._turns if turn.sampled and turn.first < index)

    def sampled(self, answer: Completion, message: Message | None = None) -> None:
        """Appends what the policy said to `.tokens`; a second one in a row goes on with the first.

        `message` is the answer in OpenAI's form, its tool calls parsed; templates that look up calls by a result's id
        need it. Without it the content is the text of the tokens. Raises TranscriptError before any observation.
        """
        if not self._turns:
            raise TranscriptError("the transcript is empty; observe what is to be answered first")
        self.episode.given(self._unanswered)
        self._unanswered = []
        if not self._turns[-1].sampled:
            place = len(self.messages)
            self._turns.append(_Turn(place, place, len(self.episode.tokens), sampled=True))
            self.messages.append({"role": "assistant", "content": ""})
        self.episode.sampled(answer.token_ids, answer.logprobs, answer.versions, kept=answer.kept, routes=answer.routes)
        self._finish = answer.finish_reason
        said = self.episode.tokens[self._turns[-1].start :]
        content = self._template.answered(said, self._finish)
        self.messages[-1] = dict(message) if message else {"role": "assistant", "content": content}

    # --- against the template

    def check(self) -> Checked:
        """Compares with what the template and the tokenizer make of the whole conversation, from scratch.

        Raises TranscriptError naming the first token that differs in earnest. Not for every episode: it costs as much
        as tokenising all of it.
        """
        found = self.compare()
        if found.difference is not None:
            raise TranscriptError(
                f"{found.difference}; what was sampled is trained as it is, but the policy saw other tokens than the "
                "chat template gives; a template that only appends avoids that"
            )
        return found

    def compare(self) -> Checked:
        """`check` without raising for a difference."""
        answered = bool(self._turns) and self._turns[-1].sampled
        places = [turn.first for turn in self._turns if turn.sampled]
        ours = self.tokens
        theirs = self._template.whole(self.messages, self._tools, invite=not answered, sampled=places)
        sampled = [*self.episode.mask, *[False] * len(self._unanswered)]
        found: Comparison = compare(ours, theirs, sampled, self._template.bytes_of, unfinished=answered)
        real = self._difference(found.real, ours, theirs) if found.real else None
        return Checked(real, [self._difference(place, ours, theirs) for place in found.retokenised])

    def _difference(self, at: Parting, ours: Sequence[int], theirs: Sequence[int]) -> Difference:
        turn = [turn for turn in self._turns if turn.start <= at.index][-1]
        message = self._message_at(turn, self._template.decode(theirs[: at.other]))
        return Difference(
            at.index,
            ours[at.index] if at.index < len(ours) else None,
            theirs[at.other] if at.other < len(theirs) else None,
            self._around(ours, at.index),
            self._around(theirs, at.other),
            message,
            str(self.messages[message].get("role")),
            at.index < len(self.episode.mask) and self.episode.mask[at.index],
        )

    def _around(self, tokens: Sequence[int], index: int) -> str:
        return self._template.decode(tokens[max(index - _AROUND, 0) : index + _AROUND + 1])

    def _message_at(self, turn: _Turn, before: str) -> int:
        """Which of a turn's messages goes on behind the text `before`."""
        places = [one.first for one in self._turns if one.sampled]
        for place in range(turn.first, turn.last):
            try:
                text = self._template.render(self.messages[: place + 1], self._tools, invite=False, sampled=places)
            except TranscriptError:  # a template need not take every beginning of a conversation
                continue
            if len(self._template.unguarded(text)) > len(before):
                return place
        return turn.last
